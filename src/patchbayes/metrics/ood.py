"""Telling known inputs from unknown ones by an uncertainty score, larger where less is known."""

import torch
from torch import Tensor

from ..errors import PatchbayesError
from .checks import check_share


def auroc(known: Tensor, unknown: Tensor) -> float:
    """P(score of an unknown input > score of a known one), ties counting half: the area under the ROC curve.

    known (B,), unknown (B',): scores (entropy, mutual information, 1 - confidence) of inputs like the training data, and of
    others.
    """
    known, unknown = _checked("auroc", known, unknown)
    ascending = known.sort().values
    below = torch.searchsorted(ascending, unknown) + torch.searchsorted(ascending, unknown, right=True)
    return float(below.double().mean()) / (2 * len(known))


def fpr_at_tpr(known: Tensor, unknown: Tensor, tpr: float = 0.95) -> float:
    """The share of unknown inputs that pass as known where at least `tpr` of the known ones do: FPR95.

    known (B,), unknown (B',). The threshold is the smallest score t with a share of at least `tpr` of the known scores <= t.
    """
    known, unknown = _checked("fpr_at_tpr", known, unknown)
    check_share("fpr_at_tpr", "tpr", tpr)
    shares = torch.arange(1, len(known) + 1, dtype=torch.float64, device=known.device) / len(known)
    threshold = known.sort().values[torch.searchsorted(shares, tpr).clamp_max(len(known) - 1)]
    return float((unknown <= threshold).double().mean())


def _checked(where: str, known: Tensor, unknown: Tensor) -> tuple[Tensor, Tensor]:
    for scores in (known, unknown):
        if scores.dim() != 1 or len(scores) == 0 or bool(scores.isnan().any()):
            raise PatchbayesError(
                f"{where}: takes the scores of known inputs (B,) and of unknown ones (B',), at least one each, none of them "
                f"NaN; given were {tuple(known.shape)} and {tuple(unknown.shape)}."
            )
    return known.detach().double(), unknown.detach().double()
