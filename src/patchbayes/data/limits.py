"""Limits: how much a file of data may ask for before it is refused."""

import os
import re
from dataclasses import dataclass, fields, replace
from typing import Self

from ..errors import PatchbayesError

VARIABLE = "PATCHBAYES_LIMITS"
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
# What is unpacked to less than this many times its packed size needs no more room than an ordinary file: no bomb.
_HONEST_RATIO = 20


@dataclass(frozen=True)
class Limits:
    """The largest numbers that are believed without asking.

    classes    classes of a data set that are counted from its labels.
    unpacked   bytes that a zip or gzip file unpacks to, if that is more than twenty times its own size.
    pixels     of an image; beyond 178 million Pillow itself refuses.
    image      bytes of an image file.

    Others are set by the environment variable PATCHBAYES_LIMITS="classes=200000 unpacked=50G". They are no setting of a
    run: a run folder that somebody sent could else lift them.
    """

    classes: int = 100_000
    unpacked: int = 4 * 10**9
    pixels: int = 80 * 10**6
    image: int = 500 * 10**6

    @classmethod
    def current(cls) -> Self:
        """The limits, with what the environment variable changes."""
        changed: dict[str, int] = {}
        known = [field.name for field in fields(cls)]
        for word in os.environ.get(VARIABLE, "").replace(",", " ").split():
            found = re.fullmatch(r"(\w+)=(\d{1,15})([kmgt]?)b?", word, re.IGNORECASE | re.ASCII)
            if found is None or found[1] not in known:
                raise PatchbayesError(
                    f"{VARIABLE}: {word!r} is no limit; write NAME=NUMBER, such as unpacked=50G, with a name of "
                    f"{', '.join(known)}."
                )
            changed[found[1]] = int(found[2]) * _UNITS[found[3].lower()]
        return replace(cls(), **changed)

    def check_classes(self, where: str, count: int) -> None:
        if count > self.classes:
            raise PatchbayesError(
                f"{where}: {count:,} classes, and more than {self.classes:,} are refused: labels this large are mostly numbers "
                f"to regress on, or damaged. If they are right, set {VARIABLE}=classes={count}."
            )

    def check_unpacked(self, where: str, size: int, packed: int) -> None:
        if size > max(self.unpacked, _HONEST_RATIO * packed):
            raise PatchbayesError(
                f"{where}: {packed:,} bytes unpack to {size:,}, and more than {self.unpacked:,} are refused. If the file is "
                f"right and fits into memory, set {VARIABLE}=unpacked={size}."
            )

    def check_image(self, where: str, size: int) -> None:
        if size > self.image:
            raise PatchbayesError(
                f"{where}: an image file of {size:,} bytes, and more than {self.image:,} are refused. If it is right, set "
                f"{VARIABLE}=image={size}."
            )

    def check_pixels(self, where: str, width: int, height: int) -> None:
        if width * height > self.pixels:
            raise PatchbayesError(
                f"{where}: an image of {width} x {height} pixels, and more than {self.pixels:,} are refused. If it is right, "
                f"set {VARIABLE}=pixels={width * height}."
            )
