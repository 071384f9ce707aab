"""The processes of one job (ranks), as `torchrun` starts them: which one this is, and what they exchange."""

import contextlib
import datetime
import gc
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn


def rank_and_number() -> tuple[int, int]:
    """This process's number among those that have joined, and how many there are: (0, 1) without any others."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def is_first() -> bool:
    """Whether this is the first process of its job, before and after they have joined too: the one that prints."""
    return rank_and_number()[0] == 0 and (dist.is_initialized() or os.environ.get("RANK", "0") == "0")


@contextlib.contextmanager
def process_group(timeout: float) -> Iterator[tuple[int, int]]:
    """Join the other processes of the job for the block, if there are any; (rank, number).

    timeout   seconds after which a process is given up that the others wait for.
    """
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


def own_device() -> torch.device:
    """Where tensors lie that the processes exchange."""
    if rank_and_number()[1] > 1 and dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def summed(values: Tensor) -> Tensor:
    """The sum over all processes, the same bits on each."""
    if rank_and_number()[1] == 1:
        return values
    total = values.detach().to(own_device(), copy=True)
    dist.all_reduce(total)
    return total.to(values.device)


def exchanged(values: Tensor) -> list[Tensor]:
    """The tensor of every process, in their order; they may differ in length, (N_r, ...), and in nothing else."""
    number = rank_and_number()[1]
    if number == 1:
        return [values]
    mine = values.detach().to(own_device()).contiguous()
    lengths = [torch.zeros(1, dtype=torch.int64, device=mine.device) for _ in range(number)]
    dist.all_gather(lengths, torch.tensor([len(mine)], device=mine.device))
    longest = max(int(length) for length in lengths)
    padded = mine.new_zeros(longest, *mine.shape[1:])
    padded[: len(mine)] = mine
    whole = [torch.empty_like(padded) for _ in range(number)]
    dist.all_gather(whole, padded)
    return [part[: int(length)].to(values.device) for part, length in zip(whole, lengths, strict=True)]


def share_buffers_(module: nn.Module) -> None:
    """Give every process the buffers of the first one: running statistics are each process's own while it trains."""
    if rank_and_number()[1] > 1:
        for buffer in module.buffers():
            dist.broadcast(buffer, 0)


def part_of(length: int, part: int, parts: int) -> range:
    """The consecutive numbers below `length` that one of several parts holds: all together hold each once."""
    return range(length)[length * part // parts : length * (part + 1) // parts]
