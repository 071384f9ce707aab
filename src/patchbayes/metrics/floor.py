"""What a perfectly calibrated model would score: calibration errors that chance alone opens."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import PatchbayesError
from .calibration import (
    adaptive_calibration_error,
    adaptive_errors,
    binned_errors,
    class_bins,
    classwise_calibration_error,
    expected_calibration_error,
    maximum_calibration_error,
)
from .checks import check_count, check_examples, check_range
from .ranking import Ranking

_SIMULATED = 2**20  # labels held at a time


@dataclass(frozen=True)
class Floor:
    """The distribution of an error over simulated labels: its mean, 2.5 % and 97.5 % quantile."""

    mean: float
    low: float
    high: float


def calibration_floor(
    probs: Tensor,
    statistic: Callable[..., float] = expected_calibration_error,
    *,
    replicates: int = 1000,
    seed: int = 0,
    **options: int,
) -> Floor:
    """The calibration error that a model with these probabilities has by chance if every one of them is true.

    Labels are drawn from the probabilities (B, C) themselves, `replicates` times. An error within the floor's quantiles is
    no evidence of miscalibration. `statistic` is one of the package's calibration errors, `options` are its keywords.
    """
    if statistic not in _ERRORS:
        names = ", ".join(known.__name__ for known in _ERRORS)
        raise PatchbayesError(f"calibration_floor(statistic={statistic!r}): one of {names}.")
    check_count("calibration_floor", "replicates", replicates)
    for name, value in options.items():
        check_count("calibration_floor", name, value)
    if probs.dim() != 2:
        raise PatchbayesError(f"calibration_floor: takes probabilities (B, C); given was {tuple(probs.shape)}.")
    check_examples("calibration_floor", probs)
    check_range("calibration_floor", probs)
    probs = probs.detach().cpu().double()
    if bool(((probs.sum(1) - 1).abs() > 0.01).any()):
        raise PatchbayesError("calibration_floor: the probabilities of an example sum to 1; some here do not.")
    generator = torch.Generator().manual_seed(seed)
    simulate = _ERRORS[statistic](probs, generator, **options)
    rows = max(1, _SIMULATED // len(probs))
    errors = torch.cat([simulate(min(rows, replicates - start)) for start in range(0, replicates, rows)])
    low, high = torch.quantile(errors, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Floor(float(errors.mean()), low, high)


Simulation = Callable[[int], Tensor]  # a number of data sets R -> the error of each (R,)


def _bins(
    probs: Tensor, generator: torch.Generator, num_bins: int = 20, min_count: int = 6
) -> Callable[[int], tuple[Tensor, Tensor]]:
    confidence = probs.amax(1)
    once = torch.ones(1, len(probs), dtype=torch.float64)
    return lambda rows: binned_errors(confidence, once, _gaps(confidence, rows, generator), num_bins, min_count)


def _expected_error(probs: Tensor, generator: torch.Generator, **options: int) -> Simulation:
    bins = _bins(probs, generator, **options)
    return lambda rows: torch.mul(*bins(rows)).sum(1)


def _maximum_error(probs: Tensor, generator: torch.Generator, **options: int) -> Simulation:
    bins = _bins(probs, generator, **options)
    return lambda rows: bins(rows)[1].amax(1)


def _adaptive_error(probs: Tensor, generator: torch.Generator, num_bins: int = 20) -> Simulation:
    confidence = probs.amax(1)
    ranking = Ranking(confidence)

    def errors(rows: int) -> Tensor:
        gaps = _gaps(confidence, rows, generator)
        return adaptive_errors(ranking, torch.ones_like(gaps), gaps, num_bins)

    return errors


def _gaps(confidence: Tensor, rows: int, generator: torch.Generator) -> Tensor:
    """Confidence - right of simulated predictions, (R, B): a label drawn from p is the top class with its probability."""
    right = torch.rand(rows, len(confidence), generator=generator, dtype=torch.float64) < confidence
    return confidence - right.double()


def _classwise_error(probs: Tensor, generator: torch.Generator, num_bins: int = 20) -> Simulation:
    columns = class_bins(probs, num_bins)
    size = probs.shape[1] * num_bins
    said = probs.new_zeros(size).index_add(0, columns.flatten(), probs.flatten())

    def errors(rows: int) -> Tensor:
        labels = torch.multinomial(probs, rows, replacement=True, generator=generator)
        places = columns.gather(1, labels) + size * torch.arange(rows)
        happened = torch.bincount(places.flatten(), minlength=rows * size).reshape(rows, size)
        return (said - happened).abs().sum(1) / probs.numel()

    return errors


_ERRORS: dict[Callable[..., float], Callable[..., Simulation]] = {
    expected_calibration_error: _expected_error,
    maximum_calibration_error: _maximum_error,
    adaptive_calibration_error: _adaptive_error,
    classwise_calibration_error: _classwise_error,
}
