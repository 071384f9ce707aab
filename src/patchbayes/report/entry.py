"""One value of a record together with the place it stands at, so that every complaint can name file and key."""

import math
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from ..errors import PatchbayesError


@dataclass(frozen=True)
class Entry:
    """A JSON value (None where it is missing), the file it is from and its dotted key there."""

    value: Any
    source: str
    key: str = ""

    def fail(self, required: str) -> NoReturn:
        shown = repr(self.value)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        given = "missing" if self.value is None else f"{clean(shown)} ({type(self.value).__name__})"
        raise PatchbayesError(
            f"report: {self.source}: {self.key or 'the record'} is {given}; {required} is required. "
            "Write the file anew with `patchbayes evaluate`, or leave this run out."
        )

    def __getitem__(self, name: str) -> "Entry":
        """The value under a name; a missing one is an entry too, whose value is None."""
        if not isinstance(self.value, Mapping):
            self.fail("an object with named values")
        return Entry(self.value.get(name), self.source, f"{self.key}.{name}" if self.key else name)

    @property
    def present(self) -> bool:
        return self.value is not None

    def named(self) -> Iterator[tuple[str, "Entry"]]:
        """Name and entry of every value of an object."""
        if not isinstance(self.value, Mapping):
            self.fail("an object with named values")
        for name in self.value:
            if not isinstance(name, str):
                self.fail("an object whose names are texts")
            yield clean(name), self[name]

    def listed(self) -> list["Entry"]:
        """The entries of a list."""
        if not isinstance(self.value, list | tuple):
            self.fail("a list")
        return [Entry(item, self.source, f"{self.key}[{number}]") for number, item in enumerate(self.value)]

    def text(self, default: str | None = None) -> str:
        """A text without control characters; lines stay lines."""
        if self.value is None and default is not None:
            return default
        if not isinstance(self.value, str):
            self.fail("a text")
        return clean(self.value)

    def number(self) -> float | None:
        """A number, or None for null and NaN. Infinity is a number: a probability of zero has that log-likelihood."""
        if self.value is None:
            return None
        if isinstance(self.value, bool) or not isinstance(self.value, int | float):
            self.fail("a number or null")
        try:
            value = float(self.value)
        except OverflowError:
            self.fail("a number that fits into a double")
        return None if math.isnan(value) else value

    def integer(self) -> int | None:
        if self.value is None:
            return None
        if isinstance(self.value, bool) or not isinstance(self.value, int):
            self.fail("a whole number or null")
        return self.value

    def count(self) -> int:
        value = self.integer()
        if value is None or not 0 <= value < 2**53:
            self.fail("a count, zero or more")
        return value

    def numbers(self, length: int | None = None) -> tuple[float | None, ...]:
        """A list of numbers, each may be null."""
        values = tuple(entry.number() for entry in self.listed())
        if length is not None and len(values) != length:
            self.fail(f"a list of {length} numbers (it has {len(values)})")
        return values


def clean(text: str) -> str:
    """The text with what could disturb a page or a terminal replaced by U+FFFD.

    That is: control characters other than newline and tab, lone surrogates, and marks that reverse the writing direction.
    """
    directions = {*range(0x202A, 0x202F), *range(0x2066, 0x206A)}
    return "".join(
        "\N{REPLACEMENT CHARACTER}"
        if (unicodedata.category(c) in ("Cc", "Cs") and c not in "\n\t") or ord(c) in directions
        else c
        for c in text
    )
