"""Which layers could be made random: norms, the first layers within a size, or the last ones within a cost of prediction."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import PatchbayesError
from ..layers import is_conv, is_linear, is_norm
from ..patching.selection import call, evaluating, layers_of
from ..posteriors.posterior import own_parameters

#: A patch takes at most this part of the network, or so many bytes if that is more.
SHARE, BYTES = 0.1, 200_000
#: Norm layers that are too few to try, and so many that nothing else is tried.
_FEW_NORMS, _MANY_NORMS = 3, 12
#: What the sets are called.
NORMS, FIRST, LAST = "norm layers", "first layers", "last layers"


def candidate_layers(
    model: nn.Module, example: Any, model_bytes: int, copies: int, predict_cost: float | None, draws: int
) -> dict[str, set[str]]:
    """Sets of layers by their titles: norm layers, and convolution and linear layers from the start of the network; with a
    `predict_cost`, those from its end.

    Many norms need no rival: in deep networks they are the better place. Fewer than three are none.

    copies   how many times its own size a patched layer takes in a file. The first layer is taken whatever its size.
    """
    multiplying = executed_layers(model, example, _multiplies)
    limit = max(SHARE * model_bytes, BYTES) / copies
    if predict_cost is not None:
        order = list(reversed(_some(multiplying, model)))
        return {LAST: _within(model, order, limit, predict_cost, draws)}
    norms = executed_layers(model, example, is_norm)
    found = {NORMS: _within(model, norms, limit)} if len(norms) >= _FEW_NORMS else {}
    if len(norms) < _MANY_NORMS and (multiplying or not found):
        found[FIRST] = _within(model, _some(multiplying, model), limit)
    return found


def _some(order: list[tuple[str, int]], model: nn.Module) -> list[tuple[str, int]]:
    if order:
        return order
    raise PatchbayesError(
        f"bayesianize_: no convolution or linear layer ran in {type(model).__name__}.\n"
        "  do       say sites=..., or calibrate_(model, held_out): its temperature alone."
    )


def _within(
    model: nn.Module, order: list[tuple[str, int]], limit: float, predict_cost: float | None = None, draws: int = 1
) -> set[str]:
    """The first of so many bytes, whose draws cost at most so many passes."""
    if predict_cost is not None and not (math.isfinite(predict_cost) and predict_cost > 1):
        raise PatchbayesError(f"bayesianize_(predict_cost={predict_cost!r}): expected a finite number above 1.")
    work = sum(flops for _, flops in order)
    modules, chosen, size, repeated = dict(model.named_modules()), set[str](), 0, 0
    for name, flops in order:
        own = sum(p.numel() * p.element_size() for p in own_parameters(modules[name]).values())
        repeated += flops
        if predict_cost is not None and 1 + (draws - 1) * repeated / work > predict_cost:
            break
        if chosen and size + own > limit:
            break
        chosen.add(name)
        size += own
    if not chosen:
        raise PatchbayesError(
            f"bayesianize_(predict_cost={predict_cost}): {draws} draws of the last layer alone, "
            f'"{order[0][0]}", cost {1 + (draws - 1) * order[0][1] / work:.2f} passes.\n'
            "  do       allow more, or take fewer draws."
        )
    return chosen


def _multiplies(module: nn.Module) -> bool:
    return is_conv(module) or is_linear(module)


def executed_layers(model: nn.Module, example: Any, wanted: Callable[[nn.Module], bool]) -> list[tuple[str, int]]:
    """Layers with parameters in the order in which a pass runs them first, with their multiplications for a batch."""
    found: dict[str, int] = {}

    def count(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            weight = module._parameters.get("weight")
            each = 1 if weight is None else max(weight.numel() // max(weight.shape[0], 1), 1)
            found[name] = found.get(name, 0) + output.numel() * each

    handles = [
        module.register_forward_hook(lambda m, i, o, name=name: count(name, m, i, o))
        for name, module in layers_of(model).items()
        if wanted(module) and own_parameters(module)
    ]
    try:
        with evaluating(model), torch.no_grad():
            call(model, example)
    finally:
        for handle in handles:
            handle.remove()
    return list(found.items())
