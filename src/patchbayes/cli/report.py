"""patchbayes report: evaluated runs as one HTML page, and as tables."""

from pathlib import Path
from typing import Annotated

import typer

from .console import show, show_json

_FORMATS = ("html", "markdown", "latex", "csv")


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders that were evaluated.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The page to write.")] = Path("report.html"),
    formats: Annotated[
        list[str] | None, typer.Option("--format", help="html, markdown, latex or csv; may be given several times.")
    ] = None,
    title: Annotated[str, typer.Option(help="Heading of the page.")] = "How far to trust these networks",
    as_json: Annotated[bool, typer.Option("--json", help="Print the written files as JSON.")] = False,
) -> None:
    """One self-contained page that shows the runs side by side: tables, reliability, draws, coverage, corruption, examples.

    The page needs no network and opens from disk. Run `patchbayes evaluate` on the folders first. Tables in Markdown, LaTeX
    and CSV are written beside the page.

    \b
    patchbayes report runs/* -o report.html
    patchbayes report runs/ecmp --format html --format latex
    """
    from ..evaluation import read_evaluation
    from ..report import write_report
    from ..training import RunFolder

    wanted = formats or ["html"]
    for name in wanted:
        if name not in _FORMATS:
            raise typer.BadParameter(f"--format {name}: give one of {', '.join(_FORMATS)}.")
    folders = [RunFolder.open(path) for path in runs]
    written = write_report(
        [read_evaluation(folder.path) for folder in folders],
        [folder.history() for folder in folders],
        output,
        title=title,
        formats=tuple(wanted),
    )
    if as_json:
        show_json({"written": [str(path) for path in written]})
    else:
        for path in written:
            show(f"written: {path}")
