"""Folders of images: DIR/train/CLASS/*, and DIR/val/CLASS/*, DIR/test/CLASS/* or both."""

from pathlib import Path

import torch

from ..errors import PatchbayesError
from .contents import Contents
from .image_files import SUFFIXES, ImageFileSplit, View

DEFAULT_SIZE = 224
#: From this side on images are taken for photographs, whose borders testing leaves out.
_PHOTOGRAPH = 64
# The usual statistics of photographs (those of ImageNet): measuring would mean decoding every file first.
_STATISTICS = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def read_image_folder(folder: Path, size: int | None = None) -> Contents:
    """Color images of size x size (224 where None); the classes are the folders of DIR/train, in alphabetical order.

    Training takes random parts of the whole image; testing resizes it to 8/7 of the side (256 for 224) and takes the center, or
    all of it below 64 pixels.
    With DIR/val and DIR/test, the first is the held-out part and the second the test part; either alone is the test part.
    """
    side = DEFAULT_SIZE if size is None else size
    if side < 1:
        raise PatchbayesError(f"images:{folder}: size={size}; at least one pixel.")
    if not (folder / "train").is_dir():
        raise PatchbayesError(f"{folder}: no folder train; it needs train/CLASS/* and val/CLASS/* or test/CLASS/*.")
    classes = tuple(sorted(path.name for path in (folder / "train").iterdir() if _is_class(path)))
    if len(classes) < 2:
        raise PatchbayesError(
            f"{folder / 'train'}: {len(classes)} class folders{f' ({classes[0]})' if classes else ''}; one folder for each of "
            f"two or more classes is needed."
        )
    tests = [name for name in ("val", "test") if (folder / name).is_dir()]
    if not tests:
        raise PatchbayesError(f"{folder}: neither val nor test; put the test images into {folder / 'test'}/CLASS/.")
    parts = [image_split(folder / name, classes, (3, side, side), test_view(side)) for name in ("train", *tests)]
    return Contents(
        "classification",
        train=parts[0],
        held_out=parts[1] if len(tests) == 2 else None,
        test=parts[-1],
        classes=classes,
        augmentation="resized-crop+flip",
        statistics=_STATISTICS,
    )


def test_view(side: int) -> View:
    """How whole images of a folder are looked at."""
    return "photograph" if side >= _PHOTOGRAPH else "cover"


def image_split(folder: Path, classes: tuple[str, ...], shape: tuple[int, ...], view: View = "cover") -> ImageFileSplit:
    """The image files of folder/CLASS for each of the classes; every class must be there, and no other."""
    present = {path.name for path in folder.iterdir() if _is_class(path)}
    if present != set(classes):
        wrong = sorted(present ^ set(classes))
        kind = "is not among the classes" if wrong[0] in present else "is missing"
        raise PatchbayesError(
            f"{folder / wrong[0]} {kind}; the folders of {len(classes)} classes are needed, {classes[0]} to {classes[-1]}."
        )
    files, targets = [], []
    for number, name in enumerate(classes):
        images = sorted(path for path in (folder / name).rglob("*") if _is_image(path))
        if not images:
            raise PatchbayesError(f"{folder / name}: no image file ({', '.join(sorted(SUFFIXES))}).")
        files += images
        targets += [number] * len(images)
    return ImageFileSplit(files, torch.tensor(targets), shape, view)


def _is_class(path: Path) -> bool:
    return path.is_dir() and not path.name.startswith(".")


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".")
