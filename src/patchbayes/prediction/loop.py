"""The readable path of prediction: Algorithm 1, a forward pass for each draw."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..draws.draws import Draws
from ..errors import PatchbayesError
from ..patching.drawing import hold
from ..patching.frames import MEAN
from ..patching.network import PatchedNetwork
from ..patching.selection import call, copied


class Members:
    """For each of D values, the draws that it belongs to."""

    def __init__(self, draws: Sequence[list[int]]) -> None:
        self._draws = draws

    def __len__(self) -> int:
        """D."""
        return len(self._draws)

    def __getitem__(self, value: int) -> list[int]:
        return self._draws[value]

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._draws)

    def part(self, start: int, stop: int) -> "Members":
        """The same for values start..stop-1."""
        return self if (start, stop) == (0, len(self)) else Members(self._draws[start:stop])

    @functools.cached_property
    def pairs(self) -> tuple[Tensor, Tensor]:
        """All pairs of a value and a draw that it belongs to: the values (P,) and the draws (P,), int64."""
        pairs = [(value, draw) for value, some in enumerate(self._draws) for draw in some]
        values, draws = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).unbind(1)
        return values, draws


#: What an engine gives, a few draws at a time: values (D, B, ...), and for each of the D the draws that it belongs to.
Outputs = Iterator[tuple[Members, Tensor]]


def loop(
    model: nn.Module,
    network: PatchedNetwork,
    inputs: Any,
    draws: Draws,
    examples: Tensor,
    output: Callable[[Any], Tensor],
) -> Outputs:
    """The output tensor of each draw in turn, for one batch. Every engine gives these numbers."""
    device = network.device
    for number in range(len(draws)):
        with hold(network, draws.network_draw(number, device, examples)):
            value = output(call(model, inputs))
        yield _checked(number, value)


def mean_pass(
    model: nn.Module, network: PatchedNetwork | None, inputs: Any, output: Callable[[Any], Tensor]
) -> Outputs:
    """The output of the mean network; of a network that is not patched, its own."""
    with hold(network, MEAN) if network is not None else contextlib.nullcontext():
        value = output(call(model, inputs))
    yield _checked(0, value)


def _checked(number: int, value: Tensor) -> tuple[Members, Tensor]:
    members, value = Members([[number]]), value.unsqueeze(0)
    check_finite(value, members)
    return members, value


def check_finite(values: Tensor, members: Members) -> None:
    """Refuse outputs that are NaN or infinite, (D, B, ...)."""
    fine = values < torch.inf  # minus infinity is a class that cannot be
    if not fine.all():
        bad = int((~fine.flatten(1).all(1)).nonzero()[0])
        raise PatchbayesError(
            f"predict: the output of draw {members[bad][0]} is not finite (NaN or infinity): look at the weights and inputs."
        )


def at_rest(model: nn.Module) -> nn.Module:
    """The network in evaluation mode, to be run by the loop: itself if it is in that mode, else a copy with its parameters.

    So a network that another thread trains goes on training. What cannot be copied is refused.
    """
    if not any(module.training for module in model.modules()):
        return model
    try:
        return copied(model, model.parameters()).eval()
    except Exception as error:
        raise PatchbayesError(
            f"predict: {type(model).__name__} is in training mode, and a copy in evaluation mode cannot be made ({error}).\n"
            "  do       model.eval() first."
        ) from error


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """No gradients; afterwards buffers and the global random state are what they were."""
    buffers = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    known = [b for _, held in buffers for b in held.values() if b is not None and not nn.parameter.is_lazy(b)]
    contents = [(buffer, buffer.clone()) for buffer in known]
    try:
        with torch.no_grad(), same_random_state():
            yield
    finally:
        for holder, held in buffers:
            # Scripted modules hold theirs elsewhere; and another thread may be reading those that are as they were.
            same = holder.keys() == held.keys() and all(holder[name] is buffer for name, buffer in held.items())
            if isinstance(holder, dict) and not same:
                holder.clear()
                holder.update(held)
        with torch.no_grad():
            for buffer, content in contents:
                if buffer.layout != torch.strided or not torch.equal(buffer, content):
                    buffer.copy_(content)


@contextlib.contextmanager
def same_random_state() -> Iterator[None]:
    """The global random state is what it was, also where a network draws numbers of its own in evaluation mode.

    Beside other threads it is left alone: it is theirs too, and to set it back would repeat what they have drawn.
    """
    state = torch.get_rng_state()
    try:
        yield
    finally:
        others = [thread for thread in threading.enumerate() if thread is not threading.current_thread()]
        if all(thread.daemon for thread in others) and not torch.equal(torch.get_rng_state(), state):
            torch.set_rng_state(state)
