"""What the metrics accept: shapes, class numbers and ranges are checked before anything is computed."""

import torch
from torch import Tensor

from ..errors import PatchbayesError

_ROUNDING = 1e-3  # by which a sum in low precision may leave its range


def checked_probs(where: str, probs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """probs (B, C) in double precision and targets (B,) int64, or an error."""
    targets = checked_classes(where, "probabilities", probs, targets)
    check_range(where, probs)
    return probs.detach().double(), targets


def checked_log_probs(where: str, log_probs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """log_probs (B, C) in double precision and targets (B,) int64, or an error."""
    targets = checked_classes(where, "log-probabilities", log_probs, targets)
    if log_probs.numel() and not bool((log_probs <= _ROUNDING).all()):
        raise PatchbayesError(
            f"{where}: log-probabilities are at most 0, the largest given is {float(log_probs.max()):g}.\n"
            "  do       logits.log_softmax(1), or probs.log()."
        )
    return log_probs.detach().double(), targets


def checked_classes(where: str, kind: str, values: Tensor, targets: Tensor) -> Tensor:
    """targets (B,) int64 that fit values (B, C) without NaN, or an error."""
    integer = not (targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool)
    if values.dim() != 2 or targets.shape != values.shape[:1] or not integer:
        raise PatchbayesError(
            f"{where}: takes {kind} (B, C) and class numbers (B,); given were {tuple(values.shape)} and "
            f"{targets.dtype} {tuple(targets.shape)}."
        )
    if bool(values.isnan().any()):
        raise PatchbayesError(f"{where}: {int(values.isnan().sum())} of the {kind} are not a number.")
    if targets.numel() and not bool(((targets >= 0) & (targets < values.shape[1])).all()):
        raise PatchbayesError(
            f"{where}: the classes are 0 to {values.shape[1] - 1}; given were numbers from {int(targets.min())} to "
            f"{int(targets.max())}."
        )
    return targets.detach().long()


def check_range(where: str, probs: Tensor) -> None:
    """Probabilities lie between 0 and 1 (up to rounding) and are numbers."""
    if probs.numel() and not bool(((probs >= -_ROUNDING) & (probs <= 1 + _ROUNDING)).all()):
        raise PatchbayesError(
            f"{where}: probabilities lie between 0 and 1; given were values from {float(probs.min()):g} to "
            f"{float(probs.max()):g}.\n  do       logits.softmax(1)."
        )


def check_examples(where: str, values: Tensor) -> None:
    """There is at least one example, along the first axis."""
    if len(values) == 0:
        raise PatchbayesError(f"{where}: no examples were given; at least one is needed.")


def checked_pair(where: str, predicted: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Two tensors of one shape (B, D) or (B,), both as (B, D) in double precision."""
    if predicted.shape != targets.shape or predicted.dim() not in (1, 2):
        raise PatchbayesError(
            f"{where}: takes two tensors of one shape, (B, D) or (B,); given were {tuple(predicted.shape)} and "
            f"{tuple(targets.shape)}."
        )
    if targets.dim() == 1:
        predicted, targets = predicted.unsqueeze(1), targets.unsqueeze(1)
    return predicted.detach().double(), targets.detach().double()


def checked_confidence(where: str, confidence: Tensor, correct: Tensor) -> tuple[Tensor, Tensor]:
    """confidence (B,) and whether the prediction was right (B,), both in double precision."""
    if confidence.dim() != 1 or confidence.shape != correct.shape:
        raise PatchbayesError(
            f"{where}: takes a confidence (B,) and whether each prediction was right (B,); given were "
            f"{tuple(confidence.shape)} and {tuple(correct.shape)}."
        )
    check_examples(where, confidence)
    if bool(confidence.isnan().any()):
        raise PatchbayesError(f"{where}: {int(confidence.isnan().sum())} of the confidences are not a number.")
    if not bool(((correct == 0) | (correct == 1)).all()):
        raise PatchbayesError(f"{where}: whether a prediction was right is true or false (1 or 0).")
    return confidence.detach().double(), correct.detach().double()


def checked_weights(where: str, weights: Tensor | None, draws: Tensor) -> Tensor:
    """The weights of draws (S, ...), (S,) float64 that sum to 1: equal ones where none are given."""
    size = len(draws)
    weights = torch.full((size,), 1 / size) if weights is None else weights.detach()
    if weights.shape != (size,) or not bool((weights >= 0).all()) or not abs(float(weights.sum()) - 1) < _ROUNDING:
        raise PatchbayesError(f"{where}: the weights are {size} numbers from 0 on, one for each draw, that sum to 1.")
    weights = weights.to(draws.device, torch.float64)
    return weights / weights.sum()


def check_count(where: str, name: str, value: int, least: int = 1) -> None:
    """An integer option of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise PatchbayesError(f"{where}({name}={value!r}): an integer of at least {least}.")


def check_share(where: str, name: str, value: float) -> None:
    """An option strictly between 0 and 1."""
    if not 0 < value < 1:
        raise PatchbayesError(f"{where}({name}={value!r}): a number between 0 and 1.")
