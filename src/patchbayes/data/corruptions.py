"""The fifteen corruptions of ImageNet-C at five severities, on images of any size."""

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from ..errors import PatchbayesError
from .extras import optional
from .small_corruptions import corrupt_small_images
from .splits import Split

# In the order of the paper's tables.
CORRUPTIONS = (
    "gaussian_noise",
    "shot_noise",
    "impulse_noise",
    "defocus_blur",
    "glass_blur",
    "motion_blur",
    "zoom_blur",
    "snow",
    "frost",
    "fog",
    "brightness",
    "contrast",
    "elastic_transform",
    "pixelate",
    "jpeg_compression",
)
SEVERITIES = (1, 2, 3, 4, 5)
#: Whose strengths: those of ImageNet-C, or those of CIFAR-C, which leave something to see of images of about 32 pixels.
Strengths = Literal["imagenet", "small"]
_SMALLEST_SIDE = 32
_GREEN = 1
# These two draw from a generator of their own, which takes a seed.
_SEEDED = ("impulse_noise", "glass_blur")
_NUMPY_STATE = threading.Lock()


def corrupt(images: Tensor, name: str, severity: int, seed: int = 0, strengths: Strengths = "imagenet") -> Tensor:
    """Corrupted images, (B, C, H, W) uint8 in and out, with one channel (gray) or three.

    What is drawn for an image depends on the image itself, the name, the severity and the seed: its corrupted form is the
    same in any batch, part of the data or process. Images with a side below 32 pixels are enlarged by a whole factor,
    corrupted, and averaged back. strengths="small" are made for small images instead (`small_corruptions`).
    """
    check_corruption(name, severity)
    if strengths not in get_args(Strengths):
        raise PatchbayesError(f"corrupt(strengths={strengths!r}): expected one of {', '.join(get_args(Strengths))}.")
    if images.dtype != torch.uint8 or images.dim() != 4 or images.shape[1] not in (1, 3):
        raise PatchbayesError(
            f"corrupt: given {images.dtype} {tuple(images.shape)}; pixels uint8 (B, C, H, W) with one or three channels."
        )
    if strengths == "small":
        seeds = [_seed(image, name, severity, seed) for image in images.cpu()]
        return corrupt_small_images(images, name, severity, seeds)
    package = optional("imagecorruptions", "corruptions", "corrupting images")
    factor = -(-_SMALLEST_SIDE // min(images.shape[2:]))
    corrupted = torch.empty_like(images)
    for image, target in zip(images.cpu(), corrupted, strict=True):
        image_seed = _seed(image, name, severity, seed)
        pixels = image.repeat_interleave(factor, 1).repeat_interleave(factor, 2).expand(3, -1, -1)
        own = {"seed": image_seed} if name in _SEEDED else {}
        with _seeded_numpy(image_seed):
            changed = package.corrupt(pixels.permute(1, 2, 0).contiguous().numpy(), severity, name, **own)
        target.copy_(_shrunk(torch.tensor(changed).permute(2, 0, 1), factor, image.shape))
    return corrupted


def check_corruption(name: str, severity: int) -> None:
    if name not in CORRUPTIONS or severity not in SEVERITIES:
        raise PatchbayesError(
            f"corruption {name!r} of severity {severity!r}: one of {', '.join(CORRUPTIONS)}, with a severity from 1 to 5."
        )


class CorruptedSplit(Split):
    """A split of images, each corrupted when it is fetched."""

    def __init__(
        self, split: Split, name: str, severity: int, seed: int = 0, strengths: Strengths = "imagenet"
    ) -> None:
        check_corruption(name, severity)
        self.strengths: Strengths = strengths
        self.split = split
        self.name = name
        self.severity = severity
        self.seed = seed

    @property
    def targets(self) -> Tensor:
        return self.split.targets

    def fetch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        raw, targets = self.split.fetch(indices)
        return corrupt(raw, self.name, self.severity, self.seed, self.strengths), targets

    def subset(self, indices: Tensor) -> "CorruptedSplit":
        return CorruptedSplit(self.split.subset(indices), self.name, self.severity, self.seed, self.strengths)


def _seed(image: Tensor, name: str, severity: int, seed: int) -> int:
    """A number below 2**32 from everything the corrupted image may depend on."""
    key = f"{name} {severity} {seed} {tuple(image.shape)}".encode()
    digest = hashlib.blake2b(key + image.contiguous().numpy().tobytes(), digest_size=4).digest()
    return int.from_bytes(digest)


@contextmanager
def _seeded_numpy(seed: int) -> Iterator[None]:
    """The package draws from NumPy's global generator: it is set for one image at a time, and put back as it was."""
    with _NUMPY_STATE:
        before = np.random.get_state()
        np.random.set_state(np.random.RandomState(seed).get_state())
        try:
            yield
        finally:
            np.random.set_state(before)


def _shrunk(pixels: Tensor, factor: int, shape: torch.Size) -> Tensor:
    """(3, H f, W f) -> (C, H, W): means of blocks; of gray images the green channel, whose noise has its full strength."""
    channels, height, width = shape
    kept = pixels if channels == 3 else pixels[_GREEN : _GREEN + 1]
    return kept.reshape(channels, height, factor, width, factor).float().mean((2, 4)).round().to(torch.uint8)
