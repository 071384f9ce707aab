"""Labels that are present or absent, each for itself."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ..errors import PatchbayesError
from .likelihood import Likelihood, wrong_shape


class Bernoulli(Likelihood):
    """The output holds one logit for each label, p(y = 1) = sigmoid(logit); targets are 0 or 1 (or a share between).

    Multi-label networks (B, L), and networks that answer yes or no with a single logit, (B, 1) or (B,).

    ignore_index  targets of this number contribute nothing and are not counted: labels that nobody has looked at.
    """

    offers = "LabelPrediction"

    def __init__(self, ignore_index: int = -100) -> None:
        super().__init__()
        if isinstance(ignore_index, bool) or not isinstance(ignore_index, int) or ignore_index in (0, 1):
            raise PatchbayesError(f"Bernoulli(ignore_index={ignore_index!r}): expected an integer other than 0 and 1.")
        self.ignore_index = ignore_index

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """log p(y | x, w) of every example, summed over its labels: (S, B, L), (B, L) give (S, B)."""
        if targets.shape != outputs.shape[1:]:
            raise wrong_shape("Bernoulli", outputs, targets)
        valid = targets != self.ignore_index
        share = targets.to(outputs).where(valid, 0.0)
        _check_shares(share, self.ignore_index)
        each = share * logsigmoid(outputs) + (1 - share) * logsigmoid(-outputs)
        each = each.masked_fill(~valid, 0.0)
        return each.flatten(2).sum(-1) if each.dim() > 2 else each

    def predictive(self, outputs: Tensor) -> Mapping[str, Tensor]:
        """logits (D, B, ...)."""
        return {"logits": outputs}

    def counted(self, targets: Tensor) -> Tensor:
        """Examples with at least one label that is not ignored, (B,) bool."""
        return (targets != self.ignore_index).flatten(1).any(1) if targets.dim() > 1 else targets != self.ignore_index


def _check_shares(share: Tensor, ignored: int) -> None:
    """Refuse targets outside [0, 1], where they can be looked at without waiting for a device."""
    if share.device.type != "cpu" or torch.compiler.is_compiling():
        return
    try:
        fine = bool(((share >= 0) & (share <= 1)).all())
    except RuntimeError:  # under vmap nothing can be looked at
        return
    if not fine:
        raise PatchbayesError(
            f"Bernoulli: expected targets between 0 and 1 (or {ignored}: ignored), got values from {float(share.min()):g} to "
            f"{float(share.max()):g}."
        )
