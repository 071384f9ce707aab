"""patchbayes predict: answers for images or rows of a table, with how far to trust each."""

import csv
import itertools
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ..plain_text import clean
from .console import as_json_line, show, tell, warn
from .options import MOST_DRAWS, TrustCode


def predict(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    files: Annotated[
        list[str],
        typer.Argument(help="Image files or folders of them; or CSV files with the columns of the training data."),
    ],
    draws: Annotated[int | None, typer.Option(min=1, max=MOST_DRAWS, help="Draws to average; 20 if not given.")] = None,
    risk: Annotated[
        float | None,
        typer.Option(
            help="Refer answers to a human so that, with 95 % confidence, at most this share of the others is wrong."
        ),
    ] = None,
    coverage: Annotated[
        float | None,
        typer.Option(
            help="Add a set of classes, or an interval, that holds the truth for this share of new inputs (conformal)."
        ),
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            help="Instead of --draws: draw for each input until its Monte-Carlo error is below this, at most 400 times."
        ),
    ] = None,
    output: Annotated[
        Literal["table", "jsonl", "csv"], typer.Option("--format", help="jsonl: a JSON object on each line.")
    ] = "table",
    batch_size: Annotated[int, typer.Option(min=1, max=MOST_DRAWS, help="Inputs predicted at a time.")] = 64,
    which: Annotated[
        Literal["best", "last"], typer.Option("--checkpoint", help="Which checkpoint of a training.")
    ] = "best",
    risk_on: Annotated[
        str | None,
        typer.Option(
            help="Part of the data, not trained on, that --risk and --coverage are set on; by default the held-out part."
        ),
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Where data sets lie (for --risk and --coverage); else $PATCHBAYES_DATA.")
    ] = None,
    trust_code: TrustCode = False,
) -> None:
    """Answer new inputs, and say how far to trust each.

    A row for each input, as it comes: class, probability, uncertainty, and whether to ask a human. Epistemic uncertainty is
    what the draws disagree on (mutual information), aleatoric what remains when the network is known (expected entropy),
    both in nats; in regression they are standard deviations in the units of the target. For --risk a part of the run's data
    is predicted first and a threshold on the probability is set from it; for --coverage, how large sets or intervals must be.
    An input that cannot be answered is named after
    the others, and the exit code is 1.

    \b
    patchbayes predict runs/ecmp photos/ --risk 0.05
    patchbayes predict runs/wine rows.csv --format jsonl | jq .mean
    """
    from ..runs import NewInputs

    if risk is None and coverage is None and risk_on is not None:
        raise typer.BadParameter("--risk-on is for --risk and --coverage; give one of them.")
    if "" in files:  # as a path it would be the working directory
        raise typer.BadParameter("an empty name is no file or folder; write . for this folder.")
    answering = NewInputs.open(
        run, which, data_dir, draws=draws, tolerance=tolerance, batch_size=batch_size, trust_code=trust_code
    )
    if risk is not None:
        tell(f"setting the threshold for a risk of {risk:g} on {risk_on or 'held_out'} ...")
        answering = answering.referring(risk, risk_on or "held_out")
        warn(answering.about_threshold)
    if coverage is not None:
        tell(f"setting sets and intervals for a coverage of {coverage:g} on {risk_on or 'held_out'} ...")
        answering = answering.covered(coverage, risk_on or "held_out")
    _write(answering.answers([Path(file) for file in files]), output)
    if risk is None and output == "table":
        tell("next: which answers to leave to a human, so that at most 5 % of the others are wrong")
        tell(f"    patchbayes predict {shlex.join([str(run), *files])} --risk 0.05")


def _write(rows: Iterable[dict[str, Any]], output: str) -> None:
    if output == "jsonl":
        for row in rows:
            show(as_json_line(row))
    elif output == "csv":
        writer: Any = None
        for row in rows:
            if writer is None:
                writer = csv.DictWriter(sys.stdout, list(row), lineterminator="\n")
                writer.writeheader()
            writer.writerow({key: _harmless(value) for key, value in row.items()})
            sys.stdout.flush()  # a reader of the stream sees the row now
    else:
        _write_table(iter(rows))


def _write_table(rows: Iterator[dict[str, Any]]) -> None:
    """Columns as wide as the first rows need, so that the table can be printed while answers come."""
    first: list[dict[str, Any]] = []
    try:
        for row in itertools.islice(rows, 50):
            first.append(row)
    finally:  # rows that came before an error are shown before it
        if first:
            _write_lines(first, rows)


def _write_lines(first: list[dict[str, Any]], rows: Iterator[dict[str, Any]]) -> None:
    header = list(first[0])
    widths = [max(len(key), *(len(_cell(row[key])) for row in first)) for key in header]

    def line(cells: Sequence[str]) -> str:
        return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()

    show(line([key.replace("_", " ") for key in header]))
    for part in (first, rows):
        for row in part:
            show(line([_cell(row[key]) for key in header]))


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "refer" if value else ""
    if isinstance(value, list):
        return " | ".join(map(str, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _harmless(value: Any) -> Any:
    """A text that a spreadsheet would run as a formula gets a quote in front; a number is none."""
    value = " | ".join(map(str, value)) if isinstance(value, list) else value
    value = clean(value) if isinstance(value, str) else value
    formula = isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) and not _is_number(value)
    return f"'{value}" if formula else value


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
