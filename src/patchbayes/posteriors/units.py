"""Which draw an element of a parameter belongs to where draws are for input units, and the choice element by element."""

import math

import torch
from torch import Tensor, nn

from ..layers import is_norm
from .posterior import is_bias


def unit_axis(module: nn.Module, name: str, shape: tuple[int, ...]) -> int | None:
    """The axis of a parameter that runs over input units; None for a bias, which belongs to the constant input."""
    if is_bias(name):
        return None
    if len(shape) == 1 or isinstance(module, (nn.Embedding, nn.modules.conv._ConvTransposeNd)):
        return 0
    return 1


def num_units(module: nn.Module, name: str, shape: tuple[int, ...]) -> int:
    axis = unit_axis(module, name, shape)
    if axis is None:
        return 1
    if is_norm(module):  # a weight for every normalized input, over however many axes
        return math.prod(shape)
    return shape[axis] * (int(getattr(module, "groups", 1)) if axis == 1 else 1)


_counted: dict[tuple[int, torch.device], Tensor] = {}
_KEPT = 2**16


def counting(number: int, device: torch.device) -> Tensor:
    """0 to number - 1, kept: in a training step of a small network, making them again takes as long as the pick itself."""
    if torch.compiler.is_compiling():
        return torch.arange(number, device=device)
    found = _counted.get((number, device))
    if found is None:
        found = torch.arange(number, device=device)
        if number <= _KEPT and type(found) is Tensor and not found.is_inference():  # not those of a tracer
            _counted[number, device] = found
    return found


def pick(stored: Tensor, which: Tensor) -> Tensor:
    """stored (K, *shape) at which (*lead, *shape): the element-wise choice (*lead, *shape)."""
    if which.dim() == stored.dim() - 1:
        return stored.gather(0, which.unsqueeze(0)).squeeze(0)
    lead, size = which.shape[: which.dim() - stored.dim() + 1], stored[0].numel()
    if torch.is_grad_enabled() and stored.requires_grad:
        flat = which.reshape(-1, 1, *stored.shape[1:])
        return stored.expand(flat.shape[0], *stored.shape).gather(1, flat).reshape(*lead, *stored.shape[1:])
    # Without gradients, from one long vector of all components: three times as fast.
    places = counting(size, which.device).add(which.reshape(-1, size), alpha=size)
    return stored.reshape(-1).index_select(0, places.reshape(-1)).reshape(*lead, *stored.shape[1:])


def spread(module: nn.Module, name: str, shape: tuple[int, ...], values: Tensor) -> Tensor:
    """Values of the input units (*lead, units) in the parameter's shape: (*lead, *shape)."""
    lead = values.shape[:-1]
    axis = unit_axis(module, name, shape)
    if axis is None:
        return values.reshape(*lead, *[1] * len(shape)).expand(*lead, *shape)
    if axis == 0:
        return values.reshape(*lead, -1, *[1] * (len(shape) - 1)).expand(*lead, *shape)
    blocks = int(getattr(module, "groups", 1))  # a grouped convolution: every block of rows has its own inputs
    columns = values.reshape(*lead, blocks, 1, -1, *[1] * (len(shape) - 2))
    return columns.expand(*lead, blocks, shape[0] // blocks, *shape[1:]).reshape(*lead, *shape)
