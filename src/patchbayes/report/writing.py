"""Writing a report: records in, files out, all of them or none."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import PatchbayesError
from ..files import write_atomically
from . import formats as written
from .entry import clean
from .groups import Comparison, compare
from .records import read_run

SUFFIXES = {"html": ".html", "markdown": ".md", "latex": ".tex", "csv": ".csv"}


def write_report(
    evaluations: Sequence[Mapping[str, Any]],
    histories: Sequence[Sequence[Mapping[str, Any]]],
    path: Path | str,
    *,
    title: str = "How far to trust these networks",
    formats: Sequence[str] = ("html",),
) -> list[Path]:
    """The paths of the files written, one for each of `formats`: html (the whole report), markdown, latex, csv (its tables).

    evaluations: contents of evaluation.json files. histories: for each of them the rows of its metrics.jsonl, [] if there
    are none. `path` names the files; its suffix is that of each format. Runs that differ only by seed are shown as one.
    """
    path = Path(path)
    if not evaluations:
        raise PatchbayesError("write_report: no evaluations were given; at least one is required.")
    if len(histories) != len(evaluations):
        raise PatchbayesError(
            f"write_report: {len(evaluations)} evaluations and {len(histories)} histories were given; each evaluation needs "
            "one history, [] where there is none."
        )
    unknown = [name for name in formats if name not in SUFFIXES]
    if unknown or isinstance(formats, str) or not formats:
        raise PatchbayesError(
            f"write_report: formats={formats!r}; a list of one or more of {', '.join(SUFFIXES)} is required."
        )
    records = zip(evaluations, histories, strict=True)
    comparisons = compare([read_run(record, history, number) for number, (record, history) in enumerate(records, 1)])
    title = clean(title)
    contents = {_place(path, name): _render(name, title, comparisons) for name in formats}
    for place, text in contents.items():
        try:
            write_atomically(place, text.encode())
        except OSError as error:
            raise PatchbayesError(
                f"write_report: {place} cannot be written: {error.strerror}. Name a file in a folder that exists and that you "
                "may write to, on a disk with room."
            ) from error
    return list(contents)


def _place(path: Path, name: str) -> Path:
    """The path with the format's suffix, in place of another format's or after the name."""
    stem = path.with_suffix("") if path.suffix in SUFFIXES.values() else path
    return stem.with_name(stem.name + SUFFIXES[name])


def _render(name: str, title: str, comparisons: Sequence[Comparison]) -> str:
    if name == "markdown":
        return written.markdown(title, comparisons)
    if name == "latex":
        return written.latex(title, comparisons)
    if name == "csv":
        return written.comma_separated(comparisons)
    try:
        import jinja2  # noqa: F401
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise PatchbayesError(
            f"write_report: the HTML report needs {error.name}, which is not installed; install patchbayes[cli]."
        ) from error
    from .page import page

    return page(title, comparisons)
