"""Error, log density, CRPS and intervals of regression; predictions are mixtures of S Gaussians, one for each draw.

A mixture is given by draw_means (S, B, D), the noise's precision (a number, or one for each target (D,)) and the weights of
the draws (S,), equal where none are given. Predictions are worked through in pieces of examples, so that memory stays small.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import PatchbayesError
from .checks import check_count, check_examples, checked_pair, checked_weights

_VALUES = 2**20  # of draws, examples and targets held at a time


def rmse(predicted: Tensor, targets: Tensor) -> float:
    """Root mean squared error of each target, averaged over the D targets. predicted, targets (B, D) or (B,)."""
    check_examples("rmse", targets)
    predicted, targets = checked_pair("rmse", predicted, targets)
    return float((predicted - targets).square().mean(0).sqrt().mean())


def log_density(
    draw_means: Tensor, targets: Tensor, precision: float | Tensor = 1.0, weights: Tensor | None = None
) -> Tensor:
    """log sum_s w_s N(y | f_s, 1/tau), of the D targets together, (B,) float64; its mean is the paper's LPD (table 13).

    draw_means (S, B, D), targets (B, D), precision () or (D,), weights (S,).
    """

    def density(means: Tensor, y: Tensor, deviation: Tensor, w: Tensor) -> Tensor:
        z = (y - means) / deviation
        each = -0.5 * z.square() - deviation.log() - 0.5 * math.log(2 * math.pi)
        return torch.logsumexp(each.sum(-1) + w.log().view(-1, 1), dim=0)

    return _by_pieces("log_density", density, draw_means, targets, precision, weights)


def pit(draw_means: Tensor, targets: Tensor, precision: float | Tensor = 1.0, weights: Tensor | None = None) -> Tensor:
    """The predictive distribution function at the target, F(y) (B, D) float64: uniform if the prediction is calibrated.

    draw_means (S, B, D), targets (B, D), precision () or (D,), weights (S,).
    """

    def function(means: Tensor, y: Tensor, deviation: Tensor, w: Tensor) -> Tensor:
        return (w.view(-1, 1, 1) * torch.special.ndtr((y - means) / deviation)).sum(0)

    return _by_pieces("pit", function, draw_means, targets, precision, weights)


def crps(draw_means: Tensor, targets: Tensor, precision: float | Tensor = 1.0, weights: Tensor | None = None) -> Tensor:
    """Continuous ranked probability score of a mixture, in the target's unit, smaller is better: (B, D) float64.

        CRPS = E|X - y| - E|X - X'| / 2 = sum_s w_s A(y - f_s, v) - sum_st w_s w_t A(f_s - f_t, 2 v) / 2,  v = 1 / tau,
        A(m, v) = E|N(m, v)| = 2 sqrt(v) phi(m / sqrt(v)) + m (2 Phi(m / sqrt(v)) - 1)

    Exact; takes S^2 / 2 evaluations of A for each target.

    draw_means (S, B, D), targets (B, D), precision () or (D,), weights (S,).
    """

    def score(means: Tensor, y: Tensor, deviation: Tensor, w: Tensor) -> Tensor:
        w, draws, wide = w.view(-1, 1, 1), len(means), deviation * math.sqrt(2)
        total = (w * _mean_distance(y - means, deviation)).sum(0)
        total -= 0.5 * w.square().sum() * _mean_distance(torch.zeros_like(y), wide)
        for shift in range(
            1, draws // 2 + 1
        ):  # draw s with draw s + shift: each pair once, in the last of an even S twice
            share = 0.5 if 2 * shift == draws else 1.0
            pairs = w * w.roll(shift, 0) * _mean_distance(means - means.roll(shift, 0), wide)
            total -= share * pairs.sum(0)
        return total

    return _by_pieces("crps", score, draw_means, targets, precision, weights)


def gaussian_crps(mean: Tensor, deviation: Tensor, targets: Tensor) -> Tensor:
    """Continuous ranked probability score of one Gaussian, (B, D) float64: A(y - mean, v) - sqrt(v / pi), A as in `crps`.

    mean, deviation (the standard deviation), targets (B, D) or (B,).
    """
    mean, y = checked_pair("gaussian_crps", mean, targets)
    deviation, _ = checked_pair("gaussian_crps", deviation, targets)
    if not bool((deviation > 0).all()):
        raise PatchbayesError("gaussian_crps: a standard deviation is above 0.")
    return _mean_distance(y - mean, deviation) - deviation / math.sqrt(math.pi)


def _mean_distance(mean: Tensor, deviation: Tensor) -> Tensor:
    """E|N(mean, deviation^2)|."""
    z = mean / deviation
    return deviation * math.sqrt(2 / math.pi) * torch.exp(-0.5 * z.square()) + mean * torch.erf(z / math.sqrt(2))


def interval_coverage(low: Tensor, high: Tensor, targets: Tensor) -> float:
    """The share of targets inside their interval, ends included. low, high, targets (B, D) or (B,)."""
    check_examples("interval_coverage", targets)
    return float(covered(low, high, targets).double().mean())


def covered(low: Tensor, high: Tensor, targets: Tensor) -> Tensor:
    """Whether each target lies inside its interval, (B, D) bool. low, high, targets (B, D) or (B,)."""
    low, y = checked_pair("interval_coverage", low, targets)
    high, _ = checked_pair("interval_coverage", high, targets)
    _check_ends("interval_coverage", low, high)
    return (low <= y) & (y <= high)


def interval_width(low: Tensor, high: Tensor) -> float:
    """The mean width of the intervals, in the target's unit. low, high (B, D) or (B,)."""
    check_examples("interval_width", low)
    low, high = checked_pair("interval_width", low, high)
    _check_ends("interval_width", low, high)
    return float((high - low).mean())


def _check_ends(where: str, low: Tensor, high: Tensor) -> None:
    if not bool((low <= high).all()):
        raise PatchbayesError(
            f"{where}: the lower end of an interval is not above its upper end; some here are, or are NaN."
        )


@dataclass(frozen=True)
class QuantileCalibration:
    """How often targets lie below predicted quantiles: observed (P,) is level (P,) if the prediction is calibrated."""

    level: Tensor
    observed: Tensor

    @property
    def error(self) -> float:
        """The mean of |observed - level|."""
        return float((self.observed - self.level).abs().mean())


def quantile_calibration(values: Tensor, num_levels: int = 19) -> QuantileCalibration:
    """The share of targets below each quantile j / (num_levels + 1), from F(y) of each target (`pit`), of any shape."""
    check_count("quantile_calibration", "num_levels", num_levels)
    if values.numel() == 0 or not bool(((values >= 0) & (values <= 1 + 1e-9)).all()):
        raise PatchbayesError("quantile_calibration: takes values of distribution functions, at least one, in [0, 1].")
    level = torch.arange(1, num_levels + 1, dtype=torch.float64, device=values.device) / (num_levels + 1)
    ascending = values.detach().double().flatten().sort().values
    return QuantileCalibration(level, torch.searchsorted(ascending, level, right=True).double() / values.numel())


def _by_pieces(
    where: str,
    function: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    draw_means: Tensor,
    targets: Tensor,
    precision: float | Tensor,
    weights: Tensor | None,
) -> Tensor:
    """The function of (means (S, b, D), targets (b, D), deviation (D,), weights (S,)), joined over pieces of examples."""
    if draw_means.dim() != 3 or draw_means.shape[1:] != targets.shape or len(draw_means) == 0:
        raise PatchbayesError(
            f"{where}: takes the means of the draws (S, B, D) and targets (B, D); given were {tuple(draw_means.shape)} and "
            f"{tuple(targets.shape)}."
        )
    draws, _, size = draw_means.shape
    tau = torch.as_tensor(precision, dtype=torch.float64, device=draw_means.device).detach()
    if tau.shape not in ((), (size,)) or not bool(((tau > 0) & tau.isfinite()).all()):
        raise PatchbayesError(
            f"{where}(precision={precision!r}): a finite number above 0, or one for each of the {size} targets."
        )
    deviation = tau.rsqrt().expand(size)
    w = checked_weights(where, weights, draw_means)
    rows = max(1, _VALUES // (draws * max(size, 1)))
    pieces = zip(draw_means.detach().split(rows, dim=1), targets.detach().split(rows), strict=True)
    return torch.cat([function(means.double(), y.double(), deviation, w) for means, y in pieces])
