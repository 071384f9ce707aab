"""The one way in which these tests make statistical claims.

Each assertion fails for a correct sampler with probability at most FALSE_ALARM, and says which error it `detects` with
probability at least POWER. A sample too small for that is a mistake of the test (ValueError), not a finding.
"""

import numpy as np
from scipy import stats

FALSE_ALARM = 1e-6
POWER = 0.999


def assert_frequencies(counts, probabilities, *, detects: float) -> None:
    """Counts of independent draws fit the probabilities (chi-square).

    detects   an error of this size in the probability of any single outcome.
    """
    counts, p = np.asarray(counts, float).ravel(), np.asarray(probabilities, float).ravel()
    assert abs(p.sum() - 1) < 1e-9, "probabilities must sum to one"
    assert counts[p == 0].sum() == 0, "an outcome of probability zero was drawn"
    counts, p = counts[p > 0], p[p > 0]
    n, degrees = counts.sum(), len(p) - 1
    critical = stats.chi2.isf(FALSE_ALARM, degrees)
    least_noncentrality = n * detects**2 / (p * (1 - p)).max()
    if (n * p).min() < 50 or stats.ncx2.sf(critical, degrees, least_noncentrality) < POWER:
        raise ValueError(f"{n:g} draws are too few for this claim")
    statistic = ((counts - n * p) ** 2 / (n * p)).sum()
    assert statistic <= critical, f"chi-square {statistic:.1f} > {critical:.1f}: {counts / n} is not {p}"


def assert_standard_normal(samples, *, detects: float) -> None:
    """Independent samples follow N(0, 1) (Kolmogorov-Smirnov with the bound of Dvoretzky, Kiefer, Wolfowitz, Massart).

    detects   a distribution function that is somewhere off by this much.
    """
    samples = np.asarray(samples, float).ravel()
    n = len(samples)
    critical = np.sqrt(np.log(2 / FALSE_ALARM) / (2 * n))
    missed = 2 * np.exp(-2 * n * max(detects - critical, 0) ** 2)
    if missed > 1 - POWER:
        raise ValueError(f"{n} samples are too few for this claim")
    distance = stats.kstest(samples, "norm").statistic
    assert distance <= critical, f"distance {distance:.4f} > {critical:.4f} from N(0, 1)"


def assert_uncorrelated(first, second, *, detects: float) -> None:
    """Paired samples of two variables have no linear correlation (Fisher's z).

    detects   a correlation of this size.
    """
    first, second = np.asarray(first, float).ravel(), np.asarray(second, float).ravel()
    n = len(first)
    critical = stats.norm.isf(FALSE_ALARM / 2)
    if np.sqrt(n - 3) * np.arctanh(detects) - critical < stats.norm.isf(1 - POWER):
        raise ValueError(f"{n} pairs are too few for this claim")
    correlation = np.clip(np.corrcoef(first, second)[0, 1], -1 + 1e-15, 1 - 1e-15)
    z = np.sqrt(n - 3) * np.arctanh(correlation)
    assert abs(z) <= critical, f"correlation {correlation:.4f} of {n} pairs: z = {z:.1f}"
