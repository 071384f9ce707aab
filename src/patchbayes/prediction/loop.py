"""The readable path of prediction: Algorithm 1, a forward pass for each draw."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..draws import Draws
from ..errors import PatchbayesError
from ..network import Network, hold
from ..selection import call, evaluating


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
    model: nn.Module, network: Network, inputs: Any, draws: Draws, examples: Tensor, output: Callable[[Any], Tensor]
) -> Outputs:
    """The output tensor of each draw in turn, for one batch. Every engine gives these numbers."""
    device = network.device
    for number in range(len(draws)):
        with hold(network, draws.drawn(number, device, examples)):
            value = output(call(model, inputs))
        members = Members([[number]])
        value = value.unsqueeze(0)
        check_finite(value, members)
        yield members, value


def check_finite(values: Tensor, members: Members) -> None:
    """Refuse outputs that are NaN or infinite, (D, B, ...)."""
    fine = values < torch.inf  # minus infinity is a class that cannot be
    if not fine.all():
        bad = int((~fine.flatten(1).all(1)).nonzero()[0])
        raise PatchbayesError(
            f"predict: the output of draw {members[bad][0]} is not finite (NaN or infinity): look at the weights and inputs."
        )


@contextlib.contextmanager
def undisturbed(model: nn.Module, network: Network) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards modes, buffers, draw and random state are what they were."""
    current, generator = network.current, network.generator.clone()
    try:
        with evaluating(model):
            yield
    finally:
        network.current = current
        network.generator.copy_(generator)
