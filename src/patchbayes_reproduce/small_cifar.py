"""A part of CIFAR-100 that a network of one core's size can learn by heart, and the networks that do.

The paper's claims are about networks that fit their training data and are too sure of themselves. Twenty classes with 5,000
training images at 16 pixels, without augmentation, bring a network there in minutes.
"""

import io
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from patchbayes.data import Split, read
from patchbayes.errors import PatchbayesError
from patchbayes.files import write_atomically
from patchbayes.nets import small_resnet
from patchbayes.nets.pyramidnet import pyramidnet

#: Every fifth class; of each so many images to train on or to hold out, and to test.
_EVERY, _TRAIN, _TEST = 5, 350, 50
#: Of the 7,000 images the part that is held out: 5,000 are left, 250 of a class on average.
HELD_OUT = 2 / 7
_SIDE = 16


def write_twenty_classes(file: Path, data_dir: Path | None) -> Path:
    """The part of CIFAR-100 as an npz file for `read("npz:FILE")`; left alone where it is there already."""
    if file.exists():
        return file
    data = read("cifar100", data_dir, held_out=0)
    chosen = range(0, len(data.classes), _EVERY)
    train, test = (
        split.fetch(first_of_each(split, chosen, number))
        for split, number in ((data.train, _TRAIN), (data.test, _TEST))
    )
    content = io.BytesIO()
    np.savez(
        content,
        classes=np.array(data.classes[::_EVERY]),
        x_train=shrunk(train[0], _SIDE).numpy(),
        y_train=(train[1] // _EVERY).numpy(),
        x_test=shrunk(test[0], _SIDE).numpy(),
        y_test=(test[1] // _EVERY).numpy(),
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, content.getvalue())
    return file


def first_of_each(split: Split, classes: range, number: int) -> Tensor:
    """The places of the first `number` examples of each class, class by class."""
    places = [torch.where(split.targets == one)[0][:number] for one in classes]
    lacking = [one for one, found in zip(classes, places, strict=True) if len(found) < number]
    if lacking:
        raise PatchbayesError(f"class {lacking[0]} has fewer than {number} examples; ask for fewer.")
    return torch.cat(places)


def shrunk(pixels: Tensor, side: int) -> Tensor:
    """Images (B, C, 32, 32) uint8 as means of square blocks, (B, C, side, side); `side` divides 32."""
    whole = pixels.shape[-1]
    if whole % side:
        raise PatchbayesError(f"images of {whole} pixels cannot be averaged to {side}: expected a divisor of {whole}.")
    return F.avg_pool2d(pixels.float(), whole // side).round().to(torch.uint8)


# Networks as `train` takes them, patchbayes_reproduce.small_cifar:NAME. Channels last: a third faster on a CPU.


def resnet8(num_outputs: int, input_shape: tuple[int, ...]) -> nn.Module:
    """Three stages of one residual block, 79 thousand parameters for twenty classes."""
    return _channels_last(small_resnet(input_shape[0], num_outputs))


def pyramidnet20(num_outputs: int, input_shape: tuple[int, ...]) -> nn.Module:
    """The paper's architecture at depth 20, alpha 24: 144 thousand parameters for twenty classes."""
    return _channels_last(pyramidnet(20, 24, num_outputs))


def pyramidnet110(num_outputs: int, input_shape: tuple[int, ...]) -> nn.Module:
    """The paper's architecture at its own depth, 110 layers, with alpha 12."""
    return _channels_last(pyramidnet(110, 12, num_outputs))


def _channels_last(network: nn.Module) -> nn.Module:
    for parameter in network.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.to(memory_format=torch.channels_last)
    return network
