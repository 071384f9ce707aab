"""MC dropout without patching: the network's own `nn.Dropout` layers stay on, with masks of their own for each draw.

Masks come from keys (draw, layer, example), not from the global random state: an example's masks do not depend on its batch,
and threads do not disturb each other.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..draws.draws import Draws
from ..draws.layout import Law, Layout, Series, example_keys
from ..draws.randomness import bernoulli_like, fold
from ..errors import PatchbayesError
from ..patching.selection import call, copied
from .loop import Members, Outputs, check_finite, undisturbed

_CHANNELS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


def dropout_passes(
    model: nn.Module,
    inputs: Any,
    number: int,
    examples: Tensor,
    output: Callable[[Any], Tensor],
    generator: torch.Generator | None,
) -> tuple[Draws, Outputs]:
    """The outputs of `number` passes with fresh masks, and the draws that they stand for."""
    seed = 0 if generator is None else int(torch.randint(2**62, (), generator=generator, device=generator.device))
    draws = Draws(Law(Layout([], ["masks of nn.Dropout"])), [Series("iid", seed, range(number))])
    layers = [
        module
        for module in model.modules()
        if isinstance(module, nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d)
    ]
    if not any(layer.p for layer in layers):
        raise PatchbayesError(
            f"predict(dropout=True): expected {type(model).__name__} to have nn.Dropout layers with a rate above 0, "
            f"got {len(layers)} layers."
        )
    return draws, _passes(model, inputs, draws, examples, output)


def _passes(model: nn.Module, inputs: Any, draws: Draws, examples: Tensor, output: Callable[[Any], Tensor]) -> Outputs:
    twin = copied(model, model.parameters()).eval()
    layers = [module for module in twin.modules() if isinstance(module, (nn.Dropout, *_CHANNELS))]
    with undisturbed(twin):
        for place, key in enumerate(draws.keys()):
            for stream, layer in enumerate(layers):
                layer.forward = _Masked(layer, fold(key, stream + 16), examples)  # type: ignore[assignment, method-assign]
            members, value = Members([[place]]), output(call(twin, inputs)).unsqueeze(0)
            check_finite(value, members)
            yield members, value


class _Masked:
    """The forward of a dropout layer for one draw. A layer that is used twice takes two masks."""

    def __init__(self, layer: nn.Module, key: Tensor, examples: Tensor) -> None:
        self.rate, self.channels = float(layer.p), isinstance(layer, _CHANNELS)  # type: ignore[arg-type]
        self.key, self.examples, self.calls = key, examples, 0

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        if not self.rate:
            return x
        like = x[(slice(None), slice(None)) + (slice(1),) * (x.dim() - 2)] if self.channels else x
        keys = example_keys(fold(self.key, self.calls), x.shape[0], self.examples)
        return x * bernoulli_like(like, keys, 1 - self.rate).div_(max(1 - self.rate, 1e-30))
