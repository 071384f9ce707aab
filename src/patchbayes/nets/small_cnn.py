"""A convolutional network small enough for demos and tests."""

from collections import OrderedDict

from torch import nn

from .resnet import init_convolutions_


def small_cnn(in_channels: int = 1, num_classes: int = 10, size: int = 8) -> nn.Sequential:
    """conv-BN-ReLU at full resolution, then again with stride 2 until at most 4x4 is left, 2x2 average, linear.

    `size` is the side of the images the network is planned for: 8 (scikit-learn's digits) gives two convolutions,
    28 (MNIST) four. Images of another size also pass, with less or more left to average.

    (B, in_channels, height, width) -> logits (B, num_classes).
    """
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    channels, side, i = 16, size, 1
    _add_convolution(layers, i, in_channels, channels, 1)
    while side > 4:
        i += 1
        _add_convolution(layers, i, channels, min(2 * channels, 64), 2)
        channels, side = min(2 * channels, 64), (side + 1) // 2
    layers["pool"] = nn.AdaptiveAvgPool2d(2)
    layers["flatten"] = nn.Flatten()
    layers["fc"] = nn.Linear(4 * channels, num_classes)
    model = nn.Sequential(layers)
    init_convolutions_(model)
    return model


def _add_convolution(
    layers: OrderedDict[str, nn.Module], i: int, in_channels: int, out_channels: int, stride: int
) -> None:
    layers[f"conv{i}"] = nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False)
    layers[f"bn{i}"] = nn.BatchNorm2d(out_channels)
    layers[f"relu{i}"] = nn.ReLU()
