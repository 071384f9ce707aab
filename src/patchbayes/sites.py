"""A patched module: the parametrization that shows the current draw, and the hooks that its method needs."""

from typing import Any

import torch
from torch import Tensor, nn

from .errors import PatchbayesError
from .layout import Drawn
from .network import Site, in_backward, require_restored, warn_single_draw
from .posteriors.dropout import DropoutPosterior
from .posteriors.mixture import MixturePosterior
from .posteriors.posterior import is_bias
from .schemes import assign

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class DrawnParameter(nn.Module):
    """The parametrization of one parameter of a site: (K, *shape) in, the value of the current draw (*shape) out."""

    def __init__(self, site: Site, name: str, stored_shape: torch.Size) -> None:
        super().__init__()
        self.site = site
        self.name = name
        self.stored_shape = stored_shape

    def forward(self, stored: Tensor) -> Tensor:
        posterior = self.site.posterior
        if isinstance(posterior, MixturePosterior) and draws_per_example(self.site):
            neutral = torch.zeros if is_bias(self.name) else torch.ones
            return neutral(stored.shape[1:], dtype=stored.dtype, device=stored.device)
        return posterior.realize_one(self.name, stored, self.site.network.current)

    def right_inverse(self, value: Tensor) -> Tensor:
        """`module.weight = value` gives every component that value."""
        return value if value.shape == self.stored_shape else value.expand(self.stored_shape).clone()

    def extra_repr(self) -> str:
        return f"{self.site.method.label}, {self.name}"


def draws_per_example(site: Site) -> bool:
    """Whether the current draw gives this site a component for each example (a network's own draw, never one passed in)."""
    method = site.method
    return bool(getattr(method, "per_example", False)) and not site.network.current.explicit


def install_site_(site: Site) -> None:
    """Parametrize the site's module (its stored tensors are in place already) and add the hooks its method needs."""
    module = site.module
    module.__dict__["_patchbayes_site"] = site
    handles = [module.register_forward_pre_hook(_require_draw)]
    for name in site.posterior.names:
        shape = module._parameters[name].shape  # type: ignore[union-attr]
        nn.utils.parametrize.register_parametrization(module, name, DrawnParameter(site, name, shape), unsafe=True)
        for _, other, other_name in site.tied.get(name, []):
            other.__dict__.setdefault("_patchbayes_tied", {})[other_name] = (site, name)
            other.__dict__.setdefault("_patchbayes_tied_order", tuple(other._parameters))
            drawn_too = DrawnParameter(site, name, shape)
            nn.utils.parametrize.register_parametrization(other, other_name, drawn_too, unsafe=True)
            if "_patchbayes_tied_handle" not in other.__dict__:
                other.__dict__["_patchbayes_tied_handle"] = other.register_load_state_dict_pre_hook(_load_ordinary_tied)
    handles.append(module.register_load_state_dict_pre_hook(_load_ordinary))
    if isinstance(site.posterior, DropoutPosterior):
        handles.append(module.register_forward_pre_hook(_mask_input, with_kwargs=True))
    if getattr(site.method, "per_example", False):
        handles.append(module.register_forward_hook(_affine_per_example))
    if getattr(site.method, "statistics", "shared") == "per_component" and _has_statistics(module):
        number = site.posterior.method.outcomes  # type: ignore[attr-defined]
        for name in _STATISTICS:
            statistic = getattr(module, name)
            module.register_buffer(f"component_{name}", statistic.unsqueeze(0).repeat(number, *[1] * statistic.dim()))
        handles.append(module.register_forward_pre_hook(_take_statistics))
        handles.append(module.register_forward_hook(_return_statistics))
    if isinstance(module, nn.RNNBase) and site.posterior.names:
        cls: Any = type(module)  # made by parametrize for this module alone
        cls._init_flat_weights, cls._update_flat_weights = _forget_flat_weights, _keep_flat_weights
        _forget_flat_weights(module)
        handles.append(module.register_forward_pre_hook(_gather_flat_weights))
        handles.append(module.register_forward_hook(_drop_flat_weights, always_call=True))
    module.__dict__["_patchbayes_handles_site"] = handles


def remove_site_(site: Site, values: dict[str, Tensor], statistics: dict[str, Tensor]) -> None:
    """Give the module its ordinary parameters back, with the given values, in their old order."""
    module = site.module
    for handle in module.__dict__.pop("_patchbayes_handles_site"):
        handle.remove()
    del module.__dict__["_patchbayes_site"]
    for touched in (module, *(other for others in site.tied.values() for _, other, _ in others)):
        _take_own_class_(touched)
    for name in site.posterior.names:
        stored = site.posterior.stored(name)
        stored.data = values[name].detach().clone(memory_format=site.layouts.get(name, torch.contiguous_format))
        stored.grad = None
        stored.__dict__.pop("_patchbayes_shape", None)
        nn.utils.parametrize.remove_parametrizations(module, name, leave_parametrized=False)
        for _, other, other_name in site.tied.get(name, []):
            nn.utils.parametrize.remove_parametrizations(other, other_name, leave_parametrized=False)
            other.__dict__["_patchbayes_tied"].pop(other_name)
            if not other.__dict__["_patchbayes_tied"]:
                del other.__dict__["_patchbayes_tied"]
                other.__dict__.pop("_patchbayes_tied_handle").remove()
                order = other.__dict__.pop("_patchbayes_tied_order")
                other._parameters = {key: other._parameters[key] for key in order}
    module._parameters = {name: module._parameters[name] for name in site.parameter_order}
    for name, value in statistics.items():
        del module._buffers[f"component_{name}"]
        module._buffers[name] = value.detach().clone()
    if isinstance(module, nn.RNNBase) and site.posterior.names:
        module._init_flat_weights()


def _take_own_class_(module: nn.Module) -> None:
    """A deepcopy shares the class that parametrize made, and removing a parametrization takes a property from the class."""
    cls = type(module)
    if nn.utils.parametrize.is_parametrized(module):
        namespace = {key: value for key, value in vars(cls).items() if key not in ("__dict__", "__weakref__")}
        module.__class__ = type(cls.__name__, cls.__bases__, namespace)


def component_statistics(module: nn.Module) -> dict[str, Tensor]:
    """Batch-norm running statistics of all components, (K, ...) each; empty where they are shared."""
    found = {name: module._buffers.get(f"component_{name}") for name in _STATISTICS}
    return {name: value for name, value in found.items() if value is not None}


def _require_draw(module: nn.Module, _args: Any) -> None:
    if torch.compiler.is_compiling():
        return
    site: Site = module.__dict__["_patchbayes_site"]
    network = site.network
    if network.active:
        return
    if in_backward():
        require_restored(network, f'the site "{site.name}"')
        return
    if network.held is not None:
        network.current = network.held
        return
    if module.training and torch.is_grad_enabled():
        raise PatchbayesError(
            f'The site "{site.name}" ran outside a forward call of the patched network, so no draw was made for it; '
            "training would go on with an old draw.\n"
            "  do       with patchbayes.drawn(model): ... around calls such as forward_features() or a part of the network."
        )
    warn_single_draw(network)


def _mask_input(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    site: Site = module.__dict__["_patchbayes_site"]
    posterior = site.posterior
    assert isinstance(posterior, DropoutPosterior)
    for place, value in [*enumerate(args), *kwargs.items()]:
        if isinstance(value, Tensor) and value.is_floating_point():
            masked = posterior.mask(value, site.network.current)
            if isinstance(place, int):
                return (*args[:place], masked, *args[place + 1 :]), kwargs
            return args, {**kwargs, str(place): masked}
    raise PatchbayesError(
        f'Dropout before "{site.name}" ({type(module).__name__}): it was given no floating-point tensor.'
    )


def _affine_per_example(module: nn.Module, _args: Any, output: Tensor) -> Tensor:
    site: Site = module.__dict__["_patchbayes_site"]
    posterior, network = site.posterior, site.network
    if not draws_per_example(site):
        return output
    keys = network.current.example_keys(output.shape[0])
    length = sum(span.length for span in posterior.spans)
    indices = assign(network.layout, keys, posterior.offset, posterior.offset + length, output.device)
    assert isinstance(posterior, MixturePosterior)
    for name in posterior.names:
        values = posterior.value(name, posterior.stored(name), indices, network.current.key)
        trailing = isinstance(module, nn.LayerNorm | nn.RMSNorm)
        padding = [1] * (output.dim() - values.dim())
        shape = (len(values), *padding, *values.shape[1:]) if trailing else (*values.shape, *padding)
        output = output + values.view(shape) if is_bias(name) else output * values.view(shape)
    return output


def _has_statistics(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None


def component_of(site: Site, drawn: Drawn) -> Tensor:
    """The component that a draw gives to a site with one draw for the whole layer, (1,) int64."""
    if site.method.outcomes == 1:  # type: ignore[attr-defined]
        return torch.zeros(1, dtype=torch.int64, device=drawn.indices.device)
    return drawn.indices[site.posterior.offset : site.posterior.offset + 1]


def _current_component(module: nn.Module) -> Tensor:
    site: Site = module.__dict__["_patchbayes_site"]
    return component_of(site, site.network.current)


def _take_statistics(module: nn.Module, _args: Any) -> None:
    which = _current_component(module)
    for name, stored in component_statistics(module).items():
        module._buffers[name] = stored.index_select(0, which.to(stored.device))[0]


def _return_statistics(module: nn.Module, _args: Any, _output: Any) -> None:
    if not module.training:
        return
    which = _current_component(module)
    with torch.no_grad():
        for name, stored in component_statistics(module).items():
            stored.index_copy_(0, which.to(stored.device), module._buffers[name].unsqueeze(0))  # type: ignore[union-attr]


def _gather_flat_weights(module: nn.RNNBase, _args: Any) -> None:
    module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]


def _drop_flat_weights(module: nn.RNNBase, _args: Any, _output: Any) -> None:
    _forget_flat_weights(module)


def _forget_flat_weights(module: nn.RNNBase) -> None:
    module._flat_weights = []  # drawn tensors are not leaves: keeping them would break deepcopy


def _keep_flat_weights(_module: nn.RNNBase) -> None:
    """In place of the module's own update, which compares parameters with drawn tensors."""


def _load_ordinary(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Let an ordinary checkpoint of the unpatched network start the components anew."""
    site: Site = module.__dict__["_patchbayes_site"]
    _start_from(site, {name: name for name in site.posterior.names}, state_dict, prefix)
    for name, stored in component_statistics(module).items():
        key = f"{prefix}component_{name}"
        if key not in state_dict and prefix + name in state_dict:
            state_dict[key] = state_dict[prefix + name].expand_as(stored).clone()


def _load_ordinary_tied(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    for own_name, (site, name) in module.__dict__["_patchbayes_tied"].items():
        _start_from(site, {own_name: name}, state_dict, prefix)


def _start_from(site: Site, names: dict[str, str], state_dict: dict[str, Any], prefix: str) -> None:
    posterior = site.posterior
    values = {n: state_dict[prefix + own] for own, n in names.items() if prefix + own in state_dict}
    fitting = {n: v for n, v in values.items() if v.shape == posterior.stored(n).shape[1:]}
    if not fitting:
        return
    stand_in = {n: fitting.get(n, posterior.stored(n)[0]) for n in posterior.names}
    stored = posterior.start(stand_in, torch.Generator().manual_seed(posterior.stream), fresh=False)
    for own, name in names.items():
        if name in fitting:
            state_dict[f"{prefix}parametrizations.{own}.original"] = stored[name]
            del state_dict[prefix + own]
