"""One draw held for a block, several for one batch, and what eval mode stands for."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..draws.draws import Draws
from ..draws.layout import NetworkDraw
from ..errors import PatchbayesError
from .assignment import LawGradient, law_gradient
from .frames import MEAN, Frame, pushed
from .network import Eval, PatchedNetwork, network_of
from .selection import call


def set_eval_(model: nn.Module, mode: Eval) -> None:
    """What a patched network does when it is called in eval mode outside of `predict` and `use_draw`.

    "mean" (the default): the mean network's output, the same at every call, as dropout layers are off in eval mode. "draw": a
    fresh draw at every call. "error": refuse, so that no answer is ever taken for the averaged prediction. In training mode a
    network always draws.
    """
    if mode not in ("mean", "draw", "error"):
        raise PatchbayesError(f'set_eval_(mode={mode!r}): expected "mean", "draw" or "error".')
    network_of(model).eval = mode


@contextlib.contextmanager
def use_draw(model: nn.Module, draws: Draws | None = None) -> Iterator[None]:
    """Hold one draw of the network for all calls of this thread in the block, whichever methods they go through.

    For calls that do not start at the patched network's `forward` (a model's `forward_features`, one of its parts) or that
    make several forward passes of one network (`generate`). Without `draws` the network's generator makes a fresh draw;
    with `draws`, that one (a `Draws` of length 1). Where such calls recompute activations (checkpointing), call backward in
    the block too.
    """
    network = network_of(model)
    check_functions(network, "use_draw")
    if draws is None:
        held = network.advance()
    else:
        network.check(draws)
        if len(draws) != 1:
            raise PatchbayesError(f"use_draw: one draw is held at a time, got {len(draws)}; pass draws[i].")
        held = draws.network_draw(0, network.device)
    with hold(network, held):
        yield


_holding = threading.RLock()  # a block that was given up ends when it is collected, which may be inside another's


@contextlib.contextmanager
def hold(network: PatchedNetwork, held: NetworkDraw) -> Iterator[None]:
    """One draw for all calls of this thread in the block."""
    with _holding:
        network.holds.append(held)
        network.held = network.compiling = held
    try:
        with pushed(Frame(network, held, running=False)):
            yield
    finally:
        with _holding:  # threads may end in another order than they began
            network.holds = [other for other in network.holds if other is not held]
            network.held = network.holds[-1] if network.holds else None
            network.compiling = network.held or MEAN


def forward_draws(model: nn.Module, inputs: Any, draws: int | Draws = 1) -> Tensor:
    """The outputs of S draws of the network on one batch, with gradients: (S, *output.shape).

    With a number, S fresh draws of the network's own generator; with `Draws`, those. For training with S > 1, up to
    `Draws.enumerate(model)`, which marginalizes the assignments exactly (appendix B.4): the probabilities of enumerated draws
    go with the result to `negative_elbo`, which weighs by them. Where mixing probabilities are learned, what was drawn goes
    with it too, so that they get their gradient. tuple and dict inputs are spread.
    """
    network = network_of(model)
    outputs, drawn = [], []
    if isinstance(draws, Draws):
        network.check(draws)
        check_functions(network, "forward_draws with Draws")
    elif isinstance(draws, bool) or not isinstance(draws, int) or draws < 1:
        raise PatchbayesError(f"forward_draws(draws={draws!r}): expected a number of at least 1, or Draws.")
    for number in range(draws if isinstance(draws, int) else len(draws)):
        held = network.advance() if isinstance(draws, int) else draws.network_draw(number, network.device)
        with hold(network, held):
            outputs.append(call(model, inputs))
        drawn.append(held)
    if not all(isinstance(output, Tensor) for output in outputs):
        raise PatchbayesError(
            f"forward_draws: the network returns a {type(outputs[0]).__name__}; a tensor is required."
        )
    stacked = torch.stack(outputs)
    law = law_gradient(model, drawn, draws if isinstance(draws, Draws) else None)
    even = not isinstance(draws, Draws) or torch.equal(draws.weights, torch.full_like(draws.weights, 1 / len(draws)))
    if law is not None or not even:
        stacked = stacked.as_subclass(DrawnOutputs)
        stacked.draw_weights, stacked.law = None if isinstance(draws, int) else draws.weights, law
    return stacked


def check_functions(network: PatchedNetwork, what: str) -> None:
    """Refuse sites whose draws are no functions of the inputs, where one function for all inputs is wanted."""
    for site in network.sites:
        if not site.posterior.joint:
            raise PatchbayesError(
                f'{what}: "{site.name}" ({site.method.label}) draws outputs for each example, and no function of all of them.\n'
                '  do       patch it with form="weights".'
            )


class DrawnOutputs(Tensor):
    """Outputs of draws that do not weigh the same, (S, ...), with their weights (S,), or that depend on learned probabilities
    in the way `law` says: casts and the like keep these."""

    draw_weights: Tensor | None
    law: LawGradient | None

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        source = next((a for a in args if isinstance(a, DrawnOutputs) and "draw_weights" in a.__dict__), None)
        if isinstance(result, DrawnOutputs):
            if source is None or result.dim() == 0 or len(result) != source.shape[0]:
                return result.as_subclass(Tensor)
            result.draw_weights, result.law = source.draw_weights, source.law
        return result
