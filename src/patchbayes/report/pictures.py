"""The most and least certain examples as small pictures with their captions."""

import base64
import io
from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import PatchbayesError
from ..runs.record import Example
from .groups import Comparison
from .records import EvaluatedRun

LARGEST_SIDE = 96  # pixels a picture keeps in the report
LARGEST_READ = 4096  # pixels a side of a picture in a record may have
MOST = 8  # pictures in a row


@dataclass(frozen=True)
class Thumbnail:
    """One example; `address` is a data address of the picture, empty where the input is not a picture."""

    address: str
    answer: str
    truth: str
    right: bool
    confidence: str
    label: str


@dataclass(frozen=True)
class Gallery:
    """The examples of one group, from its first seed."""

    heading: str
    most: tuple[Thumbnail, ...]
    least: tuple[Thumbnail, ...]


def galleries(comparison: Comparison) -> Iterator[Gallery]:
    for group in comparison.groups:
        run = group.first
        examples = run.examples
        if examples is not None and (examples.most_certain or examples.least_certain):
            seed = f", seed {run.seed}" if len(group.runs) > 1 else ""
            yield Gallery(
                f"{group.label}{seed}",
                tuple(_thumbnail(run, example) for example in examples.most_certain[:MOST]),
                tuple(_thumbnail(run, example) for example in examples.least_certain[:MOST]),
            )


def _thumbnail(run: EvaluatedRun, example: Example) -> Thumbnail:
    confidence = "" if example.confidence is None else f"{100 * example.confidence:.0f} %"
    right = example.true == example.predicted
    spoken = f"Example {example.index}: predicted {example.predicted}{f' with {confidence}' if confidence else ''}, "
    return Thumbnail(
        _address(run, example),
        example.predicted,
        example.true,
        right or run.task == "regression",
        confidence,
        spoken + ("which is right" if right else f"true is {example.true}"),
    )


def _address(run: EvaluatedRun, example: Example) -> str:
    """The picture as a data address, made smaller where it is large; what is not a readable PNG is refused."""
    if example.png is None:
        return ""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(example.png), formats=["PNG"]) as image:
            if max(image.size) > LARGEST_READ:
                raise ValueError(f"{image.size[0]} x {image.size[1]} pixels, at most {LARGEST_READ} are read")
            image.load()
            small = image.convert("RGBA" if "A" in image.getbands() else "RGB" if image.mode != "L" else "L")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise PatchbayesError(
            f"report: {run.place}: examples: the picture of example {example.index} cannot be read ({error}); expected a PNG "
            "picture in base64.\n  do       evaluate the run again with `patchbayes evaluate`."
        ) from error
    small.thumbnail((LARGEST_SIDE, LARGEST_SIDE))
    out = io.BytesIO()
    small.save(out, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"
