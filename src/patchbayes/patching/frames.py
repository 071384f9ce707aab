"""The draw that calls of the running thread compute with: frames on a stack that every thread has for itself.

A draw belongs to the call, not to the network, so that several threads may use one network. A backward pass runs in threads
of its own and knows the draw of its forward by its number.
"""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..draws.layout import NetworkDraw
from ..errors import PatchbayesError

#: Instead of a draw: every site takes its mean.
MEAN = NetworkDraw(torch.tensor(0), torch.zeros(0, dtype=torch.int64), explicit=True, is_mean=True)


#: The values of a site's random parameters, made when they are first asked for.
Values = Callable[[], Mapping[str, Tensor]]


class Frame:
    """A draw that calls of the running thread compute with, and what a site that is just running has been given."""

    def __init__(self, network: Any, draw: NetworkDraw, running: bool) -> None:
        self.network, self.draw, self.running = network, draw, running
        self._given: dict[Any, Values] = {}

    def value(self, site: Any, name: str) -> Tensor:
        given = self._given.get(site)
        return site.realized(self.draw)[name] if given is None else given()[name]

    def giving(self, site: Any, values: Values) -> "Giving":
        """Values for one site, in the block."""
        return Giving(self._given, site, values)


class Giving:
    """The block of `Frame.giving`: a class, since every patched layer enters one whenever it runs."""

    __slots__ = ("before", "given", "site", "values")

    def __init__(self, given: dict[Any, Values], site: Any, values: Values) -> None:
        self.given, self.site, self.values = given, site, values

    def __enter__(self) -> None:
        self.before = self.given.get(self.site)
        self.given[self.site] = self.values

    def __exit__(self, *_: object) -> None:
        if self.before is None:
            del self.given[self.site]
        else:
            self.given[self.site] = self.before


class _Stack(threading.local):
    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.last: weakref.WeakKeyDictionary[Any, NetworkDraw] = weakref.WeakKeyDictionary()


_stack = _Stack()


def frame_of(network: Any) -> Frame | None:
    """The innermost frame of a network in the running thread."""
    for frame in reversed(_stack.frames):
        if frame.network is network:
            return frame
    return None


def running_networks() -> list[Any]:
    """The networks whose forward is running in this thread, the innermost last."""
    return [frame.network for frame in _stack.frames if frame.running]


def last_draw(network: Any) -> NetworkDraw:
    """The newest draw that a forward pass of this thread made or was given."""
    return _stack.last.get(network, MEAN)


def set_last_draw(network: Any, draw: NetworkDraw) -> None:
    """What `last_draw` says from now on, in this thread."""
    _stack.last[network] = draw


@contextlib.contextmanager
def pushed(frame: Frame) -> Iterator[Frame]:
    """The frame on the stack of the running thread, for the block."""
    _stack.frames.append(frame)
    try:
        yield frame
    finally:
        _stack.frames.remove(frame)


def in_backward() -> bool:
    """Whether a backward pass is running in this thread: modules run in it recompute activations."""
    return torch._C._current_graph_task_id() != -1


def raise_unknown_draw(what: str) -> NoReturn:
    raise PatchbayesError(
        f"Activation checkpointing runs {what} again in the backward pass, and the draw of its forward is not known.\n"
        "  do       checkpoint(..., use_reentrant=False) around a call of the patched network; or call backward() too "
        "inside the block of `with patchbayes.use_draw(model):`."
    )
