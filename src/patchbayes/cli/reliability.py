"""A picture of calibration: how often a network was right, against how sure it said it was. SVG, for page and README."""

from collections.abc import Mapping, Sequence
from typing import Any

_SIDE, _GAP, _LEFT, _TOP, _BOTTOM = 220, 46, 44, 30, 40
_INK, _PALE, _BAR, _LINE = "#6b7280", "#d1d5db", "#2f6f9f", "#c2410c"
_WIDTH = 1 / 20


def reliability_picture(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """A panel for each row: bars at the accuracy of each bin of confidence, as dark as the bin is full; the diagonal is right.

    rows: title -> {"reliability": [[examples, mean confidence, accuracy], ...], "ece": share}.
    """
    width = _LEFT + len(rows) * (_SIDE + _GAP)
    height = _TOP + _SIDE + _BOTTOM
    panels = [_panel(title, row, _LEFT + number * (_SIDE + _GAP)) for number, (title, row) in enumerate(rows.items())]
    label = "; ".join(f"{title}: calibration error {100 * row['ece']:.1f} %" for title, row in rows.items())
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'aria-label="{label}" font-family="sans-serif" font-size="12" fill="{_INK}">\n'
        + "\n".join(panels)
        + "\n</svg>\n"
    )


def _panel(title: str, row: Mapping[str, Any], left: int) -> str:
    bins: Sequence[Sequence[float]] = row["reliability"]
    total = sum(count for count, _, _ in bins)
    most = max(count for count, _, _ in bins) / total
    lines = [f'<g transform="translate({left} {_TOP})">']
    lines.append(f'<text x="0" y="-12" font-size="13" font-weight="bold">{title}, ECE {100 * row["ece"]:.1f} %</text>')
    for share in (0, 0.5, 1):
        at = share * _SIDE
        lines.append(f'<line x1="0" x2="{_SIDE}" y1="{_SIDE - at:g}" y2="{_SIDE - at:g}" stroke="{_PALE}"/>')
        lines.append(f'<text x="-6" y="{_SIDE - at + 4:g}" text-anchor="end">{share:.0%}</text>')
        lines.append(f'<text x="{at:g}" y="{_SIDE + 16}" text-anchor="middle">{share:.0%}</text>')
    for count, confidence, accuracy in bins:
        start = int(min(confidence, 0.999999) / _WIDTH) * _WIDTH * _SIDE
        opacity = 0.25 + 0.75 * (count / total / most) ** 0.5
        lines.append(
            f'<rect x="{start + 1:.1f}" y="{_SIDE * (1 - accuracy):.1f}" width="{_WIDTH * _SIDE - 2:.1f}" '
            f'height="{_SIDE * accuracy:.1f}" fill="{_BAR}" opacity="{opacity:.2f}"/>'
        )
    lines.append(f'<line x1="0" y1="{_SIDE}" x2="{_SIDE}" y2="0" stroke="{_LINE}" stroke-width="1.5"/>')
    lines.append(f'<text x="{_SIDE / 2:g}" y="{_SIDE + 34}" text-anchor="middle">confidence</text>')
    if left == _LEFT:
        lines.append(f'<text transform="translate(-34 {_SIDE / 2:g}) rotate(-90)" text-anchor="middle">accuracy</text>')
    return "\n".join([*lines, "</g>"])
