"""What a network's modules hold at one moment, to tell whether a forward pass changed it, and to put it back."""

from collections import deque
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn

SCALARS = (bool, int, float, complex, str, bytes, type(None))

PLAIN = (*SCALARS, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, range, slice)
_MOST = 32  # entries of a list or dictionary that are looked at


def described(value: Any) -> Hashable:
    """What tells a value from what it may become: kind and value of plain ones, identity and version of tensors.

    Lists, dictionaries, tuples and sets of a few plain values are told by their content, all else by identity.
    """
    kind = value.__class__
    if kind is float:
        return kind, value.hex()
    if kind in _KINDS:
        return kind, value
    if isinstance(value, Tensor):
        return kind, id(value), -1 if value.is_inference() else value._version
    if isinstance(value, list | dict | tuple | set) and len(value) <= _MOST:
        items = [*value, *value.values()] if isinstance(value, dict) else list(value)
        if all(item.__class__ in _KINDS for item in items):
            return kind, repr(value)
    return kind, id(value)


_KINDS = frozenset(PLAIN) - {slice}


def has_hooks(module: nn.Module) -> bool:
    """Whether others look at what passes; a layer's own hook, which makes sure of a draw, does not count."""
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    return any(not getattr(hook, "__module__", "").startswith("patchbayes.") for hook in hooks)


class Attributes:
    """The attributes of all modules, the content of lists, dictionaries and sets one level deep, and tensors' versions."""

    def __init__(self, model: nn.Module) -> None:
        self._before = [(vars(module), dict(vars(module))) for module in model.modules()]
        self._inside = [
            (value, _content(value)) for _, held in self._before for value in held.values() if _is_container(value)
        ]
        tensors = [value for _, held in self._before for value in held.values()]
        tensors += [value for _, content in self._inside for value in _values(content)]
        self._versions = [(t, t._version) for t in tensors if isinstance(t, Tensor) and not t.is_inference()]

    def changed(self) -> bool:
        """Whether anything is different now."""
        return (
            any(now.keys() != held.keys() or _differ(now.values(), held.values()) for now, held in self._before)
            or any(_changed(value, content) for value, content in self._inside)
            or any(tensor._version != version for tensor, version in self._versions)
        )

    def restore(self) -> None:
        """Put everything back but the values of tensors."""
        for value, content in self._inside:
            if _changed(value, content):
                value.clear()
                (value.update if isinstance(value, dict | set) else value.extend)(content)
        for now, held in self._before:
            if now.keys() != held.keys() or _differ(now.values(), held.values()):
                now.clear()
                now.update(held)


def _is_container(value: Any) -> bool:
    return isinstance(value, list | dict | set | deque)


def _content(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else set(value) if isinstance(value, set) else list(value)


def _values(content: Any) -> list[Any]:
    return list(content.values() if isinstance(content, dict) else content)


def _changed(value: Any, content: Any) -> bool:
    if isinstance(value, set):
        return bool(value != content)
    if isinstance(value, dict) and list(value) != list(content):
        return True
    return _differ(_values(value), _values(content))


def _differ(now: Any, before: Any) -> bool:
    return len(now) != len(before) or any(not _same(a, b) for a, b in zip(now, before, strict=True))


def _same(a: Any, b: Any) -> bool:
    return a is b or (isinstance(a, SCALARS) and type(a) is type(b) and a == b)
