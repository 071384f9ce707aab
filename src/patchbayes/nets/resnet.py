"""Residual networks of basic blocks (He et al. 2016), the ImageNet experiment's ResNet-18 (table 4)."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from ..errors import PatchbayesError

Stem = Literal["imagenet", "cifar"]


def resnet18(num_classes: int = 1000, stem: Stem = "imagenet", width: int = 64) -> "ResNet":
    """ResNet-18: 11,689,512 parameters with the defaults (table 3), parameter names as in torchvision.

    `stem="cifar"` keeps the resolution of small images: a 3x3 convolution, no pooling. `width` is the number of
    channels of the first stage; it doubles at each of the next three.

    (B, 3, height, width) -> logits (B, num_classes).
    """
    return ResNet((2, 2, 2, 2), (width, 2 * width, 4 * width, 8 * width), num_classes, stem)


class ResNet(nn.Module):
    """Stem, one `layer<i>` of basic blocks per stage (the first block of stages 2, 3, ... halves the resolution),
    global average, `fc`."""

    def __init__(
        self, depths: Sequence[int], channels: Sequence[int], num_classes: int, stem: Stem, in_channels: int = 3
    ) -> None:
        super().__init__()
        if stem not in ("imagenet", "cifar"):
            raise PatchbayesError(f'ResNet: stem={stem!r} is unknown; use "imagenet" (7x7, pooling) or "cifar" (3x3).')
        imagenet = stem == "imagenet"
        self.conv1 = (
            nn.Conv2d(in_channels, channels[0], 7, stride=2, padding=3, bias=False)
            if imagenet
            else nn.Conv2d(in_channels, channels[0], 3, padding=1, bias=False)
        )
        self.bn1 = nn.BatchNorm2d(channels[0])
        self.relu = nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1) if imagenet else nn.Identity()
        self.stage_names = [f"layer{i}" for i in range(1, len(depths) + 1)]
        entering = channels[0]
        for i, (name, depth, leaving) in enumerate(zip(self.stage_names, depths, channels, strict=True)):
            first = BasicBlock(entering, leaving, 2 if i else 1)
            rest = [BasicBlock(leaving, leaving, 1) for _ in range(depth - 1)]
            self.add_module(name, nn.Sequential(first, *rest))
            entering = leaving
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(entering, num_classes)
        init_convolutions_(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for name in self.stage_names:
            x = self.get_submodule(name)(x)
        logits: Tensor = self.fc(torch.flatten(self.avgpool(x), 1))
        return logits


class BasicBlock(nn.Module):
    """relu(bn2(conv2(relu(bn1(conv1(x))))) + shortcut(x)); a 1x1 convolution and BN where the shape changes."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        # Not in place: a value shared between draws (a cached prefix) must survive its readers.
        self.relu = nn.ReLU()
        self.downsample: nn.Module | None = None
        if stride != 1 or in_channels != out_channels:
            projection = nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False)
            self.downsample = nn.Sequential(projection, nn.BatchNorm2d(out_channels))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        out: Tensor = self.relu(self.bn2(self.conv2(x)) + shortcut)
        return out


def init_convolutions_(model: nn.Module) -> None:
    """Convolutions ~ N(0, 2 / (k^2 out_channels)) (He et al. 2015, fan-out); other layers keep PyTorch's start."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
