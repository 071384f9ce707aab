"""What `predict` takes and returns: batches from anything, the tensor in a network's output, progress on a terminal."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ..errors import PatchbayesError


def batches(inputs: Any, select: Callable[[Any], Any] | None) -> Iterator[Any]:
    """The batches in `inputs`, one where these are tensors; of a pair of inputs and labels the inputs."""
    if is_batch(inputs):
        yield inputs if select is None else select(inputs)
        return
    if not isinstance(inputs, Iterable):
        raise PatchbayesError(f"predict: expected tensors or an iterable of batches, got a {type(inputs).__name__}.")
    for batch in inputs:
        if select is not None:
            yield select(batch)
        else:
            yield batch[0] if isinstance(batch, tuple | list) else batch


def is_batch(inputs: Any) -> bool:
    """Whether the inputs are one batch, rather than an iterable of batches."""
    return isinstance(inputs, Tensor | tuple | Mapping)


def on_device(batch: Any, device: torch.device | None) -> Any:
    """The batch on the network's device; NaN in it is refused."""
    if isinstance(batch, Mapping):
        batch = dict(batch)
    leaves, spec = tree_flatten(batch)
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and torch.isnan(leaf).any():
            raise PatchbayesError(
                f"predict: input tensor {place} holds NaN, {int(torch.isnan(leaf).sum())} of {leaf.numel()} values."
            )
    if device is not None and device.type == "meta":  # the weights are brought in layer by layer
        return batch
    return tree_unflatten([leaf.to(device) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)


def batch_size(batch: Any) -> int:
    """The number of examples of a batch."""
    sizes = [leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]
    if not sizes:
        raise PatchbayesError("predict: a batch holds no tensor; expected tensors, or select=batch -> inputs.")
    return sizes[0]


def progress(some: Iterator[Any], inputs: Any) -> Iterator[Any]:
    """The batches, with their number on the terminal where there is one and more than one batch."""
    if not sys.stderr.isatty() or is_batch(inputs):
        yield from some
        return
    total = f" of {len(inputs)}" if hasattr(inputs, "__len__") else ""
    try:
        for number, batch in enumerate(some, start=1):
            print(f"\rpredicting batch {number}{total} ", end="", file=sys.stderr, flush=True)
            yield batch
    finally:
        print("\r" + " " * 48 + "\r", end="", file=sys.stderr, flush=True)
