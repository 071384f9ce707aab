"""What the tests of training share: small tables, and how two runs are compared."""

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from patchbayes.data import ArraySplit, Dataset, Preparation

DEFAULT: dict[str, object] = {"data": "npz:classes.npz", "model": "mlp:8", "epochs": 2, "batch_size": 16}


def write_npz(path: Path, seed: int = 0, task: str = "classification") -> None:
    """A small table: three classes, or two targets of different size."""
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(60, 4)).astype("float32")
    noise = generator.normal(size=60).astype("float32")
    if task == "classification":
        y = (x[:, 0] + 0.3 * noise > 0).astype("int64") + (x[:, 1] > 0.5)
    else:
        y = np.stack([100 + 10 * x[:, 0] + noise, x[:, 1] * x[:, 2]], axis=1)
    np.savez(path, x_train=x[:48], y_train=y[:48], x_test=x[48:], y_test=y[48:])


def write_tables(folder: Path) -> Path:
    write_npz(folder / "classes.npz")
    write_npz(folder / "numbers.npz", task="regression")
    return folder


def rows_of(run):
    """The rows of metrics without what depends on the clock."""
    return [{key: value for key, value in row.items() if "seconds" not in key} for row in run.history()]


def tensors_of(path, start=""):
    return {key: value for key, value in load_file(path).items() if key.startswith(start)}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def table(rows: int = 10, task: str = "classification") -> Dataset:
    """A data set whose first feature is the number of the example."""
    inputs = torch.arange(3.0 * rows).view(rows, 3)
    targets = torch.arange(rows) % 3 if task == "classification" else torch.arange(2.0 * rows).view(rows, 2)
    preparation = Preparation((1.0, 2.0, 3.0), (10.0, 10.0, 10.0))
    if task == "regression":
        preparation = Preparation((1.0, 2.0, 3.0), (10.0, 10.0, 10.0), "none", (5.0, 6.0), (2.0, 4.0))
    names = ("a", "b", "c")
    split = ArraySplit(inputs, targets)
    return Dataset(
        "table", task, split, split, split, names if task == "classification" else names[:2], names, preparation
    )
