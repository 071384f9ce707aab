"""Which examples come in which step, and how they are augmented: a function of the seed, the epoch and the step.

Nothing is remembered between steps, so a run that is resumed at any step goes on with the same batches, and processes that
prepare them may be many or none.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as Numbered

from ..data import Dataset
from ..draws.randomness import fold

_ORDER, _AUGMENTATION, PATCHES, JITTER, DEAL = range(5)  # the streams that a run's seed is split into

#: inputs (B, ...), targets (B,) or (B, D), and what the mean over them counts in the mean over the whole batch
Batch = tuple[Tensor, Tensor, float]


class EpochBatches(Numbered[Batch]):
    """The batches of one epoch by number: a permutation of all examples, cut into pieces of nearly equal size.

    No example is left out, and no last batch is so small that batch norm could not take it. Of each batch, every process
    takes its part.
    """

    def __init__(
        self, dataset: Dataset, batch_size: int, seed: int, epoch: int, process: int = 0, processes: int = 1
    ) -> None:
        self.dataset, self.seed, self.epoch = dataset, seed, epoch
        self.process, self.processes = process, processes
        order = torch.randperm(len(dataset.train), generator=stream(seed, _ORDER, epoch))
        self._batches = order.tensor_split(num_steps(len(dataset.train), batch_size))

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, step: int) -> Batch:
        whole, indices = self._batches[step], self.numbers(step)
        preparation = self.dataset.preparation
        generator = stream(self.seed, _AUGMENTATION, self.epoch, step, self.process)
        raw, targets = self.dataset.train.fetch_augmented(indices, preparation, generator)
        share = len(indices) * self.processes / len(whole)
        return preparation.inputs(raw), preparation.targets(targets), share

    def numbers(self, step: int) -> Tensor:
        """The numbers of this process's examples in a step, (B,) int64."""
        return self._batches[step].tensor_split(self.processes)[self.process]

    def starting_at(self, step: int, workers: int, stop: int | None = None) -> Iterator[Batch]:
        """The batches from that step on, to the end or to `stop`, prepared ahead by `workers` processes."""
        # The loader would take a seed from the global generator for its workers, which draw nothing.
        unused = torch.Generator()
        return iter(
            DataLoader(
                self,
                batch_size=None,
                sampler=range(len(self))[step:stop],
                num_workers=workers,
                collate_fn=_unchanged,
                generator=unused,
            )
        )


def num_steps(num_data: int, batch_size: int) -> int:
    """Steps of an epoch."""
    return -(-num_data // batch_size)


def stream(seed: int, *numbers: int) -> torch.Generator:
    """A generator for one purpose of a run, such as the augmentation of one batch."""
    return torch.Generator().manual_seed(stream_seed(seed, *numbers))


def stream_seed(seed: int, *numbers: int) -> int:
    key = torch.tensor(seed, dtype=torch.int64)
    for number in numbers:
        key = fold(key, number)
    return int(key)


def _unchanged(batch: Any) -> Any:
    return batch
