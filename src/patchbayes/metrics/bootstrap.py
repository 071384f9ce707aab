"""How far a metric could be off because the test set is finite: bootstrap intervals."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

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
from .checks import check_count, check_examples, check_share
from .classification import accuracy, brier, brier_per_example, correct, nll, nll_per_example
from .ranking import Ranking
from .regression import covered, interval_coverage, interval_width, rmse
from .selective import areas, aurc

# From the numbers of the examples in each resampled data set, (R, B), to the statistic of each, (R,).
Replicated = Callable[[Tensor], Tensor]

_CALIBRATION = {
    expected_calibration_error,
    maximum_calibration_error,
    adaptive_calibration_error,
    classwise_calibration_error,
}
_RESAMPLED = 2**20  # numbers of examples held at a time


@dataclass(frozen=True)
class Interval:
    """A statistic of the data, and the interval that holds its value for the whole population."""

    value: float
    low: float
    high: float


def bootstrap(
    statistic: Callable[..., float | Tensor],
    *examples: Tensor,
    replicates: int = 1000,
    seed: int = 0,
    level: float = 0.95,
    **options: Any,
) -> Interval:
    """The statistic of the examples, and its interval at the given level, from examples drawn anew with replacement.

        bootstrap(accuracy, probs, targets, top=5)      bootstrap(torch.mean, values)

    `statistic` is a function of this package or one's own; `examples` are its arguments, each with the examples along the
    first axis, and `options` its keywords. Accuracy, NLL, Brier score, calibration errors, AURC, RMSE, interval coverage and
    width and means (torch.mean) of a value for each example are computed for many resampled data sets at once; other
    functions are called once for each.

    The interval is that of percentiles, except for calibration errors. Those are biased upward: chance alone opens gaps, even
    if the model is calibrated, and a resampled data set adds chance once more, so that percentiles lie too high altogether.
    Squares of errors are biased by about the same amount both times; the lower end is therefore the basic one of the
    squared error, sqrt(2 value^2 - q^2) (0 where negative) with the upper quantile q. The upper end leaves the bias of `value`
    and adds the spread only: value + median - lower quantile. `value` is the error as it is defined. Where this was
    simulated (5 classes, 500 to 5,000 examples, ECE 0 to 18 %), 95 % intervals held the true error in 92 to 100 % of the
    cases, MCE least; those of percentiles in 0 % where the model was calibrated.
    """
    check_count("bootstrap", "replicates", replicates, least=2)
    check_share("bootstrap", "level", level)
    if not all(isinstance(e, Tensor) and e.dim() for e in examples) or len({len(e) for e in examples}) != 1:
        given = ", ".join(str(tuple(e.shape)) if isinstance(e, Tensor) else repr(e) for e in examples) or "none"
        raise PatchbayesError(
            f"bootstrap: takes tensors with the same examples along the first axis, and options by keyword; given: {given}."
        )
    check_examples("bootstrap", examples[0])
    data = [e.detach().cpu() for e in examples]
    data = [e.double() for e in data] if statistic is torch.mean else data
    value = float(statistic(*data, **options))
    replicated = _FAST[statistic](*data, **options) if statistic in _FAST else _slow(statistic, data, options)
    drawn = _resamples(len(data[0]), replicates, seed)
    values = torch.cat([replicated(numbers) for numbers in drawn])
    tails = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    low, high = torch.quantile(values, tails, interpolation="nearest").tolist()
    if statistic in _CALIBRATION:
        low, high = min(max(2 * value**2 - high**2, 0) ** 0.5, value), value + float(values.median()) - low
    return Interval(value, low, high)


def _resamples(size: int, replicates: int, seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows = max(1, _RESAMPLED // size)
    for start in range(0, replicates, rows):
        yield torch.randint(size, (min(rows, replicates - start), size), generator=generator)


def _slow(statistic: Callable[..., float | Tensor], data: list[Tensor], options: dict[str, Any]) -> Replicated:
    def values(numbers: Tensor) -> Tensor:
        each = [float(statistic(*(tensor[row] for tensor in data), **options)) for row in numbers]
        return torch.tensor(each, dtype=torch.float64)

    return values


def _mean(values: Tensor) -> Replicated:
    each = values.double().reshape(len(values), -1).mean(1)
    return lambda numbers: each[numbers].mean(1)


def _rmse(predicted: Tensor, targets: Tensor) -> Replicated:
    squares = (predicted.double() - targets.double()).square().reshape(len(targets), -1)
    return lambda numbers: torch.stack([column[numbers].mean(1).sqrt() for column in squares.T]).mean(0)


def _bins(
    probs: Tensor, targets: Tensor, num_bins: int = 20, min_count: int = 6
) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    confidence, predicted = probs.double().max(1)
    gaps = (confidence - (predicted == targets).double()).unsqueeze(0)
    return lambda numbers: binned_errors(confidence, _counts(numbers), gaps, num_bins, min_count)


def _expected_error(probs: Tensor, targets: Tensor, **options: int) -> Replicated:
    bins = _bins(probs, targets, **options)
    return lambda numbers: torch.mul(*bins(numbers)).sum(1)


def _maximum_error(probs: Tensor, targets: Tensor, **options: int) -> Replicated:
    bins = _bins(probs, targets, **options)
    return lambda numbers: bins(numbers)[1].amax(1)


def _adaptive_error(probs: Tensor, targets: Tensor, num_bins: int = 20) -> Replicated:
    confidence, predicted = probs.double().max(1)
    ranking, gaps = Ranking(confidence), (confidence - (predicted == targets).double()).unsqueeze(0)
    return lambda numbers: adaptive_errors(ranking, _counts(numbers), gaps, num_bins)


def _classwise_error(probs: Tensor, targets: Tensor, num_bins: int = 20) -> Replicated:
    size, classes = probs.shape
    gaps = probs.double() - torch.nn.functional.one_hot(targets.long(), classes)
    places = torch.stack([class_bins(probs, num_bins).flatten(), torch.arange(size).repeat_interleave(classes)])
    # An example has one gap for each class: of the bins of all classes, most are empty.
    shape = (classes * num_bins, size)
    matrix = torch.sparse_coo_tensor(places, gaps.flatten(), shape, check_invariants=True).coalesce()
    return lambda numbers: torch.sparse.mm(matrix, _counts(numbers).T.contiguous()).abs().sum(0) / probs.numel()


def _aurc(confidence: Tensor, correct: Tensor) -> Replicated:
    ranking, wrong = Ranking(confidence.double()), (1 - correct.double()).unsqueeze(0)
    return lambda numbers: areas(ranking, _counts(numbers), wrong)


def _counts(numbers: Tensor) -> Tensor:
    """How often each example comes in each data set, (R, B) float64."""
    rows, size = numbers.shape
    places = numbers + size * torch.arange(rows).unsqueeze(1)
    return torch.bincount(places.flatten(), minlength=rows * size).reshape(rows, size).double()


_FAST: dict[Callable[..., Any], Callable[..., Replicated]] = {
    torch.mean: _mean,
    accuracy: lambda *arguments, **options: _mean(correct(*arguments, **options)),
    nll: lambda *arguments: _mean(nll_per_example(*arguments)),
    brier: lambda *arguments: _mean(brier_per_example(*arguments)),
    expected_calibration_error: _expected_error,
    maximum_calibration_error: _maximum_error,
    adaptive_calibration_error: _adaptive_error,
    classwise_calibration_error: _classwise_error,
    aurc: _aurc,
    rmse: _rmse,
    interval_coverage: lambda *arguments: _mean(covered(*arguments)),
    interval_width: lambda low, high: _mean(high - low),
}
