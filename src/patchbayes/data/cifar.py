"""CIFAR-10 and CIFAR-100 in their official binary version: label byte(s), then 3072 bytes of red, green and blue rows."""

from pathlib import Path

import numpy as np
import torch

from ..errors import PatchbayesError
from .contents import Contents
from .splits import ArraySplit

_PIXELS = 3 * 32 * 32
CIFAR10_FOLDER = "cifar-10-batches-bin"
CIFAR100_FOLDER = "cifar-100-binary"
CIFAR10_FILES = (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin", "batches.meta.txt")
CIFAR100_FILES = ("train.bin", "test.bin", "fine_label_names.txt")


def read_cifar10(folder: Path) -> Contents:
    """50,000 and 10,000 images of 3 x 32 x 32 in ten classes."""
    *train, test, names = (folder / name for name in CIFAR10_FILES)
    return Contents(
        "classification",
        _records(train, label_bytes=1, classes=10),
        _records([test], label_bytes=1, classes=10),
        _names(names, 10),
        augmentation="crop+flip",
        statistics=((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    )


def read_cifar100(folder: Path) -> Contents:
    """50,000 and 10,000 images of 3 x 32 x 32 in a hundred (fine) classes."""
    train, test, names = (folder / name for name in CIFAR100_FILES)
    return Contents(
        "classification",
        _records([train], label_bytes=2, classes=100),
        _records([test], label_bytes=2, classes=100),
        _names(names, 100),
        augmentation="crop+flip",
        statistics=((0.5070, 0.4865, 0.4409), (0.2673, 0.2564, 0.2761)),
    )


def _records(files: list[Path], label_bytes: int, classes: int) -> ArraySplit:
    """Images and labels of some files; the label that counts is the last one before the pixels."""
    size = label_bytes + _PIXELS
    pixels, labels = [], []
    for file in files:
        content = np.frombuffer(file.read_bytes(), dtype=np.uint8)
        if len(content) == 0 or len(content) % size:
            raise PatchbayesError(
                f"{file}: {len(content):,} bytes are not a whole number of records of {size} bytes; the file is "
                f"incomplete or another version. Remove it and get the official binary version again."
            )
        records = content.reshape(-1, size)
        label = records[:, label_bytes - 1]
        if label.max() >= classes:
            row = int((label >= classes).argmax())
            raise PatchbayesError(
                f"{file}: record {row} has the class number {label[row]}; there are {classes} classes, 0 to "
                f"{classes - 1}. The file is damaged or another version: get the official binary version again."
            )
        labels.append(torch.tensor(label, dtype=torch.int64))
        pixels.append(torch.tensor(records[:, label_bytes:]).view(-1, 3, 32, 32))
    return ArraySplit(torch.cat(pixels), torch.cat(labels))


def _names(file: Path, classes: int) -> tuple[str, ...]:
    names = tuple(file.read_text(errors="replace").split())
    if len(names) != classes:
        raise PatchbayesError(f"{file}: {len(names)} class names; one on each of {classes} lines is needed.")
    return names
