"""How well an averaged, tempered prediction speaks of targets, at any temperature."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ..errors import PatchbayesError
from ..likelihoods import Categorical, Likelihood
from ..likelihoods.categorical import LOGITS_INSTEAD, PROBABILITIES
from ..likelihoods.likelihood import tempered
from ..metrics.temperature import fit_variance_factor

#: The deviation of log T that a temperature is shrunk by, as `metrics.fit_temperature` explains.
_PRIOR = 0.5
_RANGE = math.log(100.0)


@dataclass(frozen=True)
class Average:
    """What the average over the draws says of a batch, before the temperature: all that scores at any temperature need.

    parts   for classes the log-probabilities (B, ..., C); for labels the log-odds (B, ...); for numbers the means and
            variances of the draws, (S, B, D) each.
    """

    kind: str
    parts: tuple[Tensor, ...]
    ignored: int | None

    @classmethod
    def of_outputs(cls, likelihood: Likelihood, outputs: Tensor, draw_temperature: float = 1.0) -> "Average":
        """From the outputs (S, B, ...) of S draws that weigh the same, each softened by a temperature of its own."""
        found = tempered(likelihood.predictive(outputs), draw_temperature)
        ignored = getattr(likelihood, "ignore_index", None)
        if likelihood.offers == "ClassPrediction":
            return cls("classes", (_log_mean(found["log_probs"]),), ignored)
        if likelihood.offers == "LabelPrediction":
            logits = found["logits"]
            return cls("labels", (_log_mean(logsigmoid(logits)) - _log_mean(logsigmoid(-logits)),), ignored)
        means, variances = (v.unsqueeze(-1) if v.dim() == 2 else v for v in (found["mean"], found["variance"]))
        return cls._of_numbers(likelihood, means, variances.expand_as(means))

    @classmethod
    def of_prediction(cls, likelihood: Likelihood, prediction: Any) -> "Average":
        """From what `predict` says, for numbers with keep_draws=True."""
        ignored = getattr(likelihood, "ignore_index", None)
        if likelihood.offers == "ClassPrediction":
            return cls("classes", (prediction.averaged_log_probs,), ignored)
        if likelihood.offers == "LabelPrediction":
            return cls("labels", (prediction.averaged_log_present - prediction.averaged_log_absent,), ignored)
        varying = getattr(prediction, "draw_variances", None)
        means = prediction.draw_means
        return cls._of_numbers(
            likelihood, means, prediction.noise_variance.expand_as(means) if varying is None else varying
        )

    @classmethod
    def _of_numbers(cls, likelihood: Likelihood, means: Tensor, variances: Tensor) -> "Average":
        if likelihood.offers == "MeanPrediction":  # moments alone: as if the law were Gaussian
            variances = (variances.mean(0) + means.var(0, correction=0)).unsqueeze(0)
            means = means.mean(0, keepdim=True)
        return cls("numbers", (means, variances), None)

    @property
    def numel(self) -> int:
        return sum(part.numel() for part in self.parts)

    def log_score(self, targets: Tensor, log_temperature: Tensor | float, *, summed: bool = False) -> Tensor:
        """log p_T(y | x) of every example, (B,), as `predict` says it at temperature T; 0 for one without a target.

        An example with several labels (a dense prediction, several yes-or-no labels) scores the mean over those that count,
        one with several numbers their joint density. summed: the sum over its labels instead.
        """
        log_temperature = torch.as_tensor(log_temperature).to(self.parts[0])
        if self.kind == "numbers":
            means, variances = self.parts
            return _density(means, variances, targets.reshape(self.parts[0].shape[1:]), log_temperature.exp())
        valid = torch.ones_like(targets, dtype=torch.bool) if self.ignored is None else targets.ne(self.ignored)
        tempered = self.parts[0] * torch.exp(-log_temperature)
        if self.kind == "classes":
            terms = torch.log_softmax(tempered, -1).gather(-1, targets.long().where(valid, 0).unsqueeze(-1)).squeeze(-1)
        else:
            share = targets.to(tempered).where(valid, 0.0)
            terms = share * logsigmoid(tempered) + (1 - share) * logsigmoid(-tempered)
        terms, valid = (value.reshape(len(value), -1) for value in (terms.masked_fill(~valid, 0.0), valid))
        return terms.sum(1) if summed else terms.sum(1) / valid.sum(1).clamp_min(1)


def check_scored(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> None:
    """Refuse a likelihood or targets that cannot be scored. outputs (1, B, ...)."""
    known = (
        "ClassPrediction",
        "LabelPrediction",
        "RegressionPrediction",
        "HeteroscedasticPrediction",
        "MeanPrediction",
    )
    if likelihood.offers not in known:
        raise PatchbayesError(
            f"calibration: {type(likelihood).__name__} offers a {likelihood.offers}; expected one of {', '.join(known)}."
        )
    likelihood.log_prob(outputs, targets)
    if isinstance(likelihood, Categorical) and likelihood.are_probabilities(outputs):
        raise PatchbayesError(f"calibration: {PROBABILITIES}; expected logits.\n  do       {LOGITS_INSTEAD}.")


@torch.no_grad()
def best_temperature(averages: Sequence[Average], targets: Sequence[Tensor]) -> float:
    """The temperature with the least NLL on all batches, shrunk towards 1 by what they leave uncertain; of numbers, the factor
    on their variance (`fit_variance_factor`)."""
    if averages[0].kind == "numbers":
        means, variances = (torch.cat([a.parts[i].flatten(2) for a in averages], 1) for i in range(2))
        wanted = torch.cat([y.reshape(a.parts[0].shape[1:]).flatten(1) for a, y in zip(averages, targets, strict=True)])
        return fit_variance_factor(means, variances.clamp_min(torch.finfo(variances.dtype).tiny), wanted)

    def loss(log_temperature: float) -> float:
        scores = (
            float(a.log_score(y, log_temperature, summed=True).double().sum())
            for a, y in zip(averages, targets, strict=True)
        )
        return -sum(scores) + 0.5 * (log_temperature / _PRIOR) ** 2

    return math.exp(_least(loss, -_RANGE, _RANGE))


@torch.no_grad()
def raised_temperature(
    averages: Sequence[Average], targets: Sequence[Tensor], temperature: float, tolerance: float
) -> float:
    """The highest temperature above the given one whose NLL is above its by no more than the tolerance."""
    most = -float(scores(averages, targets, temperature).mean()) + tolerance
    low, high = math.log(temperature), math.log(temperature) + math.log(4.0)
    while high - low > 1e-3:
        middle = (low + high) / 2
        if -float(scores(averages, targets, math.exp(middle)).mean()) <= most:
            low = middle
        else:
            high = middle
    return math.exp(low)


def scores(averages: Sequence[Average], targets: Sequence[Tensor], temperature: float) -> Tensor:
    """The log scores of all examples, (N,) float64."""
    log_temperature = math.log(temperature)
    return torch.cat([a.log_score(y, log_temperature).double() for a, y in zip(averages, targets, strict=True)])


def _density(means: Tensor, variances: Tensor, targets: Tensor, factor: Tensor) -> Tensor:
    """The log density of a mixture of Gaussians, stretched around its mean by the root of the factor."""
    center, variances = means.mean(0), factor * variances
    distance = (targets - center - factor.sqrt() * (means - center)).square() / variances
    terms = -0.5 * (distance + variances.log() + math.log(2 * math.pi))
    return _log_mean(terms.flatten(2).sum(-1))


def _log_mean(values: Tensor) -> Tensor:
    return torch.logsumexp(values, 0) - math.log(len(values))


def _least(function: Callable[[float], float], low: float, high: float) -> float:
    """Where a function of one number is least: a first look all over the range, then golden sections beside the best."""
    places = [low + (high - low) * i / 16 for i in range(17)]
    seen = [function(place) for place in places]
    best = min(range(17), key=seen.__getitem__)
    low, high = places[max(best - 1, 0)], places[min(best + 1, 16)]
    ratio = (math.sqrt(5) - 1) / 2
    inner = [high - ratio * (high - low), low + ratio * (high - low)]
    values = [function(place) for place in inner]
    while high - low > 1e-4:
        if values[0] < values[1]:
            high, inner[1], values[1] = inner[1], inner[0], values[0]
            inner[0] = high - ratio * (high - low)
            values[0] = function(inner[0])
        else:
            low, inner[0], values[0] = inner[0], inner[1], values[1]
            inner[1] = low + ratio * (high - low)
            values[1] = function(inner[1])
    return (low + high) / 2
