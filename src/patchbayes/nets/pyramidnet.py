"""Additive PyramidNet for 32x32 images (Han et al. 2017), the CIFAR-100 experiment's network (table 6)."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import PatchbayesError
from .resnet import init_convolutions_


def pyramidnet(depth: int = 110, alpha: float = 270, num_classes: int = 100) -> "PyramidNet":
    """PyramidNet without bottlenecks: 28,511,307 parameters with the defaults (table 3).

    Block j of n has round(16 + j alpha / n) channels: the width grows in every block, not once per stage.

    (B, 3, height, width) -> logits (B, num_classes).
    """
    return PyramidNet(depth, alpha, num_classes)


class PyramidNet(nn.Module):
    """Stem conv-BN without ReLU, three stages `layer1..3` of (depth - 2) / 6 blocks, BN-ReLU, global average, `fc`."""

    def __init__(self, depth: int, alpha: float, num_classes: int) -> None:
        super().__init__()
        if depth < 8 or (depth - 2) % 6:
            raise PatchbayesError(
                f"pyramidnet: depth={depth} must be 6n + 2 (8, 14, ..., 110): three stages of n blocks."
            )
        blocks = (depth - 2) // 6
        width = 16.0
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        stages: list[nn.Sequential] = []
        for stage in range(3):
            layers = []
            for block in range(blocks):
                entering = round(width)
                width += alpha / (3 * blocks)  # added up in floating point and only then rounded, as the authors do
                stride = 2 if stage > 0 and block == 0 else 1
                layers.append(PyramidBlock(entering, round(width), stride))
            stages.append(nn.Sequential(*layers))
        self.layer1, self.layer2, self.layer3 = stages
        self.bn_final = nn.BatchNorm2d(round(width))
        self.relu_final = nn.ReLU()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(round(width), num_classes)
        init_convolutions_(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn1(self.conv1(x))
        x = self.layer3(self.layer2(self.layer1(x)))
        x = self.avgpool(self.relu_final(self.bn_final(x)))
        logits: Tensor = self.fc(torch.flatten(x, 1))
        return logits


class PyramidBlock(nn.Module):
    """bn3(conv2(relu(bn2(conv1(bn1(x)))))) + shortcut(x), no ReLU after the sum.

    The shortcut has no parameters: 2x2 average where the block halves the resolution, then zeros as new channels.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(in_channels)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU()
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.downsample = nn.AvgPool2d(2, ceil_mode=True) if stride == 2 else nn.Identity()
        self.new_channels = out_channels - in_channels

    def forward(self, x: Tensor) -> Tensor:
        shortcut = F.pad(self.downsample(x), (0, 0, 0, 0, 0, self.new_channels))
        x = self.conv1(self.bn1(x))
        x = self.conv2(self.relu(self.bn2(x)))
        out: Tensor = self.bn3(x) + shortcut
        return out
