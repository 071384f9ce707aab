"""The figures of a report: one small panel each, with a caption, and a text that says what can be seen in it.

No text of a record is drawn: legends and captions are the page's.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..runs.record import Floats, Reliability
from .drawing import BAD, GOOD, INK, color, line_style, panel, svg
from .estimates import Estimate, same
from .groups import Comparison, Group
from .measures import MEASURES, Measure, in_order, measure
from .records import EvaluatedRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LARGEST_LEFT_OUT = 5  # bins with at most so many examples enter neither ECE nor MCE (appendix D.2)
MOST_POINTS = 400  # of a training curve; more cannot be seen
MARKERS = "osD^vP*X"

Curve = tuple[tuple[float, ...], Floats]  # points x and y


@dataclass(frozen=True)
class Picture:
    """An SVG element, and the caption below it (`heading` first)."""

    svg: str
    heading: str
    caption: str = ""


def reliability(group: Group, name: str) -> Picture | None:
    """Accuracy against confidence: all seeds together as dots (area: examples in the bin), each seed as a thin line."""
    bins = [run.reliability for run in group.runs if run.reliability]
    bins = [b for b in bins if len(b.count) == len(bins[0].count)]
    points = _pooled(bins) if bins else []
    if not points:
        return None
    most = max(count for count, _, _ in points)
    few = LARGEST_LEFT_OUT * len(bins)
    with panel(2.7) as (figure, axes):
        axes.plot([0, 1], [0, 1], color=INK, alpha=0.55, linewidth=0.8, dashes=(4, 3))
        for b in bins if len(bins) > 1 else []:
            known = [(c, a) for n, c, a in _pooled([b]) if n > LARGEST_LEFT_OUT]
            axes.plot([c for c, _ in known], [a for _, a in known], color=color(group.series), alpha=0.4, linewidth=0.7)
        for _, confidence, accuracy in points:
            axes.plot(
                [confidence, confidence], [confidence, accuracy], color=color(group.series), alpha=0.45, linewidth=3
            )
        axes.scatter(
            [c for _, c, _ in points],
            [a for _, _, a in points],
            s=[8 + 60 * n / most for n, _, _ in points],
            facecolors=[color(group.series) if n > few else "none" for n, _, _ in points],
            edgecolors=color(group.series),
            linewidths=1,
            zorder=3,
            clip_on=False,
        )
        _unit_axes(axes, "Confidence", "Accuracy")
        errors = group.metric(lambda run: run.metrics.get("ece"))
        return Picture(
            svg(figure, name, _reliability_label(group, points, few, errors)), group.label, _ece_caption(errors)
        )


def _pooled(bins: Sequence[Reliability]) -> list[tuple[int, float, float]]:
    """(examples, mean confidence, mean accuracy) of every bin that has examples, over all seeds."""
    points = []
    for members in zip(*(zip(b.count, b.confidence, b.accuracy, strict=True) for b in bins), strict=True):
        known = [(n, c, a) for n, c, a in members if n and c is not None and a is not None]
        total = sum(n for n, _, _ in known)
        if total:
            points.append((total, sum(n * c for n, c, _ in known) / total, sum(n * a for n, _, a in known) / total))
    return points


def _ece_caption(errors: Estimate) -> str:
    ece = MEASURES["ece"]
    if errors.value is None:
        return ""
    floor = f", floor {ece.show(errors.floor)} %" if errors.floor is not None else ""
    return f"ECE {ece.show(errors.value)} %{floor}"


def _reliability_label(group: Group, points: Sequence[tuple[int, float, float]], few: int, errors: Estimate) -> str:
    parts = [f"Reliability diagram of {group.label}: accuracy against confidence"]
    full = [point for point in points if point[0] > few]
    if full:
        _, confidence, accuracy = max(full, key=lambda point: abs(point[2] - point[1]))
        side = "below" if accuracy < confidence else "above"
        over = sum(n for n, c, a in points if a < c) / sum(n for n, _, _ in points)
        parts.append(
            f"Largest gap: accuracy {100 * abs(accuracy - confidence):.0f} points {side} {100 * confidence:.0f} %"
        )
        parts.append(f"{100 * over:.0f} % of the predictions lie in overconfident bins")
    if errors.value is not None:
        parts.append(_ece_caption(errors))
    return ". ".join(parts) + "."


def histogram(group: Group, name: str) -> Picture | None:
    """How confident the right predictions are (up) and the wrong ones (down), each as a share of its own kind."""
    found = [run.histogram for run in group.runs if run.histogram]
    found = [h for h in found if h.edges == found[0].edges]
    if not found:
        return None
    edges = found[0].edges
    correct = [sum(column) for column in zip(*(h.correct for h in found), strict=True)]
    wrong = [sum(column) for column in zip(*(h.wrong for h in found), strict=True)]
    if not sum(correct) + sum(wrong):
        return None
    widths = [b - a for a, b in itertools.pairwise(edges)]
    with panel(2.5) as (figure, upper):
        left, bottom, width, height = upper.get_position().bounds
        lower = figure.add_axes((left, bottom, width, height / 2), sharex=upper)
        upper.set_position((left, bottom + height / 2, width, height / 2))
        for axes, counts, fill in ((upper, correct, GOOD), (lower, wrong, BAD)):
            total = sum(counts)
            shares = [100 * count / total if total else 0.0 for count in counts]
            axes.bar(edges[:-1], shares, [0.9 * w for w in widths], align="edge", color=fill, linewidth=0)
            axes.set_ylim(0, max([*shares, 1e-9]) * 1.08)
            axes.locator_params(axis="y", nbins=4)
            axes.grid(axis="x", visible=False)
        lower.invert_yaxis()
        lower.set_yticks(lower.get_yticks()[1:-1])
        upper.tick_params(axis="x", length=0, labelbottom=False)
        upper.set_ylabel("Right, %")
        lower.set_ylabel("Wrong, %")
        lower.set_xlabel("Confidence")
        lower.set_xlim(edges[0], edges[-1])
        label = (
            f"Confidence of {group.label}: {_mean_confidence(edges, correct)} where the prediction is right "
            f"({sum(correct):,} predictions), {_mean_confidence(edges, wrong)} where it is wrong ({sum(wrong):,})."
        )
        return Picture(svg(figure, name, label), group.label, _confidently_wrong(edges, wrong))


def _mean_confidence(edges: Sequence[float], counts: Sequence[int]) -> str:
    total = sum(counts)
    middles = [(a + b) / 2 for a, b in itertools.pairwise(edges)]
    return (
        f"{100 * sum(n * m for n, m in zip(counts, middles, strict=True)) / total:.0f} % on average"
        if total
        else "none"
    )


def _confidently_wrong(edges: Sequence[float], wrong: Sequence[int]) -> str:
    total = sum(wrong)
    sure = sum(n for n, start in zip(wrong, edges, strict=False) if start >= 0.9 - 1e-9)
    return (
        f"{100 * sure / total:.0f} % of the wrong predictions are more than 90 % confident"
        if total
        else "none is wrong"
    )


def draws_curves(comparison: Comparison, names: Iterable[str]) -> list[Picture]:
    """One panel for each metric: its value against the number of draws, dashed lines where temperature scaling stands."""
    found = in_order({n for run in comparison.runs if run.draws_curve for n in run.draws_curve.scores})
    pictures = [_draws_curve(comparison, metric, name) for metric, name in zip(found, names, strict=False)]
    return [picture for picture in pictures if picture]


def _draws_curve(comparison: Comparison, metric: str, name: str) -> Picture | None:
    what = measure(metric)
    seen = []
    ticks: set[int] = set()
    with panel() as (figure, axes):
        for group in comparison.groups:
            points = _draws_points(group, metric) or _one_network(group, metric)
            if not points:
                continue
            x = [s for s, _, _ in points]
            y = [what.scale * value for _, value, _ in points]
            error = [what.scale * spread for _, _, spread in points]
            ticks |= set(x)
            style: dict[str, Any] = {"color": color(group.series), "linestyle": line_style(group.series)}
            axes.errorbar(
                x, y, error, marker=MARKERS[group.series % 8], elinewidth=0.8, capsize=1.5, capthick=0.8, **style
            )
            if len(points) == 1:
                axes.axhline(y[0], linewidth=0.8, **style)
            scaled = group.metric(lambda run: run.temperature.metrics.get(metric) if run.temperature else None).value
            if scaled is not None and _drawable(scaled) and not same(scaled, points[-1][1]):
                axes.axhline(what.scale * scaled, color=color(group.series), linewidth=1, dashes=(4, 3), alpha=0.9)
            seen.append(
                f"{group.label} {what.show(points[0][1])} with {x[0]:,} and {what.show(points[-1][1])} with {x[-1]:,}"
                + (f", temperature scaling {what.show(scaled)}" if scaled is not None else "")
            )
        if not seen:
            return None
        axes.set_xscale("log")
        axes.set_xticks(sorted(ticks), [f"{tick:,}" for tick in sorted(ticks)])
        axes.minorticks_off()
        axes.set_xlabel("Draws S")
        _few_ticks(axes)
        return Picture(
            svg(figure, name, f"{what.label} against the number of draws: {'; '.join(seen)}."), _heading(what)
        )


def _draws_points(group: Group, metric: str) -> list[tuple[int, float, float]]:
    """(S, mean over seeds, standard error): over seeds where there are several, else the record's own."""
    curves = [run.draws_curve for run in group.runs if run.draws_curve and metric in run.draws_curve.scores]
    values: dict[int, list[float]] = {}
    errors: dict[int, float] = {}
    for curve in curves:
        scores = curve.scores[metric]
        for s, value, spread in zip(curve.draws, scores.value, scores.standard_error, strict=True):
            if value is not None and _drawable(value):
                values.setdefault(s, []).append(value)
                errors[s] = spread if spread is not None and _drawable(spread) else 0.0
    return [
        (s, statistics.fmean(v), statistics.stdev(v) / math.sqrt(len(v)) if len(v) > 1 else errors[s])
        for s, v in sorted(values.items())
        if len(v) == len(curves)
    ]


def _one_network(group: Group, metric: str) -> list[tuple[int, float, float]]:
    """A network that is not drawn has one point, at S = 1."""
    value = group.metric(lambda run: run.metrics.get(metric)).value
    alone = all(run.diversity is None and run.draws_curve is None for run in group.runs)
    return [(1, value, 0.0)] if alone and value is not None and _drawable(value) else []


def coverage(comparison: Comparison, name: str) -> Picture | None:
    """Accuracy of the most certain examples, against the share of examples that is kept."""
    return _curves(
        comparison,
        name,
        lambda run: (run.coverage.coverage, run.coverage.accuracy) if run.coverage else None,
        "Kept, % of examples",
        "Accuracy of the kept, %",
        "Accuracy of what is kept",
    )


def quantiles(comparison: Comparison, name: str) -> Picture | None:
    """Share of targets below each predicted quantile, against its level: the diagonal where calibrated."""
    return _curves(
        comparison,
        name,
        lambda run: (run.quantiles.level, run.quantiles.observed) if run.quantiles else None,
        "Level, %",
        "Targets below, %",
        "Targets below each quantile",
        True,
    )


def _curves(
    comparison: Comparison,
    name: str,
    get: Callable[[EvaluatedRun], Curve | None],
    x_label: str,
    y_label: str,
    heading: str,
    diagonal: bool = False,
) -> Picture | None:
    seen = []
    with panel(2.7) as (figure, axes):
        if diagonal:
            axes.plot([0, 100], [0, 100], color=INK, alpha=0.55, linewidth=0.8, dashes=(4, 3))
        for group in comparison.groups:
            curves = [c for c in map(get, group.runs) if c is not None]
            for curve in curves if len(curves) > 1 else []:
                axes.plot(*_percent(*curve), color=color(group.series), linewidth=0.6, alpha=0.4)
            mean = _mean_curve(curves)
            if mean:
                x, y = _percent([x for x, _ in mean], [y for _, y in mean])
                axes.plot(x, y, color=color(group.series), linestyle=line_style(group.series))
                middle = min(range(len(x)), key=lambda i: abs(x[i] - 50))
                seen.append(f"{group.label} {y[middle]:.1f} % at {x[middle]:.0f} %")
        if not seen:
            return None
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label, labelpad=2)
        _few_ticks(axes)
        return Picture(svg(figure, name, f"{heading}, {y_label} against {x_label}: {'; '.join(seen)}."), heading)


def _percent(x: Sequence[float], y: Floats | Sequence[float]) -> tuple[list[float], list[float]]:
    return [100 * v for v in x], [math.nan if v is None else 100 * v for v in y]


def _mean_curve(curves: Sequence[Curve]) -> list[tuple[float, float]]:
    """The mean over seeds at the places of the first seed that all have."""
    tables = [{x: y for x, y in zip(*curve, strict=True) if y is not None and _drawable(y)} for curve in curves]
    places = [x for x in tables[0] if all(x in table for table in tables)] if tables else []
    return [(x, statistics.fmean(table[x] for table in tables)) for x in places]


def training_curves(comparison: Comparison, names: Iterable[str]) -> list[Picture]:
    """One panel for each quantity of the training histories, one line for each run."""
    found = {n for run in comparison.runs for n in run.history}
    ordered = [n for n in ("loss", "kl") if n in found] + sorted(n for n in found if n.startswith("held_out_"))
    pictures = [_training_curve(comparison, what, name) for what, name in zip(ordered, names, strict=False)]
    return [picture for picture in pictures if picture]


def _training_curve(comparison: Comparison, what: str, name: str) -> Picture | None:
    percent = what.endswith("accuracy")
    seen = []
    with panel() as (figure, axes):
        for group in comparison.groups:
            ends = []
            for run in group.runs:
                points = [(e, v) for e, v in run.history.get(what, ()) if _drawable(v) and _drawable(e)]
                step = math.ceil(len(points) / MOST_POINTS) or 1
                points = points[::-1][::step][::-1]  # the last one stays
                x, y = [e for e, _ in points], [(100 if percent else 1) * v for _, v in points]
                marker = "." if len(points) == 1 else ""
                style = line_style(group.series)
                axes.plot(x, y, color=color(group.series), linewidth=1.1, linestyle=style, marker=marker, alpha=0.85)
                ends += y[-1:]
            if ends:
                seen.append(f"{group.label} ends at {statistics.fmean(ends):.4g}")
        if not seen:
            return None
        axes.set_xlabel("Epoch")
        _few_ticks(axes)
        axes.locator_params(axis="x", integer=True, nbins=5)
        words = what.replace("held_out_", "held-out ").replace("_", " ").replace("nll", "NLL").replace("rmse", "RMSE")
        heading = ("KL" if words == "kl" else words[0].upper() + words[1:]) + (", %" if percent else "")
        return Picture(svg(figure, name, f"{heading} by epoch: {'; '.join(seen)}."), heading)


def component_distances(comparison: Comparison, name: str) -> Picture | None:
    """Distance between the components of every site, in the network's order; mean over seeds."""
    seen = []
    with panel() as (figure, axes):
        for group in comparison.groups:
            points = site_distances(group)
            if points:
                y = [100 * distance for _, distance in points]
                axes.plot(
                    range(1, len(y) + 1),
                    y,
                    color=color(group.series),
                    linestyle=line_style(group.series),
                    marker=MARKERS[group.series % 8],
                    linewidth=1,
                )
                seen.append(f"{group.label} between {min(y):.1f} and {max(y):.1f} % over {len(y)} sites")
        if not seen:
            return None
        axes.set_xlabel("Site, in the network's order")
        axes.set_ylim(bottom=0)
        _few_ticks(axes)
        axes.locator_params(axis="x", integer=True, nbins=6)
        label = f"Distance between components by site: {'; '.join(seen)}."
        return Picture(svg(figure, name, label), "Distance between components, %")


def site_distances(group: Group) -> list[tuple[str, float]]:
    """(site, mean distance over seeds), in the order of the first seed that has them."""
    found: dict[str, list[float]] = {}
    for run in group.runs:
        for site, distance in run.diversity.distances if run.diversity else ():
            if _drawable(distance):
                found.setdefault(site, []).append(distance)
    return [(site, statistics.fmean(distances)) for site, distances in found.items()]


def _heading(what: Measure) -> str:
    return f"{what.label} {what.arrow}".strip()


def _unit_axes(axes: "Axes", x_label: str, y_label: str) -> None:
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    for set_ticks in (axes.set_xticks, axes.set_yticks):
        set_ticks([0, 0.25, 0.5, 0.75, 1], ["0", "25", "50", "75", "100"])
    axes.set_xlabel(f"{x_label}, %")
    axes.set_ylabel(f"{y_label}, %", labelpad=1)


def _few_ticks(axes: "Axes") -> None:
    axes.locator_params(axis="y", nbins=5)
    axes.grid(axis="x", visible=False)
    axes.margins(y=0.08)


def _drawable(value: float) -> bool:
    """Finite, and far from where arithmetic on it would not be."""
    return abs(value) < 1e100
