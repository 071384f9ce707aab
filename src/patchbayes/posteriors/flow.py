"""Normalizing flows on patches: the paper's second suggestion for future work."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..errors import NotASite, PatchbayesError
from ..layers import is_conv, is_norm
from .coupling import FlowLaw, check_flow, check_vector
from .method import Method
from .posterior import KL, Posterior, PriorTerms, Role, SiteDraw, own_parameters, quadratic, root_mean_square
from .units import num_units, spread


@dataclass(frozen=True)
class Flow(Method):
    """A normalizing flow over the vectors of a layer.

        norm layers                 v = all of weight and bias,   prior N(0, 1/tau), N(0, 1/rho)
        linear, conv, embedding     W diag(v), v = a factor for each input unit,   prior of v N(1, 1/tau), of W N(0, 1/tau)

    v is Gaussian noise with learned deviations around the layer's own values (around 1 for factors), sent through `layers`
    coupling layers with `hidden` units each, which start as the identity. The KL is estimated from a draw, with the
    logarithm of the determinant; what the noise itself contributes is taken at its mean.

    scale   the deviation at the start: for norm layers as a multiple of the parameter's root mean square.
    """

    layers: int = 2
    hidden: int = 16
    scale: float = 0.1

    start_fields = ("scale",)

    def __post_init__(self) -> None:
        check_flow("Flow", self.layers, self.hidden, self.scale)

    @property
    def label(self) -> str:
        return f"Flow({self.layers} layers of {self.hidden})"

    def posterior(self, module: nn.Module, generator: torch.Generator) -> "FlowPosterior":
        if is_norm(module):
            names = tuple(own_parameters(module))
        else:
            names = factor_names(module)
        size = _size(module, names)
        check_vector(size)
        return FlowPosterior(self, module, names)


class FlowPosterior(Posterior):
    """The flow over one layer: the layer's own values are the center of norm parameters; factors have a center of their own."""

    method: Flow
    noise = "draw"
    noise_source = "Gaussian noise through a flow"
    num_components = 1
    kl_draws = True

    def __init__(self, method: Flow, layer: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__(method, layer, names)
        self.factors = not is_norm(layer)
        like = layer._parameters[names[0]]
        assert like is not None
        size = _size(layer, names)
        self.law = FlowLaw(size, method.layers, method.hidden, like)
        if self.factors:
            self.center = nn.Parameter(torch.ones(size, dtype=like.dtype, device=like.device))
        self.requires_grad_(any(layer._parameters[name].requires_grad for name in names))  # type: ignore[union-attr]

    def start_(self, values: Mapping[str, Tensor], generator: torch.Generator) -> None:
        like = self.law.before_softplus
        if self.factors:
            deviation = torch.full_like(like, self.method.scale)
            self.center.data.fill_(1.0)
        else:
            sizes = {name: self.method.scale * (root_mean_square(name, values) or 1.0) for name in self.names}
            deviation = torch.cat([torch.full_like(values[n].flatten(), sizes[n]) for n in self.names]).to(like)
        self.law.start_(deviation, generator)

    def draw(self, z: Tensor, keys: Tensor) -> SiteDraw:
        return {"noise": self.standard_normal(self.names[0], keys, self.law.before_softplus)}

    def realize(self, d: SiteDraw) -> dict[str, Tensor]:
        return self._values(self.law(self._center(), d["noise"])[0])

    def _center(self) -> Tensor:
        if self.factors:
            return self.center
        return torch.cat([self.layer._parameters[name].flatten() for name in self.names])

    def _values(self, vector: Tensor) -> dict[str, Tensor]:
        """The layer's parameters where the vector is v (D,)."""
        if self.factors:
            (name,) = self.names
            return {name: self.layer._parameters[name] * spread(self.layer, name, self._shapes[name], vector)}
        sizes = [self.layer._parameters[name].numel() for name in self.names]
        pieces = zip(self.names, vector.split(sizes), strict=True)
        return {name: piece.reshape(self._shapes[name]) for name, piece in pieces}

    def mean(self) -> dict[str, Tensor]:
        return self._values(self.law.mean(self._center()))

    def component(self, number: int) -> dict[str, Tensor]:
        if number:
            raise PatchbayesError(f"component {number}: a flow has only what it makes of no noise, component 0.")
        return self._values(self.law.at_center(self._center()))

    def scale_spread_(self, factor: float) -> None:
        self.law.scale_(self._center(), factor)

    def kl(self, prior: PriorTerms, d: SiteDraw | None = None) -> KL:
        """The law of the vector with all constants, whatever `entropy` says; W under factors as `normalized` says."""
        if d is None:
            raise PatchbayesError(f"{self.method.label}: its KL is estimated from a draw; call patchbayes.kl(model).")
        vector, log_q = self.law(self._center(), d["noise"])
        if self.factors:
            (name,) = self.names
            weight = self.layer._parameters[name]
            total = log_q + quadratic(prior.tau, (vector - 1).square().sum(), vector.numel(), normalized=True)
            return KL(total + prior.quadratic(name, weight.square().sum(), weight.numel()), "monte_carlo")
        total = log_q
        for name, value in self._values(vector).items():
            total = total + quadratic(prior.precision(name), value.square().sum(), value.numel(), normalized=True)
        return KL(total, "monte_carlo")

    def roles(self) -> dict[str, Role]:
        return {name: "law" for name, _ in self.named_parameters()}


def factor_names(module: nn.Module) -> tuple[str, ...]:
    """The weight of a layer that can have a factor for each input unit."""
    if not (isinstance(module, nn.Linear | nn.Embedding) or is_conv(module)):
        raise NotASite("it is neither a norm layer nor one with input units (linear, convolution, embedding)")
    return ("weight",)


def _size(module: nn.Module, names: tuple[str, ...]) -> int:
    shapes = {name: tuple(module._parameters[name].shape) for name in names}  # type: ignore[union-attr]
    if is_norm(module):
        return sum(torch.Size(shape).numel() for shape in shapes.values())
    return num_units(module, names[0], shapes[names[0]])
