"""What each measured quantity is called, which direction is good, and how its numbers are written."""

import math
from dataclasses import dataclass
from typing import Literal

MISSING = "\N{EN DASH}"
MINUS = "\N{MINUS SIGN}"
Direction = Literal["higher", "lower", "none"]


@dataclass(frozen=True)
class Measure:
    """`scale` multiplies what is shown (100: per cent); `decimals` None shows four significant digits."""

    label: str
    better: Direction = "none"
    scale: float = 1.0
    decimals: int | None = None
    meaning: str = ""

    @property
    def arrow(self) -> str:
        return {"higher": "↑", "lower": "↓", "none": ""}[self.better]

    def show(self, value: float | None, beside: float | None = None) -> str:
        """The number as text, an en dash where there is none; with as many decimals as the number it stands beside."""
        if value is None or math.isnan(value):
            return MISSING
        if math.isinf(value):
            return "∞" if value > 0 else f"{MINUS}∞"
        decimals = self._decimals(value if beside is None else beside)
        scaled = value * self.scale
        text = f"{scaled:.4g}" if decimals is None or abs(scaled) >= 1e9 else f"{scaled:.{decimals}f}"
        return text.replace("-", MINUS)

    def _decimals(self, value: float) -> int | None:
        """Fixed, or those of four significant digits; None where these do not fit between 0.001 and a million."""
        size = abs(value * self.scale)
        if self.decimals is not None:
            return self.decimals
        return 3 - math.floor(math.log10(size)) if 1e-3 <= size < 1e4 else 0 if 1e4 <= size < 1e6 else None


MEASURES = {
    "accuracy": Measure("Accuracy, %", "higher", 100, 1, "share of examples whose most probable class is the true one"),
    "top5_accuracy": Measure("Top-5, %", "higher", 100, 1, "share whose true class is among the five most probable"),
    "nll": Measure("NLL", "lower", 1, 3, "mean negative log-likelihood of the true class, in nats"),
    "brier": Measure("Brier", "lower", 1, 3, "mean squared distance to the one-hot truth, between 0 and 2"),
    "ece": Measure("ECE, %", "lower", 100, 1, "expected calibration error: mean gap of confidence and accuracy over bins"),
    "mce": Measure("MCE, %", "lower", 100, 1, "maximum calibration error: the largest gap of a bin with more than 5 examples"),
    "classwise_ece": Measure("Classwise ECE, %", "lower", 100, 2, "calibration error of each class's probability, averaged"),
    "adaptive_ece": Measure("Adaptive ECE, %", "lower", 100, 1, "calibration error over bins of equal size"),
    "aurc": Measure("AURC, %", "lower", 100, 2, "mean error rate as ever more of the least certain examples are kept"),
    "rmse": Measure("RMSE", "lower", meaning="root mean squared error, in the target's unit"),
    "log_density": Measure("Log density", "higher", 1, 3, "mean log predictive density of the target, in nats"),
    "crps": Measure("CRPS", "lower", meaning="continuous ranked probability score, in the target's unit"),
    "coverage_95": Measure("Coverage, %", "none", 100, 1, "share of targets inside the 95 % interval; should be 95"),
    "interval_width_95": Measure("Width", "none", meaning="mean width of the 95 % interval; compare at equal coverage"),
}  # fmt: skip
AUROC = Measure(
    "AUROC, %", "higher", 100, 1, "chance that an unfamiliar input gets a higher uncertainty than a familiar one"
)
FPR95 = Measure("FPR95, %", "lower", 100, 1, "unfamiliar inputs that pass where 95 % of the familiar ones do")
RELATIVE_ERROR = Measure("", "lower", 1, 1)
ERROR = Measure("Error, %", "lower", 100, 1, "share of examples whose most probable class is wrong")


def measure(name: str) -> Measure:
    """The description of a quantity; one that is not known here is shown under its own name, without a direction."""
    return MEASURES.get(name) or Measure(name)


def in_order(names: set[str]) -> list[str]:
    """The names in the order of the tables, unknown ones last."""
    return [name for name in MEASURES if name in names] + sorted(names - MEASURES.keys())
