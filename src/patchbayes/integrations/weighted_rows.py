"""Rows of a table with weights that count as repetitions."""

from dataclasses import dataclass

import torch
from torch import Tensor

#: Passes over the rows that weights can ask for in one epoch.
_MOST_PASSES = 10


@dataclass(frozen=True)
class Rows:
    """Distinct rows in sorted order, with their targets and weights: the same for repeated rows as for weighted ones."""

    inputs: Tensor
    targets: Tensor
    weights: Tensor

    @property
    def total(self) -> float:
        """The sum of the weights: how many rows they stand for."""
        return float(self.weights.sum())

    def __getitem__(self, which: Tensor) -> "Rows":
        return Rows(self.inputs[which], self.targets[which], self.weights[which])

    def positions(self, generator: torch.Generator) -> Tensor:
        """Numbers of rows in a random order, each as often as its weight says: at least two, since batch norms need them."""
        number = max(2, min(round(self.total), _MOST_PASSES * len(self.weights)))
        reached = (torch.arange(number, dtype=torch.float64) + 0.5) * (self.total / number)
        rows = torch.searchsorted(self.weights.cumsum(0), reached, right=True).clamp_max(len(self.weights) - 1)
        return rows[torch.randperm(number, generator=generator)]


def in_batches(positions: Tensor, size: int) -> list[Tensor]:
    """Batches of at most `size`, none of a single row: batch norms refuse it."""
    found = list(positions.split(size))
    if len(found) > 1 and len(found[-1]) == 1:
        found[-2:] = [torch.cat(found[-2:])]
    return found
