"""Columns of a table: what each of them holds, as it was given or as its cells tell."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from ..errors import PatchbayesError

Kind = Literal["number", "decimal-comma", "category", "ignore"]
KINDS: tuple[Kind, ...] = get_args(Kind)
#: What stands in a cell without a value.
MISSING = frozenset(("", "nan", "na", "n/a", "null", "?"))
# A column with this share of numbers is one of numbers, in which the rest are mistakes.
_NEARLY_ALL = 0.8
# A text column with more different values than this is a name or a note, not a category.
_MOST_LEVELS = 50
_SHOWN = 5
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?|[+-]?inf(inity)?", re.ASCII | re.IGNORECASE)
_DECIMAL_COMMA = re.compile(r"[+-]?\d*,\d+(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
_THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2},\d{3}", re.ASCII)
_LARGEST = 3.4028234e38  # float32, as which the values are kept

Cell = tuple[int, str]


@dataclass(frozen=True)
class Column:
    """A column of a table.

    kind    "number"; "decimal-comma": numbers such as 3,5; "category": one 0/1 feature for each of its `levels`; or "ignore".
    given   whether somebody said so; else it was inferred from the cells.
    target  whether it is the column to predict.
    """

    name: str
    kind: Kind
    levels: tuple[str, ...] = ()
    given: bool = False
    target: bool = False

    def __str__(self) -> str:
        more = f", and {len(self.levels) - _SHOWN} more" if len(self.levels) > _SHOWN else ""
        values = f" of {len(self.levels)}: {', '.join(self.levels[:_SHOWN])}{more}" if self.levels else ""
        about = ", ".join(["given" if self.given else "inferred", *(["target"] if self.target else [])])
        return f"{self.name}: {self.kind}{values} ({about})"


def parse_columns(texts: Iterable[str]) -> dict[str, Kind]:
    """The kinds that texts such as "age:number" give to columns."""
    kinds: dict[str, Kind] = {}
    for text in texts:
        name, colon, kind = text.rpartition(":")
        if not colon or not name:
            raise PatchbayesError(
                f"column {text!r}: write NAME:KIND, such as age:number; kinds are {', '.join(KINDS)}."
            )
        if name in kinds:
            raise PatchbayesError(f"column {name!r} is given twice, as {kinds[name]} and as {kind}.")
        kinds[name] = cast(Kind, kind)
    return kinds


def check_columns(where: str, columns: Mapping[str, Any], header: Sequence[str]) -> None:
    """Refuse kinds that do not exist, and names that no column has."""
    for name, kind in columns.items():
        if kind not in KINDS:
            raise PatchbayesError(f"{where}: column {name!r} as {kind!r}; kinds are {', '.join(KINDS)}.")
        if name not in header:
            raise PatchbayesError(
                f"{where}: no column {name!r} that could be {kind}; there are {', '.join(header[:20])}."
            )


def column_of(where: str, name: str, cells: Sequence[Cell], given: Kind | None = None) -> Column:
    """What a column holds, by its (line, text) cells.

    Numbers where all cells are; categories where they are words. What is neither is refused with its lines: a column that is
    nearly all numbers, and numbers with commas that could be decimal or of thousands.
    """
    present = [(line, text) for line, text in cells if text.lower() not in MISSING]
    if given == "category":
        return Column(name, given, _levels(cells), given=True)
    if given is not None:
        kind = given
        wrong = [] if kind == "ignore" else [cell for cell in present if value_of(cell[1], kind) is None]
        if wrong:
            raise PatchbayesError(f"{_lines(where, name, wrong)}, and the column was given as {kind}; repair the file.")
        return Column(name, kind, given=True)
    words = [cell for cell in present if _NUMBER.fullmatch(cell[1]) is None]
    if not words:
        return Column(name, "number")
    commas = [cell for cell in words if _DECIMAL_COMMA.fullmatch(cell[1])]
    if len(commas) == len(words):
        return _with_commas(where, name, present, commas)
    mistakes = [cell for cell in words if cell not in commas]
    if len(present) - len(mistakes) >= _NEARLY_ALL * len(present):
        raise PatchbayesError(
            f"{_lines(where, name, mistakes)}, and the other {len(present) - len(mistakes)} values are; repair the file, or "
            f"say by --column {name}:category that all are categories."
        )
    levels = _levels(cells)
    if len(levels) > _MOST_LEVELS:
        raise PatchbayesError(
            f"{_lines(where, name, words[:1])}, and {len(levels)} different values are too many for a category (at most "
            f"{_MOST_LEVELS}); repair the value, or say by --column {name}:ignore (or :category) what to do with it."
        )
    return Column(name, "category", levels)


def value_of(text: str, kind: Kind = "number") -> float | None:
    """The number that a text is, with a decimal point or comma; None where it is none."""
    if kind == "decimal-comma" and _DECIMAL_COMMA.fullmatch(text):
        text = text.replace(",", ".")
    elif _NUMBER.fullmatch(text) is None or (kind == "decimal-comma" and "." in text):
        return None
    value = float(text)
    return value if abs(value) <= _LARGEST else math.copysign(math.inf, value)


def _with_commas(where: str, name: str, present: Sequence[Cell], commas: Sequence[Cell]) -> Column:
    points = [cell for cell in present if "." in cell[1]]
    line, text = commas[0]
    if points:
        raise PatchbayesError(
            f"{where}, line {line}: {text!r} in column {name!r} has a comma, and {points[0][1]!r} on line {points[0][0]} a "
            "point; write all numbers alike."
        )
    if all(_THOUSANDS.fullmatch(text) for _, text in commas):
        raise PatchbayesError(
            f"{where}, line {line}: {text!r} in column {name!r} may be a decimal number or thousands; say by --column "
            f"{name}:decimal-comma that it is decimal, or write the thousands without a comma."
        )
    return Column(name, "decimal-comma")


def _levels(cells: Sequence[Cell]) -> tuple[str, ...]:
    return tuple(sorted({text for _, text in cells}))


def _lines(where: str, name: str, wrong: Sequence[Cell]) -> str:
    """FILE, lines 3 and 7: '3O' and 'x' in column 'age' are not numbers."""
    shown = wrong[:_SHOWN]
    more = f" and {len(wrong) - len(shown)} more" if len(wrong) > len(shown) else ""
    lines, texts = ", ".join(str(line) for line, _ in shown), ", ".join(repr(text) for _, text in shown)
    several = len(wrong) > 1
    return (
        f"{where}, line{'s' if several else ''} {lines}{more}: {texts}{more} in column {name!r} "
        f"{'are not numbers' if several else 'is not a number'}"
    )
