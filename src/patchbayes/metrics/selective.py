"""Predicting only where one is confident: risk against coverage, and a threshold that keeps a promised risk."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import PatchbayesError
from .checks import check_count, check_range, check_share, checked_confidence
from .ranking import Ranking, at_positions


@dataclass(frozen=True)
class CoverageCurve:
    """Accuracy on the most confident examples: coverage, accuracy (P,)."""

    coverage: Tensor
    accuracy: Tensor

    @property
    def risk(self) -> Tensor:
        """1 - accuracy, (P,)."""
        return 1 - self.accuracy


def coverage_curve(confidence: Tensor, correct: Tensor, points: int | None = None) -> CoverageCurve:
    """Accuracy on the most confident share j / points of the examples, j = 1, ..., points. confidence, correct (B,).

    All B points where none is given. Examples of equal confidence enter together, each to the same share.
    """
    confidence, correct = checked_confidence("coverage_curve", confidence, correct)
    points = len(confidence) if points is None else points
    check_count("coverage_curve", "points", points)
    ranking, right = Ranking(confidence), correct.unsqueeze(0)
    coverage = torch.arange(1, points + 1, dtype=torch.float64, device=right.device) / points
    positions = coverage * len(confidence)
    return CoverageCurve(
        coverage, at_positions(*ranking.totals(torch.ones_like(right), right), positions)[0] / positions
    )


def aurc(confidence: Tensor, correct: Tensor) -> float:
    """Area under the risk-coverage curve: the mean risk of the k most confident, k = 1, ..., B. confidence, correct (B,)."""
    confidence, correct = checked_confidence("aurc", confidence, correct)
    wrong = (1 - correct).unsqueeze(0)
    return float(areas(Ranking(confidence), torch.ones_like(wrong), wrong))


def areas(ranking: Ranking, counts: Tensor, wrong: Tensor) -> Tensor:
    """AURC of many data sets, (R,): counts (R, B) of each example, wrong (1, B).

    Within a group of equal confidence, with e errors a place from place a + 1 to b and E errors before, the risks
    E / k + e (k - a) / k sum to (E - e a) (H_b - H_a) + e (b - a), H being the harmonic numbers.
    """
    number, errors = ranking.totals(counts, wrong)
    size = int(number[0, -1])
    harmonic = torch.nn.functional.pad(
        torch.arange(1, size + 1, device=counts.device).double().reciprocal().cumsum(0), (1, 0)
    )
    steps, rate = number.diff(dim=1), errors.diff(dim=1)
    rate = rate / steps.clamp_min(1)
    before = errors[:, :-1] - rate * number[:, :-1]
    return (before * harmonic[number.long()].diff(dim=1) + rate * steps).sum(1) / size


def threshold_at_risk(confidence: Tensor, correct: Tensor, risk: float, level: float = 0.95, steps: int = 10) -> float:
    """The threshold from which on predictions are shown to be wrong at most with probability `risk`; refer those below.

        P(P(wrong | confidence >= threshold) <= risk) >= level

    over the choice of the examples given, which must be independent, from the population that is later predicted, and not
    used for training. Nothing is assumed about how risk depends on confidence. 0 where all predictions may be accepted,
    infinity where the examples do not show any threshold to keep the risk.

    How: the numbers of accepted examples that are tried, k = B / steps, 2 B / steps, ..., B, are fixed beforehand. Given the
    (k+1)-th largest confidence, the examples above it are independent draws of all that are above it, so their errors are
    binomial and the upper bound of Clopper and Pearson holds. Each bound is taken at level 1 - (1 - level) / steps, so
    that all hold at once with probability `level` (Bonferroni), and the largest k with bound <= risk is chosen. Testing one k
    after the other, each at the full level (fixed sequence), is proved only where risk falls with confidence, which a
    network's most confident mistakes may contradict. More steps pay with several thousand examples.

    confidence (B,): probabilities; correct (B,): whether each prediction was right.
    """
    confidence, correct = checked_confidence("threshold_at_risk", confidence, correct)
    check_range("threshold_at_risk", confidence)
    check_share("threshold_at_risk", "risk", risk)
    check_share("threshold_at_risk", "level", level)
    check_count("threshold_at_risk", "steps", steps)
    size, log_miss = len(confidence), math.log((1 - level) / steps)
    descending = confidence.sort(descending=True).values
    for step in range(steps, 0, -1):
        rank = -(-size * step // steps)
        threshold = math.nextafter(float(descending[rank]), math.inf) if rank < size else 0.0
        accepted = confidence >= threshold
        errors, number = int((accepted & (correct == 0)).sum()), int(accepted.sum())
        if _log_tail(errors, number, risk) <= log_miss:  # if and only if the bound is at most the risk
            return threshold
    return math.inf


def risk_bound(errors: int, number: int, level: float = 0.95) -> float:
    """Upper confidence bound of Clopper and Pearson of a probability: `errors` in `number` independent trials.

    The p at which P(Binomial(number, p) <= errors) = 1 - level.
    """
    check_share("risk_bound", "level", level)
    if not 0 <= errors <= number or number < 1:
        raise PatchbayesError(f"risk_bound: {errors} errors in {number} trials cannot be.")
    low, high = errors / number, 1.0
    while low < (p := (low + high) / 2) < high:
        low, high = (p, high) if _log_tail(errors, number, p) > math.log(1 - level) else (low, p)
    return high


def _log_tail(errors: int, number: int, p: float) -> float:
    """log P(Binomial(number, p) <= errors), 0 < p < 1."""
    if errors == number:
        return 0.0
    k = torch.arange(errors + 1, dtype=torch.float64)
    log_ways = math.lgamma(number + 1) - torch.lgamma(k + 1) - torch.lgamma(number - k + 1)
    return float(torch.logsumexp(log_ways + k * math.log(p) + (number - k) * math.log1p(-p), 0))
