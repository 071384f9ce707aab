"""Mean-field Gaussian posterior with learned deviations (Graves, 2011; Blundell et al., 2015): the usual rival."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import PatchbayesError
from .local import Form, LocalForm, check_form, check_local
from .method import Method
from .posterior import CHILD, KL, Posterior, PriorTerms, Role, SiteDraw, own_parameters, root_mean_square


@dataclass(frozen=True)
class MeanField(Method):
    """Independent Gaussians, w = mean + softplus(s) * eps, with mean and s learned: twice the parameters.

    scale   initial deviation, as a multiple of the parameter's root mean square.
    form    "weights", or "local": the outputs of linear layers are drawn for every example (`posteriors.local`).
    """

    scale: float = 0.1
    form: Form = "weights"

    default_sites = "all"
    start_fields = ("scale",)

    def __post_init__(self) -> None:
        known = isinstance(self.scale, int | float) and not isinstance(self.scale, bool)
        if not (known and math.isfinite(self.scale) and self.scale > 0):
            raise PatchbayesError(
                f"MeanField(scale={self.scale!r}): the initial deviation is a finite multiple above 0."
            )
        check_form("MeanField", self.form)

    @property
    def label(self) -> str:
        return "MeanField" if self.form == "weights" else "MeanField(local)"

    def posterior(self, module: nn.Module, generator: torch.Generator) -> "MeanFieldPosterior":
        if self.form == "weights":
            return MeanFieldPosterior(self, module, tuple(own_parameters(module)))
        check_local(module)
        return LocalMeanFieldPosterior(self, module, tuple(own_parameters(module)))


class MeanFieldPosterior(Posterior):
    """The Gaussian over the parameters of one layer: the layer's own values are the means, `before_softplus` are the s."""

    method: MeanField
    noise = "draw"
    noise_source = "Gaussian noise, learned sigma"
    num_components = 1

    def __init__(self, method: MeanField, layer: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__(method, layer, names)
        self.before_softplus = nn.ParameterDict()

    def start_(self, values: Mapping[str, Tensor], generator: torch.Generator) -> None:
        for name in self.names:
            deviation = self.method.scale * (root_mean_square(name, values) or 1.0)
            start = deviation + math.log(-math.expm1(-deviation))
            self.add_(self.before_softplus, name, torch.full_like(values[name], start))

    def draw(self, z: Tensor, keys: Tensor) -> SiteDraw:
        return {name: self.standard_normal(name, keys, self.before_softplus[name]) for name in self.names}

    def realize(self, d: SiteDraw) -> dict[str, Tensor]:
        return {name: torch.addcmul(mean, self.deviation(name), d[name]) for name, mean in self.mean().items()}

    def deviation(self, name: str) -> Tensor:
        """The standard deviation of every element of a parameter."""
        return F.softplus(self.before_softplus[name])

    def mean(self) -> dict[str, Tensor]:
        return {name: self.layer._parameters[name] for name in self.names}

    def variance(self) -> dict[str, Tensor]:
        return {name: self.deviation(name).square() for name in self.names}

    def component(self, number: int) -> dict[str, Tensor]:
        if number:
            raise PatchbayesError(f"component {number}: a mean-field site has only its mean, component 0.")
        return self.mean()

    @torch.no_grad()
    def scale_spread_(self, factor: float) -> None:
        for name in self.names:
            deviation = (factor * self.deviation(name)).clamp_min(torch.finfo(self.before_softplus[name].dtype).tiny)
            self.before_softplus[name].copy_(deviation + (-torch.expm1(-deviation)).log())

    def kl(self, prior: PriorTerms, d: SiteDraw | None = None) -> KL:
        """Exact, whatever `normalized` and `entropy` say: sum of 1/2 (tau (m^2 + s^2) - 1 - log(tau s^2))."""
        terms = []
        for name, mean in self.mean().items():
            deviation = self.deviation(name)
            precision = prior.precision_like(mean, name)
            square = mean.square().sum() + deviation.square().sum()
            log_term = mean.numel() * (1 + precision.log()) + 2 * deviation.log().sum()
            terms.append(0.5 * (precision * square - log_term))
        return KL(torch.stack(terms).sum(), "exact")

    def roles(self) -> dict[str, Role]:
        return {name: "law" for name, _ in self.named_parameters()}

    def upgrade(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = {name: stored[name] for name in self.names if name in stored}
        means = {name: both[0] for name, both in found.items()}
        return means | {f"{CHILD}.before_softplus.{name}": both[1] for name, both in found.items()}


class LocalMeanFieldPosterior(LocalForm, MeanFieldPosterior):
    """The same Gaussian, with outputs drawn in the place of weights."""
