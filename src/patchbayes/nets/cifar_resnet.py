"""Residual networks for 32x32 images (He et al. 2016, section 4.2), as trained publicly on CIFAR-100."""

from .resnet import ResNet


def cifar_resnet20(num_classes: int = 100) -> ResNet:
    """ResNet-20 for small images: three stages of three blocks. (B, 3, 32, 32) -> logits (B, num_classes)."""
    return _cifar_resnet(3, num_classes)


def cifar_resnet56(num_classes: int = 100) -> ResNet:
    """ResNet-56 for small images: three stages of nine blocks. (B, 3, 32, 32) -> logits (B, num_classes)."""
    return _cifar_resnet(9, num_classes)


def small_resnet(in_channels: int = 1, num_classes: int = 10) -> ResNet:
    """ResNet-8 for images of 14 or 16 pixels: three stages of one block. (B, in_channels, H, W) -> logits (B, num_classes)."""
    return ResNet((1, 1, 1), (16, 32, 64), num_classes, "cifar", in_channels)


def _cifar_resnet(blocks: int, num_classes: int) -> ResNet:
    """6 blocks + 2 layers, 16-32-64 channels. The shortcuts are projections (He et al.'s option B), not zero-padded."""
    return ResNet((blocks,) * 3, (16, 32, 64), num_classes, "cifar")
