"""A measured value with its 95 % interval, over seeds where there are several, and which of many values is best.

Over n >= 2 seeds the interval is the mean ± t s / √n, Student's t with n - 1 degrees of freedom. For one seed it is the
record's own, over resampled test examples. All runs of a comparison were scored on the same examples.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..metrics.student import student_t
from .measures import Direction

LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """A value, its interval (None: not known), the floor that chance alone would give, and the values by seed."""

    value: float | None
    low: float | None = None
    high: float | None = None
    floor: float | None = None
    by_seed: Mapping[int, float] = field(default_factory=dict)

    @property
    def half_width(self) -> float | None:
        """Half of the interval over seeds; None for one seed, whose interval need not be symmetric."""
        return (
            (self.high - self.low) / 2
            if len(self.by_seed) > 1 and self.low is not None and self.high is not None
            else None
        )


def over_seeds(
    values: Mapping[int, float | None], single: Estimate | None = None, floors: Sequence[float | None] = ()
) -> Estimate:
    """The mean over seeds with its interval; where only one seed has a value, `single` (its own interval) if given."""
    known = {seed: value for seed, value in values.items() if value is not None}
    if not known:
        return Estimate(None)
    floor_values = [floor for floor in floors if floor is not None]
    floor = statistics.fmean(floor_values) if floor_values else None
    numbers = list(known.values())
    if len(known) == 1:
        return Estimate(numbers[0], single.low if single else None, single.high if single else None, floor, known)
    if not all(map(math.isfinite, numbers)):
        return Estimate(sum(numbers) / len(numbers), None, None, floor, known)
    low, high = mean_interval(numbers)
    return Estimate(statistics.fmean(numbers), low, high, floor, known)


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % t interval of the mean of at least two values."""
    mean = statistics.fmean(values)
    half = student_t(len(values) - 1, LEVEL) * statistics.stdev(values) / math.sqrt(len(values))
    return mean - half, mean + half


def best(estimates: Sequence[Estimate], better: Direction, families: Sequence[int] | None = None) -> int | None:
    """The position of the value that is better than every other one, or None where the intervals do not support any.

    Rows of one family (a method, and the same with temperature scaling) are no rivals, unless there is no other family.
    """
    families = families if families and len(set(families)) > 1 else range(len(estimates))
    known = {i: e.value for i, e in enumerate(estimates) if e.value is not None}
    if better == "none" or not known:
        return None
    leader = max(known, key=lambda i: known[i] if better == "higher" else -known[i])
    rivals = [estimates[i] for i in known if families[i] != families[leader]]
    return leader if rivals and all(beats(estimates[leader], rival, better) for rival in rivals) else None


def beats(a: Estimate, b: Estimate, better: Direction) -> bool:
    """Whether `a` is better than `b` beyond chance.

    With the same two or more seeds: the 95 % interval of the differences by seed leaves out zero. Otherwise: the two
    intervals do not overlap. Without intervals nothing is beyond chance.
    """
    sign = 1 if better == "higher" else -1
    if a.value is None or b.value is None or same(a.value, b.value):
        return False
    if len(a.by_seed) > 1 and a.by_seed.keys() == b.by_seed.keys():
        differences = [sign * (a.by_seed[seed] - b.by_seed[seed]) for seed in a.by_seed]
        return all(map(math.isfinite, differences)) and mean_interval(differences)[0] > 0
    if a.low is None or a.high is None or b.low is None or b.high is None:
        return False
    return a.low > b.high if sign > 0 else a.high < b.low


def same(a: float | None, b: float | None) -> bool:
    """Equal but for rounding."""
    return a == b or (a is not None and b is not None and math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12))
