"""Dataset: the parts of a data set, and how their examples are prepared."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import PatchbayesError
from .columns import Column
from .preparation import Preparation
from .splits import Split, Task

_PART = re.compile(r"(\w+)(?:\[(-?\d+)?:(-?\d+)?\])?")


@dataclass(frozen=True)
class Dataset:
    """What a network is trained, selected and tested on.

    name: as given to `read`. classes: class names, or the names of the targets of a regression.
    features: column names of a table, () for images. columns: what the columns of a CSV file were taken for, () elsewhere.
    """

    name: str
    task: Task
    train: Split
    held_out: Split | None
    test: Split
    classes: tuple[str, ...]
    features: tuple[str, ...]
    preparation: Preparation
    columns: tuple[Column, ...] = ()

    def __post_init__(self) -> None:
        if self.preparation.augmentation != "none" and len(self.input_shape) != 3:
            raise PatchbayesError(
                f"{self.name}: augmentation {self.preparation.augmentation!r} is for images, and its inputs are "
                f'{self.input_shape}; use "none".'
            )

    @property
    def input_shape(self) -> tuple[int, ...]:
        """(C, H, W) or (F,)."""
        return tuple(self.train.fetch(torch.zeros(1, dtype=torch.int64))[0].shape[1:])

    @property
    def num_outputs(self) -> int:
        """Classes, or targets of a regression."""
        return len(self.classes)

    def part(self, text: str) -> Split:
        """The examples that a text names: "train", "held_out", "test", "test[:5000]", "test[5000:10000]"."""
        match = _PART.fullmatch(text.strip())
        if match is None or match[1] not in ("train", "held_out", "test"):
            raise PatchbayesError(
                f'{self.name}: no part {text!r}; write "train", "held_out" or "test", or some of one, "test[:5000]".'
            )
        split: Split | None = getattr(self, match[1])
        if split is None:
            raise PatchbayesError(f"{self.name} has no held-out examples: read it with held_out above 0 (0.1 is 10 %).")
        if match[0] == match[1]:
            return split
        bounds = [int(bound) if bound else None for bound in match.groups()[1:]]
        chosen = range(len(split))[slice(*bounds)]
        if not chosen or any(bound is not None and abs(bound) > len(split) for bound in bounds):
            raise PatchbayesError(
                f"{self.name}: {text!r} is empty or out of range; {match[1]} has {len(split)} examples."
            )
        return split.subset(torch.tensor(chosen))

    def batches(
        self, split: Split, batch_size: int, *, order: Tensor | None = None, augment: torch.Generator | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Prepared (inputs, targets), `batch_size` examples at a time, the last batch with what is left.

        order (M,): numbers of the examples, as they shall come; all of them in their own order where None.
        augment: draws the augmentation; none where None.
        """
        if batch_size < 1:
            raise PatchbayesError(f"Dataset.batches(batch_size={batch_size}): at least one example.")
        order = torch.arange(len(split)) if order is None else order
        for start in range(0, len(order), batch_size):
            indices = order[start : start + batch_size]
            if augment is None:
                raw, targets = split.fetch(indices)
            else:
                raw, targets = split.fetch_augmented(indices, self.preparation, augment)
            yield self.preparation.inputs(raw), self.preparation.targets(targets)
