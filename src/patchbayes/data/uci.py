"""The regression sets of the UCI repository, in the layout and with the published splits of the literature.

A folder holds `data.txt` (numbers, one row for each example), `index_features.txt` and `index_target.txt` (column numbers),
`index_train_k.txt` and `index_test_k.txt` (row numbers of split k).
"""

import warnings
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import PatchbayesError
from .contents import Contents
from .splits import ArraySplit

# Two sets have a second target, outside the published layout.
TARGETS = {"energy": ("heating", "cooling"), "naval-propulsion-plant": ("compressor", "turbine")}
ENERGY_TABLE = "ENB2012_data.csv"
_NAVAL_TURBINE_COLUMN = 17


def read_uci(folder: Path, target: str | int | None = None, split: int = 0) -> Contents:
    """Split k of a set; target: name or number where there are two (Energy, Naval), the first where None."""
    table = _numbers(folder / "data.txt")
    features = _whole_numbers(folder / "index_features.txt", table.shape[1])
    number, name = _chosen_target(folder, target)
    values = (
        _second_target(folder, table)
        if number
        else table[:, _whole_numbers(folder / "index_target.txt", table.shape[1])]
    )
    whole = ArraySplit(
        torch.tensor(table[:, features], dtype=torch.float32), torch.tensor(values.reshape(-1, 1), dtype=torch.float32)
    )
    rows = []
    for part in ("train", "test"):
        file = folder / f"index_{part}_{split}.txt"
        if not file.exists():
            count = len(list(folder.glob(f"index_{part}_*.txt")))
            raise PatchbayesError(
                f"{folder}: no split {split}, {file.name} is not there; {count} splits are, from 0 on."
            )
        rows.append(torch.tensor(_whole_numbers(file, len(table))))
    shared = set(rows[0].tolist()) & set(rows[1].tolist())
    if shared:
        raise PatchbayesError(f"{folder}: row {min(shared)} is in the training and the test part of split {split}.")
    return Contents(
        "regression", whole.subset(rows[0]), whole.subset(rows[1]), (name,), tuple(f"x{column}" for column in features)
    )


def _chosen_target(folder: Path, target: str | int | None) -> tuple[int, str]:
    names = TARGETS.get(folder.name, ("target",))
    if target is None:
        return 0, names[0]
    text = str(target)
    number = int(text) if text.isdecimal() else names.index(text) if text in names else len(names)
    if number >= len(names):
        raise PatchbayesError(f"{folder}: target={target!r}; it has {', '.join(names)} (or 0 to {len(names) - 1}).")
    return number, names[number]


def _second_target(folder: Path, table: NDArray[np.float64]) -> NDArray[np.float64]:
    if folder.name != "energy":
        return table[:, _NAVAL_TURBINE_COLUMN]
    energy = _numbers(folder / ENERGY_TABLE, delimiter=";", skip=1)
    if len(energy) != len(table) or not np.array_equal(energy[:, :9], table):
        raise PatchbayesError(f"{folder / ENERGY_TABLE}: its first columns are not those of data.txt, row by row.")
    return energy[:, -1]


def _numbers(file: Path, delimiter: str | None = None, skip: int = 0) -> NDArray[np.float64]:
    if not file.is_file():
        raise PatchbayesError(f"{file} is missing; the set needs it.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of an empty file, which is refused below
            table = np.loadtxt(file, delimiter=delimiter, skiprows=skip, ndmin=2)
    except ValueError as error:
        raise PatchbayesError(f"{file}: not a table of numbers ({error}).") from error
    if table.size == 0 or not np.isfinite(table).all():
        what = "no numbers" if table.size == 0 else f"row {int((~np.isfinite(table)).any(1).argmax())} is not finite"
        raise PatchbayesError(f"{file}: {what}; get the file again or remove the row.")
    return table


def _whole_numbers(file: Path, limit: int) -> NDArray[np.int64]:
    values = _numbers(file).ravel()
    numbers = values.astype(np.int64)
    if (numbers != values).any() or numbers.min() < 0 or numbers.max() >= limit:
        raise PatchbayesError(
            f"{file}: holds {values.min():g} to {values.max():g}; whole numbers from 0 to {limit - 1}."
        )
    return numbers
