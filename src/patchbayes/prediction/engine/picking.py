"""Which leaves of a network's output the caller looks at, and what he makes of them for each draw."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from .capture import Capture
from .counts import sizes


@dataclass
class Picked:
    """leaves   the leaves of the output that `output` needs; whole: the one that it returns as it is, or None."""

    capture: Capture
    output: Callable[[Any], Tensor]
    leaves: list[int]
    as_it_is: bool

    def collect(self, values: list[tuple[Any, int | None]], number: int) -> Tensor:
        """What `output` takes from the results of `number` draws, (D, B, ...); values and their axis, or None."""
        if self.as_it_is:
            ((value, axis),) = values
            return value if axis == 0 else value.unsqueeze(0).expand(number, *value.shape)
        results = []
        for draw in range(number):
            leaves = [None] * len(self.capture.outputs)
            for place, (value, axis) in zip(self.leaves, values, strict=True):
                leaves[place] = value if axis is None else value[draw]
            results.append(self.output(self.capture.unflatten(leaves)))
        return torch.stack(results)


def pick(capture: Capture, output: Callable[[Any], Tensor]) -> Picked:
    """Try `output` on a result without values and see what it touches; where that does not work, it gets all leaves."""
    everything = list(range(len(capture.outputs)))
    trial = [
        torch.empty(sizes(node.meta["val"]), dtype=node.meta["val"].dtype, device="meta")
        if hasattr(node, "meta") and isinstance(node.meta.get("val"), Tensor)
        else node
        for node in capture.outputs
    ]
    seen = _Seen()
    try:
        with seen:
            made = output(capture.unflatten(trial))
    except Exception:
        return Picked(capture, output, everything, False)
    touched = [*seen.values, made]
    used = [place for place, leaf in enumerate(trial) if any(leaf is other for other in touched)]
    as_it_is = len(used) == 1 and made is trial[used[0]] and not seen.values
    return Picked(capture, output, used, as_it_is)


class _Seen(TorchFunctionMode):
    """Notes every tensor that an operation takes."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.values += tree_leaves((args, kwargs))
        return func(*args, **(kwargs or {}))
