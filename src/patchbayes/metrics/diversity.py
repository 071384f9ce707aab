"""Whether the draws of a network are many models or one: how much they disagree."""

import torch
from torch import Tensor

from ..errors import PatchbayesError
from .checks import check_range, checked_weights


def disagreement(draw_probs: Tensor, weights: Tensor | None = None) -> float:
    """The probability that two different draws predict different classes, averaged over inputs: 0 if they are one model.

    Pairs count by the product of their weights: sum_{s != t} w_s w_t 1[class of s != class of t] / sum_{s != t} w_s w_t.
    draw_probs (S, B, C), S at least 2; weights (S,), equal where none are given.
    """
    draw_probs, w = _checked("disagreement", draw_probs, weights)
    if int((w > 0).sum()) < 2:
        raise PatchbayesError("disagreement: takes at least two draws of positive weight; one was given.")
    shape = draw_probs.shape[1:]
    votes = torch.zeros(shape, dtype=torch.float64, device=w.device)
    for probs, weight in zip(draw_probs, w, strict=True):
        votes.scatter_add_(1, probs.argmax(1, keepdim=True), weight.expand(shape[0], 1))
    different = 1 - votes.square().sum(1).mean()
    return max(float(different / (1 - w.square().sum())), 0.0)


def mutual_information(draw_probs: Tensor, weights: Tensor | None = None) -> float:
    """Entropy of the averaged probabilities minus the average entropy, in nats, averaged over inputs.

    What knowing the draw would tell about the class. draw_probs (S, B, C); weights (S,), equal where none are given.
    """
    draw_probs, w = _checked("mutual_information", draw_probs, weights)
    average = torch.zeros(draw_probs.shape[1:], dtype=torch.float64, device=w.device)
    expected = torch.zeros((), dtype=torch.float64, device=w.device)
    for probs, weight in zip(draw_probs.double(), w, strict=True):
        average += weight * probs
        expected += weight * torch.special.entr(probs).sum(1).mean()
    return max(float(torch.special.entr(average).sum(1).mean() - expected), 0.0)


def _checked(where: str, draw_probs: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    if draw_probs.dim() != 3 or draw_probs.numel() == 0:
        raise PatchbayesError(
            f"{where}: takes the probabilities of draws (S, B, C); given was {tuple(draw_probs.shape)}."
        )
    check_range(where, draw_probs)
    return draw_probs.detach().clamp_min(0), checked_weights(where, weights, draw_probs)
