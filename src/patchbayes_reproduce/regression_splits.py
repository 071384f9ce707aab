"""The splits of the ten regression sets, standardized with their training part, and stacked."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from patchbayes.data import ArraySplit, read
from patchbayes.errors import PatchbayesError

Standardized = Literal["both", "inputs", "neither", "test by itself"]
YEAR_FILE = "YearPredictionMSD.txt"
_YEAR_TRAIN = 463_715


@dataclass(frozen=True)
class RegressionSet:
    """One of the ten: how it is called in `patchbayes.data`, its published splits, hidden units and targets."""

    data: str
    splits: int = 20
    hidden: int = 50
    targets: int = 1


# In the order of their training cost.
SETS = {
    "yacht": RegressionSet("yacht"),
    "boston": RegressionSet("boston"),
    "energy": RegressionSet("energy", targets=2),
    "concrete": RegressionSet("concrete"),
    "winered": RegressionSet("wine"),
    "kin8nm": RegressionSet("kin8nm"),
    "power": RegressionSet("power"),
    "naval": RegressionSet("naval", targets=2),
    "protein": RegressionSet("protein", splits=5, hidden=100),
    "year": RegressionSet("year", splits=1, hidden=100),
}


@dataclass(frozen=True)
class StackedSplits:
    """R splits as the networks see them: train inputs (R, N, F), targets (R, N, D); test inputs (R, B, F), targets (R, B, D).

    `unit` (R, D) is the size of a network's unit of the target in the target's own; `numbers` are those of the splits.
    """

    numbers: tuple[int, ...]
    train_inputs: Tensor
    train_targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor
    unit: Tensor


def is_there(name: str, data_dir: Path) -> bool:
    """Whether the files of a set are in the data folder (Year is not in the usual collection)."""
    return year_file(data_dir).exists() if name == "year" else True


def year_file(data_dir: Path) -> Path:
    return data_dir / "uci" / "year" / YEAR_FILE


def read_splits(
    name: str, data_dir: Path, numbers: Sequence[int], standardized: Standardized = "both"
) -> list[StackedSplits]:
    """The splits `numbers` of a set, those of equal sizes stacked: a single stack for each of the published sets.

    standardized  which columns get mean 0 and variance 1 of the training part: "both" inputs and targets, only the
                  "inputs", "neither"; "test by itself" is "both" with the test inputs standardized by their own statistics.
    """
    if standardized not in get_args(Standardized):
        raise PatchbayesError(f"read_splits(standardized={standardized!r}): one of {get_args(Standardized)}.")
    groups: dict[tuple[int, int], list[tuple[int, tuple[Tensor, ...]]]] = {}
    for number in numbers:
        part = _standardized(*_raw(name, data_dir, number), standardized)
        groups.setdefault((len(part[0]), len(part[2])), []).append((number, part))
    stacks = []
    for group in groups.values():
        which, parts = zip(*group, strict=True)
        stacks.append(StackedSplits(tuple(which), *(torch.stack(column) for column in zip(*parts, strict=True))))
    return stacks


def _raw(name: str, data_dir: Path, number: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training inputs and targets, test inputs and targets, as float64 tables."""
    if name == "year":
        return _raw_year(year_file(data_dir))
    tables: list[Tensor] = []
    for target in range(SETS[name].targets):
        dataset = read(f"uci:{SETS[name].data}", data_dir, held_out=0, target=target, split=number)
        for place, part in enumerate((dataset.train, dataset.test)):
            assert isinstance(part, ArraySplit)
            if target == 0:
                tables += [part.inputs.double(), part.targets.double()]
            else:
                tables[2 * place + 1] = torch.cat([tables[2 * place + 1], part.targets.double()], dim=1)
    return tables[0], tables[1], tables[2], tables[3]


def _raw_year(file: Path) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    try:
        table = torch.from_numpy(np.loadtxt(file, delimiter=","))
    except (OSError, ValueError) as error:
        raise PatchbayesError(
            f"{file}: the Year set is a table of 515,345 rows, the year and 90 numbers: {error}"
        ) from None
    if table.shape[1] != 91 or len(table) <= _YEAR_TRAIN:
        raise PatchbayesError(f"{file}: {tuple(table.shape)} numbers; the Year set has 515,345 rows of 91.")
    train, test = table[:_YEAR_TRAIN], table[_YEAR_TRAIN:]
    return train[:, 1:], train[:, :1], test[:, 1:], test[:, :1]


def _standardized(
    train_x: Tensor, train_y: Tensor, test_x: Tensor, test_y: Tensor, which: Standardized
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    unit = torch.ones(train_y.shape[1], dtype=train_y.dtype)
    if which != "neither":
        mean, std = _statistics(train_x)
        test_mean, test_std = _statistics(test_x) if which == "test by itself" else (mean, std)
        train_x, test_x = (train_x - mean) / std, (test_x - test_mean) / test_std
    if which in ("both", "test by itself"):
        mean, unit = _statistics(train_y)
        train_y, test_y = (train_y - mean) / unit, (test_y - mean) / unit
    return train_x.float(), train_y.float(), test_x.float(), test_y.float(), unit.float()


def _statistics(table: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of every column; 1 for a column that is constant up to rounding (two of Naval's)."""
    mean, std = table.mean(0), table.std(0, correction=0)
    return mean, torch.where(std > 1e-6 * table.abs().amax(0), std, 1.0)
