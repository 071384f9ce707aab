"""The fifteen corruptions at strengths made for images of about 32 pixels, where those of ImageNet-C leave nothing to see.

The strengths are those that CIFAR-10-C was made with (Hendrycks and Dietterich, 2019), lengths in pixels of an image of 32 and
scaled with the side. They are made of tensors, so nothing has to be installed but Pillow (JPEG).

Deviation: the frost of CIFAR-C is cut from photographs of ice; here it is a crystal-like plasma. Snow falls in straight
streaks, and glass takes each pixel from a neighbor instead of exchanging them one after the other.
"""

import io
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .extras import optional

_SIDE = 32
_GRAY = torch.tensor([0.299, 0.587, 0.114])

Change = Callable[[Tensor, int, torch.Generator], Tensor]


def corrupt_small_images(images: Tensor, name: str, severity: int, seeds: Sequence[int]) -> Tensor:
    """Corrupted pixels, uint8 (B, C, H, W) in and out; what is drawn for an image follows from its seed alone."""
    changed = torch.empty_like(images)
    for image, target, seed in zip(images.cpu(), changed, seeds, strict=True):
        generator = torch.Generator().manual_seed(seed)
        pixels = _CHANGES[name](image.float() / 255, severity - 1, generator)
        target.copy_((pixels * 255).round().clamp(0, 255))
    return changed


def _gaussian_noise(x: Tensor, level: int, generator: torch.Generator) -> Tensor:
    return x + (0.04, 0.06, 0.08, 0.09, 0.10)[level] * torch.randn(x.shape, generator=generator)


def _shot_noise(x: Tensor, level: int, generator: torch.Generator) -> Tensor:
    photons = (500.0, 250.0, 100.0, 75.0, 50.0)[level]
    return torch.poisson(x * photons, generator=generator) / photons


def _impulse_noise(x: Tensor, level: int, generator: torch.Generator) -> Tensor:
    hit = torch.rand(x.shape, generator=generator) < (0.01, 0.02, 0.03, 0.05, 0.07)[level]
    salt = torch.rand(x.shape, generator=generator) < 0.5
    return torch.where(hit, salt.float(), x)


def _defocus_blur(x: Tensor, level: int, generator: torch.Generator) -> Tensor:
    radius, softness = ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1.0, 0.2), (1.5, 0.1))[level]
    scale = x.shape[-1] / _SIDE
    reach = max(3, math.ceil(3 * radius * scale))
    grid = torch.arange(-reach, reach + 1.0)
    disk = (grid[:, None].square() + grid.square() <= (radius * scale) ** 2).float()
    row = _gaussian_row(softness * scale, reach)
    return _filtered(x, F.conv2d(disk[None, None], (row[:, None] * row)[None, None], padding=reach)[0, 0])


def _glass_blur(x: Tensor, level: int, generator: torch.Generator) -> Tensor:
    """Blurred, each pixel taken from a random neighbor, blurred again."""
    sigma, rounds = ((0.05, 1), (0.25, 1), (0.4, 1), (0.25, 2), (0.4, 2))[level]
    sigma *= x.shape[-1] / _SIDE
    x = _smooth(x, sigma)
    height, width = x.shape[1:]
    for _ in range(rounds):
        down, right = torch.randint(-1, 2, (2, height, width), generator=generator)
        rows = (torch.arange(height)[:, None] + down).clamp(0, height - 1)
        columns = (torch.arange(width) + right).clamp(0, width - 1)
        x = x[:, rows, columns]
    return _smooth(x, sigma)


def _motion_blur(x: Tensor, level: int, generator: torch.Generator) -> Tensor:
    length, sigma = ((6, 1.0), (6, 1.5), (6, 2.0), (8, 2.0), (9, 2.5))[level]
    return _moved(x, length, sigma, _uniform(-45, 45, generator))


def _zoom_blur(x: Tensor, level: int, generator: torch.Generator) -> Tensor:
    """The mean of the image and of its center enlarged in steps of 1 %."""
    most = (1.06, 1.11, 1.16, 1.21, 1.26)[level]
    steps = [1 + 0.01 * step for step in range(round((most - 1) * 100))]
    return torch.stack([x, *(_zoomed(x, step) for step in steps)]).mean(0)


def _snow(x: Tensor, level: int, generator: torch.Generator) -> Tensor:
    settings = (
        (0.1, 0.2, 0.6, 8, 3.0, 0.95),
        (0.1, 0.2, 0.5, 10, 4.0, 0.9),
        (0.15, 0.3, 0.55, 10, 4.0, 0.9),
        (0.25, 0.3, 0.6, 12, 6.0, 0.85),
        (0.3, 0.3, 0.65, 14, 12.0, 0.8),
    )
    mean, deviation, threshold, length, sigma, kept = settings[level]
    flakes = mean + deviation * torch.randn(1, *x.shape[1:], generator=generator)
    flakes = torch.where(flakes < threshold, 0.0, flakes.clamp(0, 1))
    flakes = _moved(flakes, length, sigma, _uniform(-135, -45, generator))
    brighter = torch.maximum(x, _gray(x) * 1.5 + 0.5)
    return kept * x + (1 - kept) * brighter + flakes + flakes.flip(1, 2)


def _frost(x: Tensor, level: int, generator: torch.Generator) -> Tensor:
    kept, ice = ((1.0, 0.2), (1.0, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45))[level]
    crystals = _plasma(x.shape[1:], 1.6, generator)
    crystals = (2 * (crystals - 0.5).abs()).clamp(0, 1)  # ridges, not clouds
    tint = torch.tensor([0.85, 0.95, 1.0]).view(3, 1, 1) if len(x) == 3 else 1.0
    return kept * x + ice * crystals * tint


def _fog(x: Tensor, level: int, generator: torch.Generator) -> Tensor:
    thickness, decay = ((0.2, 3.0), (0.5, 3.0), (0.75, 2.5), (1.0, 2.0), (1.5, 1.75))[level]
    most = x.max()
    return (x + thickness * _plasma(x.shape[1:], decay, generator)) * most / (most + thickness)


def _brightness(x: Tensor, level: int, generator: torch.Generator) -> Tensor:
    """The value of HSV raised: the largest channel, the others in proportion."""
    most = x.amax(0, keepdim=True)
    raised = (most + (0.05, 0.1, 0.15, 0.2, 0.3)[level]).clamp(max=1)
    return torch.where(most > 0, x * raised / most.clamp_min(1e-6), raised)


def _contrast(x: Tensor, level: int, generator: torch.Generator) -> Tensor:
    means = x.mean((1, 2), keepdim=True)
    return means + (0.75, 0.5, 0.4, 0.3, 0.15)[level] * (x - means)


def _elastic_transform(x: Tensor, level: int, generator: torch.Generator) -> Tensor:
    """A random affine map and, from the second level on, smooth random displacements."""
    reach, sigma, affine = (
        (0.0, 1.0, 0.08),
        (0.05, 0.2, 0.07),
        (0.08, 0.06, 0.06),
        (0.1, 0.04, 0.05),
        (0.1, 0.03, 0.03),
    )[level]
    side = x.shape[-1]
    theta = torch.eye(2, 3) + 2 * affine * (2 * torch.rand(2, 3, generator=generator) - 1)
    grid = F.affine_grid(theta[None], [1, 1, *x.shape[1:]], align_corners=False)
    if reach:
        noise = 2 * torch.rand(2, *x.shape[1:], generator=generator) - 1
        grid = grid + (2 * reach * _smooth(noise, sigma * side)).permute(1, 2, 0)[None]
    return F.grid_sample(x[None], grid, padding_mode="reflection", align_corners=False)[0]


def _pixelate(x: Tensor, level: int, generator: torch.Generator) -> Tensor:
    share = (0.95, 0.9, 0.85, 0.75, 0.65)[level]
    height, width = x.shape[1:]
    small = F.interpolate(x[None], (max(1, int(share * height)), max(1, int(share * width))), mode="area")
    return F.interpolate(small, (height, width), mode="nearest")[0]


def _jpeg_compression(x: Tensor, level: int, generator: torch.Generator) -> Tensor:
    pillow = optional("PIL.Image", "data", "compressing images")
    pixels = (x * 255).round().to(torch.uint8)
    array = pixels.permute(1, 2, 0).numpy() if len(x) == 3 else pixels[0].numpy()
    content = io.BytesIO()
    pillow.fromarray(array).save(content, format="JPEG", quality=(80, 65, 58, 50, 40)[level])
    content.seek(0)
    with pillow.open(content, formats=("JPEG",)) as image:
        found = torch.from_numpy(np.array(image)).float() / 255
    return found.permute(2, 0, 1) if len(x) == 3 else found[None]


def _uniform(low: float, high: float, generator: torch.Generator) -> float:
    return low + (high - low) * float(torch.rand((), generator=generator))


def _gray(x: Tensor) -> Tensor:
    return (_GRAY.view(3, 1, 1) * x).sum(0, keepdim=True) if len(x) == 3 else x


def _gaussian_row(sigma: float, reach: int) -> Tensor:
    row = torch.exp(-torch.arange(-reach, reach + 1.0).square() / (2 * max(sigma, 1e-3) ** 2))
    return row / row.sum()


def _smooth(x: Tensor, sigma: float) -> Tensor:
    row = _gaussian_row(sigma, max(1, math.ceil(3 * sigma)))
    return _filtered(x, row[:, None] * row)


def _filtered(x: Tensor, kernel: Tensor) -> Tensor:
    """Each channel of (C, H, W) averaged with the weights of a kernel of odd size; the border is repeated."""
    reach = kernel.shape[-1] // 2
    weights = (kernel / kernel.sum()).expand(len(x), 1, -1, -1)
    return F.conv2d(F.pad(x[None], (reach,) * 4, mode="replicate"), weights, groups=len(x))[0]


def _moved(x: Tensor, length: int, sigma: float, degrees: float) -> Tensor:
    """Blurred along a direction: a half Gaussian of `length` steps, as a camera that comes to rest."""
    scale = x.shape[-1] / _SIDE
    reach = max(1, math.ceil(length * scale))
    kernel = torch.zeros(2 * reach + 1, 2 * reach + 1)
    angle = math.radians(degrees)
    for step in range(reach + 1):
        weight = math.exp(-((step / scale) ** 2) / (2 * sigma**2))
        kernel[reach + round(step * math.sin(angle)), reach + round(step * math.cos(angle))] += weight
    return _filtered(x, kernel)


def _zoomed(x: Tensor, factor: float) -> Tensor:
    theta = torch.tensor([[1 / factor, 0, 0], [0, 1 / factor, 0]])
    grid = F.affine_grid(theta[None], [1, 1, *x.shape[1:]], align_corners=False)
    return F.grid_sample(x[None], grid, padding_mode="border", align_corners=False)[0]


def _plasma(size: Sequence[int], decay: float, generator: torch.Generator) -> Tensor:
    """Random clouds (1, H, W) between 0 and 1: noise of every scale, `decay` times weaker at each finer one."""
    total = torch.zeros(1, 1, *size)
    side, weight = 2, 1.0
    while side <= 2 * max(size):
        noise = torch.rand(1, 1, side, side, generator=generator)
        total += weight * F.interpolate(noise, tuple(size), mode="bilinear", align_corners=True)
        side, weight = 2 * side, weight / decay
    total = total[0] - total.min()
    return total / total.max().clamp_min(1e-6)


_CHANGES: dict[str, Change] = {
    "gaussian_noise": _gaussian_noise,
    "shot_noise": _shot_noise,
    "impulse_noise": _impulse_noise,
    "defocus_blur": _defocus_blur,
    "glass_blur": _glass_blur,
    "motion_blur": _motion_blur,
    "zoom_blur": _zoom_blur,
    "snow": _snow,
    "frost": _frost,
    "fog": _fog,
    "brightness": _brightness,
    "contrast": _contrast,
    "elastic_transform": _elastic_transform,
    "pixelate": _pixelate,
    "jpeg_compression": _jpeg_compression,
}
