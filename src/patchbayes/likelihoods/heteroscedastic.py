"""A mean with Gaussian noise whose size depends on the input."""

import math
from collections.abc import Mapping

from torch import Tensor

from ..errors import PatchbayesError
from .likelihood import Likelihood


class HeteroscedasticGaussian(Likelihood):
    """The output holds the mean of y and the logarithm of the noise's variance, both of the network's making.

        y ~ N(m(x, w), exp(s(x, w))),   output (B, 2 D): the D means first, then the D log-variances

    A network that returns them as a pair is read with `output=lambda pair: torch.cat(pair, -1)`. The prediction's variance
    is that of m over the draws (epistemic) plus the draws' average of exp(s) (aleatoric).
    """

    offers = "HeteroscedasticPrediction"

    def __init__(self) -> None:
        super().__init__()

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """log N(y | m, exp(s)) of every example, summed over the D targets: (S, B, 2 D), (B, D) give (S, B)."""
        mean, log_variance = self._parts(outputs)
        if targets.shape != mean.shape[1:]:
            raise PatchbayesError(
                f"HeteroscedasticGaussian: expected targets of shape {tuple(mean.shape[1:])}, half as many as the network's "
                f"outputs, got {tuple(targets.shape)}."
            )
        squares = (targets - mean).square() * (-log_variance).exp()
        return -0.5 * (math.log(2 * math.pi) + log_variance + squares).sum(-1)

    def predictive(self, outputs: Tensor) -> Mapping[str, Tensor]:
        """mean (D, B, T) and variance (D, B, T) of every draw."""
        mean, log_variance = self._parts(outputs)
        return {"mean": mean, "variance": log_variance.exp()}

    def _parts(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        if outputs.dim() != 3 or outputs.shape[-1] % 2:
            raise PatchbayesError(
                "HeteroscedasticGaussian: expected an output (B, 2 D), the means and then the log-variances, got "
                f"{tuple(outputs.shape[1:])}.\n  do       pass output=lambda pair: torch.cat(pair, -1) for a pair."
            )
        mean, log_variance = outputs.chunk(2, dim=-1)
        return mean, log_variance
