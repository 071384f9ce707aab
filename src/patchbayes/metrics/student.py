"""Student's t distribution with whole degrees of freedom: its quantiles, and p-values of paired tests."""

import math


def student_t(degrees: int, level: float = 0.95) -> float:
    """The t with P(|T| <= t) = level."""
    low, high = 0.0, 1.0
    while _mass_within(high, degrees) < level:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _mass_within(middle, degrees) < level else (low, middle)
    return high


def two_sided_p(t: float, degrees: int) -> float:
    """P(|T| >= |t|)."""
    return max(0.0, 1 - _mass_within(abs(t), degrees))


def _mass_within(t: float, degrees: int) -> float:
    """P(|T| <= t): the finite series in the angle atan(t / √ν) for whole ν."""
    angle = math.atan2(t, math.sqrt(degrees))
    cosine, total = math.cos(angle), 0.0
    term = cosine if degrees % 2 else 1.0
    for k in range(degrees % 2 + 2, degrees + 1, 2):
        total += term
        term *= cosine**2 * (k - 1) / k
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if degrees % 2 else total
