"""Turns: so many threads at a time, in the order in which they came."""

import os
import threading
from collections import deque
from types import TracebackType

import torch


class Turns:
    """A block that at most `places` threads are in; the others wait, first come, first served.

    More threads than cores would take each other's cache and the interpreter's lock, and all of them together would get less
    done than one alone. Whoever leaves hands the place to the one that has waited longest.
    """

    def __init__(self, places: int) -> None:
        self._free, self._waiting, self._lock = places, deque[threading.Lock](), threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            if self._free:
                self._free -= 1
                return
            mine = threading.Lock()
            mine.acquire()
            self._waiting.append(mine)
        try:
            mine.acquire()  # until it is handed over
        except BaseException:  # Ctrl-C: leave the queue, or pass on what came meanwhile
            with self._lock:
                still_waiting = mine in self._waiting
                if still_waiting:
                    self._waiting.remove(mine)
            if not still_waiting:
                self._hand_over()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hand_over()

    def _hand_over(self) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._free += 1


def places() -> int:
    """How many threads this process can run side by side: its cores over those that torch takes for each."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // torch.get_num_threads())
