"""Images read from files when they are needed."""

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ..errors import PatchbayesError
from ..files import open_regular
from .extras import optional
from .limits import Limits
from .preparation import AREA, ASPECT, Preparation
from .splits import Split

SUFFIXES = frozenset((".jpg", ".jpeg", ".png", ".bmp", ".gif", ".pgm", ".ppm", ".tif", ".tiff", ".webp"))
# The formats that are decoded, whatever a file is called. Pillow knows others, one of which (EPS) starts a program.
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "PPM", "TIFF", "WEBP")
_THREADS = 8
#: How a whole image becomes H x W, each by a center crop at the end. "cover": resized until it just covers H x W. "photograph":
#: until its shorter side is 8/7 of that, 256 for 224, as is usual in testing on ImageNet. "crop": not resized where it is large
#: enough, for images that someone has prepared.
View = Literal["cover", "photograph", "crop"]
_MARGIN = 8 / 7
_TRIES = 10


class ImageFileSplit(Split):
    """Image files and their class numbers (N,); decoded when fetched, with `decode_image`, in a few threads.

    shape: (C, H, W) of every image, with C = 3 for color or 1 for gray.
    """

    def __init__(self, files: Sequence[Path], targets: Tensor, shape: tuple[int, ...], view: View = "cover") -> None:
        if len(files) != len(targets):
            raise PatchbayesError(f"ImageFileSplit: {len(files)} files and {len(targets)} targets; as many of each.")
        self.files = list(files)
        self.shape = shape
        self.view: View = view
        self._targets = targets

    @property
    def targets(self) -> Tensor:
        return self._targets

    def fetch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        files = [self.files[index] for index in indices.tolist()]
        return decode_images(files, self.shape, self.view), self._targets[indices]

    def fetch_augmented(
        self, indices: Tensor, preparation: Preparation, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """As in `Split`; a resized crop is a part of the whole image, not of its center."""
        if "resized" not in preparation.augmentation:
            return super().fetch_augmented(indices, preparation, generator)
        seeds = torch.randint(2**62, (len(indices),), generator=generator).tolist()
        files = [self.files[index] for index in indices.tolist()]
        flip = "flip" in preparation.augmentation
        with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
            decode = partial(decode_random_crop, shape=self.shape, flip=flip)
            return torch.stack(list(pool.map(decode, files, seeds))), self._targets[indices]

    def subset(self, indices: Tensor) -> "ImageFileSplit":
        files = [self.files[index] for index in indices.tolist()]
        return ImageFileSplit(files, self._targets[indices], self.shape, self.view)


def decode_images(files: Sequence[Path], shape: tuple[int, ...], view: View = "cover") -> Tensor:
    """(B, C, H, W) uint8 of B image files, each made to fit by `decode_image`."""
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
        return torch.stack(list(pool.map(partial(decode_image, shape=shape, view=view), files)))


def decode_image(file: Path, shape: tuple[int, ...], view: View = "cover") -> Tensor:
    """(C, H, W) uint8 of an image file: upright, resized and center cropped as the `View` says."""
    height, width = shape[1:]

    def fit(image: Any, pillow: Any, operations: Any) -> Any:
        if view == "cover":
            return operations.fit(image, (width, height), method=pillow.Resampling.BILINEAR)
        if view == "photograph" or image.width < width or image.height < height:
            side = round(_MARGIN * min(height, width)) if view == "photograph" else max(height, width)
            image = image.resize(_shorter_side(image.size, side), pillow.Resampling.BILINEAR)
        left, top = round((image.width - width) / 2), round((image.height - height) / 2)
        return image.crop((left, top, left + width, top + height))

    return _decoded(file, shape, fit)


def _shorter_side(size: tuple[int, int], side: int) -> tuple[int, int]:
    """(width, height) with the shorter of them `side`; the longer is rounded down."""
    width, height = size
    return (side, int(side * height / width)) if width <= height else (int(side * width / height), side)


def decode_random_crop(file: Path, seed: int, shape: tuple[int, ...], flip: bool) -> Tensor:
    """(C, H, W) uint8: a random part of an image file, 8-100 % of its area at an aspect of 3:4 to 4:3, resized; and mirrored
    every second time. The same for the same seed.

    Crops are drawn as torchvision's RandomResizedCrop draws them: ten tries, then the largest central part.
    """
    height, width = shape[1:]
    generator = torch.Generator().manual_seed(seed)

    def fit(image: Any, pillow: Any, operations: Any) -> Any:
        left, top, wide, tall = random_box(image.width, image.height, generator)
        part = image.crop((left, top, left + wide, top + tall)).resize((width, height), pillow.Resampling.BILINEAR)
        mirrored = flip and float(torch.rand(1, generator=generator)) < 0.5
        return part.transpose(pillow.Transpose.FLIP_LEFT_RIGHT) if mirrored else part

    return _decoded(file, shape, fit)


def random_box(width: int, height: int, generator: torch.Generator) -> tuple[int, int, int, int]:
    """Left, top, width and height of a random part of an image."""
    low, high = torch.log(torch.tensor(ASPECT)).tolist()
    for _ in range(_TRIES):
        area = width * height * float(torch.empty(1).uniform_(*AREA, generator=generator))
        aspect = float(torch.exp(torch.empty(1).uniform_(low, high, generator=generator)))
        wide, tall = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < wide <= width and 0 < tall <= height:
            top = int(torch.randint(0, height - tall + 1, (1,), generator=generator))
            left = int(torch.randint(0, width - wide + 1, (1,), generator=generator))
            return left, top, wide, tall
    wide, tall = width, height
    if width / height < min(ASPECT):
        tall = round(width / min(ASPECT))
    elif width / height > max(ASPECT):
        wide = round(height * max(ASPECT))
    return (width - wide) // 2, (height - tall) // 2, wide, tall


def _decoded(file: Path, shape: tuple[int, ...], fit: Callable[[Any, Any, Any], Any]) -> Tensor:
    """The pixels that `fit` makes of the upright image, (image, Pillow's Image, its ImageOps) -> image of H x W.

    The one place where image files are decoded: regular files of `FORMATS`, within the `Limits`.
    """
    channels, height, width = shape
    if channels not in (1, 3):
        raise PatchbayesError(
            f"images have 3 channels (color) or 1 (gray), not {channels}; shape={shape} was asked for."
        )
    pillow = optional("PIL.Image", "data", "reading image files")
    operations = optional("PIL.ImageOps", "data", "reading image files")
    limits = Limits.current()
    with open_regular(Path(file)) as content:
        limits.check_image(str(file), os.fstat(content.fileno()).st_size)
        try:
            with pillow.open(content, formats=FORMATS) as image:
                limits.check_pixels(str(file), *image.size)
                if image.mode.startswith(("I", "F")):
                    raise PatchbayesError(
                        f"{file}: more than 8 bits for each channel (mode {image.mode}); convert it to 8 bits."
                    )
                upright = operations.exif_transpose(image).convert("RGB" if channels == 3 else "L")
                pixels = fit(upright, pillow, operations)
        except PatchbayesError:
            raise
        except Exception as error:  # decoders raise many kinds on damaged files
            why = str(error).replace(repr(content), "its content")
            raise PatchbayesError(
                f"{file}: cannot be read as an image of a known format ({', '.join(FORMATS)}): {why or type(error).__name__}; "
                "repair or remove it."
            ) from error
    return torch.from_numpy(np.array(pixels)).view(height, width, channels).permute(2, 0, 1).contiguous()
