"""Whether a probability means what it says: calibration curves and errors."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .checks import check_count, check_examples, checked_probs
from .ranking import Ranking, at_positions


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
    def expected_error(self) -> float:
        """ECE: sum over bins of |B_r| / n |accuracy - confidence|, n counting all examples."""
        weights = self.count[self.count >= self.min_count].double() / self.num_examples
        return float((weights * self._gaps).sum())

    @property
    def maximum_error(self) -> float:
        """MCE: the largest gap of a bin, 0 where no bin has enough examples."""
        return float(self._gaps.max()) if len(self._gaps) else 0.0

    @property
    def _gaps(self) -> Tensor:
        return (self.accuracy - self.confidence).abs()[self.count >= self.min_count]

    @classmethod
    def from_sums(cls, sums: Tensor, min_count: int) -> "CalibrationBins":
        """The bins whose number of examples, sum of confidences and number of right ones are the rows of sums (3, R)."""
        count, confidence, right = sums
        return cls(count.long(), confidence / count, right / count, int(count.sum()), min_count)


def calibration_bins(probs: Tensor, targets: Tensor, num_bins: int = 20, min_count: int = 6) -> CalibrationBins:
    """Bins ((r-1)/R, r/R] of the top probability (appendix D.2). probs (B, C), targets (B,).

    A confidence of exactly 0 belongs to the first bin. Bins with fewer than `min_count` examples (the paper removes those
    with at most 5) enter neither ECE nor MCE. Other packages use bins [a, b) and keep all of them: their errors differ
    where a confidence lies on an edge (a confidence of exactly 1, or 0.5 of two equal classes) or a bin is nearly empty.
    """
    check_examples("calibration_bins", targets)
    check_count("calibration_bins", "min_count", min_count)
    return CalibrationBins.from_sums(bin_sums(probs, targets, num_bins), min_count)


def bin_sums(probs: Tensor, targets: Tensor, num_bins: int) -> Tensor:
    """Number of examples, sum of confidences, number of right ones by bins, (3, R) float64. They add up over batches."""
    probs, targets = checked_probs("calibration_bins", probs, targets)
    check_count("calibration_bins", "num_bins", num_bins)
    confidence, predicted = probs.max(1)
    values = torch.stack([torch.ones_like(confidence), confidence, (predicted == targets).double()])
    return values.new_zeros(3, num_bins).index_add(1, bin_numbers(confidence, num_bins), values)


def bin_numbers(values: Tensor, num_bins: int) -> Tensor:
    """The bin ((r-1)/R, r/R] of each value, counted from 0; the first holds 0 too. Same shape as the values, int64."""
    edges = torch.arange(1, num_bins, dtype=torch.float64, device=values.device) / num_bins
    return torch.bucketize(values.double(), edges)


def expected_calibration_error(probs: Tensor, targets: Tensor, num_bins: int = 20, min_count: int = 6) -> float:
    """ECE by the paper's rules: `calibration_bins(...).expected_error`. probs (B, C), targets (B,)."""
    return calibration_bins(probs, targets, num_bins, min_count).expected_error


def maximum_calibration_error(probs: Tensor, targets: Tensor, num_bins: int = 20, min_count: int = 6) -> float:
    """MCE by the paper's rules: `calibration_bins(...).maximum_error`. probs (B, C), targets (B,)."""
    return calibration_bins(probs, targets, num_bins, min_count).maximum_error


def binned_errors(
    confidence: Tensor, counts: Tensor, gaps: Tensor, num_bins: int, min_count: int
) -> tuple[Tensor, Tensor]:
    """Share of the examples in each bin, and its gap (0 where it is left out), of many data sets, each (R, bins).

    confidence (B,), counts (R, B) or (1, B) of each example, gaps confidence - right, (R, B) or (1, B).
    """
    inside = torch.nn.functional.one_hot(bin_numbers(confidence, num_bins), num_bins).double()
    count, gap = counts @ inside, (counts * gaps) @ inside
    return count / counts[0].sum(), torch.where(count >= min_count, gap / count.clamp_min(1), 0.0).abs()


def adaptive_calibration_error(probs: Tensor, targets: Tensor, num_bins: int = 20) -> float:
    """ECE with bins of equal mass: sum over bins of (1/R) |accuracy - confidence|. probs (B, C), targets (B,).

    Each bin holds exactly n / R examples in the order of confidence; an example on a border, and examples of equal confidence
    there, are shared between the two bins, so that the order of the examples does not matter.
    """
    check_examples("adaptive_calibration_error", targets)
    probs, targets = checked_probs("adaptive_calibration_error", probs, targets)
    check_count("adaptive_calibration_error", "num_bins", num_bins)
    confidence, predicted = probs.max(1)
    gaps = (confidence - (predicted == targets).double()).unsqueeze(0)
    return float(adaptive_errors(Ranking(confidence), torch.ones_like(gaps), gaps, num_bins))


def adaptive_errors(ranking: Ranking, counts: Tensor, gaps: Tensor, num_bins: int) -> Tensor:
    """Adaptive ECE of many data sets, (R,): counts (R, B) of each example, gaps confidence - right, (R, B) or (1, B)."""
    size = int(counts[0].sum())
    borders = torch.arange(num_bins + 1, dtype=torch.float64, device=counts.device) * size / num_bins
    return at_positions(*ranking.totals(counts, gaps), borders).diff(dim=1).abs().sum(1) / size


def classwise_calibration_error(probs: Tensor, targets: Tensor, num_bins: int = 20) -> float:
    """The mean over classes of the ECE of each class's own probability. probs (B, C), targets (B,).

        (1/C) sum_c sum_r |B_rc| / n |share of class c in B_rc - mean p_c in B_rc|,  B_rc: examples whose p_c lies in bin r

    No bin is left out. With many classes nearly all probabilities lie in the first bin and the value is small by nature:
    compare it with its floor (`calibration_floor`), not with ECE.
    """
    check_examples("classwise_calibration_error", targets)
    probs, targets = checked_probs("classwise_calibration_error", probs, targets)
    check_count("classwise_calibration_error", "num_bins", num_bins)
    gaps = probs - torch.nn.functional.one_hot(targets, probs.shape[1])
    columns = class_bins(probs, num_bins)
    sums = gaps.new_zeros(probs.shape[1] * num_bins).index_add(0, columns.flatten(), gaps.flatten())
    return float(sums.abs().sum()) / probs.numel()


def class_bins(probs: Tensor, num_bins: int) -> Tensor:
    """A number for each pair of a class and the bin of its probability: c * R + r, (B, C) int64."""
    return bin_numbers(probs, num_bins) + num_bins * torch.arange(probs.shape[1], device=probs.device)
