"""MC dropout as practitioners know it: masks on the activations that enter a layer (Gal and Ghahramani, 2016)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..draws.randomness import bernoulli_like, coarse_bernoulli_like, fold
from ..errors import NotASite, PatchbayesError
from ..layers import is_conv
from .method import Method
from .mixture import check_rate
from .posterior import KL, Posterior, PriorTerms, Role, SiteDraw, is_bias, own_parameters


@dataclass(frozen=True)
class Dropout(Method):
    """Drop each activation before the layer with probability `rate`, a fresh mask for every example, inverted scaling.

    rate=0.005 before every norm layer is the paper's baseline. In weight space a mask over the inputs of a linear layer
    removes columns of W: `Mixture(components=1, tie="unit", zero=True, probabilities=(1 - rate, rate))` is that form, with one
    mask for a whole batch and without the scaling (table 2).

    tie       what shares one mask: nothing ("activation"), or all positions of an input "unit": a whole channel of a
              convolution, a feature of all tokens. A mask for each unit costs next to no time in training.
    predict   whether masks stay on in prediction (MC dropout). False is ordinary dropout: noise in training mode alone, with
              masks that are made faster, from fewer random bits.
    learn_rate  learn the rate of every layer, from `rate` on. `kl` then holds log 2 - H(rate) for each input unit, the
              divergence from masks of a fair coin, and the score function gives the likelihood's gradient: train with
              `forward_draws`, of two draws or more. (Gal, Hron and Kendall, 2017, relax the masks instead, which is biased.)
    """

    rate: float
    tie: Literal["activation", "unit"] = "activation"
    predict: bool = True
    learn_rate: bool = False

    default_sites = "norm"

    def __post_init__(self) -> None:
        check_rate("Dropout", self.rate)
        if self.tie not in ("activation", "unit"):
            raise PatchbayesError(f'Dropout(tie={self.tie!r}): a mask is for each "activation" or "unit".')
        if not isinstance(self.predict, bool):
            raise PatchbayesError(f"Dropout(predict={self.predict!r}): expected True or False.")
        if not isinstance(self.learn_rate, bool) or (self.learn_rate and self.rate == 0):
            raise PatchbayesError(
                f"Dropout({self.rate!r}, learn_rate={self.learn_rate!r}): expected True or False, and a rate above 0 to learn."
            )

    @property
    def label(self) -> str:
        words = [f"{self.rate:g}", *(["units"] if self.tie == "unit" else [])]
        return f"Dropout({', '.join([*words, *([] if self.predict else ['training only'])])})"

    @property
    def random_at_start(self) -> bool:
        return self.predict

    def posterior(self, module: nn.Module, generator: torch.Generator) -> "DropoutPosterior":
        if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
            raise NotASite(
                "its attention layer reads the weights and never calls it, so no activation enters it to be dropped"
            )
        return DropoutPosterior(self, module)


class DropoutPosterior(Posterior):
    """Masks before one layer, whose own parameters stay as they are."""

    method: Dropout
    num_components = 1

    def __init__(self, method: Dropout, layer: nn.Module) -> None:
        super().__init__(method, layer, ())
        if method.predict:
            self.noise, self.noise_source = "example", "dropout masks of every example"
        self.learns_law = method.learn_rate
        if method.learn_rate:
            own = own_parameters(layer).values()
            start = torch.tensor(math.log(method.rate / (1 - method.rate)))
            self.logit = nn.Parameter(start.to(next(iter(own))), any(p.requires_grad for p in own))

    @property
    def kept(self) -> tuple[str, ...]:
        return tuple(own_parameters(self.layer))

    def start_(self, values: Mapping[str, Tensor], generator: torch.Generator) -> None:
        """Nothing to start: masks have no parameters."""

    def draw(self, z: Tensor, keys: Tensor) -> SiteDraw:
        return {"z": z, "key": keys}

    def realize(self, d: SiteDraw) -> dict[str, Tensor]:
        return {}

    def mean(self) -> dict[str, Tensor]:
        return {}

    def component(self, number: int) -> dict[str, Tensor]:
        if number:
            raise PatchbayesError(f"component {number}: a dropout site has one set of weights, component 0.")
        return {}

    def apply_to(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], d: SiteDraw | None) -> Any:
        if d is None or not (self.method.predict or layer.training):
            return self.run(layer, args, kwargs)
        for place, value in [*enumerate(args), *kwargs.items()]:
            if isinstance(value, Tensor) and value.is_floating_point():
                masked = self.mask(value, d)
                if isinstance(place, int):
                    return self.run(layer, (*args[:place], masked, *args[place + 1 :]), kwargs)
                return self.run(layer, args, {**kwargs, str(place): masked})
        raise PatchbayesError(f"Dropout before a {type(layer).__name__}: it was given no floating-point tensor.")

    def mask(self, activations: Tensor, d: SiteDraw) -> Tensor:
        """activations * mask / (1 - rate); where the draw numbers examples, dimension 0 counts them."""
        key = self.example_keys(d, activations.shape[0]) if activations.dim() else d["key"]
        masked = activations if self.method.tie == "activation" else self._one_for_each_unit(activations)
        if not self.learns_law:
            keep = 1 - self.method.rate
            if not self.method.predict:
                return activations * coarse_bernoulli_like(masked, fold(key, self.stream), keep)
            return activations * bernoulli_like(masked, fold(key, self.stream), keep).div_(keep)
        kept = bernoulli_like(masked, fold(key, self.stream), torch.sigmoid(-self.logit.detach().double()))
        number = kept.double().flatten(min(1, kept.dim())).sum(-1)
        size = kept.numel() / max(number.numel(), 1)
        log_keep, log_drop = (F.logsigmoid(sign * self.logit.double()) for sign in (-1, 1))
        d["log_prob"] = number * log_keep + (size - number) * log_drop
        return activations * kept / torch.sigmoid(-self.logit).to(activations)

    def _one_for_each_unit(self, activations: Tensor) -> Tensor:
        """The first position of every unit: sizes of 1 but for examples and units."""
        layer, last = self.layer, activations.dim() - 1
        if is_conv(layer):
            unit = last - len(layer.kernel_size)
        else:  # norms over channels have them second, all other layers take their features last
            unit = min(1, last) if isinstance(layer, (nn.modules.batchnorm._NormBase, nn.GroupNorm)) else last
        place = tuple(slice(None) if axis in (0, unit) else slice(1) for axis in range(activations.dim()))
        return activations.detach()[place]

    def scale_spread_(self, factor: float) -> None:
        """Masks have no scale; those that are off in prediction have no spread there."""
        if self.method.predict:
            super().scale_spread_(factor)

    def kl(self, prior: PriorTerms, d: SiteDraw | None = None) -> KL:
        """Eq. (2) with p_i = 1 - rate, the probability to keep, on weights, and 1 on biases; the law of a learned rate."""
        if prior.entropy is not None:
            raise PatchbayesError(
                f'kl(entropy="{prior.entropy}") with Dropout: activation masks have no sigma; use entropy=None, or the '
                'weight-space form Mixture(components=1, tie="unit", zero=True, sigma=...).'
            )
        terms = []
        keep = torch.sigmoid(-self.logit) if self.learns_law else 1 - self.method.rate
        for name, parameter in own_parameters(self.layer).items():
            weight = 1.0 if is_bias(name) else keep
            square = weight * parameter.square().sum()
            terms.append(prior.quadratic(name, square, parameter.numel()))
        if self.learns_law:
            rate = torch.sigmoid(self.logit)
            entropy_of_mask = torch.special.entr(rate) + torch.special.entr(1 - rate)
            terms.append(self._num_units() * (math.log(2) - entropy_of_mask))
        return KL(torch.stack(terms).sum() if terms else torch.zeros(()), "exact")

    def roles(self) -> dict[str, Role]:
        return {name: "law" for name, _ in self.named_parameters()}

    def upgrade(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {}

    @property
    def log10_outcomes(self) -> float:
        """2 to the number of input units, for each position and example (table 3 counts units only)."""
        return self._num_units() * math.log10(2) if self.method.predict else 0.0

    def _num_units(self) -> int:
        layer = self.layer
        sizes = (getattr(layer, name, None) for name in ("in_features", "in_channels", "num_features", "num_channels"))
        units = next((size for size in sizes if isinstance(size, int)), None)
        if units is None:
            units = max((p.shape[-1] for p in own_parameters(layer).values() if p.dim()), default=1)
        return units
