"""The MNIST family: images and labels in idx files, plain or compressed with gzip."""

import gzip
import math
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..errors import PatchbayesError
from .contents import Contents
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

    Without names, the classes are the numbers from 0 to the largest label of the training part.
    """
    train, test = _part(folder, ("train",)), _part(folder, ("t10k", "test"))
    if classes is None:
        classes = tuple(str(number) for number in range(int(train.targets.max()) + 1))
    for name, split in (("training", train), ("test", test)):
        if int(split.targets.max()) >= len(classes):
            raise PatchbayesError(
                f"{folder}: a {name} label is {int(split.targets.max())}; there are {len(classes)} classes, "
                f"0 to {len(classes) - 1}. The files do not belong together."
            )
    return Contents("classification", train, test, classes)


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
    """The numbers of an idx file: two zeros, type, number of dimensions, sizes (big-endian), values."""
    try:
        content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise PatchbayesError(f"{file}: not a complete gzip file ({error}); get it again.") from error
    start = 4 + 4 * dimensions
    if len(content) < start or tuple(content[:4]) != (0, 0, _UNSIGNED_BYTE, dimensions):
        raise PatchbayesError(
            f"{file}: begins with {tuple(content[:4])}; an idx file of bytes in {dimensions} dimensions begins with "
            f"(0, 0, {_UNSIGNED_BYTE}, {dimensions})."
        )
    shape = tuple(int(size) for size in np.frombuffer(content, dtype=">u4", count=dimensions, offset=4))
    if len(content) - start != math.prod(shape) or 0 in shape:
        raise PatchbayesError(
            f"{file}: says {' x '.join(map(str, shape))} values and holds {len(content) - start:,}; the file is "
            f"incomplete, get it again."
        )
    return torch.tensor(np.frombuffer(content, dtype=np.uint8, offset=start)).view(shape)
