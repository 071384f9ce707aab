"""Splits: N raw examples with their targets, fetched by index."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from ..errors import PatchbayesError

if TYPE_CHECKING:
    from .preparation import Preparation

Task = Literal["classification", "regression"]


class Split(ABC):
    """N examples as they were stored.

    Inputs are uint8 pixels (C, H, W) or float32 values (F,); targets are class numbers (int64) or D values (float32).
    """

    @property
    @abstractmethod
    def targets(self) -> Tensor:
        """All targets: (N,) int64 or (N, D) float32."""

    @abstractmethod
    def fetch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Raw inputs (B, ...) and targets (B,) or (B, D) of the examples numbered `indices` (B,)."""

    def fetch_augmented(
        self, indices: Tensor, preparation: "Preparation", generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """As `fetch`, each image changed at random as the preparation's augmentation says."""
        raw, targets = self.fetch(indices)
        return preparation.augment(raw, generator), targets

    @abstractmethod
    def subset(self, indices: Tensor) -> "Split":
        """The examples numbered `indices`, in that order, as a split of their own."""

    def __len__(self) -> int:
        return len(self.targets)


class ArraySplit(Split):
    """Examples in memory. inputs (N, C, H, W) uint8 or (N, F) float32; targets (N,) int64 or (N, D) float32."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        if len(inputs) != len(targets):
            raise PatchbayesError(f"ArraySplit: {len(inputs)} inputs and {len(targets)} targets; as many of each.")
        self.inputs = inputs
        self._targets = targets

    @property
    def targets(self) -> Tensor:
        return self._targets

    def fetch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        return self.inputs[indices], self._targets[indices]

    def subset(self, indices: Tensor) -> "ArraySplit":
        return ArraySplit(self.inputs[indices], self._targets[indices])


def shuffled(length: int, seed: int) -> Tensor:
    """The numbers 0..length-1 in an order given by the seed."""
    return torch.randperm(length, generator=torch.Generator().manual_seed(seed))
