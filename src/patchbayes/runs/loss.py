"""What a training step minimizes, and by which optimizer.

The loss is one module, so that a wrapper such as DDP sees one forward, however many draws.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..draws.draws import Draws
from ..errors import PatchbayesError
from ..likelihoods import Categorical, Gaussian, Likelihood
from ..objective import Lambdas, kl, l2_penalty, negative_elbo, parameter_groups
from ..patching.drawing import forward_draws
from ..patching.network import network_of
from ..patching.patch import is_patched
from ..prior import LearnedPrior
from .config import TrainingConfig
from .network import num_members


class TrainingLoss(nn.Module):
    """The loss of a batch per example, with the network that it trains.

        elbo         mean NLL + KL(q || p) / N     appendix B.2; Eq. (9) for regression
        simplified   mean NLL                      appendix C.1; the optimizer decays all components

    A network that is not patched has the KL of a point, tau / 2 ||w||^2. Where "elbo" is given a weight decay, the KL
    leaves out the shared parameters, which the optimizer then decays. Where components share gradients, the decay of
    patched parameters is a term of the loss instead: the optimizer would add it after the gradients were shared, and
    training would come to rest elsewhere.
    """

    def __init__(self, network: nn.Module, likelihood: Likelihood, config: TrainingConfig, num_data: int) -> None:
        super().__init__()
        self.network, self.likelihood, self.num_data = network, likelihood, num_data
        self.patched = is_patched(network)
        self.with_kl = config.objective == "elbo"
        self.shared = config.chosen_weight_decay == 0
        self.precision = 1.0 if config.prior_precision is None else config.prior_precision
        self.penalty = _lambdas(config)[1]
        known = network_of(network).prior if self.patched else None
        self.prior = known if isinstance(known, LearnedPrior) else None  # a part of the loss: its state is the run's
        self.resting_kl: Tensor | float = 0.0
        # One draw picks one member of an ensemble: a step takes each of them once.
        self.draws: int | Draws = Draws.enumerate(network) if num_members(network) else config.draws_per_step

    def forward(self, inputs: Tensor, targets: Tensor, share: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
        """The loss to differentiate, the mean NLL and the KL, () each.

        `share` weighs the NLL where the examples are one process's part of a batch: the part times the processes.
        """
        outputs = forward_draws(self.network, inputs, self.draws) if self.patched else self.network(inputs)[None]
        nll = negative_elbo(outputs.float(), targets, 0.0, num_data=self.num_data, likelihood=self.likelihood)
        kl_total = self.kl() if self.with_kl else torch.zeros_like(nll)
        loss = share * nll + kl_total / self.num_data
        if self.penalty is not None and self.patched:
            loss = loss + l2_penalty(self.network, self.penalty)
        return loss, nll.detach(), kl_total.detach()

    def kl(self) -> Tensor:
        """KL(q || p) of what the optimizer does not decay, ()."""
        if self.patched:
            return kl(self.network, shared=self.shared) + self.resting_kl
        squares = [parameter.square().sum() for parameter in self.network.parameters()]
        total = 0.5 * self.precision * torch.stack(squares).sum()
        return total if self.shared else torch.zeros_like(total)

    @torch.no_grad()
    def set_resting_kl_(self) -> None:
        """Compute the part of the KL once that belongs to parameters which rest: a constant until others rest."""
        if self.with_kl and self.patched:
            whole = kl(self.network, shared=self.shared, frozen=True)
            self.resting_kl = whole - kl(self.network, shared=self.shared)


def build_likelihood(task: str, config: TrainingConfig) -> Likelihood:
    """`Categorical` for classes, `Gaussian` for standardized targets."""
    if task == "regression":
        precision = 1.0 if config.output_precision is None else config.output_precision
        return Gaussian(precision, learn=config.learn_precision)
    if config.output_precision is not None or config.learn_precision:
        raise PatchbayesError(
            f"TrainingConfig: output_precision and learn_precision are for regression, and {config.data} has classes."
        )
    return Categorical()


def build_optimizer(config: TrainingConfig, network: nn.Module, likelihood: Likelihood) -> torch.optim.Optimizer:
    """The optimizer over network and likelihood; groups are named, and "initial_lr" is their rate before the schedule."""
    groups = _groups(config, network)
    for group in groups:
        group.setdefault("lr", config.chosen_lr)
    if config.learn_precision and isinstance(likelihood, nn.Module):
        learned = list(likelihood.parameters())
        groups.append({"params": learned, "name": "output_precision", "lr": config.chosen_lr, "weight_decay": 0.0})
    for group in groups:
        group["initial_lr"] = group["lr"]
    return optimizer_over(config, groups)


def optimizer_over(config: TrainingConfig, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """The optimizer that the configuration names, over these groups."""
    if config.optimizer == "sgd":
        momentum = 0.9 if config.momentum is None else config.momentum
        return torch.optim.SGD(groups, momentum=momentum, nesterov=config.nesterov)
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[config.optimizer]
    parameters = [parameter for group in groups for parameter in group["params"]]
    # One pass over the memory of each parameter where the default makes a dozen: eight times as fast on a CPU. On other devices
    # the default is a fast one, and sharded parameters (DTensor) are left to it.
    on_cpu = all(type(one) is nn.Parameter and one.device.type == "cpu" for one in parameters)
    return kind(groups, fused=True) if on_cpu else kind(groups)


def _groups(config: TrainingConfig, network: nn.Module) -> list[dict[str, Any]]:
    decay = config.chosen_weight_decay
    if not is_patched(network):
        learned = [parameter for parameter in network.parameters() if parameter.requires_grad]
        return [{"params": learned, "name": "weights", "weight_decay": decay}]
    groups = parameter_groups(network, _lambdas(config)[0], patch_lr=config.patch_lr)
    if config.objective == "elbo" and decay and not any(group["weight_decay"] for group in groups):
        raise PatchbayesError(
            f'TrainingConfig(weight_decay={decay!r}): sites="{config.chosen_sites}" leaves no shared parameter to decay, and '
            "the KL has the patched ones.\n  do       leave it out, or use prior_precision."
        )
    if config.alternate and len({group["name"].startswith("shared") for group in groups}) < 2:
        raise PatchbayesError(
            f'TrainingConfig(alternate={config.alternate!r}): sites="{config.chosen_sites}" leaves nothing to take turns '
            "with.\n  do       leave it out, or patch fewer sites."
        )
    return groups


def _lambdas(config: TrainingConfig) -> tuple[Lambdas, Lambdas | None]:
    """What the optimizer decays, and what the loss penalizes instead: lambda ||w||^2 is a weight decay of 2 lambda."""
    half = config.chosen_weight_decay / 2
    if config.objective != "simplified":
        return Lambdas(0.0, 0.0, half, half), None
    all_four = Lambdas(*config.lambdas) if config.lambdas is not None else Lambdas.equal(half)
    if config.sharing:
        in_the_loss = replace(all_four, shared_weights=0.0, shared_biases=0.0)
        return replace(all_four, patched_weights=0.0, patched_biases=0.0), in_the_loss
    return all_four, None
