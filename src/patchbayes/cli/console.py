"""What the commands print: tables and sentences for people, JSON for programs, errors in one sentence."""

import json
import math
import sys
from collections.abc import Sequence
from typing import Any

import typer

from ..plain_text import clean, escaped


def show(text: str = "") -> None:
    """Print a result to standard output."""
    typer.echo(clean(text))


def tell(text: str) -> None:
    """Say what is going on, on standard error: only where a person watches."""
    if sys.stderr.isatty():
        typer.echo(clean(text), err=True)


def warn(text: str) -> None:
    """Say on standard error what must not be missed, whoever reads it."""
    typer.echo(clean(text), err=True)


def as_json_line(content: Any) -> str:
    """A result for a program, on one line."""
    return escaped(json.dumps(finite(content), ensure_ascii=False))


def show_json(content: Any) -> None:
    """Print a result for a program: JSON, where what is not a finite number is null."""
    typer.echo(escaped(json.dumps(finite(content), indent=1, ensure_ascii=False)))


def finite(content: Any) -> Any:
    """The same content with null in place of NaN and infinities, which JSON does not know."""
    if isinstance(content, dict):
        return {key: finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def show_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print columns: the first to the left, the others to the right, without decoration so that it can be piped."""
    widths = [max(len(line[i]) for line in (header, *rows)) for i in range(len(header))]
    for line in (header, *rows):
        cells = [
            text.ljust(width) if i == 0 else text.rjust(width)
            for i, (text, width) in enumerate(zip(line, widths, strict=True))
        ]
        show("  ".join(cells).rstrip())
