"""The prior N(0, 1/tau) on weights and N(0, 1/rho) on biases, a precision for each layer; or a Laplace law in its place."""

import fnmatch
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .errors import CheckpointMismatch, PatchbayesError
from .posteriors.posterior import CHILD

Precision = float | Mapping[str, float]

PRIOR_KEY = "patchbayes_prior"  # where a file keeps learned precisions; no module is likely to have that name


class Prior:
    """Fixed precisions: tau on weights, rho on biases (Eqs. 2 and 6).

    Each is a number for all layers, or a mapping from globs on layer names to numbers, first match first:
    `Prior(tau={"fc": 10.0, "*": 1.0})`. To learn the precisions, use `LearnedPrior`.
    """

    learned = False

    def __init__(self, tau: Precision = 1.0, rho: Precision = 1.0) -> None:
        self.tau, self.rho = _checked("tau", tau), _checked("rho", rho)

    def precisions(self, layer: str) -> tuple[Tensor | float, Tensor | float]:
        """(tau, rho) of the layer with that module name."""
        return _look_up("tau", self.tau, layer), _look_up("rho", self.rho, layer)

    def config(self) -> dict[str, Any]:
        """The prior as JSON, for a checkpoint."""
        return {"tau": self.tau, "rho": self.rho}

    def __repr__(self) -> str:
        return f"Prior(tau={self.tau}, rho={self.rho})"


class LaplacePrior(Prior):
    """p(w) = tau/2 exp(-tau |w|) on weights, rho on biases: the KL has tau |M|_1 where Eq. (2) has tau/2 ||M||^2 (A.1).

    The L1 penalty, for posteriors without noise (EMP, ECMP, ensembles, DropConnect) and shared parameters: those with noise
    would need E|w| of their law. Rates are numbers or mappings from globs, as in `Prior`.
    """

    def config(self) -> dict[str, Any]:
        return {"kind": "laplace", **super().config()}

    def __repr__(self) -> str:
        return f"LaplacePrior(tau={self.tau}, rho={self.rho})"


class LearnedPrior(nn.Module):
    """Precisions of every layer as parameters, to be learned by maximizing the ELBO (appendix C.1).

    Give its parameters to the optimizer, or call `maximize_prior_` now and then: for fixed components the best precision is
    known, tau = D / sum_k p_k (||M_k||^2 + D sigma^2). The KL then keeps its term -D/2 log(tau), without which a smaller
    precision would always win.
    """

    learned = True

    def __init__(self, model: nn.Module, tau: Precision = 1.0, rho: Precision = 1.0) -> None:
        super().__init__()
        start = Prior(tau, rho)
        reference = next(model.parameters())
        layers = list(_layers(model))
        values = [start.precisions(layer) for layer in layers]
        self.layers = {layer: number for number, layer in enumerate(layers)}
        self.log_tau = nn.Parameter(torch.tensor([t for t, _ in values], device=reference.device).log())
        self.log_rho = nn.Parameter(torch.tensor([r for _, r in values], device=reference.device).log())

    def precisions(self, layer: str) -> tuple[Tensor, Tensor]:
        """(tau, rho) of the layer with that module name, () each."""
        if layer not in self.layers:
            raise PatchbayesError(
                f'LearnedPrior: layer "{layer}" was not in the network it was made for; make it anew.'
            )
        number = self.layers[layer]
        return self.log_tau[number].exp(), self.log_rho[number].exp()

    def at_one(self) -> "LearnedPrior":
        """Points for the same layers, with all precisions 1 and in double precision where the device has it."""
        dtype = torch.float32 if self.log_tau.device.type == "mps" else torch.float64
        unit = LearnedPrior.__new__(LearnedPrior)
        nn.Module.__init__(unit)
        unit.layers = self.layers
        unit.log_tau, unit.log_rho = (
            nn.Parameter(torch.zeros_like(logs, dtype=dtype)) for logs in (self.log_tau, self.log_rho)
        )
        return unit

    def config(self) -> dict[str, Any]:
        """The layers as JSON, for a checkpoint; the precisions are tensors."""
        return {"learned_layers": list(self.layers)}


class GammaPrior(LearnedPrior):
    """Precisions with a Gamma(shape, rate) law of their own instead of points (appendix C.1 calls them hyper-parameters).

    Every layer's tau has the variational law Gamma(alpha, beta), and for given components the best one is known:

        alpha = shape + D/2,   beta = rate + A/2,   A = sum_k p_k ||M_k||^2 (+ D sigma^2)

    `objective.maximize_prior_(model)` sets it: call it before training and now and then; no optimizer is needed. The KL then
    uses E[tau] = alpha / beta and E[log tau], and adds KL(Gamma(alpha, beta) || Gamma(shape, rate)) for every layer.
    """

    def __init__(self, model: nn.Module, shape: float = 1.0, rate: float = 1.0) -> None:
        for name, value in (("shape", shape), ("rate", rate)):
            if not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
                raise PatchbayesError(f"GammaPrior({name}={value!r}): expected a finite number above 0.")
        super().__init__(model, shape / rate, shape / rate)
        self.requires_grad_(False)
        self.shape, self.rate = float(shape), float(rate)
        self.register_buffer("alpha_tau", torch.zeros_like(self.log_tau, dtype=torch.float64))
        self.register_buffer("alpha_rho", torch.zeros_like(self.log_rho, dtype=torch.float64))

    @torch.no_grad()
    def set_(self, sizes: tuple[Tensor, Tensor], strengths: tuple[Tensor, Tensor]) -> None:
        """The best law of every tau and rho, for D (layers,) and A (layers,) of each."""
        places = ((self.log_tau, self.alpha_tau), (self.log_rho, self.alpha_rho))
        for (log_mean, alpha), size, strength in zip(places, sizes, strengths, strict=True):
            assert isinstance(alpha, Tensor)
            alpha.copy_(self.shape + size.double().clamp_min(0) / 2)
            log_mean.copy_((alpha / (self.rate + strength.double().clamp_min(0) / 2)).log())

    def divergence(self) -> Tensor:
        """What the KL has besides its value at the mean precisions, (): D/2 (log E[tau] - E[log tau]) and the Gamma's own."""
        total = torch.zeros((), dtype=torch.float64, device=self.log_tau.device)
        for log_mean, alpha in ((self.log_tau, self.alpha_tau), (self.log_rho, self.alpha_rho)):
            assert isinstance(alpha, Tensor)
            if not (alpha > 0).all():
                raise PatchbayesError(
                    "GammaPrior: the laws of its precisions have not been set for this network.\n"
                    "  do       patchbayes.objective.maximize_prior_(model, prior), now and after every few steps."
                )
            log_beta = alpha.log() - log_mean.double()
            half = alpha - self.shape
            total = total + (half * (log_mean.double() - torch.digamma(alpha) + log_beta)).sum()
            own = half * torch.digamma(alpha) - torch.lgamma(alpha) + math.lgamma(self.shape)
            own = own + self.shape * (log_beta - math.log(self.rate)) + self.rate * log_mean.double().exp() - alpha
            total = total + own.sum()
        return total

    def config(self) -> dict[str, Any]:
        return {"kind": "gamma", "shape": self.shape, "rate": self.rate, **super().config()}


def prior_from_config(
    config: dict[str, Any], tensors: Mapping[str, Tensor], model: nn.Module
) -> "Prior | LearnedPrior":
    """The prior that `config` described, with the learned precisions from `tensors`."""
    if "learned_layers" not in config:
        return (LaplacePrior if config.get("kind") == "laplace" else Prior)(config["tau"], config["rho"])
    gamma = config.get("kind") == "gamma"
    prior = GammaPrior(model, config["shape"], config["rate"]) if gamma else LearnedPrior(model)
    other = set(prior.layers).symmetric_difference(config["learned_layers"])
    if other:
        raise CheckpointMismatch(
            f"load_: the file's learned prior is for other layers: {', '.join(sorted(other)[:5])}."
        )
    prior.load_state_dict({name: tensors[f"{PRIOR_KEY}.{name}"] for name in prior.state_dict()})
    return prior


def _layers(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that own parameters, by name, without the posteriors that patched ones hold."""
    inside = {id(m) for module in model.modules() if CHILD in module._modules for m in module._modules[CHILD].modules()}  # type: ignore[union-attr]
    owners = {name: module for name, module in model.named_modules() if id(module) not in inside}
    return {name: module for name, module in owners.items() if _owns_parameters(module)}


def _owns_parameters(module: nn.Module) -> bool:
    if isinstance(module, nn.utils.parametrize.ParametrizationList):
        return False
    return bool(module._parameters) or CHILD in module._modules or nn.utils.parametrize.is_parametrized(module)


def _checked(name: str, value: Precision) -> float | dict[str, float]:
    numbers = list(value.values()) if isinstance(value, Mapping) else [value]
    if not numbers or not all(isinstance(x, int | float) and math.isfinite(x) and x > 0 for x in numbers):
        raise PatchbayesError(f"Prior({name}={value!r}): a precision is a finite number above 0.")
    return dict(value) if isinstance(value, Mapping) else float(value)


def _look_up(name: str, value: float | Mapping[str, float], layer: str) -> float:
    if not isinstance(value, Mapping):
        return value
    for pattern, number in value.items():
        if fnmatch.fnmatchcase(layer, pattern):
            return number
    raise PatchbayesError(
        f'Prior({name}=...): no pattern matches the layer "{layer}".\n  do       add "*" as the last pattern, for all others.'
    )
