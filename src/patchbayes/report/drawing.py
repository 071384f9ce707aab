"""From matplotlib figures to SVG that lives inside a page: its colors are the page's, its text is text, its size is free.

Figures are drawn with stand-in colors, which become CSS variables here, so that one picture follows light and dark. The same
figure always gives the same bytes.
"""

import contextlib
import io
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, RULE, GOOD, BAD = "#010101", "#010102", "#010103", "#010104"
SERIES = [f"#0102{number:02x}" for number in range(8)]
PAGE_COLORS = {INK: "currentColor", RULE: "var(--rule)", GOOD: "var(--good)", BAD: "var(--bad)"} | {
    color: f"var(--series-{number})" for number, color in enumerate(SERIES)
}
# A series beyond the eighth takes a color again, with another dash.
DASHES = ["", "5 2", "1.5 1.5"]
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "patchbayes",
    "text.parse_math": False,
    "font.size": 8.5,
    "text.color": INK,
    "axes.edgecolor": RULE,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.unicode_minus": True,
    "grid.color": RULE,
    "grid.linewidth": 0.5,
    "xtick.color": RULE,
    "ytick.color": RULE,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "lines.linewidth": 1.5,
    "lines.markersize": 3.5,
    "figure.dpi": 72,
}


def color(series: int) -> str:
    return SERIES[series % len(SERIES)]


def dash(series: int) -> str:
    """The dash of a series as SVG writes it; empty for a full line."""
    return DASHES[series // len(SERIES) % len(DASHES)]


def line_style(series: int) -> Any:
    """The same dash as matplotlib takes it."""
    pattern = dash(series)
    return (0, tuple(float(part) for part in pattern.split())) if pattern else "-"


@contextlib.contextmanager
def panel(height: float = 2.5) -> Iterator[tuple["Figure", "Axes"]]:
    """A figure of 3.1 inches by `height` with one pair of axes, drawn and saved with nothing of the user's own style."""
    from matplotlib import style
    from matplotlib.figure import Figure

    with style.context(["default", STYLE]):
        figure = Figure(figsize=(3.1, height))
        axes = figure.add_axes((0.165, 0.42 / height, 0.80, (height - 0.52) / height))
        yield figure, axes


def svg(figure: "Figure", name: str, label: str) -> str:
    """The figure as an SVG element for a page; `name` keeps its ids apart from others', `label` says what it shows."""
    out = io.BytesIO()
    figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    root = ET.fromstring(out.getvalue())
    for parent in list(root.iter()):
        for child in list(parent):
            # The style element is for the whole page once it is inside one; the page's own sheet says the same.
            if _local(child.tag) in ("metadata", "style"):
                parent.remove(child)
    renamed = {old: f"{name}-{number}" for number, old in enumerate(sorted(_referenced(root)))}
    for element in root.iter():
        element.tag = _local(element.tag)
        attributes = {_local(key): value for key, value in element.attrib.items()}
        element.attrib.clear()
        for key, value in attributes.items():
            if key != "id" or value in renamed:
                element.set(key, _attribute(key, value, renamed))
        element.text = element.text if element.tag == "text" else None
        element.tail = None
    box = root.attrib["viewBox"]
    root.attrib.clear()
    root.attrib.update({"class": "plot", "viewBox": box, "role": "img", "aria-label": label})
    return ET.tostring(root, encoding="unicode")


def _local(name: str) -> str:
    return name.rpartition("}")[2]


def _referenced(root: ET.Element) -> set[str]:
    """The ids that something in the figure points to; the others are matplotlib's names for its parts."""
    attributes = [(_local(key), value) for element in root.iter() for key, value in element.attrib.items()]
    return {value[1:] for key, value in attributes if key == "href"} | {
        match for _, value in attributes for match in re.findall(r"url\(#([^)]+)\)", value)
    }


def _attribute(key: str, value: str, renamed: dict[str, str]) -> str:
    if key == "id":
        return renamed[value]
    if key == "href":
        return f"#{renamed[value[1:]]}"
    if key == "style":
        value = re.sub(r"font(-family)?:[^;]*(;\s*|$)", _font_size, value)
        return re.sub("#[0-9a-f]{6}", lambda match: PAGE_COLORS.get(match[0], match[0]), value).strip("; ")
    value = re.sub(r"url\(#([^)]+)\)", lambda match: f"url(#{renamed[match[1]]})", value)
    if key in ("d", "transform", "x", "y", "width", "height", "points"):
        value = re.sub(r"-?\d+\.\d+(e-?\d+)?", lambda match: f"{float(match[0]):.2f}".rstrip("0").rstrip("."), value)
    return re.sub(r"\s+", " ", value).strip()


def _font_size(match: re.Match[str]) -> str:
    """Of a font only the size stays; the family is the page's."""
    size = re.search(r"[\d.]+px", match[0])
    return f"font-size: {size[0]}; " if size else ""
