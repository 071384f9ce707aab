"""What the page says about one comparison, section by section; a section that no record can fill is not there."""

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from . import collapse, figures
from .figures import Picture
from .groups import Comparison, Group
from .measures import ERROR, Measure, measure
from .pictures import Gallery, galleries
from .tables import Table, TableCell, TableColumn, TableRow, lower, summary, tables


@dataclass(frozen=True)
class HeatMap:
    """A table of numbers by corruption and severity; `level` (0 to 1) of each says how strongly it is colored."""

    heading: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[tuple[str, float | None], ...]], ...]
    label: str


@dataclass(frozen=True)
class Folded:
    """Something long that opens on demand: a table, or text as it was printed."""

    summary: str
    table: Table | None = None
    text: str = ""


@dataclass(frozen=True)
class Section:
    """One heading with what belongs to it. `legend`: groups whose colors are explained above the pictures."""

    id: str
    heading: str
    intro: str = ""
    table: Table | None = None
    pictures: tuple[Picture, ...] = ()
    legend: tuple[Group, ...] = ()
    heat_maps: tuple[HeatMap, ...] = ()
    galleries: tuple[Gallery, ...] = ()
    folded: tuple[Folded, ...] = ()
    points: tuple[str, ...] = ()

    @property
    def filled(self) -> bool:
        return bool(self.table or self.pictures or self.heat_maps or self.galleries or self.folded or self.points)


def sections(comparison: Comparison, prefix: str) -> list[Section]:
    """The sections in the order of the page; `prefix` keeps ids apart from those of other comparisons."""
    names = (f"{prefix}-f{number}" for number in itertools.count(1))
    made = tables(comparison)
    written = [
        _summary(comparison, made.get("summary")),
        _reliability(comparison, names),
        _confidence(comparison, names),
        _quantiles(comparison, names),
        _draws(comparison, names),
        _coverage(comparison, names),
        _corruption(comparison, made),
        _ood(made.get("ood")),
        _diversity(comparison, made.get("diversity"), names),
        _examples(comparison),
        _training(comparison, names),
        _patched(comparison, made.get("cost")),
    ]
    return [replace(section, id=f"{prefix}-{section.id}") for section in written if section.filled]


def _summary(comparison: Comparison, table: Table | None) -> Section:
    return Section("summary", "Summary", table=table, points=tuple(_findings(comparison, table)) if table else ())


def finding(comparison: Comparison) -> str:
    """What the records say first, in a sentence: which is best by likelihood, and whether that is more than chance."""
    table, name = summary(comparison), "nll" if comparison.task == "classification" else "log_density"
    index = next((i for i, column in enumerate(table.columns) if column.key == name), None) if table else None
    ranked = _ranked(table, index, measure(name)) if table is not None and index is not None else []
    if not ranked:
        return ""
    label = lower(measure(name).label)
    word = "Highest" if measure(name).better == "higher" else "Lowest"
    (first, leader), *others = ranked
    if not others:
        return f"{word} {label}: {first}."
    return f"{word} {label}: {first}; next: {others[0][0]}; {_difference(leader)}."


def _difference(leader: TableCell) -> str:
    return "a significant difference" if leader.best else "no significant difference"


def _findings(comparison: Comparison, table: Table) -> Iterator[str]:
    """What the table says about its main columns, in sentences; nothing where there is nothing to compare."""
    for name in ("accuracy", "nll", "ece") if comparison.task == "classification" else ("rmse", "log_density", "crps"):
        what = measure(name)
        index = next((i for i, column in enumerate(table.columns) if column.key == name), None)
        ranked = _ranked(table, index, what) if index is not None else []
        if len(ranked) > 1:
            (first, leader), (second, _) = ranked[:2]
            word = "Highest" if what.better == "higher" else "Lowest"
            yield f"{word} {lower(what.label.removesuffix(', %'))}: {first}; next: {second}; {_difference(leader)}."
    for group in comparison.groups:
        if "collapsed" in map(collapse.verdict, group.runs):
            yield f"{group.label} {collapse.sentence(group.runs)} (see Diversity)."


def _ranked(table: Table, index: int, what: Measure) -> list[tuple[str, TableCell]]:
    """(row and value in words, cell) of one column, best first; of a method and its variants only the best one."""
    found: list[tuple[float, str, str, TableCell]] = []
    owner = ""
    for row in table.rows:
        owner = owner if row.derived else row.label
        cell = row.cells[index]
        if cell.numbers and cell.numbers.value is not None:
            label = f"{owner} {row.label}" if row.derived else row.label
            unit = "\N{NO-BREAK SPACE}%" if what.label.endswith("%") else ""
            found.append((cell.numbers.value, owner, f"{label}, {' '.join([cell.text, *cell.details])}{unit}", cell))
    found.sort(key=lambda item: item[0], reverse=what.better == "higher")
    firsts: dict[str, tuple[float, str, str, TableCell]] = {}
    for item in found:
        firsts.setdefault(item[1], item)
    return [(words, cell) for _, _, words, cell in (firsts.values() if len(firsts) > 1 else found)]


def _reliability(comparison: Comparison, names: Iterator[str]) -> Section:
    return Section(
        "reliability",
        "Reliability",
        "Is a prediction that claims 80 % right in 80 % of the cases? On the diagonal it is; below it the network is "
        "overconfident. Dots are bins of confidence, their area the number of predictions, hollow with at most 5 a seed; thin "
        "lines are single seeds.",
        pictures=_present(figures.reliability(group, next(names)) for group in comparison.groups),
    )


def _confidence(comparison: Comparison, names: Iterator[str]) -> Section:
    return Section(
        "confidence",
        "Confidence where right and where wrong",
        "Bars up: how the right predictions spread over confidence. Bars down: the wrong ones. A network that knows what it "
        "does not know has its wrong predictions on the left.",
        pictures=_present(figures.histogram(group, next(names)) for group in comparison.groups),
    )


def _quantiles(comparison: Comparison, names: Iterator[str]) -> Section:
    return Section(
        "quantiles",
        "Calibration of the quantiles",
        "Of the targets, p % should lie below the predicted p % quantile: the diagonal. Flatter than it in the "
        "middle: the intervals are too narrow; steeper: too wide.",
        pictures=_present([figures.quantiles(comparison, next(names))]),
        legend=comparison.groups,
    )


def _draws(comparison: Comparison, names: Iterator[str]) -> Section:
    scaled = any(run.temperature for run in comparison.runs)
    return Section(
        "draws",
        "Calibration against the number of draws",
        "What averaging over S draws of the network buys. Bars are standard errors"
        + ("; dashed lines: the same predictions at the largest S after temperature scaling." if scaled else "."),
        pictures=tuple(figures.draws_curves(comparison, names)),
        legend=comparison.groups,
    )


def _coverage(comparison: Comparison, names: Iterator[str]) -> Section:
    return Section(
        "coverage",
        "Accuracy and coverage",
        "Keep only the most certain predictions and leave the others to a human: how accurate is what is kept?",
        pictures=_present([figures.coverage(comparison, next(names))]),
        legend=comparison.groups,
    )


def _corruption(comparison: Comparison, made: dict[str, Table]) -> Section:
    detail = made.get("corruptions")
    return Section(
        "corruption",
        "Under corruption",
        "Scores on pictures that were corrupted in the ways of ImageNet-C, mean over seeds; the stronger the color, the worse."
        if any(run.corruptions for run in comparison.runs)
        else "",
        table=made.get("corruption"),
        heat_maps=(
            *_heat_maps(comparison, "error", ERROR, "error, %"),
            *_heat_maps(comparison, "ece", measure("ece"), "ECE, %"),
        ),
        folded=(Folded("Error by corruption, all methods", detail),) if detail else (),
    )


def _heat_maps(comparison: Comparison, name: str, what: Measure, words: str) -> list[HeatMap]:
    """One map for each group, all on one scale."""
    scores = {group.label: found for group in comparison.groups if (found := _corruption_scores(group, name))}
    values = [v for found in scores.values() for v in found.values() if v is not None]
    if not values:
        return []
    low, high = min(values), max(values)
    maps = []
    for label, found in scores.items():
        names = list(dict.fromkeys(corruption for corruption, _ in found))
        severities = sorted({severity for _, severity in found})
        rows = tuple(
            (
                corruption.replace("_", " "),
                tuple(
                    (what.show(v), None if v is None else (v - low) / (high - low) if high > low else 0.0)
                    for v in (found.get((corruption, severity)) for severity in severities)
                ),
            )
            for corruption in names
        )
        worst = max((key for key, v in found.items() if v is not None), key=lambda key: found[key] or 0.0, default=None)
        said = (
            f": highest {what.show(found[worst])} for {worst[0].replace('_', ' ')}, severity {worst[1]}"
            if worst
            else ""
        )
        columns = tuple(f"{severity}" for severity in severities)
        maps.append(
            HeatMap(f"{label}: {words}", columns, rows, f"{words} of {label} by corruption and severity{said}.")
        )
    return maps


def _corruption_scores(group: Group, name: str) -> dict[tuple[str, int], float | None]:
    """Mean over seeds by (corruption, severity)."""
    found: dict[tuple[str, int], list[float]] = {}
    for run in group.runs:
        if run.corruptions and name in run.corruptions.tables:
            for corruption, row in zip(run.corruptions.names, run.corruptions.tables[name], strict=True):
                for severity, value in zip(run.corruptions.severities, row, strict=True):
                    kept = found.setdefault((corruption, severity), [])
                    kept += [value] if value is not None and math.isfinite(value) else []
    return {key: statistics.fmean(values) if values else None for key, values in found.items()}


def _ood(table: Table | None) -> Section:
    return Section(
        "ood",
        "Unfamiliar inputs",
        "Can the network's uncertainty tell inputs of another kind from its own? AUROC 50 % is a coin, 100 % perfect.",
        table=table,
    )


def _diversity(comparison: Comparison, table: Table | None, names: Iterator[str]) -> Section:
    rule = (
        f"An ensemble counts as collapsed to one model when its draws disagree at most {collapse.SHARE_OF_ERROR:.0%} as often "
        f"as they are wrong (or on less than one example) and their mutual information is at most {collapse.SHARE_OF_NLL:.0%} "
        f"of the NLL; where neither is recorded, when the components of all sites are within {collapse.SMALLEST_DISTANCE:.0%} "
        "of each other."
    ).replace("%", " %")
    measured = tuple(group for group in comparison.groups if figures.site_distances(group))
    return Section(
        "diversity",
        "Diversity: one model or many?",
        rule,
        table=table,
        pictures=_present([figures.component_distances(comparison, next(names))]),
        legend=measured,
        folded=tuple(Folded(f"Distance by site: {group.label}", _distances(group)) for group in measured),
    )


def _distances(group: Group) -> Table:
    shown = Measure("Distance, %", scale=100, decimals=2)
    rows = tuple(TableRow(site, (TableCell(shown.show(distance)),)) for site, distance in figures.site_distances(group))
    return Table(f"Distance between components of {group.label}", "Site", (TableColumn(shown.label),), rows)


def _examples(comparison: Comparison) -> Section:
    return Section(
        "examples",
        "Most and least certain examples",
        "From the first seed of each method. Wrong answers are marked with a cross.",
        galleries=tuple(galleries(comparison)),
    )


def _training(comparison: Comparison, names: Iterator[str]) -> Section:
    return Section(
        "training",
        "Training",
        "One line for each run.",
        pictures=tuple(figures.training_curves(comparison, names)),
        legend=comparison.groups,
    )


def _patched(comparison: Comparison, table: Table | None) -> Section:
    return Section(
        "patched",
        "What was patched, and what it costs",
        table=table,
        folded=tuple(
            Folded(f"Patched in {group.label}", text=group.first.patch_report)
            for group in comparison.groups
            if group.first.patch_report
        ),
    )


def _present(pictures: Sequence[Picture | None] | Iterator[Picture | None]) -> tuple[Picture, ...]:
    return tuple(picture for picture in pictures if picture is not None)
