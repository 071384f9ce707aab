"""Small data sets that need no download: fashion (images, in this package), and what scikit-learn carries along, digits and
photos (images) and diabetes (a regression)."""

from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from .arrays import read_npz
from .contents import Contents
from .extras import optional
from .splits import ArraySplit, shuffled

_SPLIT_SEED = 0
_LEVELS = 16
_PIECE = 32
_FASHION = Path(__file__).parent / "fashion" / "fashion.npz"


def read_fashion() -> Contents:
    """3,000 training and 2,000 test images of Fashion-MNIST at 14 x 14 pixels, ten classes, as many of each."""
    return read_npz(_FASHION)


def read_digits() -> Contents:
    """1,797 handwritten digits of 8 x 8 pixels, ten classes; half of them, always the same half, are the test part."""
    found = _sklearn().load_digits()
    images = (torch.tensor(found.images) * (255 / _LEVELS)).round().to(torch.uint8).unsqueeze(1)
    train, test = _halves(images, torch.tensor(found.target, dtype=torch.int64), share=0.5)
    return Contents("classification", train, test, tuple(str(digit) for digit in found.target_names))


def read_photos() -> Contents:
    """520 pieces of 32 x 32 pixels of two photographs, a temple and a flower; half, always the same, are the test part."""
    photos = _sklearn().load_sample_images().images
    pieces = [
        torch.tensor(photo)
        .permute(2, 0, 1)
        .unfold(1, _PIECE, _PIECE)
        .unfold(2, _PIECE, _PIECE)
        .flatten(1, 2)
        .transpose(0, 1)
        for photo in photos
    ]
    targets = torch.arange(len(pieces)).repeat_interleave(torch.tensor([len(piece) for piece in pieces]))
    train, test = _halves(torch.cat(pieces).contiguous(), targets, share=0.5)
    return Contents("classification", train, test, ("temple", "flower"))


def read_diabetes() -> Contents:
    """442 patients, ten measurements, the progression after a year; a fifth of them, always the same, are the test part."""
    found = _sklearn().load_diabetes(scaled=False)
    inputs = torch.tensor(found.data, dtype=torch.float32)
    targets = torch.tensor(found.target, dtype=torch.float32).unsqueeze(1)
    train, test = _halves(inputs, targets, share=0.8)
    return Contents("regression", train, test, ("progression",), tuple(found.feature_names))


def _sklearn() -> ModuleType:
    return optional("sklearn.datasets", "data", "reading digits, photos or diabetes")


def _halves(inputs: Tensor, targets: Tensor, share: float) -> tuple[ArraySplit, ArraySplit]:
    whole = ArraySplit(inputs, targets)
    order = shuffled(len(whole), _SPLIT_SEED)
    cut = int(len(whole) * share)
    return whole.subset(order[:cut]), whole.subset(order[cut:])
