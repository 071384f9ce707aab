"""Reading JSON into typed values: one value with the place it stands at, so that every complaint names file and key."""

import base64
import binascii
import dataclasses
import math
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NoReturn

from ..errors import PatchbayesError
from ..plain_text import clean

Count = Annotated[int, "zero or more"]
Answer = Annotated[str, "a class name, or a number, which becomes a text"]
Picture = Annotated[bytes, "a PNG picture, in base64"]
Scalar = str | int | float | None
_PNG = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True)
class Entry:
    """A JSON value (None where it is missing), the file it is from and its dotted key there."""

    value: Any
    source: str
    key: str = ""
    remedy: str = "write the file again with `patchbayes evaluate`, or leave this run out."

    def fail(self, expected: str) -> NoReturn:
        shown = repr(self.value)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        given = "nothing" if self.value is None else f"{clean(shown)} ({type(self.value).__name__})"
        raise PatchbayesError(
            f"{self.source}: {self.key or 'the record'}: expected {expected}, got {given}.\n  do       {self.remedy}"
        )

    def __getitem__(self, name: str) -> "Entry":
        """The value under a name; a missing one is an entry too, whose value is None."""
        if not isinstance(self.value, Mapping):
            self.fail("an object with named values")
        return Entry(self.value.get(name), self.source, f"{self.key}.{name}" if self.key else name, self.remedy)

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
        return [
            Entry(item, self.source, f"{self.key}[{number}]", self.remedy) for number, item in enumerate(self.value)
        ]

    def text(self) -> str:
        """A text without control characters; lines stay lines."""
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

    def integer(self) -> int:
        if isinstance(self.value, bool) or not isinstance(self.value, int):
            self.fail("a whole number")
        return self.value

    def count(self) -> int:
        value = self.integer()
        if not 0 <= value < 2**53:
            self.fail("a count, zero or more")
        return value

    def numbers(self, length: int | None = None) -> tuple[float | None, ...]:
        """A list of numbers, each may be null."""
        values = tuple(entry.number() for entry in self.listed())
        if length is not None and len(values) != length:
            self.fail(f"a list of {length} numbers (it has {len(values)})")
        return values

    def rising(self, length: int | None = None) -> tuple[float, ...]:
        """Confidences, shares or levels."""
        numbers = self.numbers(length)
        values = [value for value in numbers if value is not None]
        if len(values) != len(numbers) or values != sorted(values) or any(not 0 <= value <= 1 for value in values):
            self.fail("a rising list of numbers between 0 and 1")
        return tuple(values)

    def png(self) -> bytes:
        try:
            content = base64.b64decode(self.text(), validate=True)
        except (binascii.Error, ValueError):
            self.fail("a PNG picture in base64")
        if not content.startswith(_PNG):
            self.fail("a PNG picture in base64")
        return content


def read_value(hint: Any, entry: Entry) -> Any:
    """The value of an entry as a type describes it: dataclasses by field, tuples, dictionaries, numbers and texts.

    A dataclass may read itself (`read`), and may check what its types do not say (`check`).
    """
    origin = typing.get_origin(hint)
    if hint in _SCALARS:
        return _SCALARS[hint](entry)
    if origin in (typing.Union, types.UnionType):
        (inner,) = (one for one in typing.get_args(hint) if one is not types.NoneType)
        return read_value(inner, entry) if entry.present else None
    if origin is Literal:
        if entry.value not in typing.get_args(hint):
            entry.fail(" or ".join(map(repr, typing.get_args(hint))))
        return entry.value
    if origin is tuple:
        return tuple(read_value(typing.get_args(hint)[0], item) for item in entry.listed())
    if origin is dict:
        inner = typing.get_args(hint)[1]
        return {name: read_value(inner, item) for name, item in entry.named() if item.present}
    return _read_dataclass(hint, entry)


def _read_dataclass(cls: Any, entry: Entry) -> Any:
    if hasattr(cls, "read"):
        return cls.read(entry)
    hints = typing.get_type_hints(cls, include_extras=True)
    values = {}
    for field in dataclasses.fields(cls):
        inner = entry[field.name]
        defaulted = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        if inner.present or not defaulted:
            values[field.name] = read_value(hints[field.name], inner)
    made = cls(**values)
    if hasattr(made, "check"):
        made.check(entry)
    return made


def _flag(entry: Entry) -> bool:
    if not isinstance(entry.value, bool):
        entry.fail("true or false")
    return entry.value


def _scalar(entry: Entry) -> Scalar:
    return entry.text() if isinstance(entry.value, str) else entry.value if _is_whole(entry) else entry.number()


def _is_whole(entry: Entry) -> bool:
    return isinstance(entry.value, int) and not isinstance(entry.value, bool)


def _finite(entry: Entry) -> float:
    value = entry.number()
    if value is None:
        entry.fail("a number")
    return value


def _answer(entry: Entry) -> str:
    """A class name, or a number as it is read."""
    if isinstance(entry.value, str):
        return entry.text()
    number = entry.number()
    return "?" if number is None else f"{number:.4g}"


_SCALARS: dict[Any, typing.Callable[[Entry], Any]] = {
    str: Entry.text,
    int: Entry.integer,
    bool: _flag,
    float: _finite,
    float | None: Entry.number,
    Count: Entry.count,
    Answer: _answer,
    Picture: Entry.png,
    Scalar: _scalar,
}
