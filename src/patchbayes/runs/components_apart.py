"""A phase in which components learn apart: in this process, in worker processes, or a share of them on every rank."""

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor

from ..data import Dataset
from ..errors import PatchbayesError
from ..ranks import rank_and_number, summed
from .config import TrainingConfig
from .disjoint_patches import HandTraining, Learned, Phase, RunningStatistics, dealt, restored_if_unfinished
from .loss import TrainingLoss
from .workers import CHANGES, STEPS, WorkerPool


class ComponentsApart:
    """Trains the components of a network apart, phase by phase. Worker processes start with the first phase and stay."""

    def __init__(
        self,
        config: TrainingConfig,
        loss: TrainingLoss,
        optimizer: torch.optim.Optimizer,
        dataset: Dataset,
        *,
        trust_code: bool,
    ) -> None:
        self.config, self.loss, self.dataset, self.trust_code = config, loss, dataset, trust_code
        self.training = HandTraining(config, loss, optimizer.param_groups, dataset)
        self.pool: WorkerPool | None = None
        _, ranks = rank_and_number()
        if ranks > 1 and config.component_workers > 1:
            raise PatchbayesError(
                f"TrainingConfig(component_workers={config.component_workers}) on {ranks} processes: each is a worker.\n"
                "  do       component_workers=1."
            )

    def train_(
        self,
        phase: Phase,
        ending: contextlib.ExitStack,
        stopped: Callable[[], bool],
        say: Callable[[str], None],
    ) -> list[Learned] | None:
        """Train all components through a phase, in place; None if it was `stopped`, and all is as before the phase.

        ending   where worker processes are ended.
        """
        training, hands = self.training, self.training.hands
        statistics = RunningStatistics(self.loss.network)
        patched = [p for site in training.network.sites for p in site.parameters().values()]
        with restored_if_unfinished(patched) as finish:
            if rank_and_number()[1] == 1 and self.config.component_workers > 1:
                if self.pool is None:
                    shapes = (self.dataset.num_outputs, self.dataset.input_shape)
                    pool = WorkerPool(
                        self.config, training, statistics.size, shapes, trust_code=self.trust_code, say=say
                    )
                    self.pool = ending.enter_context(pool)
                found = self.pool.train_(phase, statistics, stopped)
                changes, steps = self.pool.shared[CHANGES].clone(), self.pool.shared[STEPS].clone()
            else:
                changes = torch.zeros(hands, statistics.size, dtype=torch.float64)
                steps = torch.zeros(hands, dtype=torch.int64)
                found = self._train_here(phase, statistics, changes, steps, stopped)
            if found is None:
                statistics.begin()
                return None
            finish()
        statistics.merge(changes, steps)
        return found

    def _train_here(
        self, phase: Phase, statistics: RunningStatistics, changes: Tensor, steps: Tensor, stopped: Callable[[], bool]
    ) -> list[Learned] | None:
        """The hands of this rank, one after the other; then the ranks exchange what they learned."""
        rank, ranks = rank_and_number()
        hands = self.training.hands
        learned = [Learned()] * hands
        for hand in range(rank, hands, ranks):
            statistics.begin()
            # A rank alone cannot stop: the others wait for its components.
            found = self.training.train_(phase, hand, lambda: ranks > 1 or not stopped())
            if found is None:
                return None
            learned[hand], changes[hand], steps[hand] = found, statistics.flat(), found.steps
        if ranks > 1:
            self._gather(phase, rank, ranks)
            sums = torch.tensor([[one.nll, one.steps] for one in learned], dtype=torch.float64)
            whole = summed(torch.cat([sums, changes], dim=1))
            changes.copy_(whole[:, 2:])
            steps.copy_(whole[:, 1].long())
            learned = [Learned(float(nll), int(number)) for nll, number in whole[:, :2]]
        return learned

    @torch.no_grad()
    def _gather(self, phase: Phase, rank: int, ranks: int) -> None:
        """Give every rank all components: each row is a sum over ranks in which all but its owner have zeros."""
        training = self.training
        components = dealt(training.network, self.config.seed, phase, training.hands)
        for site in training.network.sites:
            owned = torch.zeros(training.hands, dtype=torch.bool)
            owned[components[rank::ranks, site.posterior.offset]] = True
            for parameter in site.parameters().values():
                rows = parameter.detach().view(training.hands, -1)
                rows[~owned.to(rows.device)] = 0
                rows.copy_(summed(rows))
