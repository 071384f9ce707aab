"""Gaussian dropout (Srivastava et al., 2014; Kingma et al., 2015): activations multiplied by N(1, alpha)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..draws.randomness import fold, normal_like
from ..errors import NotASite, PatchbayesError
from .method import Method
from .posterior import KL, Posterior, PriorTerms, Role, SiteDraw, is_bias, own_parameters

_LARGEST_RATE = 1e-3  # of a Poisson law whose terms are still summed: 1 / (2 alpha)


@dataclass(frozen=True)
class GaussianDropout(Method):
    """Multiply each activation before the layer by 1 + sqrt(alpha) eps, fresh for every example; alpha = rate / (1 - rate).

    The noise has the mean and variance of dropout with that rate, and stays on in prediction. With `learn_alpha` it is
    variational dropout with one alpha a layer: under the log-uniform prior on weights the KL depends on alpha alone,

        KL = number of weights * (E log|1 + sqrt(alpha) eps| - log(alpha) / 2) + constant.

    That prior has no precision: tau has no part in it, and biases are fixed, with rho. Deviation: Kingma et al. fit a cubic
    polynomial to the expectation, for alpha up to 1; here it is summed exactly, for any alpha.
    """

    rate: float
    learn_alpha: bool = False

    default_sites = "linear+conv"

    def __post_init__(self) -> None:
        known = isinstance(self.rate, int | float) and not isinstance(self.rate, bool)
        if not (known and 0 < self.rate < 1):
            raise PatchbayesError(
                f"GaussianDropout(rate={self.rate!r}): the rate of the dropout it stands for is above 0 and below 1."
            )
        if not isinstance(self.learn_alpha, bool):
            raise PatchbayesError(f"GaussianDropout(learn_alpha={self.learn_alpha!r}): expected True or False.")

    @property
    def label(self) -> str:
        return f"GaussianDropout({self.rate:g})"

    def posterior(self, module: nn.Module, generator: torch.Generator) -> "GaussianDropoutPosterior":
        if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
            raise NotASite("its attention layer reads the weights and never calls it, so no activation enters it")
        if isinstance(module, nn.Embedding):
            raise NotASite("its inputs are indices, not activations")
        return GaussianDropoutPosterior(self, module, ())


class GaussianDropoutPosterior(Posterior):
    """Noise before one layer, whose own parameters stay as they are."""

    method: GaussianDropout
    noise = "example"
    noise_source = "Gaussian noise on the activations of every example"
    num_components = 1

    def __init__(self, method: GaussianDropout, layer: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__(method, layer, names)
        like = next(iter(own_parameters(layer).values()))
        start = torch.tensor(math.log(method.rate / (1 - method.rate)), dtype=like.dtype, device=like.device)
        if method.learn_alpha:
            self.log_alpha = nn.Parameter(start, any(p.requires_grad for p in own_parameters(layer).values()))
        else:
            self.register_buffer("log_alpha", start, persistent=False)

    @property
    def kept(self) -> tuple[str, ...]:
        return tuple(own_parameters(self.layer))

    def start_(self, values: Mapping[str, Tensor], generator: torch.Generator) -> None:
        """Nothing to start: alpha is told, and learned from there."""

    def realize(self, d: SiteDraw) -> dict[str, Tensor]:
        return {}

    def mean(self) -> dict[str, Tensor]:
        return {}

    def component(self, number: int) -> dict[str, Tensor]:
        if number:
            raise PatchbayesError(
                f"component {number}: a site with Gaussian dropout has one set of weights, component 0."
            )
        return {}

    def apply_to(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], d: SiteDraw | None) -> Any:
        if d is None:
            return self.run(layer, args, kwargs)
        for place, value in [*enumerate(args), *kwargs.items()]:
            if isinstance(value, Tensor) and value.is_floating_point():
                noisy = value * (1 + (0.5 * self.log_alpha).exp().to(value) * self._noise(value, d))
                if isinstance(place, int):
                    return self.run(layer, (*args[:place], noisy, *args[place + 1 :]), kwargs)
                return self.run(layer, args, {**kwargs, str(place): noisy})
        raise PatchbayesError(
            f"GaussianDropout before a {type(layer).__name__}: it was given no floating-point tensor."
        )

    def _noise(self, activations: Tensor, d: SiteDraw) -> Tensor:
        """Standard normal, in the shape of the activations; where the draw numbers examples, dimension 0 counts them."""
        keys = fold(self.example_keys(d, activations.shape[0]) if activations.dim() else d["key"], self.stream)
        return normal_like(activations, keys)

    @torch.no_grad()
    def scale_spread_(self, factor: float) -> None:
        if not self.method.learn_alpha:
            super().scale_spread_(factor)
        self.log_alpha.add_(2 * math.log(factor) if factor > 0 else -1e3)

    def kl(self, prior: PriorTerms, d: SiteDraw | None = None) -> KL:
        if prior.entropy is not None:
            raise PatchbayesError(
                f'kl(entropy="{prior.entropy}") with GaussianDropout: its prior is improper and its biases are fixed.\n'
                "  do       entropy=None, or MeanField."
            )
        terms = []
        for name, parameter in own_parameters(self.layer).items():
            if is_bias(name):
                terms.append(prior.quadratic(name, parameter.square().sum(), parameter.numel()))
            else:
                terms.append(parameter.numel() * log_uniform_kl(self.log_alpha).to(parameter))
        return KL(torch.stack(terms).sum(), "exact")

    def roles(self) -> dict[str, Role]:
        return {name: "law" for name, _ in self.named_parameters()}


def log_uniform_kl(log_alpha: Tensor) -> Tensor:
    """KL(N(w, alpha w^2) || p), p(w) proportional to 1/|w|, up to a constant: E log|1 + sqrt(alpha) eps| - log(alpha) / 2.

    (1 + sqrt(alpha) eps)^2 / alpha is a noncentral chi-square variable, a Poisson mixture of central ones:

        E log|1 + sqrt(alpha) eps| = (log(2 alpha) + sum_j Poisson(j; 1 / (2 alpha)) digamma(j + 1/2)) / 2

    For alpha below 0.001 the series in alpha, -alpha/2 - 3/4 alpha^2 - 5/2 alpha^3, has more digits.
    """
    wide = log_alpha.double()
    alpha = wide.exp()
    series = -alpha / 2 - 0.75 * alpha**2 - 2.5 * alpha**3
    larger = alpha.clamp_min(_LARGEST_RATE)
    rate = 1 / (2 * larger)
    middle = float(rate.detach())
    if not math.isfinite(middle):
        raise PatchbayesError(
            f"GaussianDropout: its log alpha is {float(wide.detach())}: training has diverged.\n"
            "  do       a smaller learning rate, or load the last good checkpoint."
        )
    number = torch.arange(int(middle + 12 * math.sqrt(middle) + 40), dtype=torch.float64, device=wide.device)
    poisson = (number * rate.log() - rate - torch.lgamma(number + 1)).exp()
    summed = 0.5 * ((2 * larger).log() + (poisson * torch.digamma(number + 0.5)).sum())
    return torch.where(alpha < _LARGEST_RATE, series, summed) - 0.5 * wide
