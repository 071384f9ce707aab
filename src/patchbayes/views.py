"""Views: ways to look at an input that leave its label as it is. A draw that costs a pass can see a view of its own for free.

    predict(model, images, draws=20, views=patchbayes.views.mirror)

averages over draws and views together, each draw with one view, every view with as many draws. The same network without
draws, averaged over the same views, is the rival to compare with: `predict(model, images, draws="mean", views=...)`.
"""

import ast
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from .errors import PatchbayesError

__all__ = ["Views", "as_views", "crops", "matching", "mirror", "named", "shifts"]


class Views:
    """A fixed list of views: functions from images (B, C, H, W) to images of the same shape."""

    def __init__(self, functions: Sequence[Callable[[Tensor], Tensor]], name: str = "views") -> None:
        if not functions:
            raise PatchbayesError("Views: expected at least one function.")
        self.functions, self.name = tuple(functions), name

    def __len__(self) -> int:
        return len(self.functions)

    def assigned(self, draws: int, block: int = 1) -> list[int]:
        """The view of each of so many draws: every view equally often, and to whole blocks of draws where they suffice.

        Balanced draws cancel each other's first-order error within a block, which they do only if they see the same view.
        """
        block = block if block * len(self) <= draws else 1
        return [draw // block % len(self) for draw in range(draws)]

    def view(self, inputs: Any, number: int) -> Any:
        """The inputs as view `number` shows them: all floating-point tensors (B, C, H, W) among them."""
        leaves = [leaf for leaf in tree_leaves(inputs) if _is_image(leaf)]
        if not leaves:
            raise PatchbayesError(
                f"views={self.name}: expected images, floating-point tensors (B, C, H, W), among the inputs.\n"
                "  do       for other inputs give a function (inputs, generator) -> inputs."
            )
        return tree_map(lambda leaf: self._applied(leaf, number) if _is_image(leaf) else leaf, inputs)

    def _applied(self, images: Tensor, number: int) -> Tensor:
        seen = self.functions[number](images)
        check_same("views=" + self.name, images, seen)
        return seen

    def __repr__(self) -> str:
        return f"{self.name} ({len(self)})"


class RandomViews(Views):
    """A view for each draw, made by a function (inputs, generator) -> inputs with a generator of the draw's own."""

    def __init__(self, function: Callable[[Any, torch.Generator], Any], number: int) -> None:
        super().__init__([lambda x: x] * number, getattr(function, "__name__", "views"))
        self._function = function

    def view(self, inputs: Any, number: int) -> Any:
        """The inputs as the function shows them with the seed `number`."""
        seen = self._function(inputs, torch.Generator().manual_seed(number))
        for before, after in zip(tree_leaves(inputs), tree_leaves(seen), strict=False):
            if isinstance(before, Tensor):
                check_same(f"views={self.name}", before, after)
        return seen


def as_views(views: Any, draws: int) -> Views:
    """`Views` as they are; a function (inputs, generator) -> inputs as one view for each draw."""
    if isinstance(views, Views):
        return views
    if callable(views):
        return RandomViews(views, draws)
    raise PatchbayesError(
        f"views={views!r}: expected patchbayes.views.mirror, shifts() or crops(), Views([...]), or a function "
        "(inputs, generator) -> inputs."
    )


def check_same(where: str, before: Tensor, after: Any) -> None:
    """Refuse a view that changes the shape."""
    if not isinstance(after, Tensor) or after.shape != before.shape:
        found = tuple(after.shape) if isinstance(after, Tensor) else type(after).__name__
        raise PatchbayesError(f"{where}: expected a view of shape {tuple(before.shape)}, as the input, got {found}.")


def _is_image(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() == 4 and leaf.is_floating_point()


def _same(images: Tensor) -> Tensor:
    return images


def _mirrored(images: Tensor) -> Tensor:
    return images.flip(-1)


class _Shifted:
    """Images moved by some pixels, zeros coming in; mirrored first or not."""

    def __init__(self, down: int, right: int, mirrored: bool) -> None:
        self.down, self.right, self.mirrored = down, right, mirrored

    def __call__(self, images: Tensor) -> Tensor:
        images = images.flip(-1) if self.mirrored else images
        height, width = images.shape[-2:]
        if abs(self.down) >= height or abs(self.right) >= width:
            raise PatchbayesError(
                f"views.shifts({max(abs(self.down), abs(self.right))}): nothing is left of an image of {height} x {width} "
                "pixels; expected a smaller shift."
            )
        up, left = max(-self.down, 0), max(-self.right, 0)
        padded = F.pad(images, (max(self.right, 0), left, max(self.down, 0), up))
        return padded[..., up : up + height, left : left + width]


class _Cropped:
    """A corner or the middle of the images, enlarged to their size."""

    def __init__(self, part: float, down: float, right: float, mirrored: bool) -> None:
        self.part, self.down, self.right, self.mirrored = part, down, right, mirrored

    def __call__(self, images: Tensor) -> Tensor:
        images = images.flip(-1) if self.mirrored else images
        height, width = images.shape[-2:]
        rows, columns = max(1, round(self.part * height)), max(1, round(self.part * width))
        top, left = round(self.down * (height - rows)), round(self.right * (width - columns))
        piece = images[..., top : top + rows, left : left + columns]
        return F.interpolate(piece, size=(height, width), mode="bilinear", align_corners=False)


#: The image and its mirror image: for networks that were trained with mirrored images.
mirror = Views([_same, _mirrored], "mirror")


def shifts(pixels: int = 1, mirrored: bool = True) -> Views:
    """The image and the image moved by so many pixels in four directions, each also mirrored: ten views, or five."""
    if isinstance(pixels, bool) or not isinstance(pixels, int) or pixels < 1:
        raise PatchbayesError(f"views.shifts(pixels={pixels!r}): expected a whole number of at least 1.")
    places = [(0, 0), (pixels, 0), (-pixels, 0), (0, pixels), (0, -pixels)]
    flips = (False, True) if mirrored else (False,)
    return Views([_Shifted(*place, flip) for place in places for flip in flips], f"shifts({pixels}, {mirrored})")


def crops(part: float = 0.9, mirrored: bool = True) -> Views:
    """The middle and the four corners of the image, enlarged to its size, each also mirrored: ten views, or five."""
    if not 0 < part <= 1:
        raise PatchbayesError(f"views.crops(part={part!r}): expected a number above 0 and at most 1.")
    places = [(0.5, 0.5), (0.0, 0.0), (0.0, 1.0), (1.0, 0.0), (1.0, 1.0)]
    flips = (False, True) if mirrored else (False,)
    return Views([_Cropped(part, *place, flip) for place in places for flip in flips], f"crops({part}, {mirrored})")


def named(name: str) -> Views:
    """The ready views of a name, as `Views.name` has it: "mirror", "shifts(1, True)", "crops(0.9, False)"."""
    known: dict[str, Callable[..., Views]] = {"mirror": lambda: mirror, "shifts": shifts, "crops": crops}
    parts = re.fullmatch(r"(\w+)(?:\(([\w., ]+)\))?", name)
    try:
        if parts is None:
            raise KeyError(name)
        return known[parts[1]](*(ast.literal_eval(f"({parts[2]},)") if parts[2] else ()))
    except (KeyError, TypeError, ValueError, SyntaxError):
        raise PatchbayesError(
            f"views {name!r}: expected mirror, shifts(PIXELS, MIRRORED) or crops(PART, MIRRORED), such as shifts(1, True)."
        ) from None


def matching(augmentation: str) -> Views:
    """The views of images that training with this augmentation has made the network know; see `data.Preparation`."""
    known = {"crop": shifts(1, mirrored=False), "crop+flip": shifts(1), "resized-crop+flip": crops(0.9)}
    if augmentation not in known:
        raise PatchbayesError(
            f"views of the augmentation {augmentation!r}: expected training with one of {', '.join(known)}.\n"
            "  do       train with augmentation, or calibrate without views."
        )
    return known[augmentation]
