"""Corrupted test sets that others have published: folders in the layout of CIFAR-C or of ImageNet-C."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import PatchbayesError
from .corruptions import SEVERITIES, check_corruption
from .image_folder import image_split
from .splits import ArraySplit, Split


def read_corrupted(
    folder: Path | str, name: str, severity: int, classes: tuple[str, ...], shape: tuple[int, ...]
) -> Split:
    """Test images under one corruption, with targets numbered as in `classes`, of the shape (C, H, W).

    CIFAR-C: NAME.npy (5 N, H, W, C), one severity after the other, and labels.npy. ImageNet-C: NAME/SEVERITY/CLASS/*, or one
    folder deeper (noise/gaussian_noise/1/...).
    """
    check_corruption(name, severity)
    root = Path(folder)
    if (root / f"{name}.npy").is_file():
        return _cifar_c(root, name, severity, len(classes), shape)
    for place in (root / name, *sorted(root.glob(f"*/{name}"))):
        if place.is_dir():
            if not (place / str(severity)).is_dir():
                raise PatchbayesError(
                    f"{place}: no folder {severity}; a folder for each severity from 1 to 5 is needed."
                )
            return image_split(place / str(severity), classes, shape, "crop")  # they are cropped and resized already
    raise PatchbayesError(
        f"{root}: neither {name}.npy (the layout of CIFAR-C) nor {name}/{severity}/CLASS (the layout of ImageNet-C)."
    )


def _cifar_c(folder: Path, name: str, severity: int, num_classes: int, shape: tuple[int, ...]) -> ArraySplit:
    images, labels = _array(folder / f"{name}.npy"), _array(folder / "labels.npy")
    channels, height, width = shape
    if images.dtype != np.uint8 or images.shape[1:] != (height, width, channels) or len(images) % len(SEVERITIES):
        raise PatchbayesError(
            f"{folder / name}.npy: {images.dtype} {images.shape}; uint8 (5 N, {height}, {width}, {channels}) is needed."
        )
    if labels.shape != images.shape[:1] or labels.dtype.kind not in "iu":
        raise PatchbayesError(
            f"{folder / 'labels.npy'}: {labels.dtype} {labels.shape}; one class number for each of {len(images)} images."
        )
    if len(labels) and not 0 <= labels.min() <= labels.max() < num_classes:
        raise PatchbayesError(
            f"{folder / 'labels.npy'}: class numbers {labels.min()} to {labels.max()}; 0 to {num_classes - 1} are needed."
        )
    count = len(images) // len(SEVERITIES)
    chosen = slice((severity - 1) * count, severity * count)
    pixels = torch.tensor(np.array(images[chosen])).permute(0, 3, 1, 2).contiguous()
    return ArraySplit(pixels, torch.tensor(labels[chosen].astype(np.int64)))


def _array(file: Path) -> NDArray[Any]:
    """The array of an npy file, mapped rather than read: a severity is a fifth of it. Objects are refused."""
    if not file.is_file():
        raise PatchbayesError(f"{file} is not there, or is no file.")
    try:
        return np.lib.format.open_memmap(file, mode="r")
    except Exception as error:  # damaged headers raise many kinds
        raise PatchbayesError(f"{file}: not a complete npy file of numbers ({error}).") from error
