"""The prior N(0, 1/tau) on weights and N(0, 1/rho) on biases, a precision for each layer."""

import fnmatch
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .errors import CheckpointMismatch, PatchbayesError

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
        layers = [name for name, module in model.named_modules() if _owns_parameters(module)]
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

    def config(self) -> dict[str, Any]:
        """The layers as JSON, for a checkpoint; the precisions are tensors."""
        return {"learned_layers": list(self.layers)}


def prior_from_config(
    config: dict[str, Any], tensors: Mapping[str, Tensor], model: nn.Module
) -> "Prior | LearnedPrior":
    """The prior that `config` described, with the learned precisions from `tensors`."""
    if "learned_layers" not in config:
        return Prior(config["tau"], config["rho"])
    prior = LearnedPrior(model)
    other = set(prior.layers).symmetric_difference(config["learned_layers"])
    if other:
        raise CheckpointMismatch(
            f"load_: the file's learned prior is for other layers: {', '.join(sorted(other)[:5])}."
        )
    prior.load_state_dict({name: tensors[f"{PRIOR_KEY}.{name}"] for name in ("log_tau", "log_rho")})
    return prior


def _owns_parameters(module: nn.Module) -> bool:
    if isinstance(module, nn.utils.parametrize.ParametrizationList):
        return False
    return bool(module._parameters) or nn.utils.parametrize.is_parametrized(module)


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
