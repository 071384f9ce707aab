"""Contents: what a reader found; from it a Dataset is made, with examples held out and statistics of the training part."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import PatchbayesError
from .columns import Column
from .dataset import Dataset
from .preparation import Augmentation, Preparation
from .splits import Split, Task, shuffled

_BLOCK = 4096
# A deviation below this share of the largest value is rounding of float32: the column is constant.
_CONSTANT = 1e-7


@dataclass(frozen=True)
class Contents:
    """Training and test examples as stored, before anything is held out or standardized.

    classes, features: as in `Dataset`. held_out: where the data come with such a part of their own.
    statistics: mean and deviation of each channel or feature, where published; those of the training part where None.
    columns: as in `Dataset`.
    """

    task: Task
    train: Split
    test: Split
    classes: tuple[str, ...]
    features: tuple[str, ...] = ()
    held_out: Split | None = None
    augmentation: Augmentation = "none"
    statistics: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    columns: tuple[Column, ...] = ()

    def dataset(self, name: str, held_out: float = 0.1, seed: int = 0) -> Dataset:
        """The data set: the share `held_out` of the training part, drawn by the seed, is kept for selection."""
        for part, split in (("train", self.train), ("held_out", self.held_out), ("test", self.test)):
            if split is not None:
                _check_targets(f"{name}, part {part}", self.task, split.targets, self.classes)
        train, kept = divided(name, self.train, self.held_out, held_out, seed)
        mean, std = self.statistics or _statistics_of_inputs(train)
        target_mean, target_std = ((), ()) if self.task == "classification" else _statistics(train.targets)
        preparation = Preparation(mean, std, self.augmentation, target_mean, target_std)
        return Dataset(name, self.task, train, kept, self.test, self.classes, self.features, preparation, self.columns)


def divided(name: str, train: Split, own: Split | None, held_out: float, seed: int) -> tuple[Split, Split | None]:
    """What is trained on and what is held out: the part of its `own` that a set has, else a share drawn by the seed."""
    if not 0 <= held_out < 1:
        raise PatchbayesError(f"{name}: held_out={held_out}; a share of the training part, at least 0 and below 1.")
    if held_out == 0 or own is not None:
        return train, own if held_out else None
    count = max(1, round(held_out * len(train)))
    if count >= len(train):
        raise PatchbayesError(f"{name}: held_out={held_out} of {len(train)} training examples leaves none to train on.")
    order = shuffled(len(train), seed)
    return train.subset(order[count:].sort().values), train.subset(order[:count].sort().values)


def _check_targets(where: str, task: Task, targets: Tensor, classes: tuple[str, ...]) -> None:
    if len(targets) == 0:
        raise PatchbayesError(f"{where}: no examples; at least one is needed.")
    if task == "classification":
        if len(classes) < 2:
            raise PatchbayesError(f"{where}: only the class {', '.join(classes)}; classification needs two or more.")
        if targets.dtype != torch.int64 or targets.dim() != 1:
            raise PatchbayesError(f"{where}: targets {targets.dtype} {tuple(targets.shape)}; class numbers int64 (N,).")
        low, high = int(targets.min()), int(targets.max())
        if low < 0 or high >= len(classes):
            raise PatchbayesError(
                f"{where}: class numbers {low} to {high}; with {len(classes)} classes, 0 to {len(classes) - 1}."
            )
    else:
        if targets.dtype != torch.float32 or targets.shape[1:] != (len(classes),):
            raise PatchbayesError(
                f"{where}: targets {targets.dtype} {tuple(targets.shape)}; float32 (N, {len(classes)}), one column for "
                f"each of {', '.join(classes)}."
            )
        if not targets.isfinite().all():
            row = int((~targets.isfinite()).any(1).nonzero()[0])
            raise PatchbayesError(f"{where}: the target of example {row} is not finite; remove or repair it.")


def _statistics_of_inputs(train: Split) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of each channel (pixels / 255) or feature."""
    first = train.fetch(torch.zeros(1, dtype=torch.int64))[0]
    if first.dtype != torch.uint8:
        raw = train.fetch(torch.arange(len(train)))[0]
        return _statistics(raw.movedim(1, -1).flatten(0, -2))
    counts = torch.zeros(first.shape[1], 256, dtype=torch.int64)  # how often each channel has each value: exact
    for block in torch.arange(len(train)).split(_BLOCK):
        pixels = train.fetch(block)[0].movedim(1, 0).flatten(1)
        counts += torch.stack([torch.bincount(channel.long(), minlength=256) for channel in pixels])
    shares = counts.double() / counts.sum(1, keepdim=True)
    levels = torch.arange(256, dtype=torch.float64) / 255
    mean = shares @ levels
    std = (shares * (levels - mean.unsqueeze(1)).square()).sum(1).sqrt()
    return tuple(mean.tolist()), tuple(s if s > 0 else 1.0 for s in std.tolist())


def _statistics(values: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of each column of (N, D); a constant column has the deviation 1."""
    values = values.double()
    std = values.std(0, correction=0)
    std[std <= _CONSTANT * values.abs().amax(0)] = 1.0
    return tuple(values.mean(0).tolist()), tuple(std.tolist())
