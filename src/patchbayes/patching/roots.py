"""The root of a patched network: how one draw reaches all of its sites.

The root's class is replaced by a subclass whose `forward` draws first: unlike a hook, that also holds for `model.forward(x)`
and `torch.compile(model.forward)`.
"""

import functools
from collections.abc import Callable
from typing import Any, SupportsIndex

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..draws.draws import RECORD
from ..draws.layout import NetworkDraw
from ..errors import PatchbayesError
from .frames import MEAN, Frame, frame_of, in_backward, pushed, raise_unknown_draw, set_last_draw
from .network import PatchedNetwork
from .offloading import rebind_forward_
from .sharding import refuse_replicas

GENERATOR_KEY = "patchbayes_generator"


def install_root_(root: nn.Module, network: PatchedNetwork) -> None:
    """Make `root` draw before every forward, and carry its generator in its state dict."""
    root.__class__ = root_class(type(root))
    rebind_forward_(root)
    root.__dict__[RECORD] = network
    root.__dict__["_patchbayes_handles"] = [
        root.register_state_dict_post_hook(_save_generator),
        root.register_load_state_dict_pre_hook(_load_generator),
    ]


def root_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The class of a patched root whose own class is `cls`: its forward draws first."""

    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return with_draw(self, cls.forward, args, kwargs)

    def namespace() -> dict[str, Any]:
        extended = {name: make(cls) for name, make in _extended.items()}
        members = {"forward": forward, "_replicate_for_data_parallel": refuse_replicas}
        return members | {name: method for name, method in extended.items() if method is not None}

    return derived_class(cls, ("root",), namespace)


Make = Callable[[type[nn.Module]], Callable[..., Any] | None]
_extended: dict[str, Make] = {}


def extend_roots(name: str) -> Callable[[Make], Make]:
    """Let roots have another method of this name than their own class has, made from the class; None: its own."""

    def registered(make: Make) -> Make:
        _extended[name] = make
        return make

    return registered


_derived: dict[Any, type[nn.Module]] = {}


def derived_class(
    cls: type[nn.Module], kind: tuple[str, ...], namespace: Callable[[], dict[str, Any]]
) -> type[nn.Module]:
    """A subclass that goes by the name of `cls`, and knows it as `_patchbayes_class`; one for each kind."""
    if (cls, kind) not in _derived:
        shown = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
        known = {"_patchbayes_class": cls, "_patchbayes_kind": kind, "__reduce_ex__": _described}
        _derived[cls, kind] = type(cls.__name__, (cls,), {**shown, **namespace(), **known})
    return _derived[cls, kind]


#: What makes a derived class again in another process, by the first word of its kind.
MAKERS: dict[str, Callable[[type[nn.Module], tuple[str, ...]], type[nn.Module]]] = {
    "root": lambda cls, _: root_class(cls)
}


def _described(self: nn.Module, protocol: SupportsIndex) -> tuple[Any, ...]:
    """A patched module for another process: what its own class would send, and the kinds that are derived from that class.

    The content (the modules below it, its record, its tensors) follows as for any module; copies are made the same way.
    """
    cls, plain = type(self), original_class(self)
    made = plain.__reduce_ex__(self, protocol)
    assert isinstance(made, tuple)
    make, arguments, *content = made
    kinds = []
    while cls is not plain:
        kinds.append(vars(cls)["_patchbayes_kind"])
        cls = vars(cls)["_patchbayes_class"]
    sent = tuple(plain if argument is type(self) else argument for argument in arguments)
    return remade, (tuple(reversed(kinds)), make, sent), *content


def remade(kinds: tuple[tuple[str, ...], ...], make: Callable[..., nn.Module], arguments: tuple[Any, ...]) -> nn.Module:
    """The module that `_described` described, before it is given its content."""
    module = make(*arguments)
    cls = type(module)
    for word, *names in kinds:
        cls = MAKERS[word](cls, tuple(names))
    module.__class__ = cls
    return module


def original_class(module: nn.Module) -> type[nn.Module]:
    """The class that a module had before it was patched."""
    cls = type(module)
    while "_patchbayes_class" in vars(cls):
        cls = vars(cls)["_patchbayes_class"]
    return cls


def remove_root_(root: nn.Module) -> None:
    for handle in root.__dict__.pop("_patchbayes_handles"):
        handle.remove()
    del root.__dict__[RECORD]
    root.__class__ = original_class(root)
    rebind_forward_(root)


def with_draw(root: nn.Module, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `function(root, ...)` with the draw that this call of the network computes with."""
    network: PatchedNetwork | None = root.__dict__.get(RECORD)
    if network is None:  # a slice of a patched Sequential has its class, and is a part of it like any other
        return function(root, *args, **kwargs)
    if torch.compiler.is_dynamo_compiling():
        network.compiling = network.held if network.held is not None else _next(network, root)
        return function(root, *args, **kwargs)
    frame = frame_of(network)
    if frame is not None and frame.running:
        return function(root, *args, **kwargs)
    if in_backward():
        draw = network.draw_in_backward() or (frame.draw if frame else raise_unknown_draw("the whole patched network"))
    else:
        draw = frame.draw if frame is not None else _next(network, root)
    set_last_draw(network, draw)
    network.compiling = draw  # parts of the network may be compiled by themselves
    with pushed(Frame(network, draw, running=True)):
        outputs = function(root, *args, **kwargs)
    if torch.is_grad_enabled():
        _remember_for_backward(network, draw, outputs)
    return outputs


def _next(network: PatchedNetwork, root: nn.Module) -> NetworkDraw:
    """The draw of a call that no block holds one for: in training a fresh one, or the mean while `warm_up_` says so."""
    if root.training and not network.takes_turn():
        return MEAN
    if root.training or network.eval == "draw":
        return network.advance()
    if network.eval == "error":
        raise PatchbayesError(
            'A patched network was called in eval mode, which set_eval_(model, "error") forbids.\n'
            "  do       average draws with patchbayes.predict(model, inputs, draws=...), or hold one with "
            "patchbayes.use_draw(model)."
        )
    return MEAN


def _remember_for_backward(network: PatchedNetwork, draw: NetworkDraw, outputs: Any) -> None:
    """Restore this forward's draw when backward reaches its outputs: activation checkpointing then recomputes with it."""
    leaves = tree_leaves(outputs)
    leaves += [inner for leaf in leaves if hasattr(leaf, "__dict__") for inner in tree_leaves(dict(vars(leaf)))]
    for output in leaves:
        if isinstance(output, Tensor) and output.requires_grad and not output.is_leaf:
            output.register_hook(functools.partial(_restore, network, draw))


def _restore(network: PatchedNetwork, draw: NetworkDraw, _gradient: Tensor) -> None:
    network.restore(draw)


def _save_generator(module: nn.Module, state_dict: dict[str, Any], prefix: str, _metadata: Any) -> None:
    network = module.__dict__[RECORD]
    if network.sites:  # a temperature alone draws nothing: the state dict stays the ordinary network's
        state_dict[prefix + GENERATOR_KEY] = network.generator.clone()


def _load_generator(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    state = state_dict.pop(prefix + GENERATOR_KEY, None)
    if state is not None:
        module.__dict__[RECORD].generator.copy_(state)
