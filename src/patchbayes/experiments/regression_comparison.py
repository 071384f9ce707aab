"""Comparison of two methods over overlapping splits: the corrected paired t-test of Nadeau and Bengio (2003).

The training parts of random 90:10 splits overlap, so the differences are correlated and the usual paired test finds
differences that are not there. The correction widens the variance of the mean by the ratio of test to training size:

    t = mean(d) / sqrt((1/n + n_test / n_train) var(d)),    n - 1 degrees of freedom
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import PatchbayesError

LEVEL = 0.01  # "better" only below


@dataclass(frozen=True)
class PairedTest:
    """Mean of the differences over splits, its corrected standard error, and the two-sided p-value."""

    difference: float
    standard_error: float
    p: float

    @property
    def significant(self) -> bool:
        return self.p < LEVEL


def corrected_test(ours: Sequence[float], theirs: Sequence[float], num_train: int, num_test: int) -> PairedTest:
    """Whether `ours` - `theirs`, paired by split, differs from zero."""
    if len(ours) != len(theirs) or len(ours) < 2:
        raise PatchbayesError(
            f"corrected_test: pairs over at least two splits; {len(ours)} and {len(theirs)} values were given."
        )
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    mean, variance = statistics.fmean(differences), statistics.variance(differences)
    error = math.sqrt((1 / len(differences) + num_test / num_train) * variance)
    if error == 0:
        return PairedTest(mean, 0.0, 1.0 if mean == 0 else 0.0)
    return PairedTest(mean, error, two_sided_p(mean / error, len(differences) - 1))


def two_sided_p(t: float, degrees: int) -> float:
    """P(|T| >= |t|) for Student's distribution with whole degrees of freedom, by its finite sum."""
    theta = math.atan(abs(t) / math.sqrt(degrees))
    sine, cosine = math.sin(theta), math.cos(theta)
    odd = degrees % 2
    term, total = (cosine if odd else 1.0), 0.0
    for k in range(2 + odd, degrees + 1, 2):  # powers of the cosine up to degrees - 2
        total += term
        term *= cosine**2 * (k - 1) / k
    inside = 2 / math.pi * (theta + sine * total) if odd else sine * total
    return max(0.0, 1 - inside)
