"""How the network's output speaks of the data: class probabilities, or a mean with Gaussian noise."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from .errors import PatchbayesError


class Categorical:
    """The output holds logits (or log-probabilities) of C classes along `class_dim`; targets are class numbers."""

    def __init__(self, class_dim: int = -1) -> None:
        self.class_dim = class_dim

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """log p(y | x, w) of every example: outputs (S, B, C), targets (B,) give (S, B); more axes than B likewise."""
        log_probs = self.log_probs(outputs, lead=1)
        if targets.is_floating_point() or targets.shape != log_probs.shape[1:-1]:
            raise PatchbayesError(
                f"classification targets are class numbers of shape {tuple(log_probs.shape[1:-1])}; "
                f"given were {targets.dtype} of shape {tuple(targets.shape)}."
            )
        chosen = targets.to(torch.int64).expand(log_probs.shape[:-1]).unsqueeze(-1)
        return log_probs.gather(-1, chosen).squeeze(-1)

    def log_probs(self, outputs: Tensor, lead: int = 0) -> Tensor:
        """log-probabilities with the classes last. `lead` axes stand before the output's own."""
        dim = self.class_dim + lead if self.class_dim >= 0 else self.class_dim
        return torch.log_softmax(outputs, dim).movedim(dim, -1)

    def __repr__(self) -> str:
        return f"Categorical(class_dim={self.class_dim})"


class Gaussian(nn.Module):
    """The output is the mean of y, with independent Gaussian noise of precision tau_output (appendix B).

    `learn=True` makes the logarithm of the precision a parameter, to be learned by maximizing the ELBO (appendix C.1).
    """

    def __init__(self, precision: float = 1.0, learn: bool = False) -> None:
        super().__init__()
        if not (math.isfinite(precision) and precision > 0):
            raise PatchbayesError(
                f"Gaussian(precision={precision!r}): the output precision is a finite number above 0."
            )
        self.log_precision = nn.Parameter(torch.tensor(math.log(precision), dtype=torch.float64), requires_grad=learn)

    @property
    def precision(self) -> Tensor:
        """tau_output, ()."""
        return self.log_precision.exp()

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """log N(y | f, 1/tau) of every example, summed over the D targets: (S, B, D), (B, D) give (S, B)."""
        if targets.shape != outputs.shape[1:]:
            raise PatchbayesError(
                f"regression targets have the shape of one output, {tuple(outputs.shape[1:])}; "
                f"given was {tuple(targets.shape)}."
            )
        precision = self.precision.to(outputs)
        density = 0.5 * (precision.log() - math.log(2 * math.pi) - precision * (outputs - targets).square())
        return density.flatten(2).sum(-1) if outputs.dim() > 2 else density

    def extra_repr(self) -> str:
        return f"precision={float(self.precision):g}"


Likelihood = Categorical | Gaussian


def checked_likelihood(likelihood: Any) -> Likelihood:
    if isinstance(likelihood, Categorical | Gaussian):
        return likelihood
    raise PatchbayesError(
        f"likelihood={likelihood!r}: give patchbayes.Categorical() or patchbayes.Gaussian(precision=...)."
    )
