"""Preparation: from raw examples to what a network takes, and back into a run's configuration."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import PatchbayesError

Augmentation = Literal["none", "crop", "crop+flip", "resized-crop+flip"]
_SHIFT = 4
_LARGEST = 3.4e38  # of float32, in which inputs are prepared
AREA = (0.08, 1.0)
ASPECT = (3 / 4, 4 / 3)


@dataclass(frozen=True)
class Preparation:
    """inputs: (x - mean) / std for each channel or feature, where pixels x are first divided by 255.

    mean, std: one number for each channel (images) or feature (tables).
    augmentation: what `augment` does to training images. "crop" shifts by up to 4 pixels with black borders, "flip" mirrors
        every second image, "resized-crop" takes 8-100 % of the area at an aspect of 3:4 to 4:3 back to full size.
    target_mean, target_std: of each target of a regression; () for classification.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    augmentation: Augmentation = "none"
    target_mean: tuple[float, ...] = ()
    target_std: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.augmentation, str) or self.augmentation not in get_args(Augmentation):
            raise PatchbayesError(
                f"Preparation(augmentation={self.augmentation!r}): one of {', '.join(get_args(Augmentation))}."
            )
        for name in ("", "target_"):
            mean, std = getattr(self, f"{name}mean"), getattr(self, f"{name}std")
            if not all(isinstance(one, tuple) and all(isinstance(v, float | int) for v in one) for one in (mean, std)):
                raise PatchbayesError(f"Preparation({name}mean={mean!r}, {name}std={std!r}): expected numbers.")
            if (
                len(mean) != len(std)
                or not all(abs(m) <= _LARGEST for m in mean)
                or not all(0 < s <= _LARGEST for s in std)
            ):
                raise PatchbayesError(
                    f"Preparation({name}mean={mean}, {name}std={std}): as many finite means as positive deviations."
                )

    def inputs(self, raw: Tensor) -> Tensor:
        """float32 network inputs of raw inputs (B, C, H, W) or (B, F)."""
        if raw.dim() not in (2, 4) or raw.shape[1] != len(self.mean):
            raise PatchbayesError(
                f"Preparation.inputs: given {tuple(raw.shape)}; this preparation takes (B, C, H, W) or (B, F) with "
                f"{len(self.mean)} channels or features."
            )
        scale = 255.0 if raw.dtype == torch.uint8 else 1.0
        shape = (1, -1) + (1,) * (raw.dim() - 2)
        mean = torch.tensor([m * scale for m in self.mean], device=raw.device).view(shape)
        std = torch.tensor([s * scale for s in self.std], device=raw.device).view(shape)
        return (raw.float() - mean) / std

    def augment(self, raw: Tensor, generator: torch.Generator) -> Tensor:
        """Randomly changed raw images of the same shape; (B, C, H, W) uint8 in and out, each image its own change."""
        if self.augmentation == "none":
            return raw
        if raw.dim() != 4:
            raise PatchbayesError(
                f"Preparation(augmentation={self.augmentation!r}): images (B, C, H, W) can be augmented; given "
                f'{tuple(raw.shape)}. Use "none" for tables.'
            )
        changed = _resized_crop(raw, generator) if "resized" in self.augmentation else _shifted(raw, generator)
        return _mirrored(changed, generator) if "flip" in self.augmentation else changed

    def targets(self, targets: Tensor) -> Tensor:
        """Standardized targets of a regression (B, D); class numbers stay what they are."""
        if not self.target_mean:
            return targets
        return (targets - targets.new_tensor(self.target_mean)) / targets.new_tensor(self.target_std)

    def to_config(self) -> dict[str, Any]:
        """Plain values for a JSON file; `from_config` gives the same preparation back."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Preparation":
        known = {field.name for field in fields(cls)}
        if not isinstance(config, Mapping):
            raise PatchbayesError(f"Preparation.from_config: expected an object, got a {type(config).__name__}.")
        if not {"mean", "std"} <= config.keys() <= known:
            raise PatchbayesError(
                f"Preparation.from_config: given the keys {', '.join(config)}; mean and std are needed, and only "
                f"{', '.join(sorted(known))} are known."
            )
        values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in config.items()}
        return cls(**values)


def _shifted(raw: Tensor, generator: torch.Generator) -> Tensor:
    batch, _, height, width = raw.shape
    padded = F.pad(raw, (_SHIFT,) * 4)
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # (B, C, 9, 9, H, W), a view
    down, right = torch.randint(0, 2 * _SHIFT + 1, (2, batch), generator=generator)
    return windows[torch.arange(batch), :, down, right]


def _resized_crop(raw: Tensor, generator: torch.Generator) -> Tensor:
    batch, _, height, width = raw.shape
    area, aspect, y, x = torch.rand(4, batch, generator=generator)
    area = AREA[0] + (AREA[1] - AREA[0]) * area
    aspect = torch.exp(math.log(ASPECT[0]) + math.log(ASPECT[1] / ASPECT[0]) * aspect)
    tall, wide = (area / aspect).sqrt().clamp(max=1), (area * aspect).sqrt().clamp(max=1)
    # Coordinates run from -1 to 1: a window of share s has its center within 1 - s of the middle.
    theta = torch.zeros(batch, 2, 3)
    theta[:, 0, 0], theta[:, 0, 2] = wide, (2 * x - 1) * (1 - wide)
    theta[:, 1, 1], theta[:, 1, 2] = tall, (2 * y - 1) * (1 - tall)
    grid = F.affine_grid(theta, [batch, 1, height, width], align_corners=False)
    pixels = F.grid_sample(raw.float(), grid, padding_mode="border", align_corners=False)
    return pixels.round().to(raw.dtype)


def _mirrored(raw: Tensor, generator: torch.Generator) -> Tensor:
    mirror = torch.randint(0, 2, (len(raw), 1, 1, 1), generator=generator).bool()
    return torch.where(mirror, raw.flip(3), raw)
