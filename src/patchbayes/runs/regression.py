"""What an evaluation says of a regression: scores with intervals, and how often targets lie below predicted quantiles."""

import torch
from torch import Tensor

from ..metrics import bootstrap, crps, log_density, pit, quantile_calibration, rmse
from .answers import ValueAnswers
from .record import Metric, QuantilePoints

_CRPS_DRAWS = 200  # its cost grows with the square of the draws


def value_scores(answers: ValueAnswers, replicates: int = 1000) -> dict[str, Metric]:
    """RMSE, log predictive density, CRPS, and the coverage and width of 95 % intervals, in the units of the targets."""
    weights, precision = answers.weights, answers.deviation**-2
    mean = torch.einsum("s,snd->nd", weights, answers.means)
    fewer = answers.means[:_CRPS_DRAWS]
    share = weights[:_CRPS_DRAWS] / weights[:_CRPS_DRAWS].sum()
    below = pit(answers.means, answers.targets, precision, weights)
    width = quantile(answers, 0.975) - quantile(answers, 0.025)
    per_example = {
        "log_density": log_density(answers.means, answers.targets, precision, weights),
        "crps": crps(fewer, answers.targets, precision, share).mean(1),
        "coverage_95": ((below >= 0.025) & (below <= 0.975)).double().mean(1),
        "interval_width_95": width.mean(1),
    }
    found = {"rmse": bootstrap(rmse, mean, answers.targets, replicates=replicates)}
    found |= {name: bootstrap(torch.mean, values, replicates=replicates) for name, values in per_example.items()}
    return {name: Metric(interval.value, interval.low, interval.high) for name, interval in found.items()}


def quantile_curve(answers: ValueAnswers) -> QuantilePoints:
    """For levels between 0 and 1, the share of targets below the predicted quantile of that level."""
    below = pit(answers.means, answers.targets, answers.deviation**-2, answers.weights)
    found = quantile_calibration(below)
    return QuantilePoints(tuple(found.level.tolist()), tuple(found.observed.tolist()))


def quantile(answers: ValueAnswers, level: float) -> Tensor:
    """(N, D): the quantile of the mixture, by bisection of its distribution function."""
    reach = answers.deviation * torch.special.ndtri(torch.tensor(level, dtype=torch.float64))
    low, high = answers.means.amin(0) + reach, answers.means.amax(0) + reach
    for _ in range(50):
        middle = (low + high) / 2
        reached = pit(answers.means, middle, answers.deviation**-2, answers.weights) < level
        low, high = torch.where(reached, middle, low), torch.where(reached, high, middle)
    return (low + high) / 2
