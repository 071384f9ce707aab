"""The best value of one positive number: where a score is least, or where a quantity is zero."""

import math
from collections.abc import Callable


def best_factor(score: Callable[[float], float], step: float, most: int) -> float:
    """The factor that makes `score` least, near 1: found with at most `most` (at least 2) scores.

    Walks down from 1 in factors of `step`; where the lowest point has neighbors on both sides, the answer is the vertex of
    the parabola through the three (in the logarithm of the factor), which is never farther than half a step away.
    """
    scores = {0: score(1.0), 1: score(step)}
    best, direction = (1, 1) if scores[1] < scores[0] else (0, -1)
    while len(scores) < most:
        following = best + direction
        scores[following] = score(step**following)
        if not scores[following] < scores[best]:
            break
        best = following
    if best - 1 not in scores or best + 1 not in scores:
        return step**best
    low, middle, high = scores[best - 1], scores[best], scores[best + 1]
    curvature = low - 2 * middle + high
    return step ** (best + (0.5 * (low - high) / curvature if curvature > 0 else 0.0))


def crossing(at_one: float, at_step: float, step: float, reach: float) -> float | None:
    """The factor at which a quantity is zero, on the line (in the logarithm of the factor) through its values at 1 and `step`.

    At most `reach` times larger or smaller than 1; None where the quantity is the same at both.
    """
    if at_one == at_step:
        return None
    logarithm = math.log(step) * at_one / (at_one - at_step)
    return math.exp(max(-math.log(reach), min(math.log(reach), logarithm)))
