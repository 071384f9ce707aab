"""The readable path of prediction: Algorithm 1, a forward pass for each draw."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..draws import Draws
from ..errors import PatchbayesError
from ..network import Network, hold
from ..selection import call, evaluating

#: What an engine gives, a few draws at a time: values (D, B, ...), and for each of the D the draws that it belongs to.
Outputs = Iterator[tuple[list[list[int]], Tensor]]


def loop(
    model: nn.Module, network: Network, inputs: Any, draws: Draws, examples: Tensor, output: Callable[[Any], Tensor]
) -> Outputs:
    """The output tensor of each draw in turn, for one batch. Every engine gives these numbers."""
    device = network.device
    for number in range(len(draws)):
        with hold(network, draws.drawn(number, device, examples)):
            value = output(call(model, inputs))
        check_finite(value, [[number]])
        yield [[number]], value.unsqueeze(0)


def check_finite(values: Tensor, members: list[list[int]]) -> None:
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
