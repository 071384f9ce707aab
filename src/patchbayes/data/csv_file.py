"""Tables in CSV files: a header, one example on each line, one column to predict."""

import csv
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..errors import PatchbayesError
from .contents import Contents
from .splits import ArraySplit, Task, shuffled

# A numeric target with at most this many different whole numbers is a class.
MOST_CLASSES = 20
# A text column with more different values than this is a name or a note, not a category.
_MOST_LEVELS = 50
_TEST_SHARE = 0.2
_DELIMITERS = ",;\t|"
_MISSING = frozenset(("", "nan", "na", "n/a", "null", "?"))
_SHOWN = 20


def read_csv(file: Path, target: str | int | None = None, task: Task | None = None, split: int = 0) -> Contents:
    """Features and target of a CSV file; a fifth of the rows, drawn by the number `split`, are the test part.

    target: name or number (from 0) of the column to predict.
    task: where None, classification if the target is text or has at most 20 different whole numbers, else regression.

    The delimiter is a comma, semicolon, tab or bar, whichever the header has most of. A text column becomes one 0/1 feature
    for each of its values, called COLUMN=VALUE.
    """
    if task not in (None, "classification", "regression"):
        raise PatchbayesError(f'{file}: task={task!r}; "classification" or "regression".')
    header, rows = _open(file)
    table = list(rows)
    if len(table) < 5:
        raise PatchbayesError(f"{file}: {len(table)} rows; at least 5 are needed for a training and a test part.")
    column = _target_column(file, header, target)
    task, classes, targets = _targets(
        file, header[column], [(row.line, row.cells[column].strip()) for row in table], task
    )
    features = _features(file, header, table, column)
    whole = ArraySplit(_encoded(file, header, table, features), targets)
    order = shuffled(len(whole), split)
    num_test = round(_TEST_SHARE * len(whole))
    test, train = (whole.subset(rows.sort().values) for rows in (order[:num_test], order[num_test:]))
    return Contents(task, train, test, classes, features)


def csv_rows(file: Path, features: Sequence[str], batch_size: int = 1024) -> Iterator[tuple[list[int], Tensor]]:
    """Line numbers and raw inputs (B, F) of a file's rows, some at a time, for the features of an earlier `read_csv`.

    The file needs the columns that the features were made of; others, and their order, do not matter.
    """
    header, rows = _open(file)
    while block := list(itertools.islice(rows, batch_size)):
        yield [row.line for row in block], _encoded(file, header, block, features)


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
    if all(map(_is_number, header)):
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
        with file.open(encoding="utf-8-sig", newline="") as lines:
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
    file: Path, name: str, cells: list[tuple[int, str]], task: Task | None
) -> tuple[Task, tuple[str, ...], Tensor]:
    """The task, the class or target names, and the targets, of the (line, text) cells of the target column."""
    for line, text in cells:
        if text.lower() in _MISSING:
            raise PatchbayesError(f"{file}, line {line}: no value in the target column {name!r}; remove the line.")
    texts = [text for _, text in cells]
    words = [(line, text) for line, text in cells if not _is_number(text)]
    if words and (task == "regression" or (task is None and len(words) < len(cells))):
        raise PatchbayesError(
            f"{file}, line {words[0][0]}: the target {words[0][1]!r} is not a number; repair it, or task='classification'."
        )
    if not words:
        if any(not math.isfinite(float(text)) for text in texts):
            raise PatchbayesError(f"{file}: the target column {name!r} holds an infinite value; remove its line.")
        whole = all(float(text).is_integer() for text in texts)
        few = whole and len({float(text) for text in texts}) <= MOST_CLASSES
        if task == "regression" or (task is None and not few):
            return "regression", (name,), torch.tensor([float(text) for text in texts]).unsqueeze(1)
        texts = [str(int(float(text))) if whole else text for text in texts]
    classes = tuple(sorted(set(texts), key=str if words else float))
    if len(classes) < 2:
        raise PatchbayesError(f"{file}: every row has the target {classes[0]!r}; two or more classes are needed.")
    number = {text: i for i, text in enumerate(classes)}
    return "classification", classes, torch.tensor([number[text] for text in texts])


def _features(file: Path, header: list[str], rows: list[_Row], target: int) -> tuple[str, ...]:
    """Names of the features: number columns as they are, text columns as COLUMN=VALUE for each value."""
    features: list[str] = []
    for column, name in enumerate(header):
        if column == target:
            continue
        cells = [row.cells[column].strip() for row in rows]
        words = [cell for cell in cells if cell.lower() not in _MISSING and not _is_number(cell)]
        if not words:
            features.append(name)
            continue
        levels = sorted(set(cells))
        if len(levels) > _MOST_LEVELS:
            raise PatchbayesError(
                f"{file}, line {rows[cells.index(words[0])].line}: {words[0]!r} in column {name!r} is not a number, and "
                f"{len(levels)} different values are too many for a category (at most {_MOST_LEVELS}); repair the value or "
                f"remove the column."
            )
        features += [f"{name}={level}" for level in levels]
    if not features:
        raise PatchbayesError(f"{file}: no column besides the target {header[target]!r}.")
    return tuple(features)


def _encoded(file: Path, header: list[str], rows: list[_Row], features: Sequence[str]) -> Tensor:
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
            columns.append([_number(file, row, position, name) for row in rows])
        else:
            level = feature.removeprefix(f"{name}=")
            columns.append([float(row.cells[position].strip() == level) for row in rows])
            categories.setdefault(name, []).append(level)
    for name, levels in categories.items():
        for row in rows:
            cell = row.cells[header.index(name)].strip()
            if cell.lower() in _MISSING or cell not in levels:
                raise PatchbayesError(
                    f"{file}, line {row.line}: {cell!r} in column {name!r} is not one of its values "
                    f"({', '.join(levels[:_SHOWN])}); fill in or remove the line."
                )
    return torch.tensor(columns).T.contiguous()


def _number(file: Path, row: _Row, column: int, name: str) -> float:
    text = row.cells[column]
    if not _is_number(text) or not math.isfinite(float(text)):
        raise PatchbayesError(
            f"{file}, line {row.line}: {text!r} in column {name!r} is not a finite number; fill in or remove the line."
        )
    return float(text)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
