"""The page of `patchbayes bayesianize`: what was chosen, what it brought, how to load it. One file, no script, no network."""

import math
from collections.abc import Sequence
from html import escape
from importlib import resources

from ..bayesianizing.report import BayesianizeReport, CalibrationReport, Scores
from ..bayesianizing.tries import Tried
from .reliability import reliability_picture

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 560, 190, 64, 44, 14
_COLORS = {"blue": "#2f6f9f", "orange": "#c2410c", "green": "#15803d"}


def bayesianize_page(report: BayesianizeReport) -> str:
    """The HTML text."""
    found = report.calibration
    style = resources.files("patchbayes.report").joinpath("page.css").read_text("utf-8")
    rows = {"as it was": found.before, "temperature alone": found.temperature_scaled, "now": found.after}
    pictures = {
        title: {"reliability": scores.reliability, "ece": scores.ece}
        for title, scores in rows.items()
        if scores.reliability
    }
    parts = [
        _part("Scores", f"{_scores(rows, found)}<p class='note'>{escape(_temperatures(found))}</p>"),
        _part(
            "Reliability",
            f"<figure>{reliability_picture(pictures)}<figcaption>Bars on the line: the network is right as often as it says, "
            "on the held-out examples. Darker bars hold more of them.</figcaption></figure>",
        )
        if pictures
        else "",
        _part("Spread of each site", _spread(found)) if found.chosen != "none" else "",
        _part(
            "Held-out NLL along the way",
            f"<figure>{_way(found.tried)}<figcaption>Each point is a spread that was tried; points of one number of examples "
            "compare with each other.</figcaption></figure>",
        )
        if found.tried
        else "",
        _part("Cost, size, and how to load it", _facts(report)),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        '<link rel="icon" href="data:,">\n<title>patchbayes bayesianize</title>\n'
        f"<style>\n{style}\nfigure svg {{ max-width: 100%; height: auto; }}\nfigure {{ max-width: none; }}\n"
        ".bar { background: #2f6f9f; height: .8em; min-width: 2px; }\n</style>\n</head>\n<body>\n"
        f'<header><h1>A trained network, made Bayesian</h1>\n<p class="lead">{escape(found.verdict)}</p>'
        f"{''.join(f'<p>{escape(text)}</p>' for text in found.remarks)}</header>\n"
        f"<main>\n{chr(10).join(part for part in parts if part)}\n</main>\n</body>\n</html>\n"
    )


def _part(title: str, content: str) -> str:
    name = title.lower().replace(" ", "-").replace(",", "")
    return f'<section class="part" aria-labelledby="{name}"><h2 id="{name}">{escape(title)}</h2>\n{content}</section>'


def _scores(rows: dict[str, Scores], found: CalibrationReport) -> str:
    passes = {"as it was": "1", "temperature alone": "1", "now": "1" if found.chosen == "none" else str(found.draws)}
    lines = []
    for title, scores in rows.items():
        cells = [
            f"{scores.nll:.4f}",
            *("" if v is None else f"{100 * v:.1f} %" for v in (scores.shown_ece, scores.accuracy)),
        ]
        values = "".join(f"<td>{cell}</td>" for cell in [*cells, passes[title]])
        lines.append(f'<tr><th scope="row">{title}</th>{values}</tr>')
    head = "".join(f'<th scope="col">{name}</th>' for name in ("", "NLL", "ECE", "accuracy", "draws"))
    seen = f", views: {found.views}" if found.views else ""
    return _table(f"On {found.num_held_out} held-out examples{seen}", head, lines)


def _temperatures(found: CalibrationReport) -> str:
    return (
        f"Temperature of the average {found.temperature:.3f}, of each draw before it {found.draw_temperature:.3f}, of the mean "
        f"network in one pass {found.mean_temperature:.3f}."
    )


def _spread(found: CalibrationReport) -> str:
    shown = {name: value for name, value in found.spread.items() if value > 0}
    largest = max(shown.values(), default=1.0)
    lines = [
        f'<tr><th scope="row"><code>{escape(name)}</code></th><td>{100 * value:.2f} %</td>'
        f'<td style="min-width:12rem"><div class="bar" style="width:{100 * value / largest:.1f}%"></div></td></tr>'
        for name, value in shown.items()
    ]
    head = '<th scope="col">site</th><th scope="col">of its values</th><th scope="col"></th>'
    return _table("How far the draws deviate, as a part of the values (root mean squares)", head, lines)


def _table(caption: str, head: str, lines: list[str]) -> str:
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(caption)}"><table><caption>{escape(caption)}'
        f"</caption><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def _way(tried: Sequence[Tried]) -> str:
    shown = [one for one in tried if math.isfinite(one.nll)]
    low, high = (f((one.nll for one in shown), default=0.0) for f in (min, max))
    kinds = dict(zip(dict.fromkeys(one.layers for one in shown), _COLORS, strict=False))  # at most three sets of layers
    step, tall = (_WIDTH - _LEFT - 20) / max(len(shown) - 1, 1), _HEIGHT - _TOP - _BOTTOM
    ink = 'fill="#6b7280"'
    points = []
    for number, one in enumerate(shown):
        x, y = _LEFT + number * step, _TOP + tall * ((high - one.nll) / (high - low) if high > low else 0.5)
        title = f"level x{math.exp(one.level):.3g}, slope {one.slope:+.1f}: NLL {one.nll:.4f}"
        color = _COLORS[kinds[one.layers]]
        points.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color}"><title>{title}</title></circle>')
        points.append(
            f'<text x="{x:.1f}" y="{_HEIGHT - 26}" {ink} font-size="10" text-anchor="middle">{one.examples}</text>'
        )
    for value, y in ((high, _TOP), (low, _TOP + tall)):
        points.append(f'<line x1="{_LEFT - 8}" x2="{_WIDTH}" y1="{y}" y2="{y}" stroke="#d1d5db"/>')
        points.append(f'<text x="{_LEFT - 12}" y="{y + 4}" {ink} text-anchor="end">{value:.3f}</text>')
    legend = ", ".join(f"{color}: {kind}" for kind, color in kinds.items() if kind)
    points.append(
        f'<text x="{_LEFT}" y="{_HEIGHT - 6}" {ink} font-size="11">examples{"; " + legend if legend else ""}</text>'
    )
    label = f"NLL of {len(shown)} spreads that were tried, from {high:.3f} to {low:.3f}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" '
        f'role="img" aria-label="{label}" font-family="sans-serif" font-size="12">{"".join(points)}</svg>'
    )


def _facts(report: BayesianizeReport) -> str:
    found = report.calibration
    seconds = ", ".join(f"{name} {value:.0f} s" for name, value in found.seconds.items())
    notes = "".join(f"<p>{escape(note)}.</p>\n" for note in report.patch.notes)
    return (
        f"{notes}<p>{found.passes:,} inputs through the network to choose, {found.scoring_passes:,} for the last scores; "
        f"{seconds}. Size: {report.size}.</p>\n<p>To load it elsewhere:</p>\n<pre><code>{escape(report.call)}</code></pre>"
    )
