"""A patched module: a class of its own that reads random parameters from the current draw and runs under its posterior."""

import copy
import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..draws.draws import RECORD
from ..errors import PatchbayesError
from ..posteriors.posterior import CHILD, Posterior, SiteDraw, set_value_
from .frames import MEAN, Frame, frame_of, in_backward, pushed, raise_unknown_draw, running_networks
from .network import SITE, Site, raise_copied
from .offloading import brought_in, is_offloaded, rebind_forward_
from .roots import MAKERS, derived_class, original_class, root_class
from .sharding import refuse_replicas

_TIED = "_patchbayes_tied"


def install_site_(site: Site, posterior: Posterior, values: dict[str, Tensor], generator: torch.Generator) -> None:
    """Start the posterior from the module's values, as its child, and let the module read and run through it."""
    module = site.module
    module._modules[CHILD] = posterior.train(module.training)
    module.__dict__[SITE] = site
    before = dict(module._parameters)
    posterior.start_(values, generator)
    own = {id(parameter): key for key, parameter in posterior.named_parameters()}
    site.taken = {name: own[id(before[name])] for name in posterior.names if id(before[name]) in own}
    patched = _site_class(original_class(module), posterior.names)
    module.__class__ = root_class(patched) if RECORD in module.__dict__ else patched
    rebind_forward_(module)
    # A hook that does nothing tells fused paths of torch (TransformerEncoderLayer) not to pass the layer's forward by.
    handles = [module.register_load_state_dict_pre_hook(_load_ordinary), module.register_forward_pre_hook(_ignore)]
    for name in posterior.names:
        for _, other, other_name in site.tied.get(name, []):
            known = other.__dict__.setdefault(_TIED, {})
            known[other_name] = (site, name)
            other.__dict__.setdefault("_patchbayes_order", tuple(other._parameters))
            if name not in posterior.kept:
                other._parameters.pop(other_name)
            other.__class__ = _tied_class(original_class(other), tuple(known))
            if "_patchbayes_tied_handle" not in other.__dict__:
                other.__dict__["_patchbayes_tied_handle"] = other.register_load_state_dict_pre_hook(_load_tied)
    if isinstance(module, nn.RNNBase) and posterior.names:
        module.__dict__.pop("_flat_weights")  # a property reads them from the draw
    module.__dict__["_patchbayes_site_handles"] = handles


def is_tied(module: nn.Module) -> bool:
    """Whether a module shares a parameter with a site and reads it from there."""
    return _TIED in module.__dict__


def remove_site_(site: Site, values: Mapping[str, Tensor]) -> None:
    """Give the module its ordinary parameters and buffers back, with the given values, in their old order."""
    module, posterior = site.module, site.posterior
    kept = posterior.kept
    learned = dict(posterior.named_parameters())
    for handle in module.__dict__.pop("_patchbayes_site_handles"):
        handle.remove()
    del module.__dict__[SITE], module._modules[CHILD]
    plain = original_class(module)
    module.__class__ = root_class(plain) if RECORD in module.__dict__ else plain
    rebind_forward_(module)
    for name in posterior.names:
        parameter = module._parameters.get(name)
        if parameter is None and name in site.taken:  # the same object that was there before patching
            parameter = learned[site.taken[name]]
        elif parameter is None:
            parameter = nn.Parameter(values[name], any(p.requires_grad for p in learned.values()))
        layout = site.layouts.get(name, torch.contiguous_format)
        set_value_(parameter, values[name].detach().clone(memory_format=layout))
        parameter.__dict__.pop("_patchbayes_shape_before", None)
        module._parameters[name] = parameter
        for _, other, other_name in site.tied.get(name, []):
            if name not in kept:
                other._parameters[other_name] = parameter
            other.__dict__[_TIED].pop(other_name)
            if not other.__dict__[_TIED]:
                del other.__dict__[_TIED]
                other.__class__ = original_class(other)
                other.__dict__.pop("_patchbayes_tied_handle").remove()
                order = other.__dict__.pop("_patchbayes_order")
                other._parameters = {key: other._parameters[key] for key in order}
    module._parameters = {name: module._parameters[name] for name in site.parameter_order}
    for name, value in values.items():
        if name in module._buffers:
            module._buffers[name] = value.detach().clone()
    if isinstance(module, nn.RNNBase) and posterior.names:
        module._init_flat_weights()


def _site_class(cls: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """The class of a patched module: its random parameters are properties, its forward goes through the posterior."""

    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _run_site(self, args, kwargs)

    def run(self: nn.Module, values: Mapping[str, Tensor] | None, *args: Any, **kwargs: Any) -> Any:
        return _run_layer(self, cls, values, args, kwargs)

    def namespace() -> dict[str, Any]:
        members: dict[str, Any] = {name: _drawn_property(name) for name in names}
        members |= {"forward": forward, "_patchbayes_forward": run, "__setattr__": _set_attribute(cls, names)}
        members["_replicate_for_data_parallel"] = refuse_replicas
        if issubclass(cls, nn.RNNBase) and names:
            members |= {"_flat_weights": property(_flat_weights, _ignore), "_update_flat_weights": _ignore}
            members["__setstate__"] = _set_state
        return members

    return derived_class(cls, ("site", *names), namespace)


def _flat_weights(module: nn.RNNBase) -> list[Tensor]:
    return [getattr(module, name) for name in module._flat_weights_names]


def _set_state(module: nn.RNNBase, state: dict[str, Any]) -> None:
    """The class's own reads weights while a copy is made; what it leaves out of a state is needed for the next copy."""
    nn.Module.__setstate__(module, {"_flat_weight_refs": [], **state})


def _ignore(_module: nn.Module, *_: Any) -> None:
    """In place of keeping weights that are drawn at every call."""


def _tied_class(cls: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """The class of a module that shares parameters with a site: they are properties, all else is as it was."""
    return derived_class(cls, ("tied", *names), lambda: {name: _tied_property(name) for name in names})


MAKERS["site"], MAKERS["tied"] = _site_class, _tied_class


def _drawn_property(name: str) -> property:
    return property(lambda self: self.__dict__[SITE].value(name))


def _tied_property(own_name: str) -> property:
    def value(self: nn.Module) -> Tensor:
        site, name = self.__dict__[_TIED][own_name]
        return site.value(name)

    return property(value)


def _set_attribute(cls: type[nn.Module], names: tuple[str, ...]) -> Any:
    def __setattr__(self: nn.Module, name: str, value: Any) -> None:
        if name not in names:
            cls.__setattr__(self, name, value)
            return
        site: Site = self.__dict__[SITE]
        if not isinstance(value, Tensor) or value.shape != site.value(name).shape:
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise PatchbayesError(
                f'"{site.name}.{name}" is patched: expected a tensor of shape {tuple(site.value(name).shape)} for all of its '
                f"components, got {shape}."
            )
        _set_all_(site, name, value)

    return __setattr__


def _set_all_(site: Site, name: str, value: Tensor) -> None:
    """`module.weight = value`: every component takes that value."""
    again = copy.deepcopy(site.posterior, {id(site.module): site.module})
    again.method = site.method.without_spread()
    _start_(site, again, {name: value})


@torch.no_grad()
def _start_(site: Site, again: Posterior, values: Mapping[str, Tensor]) -> None:
    """Start some of a site's parameters anew, through a copy of its posterior."""
    means = {name: mean.detach() for name, mean in site.posterior.mean().items()}
    given = {name: value.detach().to(means[name]) for name, value in values.items()}
    again.start_(means | given, torch.Generator().manual_seed(site.posterior.stream))
    own = dict(site.posterior.named_parameters())
    taken = {site.taken.get(name) for name in values}
    named = {key for key in own if key in taken or key.rpartition(".")[2] in values}
    if not named and not values.keys() <= set(site.posterior.kept):
        named = set(own)  # it has them in a form of its own
    for key, parameter in again.named_parameters():
        if key in named:
            own[key].copy_(parameter)
    for name, value in given.items():
        if name in site.module._parameters:
            site.module._parameters[name].copy_(value)  # type: ignore[union-attr]


def _run_site(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The module's forward under its posterior, with the draw of the running call."""
    site: Site = module.__dict__[SITE]
    network, posterior = site.network, site.posterior
    if torch.compiler.is_dynamo_compiling():
        draw = network.compiling
        d = site.draw_of(draw)
        output = posterior.apply_to(module, args, kwargs, d)
        if d is not None and "log_prob" in d:
            draw.log_probs[site.name] = d["log_prob"]
        return output
    frame = frame_of(network)
    if frame is not None:
        return _apply(site, frame, args, kwargs)
    with pushed(Frame(network, _draw_outside(site, module), running=False)) as frame:
        return _apply(site, frame, args, kwargs)


def _apply(site: Site, frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    posterior = site.posterior
    if is_offloaded(posterior):
        with brought_in(posterior):
            return _apply(site, frame, args, kwargs)
    d = site.draw_of(frame.draw)
    with frame.giving(site, _Once(site, d)):
        output = posterior.apply_to(site.module, args, kwargs, d)
    if d is not None and "log_prob" in d:
        frame.draw.log_probs[site.name] = d["log_prob"]
    return output


class _Once:
    """The values of a site under its draw, made when they are first asked for and then kept."""

    __slots__ = ("d", "made", "site")

    def __init__(self, site: Site, d: SiteDraw | None) -> None:
        self.site, self.d = site, d
        self.made: Mapping[str, Tensor] | None = None

    def __call__(self) -> Mapping[str, Tensor]:
        if self.made is None:
            self.made = self.site.values_of(self.d)
        return self.made


def _draw_outside(site: Site, module: nn.Module) -> Any:
    """The draw of a site that runs outside a forward call of the network."""
    network = site.network
    if in_backward():
        draw = network.draw_in_backward()
        if draw is None:
            raise_unknown_draw(f'the site "{site.name}"')
        return draw
    for other in running_networks():
        if any(own.name == site.name and own.method == site.method for own in other.sites):
            raise_copied(site.name)
    if not module.training and network.eval == "mean":
        return MEAN
    raise PatchbayesError(
        f'The site "{site.name}" ran outside a forward call of the patched network, so no draw was made for it.\n'
        "  do       with patchbayes.use_draw(model): ... around calls such as forward_features() or a part of the network."
    )


def _run_layer(
    module: nn.Module,
    cls: type[nn.Module],
    values: Mapping[str, Tensor] | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """The forward of the module's own class, with given values for its random parameters, or the current ones."""
    site: Site = module.__dict__[SITE]
    if values is None:
        return cls.forward(module, *args, **kwargs)
    if torch.compiler.is_dynamo_compiling():
        site.override = values
        output = cls.forward(module, *args, **kwargs)
        site.override = None
        return output
    frame = frame_of(site.network)
    assert frame is not None
    with frame.giving(site, lambda: values):
        return cls.forward(module, *args, **kwargs)


def _load_ordinary(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Let a checkpoint of the unpatched network start the posterior anew, and one of version 0.1.0 fill it."""
    site: Site = module.__dict__[SITE]
    posterior = site.posterior
    old = _stored_by_0_1_0(state_dict, prefix)
    if old:
        for key, _value in old.values():
            del state_dict[key]
        state_dict.update({prefix + k: v for k, v in posterior.upgrade({n: v for n, (_, v) in old.items()}).items()})
        return
    if any(key.startswith(f"{prefix}{CHILD}.") for key in state_dict):
        for name in set(posterior.names) - set(posterior.kept):
            state_dict.pop(prefix + name, None)  # a folder of save_pretrained names the mean beside the components
        return
    shapes = {name: mean.shape for name, mean in posterior.mean().items()}
    found = {n: state_dict[prefix + n] for n in posterior.names if prefix + n in state_dict}
    values = {n: value for n, value in found.items() if value.shape == shapes[n]}
    if not values:
        return
    again = copy.deepcopy(posterior, {id(module): module})
    means = {n: mean.detach() for n, mean in posterior.mean().items()}
    again.start_(means | values | _buffers(module, state_dict, prefix), torch.Generator().manual_seed(posterior.stream))
    kept, missing = posterior.kept, set(posterior.names) - values.keys()
    for name in values:
        if name not in kept:
            del state_dict[prefix + name]
    for key, started in again.state_dict().items():
        if key.rpartition(".")[2] not in missing:
            state_dict[f"{prefix}{CHILD}.{key}"] = started


def _buffers(module: nn.Module, state_dict: dict[str, Any], prefix: str) -> dict[str, Tensor]:
    return {name: state_dict[prefix + name] for name in module._buffers if prefix + name in state_dict}


def _stored_by_0_1_0(state_dict: dict[str, Any], prefix: str) -> dict[str, tuple[str, Tensor]]:
    """What version 0.1.0 stored for a site: name -> (key, tensor)."""
    start, end = f"{prefix}parametrizations.", ".original"
    found = {
        k[len(start) : -len(end)]: (k, v) for k, v in state_dict.items() if k.startswith(start) and k.endswith(end)
    }
    start = f"{prefix}component_"
    return found | {k[len(prefix) :]: (k, v) for k, v in state_dict.items() if k.startswith(start)}


def _load_tied(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Parameters that a site holds too start the site anew, as its own would: a file may name them once."""
    for own_name, (site, name) in module.__dict__[_TIED].items():
        if own_name in module._parameters:
            continue
        state_dict.pop(f"{prefix}parametrizations.{own_name}.original", None)
        value = state_dict.pop(prefix + own_name, None)
        if value is not None and value.shape == site.posterior.mean()[name].shape:
            _start_(site, copy.deepcopy(site.posterior, {id(site.module): site.module}), {name: value})
