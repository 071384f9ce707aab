"""Temperature scaling: one number, fitted on held-out labels, that makes probabilities sharper or flatter."""

import torch
from torch import Tensor

from ..errors import PatchbayesError
from .checks import check_examples, checked_classes

_LEAST = 0.01  # temperatures are looked for between this and its inverse


def fit_temperature(log_probs: Tensor, targets: Tensor) -> float:
    """The T that minimizes the NLL of softmax(log_probs / T), between 0.01 and 100. log_probs (B, C), targets (B,).

    log_probs may be logits of one network or logarithms of averaged probabilities: a constant added to a row changes nothing.
    The NLL is convex in 1 / T; Newton's method in double precision, kept within a shrinking bracket, finds its one minimum.
    An end of the range is returned where the best T lies outside: every example right (T = 0.01), or predictions that say
    nothing about the labels or the opposite (T = 100).
    """
    check_examples("fit_temperature", targets)
    targets = checked_classes("fit_temperature", "log-probabilities", log_probs, targets)
    scores = log_probs.detach().double()
    scores = scores - scores.amax(1, keepdim=True)
    if bool(scores.isnan().any()):
        raise PatchbayesError(
            "fit_temperature: the largest log-probability of an example is finite; some here are not."
        )
    chosen = scores.gather(1, targets.unsqueeze(1)).mean()
    if not bool(chosen.isfinite()):
        raise PatchbayesError(
            "fit_temperature: a label has probability 0, whatever the temperature.\n"
            "  do       pass log_probs of the prediction, which do not underflow, rather than probs.log()."
        )
    low, high = _LEAST, 1 / _LEAST
    if _slope(scores, chosen, low)[0] >= 0:
        return 1 / low
    if _slope(scores, chosen, high)[0] <= 0:
        return 1 / high
    inverse = 1.0
    for _ in range(200):
        slope, curvature = _slope(scores, chosen, inverse)
        low, high = (inverse, high) if slope < 0 else (low, inverse)
        new = inverse - slope / curvature if curvature > 0 else low
        new = new if low < new < high else (low * high) ** 0.5
        if abs(new - inverse) <= 1e-12 * inverse:
            break
        inverse = new
    return 1 / new


def _slope(scores: Tensor, chosen: Tensor, inverse: float) -> tuple[float, float]:
    """First and second derivative of the NLL of softmax(scores * inverse) with respect to `inverse`."""
    probs = (scores * inverse).softmax(1)
    # A score of minus infinity has probability 0 and no part in the moments.
    finite = scores.where(probs > 0, 0.0)
    mean = (probs * finite).sum(1)
    variance = (probs * finite.square()).sum(1) - mean.square()
    return float(mean.mean() - chosen), float(variance.clamp_min(0).mean())


def apply_temperature(log_probs: Tensor, temperature: float) -> Tensor:
    """Log-probabilities log_softmax(log_probs / T), (B, C)."""
    if not 0 < temperature < float("inf"):
        raise PatchbayesError(f"apply_temperature(temperature={temperature!r}): a finite number above 0.")
    return torch.log_softmax(log_probs / temperature, -1)
