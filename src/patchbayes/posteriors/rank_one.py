"""Rank-one factors on a layer's weights: small patches for large layers (Wen et al., 2020; Dusenberry et al., 2020)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from ..errors import NotASite, PatchbayesError
from ..layers import is_conv, is_linear
from .method import Method, constructor
from .posterior import Groups, Posterior, Role, SiteDraw


@dataclass(frozen=True)
class RankOne(Method):
    """K pairs of factors for a linear or convolution layer: W_k = W * (r_k s_k^T), K (out + in) numbers beside W itself.

    components   K.
    tie          "unit": every output and every input unit draws its own factor among its K; "site": the layer draws a pair;
                 "network": all layers with this tie draw the same number (`BatchEnsemble`).
    jitter       how far the factors start from 1, with deviations that average to 0 over the components.

    The bias is not random.
    """

    components: int = 5
    tie: Literal["unit", "site", "network"] = "unit"
    jitter: float = 0.1

    default_sites = "linear+conv"
    start_fields = ("jitter",)

    def __post_init__(self) -> None:
        check_components("RankOne", self.components)
        check_jitter("RankOne", self.jitter)
        if self.tie not in ("unit", "site", "network"):
            raise PatchbayesError(f'RankOne(tie={self.tie!r}): expected "unit", "site" or "network".')

    @property
    def label(self) -> str:
        if self.tie == "network":
            return f"BatchEnsemble(K={self.components})"
        return f"RankOne({self.components}, {self.tie})"

    def posterior(self, module: nn.Module, generator: torch.Generator) -> "RankOnePosterior":
        return RankOnePosterior(self, module, weight_of("RankOne", module))


@constructor
def BatchEnsemble(components: int = 5, *, jitter: float = 0.1) -> RankOne:
    """BatchEnsemble (Wen et al., 2020): `RankOne` with one draw for the whole network, which picks the member everywhere.

    K networks that share all weights but for a factor of every input and output unit. Train all members in a step:
    `forward_draws(model, inputs, Draws.enumerate(model))`. Biases are shared, unlike in the original.
    """
    return RankOne(components, "network", jitter)


class RankOnePosterior(Posterior):
    """The factors of one layer, whose weight stays where it is: `outputs` are the r_k, (K, out), `inputs` the s_k, (K, in)."""

    method: RankOne

    def __init__(self, method: RankOne, layer: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__(method, layer, names)
        self.num_components = 1 if method.tie == "unit" else method.components
        (self._name,) = names
        shape = self._shapes[self._name]
        self._sizes = {"outputs": shape[0], "inputs": shape[1]}
        self.outputs: nn.Parameter | None
        self.inputs: nn.Parameter | None
        for side in self._sizes:
            self.register_parameter(side, None)

    def groups(self) -> Groups | None:
        if self.method.components == 1:
            return None
        if self.method.tie == "network":
            return Groups(1, self.method.components, "network")
        return Groups(sum(self._sizes.values()) if self.method.tie == "unit" else 1, self.method.components)

    def start_(self, values: Mapping[str, Tensor], generator: torch.Generator) -> None:
        like, learned = values[self._name], self.layer._parameters[self._name].requires_grad
        for side, size in self._sizes.items():
            noise = centered_noise((self.method.components, size), generator)
            factors = 1 + self.method.jitter * noise.to(like)
            known = getattr(self, side)
            if known is None:
                setattr(self, side, nn.Parameter(factors, requires_grad=learned))
            else:
                known.data.copy_(factors)

    def realize(self, d: SiteDraw) -> dict[str, Tensor]:
        z = d["z"] if self.groups() is not None else torch.zeros(1, dtype=torch.int64)
        if self.method.tie == "unit" and self.method.components > 1:
            first = self._sizes["outputs"]
            r, s = (_own_choice(f, part) for f, part in ((self._r, z[..., :first]), (self._s, z[..., first:])))
        else:
            which = z[..., :1].to(self._r.device)
            r, s = self._r.index_select(0, which)[0], self._s.index_select(0, which)[0]
        return {self._name: self._weight * self._product(r, s)}

    def mean(self) -> dict[str, Tensor]:
        if self.method.tie == "unit":
            return {self._name: self._weight * self._product(self._r.mean(0), self._s.mean(0))}
        products = sum(self._product(r, s) for r, s in zip(self._r, self._s, strict=True))
        return {self._name: self._weight * (products / len(self._r))}

    def component(self, number: int) -> dict[str, Tensor]:
        if not 0 <= number < self.num_components:
            raise PatchbayesError(f"component {number}: this site has the components 0 to {self.num_components - 1}.")
        if self.method.tie == "unit":
            return self.mean()
        return {self._name: self._weight * self._product(self._r[number], self._s[number])}

    @torch.no_grad()
    def scale_spread_(self, factor: float) -> None:
        """Deviations of the factors from their mean: those of their products follow up to terms of second order."""
        for factors in (self._r, self._s):
            mean = factors.mean(0, keepdim=True)
            factors.copy_(mean + factor * (factors - mean))

    def expected_squares(self) -> dict[str, Tensor]:
        squares = self._weight.square().flatten(2).sum(2) if self._weight.dim() > 2 else self._weight.square()
        r, s = self._r.square(), self._s.square()
        if self.method.tie == "unit":
            return {self._name: r.mean(0) @ squares @ s.mean(0)}
        return {self._name: torch.stack([a @ squares @ b for a, b in zip(r, s, strict=True)]).mean()}

    def roles(self) -> dict[str, Role]:
        return {"outputs": "law", "inputs": "law"}

    @property
    def _weight(self) -> Tensor:
        weight = self.layer._parameters[self._name]
        assert isinstance(weight, Tensor)
        return weight

    @property
    def _r(self) -> Tensor:
        assert self.outputs is not None
        return self.outputs

    @property
    def _s(self) -> Tensor:
        assert self.inputs is not None
        return self.inputs

    def _product(self, r: Tensor, s: Tensor) -> Tensor:
        trailing = [1] * (len(self._shapes[self._name]) - 2)
        return r.reshape(-1, 1, *trailing) * s.reshape(1, -1, *trailing)


def _own_choice(factors: Tensor, z: Tensor) -> Tensor:
    """factors (K, n), z (n,): for each unit the factor that it drew, (n,)."""
    return factors.gather(0, z.to(factors.device).unsqueeze(0)).squeeze(0)


def weight_of(method: str, module: nn.Module) -> tuple[str, ...]:
    """The name of the one weight that a small patch makes random."""
    if not (is_linear(module) or (is_conv(module) and not module.transposed)):
        raise NotASite(f"{method} is for linear and convolution layers")
    return ("weight",)


def check_components(method: str, components: object) -> None:
    if isinstance(components, bool) or not isinstance(components, int) or components < 1:
        raise PatchbayesError(f"{method}(components={components!r}): expected a whole number of at least 1.")


def check_jitter(method: str, jitter: object) -> None:
    known = isinstance(jitter, int | float) and not isinstance(jitter, bool)
    if not (known and math.isfinite(jitter) and jitter >= 0):  # type: ignore[arg-type, operator]
        raise PatchbayesError(f"{method}(jitter={jitter!r}): expected a finite number of at least 0.")


def centered_noise(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Gaussian noise (K, ...) that averages to 0 over the K, with a root mean square of 1; zero where K is 1."""
    noise = torch.randn(shape, generator=generator)
    noise = noise - noise.mean(0)
    size = noise.square().mean().sqrt()
    return noise / size if shape[0] > 1 else torch.zeros(shape)
