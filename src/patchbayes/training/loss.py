"""What a training step minimizes, as one module: so that a wrapper such as DDP sees one forward, however many draws."""

import torch
from torch import Tensor, nn

from ..draws import Draws
from ..errors import PatchbayesError
from ..likelihoods import Categorical, Gaussian, Likelihood
from ..network import forward_draws
from ..objective import kl, negative_elbo
from ..patching import is_patched
from .config import TrainingConfig


class TrainingLoss(nn.Module):
    """The loss of a batch per example, with the network that it trains.

        elbo         mean NLL + KL(q || p) / N     appendix B.2; Eq. (9) for regression
        simplified   mean NLL                      appendix C.1; the optimizer decays all components

    A network that is not patched has the KL of a point, tau / 2 ||w||^2. Where "elbo" is given a weight decay, the KL
    leaves out the shared parameters, which the optimizer then decays.
    """

    def __init__(self, network: nn.Module, likelihood: Likelihood, config: TrainingConfig, num_data: int) -> None:
        super().__init__()
        self.network, self.likelihood, self.num_data = network, likelihood, num_data
        self.patched = is_patched(network)
        self.with_kl = config.objective == "elbo"
        self.shared = config.chosen_weight_decay == 0
        self.precision = 1.0 if config.prior_precision is None else config.prior_precision
        # One draw picks one member of an ensemble: a step takes each of them once.
        self.draws: int | Draws = Draws.enumerate(network) if config.method == "ensemble" else config.draws_per_step

    def forward(self, inputs: Tensor, targets: Tensor, share: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
        """The loss to differentiate, the mean NLL and the KL, () each.

        `share` weighs the NLL where the examples are one process's part of a batch: the part times the processes.
        """
        outputs = forward_draws(self.network, inputs, self.draws) if self.patched else self.network(inputs)[None]
        nll = negative_elbo(outputs.float(), targets, 0.0, num_data=self.num_data, likelihood=self.likelihood)
        kl_total = self.kl() if self.with_kl else torch.zeros_like(nll)
        return share * nll + kl_total / self.num_data, nll.detach(), kl_total.detach()

    def kl(self) -> Tensor:
        """KL(q || p) of what the optimizer does not decay, ()."""
        if self.patched:
            return kl(self.network, shared=self.shared)
        squares = [parameter.square().sum() for parameter in self.network.parameters()]
        total = 0.5 * self.precision * torch.stack(squares).sum()
        return total if self.shared else torch.zeros_like(total)


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
