"""Mean-field Gaussian posterior with learned deviations (Graves, 2011; Blundell et al., 2015): the usual rival."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import PatchbayesError
from ..randomness import fold, normal_like
from .posterior import Entropy, Method, Posterior, is_bias, own_parameters, root_mean_square


@dataclass(frozen=True)
class MeanField(Method):
    """Independent Gaussians, w = mean + softplus(s) * eps, with mean and s learned: twice the parameters.

    scale   initial deviation, as a multiple of the parameter's root mean square.
    """

    scale: float = 0.1

    def __post_init__(self) -> None:
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise PatchbayesError(
                f"MeanField(scale={self.scale!r}): the initial deviation is a finite multiple above 0."
            )

    @property
    def label(self) -> str:
        return "MeanField"

    def from_module(self, module: nn.Module, generator: torch.Generator) -> "MeanFieldPosterior":
        return MeanFieldPosterior(self, module)


class MeanFieldPosterior(Posterior):
    """The Gaussian over the parameters of one module; stored tensors are (2, *shape): mean and s."""

    def __init__(self, method: MeanField, module: nn.Module) -> None:
        super().__init__(module)
        self.method = method
        self.names = tuple(own_parameters(module))
        self.fixed_names = ()

    @property
    def unbounded(self) -> str | None:
        return "Gaussian noise, learned sigma"

    def start(self, values: dict[str, Tensor], generator: torch.Generator, *, fresh: bool = True) -> dict[str, Tensor]:
        stored = {}
        for name in self.names:
            deviation = self.method.scale * (root_mean_square(name, values) or 1.0)
            before_softplus = deviation + math.log(-math.expm1(-deviation))
            mean = values[name].detach()
            stored[name] = torch.stack([mean, torch.full_like(mean, before_softplus)])
        return stored

    def value(self, name: str, stored: Tensor, indices: Tensor, key: Tensor) -> Tensor:
        mean, before_softplus = stored.unbind(0)
        noise = normal_like(mean, fold(key, self.stream + self.names.index(name)))
        return torch.addcmul(mean, F.softplus(before_softplus), noise)

    def mean(self, name: str, stored: Tensor) -> Tensor:
        return stored[0]

    def component(self, name: str, stored: Tensor, number: int) -> Tensor:
        if number:
            raise PatchbayesError(f"component {number}: a mean-field site has only its mean, component 0.")
        return stored[0]

    def kl(self, tau: Tensor | float, rho: Tensor | float, *, normalized: bool, entropy: Entropy | None) -> Tensor:
        """Exact, whatever `normalized` and `entropy` say: sum of 1/2 (tau (m^2 + s^2) - 1 - log(tau s^2))."""
        terms = []
        for name in self.names:
            mean, before_softplus = self.stored(name).unbind(0)
            deviation = F.softplus(before_softplus)
            precision = rho if is_bias(name) else tau
            if not isinstance(precision, Tensor):
                precision = torch.tensor(precision, dtype=mean.dtype, device=mean.device)
            square = mean.square().sum() + deviation.square().sum()
            log_term = mean.numel() * (1 + precision.log()) + 2 * deviation.log().sum()
            terms.append(0.5 * (precision * square - log_term))
        return torch.stack(terms).sum()

    @property
    def log10_outcomes(self) -> float:
        return math.inf
