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


def loop(
    model: nn.Module, network: Network, inputs: Any, draws: Draws, examples: Tensor, output: Callable[[Any], Tensor]
) -> Iterator[Tensor]:
    """The output tensor of each draw in turn, for one batch. Every engine has this signature and gives these numbers."""
    device = network.device
    for number in range(len(draws)):
        with hold(network, draws.drawn(number, device, examples)):
            value = output(call(model, inputs))
        if not (value < torch.inf).all():  # minus infinity is a class that cannot be
            raise PatchbayesError(
                f"predict: the output of draw {number} is not finite (NaN or infinity): look at the weights and inputs."
            )
        yield value


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
