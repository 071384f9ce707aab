"""MC dropout as practitioners know it: masks on the activations that enter a layer (Gal and Ghahramani, 2016)."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..errors import PatchbayesError
from ..layout import Drawn
from ..randomness import bernoulli_like, fold
from .mixture import _check_rate
from .posterior import Entropy, Method, Posterior, is_bias, own_parameters, quadratic


@dataclass(frozen=True)
class Dropout(Method):
    """Drop each activation before the layer with probability `rate`, a fresh mask for every example, inverted scaling.

    The mask stays on in prediction. rate=0.005 before every norm layer is the paper's baseline. In weight space a mask over
    the inputs of a linear layer removes columns of W: `Mixture(components=1, tie="unit", zero=True, probabilities=(1 - rate,
    rate))` is that form, with one mask for a whole batch and without the scaling (table 2).
    """

    rate: float

    def __post_init__(self) -> None:
        _check_rate("Dropout", self.rate)

    @property
    def label(self) -> str:
        return f"Dropout({self.rate:g})"

    def from_module(self, module: nn.Module, generator: torch.Generator) -> "DropoutPosterior":
        return DropoutPosterior(self, module)


class DropoutPosterior(Posterior):
    """Masks before one module, whose own parameters keep their shape."""

    def __init__(self, method: Dropout, module: nn.Module) -> None:
        super().__init__(module)
        self.method = method
        self.names = ()
        self.fixed_names = tuple(own_parameters(module))

    @property
    def unbounded(self) -> str | None:
        return "dropout masks of every example"

    def mask(self, activations: Tensor, drawn: Drawn) -> Tensor:
        """activations * mask / (1 - rate); dimension 0 counts examples when the draw was passed in."""
        keep = 1 - self.method.rate
        key = drawn.example_keys(activations.shape[0]) if drawn.explicit and activations.dim() else drawn.key
        return activations * bernoulli_like(activations, fold(key, self.stream), keep).div_(keep)

    def start(self, values: dict[str, Tensor], generator: torch.Generator, *, fresh: bool = True) -> dict[str, Tensor]:
        return {}

    def value(self, name: str, stored: Tensor, indices: Tensor, key: Tensor) -> Tensor:
        raise PatchbayesError("Dropout masks activations; it has no drawn weights to realize.")

    def mean(self, name: str, stored: Tensor) -> Tensor:
        return stored

    def component(self, name: str, stored: Tensor, number: int) -> Tensor:
        if number:
            raise PatchbayesError(f"component {number}: a dropout site keeps one set of weights, component 0.")
        return stored

    def kl(self, tau: Tensor | float, rho: Tensor | float, *, normalized: bool, entropy: Entropy | None) -> Tensor:
        """Eq. (2) with p_i = 1 - rate, the probability to keep, on weights, and 1 on biases."""
        if entropy is not None:
            raise PatchbayesError(
                f'kl(entropy="{entropy}") with Dropout: activation masks have no sigma; use entropy=None, or the weight-space '
                'form Mixture(components=1, tie="unit", zero=True, sigma=...).'
            )
        terms = []
        for name in self.fixed_names:
            parameter = self.stored(name)
            weight = 1.0 if is_bias(name) else 1 - self.method.rate
            precision = rho if is_bias(name) else tau
            square = weight * parameter.square().sum()
            terms.append(quadratic(precision, square, parameter.numel(), normalized=normalized))
        return torch.stack(terms).sum() if terms else torch.zeros(())

    @property
    def log10_outcomes(self) -> float:
        """2 to the number of input units, for each position and example (table 3 counts units only)."""
        module = self.module
        sizes = (getattr(module, name, None) for name in ("in_features", "in_channels", "num_features", "num_channels"))
        units = next((size for size in sizes if isinstance(size, int)), None)
        if units is None:
            units = max((p.shape[-1] for p in own_parameters(module).values() if p.dim()), default=1)
        return units * math.log10(2)
