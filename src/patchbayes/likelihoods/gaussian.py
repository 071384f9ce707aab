"""A mean with Gaussian noise of one size."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ..errors import PatchbayesError
from .likelihood import Likelihood, wrong_shape


class Gaussian(Likelihood):
    """The output is the mean of y, with independent Gaussian noise of precision tau_output (appendix B).

    precision  one number, or one for each of the D outputs.
    learn      makes the logarithm of the precision a parameter, to be learned by maximizing the ELBO (appendix C.1).
    """

    offers = "RegressionPrediction"

    def __init__(self, precision: float | Sequence[float] = 1.0, learn: bool = False) -> None:
        super().__init__()
        try:
            tau = torch.as_tensor(precision, dtype=torch.float64)
        except (TypeError, ValueError, RuntimeError):
            tau = torch.tensor(math.nan)
        if tau.dim() > 1 or tau.numel() == 0 or not bool(((tau > 0) & tau.isfinite()).all()):
            raise PatchbayesError(
                f"Gaussian(precision={precision!r}): expected a finite number above 0, or one for each output."
            )
        self.learn = bool(learn)
        self.log_precision = nn.Parameter(tau.detach().log(), requires_grad=self.learn)

    @property
    def precision(self) -> Tensor:
        """tau_output, () or (D,)."""
        return self.log_precision.exp()

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """log N(y | f, 1/tau) of every example, summed over the D targets: (S, B, D), (B, D) give (S, B)."""
        if targets.shape != outputs.shape[1:]:
            raise wrong_shape("Gaussian", outputs, targets)
        self._check_outputs(outputs)
        precision = self.precision.to(outputs)
        density = 0.5 * (precision.log() - math.log(2 * math.pi) - precision * (outputs - targets).square())
        return density.flatten(2).sum(-1) if outputs.dim() > 2 else density

    def predictive(self, outputs: Tensor) -> Mapping[str, Tensor]:
        """mean (D, B, T) and variance (D, B, T), the same in every draw."""
        self._check_outputs(outputs)
        variance = (-self.log_precision.detach()).exp().to(outputs)
        return {"mean": outputs, "variance": variance.expand_as(outputs)}

    def _check_outputs(self, outputs: Tensor) -> None:
        if self.log_precision.dim() and outputs.shape[2:] != self.log_precision.shape:
            raise PatchbayesError(
                f"Gaussian: expected an output (B, {len(self.log_precision)}), for it has {len(self.log_precision)} "
                f"precisions, got {tuple(outputs.shape[1:])}."
            )
