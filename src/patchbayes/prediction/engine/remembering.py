"""Captures of a network, remembered while its structure is the same, and not longer."""

import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...posteriors.posterior import Posterior
from .counts import Work

_INTERNAL = frozenset(vars(nn.Module()))
_PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, type, slice)
_PLAIN_TYPES = frozenset((*_PLAIN, bool)) - {slice}  # hashable, and without those derived from them: faster to ask
_SEVERAL = (tuple, list, set, frozenset)
_FLAT_WEIGHTS = ("_flat_weights", "_flat_weight_refs")  # recurrent layers make these anew from their parameters
_MOST = 16  # forms of call that are remembered for a network


@dataclass
class Form:
    """One form of call of a network: what was found out about it.

    networks   captures that hold for different sizes of the arguments.
    reason     why the network cannot be captured, where it cannot.
    work       what one draw by the loop does; `spent`: seconds of loops so far. Both are counted, not measured.
    passes     of loops so far.
    """

    networks: list[Any] = field(default_factory=list)
    reason: str | None = None
    work: Work | None = None
    spent: float = 0.0
    passes: int = 0
    dynamic: dict[int, set[int]] = field(default_factory=dict)


class Remembered:
    """The forms of one network in one state of its structure."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.structure: Any = None
        self.forms: dict[Any, Form] = {}

    def form(self, structure: Any, key: Any) -> Form:
        with self.lock:
            if structure != self.structure:
                self.structure, self.forms = structure, {}
            if key not in self.forms and len(self.forms) >= _MOST:
                del self.forms[next(iter(self.forms))]
            return self.forms.setdefault(key, Form())


_REMEMBERED: "weakref.WeakKeyDictionary[nn.Module, Remembered]" = weakref.WeakKeyDictionary()
_LOCK = threading.RLock()  # collecting garbage, which may happen anywhere, runs code of others


def form_of(model: nn.Module, leaves: list[Any], spec: Any) -> Form:
    """What is known of calls with arguments like these."""
    with _LOCK:
        remembered = _REMEMBERED.get(model)
        if remembered is None:
            remembered = _REMEMBERED[model] = Remembered()
    return remembered.form(structure_of(model), _key(leaves, spec))


def forms_of(model: nn.Module) -> list[Form]:
    """All that is remembered of a network."""
    return list(_REMEMBERED[model].forms.values()) if model in _REMEMBERED else []


def _key(leaves: list[Any], spec: Any) -> tuple[Any, ...]:
    described = tuple(
        (leaf.dim(), leaf.dtype, leaf.device, _order(leaf)) if isinstance(leaf, Tensor) else _described(leaf, 2)
        for leaf in leaves
    )
    return str(spec), described


def _order(tensor: Tensor) -> str:
    """How a tensor lies in memory, where operations keep to it: channels last or not."""
    dimensions = tensor.dim()
    if dimensions < 4 or dimensions > 5 or tensor.is_contiguous():
        return ""
    last = torch.channels_last if dimensions == 4 else torch.channels_last_3d
    return "channels_last" if tensor.is_contiguous(memory_format=last) else ""


def structure_of(model: nn.Module) -> tuple[Any, ...]:
    """Equal exactly when a capture of the network still holds: modules, their attributes, shapes and kinds of tensors."""
    found: list[Any] = []
    seen: dict[int, Any] = {}
    for module in modules_of(model):
        _add_state(found, module, seen)
    return tuple(found)


def modules_of(model: nn.Module) -> list[nn.Module]:
    """All modules of a network, each once, in no particular order, but always the same."""
    modules: dict[nn.Module, None] = {model: None}
    waiting = [model]
    while waiting:
        for child in waiting.pop()._modules.values():
            if child is not None and child not in modules:
                modules[child] = None
                waiting.append(child)
    return list(modules)


def _add_state(found: list[Any], module: nn.Module, seen: dict[int, Any]) -> None:
    state = module.__dict__
    found += (id(module), type(module), len(state["_forward_pre_hooks"]) + len(state["_forward_hooks"]))
    if isinstance(module, Posterior) and module.settled:
        found.append(module.method)
    else:
        derived = _FLAT_WEIGHTS if isinstance(module, nn.RNNBase) else ()
        for name in [name for name in state if name not in _INTERNAL]:
            if name in derived or name.startswith("_patchbayes"):
                continue
            value = state[name]
            if type(value) not in _PLAIN_TYPES:  # one configuration may hang on every module
                known = seen.get(id(value))
                value = known if known is not None else seen.setdefault(id(value), _described(value, 3))
            found += (name, type(value), value)
    for tensors in (state["_parameters"], state["_buffers"]):
        for name, tensor in tensors.items():
            if tensor is None:
                found += (name, None)
            else:
                found += (name, tensor.shape, tensor.dtype, tensor.device)
                if tensor.dim() > 3:
                    found.append(_order(tensor))


def _described(value: Any, depth: int) -> Any:
    """Plain values by their value, containers and plain objects by their content, all else by identity."""
    kind = type(value)
    if depth and isinstance(value, dict):
        return kind, *map(str, value), _content(value.values(), depth - 1)
    if depth and isinstance(value, _SEVERAL) and kind is not torch.Size:
        return kind, _content(value, depth - 1)
    if isinstance(value, nn.Module):
        return id(value)
    if kind in _PLAIN_TYPES or isinstance(value, _PLAIN):
        return kind, value if not isinstance(value, slice) else str(value)
    if isinstance(value, nn.Parameter):
        return value.shape, value.dtype, value.device
    if isinstance(value, Tensor):
        plain = kind is Tensor and not value.is_inference()  # others have no version, or no memory of their own
        return (id(value), value._version, value.data_ptr()) if plain else id(value)
    if depth and hasattr(value, "__dict__") and not callable(value):
        return id(value), *vars(value), _content(vars(value).values(), depth - 1)
    return id(value)


def _content(values: Iterable[Any], depth: int) -> tuple[Any, ...]:
    return tuple([(type(v), v) if type(v) in _PLAIN_TYPES else _described(v, depth) for v in values])
