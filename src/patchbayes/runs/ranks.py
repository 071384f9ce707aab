"""The processes of one run (ranks): what they exchange by hand, and how the loss of one is noticed by the others."""

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import PatchbayesError
from .writing import locked

#: What torch and its backends say when a process has gone or does not answer; few of them have a class of their own.
_LOST = re.compile(r"gloo|nccl|connection (closed|reset|refused)|broken pipe|timed? ?out|socket|store", re.IGNORECASE)


class RankLost(PatchbayesError):
    """Another process of the run has ended, or did not answer in time. What this one knows is saved."""


def rank_and_number() -> tuple[int, int]:
    """This process's number among the processes of the run, and how many there are: (0, 1) without any others."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def summed(values: Tensor) -> Tensor:
    """The sum over all processes, the same bits on each."""
    if rank_and_number()[1] > 1:
        values = values.clone()
        dist.all_reduce(values)
    return values


def share_buffers_(module: nn.Module) -> None:
    """Give every process the buffers of the first one: running statistics are each process's own while it trains."""
    if rank_and_number()[1] > 1:
        for buffer in module.buffers():
            dist.broadcast(buffer, 0)


@contextlib.contextmanager
def noticing_lost_ranks(
    timeout: float, folder: Path, save: Callable[[], bool], where: Callable[[], str]
) -> Iterator[None]:
    """In the block, turn the loss of another process into one message, after saving what is known.

    save    writes the state unless a newer one is there, and says whether it did. One process that is left does, under the
            lock of the folder; any others end without a word.
    """
    _, number = rank_and_number()
    try:
        yield
    except RuntimeError as error:
        if number == 1 or isinstance(error, PatchbayesError) or not _LOST.search(f"{type(error).__name__}: {error}"):
            raise
        saved = _saved(folder, save)
        if saved is None:
            raise SystemExit(1) from None
        why = str(error).strip().splitlines()[0]
        raise RankLost(
            f"another of the {number} processes of this run ended, or did not answer for {timeout:g} seconds, {where()}.\n"
            f"  saved    {'the state after the last whole step' if saved else 'the last checkpoint'}, in {folder}; no step is "
            f"lost.\n  do       go on with resume=True (--resume), with as many processes as you like.\n  because  {why}"
        ) from None


def _saved(folder: Path, save: Callable[[], bool]) -> bool | None:
    """Whether a state was written; None where another process takes care of that."""
    with contextlib.ExitStack() as stack:
        if rank_and_number()[0] != 0:  # the first holds the lock already, if it lives
            try:
                stack.enter_context(locked(folder))
            except PatchbayesError:
                return None
        return save()


@contextlib.contextmanager
def process_group(timeout: float) -> Iterator[tuple[int, int]]:
    """Join the processes that `torchrun` or `accelerate launch` started, if any did; (rank, number)."""
    import datetime
    import gc
    import os

    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        yield rank_and_number()
        return
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout))
    try:
        yield rank_and_number()
        gc.collect()  # gloo may abort processes that leave with live buffers, or at different times
        dist.barrier()
    finally:
        dist.destroy_process_group()


def rows_of_rank(length: int, rank: int, number: int) -> range:
    """The consecutive part of `length` things that a process takes: all together take each once."""
    return range(length)[length * rank // number : length * (rank + 1) // number]


def own_device() -> torch.device | None:
    """Where tensors must lie that the processes exchange; None: anywhere on the processor."""
    if rank_and_number()[1] > 1 and dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return None
