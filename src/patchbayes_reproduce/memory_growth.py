"""Table 3's memory column as what it says: how the memory that a method needs beyond the network grows with L, H and K.

The extra bytes of a training step (parameters, and what backward needs) are counted on a line of sizes, one of them growing,
and compared with the paper's order of growth on the same line: both as the exponent of a power law.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .experiment import Scale, TextTable
from .step_memory import PAPER_METHODS, step_memory

#: The paper's orders, K << L, H; constants and the batch do not change them.
ORDERS: Mapping[str, Callable[[int, int, int], float]] = {
    "emp": lambda layers, hidden, components: components * (hidden**2 + layers * hidden),
    "ecmp": lambda layers, hidden, components: components * (hidden**2 + layers * hidden),
    "dropout": lambda layers, hidden, components: layers * hidden,
    "dropconnect": lambda layers, hidden, components: layers * hidden**2,
    "ensemble": lambda layers, hidden, components: components * layers * hidden**2,
}
_NOTATION = {
    "emp": "K (H^2 + L H)", "ecmp": "K (H^2 + L H)", "dropout": "L H", "dropconnect": "L H^2", "ensemble": "K L H^2",
}  # fmt: skip
_LINES: Mapping[Scale, Mapping[str, Sequence[int]]] = {
    "smoke": {"L": (3, 6), "H": (8, 16), "K": (2, 4)},
    "small": {"L": (10, 20, 40, 80), "H": (32, 64, 128, 256), "K": (6, 12, 24, 48)},
    "paper": {"L": (10, 20, 40, 80), "H": (32, 64, 128, 256), "K": (6, 12, 24, 48)},
}
_FIXED = {"smoke": (4, 8, 2), "small": (20, 64, 5), "paper": (20, 64, 5)}
_BATCH = 8
#: An exponent may be larger than the paper's by so much, and the order still holds.
TOLERANCE = 0.15


def measured_growth(scale: Scale) -> dict[str, Any]:
    """Extra bytes of each method along each line, and the sizes (L, H, K) of its points."""
    layers, hidden, components = _FIXED[scale]
    lines = {}
    for name, values in _LINES[scale].items():
        points = [
            (value if name == "L" else layers, value if name == "H" else hidden, value if name == "K" else components)
            for value in values
        ]
        extra: dict[str, list[int]] = {method: [] for method in PAPER_METHODS}
        for depth, width, number in points:
            plain = sum(step_memory("vanilla", depth, width, number, _BATCH).values())
            for method in PAPER_METHODS:
                extra[method].append(sum(step_memory(method, depth, width, number, _BATCH).values()) - plain)
        lines[name] = {"points": points, "extra": extra}
    return lines


def exponents(growth: Mapping[str, Any]) -> dict[tuple[str, str], tuple[float, float]]:
    """By method and letter: our exponent and the paper's, over the same points. K says nothing of dropout."""
    found = {}
    for name, line in growth.items():
        place = "LHK".index(name)
        sizes = [point[place] for point in line["points"]]
        for method, order in ORDERS.items():
            theirs = [order(*point) for point in line["points"]]
            found[method, name] = _exponent(sizes, line["extra"][method]), _exponent(sizes, theirs)
    return found


def _exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The slope of log value over log size, by least squares; 0 where a value is 0 (nothing is needed)."""
    if min(values) <= 0:
        return 0.0
    x, y = [math.log(size) for size in sizes], [math.log(value) for value in values]
    middle = sum(x) / len(x), sum(y) / len(y)
    above = sum((a - middle[0]) * (b - middle[1]) for a, b in zip(x, y, strict=True))
    return above / sum((a - middle[0]) ** 2 for a in x)


def growth_table(growth: Mapping[str, Any]) -> TextTable:
    """Exponents of ours and of the paper's order, method by method."""
    found = exponents(growth)
    lines = []
    for method in ORDERS:
        pairs = [found[method, name] for name in growth]
        lines.append([method, _NOTATION[method], *(f"{ours:.2f} ({theirs:.2f})" for ours, theirs in pairs)])
    return ["method", "the paper's order", *(f"in {name}: ours (the order's)" for name in growth)], lines
