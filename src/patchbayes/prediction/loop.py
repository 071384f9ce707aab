"""The readable path of prediction: Algorithm 1, a forward pass for each draw."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..draws import Draws
from ..errors import PatchbayesError
from ..network import Network, hold
from ..selection import call


def loop(
    model: nn.Module, network: Network, inputs: Any, draws: Draws, examples: Tensor, output: Callable[[Any], Tensor]
) -> Iterator[Tensor]:
    """The output tensor of each draw in turn, for one batch. Every engine has this signature and gives these numbers."""
    device = network.device
    for number in range(len(draws)):
        with hold(network, draws.drawn(number, device, examples)):
            value = output(call(model, inputs))
        if not torch.isfinite(value).all():
            raise PatchbayesError(
                f"predict: the output of draw {number} is not finite (NaN or infinity); the weights or inputs are."
            )
        yield value


@contextlib.contextmanager
def undisturbed(model: nn.Module, network: Network) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards modes, buffers, draw and random state are what they were."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [
        (module._buffers, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    current, generator = network.current, network.generator.clone()
    devices = [network.device] if network.device is not None and network.device.type == "cuda" else []
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=devices):
            for module, _ in modes:
                module.training = False
            yield
    finally:
        for module, training in modes:
            module.training = training
        for holder, name, buffer, content in buffers:
            holder[name] = buffer
            with torch.no_grad():
                if not torch.equal(buffer, content):
                    buffer.copy_(content)
        network.current = current
        network.generator.copy_(generator)
