"""Components that learn apart: given the trunk, the K components of EMP are disjoint parameters (appendix C.2).

A phase of T steps is dealt into K hands. A hand holds one component of every site, the sites shuffled independently, so that
each hand is by itself a draw of EMP, and all K together hold every component once. Hand h takes the steps h, h + K, h + 2K, ...
of the phase: the examples, the learning rates and the number of steps are those of ordinary training, in which a component is
drawn in one of K steps. It reads nothing of the other hands and writes nothing of theirs, so hands may learn one after the
other, in worker processes on shared memory without locks, or on several ranks: the bits are the same.

A hand minimizes mean NLL + tau / 2 ||M_hand||^2 / N, of which the negative ELBO is the mean over the hands of a phase, in
expectation over how they are dealt.

Deviation: the paper does not say what the workers draw. Within a phase a hand stays together, so components of different hands
do not meet; every phase deals anew.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..data import Dataset
from ..draws.layout import NetworkDraw
from ..errors import PatchbayesError
from ..objective import negative_elbo
from ..patching.drawing import hold
from ..patching.network import PatchedNetwork, network_of
from ..patching.selection import call
from ..posteriors.posterior import CHILD
from .config import TrainingConfig
from .data_order import DEAL, EpochBatches, stream
from .loss import TrainingLoss, optimizer_over
from .schedule import learning_rate_factor


@dataclass(frozen=True)
class Phase:
    """Steps first, first + 1, ..., last - 1 of the run, of which K hands learn."""

    first: int
    last: int

    def steps(self, hand: int, hands: int) -> range:
        return range(self.first + hand, self.last, hands)


@dataclass(frozen=True)
class Learned:
    """The sum of the NLL over the steps of a hand, and their number."""

    nll: float = 0.0
    steps: int = 0


def num_hands(network: PatchedNetwork) -> int:
    """K, where all patched parameters are components that can learn apart; else refused with the reason."""
    numbers = set()
    for site in network.sites:
        posterior, groups = site.posterior, site.posterior.groups()
        number = posterior.num_components
        apart = groups is not None and groups.tie == "site" and groups.length == 1 and groups.outcomes == number
        if not apart or posterior.noise != "none" or posterior.learns_law or posterior.log_p() is not None:
            raise PatchbayesError(
                f'component_workers: {site.method.label} at "{site.name}" has no components that learn apart.\n'
                "  do       EMP with equal, fixed probabilities and no noise at all sites; or component_workers=0."
            )
        for name, parameter in site.parameters().items():
            inside = name.startswith(f"{CHILD}.")
            wanted = posterior.component(0).get(name.rpartition(".")[2])
            if not inside or wanted is None or parameter.numel() != number * wanted.numel():
                raise PatchbayesError(
                    f'component_workers: "{site.name}" has the parameter "{name}", which all components share.\n'
                    "  do       component_workers=0."
                )
        numbers.add(number)
    if len(numbers) != 1:
        raise PatchbayesError(
            f"component_workers: expected the same number of components at all sites, got {sorted(numbers)}.\n"
            "  do       the same number everywhere, or component_workers=0."
        )
    return numbers.pop()


def dealt(network: PatchedNetwork, seed: int, phase: Phase, hands: int) -> Tensor:
    """(K, groups) int64: the components of each hand, a permutation in every column."""
    columns = [
        torch.randperm(hands, generator=stream(seed, DEAL, phase.first, group))
        for group in range(network.layout.num_groups)
    ]
    return torch.stack(columns, dim=1)


class HandTraining:
    """Trains hands of a phase, one at a time, on the rows of the patched parameters that belong to them."""

    def __init__(
        self, config: TrainingConfig, loss: TrainingLoss, groups: list[dict[str, Any]], dataset: Dataset
    ) -> None:
        """groups: those of the run's optimizer, with names and initial rates."""
        self.config, self.loss, self.dataset = config, loss, dataset
        self.network = network_of(loss.network)
        self.hands = num_hands(self.network)
        self.steps_per_epoch = -(-len(dataset.train) // config.batch_size)
        self._epoch: EpochBatches | None = None
        self._groups = [group for group in groups if group["name"].startswith("patched")]
        self._place = {
            id(parameter): site.posterior.offset
            for site in self.network.sites
            for parameter in site.parameters().values()
        }

    def train_(self, phase: Phase, hand: int, stepped: Callable[[], bool] = lambda: True) -> Learned | None:
        """Train one hand through a phase, in place. `stepped` is called after every step; where it says no, None."""
        components = dealt(self.network, self.config.seed, phase, self.hands)[hand]
        rows = [self._rows(group, components) for group in self._groups]
        optimizer = optimizer_over(self.config, [group for group, _ in rows])
        draw = NetworkDraw(torch.tensor(phase.first), components.to(self.network.device or "cpu"), explicit=True)
        nll, number = 0.0, 0
        for step in phase.steps(hand, self.hands):
            factor = learning_rate_factor(self.config, step, self.steps_per_epoch)
            for group in optimizer.param_groups:
                group["lr"] = factor * group["initial_lr"]
            nll, number = nll + self._backward(step, draw), number + 1
            for _, pairs in rows:
                for row, parameter, place in pairs:
                    assert parameter.grad is not None
                    row.grad = parameter.grad.view(self.hands, -1)[place]
            optimizer.step()
            for _, pairs in rows:
                for _, parameter, _ in pairs:
                    parameter.grad = None
            if not stepped():
                return None
        return Learned(nll, number)

    def _rows(
        self, group: dict[str, Any], components: Tensor
    ) -> tuple[dict[str, Any], list[tuple[Tensor, nn.Parameter, int]]]:
        """A group of the optimizer over the hand's rows, and for each row its parameter and its number there.

        Ordinary training decays a component in all steps, a hand in one of K: the decay is K times as large there.
        """
        found = []
        for parameter in group["params"]:
            place = int(components[self._place[id(parameter)]])
            row = parameter.detach().view(self.hands, -1)[place].requires_grad_()
            found.append((row, parameter, place))
        kept = {name: group[name] for name in ("name", "initial_lr")}
        decay = self.hands * group["weight_decay"]
        of_rows = {"params": [row for row, _, _ in found], "lr": group["initial_lr"], "weight_decay": decay, **kept}
        return of_rows, found

    def _backward(self, step: int, draw: NetworkDraw) -> float:
        """Gradients of a step's loss for this draw; its mean NLL."""
        loss, config = self.loss, self.config
        device = self.network.device or torch.device("cpu")
        epoch, place = divmod(step, self.steps_per_epoch)
        if self._epoch is None or self._epoch.epoch != epoch:
            self._epoch = EpochBatches(self.dataset, config.batch_size, config.seed, epoch)
        inputs, targets, _ = self._epoch[place]
        with hold(self.network, draw):
            outputs = call(loss.network, inputs.to(device))
        nll = negative_elbo(
            outputs[None].float(), targets.to(device), 0.0, num_data=loss.num_data, likelihood=loss.likelihood
        )
        kl = loss.kl() if loss.with_kl else torch.zeros_like(nll)
        # Each component has the weight 1 / K in the KL; K times that is the KL of the hand's own network. Other hands may be
        # writing theirs: that does not enter the gradient of this one.
        (nll + self.hands * kl / loss.num_data).backward()
        return float(nll.detach())


class RunningStatistics:
    """Buffers that forward passes change (running statistics), with which every hand begins anew.

    After a phase, statistics of the whole network are the mean over the hands that took steps; those that a site keeps for
    each component are taken from the hand that has it.
    """

    def __init__(self, network: nn.Module) -> None:
        inside = {id(b) for s in network_of(network).sites for b in s.posterior.buffers()}
        self.buffers = [(buffer, id(buffer) in inside) for buffer in network.buffers()]
        self.start = [buffer.clone() for buffer, _ in self.buffers]

    @property
    def size(self) -> int:
        """How many numbers `flat` has."""
        return sum(buffer.numel() for buffer, _ in self.buffers)

    @torch.no_grad()
    def begin(self) -> None:
        """Before a hand learns."""
        for (buffer, _), start in zip(self.buffers, self.start, strict=True):
            buffer.copy_(start)

    def flat(self) -> Tensor:
        """How much a hand has changed them, as one vector of float64."""
        changes = [(b.double() - s.double()).flatten() for (b, _), s in zip(self.buffers, self.start, strict=True)]
        return torch.cat(changes) if changes else torch.zeros(0, dtype=torch.float64)

    @torch.no_grad()
    def merge(self, changes: Tensor, steps: Tensor) -> None:
        """Put the statistics of a whole phase in place: changes (K, size) and steps (K,) of the hands."""
        self.begin()
        learned = max(1, int((steps > 0).sum()))
        position = 0
        for buffer, of_components in self.buffers:
            part = changes[:, position : position + buffer.numel()].sum(0).view(buffer.shape)
            position += buffer.numel()
            mean = part if of_components or not buffer.is_floating_point() else part / learned
            buffer.copy_((buffer.double() + mean).to(buffer.dtype))


@contextlib.contextmanager
def restored_if_unfinished(parameters: list[nn.Parameter]) -> Iterator[Callable[[], None]]:
    """If the block ends without calling what it is given, the parameters and nothing else come back as they were."""
    before = [parameter.detach().clone() for parameter in parameters]
    done = False

    def finish() -> None:
        nonlocal done
        done = True

    try:
        yield finish
    finally:
        if not done:
            with torch.no_grad():
                for parameter, value in zip(parameters, before, strict=True):
                    parameter.copy_(value)
