"""Metrics of data that come in batches: the same numbers as the functions on all data at once, up to rounding.

Each accumulator is nothing but sums (`totals`, float64): batches may come in any order and size, accumulators of several
processes are merged by adding, and `torch.distributed.all_reduce(accumulator.totals)` does so across machines.
"""

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

import torch
from torch import Tensor

from ..errors import PatchbayesError
from .calibration import CalibrationBins, bin_sums
from .checks import check_count, checked_pair
from .classification import brier_per_example, correct, nll_per_example
from .regression import log_density

Value = TypeVar("Value")


class Accumulator(ABC, Generic[Value]):
    """A metric of data seen so far. `options` say what it counts; only those of equal options are merged."""

    def __init__(self, shape: tuple[int, ...], **options: int) -> None:
        self.totals = torch.zeros(shape, dtype=torch.float64)
        self.options = options

    @abstractmethod
    def value(self) -> Value:
        """The metric of all data so far."""

    def merge(self, other: "Accumulator[Value]") -> None:
        """Count what another accumulator of the same kind has seen."""
        if type(other) is not type(self) or other.options != self.options:
            raise PatchbayesError(f"merge: {other!r} cannot be counted into {self!r}; both must be of one kind.")
        self.totals += other.totals.to(self.totals.device)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in self.options.items())})"

    def _add(self, sums: Tensor) -> None:
        self.totals += sums.to(self.totals)

    def _check_seen(self, number: float) -> None:
        if number == 0:
            raise PatchbayesError(f"{self!r}.value: no example has been counted yet; call update first.")


class _Average(Accumulator[float]):
    def __init__(self, **options: int) -> None:
        super().__init__((2,), **options)

    def value(self) -> float:
        """The mean over the examples so far."""
        total, number = self.totals.tolist()
        self._check_seen(number)
        return total / number

    def _count(self, values: Tensor) -> None:
        self._add(torch.stack([values.double().sum(), values.new_tensor(len(values), dtype=torch.float64)]))


class Mean(_Average):
    """The mean of a number for each example."""

    def update(self, values: Tensor) -> None:
        """Count values (B,)."""
        if values.dim() != 1:
            raise PatchbayesError(
                f"Mean.update: takes one number for each example, (B,); given was {tuple(values.shape)}."
            )
        self._count(values.detach())


class Accuracy(_Average):
    """`accuracy`: the share of examples whose class is among the `top` most probable."""

    def __init__(self, top: int = 1) -> None:
        check_count("Accuracy", "top", top)
        super().__init__(top=top)

    def update(self, probs: Tensor, targets: Tensor) -> None:
        """Count probs (B, C), targets (B,)."""
        self._count(correct(probs, targets, self.options["top"]))


class NLL(_Average):
    """`nll`: the mean negative log-likelihood, in nats."""

    def update(self, log_probs: Tensor, targets: Tensor) -> None:
        """Count log_probs (B, C), targets (B,)."""
        self._count(nll_per_example(log_probs, targets))


class Brier(_Average):
    """`brier`: the mean squared distance to the one-hot target."""

    def update(self, probs: Tensor, targets: Tensor) -> None:
        """Count probs (B, C), targets (B,)."""
        self._count(brier_per_example(probs, targets))


class LogDensity(_Average):
    """The mean of `log_density`."""

    def update(
        self, draw_means: Tensor, targets: Tensor, precision: float | Tensor = 1.0, weights: Tensor | None = None
    ) -> None:
        """Count draw_means (S, B, D), targets (B, D); precision () or (D,), weights (S,)."""
        self._count(log_density(draw_means, targets, precision, weights))


class Calibration(Accumulator[CalibrationBins]):
    """`calibration_bins`: confidence and accuracy by bins, ECE and MCE."""

    def __init__(self, num_bins: int = 20, min_count: int = 6) -> None:
        check_count("Calibration", "num_bins", num_bins)
        check_count("Calibration", "min_count", min_count)
        super().__init__((3, num_bins), num_bins=num_bins, min_count=min_count)

    def update(self, probs: Tensor, targets: Tensor) -> None:
        """Count probs (B, C), targets (B,)."""
        self._add(bin_sums(probs, targets, self.options["num_bins"]))

    def value(self) -> CalibrationBins:
        """The bins so far."""
        self._check_seen(float(self.totals[0].sum()))
        return CalibrationBins.from_sums(self.totals.clone(), self.options["min_count"])


class RMSE(Accumulator[float]):
    """`rmse`: the root mean squared error of each target, averaged over `num_targets`."""

    def __init__(self, num_targets: int = 1) -> None:
        check_count("RMSE", "num_targets", num_targets)
        super().__init__((num_targets + 1,), num_targets=num_targets)

    def update(self, predicted: Tensor, targets: Tensor) -> None:
        """Count predicted, targets (B, D), or (B,) where D is 1."""
        predicted, targets = checked_pair("RMSE.update", predicted, targets)
        if predicted.shape[1] != self.options["num_targets"]:
            raise PatchbayesError(f"{self!r}.update: {predicted.shape[1]} targets were given.")
        self._add(torch.nn.functional.pad((predicted - targets).square().sum(0), (0, 1), value=float(len(targets))))

    def value(self) -> float:
        """The error over the examples so far."""
        number = float(self.totals[-1])
        self._check_seen(number)
        return float((self.totals[:-1] / number).sqrt().mean())
