"""The report as one HTML page that carries everything it needs: style, figures and pictures; no script, no network."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

from . import drawing
from .groups import Comparison
from .records import EvaluatedRun
from .sections import Section, finding, sections


@dataclass(frozen=True)
class PagePart:
    """One comparison as the page shows it."""

    id: str
    comparison: Comparison
    facts: str
    sections: tuple[Section, ...]


@dataclass(frozen=True)
class Environment:
    """A machine with its software, and the runs that were made there."""

    facts: tuple[tuple[str, str], ...]
    runs: tuple[str, ...]


def page(title: str, comparisons: Sequence[Comparison]) -> str:
    """The HTML text. The same records give the same bytes."""
    from jinja2 import Environment as Templates
    from jinja2 import StrictUndefined
    from markupsafe import Markup

    files = resources.files(__package__)
    templates = Templates(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    templates.filters["figure"] = Markup
    runs = [run for comparison in comparisons for run in comparison.runs]
    parts = [
        PagePart(f"c{number}", comparison, _facts(comparison), tuple(sections(comparison, f"c{number}")))
        for number, comparison in enumerate(comparisons, 1)
    ]
    return templates.from_string((files / "page.html.jinja").read_text("utf-8")).render(
        title=title,
        lead=_lead(comparisons),
        parts=parts,
        runs=runs,
        environments=_environments(runs),
        style=Markup((files / "page.css").read_text("utf-8")),
        dash=drawing.dash,
        colors=len(drawing.SERIES),
    )


def _lead(comparisons: Sequence[Comparison]) -> str:
    """What was found, and how many runs it is from."""
    found = " ".join(filter(None, map(finding, comparisons)))
    runs = sum(len(comparison.runs) for comparison in comparisons)
    groups = sum(len(comparison.groups) for comparison in comparisons)
    text = f"{found} {_number(runs, 'run')}".strip()
    return text if groups == runs else f"{text}, {groups:,} when those that differ only by seed are taken together"


def _facts(comparison: Comparison) -> str:
    models = list(dict.fromkeys(run.model for run in comparison.runs if run.model))
    parts = [comparison.task.capitalize()]
    if comparison.num_examples is not None:
        parts.append(_number(comparison.num_examples, "example"))
    if models:
        parts.append(", ".join(models))
    return " · ".join(parts)


def _number(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _environments(runs: Sequence[EvaluatedRun]) -> list[Environment]:
    """The distinct machines, versions and commits, each with its runs."""
    found: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for run in runs:
        facts = run.machine | run.versions | ({"commit": run.commit} if run.commit else {})
        if facts:
            found.setdefault(tuple((name, str(value)) for name, value in facts.items()), []).append(run.name)
    return [Environment(facts, tuple(names)) for facts, names in found.items()]
