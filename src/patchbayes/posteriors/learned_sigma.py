"""The mixture of Gaussians proper: Eq. (1) with a sigma > 0 for every component, learned."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import PatchbayesError
from .components import MixturePosterior
from .mixture import Mixture
from .posterior import KL, PriorTerms, Role, SiteDraw, root_mean_square


@dataclass(frozen=True)
class GaussianMixture(Mixture):
    """K Gaussians with means and deviations learned, and a categorical draw that picks among them (Eq. 1).

        W = sum_k 1[Z = k] (M_k + s_k eps),   eps ~ N(0, 1),   s_k = softplus(...)

    The KL has no closed form. It is estimated with a draw of the noise, without the paper's assumption that components do not
    overlap: cross entropy and the choice of k exactly, the entropy as -log q at M_k + s_k eps for every k. `kl(model,
    entropy="lower")` is the paper's bound (Eq. 7, the right way round). With tie="network" the sites do not have densities of
    their own, and the bound is used.

    scale   the deviation at the start, as a multiple of the parameter's root mean square.
    per     a deviation for each "component" of a parameter (K numbers), or for each "element" of each component.

    All other fields are those of `Mixture`; a fixed sigma, a component at zero and a draw for each example are not for it.
    """

    scale: float = 0.1
    per: Literal["component", "element"] = "component"

    start_fields = (*Mixture.start_fields, "scale")

    def __post_init__(self) -> None:
        super().__post_init__()
        known = isinstance(self.scale, int | float) and not isinstance(self.scale, bool)
        if not (known and math.isfinite(self.scale) and self.scale > 0):
            raise PatchbayesError(f"GaussianMixture(scale={self.scale!r}): expected a finite multiple above 0.")
        if self.per not in ("component", "element"):
            raise PatchbayesError(f'GaussianMixture(per={self.per!r}): expected "component" or "element".')
        for name in ("sigma", "zero", "per_example"):
            if getattr(self, name):
                raise PatchbayesError(
                    f"GaussianMixture({name}={getattr(self, name)!r}): every component has a deviation that is learned.\n"
                    f"  do       Mixture({name}=...) for one that is fixed, or leave {name} out."
                )

    @property
    def label(self) -> str:
        tie = "" if self.tie == "site" else f", {self.tie}"
        return f"GaussianMixture(K={self.components}{tie})"

    @property
    def random_at_start(self) -> bool:
        return True

    def posterior(self, module: nn.Module, generator: torch.Generator) -> "GaussianMixturePosterior":
        return GaussianMixturePosterior(self, module, generator)


class GaussianMixturePosterior(MixturePosterior):
    """The mixture over the parameters of one layer: `components` are the means, `before_softplus` the deviations."""

    method: GaussianMixture
    kl_draws = True

    def __init__(self, method: GaussianMixture, layer: nn.Module, generator: torch.Generator) -> None:
        super().__init__(method, layer, generator)
        self.noise, self.noise_source = "draw", "Gaussian noise, learned sigma"
        self.before_softplus = nn.ParameterDict()

    def start_(self, values: Mapping[str, Tensor], generator: torch.Generator) -> None:
        super().start_(values, generator)
        sizes = {name: self.stored(name)[0].detach() for name in self.names}
        for name in self.names:
            deviation = self.method.scale * (root_mean_square(name, sizes) or 1.0)
            components = self.components[name]
            shape = components.shape if self.method.per == "element" else (self.method.components,)
            start = torch.full(shape, inverse_softplus(deviation), dtype=components.dtype, device=components.device)
            if name in self.before_softplus:
                self.before_softplus[name].data.copy_(start)
            else:
                self.before_softplus[name] = nn.Parameter(start, components.requires_grad)

    def deviation(self, name: str) -> Tensor:
        """The standard deviation of every element of every component, (K, *shape)."""
        means, deviation = self.stored(name), F.softplus(self.before_softplus[name])
        if self.method.per == "component":
            deviation = deviation.reshape(-1, *[1] * (means.dim() - 1))
        return deviation.expand_as(means) if self.method.per == "component" else deviation.view(means.shape)

    def draw(self, z: Tensor, keys: Tensor) -> SiteDraw:
        noise = {f"noise.{name}": self.standard_normal(name, keys, self.stored(name)[0]) for name in self.names}
        return super().draw(z, keys) | noise

    def realize(self, d: SiteDraw) -> dict[str, Tensor]:
        values = super().realize(d)
        for name in self.names:
            deviation = self.select(name, d["z"], self.deviation(name))
            values[name] = torch.addcmul(values[name], deviation, d[f"noise.{name}"])
        return values

    @torch.no_grad()
    def scale_spread_(self, factor: float) -> None:
        super().scale_spread_(factor)
        for name in self.names:
            before = self.before_softplus[name]
            deviation = (factor * F.softplus(before)).clamp_min(torch.finfo(before.dtype).tiny)
            before.copy_(deviation + (-torch.expm1(-deviation)).log())

    def kl(self, prior: PriorTerms, d: SiteDraw | None = None) -> KL:
        """With all constants, whatever `normalized` says; exact for one component, a bound where `entropy` asks for it."""
        terms = []
        for name in self.names:
            means, deviation = self.stored(name), self.deviation(name)
            precision = prior.precision_like(means, name)
            p, size = self._weights(means), means[0].numel()
            second = p @ (means.square() + deviation.square()).flatten(1).sum(1)
            terms.append(0.5 * (precision * second - size * precision.log()))
            terms.append(-(p @ deviation.log().flatten(1).sum(1)) - 0.5 * size)  # as if components did not overlap
        total = torch.stack(terms).sum()
        if not self._places:
            return KL(total, "exact")
        if prior.entropy is not None or self.method.tie == "network":
            return KL(total, "bound")
        if d is None:
            raise PatchbayesError(f"{self.method.label}: its KL is estimated from a draw; call patchbayes.kl(model).")
        return KL(total + self._overlap(d), "monte_carlo")

    def _overlap(self, d: SiteDraw) -> Tensor:
        """What the bound leaves out, as an estimate: E[log q(w) - log N_k(w)], from -H(p) without overlap up to 0.

        Both logarithms are taken at the same point, so that the noise cancels where components lie apart.
        """
        total: Tensor | float = 0.0
        for name in self.names:
            means, deviation, noise = self.stored(name), self.deviation(name), d[f"noise.{name}"]
            from_k = (deviation * noise).unsqueeze(1) + means.unsqueeze(1) - means  # (K of the point, K, *shape)
            logs = -0.5 * (from_k / deviation).square() - deviation.log()
            own = -0.5 * noise.square() - deviation.log()
            logs = (logs - own.unsqueeze(1)).flatten(2)
            groups = self._groups_of(name, logs.device)
            empty = torch.zeros(*logs.shape[:2], self._num_groups, dtype=logs.dtype, device=logs.device)
            total = total + empty.index_add(2, groups, logs)
        assert isinstance(total, Tensor)
        p = self._weights(total)
        return p @ torch.logsumexp(total + p.log().reshape(1, -1, 1), dim=1).sum(1)

    def _groups_of(self, name: str, device: torch.device) -> Tensor:
        """The draw that each element of a parameter belongs to, (elements,)."""
        first, number = self._places[name]
        if number == 1:
            return torch.full((math.prod(self._shapes[name]),), first, device=device)
        return self._spread(name, torch.arange(first, first + number, device=device)).reshape(-1)

    def _weights(self, like: Tensor) -> Tensor:
        return self._law(like) if self.method.outcomes > 1 else torch.ones(1, dtype=like.dtype, device=like.device)

    def roles(self) -> dict[str, Role]:
        laws = {name: "law" for name, _ in self.named_parameters() if name.startswith("before_softplus.")}
        return super().roles() | laws  # type: ignore[return-value]


def inverse_softplus(value: float) -> float:
    """s with log(1 + exp(s)) = value > 0."""
    return value + math.log(-math.expm1(-value))
