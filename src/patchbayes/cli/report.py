"""patchbayes report: evaluated runs as one HTML page, and as tables."""

from pathlib import Path
from typing import Annotated

import typer

from .console import show, show_json
from .options import need


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders that were evaluated.")],
    output: Annotated[str, typer.Option("--output", "-o", help="The page to write.")] = "report.html",
    formats: Annotated[
        list[str] | None,
        typer.Option("--format", help="html (if not given), markdown, latex or csv; may be given several times."),
    ] = None,
    title: Annotated[str, typer.Option(help="Heading of the page.")] = "How far to trust these networks",
    as_json: Annotated[bool, typer.Option("--json", help="Print the written files as JSON.")] = False,
) -> None:
    """Show evaluated runs side by side, on one page.

    Tables, reliability, draws, coverage, corruption, examples, in one file that needs no network and opens from disk. Run
    `patchbayes evaluate` on the folders first. With --format, the tables as Markdown, LaTeX or CSV.

    \b
    patchbayes report runs/* -o report.html
    patchbayes report runs/ecmp --format html --format latex
    """
    from ..files import probe_writing
    from ..report import SUFFIXES, findings, write_report
    from ..runs import RunFolder, read_evaluation

    if not output:  # as a path it would be the working directory
        raise typer.BadParameter("--output: expected the name of a file, got an empty one.")
    if "html" in (formats or ["html"]):
        need("report", {"jinja2": "cli", "matplotlib": "cli"})
    unknown = [name for name in formats or [] if name not in SUFFIXES]
    if unknown:
        raise typer.BadParameter(f"--format {unknown[0]}: give one of {', '.join(SUFFIXES)}.")
    folders = [RunFolder.open(path) for path in runs]
    twice = [str(path) for i, path in enumerate(runs) if path.resolve() in {one.resolve() for one in runs[:i]}]
    if twice:
        raise typer.BadParameter(f"{twice[0]} is given twice.")
    probe_writing(Path(output))
    evaluations = [read_evaluation(folder.path) for folder in folders]
    written = write_report(
        evaluations,
        [folder.history() for folder in folders],
        Path(output),
        title=title,
        formats=formats or ["html"],
    )
    if as_json:
        show_json({"written": [str(path) for path in written]})
    else:
        for sentence in findings(evaluations):
            show(sentence)
        for path in written:
            show(f"written: {path}")
