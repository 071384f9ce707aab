"""How much memory a computation takes, and how much it may take."""

import functools
import os
import time
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_SHARE_OF_FREE_MEMORY = 0.25


@functools.cache
def keep_freed_memory() -> None:
    """Let the C library keep memory that is freed for the next activation, up to 64 MB, once for the process.

    By default glibc gives it back to the system and takes it again, zeroed page by page: a third of the time of a ResNet-20
    at a batch of 64. Its thresholds follow the largest block below 32 MB that was freed; this one is never written to.
    """
    torch.empty(31 * 2**20, dtype=torch.uint8)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that operations in its context make, as long as these live.

    live   now; tensors that were there before, and scratch space inside an operation, are not counted.
    peak   the most so far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {storage._cdata for storage in _storages((args, kwargs))}
        made = func(*args, **(kwargs or {}))
        for storage in _storages(made):
            if storage._cdata not in before and storage._cdata not in self._sizes:
                self._sizes[storage._cdata] = storage.nbytes()
                self.live += storage.nbytes()
                weakref.finalize(storage, self._gone, storage._cdata)
        self.peak = max(self.peak, self.live)
        return made

    def _gone(self, storage: int) -> None:
        self.live -= self._sizes.pop(storage)


def _storages(values: Any) -> list[torch.UntypedStorage]:
    leaves = tree_leaves(values)
    return [t.untyped_storage() for t in leaves if isinstance(t, Tensor) and t.layout == torch.strided]


def make_room(remembered: dict[Any, Any], most: int) -> None:
    """Forget the eldest of what is remembered, if there are too many."""
    if len(remembered) >= most:
        del remembered[next(iter(remembered))]


def default_memory_limit(device: torch.device | None) -> int:
    """A quarter of the memory that is free on the device, looked up at most once a second."""
    return int(_SHARE_OF_FREE_MEMORY * _free_memory(device, int(time.monotonic())))


@functools.lru_cache(maxsize=1)
def _free_memory(device: torch.device | None, _second: int) -> int:
    if device is not None and device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    information = Path("/proc/meminfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("MemAvailable"):
                return 1024 * int(line.split()[1])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 2**32
