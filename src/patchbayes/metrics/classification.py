"""Accuracy, log-likelihood and calibration of class probabilities."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import PatchbayesError


def accuracy(probs: Tensor, targets: Tensor, top: int = 1) -> float:
    """The share of examples whose class is among the `top` most probable. probs (B, C), targets (B,)."""
    _check(probs, targets)
    if not 1 <= top <= probs.shape[1]:
        raise PatchbayesError(f"accuracy(top={top}): between 1 and the number of classes, {probs.shape[1]}.")
    return float((probs.topk(top, dim=1).indices == targets.unsqueeze(1)).any(1).double().mean())


def nll(log_probs: Tensor, targets: Tensor) -> float:
    """Mean negative log-likelihood per example, in nats. log_probs (B, C), targets (B,)."""
    _check(log_probs, targets)
    return -float(log_probs.double().gather(1, targets.unsqueeze(1)).mean())


def brier(probs: Tensor, targets: Tensor) -> float:
    """Mean squared distance to the one-hot target, summed over classes: between 0 and 2. probs (B, C), targets (B,)."""
    _check(probs, targets)
    one_hot = torch.nn.functional.one_hot(targets, probs.shape[1])
    return float((probs.double() - one_hot).square().sum(1).mean())


@dataclass(frozen=True)
class CalibrationBins:
    """Confidence and accuracy by bins of confidence: the calibration curve of figures 4, 5 and 7.

    count, confidence, accuracy (R,): examples in the bin, their mean confidence and accuracy (NaN in an empty bin).
    num_examples: all examples, also of bins that are left out of the errors.
    """

    count: Tensor
    confidence: Tensor
    accuracy: Tensor
    num_examples: int
    min_count: int

    @property
    def _gaps(self) -> Tensor:
        return (self.accuracy - self.confidence).abs()[self.count >= self.min_count]

    @property
    def expected_error(self) -> float:
        """ECE: sum over bins of |B_r| / n |accuracy - confidence|, n counting all examples."""
        weights = self.count[self.count >= self.min_count].double() / self.num_examples
        return float((weights * self._gaps).sum())

    @property
    def maximum_error(self) -> float:
        """MCE: the largest gap of a bin, 0 where no bin has enough examples."""
        return float(self._gaps.max()) if len(self._gaps) else 0.0


def calibration_bins(probs: Tensor, targets: Tensor, num_bins: int = 20, min_count: int = 6) -> CalibrationBins:
    """Bins ((r-1)/R, r/R] of the top probability (appendix D.2). probs (B, C), targets (B,).

    A confidence of exactly 0 belongs to the first bin. Bins with fewer than `min_count` examples (the paper removes those
    with at most 5) enter neither ECE nor MCE.
    """
    _check(probs, targets)
    if num_bins < 1:
        raise PatchbayesError(f"calibration_bins(num_bins={num_bins}): at least one bin.")
    confidence, predicted = probs.double().max(1)
    right = (predicted == targets).double()
    which = ((confidence * num_bins).ceil() - 1).clamp(0, num_bins - 1).long()
    # Products of float arithmetic can cross an edge: the edges themselves decide.
    edges = torch.arange(num_bins + 1, dtype=torch.float64, device=probs.device) / num_bins
    which = torch.where(confidence <= edges[which], (which - 1).clamp_min(0), which)
    which = torch.where(confidence > edges[which + 1], (which + 1).clamp_max(num_bins - 1), which)
    count = torch.bincount(which, minlength=num_bins)
    sums = [torch.bincount(which, weights=values, minlength=num_bins) for values in (confidence, right)]
    return CalibrationBins(count, sums[0] / count, sums[1] / count, len(targets), min_count)


def _check(values: Tensor, targets: Tensor) -> None:
    if values.dim() != 2 or targets.shape != values.shape[:1] or targets.is_floating_point():
        raise PatchbayesError(
            f"a metric takes probabilities (B, C) and class numbers (B,); given were {tuple(values.shape)} and "
            f"{targets.dtype} {tuple(targets.shape)}."
        )
