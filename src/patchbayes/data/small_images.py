"""Corruptions made for images of about 14 to 32 pixels, where those of ImageNet-C leave nothing to see."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import PatchbayesError

SMALL_SEVERITIES = (1, 2, 3)
_NOISE = (0.06, 0.12, 0.2)
_BLEND = (0.5, 1.0, 2.0)
_CONTRAST = (0.7, 0.5, 0.35)
_BRIGHTNESS = (0.1, 0.2, 0.35)
_SHARE = (3 / 14, 5 / 14, 7 / 14)


def corrupt_small(images: Tensor, name: str, severity: int, seed: int = 0) -> Tensor:
    """Corrupted pixels, uint8 (B, C, H, W) in and out; the same for the same images, name, severity and seed.

    "noise" adds normal noise, "blur" averages neighbors, "contrast" and "brightness" change the levels, "shift" moves by one,
    two or three pixels in both directions, "patch" blackens a square of 3, 5 or 7 pixels of 14.
    """
    if name not in SMALL_CORRUPTIONS or severity not in SMALL_SEVERITIES:
        raise PatchbayesError(
            f"corrupt_small({name!r}, severity {severity!r}): expected one of {', '.join(SMALL_CORRUPTIONS)}, with a severity "
            "from 1 to 3."
        )
    if images.dtype != torch.uint8 or images.dim() != 4:
        raise PatchbayesError(
            f"corrupt_small: expected pixels uint8 (B, C, H, W), got {images.dtype} {tuple(images.shape)}."
        )
    generator = torch.Generator().manual_seed(seed)
    changed = SMALL_CORRUPTIONS[name](images.float() / 255, severity - 1, generator)
    return (changed * 255).round().clamp(0, 255).to(torch.uint8)


def _noise(x: Tensor, level: int, generator: torch.Generator) -> Tensor:
    return x + _NOISE[level] * torch.randn(x.shape, generator=generator)


def _blur(x: Tensor, level: int, generator: torch.Generator) -> Tensor:
    row = torch.tensor([1.0, 2.0, 1.0]) / 4
    kernel = (row[:, None] * row).expand(x.shape[1], 1, 3, 3)
    for left in (min(1.0, _BLEND[level]), _BLEND[level] - 1):
        if left > 0:
            x = x.lerp(F.conv2d(F.pad(x, (1, 1, 1, 1), mode="replicate"), kernel, groups=x.shape[1]), left)
    return x


def _contrast(x: Tensor, level: int, generator: torch.Generator) -> Tensor:
    mean = x.mean((1, 2, 3), keepdim=True)
    return mean + _CONTRAST[level] * (x - mean)


def _brightness(x: Tensor, level: int, generator: torch.Generator) -> Tensor:
    return x + _BRIGHTNESS[level]


def _shift(x: Tensor, level: int, generator: torch.Generator) -> Tensor:
    steps = level + 1
    wide = F.pad(x, (steps,) * 4)
    signs = torch.randint(2, (len(x), 2), generator=generator) * 2 * steps
    height, width = x.shape[2:]
    return torch.stack([w[:, i : i + height, j : j + width] for w, (i, j) in zip(wide, signs.tolist(), strict=True)])


def _patch(x: Tensor, level: int, generator: torch.Generator) -> Tensor:
    x = x.clone()
    side = max(1, round(_SHARE[level] * min(x.shape[2:])))
    places = torch.rand(len(x), 2, generator=generator)
    for image, (i, j) in zip(x, places.tolist(), strict=True):
        top, left = int(i * (x.shape[2] - side + 1)), int(j * (x.shape[3] - side + 1))
        image[:, top : top + side, left : left + side] = 0
    return x


SMALL_CORRUPTIONS: dict[str, Callable[[Tensor, int, torch.Generator], Tensor]] = {
    "noise": _noise,
    "blur": _blur,
    "contrast": _contrast,
    "brightness": _brightness,
    "shift": _shift,
    "patch": _patch,
}
