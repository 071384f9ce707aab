"""Optimizers by name, with groups of their own for patched parameters."""

from typing import Any

import torch
from torch import nn

from ..errors import PatchbayesError
from ..likelihoods import Likelihood
from ..objective import Lambdas, parameter_groups
from ..patching import is_patched
from .config import TrainingConfig


def build_optimizer(config: TrainingConfig, network: nn.Module, likelihood: Likelihood) -> torch.optim.Optimizer:
    """The optimizer over network and likelihood; groups are named, and "initial_lr" is their rate before the schedule."""
    groups = _groups(config, network)
    for group in groups:
        patched = group["name"].startswith("patched")
        group["lr"] = config.chosen_patch_lr if patched else config.chosen_lr
    if config.learn_precision and isinstance(likelihood, nn.Module):
        learned = list(likelihood.parameters())
        groups.append({"params": learned, "name": "output_precision", "lr": config.chosen_lr, "weight_decay": 0.0})
    for group in groups:
        group["initial_lr"] = group["lr"]
    if config.optimizer == "sgd":
        momentum = 0.9 if config.momentum is None else config.momentum
        return torch.optim.SGD(groups, momentum=momentum, nesterov=config.nesterov)
    return {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[config.optimizer](groups)


def _groups(config: TrainingConfig, network: nn.Module) -> list[dict[str, Any]]:
    decay = config.chosen_weight_decay
    if not is_patched(network):
        learned = [parameter for parameter in network.parameters() if parameter.requires_grad]
        return [{"params": learned, "name": "weights", "weight_decay": decay}]
    half = decay / 2  # lambda ||w||^2 is a weight decay of 2 lambda
    lambdas = Lambdas.equal(half) if config.objective == "simplified" else Lambdas(0.0, 0.0, half, half)
    groups = parameter_groups(network, lambdas)
    if config.objective == "elbo" and decay and not any(group["weight_decay"] for group in groups):
        raise PatchbayesError(
            f'TrainingConfig(weight_decay={decay!r}): sites="{config.chosen_sites}" leaves no shared parameter to decay, and '
            "the KL has the patched ones.\n  do       leave it out, or use prior_precision."
        )
    if config.alternate and len({group["name"].partition("_")[0] for group in groups}) < 2:
        raise PatchbayesError(
            f'TrainingConfig(alternate={config.alternate!r}): sites="{config.chosen_sites}" leaves nothing to take turns '
            "with.\n  do       leave it out, or patch fewer sites."
        )
    return groups
