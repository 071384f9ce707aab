"""Means, intervals and paired comparisons over independent seeds."""

import math
import statistics
from collections.abc import Sequence

from patchbayes.metrics.student import student_t

_LEVEL = 0.99  # "better" only with p < 0.01


def mean_of(values: Sequence[float | None], scale: float = 1) -> float | None:
    """The mean of what is known, each multiplied by `scale`."""
    known = [scale * value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def interval_text(values: Sequence[float | None], digits: int = 3) -> str:
    """The mean, and half the width of its 95 % interval by Student's t."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    mean = f"{statistics.fmean(known):.{digits}g}"
    return mean if len(known) < 2 else f"{mean} ± {_reach(known, 0.95):.2g}"


def paired_verdict(values: Sequence[float | None], reference: Sequence[float | None]) -> str:
    """The mean difference, seed by seed, and whether it differs from zero with p < 0.01 (smaller is better)."""
    pairs = zip(values, reference, strict=True)
    differences = [a - b for a, b in pairs if a is not None and b is not None]
    mean = statistics.fmean(differences)
    if len(differences) < 2:
        return f"{mean:+.3g} (one seed)"
    reach = _reach(differences, _LEVEL)
    word = "no significant difference" if abs(mean) <= reach or math.isnan(reach) else "better" if mean < 0 else "worse"
    return f"{mean:+.3g} ({word})"


def _reach(values: Sequence[float], level: float) -> float:
    return student_t(len(values) - 1, level) * statistics.stdev(values) / len(values) ** 0.5
