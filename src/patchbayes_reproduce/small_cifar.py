"""A part of CIFAR-100 that a network of one core's size can learn by heart, and the networks that do.

    python -m patchbayes_reproduce.small_cifar FOLDER --data-dir DATA    writes image files, FOLDER/train/CLASS/*.png, ...

The paper's claims are about networks that fit their training data and are too sure of themselves. Twenty classes with 5,000
training images at 16 pixels, without augmentation, bring a network there in minutes.
"""

import argparse
import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from patchbayes.data import Split, read
from patchbayes.data.extras import optional
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


def write_image_tree(
    folder: Path, data_dir: Path | None, *, train: int = 100, held_out: int = 50, test: int = 50, side: int = 32
) -> Path:
    """Twenty classes of CIFAR-100 as files of images, folder/train, val and test / CLASS / NUMBER.png, for `images:FOLDER`.

    So many of each class in each part; a tree that is there is left alone.
    """
    done = folder / ".complete"
    if done.exists():
        return folder
    pillow = optional("PIL.Image", "data", "writing images")
    data = read("cifar100", data_dir, held_out=0)
    chosen = range(0, len(data.classes), _EVERY)
    parts = {"train": (data.train, 0, train), "val": (data.train, train, held_out), "test": (data.test, 0, test)}
    for part, (split, start, number) in parts.items():
        places = first_of_each(split, chosen, start + number).view(len(chosen), -1)[:, start:].flatten()
        pixels, targets = split.fetch(places)
        for place, image, target in zip(places.tolist(), shrunk(pixels, side), targets.tolist(), strict=True):
            file = folder / part / data.classes[target] / f"{place:05}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            pillow.fromarray(image.permute(1, 2, 0).numpy()).save(file)
    write_atomically(done, b"")
    return folder


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


def main(words: Sequence[str] | None = None) -> None:
    """The command line of this file."""
    parser = argparse.ArgumentParser(description="Twenty classes of CIFAR-100 as a tree of image files.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data-dir", type=Path, help="where CIFAR-100 lies; else $PATCHBAYES_DATA")
    parser.add_argument("--train", type=int, default=100, help="images of a class to train on")
    parser.add_argument("--held-out", type=int, default=50, help="images of a class in val")
    parser.add_argument("--test", type=int, default=50, help="images of a class in test")
    parser.add_argument("--side", type=int, default=32, help="pixels; a divisor of 32")
    given = parser.parse_args(words)
    write_image_tree(
        given.folder, given.data_dir, train=given.train, held_out=given.held_out, test=given.test, side=given.side
    )


if __name__ == "__main__":
    main()
