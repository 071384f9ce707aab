"""Multiplicative normalizing flows (Louizos and Welling, 2017; table 1): a Gaussian whose means a flow multiplies."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..draws.randomness import fold, normal_like
from ..errors import PatchbayesError
from .coupling import CouplingFlow, FlowLaw, check_flow, check_vector
from .flow import factor_names
from .learned_sigma import inverse_softplus
from .method import Method
from .posterior import KL, Posterior, PriorTerms, Role, SiteDraw, root_mean_square
from .units import num_units, spread, unit_axis


@dataclass(frozen=True)
class MNF(Method):
    """Gaussian weights around M diag(v), where v, a factor for each input unit, comes from a flow.

        W = M diag(v) + s eps,   v = T(center + s_v eps_v),   bias Gaussian

    q(W) is an infinite mixture without a density in closed form. Its KL is bounded through a model r(v | W) of the way back,
    another flow T_r with a Gaussian whose moments depend on W, which is learned with the rest:

        KL(q(W) || p(W)) <= E[ KL(q(W | v) || p(W)) + log q(v) - log r(v | W) ]
        r: T_r(v) ~ N(b_1 h, exp(b_2 h)),   h = mean tanh(c' W)

    estimated from a draw. For linear, convolution and embedding layers.

    layers, hidden   of each of the two flows. scale: deviations at the start, of W as a multiple of its root mean square.
    """

    layers: int = 2
    hidden: int = 50
    scale: float = 0.1

    default_sites = "linear+conv"
    start_fields = ("scale",)

    def __post_init__(self) -> None:
        check_flow("MNF", self.layers, self.hidden, self.scale)

    @property
    def label(self) -> str:
        return f"MNF({self.layers} layers of {self.hidden})"

    def posterior(self, module: nn.Module, generator: torch.Generator) -> "MNFPosterior":
        names = factor_names(module)
        bias = module._parameters.get("bias")
        weight = module._parameters["weight"]
        assert weight is not None
        size = num_units(module, "weight", tuple(weight.shape))
        check_vector(size)
        return MNFPosterior(self, module, names if bias is None else (*names, "bias"))


class MNFPosterior(Posterior):
    """The law of one layer: its own values are M and the mean of the bias."""

    method: MNF
    noise = "draw"
    noise_source = "Gaussian noise through a flow"
    num_components = 1
    kl_draws = True

    def __init__(self, method: MNF, layer: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__(method, layer, names)
        like = layer._parameters["weight"]
        assert like is not None
        size = num_units(layer, "weight", tuple(like.shape))
        self.factors = FlowLaw(size, method.layers, method.hidden, like)
        self.back = CouplingFlow(size, method.layers, method.hidden, like)
        self.center = nn.Parameter(torch.ones(size, dtype=like.dtype, device=like.device))
        self.to_back = nn.Parameter(torch.zeros(3, size, dtype=like.dtype, device=like.device))  # c, b_1, b_2
        self.before_softplus = nn.ParameterDict()
        self.requires_grad_(like.requires_grad)

    def start_(self, values: Mapping[str, Tensor], generator: torch.Generator) -> None:
        scale = self.method.scale
        self.center.data.fill_(1.0)
        self.factors.start_(torch.full_like(self.center, scale), generator)
        self.back.start_(generator)
        noise = torch.randn(self.to_back.shape, generator=generator) * 0.1
        self.to_back.data.copy_(noise.to(self.to_back))
        for name in self.names:
            deviation = scale * (root_mean_square(name, values) or 1.0)
            self.add_(self.before_softplus, name, torch.full_like(values[name], inverse_softplus(deviation)))

    def draw(self, z: Tensor, keys: Tensor) -> SiteDraw:
        noise = {name: self.standard_normal(name, keys, self.before_softplus[name]) for name in self.names}
        streams = fold(keys, self.stream + len(self.names))
        if streams.dim() == 0:
            return noise | {"factors": normal_like(self.center, streams)}
        return noise | {"factors": torch.stack([normal_like(self.center, key) for key in streams.unbind(0)])}

    def realize(self, d: SiteDraw) -> dict[str, Tensor]:
        return self._drawn(d, self.factors(self.center, d["factors"])[0])

    def _drawn(self, d: SiteDraw, factors: Tensor) -> dict[str, Tensor]:
        means = self._means(factors)
        return {name: torch.addcmul(means[name], self.deviation(name), d[name]) for name in self.names}

    def _means(self, factors: Tensor) -> dict[str, Tensor]:
        """The means of weight and bias given the factors (D,)."""
        means = {name: self.layer._parameters[name] for name in self.names}
        return means | {"weight": means["weight"] * spread(self.layer, "weight", self._shapes["weight"], factors)}

    def deviation(self, name: str) -> Tensor:
        """The standard deviation of every element of a parameter."""
        return F.softplus(self.before_softplus[name])

    def mean(self) -> dict[str, Tensor]:
        return self._means(self.factors.mean(self.center))

    def component(self, number: int) -> dict[str, Tensor]:
        if number:
            raise PatchbayesError(f"component {number}: a flow has only what it makes of no noise, component 0.")
        return self._means(self.factors.at_center(self.center))

    @torch.no_grad()
    def scale_spread_(self, factor: float) -> None:
        self.factors.scale_(self.center, factor)
        for before in self.before_softplus.values():
            deviation = (factor * F.softplus(before)).clamp_min(torch.finfo(before.dtype).tiny)
            before.copy_(deviation + (-torch.expm1(-deviation)).log())

    def kl(self, prior: PriorTerms, d: SiteDraw | None = None) -> KL:
        """An estimate of the bound, with all constants, whatever `normalized` and `entropy` say."""
        if d is None:
            raise PatchbayesError(f"{self.method.label}: its KL is estimated from a draw; call patchbayes.kl(model).")
        factors, log_q = self.factors(self.center, d["factors"])
        total = log_q - self._log_back(factors, self._drawn(d, factors)["weight"])
        for name, mean in self._means(factors).items():
            deviation = self.deviation(name)
            precision = prior.precision_like(mean, name)
            square = mean.square().sum() + deviation.square().sum()
            logs = mean.numel() * (1 + precision.log()) + 2 * deviation.log().sum()
            total = total + 0.5 * (precision * square - logs)
        return KL(total, "monte_carlo")

    def _log_back(self, factors: Tensor, weight: Tensor) -> Tensor:
        """log r(v | W) + D/2 log(2 pi), ()."""
        c, for_mean, for_variance = self.to_back
        axis = unit_axis(self.layer, "weight", self._shapes["weight"]) or 0
        seen = (spread(self.layer, "weight", self._shapes["weight"], c) * weight).sum(axis).tanh().mean()
        value, log_determinant = self.back(factors)
        log_variance = for_variance * seen
        squares = (value - for_mean * seen).square() * (-log_variance).exp()
        return log_determinant - 0.5 * (squares + log_variance).sum()

    def roles(self) -> dict[str, Role]:
        return {name: "law" for name, _ in self.named_parameters()}
