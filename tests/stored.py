"""Networks of one patched layer, and what a patched network stores: components, deviations and their gradients."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import patchbayes as pb


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def patched(module: nn.Module, method: pb.posteriors.Method, sites: str = "0", **options: Any) -> nn.Sequential:
    """The module in double precision as the only layer of a patched network."""
    model = nn.Sequential(module).double()
    pb.patch_(model, method, sites, **options)
    return model


def posterior(model: nn.Module, site: str = "0") -> Any:
    return pb.patched_sites(model)[site].posterior


def components(model: nn.Module, site: str = "0", name: str = "weight") -> Tensor:
    """The components of a parameter of a mixture, (K, *shape), detached: a view, so that writing to it sets them."""
    return pb.patched_sites(model)[site].components(name).detach()


def stored_values(model: nn.Module, site: str, name: str) -> np.ndarray:
    """The components (K, *shape) of a parameter, or (1, *shape) where it is not mixed and stays the layer's own."""
    found = pb.patched_sites(model).get(site)
    if found is not None and name in getattr(found.posterior, "components", ()):
        return components(model, site, name).numpy()
    parameter = model.get_submodule(site)._parameters[name]
    assert isinstance(parameter, nn.Parameter)
    return parameter.detach().numpy()[None]


def gradient(model: nn.Module, site: str = "0", name: str = "weight") -> Tensor:
    """The gradient of all components of a parameter, (K, *shape)."""
    found = pb.patched_sites(model)[site]
    parameter = found.posterior.components[name]
    assert parameter.grad is not None, f"no gradient at {site}.{name}"
    return parameter.grad.view(found.components(name).shape)


def mean_field(model: nn.Module, site: str = "0", name: str = "weight") -> tuple[Tensor, Tensor]:
    """What a mean-field site stores: the mean and the deviation before softplus, (*shape) each, detached."""
    found = pb.patched_sites(model)[site]
    mean = found.module._parameters[name]
    assert isinstance(mean, nn.Parameter)
    return mean.detach(), found.posterior.before_softplus[name].detach()


def deviation(model: nn.Module, site: str = "0", name: str = "weight") -> Tensor:
    return torch.nn.functional.softplus(mean_field(model, site, name)[1])
