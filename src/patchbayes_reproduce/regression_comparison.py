"""Comparison of two methods over overlapping splits: the corrected paired t-test of Nadeau and Bengio (2003).

Over independent seeds nothing is to be corrected: `paired_test` is the usual one.

The training parts of random 90:10 splits overlap, so the differences are correlated and the usual paired test finds
differences that are not there. The correction widens the variance of the mean by the ratio of test to training size:

    t = mean(d) / sqrt((1/n + n_test / n_train) var(d)),    n - 1 degrees of freedom
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from patchbayes.errors import PatchbayesError
from patchbayes.metrics.student import two_sided_p

LEVEL = 0.01  # "better" only below


@dataclass(frozen=True)
class PairedTest:
    """Mean of the differences over splits or seeds, its standard error, the two-sided p-value, and the degrees of freedom."""

    difference: float
    standard_error: float
    p: float
    degrees: int

    @property
    def significant(self) -> bool:
        return self.p < LEVEL


def corrected_test(ours: Sequence[float], theirs: Sequence[float], num_train: int, num_test: int) -> PairedTest:
    """Whether `ours` - `theirs`, paired by split, differs from zero."""
    return _test(ours, theirs, num_test / num_train)


def paired_test(ours: Sequence[float], theirs: Sequence[float]) -> PairedTest:
    """Whether `ours` - `theirs`, paired by independent seeds, differs from zero."""
    return _test(ours, theirs, 0.0)


def _test(ours: Sequence[float], theirs: Sequence[float], overlap: float) -> PairedTest:
    if len(ours) != len(theirs) or len(ours) < 2:
        raise PatchbayesError(
            f"paired test: pairs over at least two splits or seeds; {len(ours)} and {len(theirs)} values were given."
        )
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    mean, variance, degrees = statistics.fmean(differences), statistics.variance(differences), len(differences) - 1
    error = math.sqrt((1 / len(differences) + overlap) * variance)
    if error == 0:
        return PairedTest(mean, 0.0, 1.0 if mean == 0 else 0.0, degrees)
    return PairedTest(mean, error, two_sided_p(mean / error, degrees), degrees)
