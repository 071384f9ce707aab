"""Element-wise mixtures that store one number for each parameter: the layer's own values, moved by steps of one size."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..errors import PatchbayesError
from .local import Form, LocalForm, check_form, check_local
from .method import Method
from .posterior import (
    Groups,
    Posterior,
    Role,
    SiteDraw,
    own_parameters,
    root_mean_square,
)


@dataclass(frozen=True)
class Spread(Method):
    """Every element of a layer draws one of K steps around its value: w = M + s * q_z, z uniform over 1..K.

    The q_k are the middles of K equally likely slices of a standard normal law, scaled to mean 0 and variance 1. That is ECMP
    with the components M + s q_k, which need not be stored: beside the layer's own values there is only s, one number for each
    parameter. Made for networks that are trained already, where `calibrate_` finds the sizes.

    components   K, at least 2. With five, stratified draws are balanced in every block of five.
    size         s at the start, as a multiple of the parameter's root mean square.
    form         "weights", or "local": the outputs of linear layers are drawn for every example (`posteriors.local`).
    """

    components: int = 5
    size: float = 0.1
    form: Form = "weights"

    default_sites = "all"
    start_fields = ("size",)

    def __post_init__(self) -> None:
        if isinstance(self.components, bool) or not isinstance(self.components, int) or self.components < 2:
            raise PatchbayesError(f"Spread(components={self.components!r}): expected a whole number of at least 2.")
        known = isinstance(self.size, int | float) and not isinstance(self.size, bool)
        if not (known and math.isfinite(self.size) and self.size >= 0):
            raise PatchbayesError(f"Spread(size={self.size!r}): expected a finite number of at least 0.")
        check_form("Spread", self.form)

    @property
    def label(self) -> str:
        return f"Spread({self.components}{', local' if self.form == 'local' else ''})"

    @property
    def random_at_start(self) -> bool:
        return self.size > 0

    def without_spread(self) -> "Spread":
        return replace(self, size=0.0)

    def posterior(self, module: nn.Module, generator: torch.Generator) -> "SpreadPosterior":
        if self.form == "weights":
            return SpreadPosterior(self, module, tuple(own_parameters(module)))
        check_local(module)
        return LocalSpreadPosterior(self, module, tuple(own_parameters(module)))


class SpreadPosterior(Posterior):
    """The steps around the parameters of one layer, which stay where they are; `sizes[name]`, (), are the s."""

    method: Spread
    num_components = 1

    def __init__(self, method: Spread, layer: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__(method, layer, names)
        self.sizes = nn.ParameterDict()

    def groups(self) -> Groups | None:
        return Groups(sum(math.prod(shape) for shape in self._shapes.values()), self.method.components)

    def start_(self, values: Mapping[str, Tensor], generator: torch.Generator) -> None:
        for name in self.names:
            size = self.method.size * root_mean_square(name, values)
            self.add_(self.sizes, name, torch.tensor(size, dtype=values[name].dtype, device=values[name].device))

    def realize(self, d: SiteDraw) -> dict[str, Tensor]:
        first, values = 0, {}
        for name, mean in self.mean().items():
            last = first + math.prod(self._shapes[name])
            which = d["z"][..., first:last].to(mean.device).reshape(self._shapes[name])
            values[name] = mean + self.sizes[name] * steps(self.method.components).to(mean)[which]
            first = last
        return values

    def mean(self) -> dict[str, Tensor]:
        return {name: self.layer._parameters[name] for name in self.names}

    def variance(self) -> dict[str, Tensor]:
        return {name: self.sizes[name].square().expand(self._shapes[name]) for name in self.names}

    def component(self, number: int) -> dict[str, Tensor]:
        if number:
            raise PatchbayesError(
                f"component {number}: a site with {self.method.label} has only its mean, component 0."
            )
        return self.mean()

    @torch.no_grad()
    def scale_spread_(self, factor: float) -> None:
        for size in self.sizes.values():
            size.mul_(factor)

    def expected_squares(self) -> dict[str, Tensor]:
        """m^2 + s^2 for the components M + s q_k, since the q_k have mean 0 and variance 1."""
        return {
            name: mean.square().sum() + mean.numel() * self.sizes[name].square() for name, mean in self.mean().items()
        }

    def roles(self) -> dict[str, Role]:
        return {name: "law" for name, _ in self.named_parameters()}


class LocalSpreadPosterior(LocalForm, SpreadPosterior):
    """The same law, with outputs drawn in the place of weights."""


def steps(number: int) -> Tensor:
    """The q_k, (K,) float64: mean 0, variance 1, as the values of a standard normal law at (k - 1/2) / K are spaced."""
    levels = torch.special.ndtri((torch.arange(number, dtype=torch.float64) + 0.5) / number)
    levels = (levels - levels.flip(0)) / 2  # symmetric to the last digit
    return levels / levels.square().mean().sqrt()
