"""Bayes by Backprop (Blundell et al., 2015): a mean-field Gaussian under a prior that mixes a wide and a narrow one."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..errors import PatchbayesError
from .gaussian import MeanField, MeanFieldPosterior
from .posterior import KL, PriorTerms, SiteDraw, own_parameters


@dataclass(frozen=True)
class BayesByBackprop(MeanField):
    """`MeanField` with the scale-mixture prior on every weight,

        p(w) = mixing N(0, wide^2 / tau) + (1 - mixing) N(0, narrow^2 / tau),   biases: rho in place of tau.

    The KL is estimated: the entropy of the Gaussian exactly, the prior at one draw. The paper chose mixing from 1/4, 1/2, 3/4,
    -log(wide) from 0, 1, 2 and -log(narrow) from 6, 7, 8; with wide = narrow = 1 it is `MeanField`.
    """

    mixing: float = 0.5
    wide: float = 1.0
    narrow: float = math.exp(-6)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (isinstance(self.mixing, int | float) and 0 <= self.mixing <= 1):
            raise PatchbayesError(f"BayesByBackprop(mixing={self.mixing!r}): expected a probability, from 0 to 1.")
        for name in ("wide", "narrow"):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
                raise PatchbayesError(f"BayesByBackprop({name}={value!r}): expected a finite deviation above 0.")

    @property
    def label(self) -> str:
        return "BayesByBackprop"

    def posterior(self, module: nn.Module, generator: torch.Generator) -> "BayesByBackpropPosterior":
        return BayesByBackpropPosterior(self, module, tuple(own_parameters(module)))


class BayesByBackpropPosterior(MeanFieldPosterior):
    """The Gaussian over the parameters of one layer."""

    method: BayesByBackprop
    kl_draws = True

    def kl(self, prior: PriorTerms, d: SiteDraw | None = None) -> KL:
        """With all constants, whatever `normalized` and `entropy` say."""
        if d is None:
            raise PatchbayesError(f"{self.method.label}: its KL is estimated from a draw; call patchbayes.kl(model).")
        terms = []
        for name, value in self.realize(d).items():
            precision = prior.precision_like(value, name)
            terms.append(-self.deviation(name).log().sum() - 0.5 * value.numel())
            terms.append(-self._log_prior(value, precision).sum())
        return KL(torch.stack(terms).sum(), "monte_carlo")

    def _log_prior(self, value: Tensor, precision: Tensor) -> Tensor:
        """log p(w) + log(2 pi) / 2 of every element."""
        method, square = self.method, precision * value.square()
        parts = [
            math.log(share) - math.log(scale) - square / (2 * scale**2)
            for share, scale in ((method.mixing, method.wide), (1 - method.mixing, method.narrow))
            if share > 0
        ]
        return torch.logsumexp(torch.stack(parts), dim=0) + 0.5 * precision.log()
