"""Data sets from arrays in memory, and from npz files that hold them."""

import math
import os
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import PatchbayesError
from ..files import open_regular
from .contents import Contents
from .limits import Limits
from .splits import ArraySplit, Task

_NAMES = ("x_train", "y_train", "x_test", "y_test")
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
_LAST_CHARACTER = 0x10FFFF
_KINDS = "fiubcU"  # complex numbers are refused below, by name


def read_npz(file: Path, task: Task | None = None) -> Contents:
    """The arrays x_train, y_train, x_test and y_test (and, if you like, classes: their names) of an npz file."""
    try:
        with open_regular(file) as content:
            size = os.fstat(content.fileno()).st_size
            with zipfile.ZipFile(content) as archive:
                arrays = _members(archive, str(file), size)
    except PatchbayesError:
        raise
    except Exception as error:  # damaged files raise many kinds: zlib's, tokenize's, ...
        why = str(error) or type(error).__name__
        raise PatchbayesError(f"{file}: not a complete npz file of plain arrays ({why}).") from error
    lacking = [name for name in _NAMES if name not in arrays]
    if lacking:
        raise PatchbayesError(f"{file}: lacks {', '.join(lacking)}; {', '.join(_NAMES)} are needed.")
    named = arrays.pop("classes", None)
    if named is not None and named.ndim != 1:
        raise PatchbayesError(f"{file}: classes {named.shape}; one name for each class, in one dimension.")
    try:
        classes = None if named is None else [str(name) for name in named.tolist()]
        return from_arrays(*(arrays[name] for name in _NAMES), task=task, classes=classes or None)
    except PatchbayesError as error:
        raise PatchbayesError(f"{file}: {error}") from error


def _members(archive: zipfile.ZipFile, where: str, size: int) -> dict[str, NDArray[Any]]:
    """The arrays that are looked for, each at most once, no larger together than the `Limits` allow."""
    members: dict[str, zipfile.ZipInfo] = {}
    for member in archive.infolist():
        name = member.filename.removesuffix(".npy")
        if name not in (*_NAMES, "classes"):
            continue
        if name in members:
            raise PatchbayesError(f"{where}: holds {name} twice, and which one counts cannot be known; save it again.")
        members[name] = member
    Limits.current().check_unpacked(where, sum(member.file_size for member in members.values()), size)
    arrays = {}
    for name, member in members.items():
        with archive.open(member) as content:
            arrays[name] = _array(cast(BinaryIO, content), member.file_size)
    return arrays


def _array(content: BinaryIO, size: int) -> NDArray[Any]:
    """The array of an npy member of `size` bytes. Memory is taken for what is there, not for what the header promises."""
    version = np.lib.format.read_magic(content)
    if version not in _HEADERS:
        raise ValueError(f"version {version[0]}.{version[1]} of the npy format; 1.0 or 2.0 is needed")
    shape, by_columns, dtype = _HEADERS[version](content)
    if dtype.kind not in _KINDS or dtype.itemsize == 0:
        raise ValueError(f"values of the type {dtype}; numbers or texts are needed")
    expected = math.prod(shape) * dtype.itemsize
    if expected != size - content.tell():
        raise ValueError(f"{shape} values of {dtype} are {expected:,} bytes, and {size - content.tell():,} are there")
    values = np.frombuffer(content.read(), dtype=dtype)
    if content.read(1) or values.size != math.prod(shape):
        raise ValueError("cut short")
    if dtype.kind == "U" and (values.view(dtype.byteorder + "u4") > _LAST_CHARACTER).any():
        raise ValueError("texts with characters that do not exist")
    return values.reshape(shape, order="F" if by_columns else "C")


def from_arrays(
    x_train: Any,
    y_train: Any,
    x_test: Any,
    y_test: Any,
    *,
    task: Task | None = None,
    classes: Sequence[str] | None = None,
    features: Sequence[str] = (),
) -> Contents:
    """Contents of arrays or tensors.

    x: tables (N, F), or images (N, H, W), (N, C, H, W) or, where only the last size is 1 or 3, (N, H, W, C). Images are uint8
        pixels, or floats that are already on the scale you want.
    y: class numbers from 0 on or class names (N,), or numbers to regress on (N,) or (N, D).
    task: where None, floating-point targets are a regression and all others classes.
    classes: names of the class numbers, or of the D targets.
    """
    x_train, y_train, x_test, y_test = (np.asarray(array) for array in (x_train, y_train, x_test, y_test))
    if task not in (None, "classification", "regression"):
        raise PatchbayesError(f'task={task!r}: "classification" or "regression".')
    task = task or ("regression" if y_train.dtype.kind == "f" else "classification")
    if task == "regression":
        targets = [_values(y, name) for y, name in ((y_train, "y_train"), (y_test, "y_test"))]
        names = tuple(classes or (f"y{number}" for number in range(targets[0].shape[1])))
    else:
        names, targets = _class_numbers(y_train, y_test, classes)
    inputs = [_inputs(x, name) for x, name in ((x_train, "x_train"), (x_test, "x_test"))]
    if inputs[0].shape[1:] != inputs[1].shape[1:]:
        raise PatchbayesError(
            f"x_train holds examples {tuple(inputs[0].shape[1:])}, x_test {tuple(inputs[1].shape[1:])}."
        )
    for x, y, name in zip(inputs, targets, ("train", "test"), strict=True):
        if len(x) != len(y):
            raise PatchbayesError(f"x_{name} holds {len(x)} examples and y_{name} {len(y)}; as many of each.")
    if inputs[0].dim() == 2:
        features = tuple(features) or tuple(f"x{number}" for number in range(inputs[0].shape[1]))
    return Contents(task, ArraySplit(inputs[0], targets[0]), ArraySplit(inputs[1], targets[1]), names, tuple(features))


def _inputs(x: NDArray[Any], name: str) -> Tensor:
    if x.ndim not in (2, 3, 4) or x.dtype.kind not in "fiub" or 0 in x.shape:
        raise PatchbayesError(f"{name}: {x.dtype} {x.shape}; numbers (N, F), (N, H, W), (N, C, H, W) or (N, H, W, C).")
    if x.ndim == 4 and x.shape[1] not in (1, 3) and x.shape[3] in (1, 3):
        x = np.moveaxis(x, 3, 1)
    elif x.ndim == 3:
        x = x[:, np.newaxis]
    if x.ndim == 2 or x.dtype.kind == "f":
        x = x.astype(np.float32)
    elif x.dtype != np.uint8:
        raise PatchbayesError(f"{name}: images of {x.dtype}; pixels are uint8 (0 to 255), or floats.")
    return _finite(torch.tensor(np.ascontiguousarray(x)), name)


def _values(y: NDArray[Any], name: str) -> Tensor:
    if y.ndim not in (1, 2) or y.dtype.kind not in "fiub" or 0 in y.shape:
        raise PatchbayesError(f"{name}: {y.dtype} {y.shape}; a regression has numbers (N,) or (N, D).")
    return _finite(torch.tensor(y.reshape(len(y), -1), dtype=torch.float32), name)


def _class_numbers(
    y_train: NDArray[Any], y_test: NDArray[Any], classes: Sequence[str] | None
) -> tuple[tuple[str, ...], list[Tensor]]:
    for y, name in ((y_train, "y_train"), (y_test, "y_test")):
        if y.ndim != 1 or len(y) == 0:
            raise PatchbayesError(f"{name}: {y.dtype} {y.shape}; one class for each example, (N,).")
        whole = y.dtype.kind in "iubU" or (y.dtype.kind == "f" and np.isfinite(y).all() and (y == np.floor(y)).all())
        if not whole:
            raise PatchbayesError(
                f"{name}: {y.dtype} values are not class numbers or names; for a regression, task='regression'."
            )
        if y.dtype.kind != "U":
            Limits.current().check_classes(name, int(y.max()) + 1)
    if classes is not None:
        Limits.current().check_classes("classes", len(classes))
    if y_train.dtype.kind == "U":
        Limits.current().check_classes("y_train", len(set(y_train.tolist())))
        names = tuple(classes or sorted(set(y_train.tolist())))
        number = {name: i for i, name in enumerate(names)}
        unknown = sorted((set(y_train.tolist()) | set(y_test.astype(str).tolist())) - number.keys())
        if unknown:
            raise PatchbayesError(
                f"the class {unknown[0]!r} is not among those of the training part: {', '.join(names[:10])}."
            )
        return names, [torch.tensor([number[name] for name in y.astype(str).tolist()]) for y in (y_train, y_test)]
    if y_test.dtype.kind == "U":
        raise PatchbayesError("y_train holds class numbers and y_test class names; the same of each.")
    targets = [torch.tensor(y.astype(np.int64)) for y in (y_train, y_test)]
    names = tuple(classes or (str(number) for number in range(int(targets[0].max()) + 1)))
    for numbers, name in zip(targets, ("y_train", "y_test"), strict=True):
        low, high = int(numbers.min()), int(numbers.max())
        if low < 0 or high >= len(names):
            raise PatchbayesError(
                f"{name}: class numbers {low} to {high}; with {len(names)} classes, 0 to {len(names) - 1}."
            )
    absent = sorted(set(range(len(names))) - set(targets[0].tolist()))
    if absent and not classes:
        raise PatchbayesError(
            f"y_train: no example of class {absent[0]}; number the classes from 0 without gaps, or give their names as classes."
        )
    return names, targets


def _finite(values: Tensor, name: str) -> Tensor:
    if values.is_floating_point() and not values.isfinite().all():
        row = int((~values.isfinite()).flatten(1).any(1).nonzero()[0])
        raise PatchbayesError(
            f"{name}: example {row} holds a value that is not finite (NaN or infinite); remove or repair it."
        )
    return values
