"""Images read from files when they are needed."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..errors import PatchbayesError
from ..files import open_regular
from .extras import optional
from .limits import Limits
from .splits import Split

SUFFIXES = frozenset((".jpg", ".jpeg", ".png", ".bmp", ".gif", ".pgm", ".ppm", ".tif", ".tiff", ".webp"))
# The formats that are decoded, whatever a file is called. Pillow knows others, one of which (EPS) starts a program.
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "PPM", "TIFF", "WEBP")
_THREADS = 8


class ImageFileSplit(Split):
    """Image files and their class numbers (N,); decoded when fetched, with `decode_image`, in a few threads.

    shape: (C, H, W) of every image, with C = 3 for color or 1 for gray.
    """

    def __init__(self, files: Sequence[Path], targets: Tensor, shape: tuple[int, ...]) -> None:
        if len(files) != len(targets):
            raise PatchbayesError(f"ImageFileSplit: {len(files)} files and {len(targets)} targets; as many of each.")
        self.files = list(files)
        self.shape = shape
        self._targets = targets

    @property
    def targets(self) -> Tensor:
        return self._targets

    def fetch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        files = [self.files[index] for index in indices.tolist()]
        return decode_images(files, self.shape), self._targets[indices]

    def subset(self, indices: Tensor) -> "ImageFileSplit":
        return ImageFileSplit([self.files[index] for index in indices.tolist()], self._targets[indices], self.shape)


def decode_images(files: Sequence[Path], shape: tuple[int, ...]) -> Tensor:
    """(B, C, H, W) uint8 of B image files, each made to fit by `decode_image`."""
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
        return torch.stack(list(pool.map(partial(decode_image, shape=shape), files)))


def decode_image(file: Path, shape: tuple[int, ...]) -> Tensor:
    """(C, H, W) uint8 of an image file: upright, resized until it just covers H x W, center cropped.

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
                pixels = operations.fit(upright, (width, height), method=pillow.Resampling.BILINEAR)
        except PatchbayesError:
            raise
        except Exception as error:  # decoders raise many kinds on damaged files
            why = str(error).replace(repr(content), "its content")
            raise PatchbayesError(
                f"{file}: cannot be read as an image of a known format ({', '.join(FORMATS)}): {why or type(error).__name__}; "
                "repair or remove it."
            ) from error
    return torch.from_numpy(np.array(pixels)).view(height, width, channels).permute(2, 0, 1).contiguous()
