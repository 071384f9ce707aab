"""Tables in CSV files: a header, one example on each line, one column to predict."""

import csv
import io
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ..errors import PatchbayesError
from ..files import open_regular
from .columns import MISSING, Cell, Column, Kind, check_columns, column_of, value_of
from .contents import Contents
from .limits import Limits
from .splits import ArraySplit, Task, shuffled

# A numeric target with at most this many different whole numbers is a class.
MOST_CLASSES = 20
_TEST_SHARE = 0.2
_DELIMITERS = ",;\t|"
_SHOWN = 20


def read_csv(
    file: Path,
    target: str | int | None = None,
    task: Task | None = None,
    split: int = 0,
    columns: Mapping[str, Kind] | None = None,
) -> Contents:
    """Features and target of a CSV file; a fifth of the rows, drawn by the number `split`, are the test part.

    target: name or number (from 0) of the column to predict.
    task: where None, classification if the target is text or has at most 20 different whole numbers, else regression.
    columns: the kinds of some columns, as in `Column`; those of the others are inferred. What was decided is in
        `Contents.columns`.

    The delimiter is a comma, semicolon, tab or bar, whichever the header has most of. A category becomes one 0/1 feature
    for each of its values, called COLUMN=VALUE.
    """
    if task not in (None, "classification", "regression"):
        raise PatchbayesError(f'{file}: task={task!r}; "classification" or "regression".')
    header, rows = _open(file)
    table = list(rows)
    if len(table) < 5:
        raise PatchbayesError(f"{file}: {len(table)} rows; at least 5 are needed for a training and a test part.")
    position = _target_column(file, header, target)
    given = dict(columns or {})
    check_columns(str(file), given, header)

    def cells(number: int) -> list[Cell]:
        return [(row.line, row.cells[number].strip()) for row in table]

    task, classes, targets, predicted = _targets(file, header[position], cells(position), task, given)
    found = [
        predicted if number == position else column_of(str(file), name, cells(number), given.get(name))
        for number, name in enumerate(header)
    ]
    features = _features(file, found)
    whole = ArraySplit(_encoded(file, header, table, features, {column.name: column.kind for column in found}), targets)
    order = shuffled(len(whole), split)
    num_test = round(_TEST_SHARE * len(whole))
    test, train = (whole.subset(rows.sort().values) for rows in (order[:num_test], order[num_test:]))
    return Contents(task, train, test, classes, features, columns=tuple(found))


def csv_rows(
    file: Path, features: Sequence[str], batch_size: int = 1024, columns: Mapping[str, Kind] | None = None
) -> Iterator[tuple[list[int], Tensor]]:
    """Line numbers and raw inputs (B, F) of a file's rows, some at a time, for the features of an earlier `read_csv`.

    The file needs the columns that the features were made of; others, and their order, do not matter.
    columns: the kinds that the columns had then; numbers have a decimal point where nothing is said.
    """
    header, rows = _open(file)
    while block := list(itertools.islice(rows, batch_size)):
        yield [row.line for row in block], _encoded(file, header, block, features, columns or {})


@dataclass(frozen=True, slots=True)
class _Row:
    """The cells of one line, and its number in the file."""

    cells: list[str]
    line: int


def _open(file: Path) -> tuple[list[str], Iterator[_Row]]:
    """The column names, and the rows as they are read."""
    rows = _lines(file)
    first = next(rows, None)
    if first is None:
        raise PatchbayesError(f"{file}: empty; a line of column names and one line for each example are needed.")
    header = [name.strip() for name in first.cells]
    for position, name in enumerate(header):
        if not name:
            raise PatchbayesError(f"{file}: column {position} has no name; the first line must name every column.")
        if name in header[:position]:
            raise PatchbayesError(f"{file}: two columns are called {name!r}; rename one.")
    if all(value_of(name) is not None for name in header):
        raise PatchbayesError(f"{file}: the first line holds numbers; it must name the columns.")

    def checked() -> Iterator[_Row]:
        for row in rows:
            if len(row.cells) != len(header):
                raise PatchbayesError(
                    f"{file}, line {row.line}: {len(row.cells)} values; the header names {len(header)} columns."
                )
            yield row

    return header, checked()


def _lines(file: Path) -> Iterator[_Row]:
    """The non-empty lines, split at the delimiter that the first line has most of."""
    if file.is_dir():
        raise PatchbayesError(f"{file} is a folder, and a CSV file is wanted here.")
    try:
        with open_regular(file) as content, io.TextIOWrapper(content, encoding="utf-8-sig", newline="") as lines:
            first = lines.readline()
            lines.seek(0)
            reader = csv.reader(lines, delimiter=max(_DELIMITERS, key=first.count), strict=True)
            for cells in reader:
                if any(cell.strip() for cell in cells):
                    yield _Row(cells, reader.line_num)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise PatchbayesError(f"{file}: cannot be read as a CSV file in UTF-8 ({error}).") from error


def _target_column(file: Path, header: list[str], target: str | int | None) -> int:
    columns = ", ".join(header[:_SHOWN]) + (", ..." if len(header) > _SHOWN else "")
    if target is None:
        raise PatchbayesError(f"{file}: name the column to predict, csv:{file}#COLUMN; there are {columns}.")
    if target in header:
        return header.index(str(target))
    try:
        column = int(target)
    except ValueError:
        column = len(header)
    if not 0 <= column < len(header):
        raise PatchbayesError(f"{file}: no column {target!r}; there are {columns} (or 0 to {len(header) - 1}).")
    return column


def _targets(
    file: Path, name: str, cells: list[Cell], task: Task | None, given: Mapping[str, Kind]
) -> tuple[Task, tuple[str, ...], Tensor, Column]:
    """The task, the class or target names, the targets, and what the target column holds."""
    for line, text in cells:
        if text.lower() in MISSING:
            raise PatchbayesError(f"{file}, line {line}: no value in the target column {name!r}; remove the line.")
    column = _target_kind(file, name, cells, task, given.get(name))
    column = replace(column, target=True)
    texts = [text for _, text in cells]
    if column.kind != "category":
        values = [value_of(text, column.kind) for text in texts]
        numbers = [value for value in values if value is not None and math.isfinite(value)]
        if len(numbers) < len(values):
            raise PatchbayesError(f"{file}: the target column {name!r} holds an infinite value; remove its line.")
        whole = all(number.is_integer() for number in numbers)
        few = whole and len(set(numbers)) <= MOST_CLASSES
        if task == "regression" or (task is None and (column.given or not few)):
            return "regression", (name,), torch.tensor(numbers).unsqueeze(1), column
        texts = [str(int(number)) for number in numbers] if whole else texts
    if task == "regression":
        raise PatchbayesError(
            f"{file}: the target column {name!r} is given as a category; task='regression' needs numbers."
        )
    classes = tuple(sorted(set(texts), key=str if column.kind == "category" else _in_order(column.kind)))
    if len(classes) < 2:
        raise PatchbayesError(f"{file}: every row has the target {classes[0]!r}; two or more classes are needed.")
    Limits.current().check_classes(f"{file}, column {name!r}", len(classes))
    number = {text: i for i, text in enumerate(classes)}
    return "classification", classes, torch.tensor([number[text] for text in texts]), replace(column, levels=classes)


def _target_kind(file: Path, name: str, cells: list[Cell], task: Task | None, given: Kind | None) -> Column:
    if given == "ignore":
        raise PatchbayesError(f"{file}: the column to predict, {name!r}, cannot be ignored.")
    words = [cell for cell in cells if value_of(cell[1]) is None and value_of(cell[1], "decimal-comma") is None]
    if given is None and words:
        if task == "regression" or (task is None and len(words) < len(cells)):
            raise PatchbayesError(
                f"{file}, line {words[0][0]}: the target {words[0][1]!r} is not a number; repair it, or say by --column "
                f"{name}:category (or task='classification') that these are classes."
            )
        if len(words) == len(cells):  # names, of any number
            return Column(name, "category")
    return column_of(str(file), name, cells, given)


def _in_order(kind: Kind) -> Callable[[str], float]:
    return lambda text: value_of(text, kind) or 0.0


def _features(file: Path, columns: Sequence[Column]) -> tuple[str, ...]:
    """Names of the features: number columns as they are, categories as COLUMN=VALUE for each value."""
    features: list[str] = []
    for column in columns:
        if column.target or column.kind == "ignore":
            continue
        if column.kind != "category":
            features.append(column.name)
            continue
        alike = [other.name for other in columns if other.name.startswith(f"{column.name}=")]
        if alike:
            raise PatchbayesError(
                f"{file}: the columns {column.name!r} and {alike[0]!r} would give features of the same name; rename one."
            )
        features += [f"{column.name}={level}" for level in column.levels]
    if not features:
        target = next(column.name for column in columns if column.target)
        raise PatchbayesError(f"{file}: no column besides the target {target!r}.")
    return tuple(features)


def _encoded(
    file: Path, header: list[str], rows: list[_Row], features: Sequence[str], kinds: Mapping[str, Kind]
) -> Tensor:
    """(B, F) float32: the features of some rows."""
    columns: list[list[float]] = []
    categories: dict[str, list[str]] = {}
    for feature in features:
        name = feature if feature in header else next((n for n in header if feature.startswith(f"{n}=")), None)
        if name is None:
            raise PatchbayesError(
                f"{file}: no column for the feature {feature!r}; there are {', '.join(header[:_SHOWN])}."
            )
        position = header.index(name)
        if name == feature:
            columns.append([_number(file, row, position, name, kinds.get(name, "number")) for row in rows])
        else:
            level = feature.removeprefix(f"{name}=")
            columns.append([float(row.cells[position].strip() == level) for row in rows])
            categories.setdefault(name, []).append(level)
    for name, levels in categories.items():
        for row in rows:
            cell = row.cells[header.index(name)].strip()
            if cell.lower() in MISSING or cell not in levels:
                raise PatchbayesError(
                    f"{file}, line {row.line}: {cell!r} in column {name!r} is not one of its values "
                    f"({', '.join(levels[:_SHOWN])}); fill in or remove the line."
                )
    return torch.tensor(columns).T.contiguous()


def _number(file: Path, row: _Row, column: int, name: str, kind: Kind) -> float:
    text = row.cells[column].strip()
    value = value_of(text, kind)
    if value is None or not math.isfinite(value):
        hint = " with a decimal comma" if kind == "decimal-comma" else ""
        raise PatchbayesError(
            f"{file}, line {row.line}: {text!r} in column {name!r} is not a finite number{hint}; fill in or remove the line."
        )
    return value
