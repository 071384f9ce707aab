"""Conformal prediction: sets of classes, or intervals, that hold the target as often as was promised."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..errors import PatchbayesError
from .classes import ClassPrediction
from .prediction import Prediction, check_level, check_shape
from .regression import MeanPrediction

Score = Literal["lac", "aps", "normalized"]


def conformal(
    prediction: Prediction,
    labels: Tensor,
    level: float = 0.9,
    score: Literal["lac", "aps"] | None = None,
) -> "Conformal":
    """What must be added to a prediction so that its answers hold new targets with probability `level` (split conformal).

        threshold = the k-th smallest of the n scores s(x_i, y_i),   k = ceil((n + 1) level)
        P(s(x, y) <= threshold) is between `level` and level + 1 / (n + 1) for continuous scores

    whatever the network is worth: a bad one gets large sets. It holds on average over new inputs and over held-out parts like
    this one, not for every input or every class; and only where new inputs come from where the held-out ones came from. The
    held-out examples must not have trained the network, nor calibrated it.

    prediction  of n held-out inputs: `predict(model, held_out, ...)`, with the settings of the predictions to come.
    labels      their targets: (n,) classes, or (n, D) numbers, (n,) for one target.
    score       for classes "lac" (the default), 1 - p_y: the smallest sets on average; or "aps", the probability of all classes
                down to y: larger sets that depend more on how hard an input is. In regression |y - mean| / deviation, for each
                target by itself: intervals are as wide as the predictive deviation says, times a factor.

    `Conformal.sets(prediction)` and `Conformal.interval(prediction)` then answer for new inputs.
    """
    check_level("conformal", level)
    number = len(prediction)
    least = math.ceil(level / (1 - level) - 1e-9)
    if number < least:
        raise PatchbayesError(
            f"conformal(level={level:g}): expected at least {least} held-out examples for that level, got {number}."
        )
    if isinstance(prediction, ClassPrediction):
        if score not in (None, "lac", "aps"):
            raise PatchbayesError(f'conformal(score={score!r}): expected "lac" or "aps".')
        _check_classes(prediction)
        check_shape("conformal", labels, prediction.probs.shape[:1])
        classes = prediction.probs.shape[-1]
        if labels.is_floating_point() or not bool(((labels >= 0) & (labels < classes)).all()):
            raise PatchbayesError(f"conformal: expected labels from 0 to {classes - 1}, whole numbers, got others.")
        kind: Score = score or "lac"
        rows = _class_scores(prediction, kind)
        scores = rows.gather(1, labels.to(rows.device).long().unsqueeze(1))
    elif isinstance(prediction, MeanPrediction):
        if score is not None:
            raise PatchbayesError(
                f"conformal(score={score!r}): it is for classes; in regression there is one score, leave it out."
            )
        kind = "normalized"
        mean, deviation = _moments(prediction)
        targets = labels.unsqueeze(1) if labels.dim() == 1 and mean.shape[1:] == (1,) else labels
        check_shape("conformal", targets, mean.shape)
        scores = (targets.to(mean) - mean).abs() / deviation
    else:
        raise PatchbayesError(
            f"conformal: expected a prediction of classes or of numbers, got a {type(prediction).__name__}."
        )
    if not bool(scores.isfinite().all()):
        raise PatchbayesError("conformal: the prediction or the labels hold values that are not finite.")
    rank = math.ceil((number + 1) * level - 1e-9)
    return Conformal(level, kind, scores.kthvalue(rank, dim=0).values, number)


@dataclass(frozen=True)
class Conformal:
    """What `conformal` found: the largest score, (1,) or (D,), that a target in an answer may have."""

    level: float
    score: Score
    threshold: Tensor
    num_held_out: int

    def sets(self, prediction: ClassPrediction) -> Tensor:
        """(B, C) bool: the classes that are in the answer. A set may be empty, where all classes are less likely than usual."""
        if self.score == "normalized" or not isinstance(prediction, ClassPrediction):
            raise PatchbayesError(f"Conformal.sets: the score {self.score!r} is for {self._meant}.")
        _check_classes(prediction)
        scores = _class_scores(prediction, self.score)
        return scores <= self.threshold.to(scores)

    def interval(self, prediction: MeanPrediction) -> tuple[Tensor, Tensor]:
        """((B, D), (B, D)): mean minus and plus threshold times the predictive deviation."""
        if self.score != "normalized" or not isinstance(prediction, MeanPrediction):
            raise PatchbayesError(f"Conformal.interval: the score {self.score!r} is for {self._meant}.")
        mean, deviation = _moments(prediction)
        reach = self.threshold.to(mean) * deviation
        return (mean - reach).to(prediction.mean), (mean + reach).to(prediction.mean)

    @property
    def _meant(self) -> str:
        return "intervals of numbers" if self.score == "normalized" else "sets of classes"


def _check_classes(prediction: ClassPrediction) -> None:
    if prediction.probs.dim() != 2:
        raise PatchbayesError(
            f"conformal: expected one class for each input, probabilities (B, C), got {tuple(prediction.probs.shape)}."
        )


def _class_scores(prediction: ClassPrediction, score: Score) -> Tensor:
    """(B, C) float64: the score that each class would have as the target."""
    probs = prediction.probs.double()
    if score == "lac":
        return 1 - probs
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    return torch.empty_like(probs).scatter_(-1, order, ordered.cumsum(-1))


def _moments(prediction: MeanPrediction) -> tuple[Tensor, Tensor]:
    """Mean and predictive deviation, (B, D) float64."""
    return prediction.mean.double(), prediction.variance.double().sqrt()
