"""Coordinate descent between shared and patched parameters (appendix C.2): what rests in a turn is not worked on either.

In a turn of the patched parameters the shared ones need no gradient, so the backward pass computes none for them and stops at
the first patched layer; what lies before it is a fixed function of an example and is computed once for all epochs of the
turn. In a turn of the shared parameters the patched ones need no gradient.
"""

import contextlib
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from ..data import Dataset
from ..patching.network import site_of
from ..patching.prefix import FixedPrefix, find_prefix, untouched_buffers
from .config import TrainingConfig
from .loss import TrainingLoss

Turn = Literal["shared", "patched"]

_MOST_BYTES = 2**30  # of a kept prefix
_CHUNK = 128  # examples at a time: the same in every run, so that a resumed one keeps the same bits


def turn_of(config: TrainingConfig, step: int, steps_per_epoch: int) -> Turn | None:
    """Whose turn it is in step 0, 1, ... of the run; None: all learn together. Shared parameters have the first turn."""
    if config.learn == "patches":
        return "patched"
    if not config.alternate:
        return None
    return "patched" if step // turn_length(config, steps_per_epoch) % 2 else "shared"


def turn_length(config: TrainingConfig, steps_per_epoch: int) -> int:
    """Steps of a turn."""
    if config.learn == "patches":
        return config.epochs * steps_per_epoch
    return max(1, round(config.alternate * steps_per_epoch))


class Turns:
    """Lets only those parameters learn whose turn it is.

    A parameter that rests has no gradient: it is not decayed, and what the optimizer knows of it stays. Batch norms that are
    not patched rest with the shared parameters: in the patches' turn they normalize by their running statistics and keep them.
    """

    def __init__(
        self, config: TrainingConfig, loss: TrainingLoss, optimizer: torch.optim.Optimizer, dataset: Dataset
    ) -> None:
        self.config, self.loss, self.optimizer, self.dataset = config, loss, optimizer, dataset
        self.turn: Turn | None = None
        self.prefix: FixedPrefix | None = None
        self._kept: list[Tensor] = []
        #: Why no prefix is kept in a turn of the patches, in words; None where one is.
        self.why_not: str | None = None

    def begin(self, turn: Turn, *, keep: bool, epochs: float = 1.0) -> None:
        """Begin a turn, in place; of `epochs` epochs, for which the prefix is kept if `keep` says so."""
        self.turn, self.prefix, self._kept = turn, None, []
        resting = ("shared",) if turn == "patched" else ("patched", "law")
        for group in self.optimizer.param_groups:
            learns = not group["name"].startswith(resting)
            for parameter in group["params"]:
                parameter.requires_grad_(learns)
                parameter.grad = None
        for module in self.loss.network.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and site_of(module) is None:
                module.train(turn == "shared" or module.running_mean is None)
        self.loss.set_resting_kl_()
        if turn == "patched" and keep:
            self._keep_prefix(epochs)

    def serving(self, numbers: Callable[[], Tensor]) -> contextlib.AbstractContextManager[None]:
        """In the block, the network takes its kept prefix for the examples of these numbers, if there is one."""
        if self.prefix is None:
            return contextlib.nullcontext()
        which = numbers()
        return self.prefix.serving([value.index_select(0, which) for value in self._kept])

    def _keep_prefix(self, epochs: float) -> None:
        """Run the prefix on all examples once, in a fixed order, where that saves work."""
        train, preparation = self.dataset.train, self.dataset.preparation
        device = next(self.loss.network.parameters()).device
        self.why_not = self._reason_against(epochs)
        if self.why_not is not None:
            return
        with untouched_buffers(self.loss.network):
            first = preparation.inputs(train.fetch(torch.arange(min(8, len(train))))[0]).to(device)
            prefix = find_prefix(self.loss.network, first)
            if prefix is None:
                self.why_not = "nothing before the first patched layer is the same in every step"
                return
            needed = prefix.bytes_per_example * len(train)
            if needed > _MOST_BYTES:
                self.why_not = f"it would take {needed / 2**30:.1f} GiB, and {_MOST_BYTES / 2**30:.0f} are allowed"
                return
            parts = []
            for numbers in torch.arange(len(train)).split(_CHUNK):
                parts.append(prefix.values(preparation.inputs(train.fetch(numbers)[0]).to(device)))
        self._kept = [torch.cat(column) for column in zip(*parts, strict=True)]
        self.prefix = prefix

    def _reason_against(self, epochs: float) -> str | None:
        if self.dataset.preparation.augmentation != "none":
            return f'augmentation "{self.dataset.preparation.augmentation}" shows other images in every epoch'
        if epochs < 2:
            return "a turn sees every example at most once"
        if self.config.precision != "float32":
            return f"precision is {self.config.precision}"
        return None
