"""The MNIST family: images and labels in idx files, plain or compressed with gzip."""

import gzip
import math
import os
import zlib
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
import torch
from torch import Tensor

from ..errors import PatchbayesError
from ..files import open_regular
from .contents import Contents
from .limits import Limits
from .splits import ArraySplit

_UNSIGNED_BYTE = 8
FASHION_CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
DIGIT_CLASSES = tuple("0123456789")


def read_idx(folder: Path, classes: tuple[str, ...] | None = None) -> Contents:
    """Images (N, 1, H, W) of the files *train-images*idx3-ubyte* and *t10k-images* or *test-images*, with their labels.

    Without names, the classes are called by their labels: all numbers from the smallest to the largest of the training part.
    """
    train, test = _part(folder, ("train",)), _part(folder, ("t10k", "test"))
    if classes is None:
        classes, train, test = _by_label(folder, train, test)
    for name, split in (("training", train), ("test", test)):
        if int(split.targets.max()) >= len(classes):
            raise PatchbayesError(
                f"{folder}: a {name} label is {int(split.targets.max())}; there are {len(classes)} classes, "
                f"0 to {len(classes) - 1}. The files do not belong together."
            )
    return Contents("classification", train, test, classes)


def _by_label(folder: Path, train: ArraySplit, test: ArraySplit) -> tuple[tuple[str, ...], ArraySplit, ArraySplit]:
    """Classes named by their labels, which are numbered from the smallest on (some sets begin with 1)."""
    labels = sorted(set(train.targets.tolist()))
    absent = sorted(set(range(labels[0], labels[-1])) - set(labels))
    if absent:
        raise PatchbayesError(
            f"{folder}: the training labels go from {labels[0]} to {labels[-1]}, and none is {absent[0]}; a label is damaged, "
            "or the classes must be numbered again without gaps."
        )
    unknown = sorted(set(test.targets.tolist()) - set(labels))
    if unknown:
        raise PatchbayesError(
            f"{folder}: a test label is {unknown[-1]}; there are {len(labels)} classes, {labels[0]} to {labels[-1]}. The "
            "files do not belong together."
        )
    train, test = (ArraySplit(split.inputs, split.targets - labels[0]) for split in (train, test))
    return tuple(map(str, labels)), train, test


def _part(folder: Path, names: tuple[str, ...]) -> ArraySplit:
    image_file, label_file = (_file(folder, names, kind) for kind in ("images?idx3", "labels?idx1"))
    images, labels = _array(image_file, dimensions=3), _array(label_file, dimensions=1)
    if len(images) != len(labels):
        raise PatchbayesError(
            f"{image_file} holds {len(images)} images and {label_file} {len(labels)} labels: they do not belong together."
        )
    return ArraySplit(images.unsqueeze(1), labels.long())


def _file(folder: Path, names: tuple[str, ...], kind: str) -> Path:
    patterns = [f"*{name}-{kind}-ubyte{end}" for name in names for end in ("", ".gz")]
    found = sorted(path for pattern in patterns for path in folder.glob(pattern))
    plain = {path.name.removesuffix(".gz"): path for path in reversed(found)}  # the plain file where both are there
    if len(plain) != 1:
        wanted = f"{names[0]}-{kind.replace('?', '-')}-ubyte"
        given = ", ".join(sorted(plain)) or "none"
        raise PatchbayesError(f"{folder}: one file {wanted} or {wanted}.gz is needed; found: {given}.")
    return plain.popitem()[1]


def _array(file: Path, dimensions: int) -> Tensor:
    """The numbers of an idx file: two zeros, type, number of dimensions, sizes (big-endian), values.

    No more is unpacked than the sizes say, and no more than the `Limits` allow.
    """
    start = 4 + 4 * dimensions
    try:
        with open_regular(file) as packed:
            content = cast(BinaryIO, gzip.GzipFile(fileobj=packed)) if file.suffix == ".gz" else packed
            head = content.read(start)
            if len(head) < start or tuple(head[:4]) != (0, 0, _UNSIGNED_BYTE, dimensions):
                raise PatchbayesError(
                    f"{file}: begins with {tuple(head[:4])}; an idx file of bytes in {dimensions} dimensions begins with "
                    f"(0, 0, {_UNSIGNED_BYTE}, {dimensions})."
                )
            shape = tuple(int(size) for size in np.frombuffer(head, dtype=">u4", count=dimensions, offset=4))
            size = os.fstat(packed.fileno()).st_size
            if content is not packed:
                Limits.current().check_unpacked(str(file), math.prod(shape), size)
            elif math.prod(shape) > size:
                raise _incomplete(file, shape, size - start)
            values = content.read(math.prod(shape) + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise PatchbayesError(f"{file}: not a complete gzip file ({error}); get it again.") from error
    if len(values) != math.prod(shape) or 0 in shape:
        raise _incomplete(file, shape, len(values))
    return torch.tensor(np.frombuffer(values, dtype=np.uint8)).view(shape)


def _incomplete(file: Path, shape: tuple[int, ...], held: int) -> PatchbayesError:
    expected = math.prod(shape)
    holds = f"more than {expected:,}" if held > expected else f"{held:,}"
    return PatchbayesError(
        f"{file}: says {' x '.join(map(str, shape))} values and holds {holds}; the file is damaged, get it again."
    )
