"""The tables of a report as values: what stands in each cell, before it becomes HTML, Markdown, LaTeX or CSV."""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from ..runs.record import Metric, Parameters
from . import collapse
from .estimates import Estimate, best
from .groups import Comparison, Group
from .measures import AUROC, ERROR, FPR95, MISSING, RELATIVE_ERROR, Measure, in_order, measure
from .records import EvaluatedRun

Metrics = Callable[[EvaluatedRun], dict[str, Metric]]
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class TableColumn:
    """`key` names the quantity to programs, `arrow` points where better values are, `meaning` explains it in a sentence.

    `words`: the cells are not numbers.
    """

    label: str
    key: str = ""
    arrow: str = ""
    meaning: str = ""
    words: bool = False


@dataclass(frozen=True)
class TableCell:
    """What is shown (the text, below it smaller details: the interval, the floor), and the numbers behind it."""

    text: str
    details: tuple[str, ...] = ()
    best: bool = False
    numbers: Estimate | None = None


@dataclass(frozen=True)
class TableRow:
    """`series` is the color of the row's group; a `derived` row is a variant of the one above it."""

    label: str
    cells: tuple[TableCell, ...]
    detail: str = ""
    series: int | None = None
    derived: bool = False


@dataclass(frozen=True)
class Table:
    title: str
    corner: str
    columns: tuple[TableColumn, ...]
    rows: tuple[TableRow, ...]
    notes: tuple[str, ...] = field(default=())


def tables(comparison: Comparison) -> dict[str, Table]:
    """Every table that the records of a comparison can fill, by the name of its section."""
    made = {
        "summary": summary(comparison),
        "cost": cost(comparison),
        "ood": out_of_distribution(comparison),
        "corruption": corruption_summary(comparison),
        "corruptions": corruption_errors(comparison),
        "diversity": diversity(comparison),
    }
    return {name: table for name, table in made.items() if table is not None}


def summary(comparison: Comparison) -> Table | None:
    """Every metric of every group, and of each group after temperature scaling."""
    names = in_order({name for run in comparison.runs for name in run.metrics})
    if not names:
        return None
    rows: list[tuple[Group, str, Metrics]] = []
    for group in comparison.groups:
        rows.append((group, "", lambda run: run.metrics))
        if any(run.temperature for run in group.runs):
            rows.append(
                (group, temperature_label(group), lambda run: run.temperature.metrics if run.temperature else {})
            )
    columns, cells = [], []
    for name in names:
        estimates = [group.metric(_named(name, metrics)) for group, _, metrics in rows]
        what = measure(name)
        columns.append(TableColumn(what.label, name, what.arrow, what.meaning))
        cells.append(_cells(what, estimates, [group.series for group, *_ in rows]))
    return Table(
        f"Scores on {comparison.title}",
        "Method",
        tuple(columns),
        tuple(
            TableRow(
                scaled or group.label,
                tuple(column[i] for column in cells),
                "" if scaled else group.seeds_text,
                None if scaled else group.series,
                bool(scaled),
            )
            for i, (group, scaled, _) in enumerate(rows)
        ),
        _summary_notes(comparison),
    )


def _named(name: str, metrics: Metrics) -> Callable[[EvaluatedRun], Metric | None]:
    return lambda run: metrics(run).get(name)


def temperature_label(group: Group) -> str:
    values = [run.temperature.temperature for run in group.runs if run.temperature and run.temperature.temperature]
    return "with temperature" + (f" {statistics.fmean(values):.2f}" if values else "")


def _summary_notes(comparison: Comparison) -> tuple[str, ...]:
    several = any(len(group.runs) > 1 for group in comparison.groups)
    single = any(len(group.runs) == 1 for group in comparison.groups)
    notes = []
    if several:
        notes.append("± is the 95 % t interval of the mean over seeds, all on the same examples.")
    if single:
        notes.append(
            "[low, high] is the 95 % bootstrap interval over test examples of a single run; it does not say how another seed "
            "would do."
        )
    if len(comparison.groups) > 1:
        notes.append(
            "Bold marks a value that is better beyond chance than every row of the other methods: by the differences seed "
            "by seed where rows share two or more seeds, else by intervals that do not overlap. No bold in a column: the "
            "data do not say."
        )
    if any(metric.floor is not None for run in comparison.runs for metric in run.metrics.values()):
        notes.append("Floor: what a perfectly calibrated model with the same confidences would score by chance.")
    fitted = sorted({run.temperature.fitted_on for run in comparison.runs if run.temperature} - {""})
    if fitted:
        notes.append(f"Temperature scaling needs labeled examples: it was fitted on {', '.join(fitted)}.")
    return tuple(notes)


def cost(comparison: Comparison) -> Table | None:
    """Parameters, ensemble size and training time."""
    if not any(run.parameters != Parameters() or run.training_seconds is not None for run in comparison.runs):
        return None

    def get(name: str) -> Callable[[EvaluatedRun], float | None]:
        return lambda run: getattr(run.parameters, name)

    rows = []
    for group in comparison.groups:
        before, after, sites, size = (
            group.estimate(get(name)) for name in ("unpatched", "patched", "patched_sites", "log10_ensemble_size")
        )
        more = f"{100 * (after.value / before.value - 1):+.3g} %" if before.value and after.value else ""
        seconds = group.estimate(lambda run: run.training_seconds)
        cells = (
            TableCell(_count(before), numbers=before),
            TableCell(_count(after), (more,) if more and more != "+0 %" else (), numbers=after),
            TableCell(_count(sites), numbers=sites),
            TableCell(_power_of_ten(size.value), numbers=size),
            TableCell(_duration(seconds.value), numbers=seconds),
        )
        rows.append(TableRow(group.label, cells, _what(group), group.series))
    columns = (
        TableColumn("Parameters", "unpatched"),
        TableColumn("Patched", "patched"),
        TableColumn("Sites", "patched_sites"),
        TableColumn(
            "Ensemble size", "log10_ensemble_size", meaning="how many distinct networks the patched one can be"
        ),
        TableColumn("Training", "training_seconds", meaning="wall time, mean over seeds"),
    )
    return Table(f"Cost on {comparison.title}", "Method", columns, tuple(rows))


def _what(group: Group) -> str:
    return ", ".join(text for text in (group.first.model, group.first.sites) if text)


def _count(estimate: Estimate) -> str:
    return MISSING if estimate.value is None else f"{estimate.value:,.0f}"


def _power_of_ten(exponent: float | None) -> str:
    if exponent is None:
        return MISSING
    if 0 <= exponent < 6:
        return f"{round(10**exponent):,}"
    return "10" + f"{exponent:.0f}".translate(SUPERSCRIPTS) if math.isfinite(exponent) else "∞"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return MISSING
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def out_of_distribution(comparison: Comparison) -> Table | None:
    """AUROC and FPR95 for every foreign data set and score."""
    keys = list(dict.fromkeys((item.data, item.score) for run in comparison.runs for item in run.ood))
    if not keys:
        return None
    columns, cells = [], []
    for data, score in keys:
        for what, attribute in ((AUROC, "auroc"), (FPR95, "fpr95")):
            columns.append(
                TableColumn(f"{data}, {score}: {what.label}", f"{data} {score} {attribute}", what.arrow, what.meaning)
            )
            cells.append(
                _cells(what, [group.estimate(_ood_value(data, score, attribute)) for group in comparison.groups])
            )
    rows = tuple(replace(row, detail=row.detail.partition(",")[0]) for row in _rows(comparison, cells))
    notes = ("Both kinds of input by as many draws, 20 at most.",)
    return Table(f"Unfamiliar inputs against {comparison.title}", "Method", tuple(columns), rows, notes)


def _ood_value(data: str, score: str, attribute: str) -> Callable[[EvaluatedRun], float | None]:
    return lambda run: next((getattr(i, attribute) for i in run.ood if (i.data, i.score) == (data, score)), None)


def corruption_summary(comparison: Comparison) -> Table | None:
    """Mean error, NLL and ECE over all corruptions and severities, mCE and relative mCE."""
    runs = [run for run in comparison.runs if run.corruptions]
    if not runs:
        return None
    columns, cells = [], []
    for name, what in (("error", ERROR), ("nll", measure("nll")), ("ece", measure("ece"))):
        if any(run.corruptions and name in run.corruptions.tables for run in runs):
            columns.append(TableColumn(f"Mean {lower(what.label)}", f"mean_{name}", what.arrow, what.meaning))
            cells.append(_cells(what, [group.estimate(_corruption_mean(name)) for group in comparison.groups]))
    relative: list[tuple[str, str, Callable[[EvaluatedRun], float | None]]] = [
        ("mCE", "mce", lambda run: run.corruptions.mce if run.corruptions else None),
        ("Relative mCE", "relative_mce", lambda run: run.corruptions.relative_mce if run.corruptions else None),
    ]
    for label, key, value in relative:
        estimates = [group.estimate(value) for group in comparison.groups]
        if any(estimate.value is not None for estimate in estimates):
            columns.append(TableColumn(label, key, RELATIVE_ERROR.arrow))
            cells.append(_cells(RELATIVE_ERROR, estimates))
    references = sorted({run.corruptions.reference for run in runs if run.corruptions and run.corruptions.reference})
    found = [run.corruptions for run in runs if run.corruptions]
    severities = ", ".join(str(level) for level in sorted({level for one in found for level in one.severities}))
    numbers = sorted({one.num_examples for one in found if one.num_examples})
    images = f" of {' or '.join(f'{number:,}' for number in numbers)} images" if numbers else ""
    kinds = max(len(one.names) for one in found)
    notes = [f"Means are over {kinds} corruption{'s' if kinds > 1 else ''}{images}, severity {severities}."]
    shown = {column.key for column in columns}
    if references and "mce" in shown:
        notes.append(f"mCE: error by corruption relative to that of {', '.join(references)}, which is 100, averaged.")
    if references and "relative_mce" in shown:
        notes.append("Relative mCE: the same for what the corruption adds to the clean error.")
    rows = tuple(
        replace(row, detail=group.corrupted_text)
        for row, group in zip(_rows(comparison, cells), comparison.groups, strict=True)
    )
    return Table(f"Corruption of {comparison.title}", "Method", tuple(columns), rows, tuple(notes))


def lower(label: str) -> str:
    """Small first letter, but for abbreviations."""
    return label if label[:2].isupper() else label[:1].lower() + label[1:]


def _corruption_mean(name: str, corruption: str | None = None) -> Callable[[EvaluatedRun], float | None]:
    """The mean over severities, and over all corruptions unless one is named."""
    return lambda run: run.corruptions.mean(name, corruption) if run.corruptions else None


def corruption_errors(comparison: Comparison) -> Table | None:
    """Error by corruption, averaged over severities; one column for each group."""
    names = list(dict.fromkeys(n for run in comparison.runs if run.corruptions for n in run.corruptions.names))
    if not any(run.corruptions and "error" in run.corruptions.tables for run in comparison.runs):
        return None
    rows = [
        TableRow(
            name.replace("_", " "),
            tuple(_cells(ERROR, [g.estimate(_corruption_mean("error", name)) for g in comparison.groups])),
        )
        for name in names
    ]
    columns = tuple(TableColumn(group.label) for group in comparison.groups)
    return Table(
        f"Error by corruption of {comparison.title}",
        "Corruption",
        columns,
        tuple(rows),
        ("Error in %, mean over severities.",),
    )


def diversity(comparison: Comparison) -> Table | None:
    """How much the draws differ, and the plain verdict."""
    if not any(run.diversity for run in comparison.runs):
        return None

    def show(what: Measure, value: Callable[[EvaluatedRun], float | None]) -> list[TableCell]:
        return _cells(what, [group.estimate(value) for group in comparison.groups])

    cells = [
        [TableCell(collapse.sentence(group.runs)) for group in comparison.groups],
        show(Measure("", scale=100, decimals=2), lambda run: run.diversity.disagreement if run.diversity else None),
        show(Measure("", decimals=4), lambda run: run.diversity.mutual_information if run.diversity else None),
        show(Measure("", scale=100, decimals=1), _median_distance),
    ]
    columns = (
        TableColumn("Verdict", "verdict", words=True),
        TableColumn("Disagreement, %", "disagreement", meaning="how often two draws name different classes"),
        TableColumn(
            "Mutual information",
            "mutual_information",
            meaning="what the draws disagree on, in nats, mean over examples",
        ),
        TableColumn(
            "Distance, %",
            "distance",
            meaning="rms distance between a site's components relative to their mean; median over sites",
        ),
    )
    return Table(f"Diversity on {comparison.title}", "Method", columns, _rows(comparison, cells))


def _median_distance(run: EvaluatedRun) -> float | None:
    distances = [distance for _, distance in run.diversity.distances] if run.diversity else []
    return statistics.median(distances) if distances else None


def _cells(what: Measure, estimates: Sequence[Estimate], families: Sequence[int] | None = None) -> list[TableCell]:
    winner = best(estimates, what.better, families)
    return [
        TableCell(what.show(estimate.value), _details(what, estimate), i == winner, estimate)
        for i, estimate in enumerate(estimates)
    ]


def _details(what: Measure, estimate: Estimate) -> tuple[str, ...]:
    parts = []
    if estimate.half_width is not None:
        parts.append(f"±\N{NO-BREAK SPACE}{what.show(estimate.half_width, estimate.value)}")
    elif estimate.low is not None and estimate.high is not None:
        parts.append(f"[{what.show(estimate.low, estimate.value)}, {what.show(estimate.high, estimate.value)}]")
    if estimate.floor is not None:
        parts.append(f"floor {what.show(estimate.floor, estimate.value)}")
    return tuple(parts)


def _rows(comparison: Comparison, columns: Iterable[Sequence[TableCell]]) -> tuple[TableRow, ...]:
    by_group = zip(*columns, strict=True)
    return tuple(
        TableRow(group.label, tuple(cells), group.seeds_text, group.series)
        for group, cells in zip(comparison.groups, by_group, strict=True)
    )
