"""Writing a report: records in, files out, all of them or none."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import PatchbayesError
from ..files import write_atomically
from ..plain_text import clean
from ..runs.record import EvaluationRecord
from . import formats as written
from .groups import Comparison, compare
from .records import EvaluatedRun
from .sections import finding

SUFFIXES = {"html": ".html", "markdown": ".md", "latex": ".tex", "csv": ".csv"}


def write_report(
    evaluations: Sequence[EvaluationRecord],
    histories: Sequence[Sequence[Mapping[str, Any]]],
    path: Path | str,
    *,
    title: str = "How far to trust these networks",
    formats: Sequence[str] = ("html",),
) -> list[Path]:
    """The paths of the files written, one for each of `formats`: html (the whole report), markdown, latex, csv (its tables).

    evaluations: records, as `runs.read_evaluation` reads them. histories: for each of them the rows of its metrics.jsonl, []
    if there are none. `path` names the files; its suffix is that of each format. Runs that differ only by seed are shown as
    one.
    """
    path = Path(path)
    if not evaluations:
        raise PatchbayesError("write_report: expected at least one evaluation, got none.")
    if len(histories) != len(evaluations):
        raise PatchbayesError(
            f"write_report: expected a history for each of {len(evaluations)} evaluations, [] where there is none; got "
            f"{len(histories)}."
        )
    unknown = [name for name in formats if name not in SUFFIXES]
    if unknown or isinstance(formats, str) or not formats:
        raise PatchbayesError(
            f"write_report(formats={formats!r}): expected a list of one or more of {', '.join(SUFFIXES)}."
        )
    pairs = zip(evaluations, histories, strict=True)
    comparisons = compare([EvaluatedRun.of(record, history) for record, history in pairs])
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


def findings(evaluations: Sequence[EvaluationRecord]) -> list[str]:
    """A sentence on each comparison of the report."""
    found = (finding(comparison) for comparison in compare([EvaluatedRun.of(record, []) for record in evaluations]))
    return [sentence for sentence in found if sentence]


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
