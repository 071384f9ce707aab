"""Temperature scaling: one number, fitted on held-out targets, that makes a prediction sharper or flatter."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import PatchbayesError
from .checks import check_examples, checked_classes, checked_weights

_LEAST = 0.01  # temperatures are looked for between this and its inverse
_MOST_FACTOR = 1e12  # of a variance: beyond that, or its inverse, targets are not of the kind that is predicted
_FIRST_LOOK = 13  # values of log T tried before the best of them is refined
_VALUES = 2**20  # of draws, examples and targets held at a time


def fit_temperature(log_probs: Tensor, targets: Tensor, prior: float | None = 0.5) -> float:
    """The T that minimizes the NLL of softmax(log_probs / T), shrunk towards 1. log_probs (B, C), targets (B,).

        sum_b NLL_b(T) + (log T)^2 / (2 prior^2), between T = 0.01 and 100

    The second term takes temperatures for log-normal around 1, two thirds of them between 0.6 and 1.65: a few held-out
    examples, which may all be right, leave the least NLL alone anywhere (T = 0.17 from thirty, where 1 was best), and with many
    the term disappears: log T is moved towards 0 by its own standard error, squared, as a part of prior^2. Measured with
    30, 100 and 1,000 examples and a true T of 0.6, 1 and 2, the NLL on fresh data is lower than without the term nearly
    everywhere, and never above that of T = 1 by more than 0.7 / B. prior=None: the least NLL alone.

    log_probs may be logits of one network or logarithms of averaged probabilities: a constant added to a row changes nothing.
    An end of the range is returned where the best T lies outside.
    """
    check_examples("fit_temperature", targets)
    targets = checked_classes("fit_temperature", "log-probabilities", log_probs, targets)
    scores = log_probs.detach().double()
    scores = scores - scores.amax(1, keepdim=True)
    if bool(scores.isnan().any()):
        raise PatchbayesError("fit_temperature: expected the largest log-probability of each example to be finite.")
    chosen = scores.gather(1, targets.unsqueeze(1))
    if not bool(chosen.isfinite().all()):
        raise PatchbayesError(
            "fit_temperature: a label has probability 0, whatever the temperature.\n"
            "  do       pass log_probs of the prediction, which do not underflow, rather than probs.log()."
        )
    total = chosen.sum()

    finite = scores.clamp_min(
        torch.finfo(torch.float64).min
    )  # times a probability of zero, not minus infinity times it

    def look(log_temperature: float) -> tuple[float, float]:
        inverse = math.exp(-log_temperature)
        scaled = scores * inverse
        normalizer = scaled.logsumexp(1, keepdim=True)
        expected = ((scaled - normalizer).exp_() * finite).sum()
        return float(normalizer.sum() - inverse * total), float(inverse * (total - expected))

    return _least("fit_temperature", look, prior)


def fit_variance_factor(
    draw_means: Tensor, variances: Tensor, targets: Tensor, weights: Tensor | None = None, prior: float | None = 1.0
) -> float:
    """The factor T on the variance of a mixture of Gaussians that minimizes the NLL of the targets, shrunk towards 1.

        sum_b -log p_T(y_b) + log(1 + (log T)^2 / (2 prior^2))

    with p_T the mixture sum_s w_s N(f_s, v_s), stretched around its mean by sqrt(T).

    As `fit_temperature`; the logarithm of a variance is twice that of a deviation, and so is its prior. Close to 1 the second
    term is the same. Far from 1 it hardly pulls, and T may be as large as 10^12, or as small as its inverse: targets in another
    unit, or a precision that nobody has fitted, leave a factor of any size.

    draw_means (S, B, D), variances of any shape that expands to it, targets (B, D), weights (S,), equal where none are given.
    """
    if draw_means.dim() != 3 or draw_means.shape[1:] != targets.shape or len(draw_means) == 0:
        raise PatchbayesError(
            f"fit_variance_factor: expected the means of the draws (S, B, D) and targets (B, D), got {tuple(draw_means.shape)} "
            f"and {tuple(targets.shape)}."
        )
    check_examples("fit_variance_factor", targets)
    w = checked_weights("fit_variance_factor", weights, draw_means).view(-1, 1, 1)
    means, y = draw_means.detach().double(), targets.detach().double()
    try:
        variances = variances.detach().double().expand_as(means)
    except RuntimeError:
        raise PatchbayesError(
            f"fit_variance_factor: expected variances that expand to {tuple(means.shape)}, got {tuple(variances.shape)}."
        ) from None
    if not bool((variances > 0).all()) or not bool(y.isfinite().all()):
        raise PatchbayesError("fit_variance_factor: expected variances above 0 and finite targets.")
    center = (w * means).sum(0)
    spread = (w * (variances + (means - center).square())).sum(0)
    expected = math.log(min(max(float(((y - center).square() / spread).mean()), _MOST_FACTOR**-1), _MOST_FACTOR))
    rows = max(1, _VALUES // max(means[:, 0].numel(), 1))

    def look(log_factor: float) -> tuple[float, float]:
        apart = math.exp(-0.5 * log_factor) * (y - center)
        loss, slope = 0.5 * log_factor * y.numel(), 0.5 * y.numel()
        pieces = (means.split(rows, 1), variances.split(rows, 1), center.split(rows), apart.split(rows))
        for f, v, c, a in zip(*pieces, strict=True):
            z = (c + a - f) / v
            each = w.view(-1, 1).log() - 0.5 * (z * (c + a - f) + v.log() + math.log(2 * math.pi)).sum(-1)
            loss -= float(torch.logsumexp(each, 0).sum())
            slope -= 0.5 * float((each.softmax(0) * (z * a).sum(-1)).sum())
        return loss, slope

    return _least("fit_variance_factor", look, prior, expected)


def apply_temperature(log_probs: Tensor, temperature: float) -> Tensor:
    """Log-probabilities log_softmax(log_probs / T), (B, C)."""
    if not 0 < temperature < float("inf"):
        raise PatchbayesError(f"apply_temperature(temperature={temperature!r}): expected a finite number above 0.")
    return torch.log_softmax(log_probs / temperature, -1)


def _least(
    where: str, look: Callable[[float], tuple[float, float]], prior: float | None, expected: float | None = None
) -> float:
    """The T whose loss(log T) + (log T)^2 / (2 prior^2) is least; `look` gives the loss and its slope at log T.

    A first look all over the range, then the place where the slope is zero beside the best, by false position (Illinois).
    Where a log T is expected, the range reaches beyond it, and the second term is log(1 + itself).
    """
    if prior is not None and not (math.isfinite(prior) and prior > 0):
        raise PatchbayesError(f"{where}(prior={prior!r}): expected a finite number above 0, or None.")
    penalty = 0.0 if prior is None else prior**-2

    def total(x: float) -> tuple[float, float]:
        loss, slope = look(x)
        term = 0.5 * penalty * x * x
        if expected is None:
            return loss + term, slope + penalty * x
        return loss + math.log1p(term), slope + penalty * x / (1 + term)

    low, high = math.log(_LEAST), -math.log(_LEAST)
    if expected is not None:
        low, high = min(low, expected - 2), max(high, expected + 2)
    looked = [low + i * (high - low) / (_FIRST_LOOK - 1) for i in range(_FIRST_LOOK)]
    seen = [total(x) for x in looked]
    best = min(range(_FIRST_LOOK), key=lambda i: seen[i][0])
    downhill = 1 if seen[best][1] < 0 else -1
    beside = best + downhill
    if not 0 <= beside < _FIRST_LOOK or seen[best][1] == 0:
        return math.exp(looked[best])
    (low, at_low), (high, at_high) = sorted((looked[i], seen[i][1]) for i in (best, beside))
    for _ in range(100):
        secant = at_low < 0 < at_high
        middle = (low * at_high - high * at_low) / (at_high - at_low) if secant else (low + high) / 2
        at = total(middle)[1]
        if abs(at) == 0 or high - low < 1e-12:
            break
        if at < 0:
            low, at_low, at_high = middle, at, at_high / 2
        else:
            high, at_high, at_low = middle, at, at_low / 2
    return math.exp(middle)
