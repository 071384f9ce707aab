"""Which layers could be made random: norms, the first layers within a size, or the last ones within a cost of prediction."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import NotASite, PatchbayesError
from ..layers import is_conv, is_linear, is_norm
from ..patching.selection import Sites, call, evaluating, layers_of
from ..posteriors.method import Method
from ..posteriors.posterior import own_parameters

#: A patch takes at most this part of the network, or so many bytes if that is more.
SHARE, BYTES = 0.1, 200_000
#: Norm layers that are too few to try, and so many that nothing else is tried.
_FEW_NORMS, _MANY_NORMS = 3, 12
#: The share of the parameters in layers of other kinds from which the report tells of them.
_TOLD = 0.1
#: What the sets are called.
NORMS, BOTH, FIRST, ALL, LAST = "norm layers", "norm and first layers", "first layers", "all layers", "last layers"


@dataclass(frozen=True)
class Layers:
    """A set of layers that could be made random: the method of each by its name, and why some have a smaller one or none."""

    methods: dict[str, Method]
    notes: tuple[str, ...] = ()

    def rules(self) -> dict[Sites, Method]:
        """The set as `patch_` takes it."""
        return {_having(self.methods, method): method for method in dict.fromkeys(self.methods.values())}


def _having(methods: Mapping[str, Method], method: Method) -> Callable[[str, nn.Module], bool]:
    return lambda name, _module: methods.get(name) == method


def candidate_layers(
    model: nn.Module,
    example: Any,
    limit: float,
    method: Method,
    small: Method | None,
    predict_cost: float | None,
    draws: int,
) -> dict[str, Layers]:
    """Sets of layers by their titles: norm layers and the first convolution and linear layers, as many of these as stay within
    200 kB (their elements are drawn one by one: more would make single predictions slow); convolution and linear layers from
    the start of the network, as many as stay within the limit; where that is not all of them, all, the large ones with the
    `small` method. With a `predict_cost`, those from the end of the network.

    Many norms need no rival: in deep networks they are the better place. Fewer than three are none.

    limit   of bytes that a patch takes; a layer whose own values stay where they are (`Spread`) counts with its size. Without a
            `small` method, the first layer is taken whatever its size.
    """
    multiplying = executed_layers(model, example, _multiplies)
    if predict_cost is not None:
        order = _within_cost(list(reversed(_some(multiplying, model))), predict_cost, draws)
        return {
            LAST: _first(model, order, limit, method) if small is None else _all(model, order, limit, method, small)
        }
    norms = [name for name, _ in executed_layers(model, example, is_norm)]
    found = {}
    if len(norms) >= _FEW_NORMS:
        methods = _first(model, norms, limit, method).methods
        left = min(BYTES, limit - sum(_size(model, name, method) for name in methods))
        early = _first(model, [name for name, _ in multiplying], left, method, at_least=0).methods
        found = {BOTH if early else NORMS: Layers(methods | early)}
        if len(norms) >= _MANY_NORMS:
            return found
    if multiplying or not found:
        order = [name for name, _ in _some(multiplying, model)]
        first = _first(model, order, limit, method)
        fits = small is None or len(first.methods) > 1 or _size(model, order[0], method) <= limit
        found |= {FIRST: first} if fits else {}
        if small is not None and len(first.methods) < len(order):
            found[ALL] = _all(model, order, limit, method, small)
    return found


def _some(order: list[tuple[str, int]], model: nn.Module) -> list[tuple[str, int]]:
    if order:
        return order
    raise PatchbayesError(
        f"bayesianize_: no convolution or linear layer ran in {type(model).__name__}.\n"
        "  do       say sites=..., or calibrate_(model, held_out): its temperature alone."
    )


def _within_cost(order: list[tuple[str, int]], predict_cost: float, draws: int) -> list[str]:
    """The first of these layers, as many as all draws may repeat at a cost of so many passes."""
    if not (math.isfinite(predict_cost) and predict_cost > 1):
        raise PatchbayesError(f"bayesianize_(predict_cost={predict_cost!r}): expected a finite number above 1.")
    work, repeated, chosen = sum(flops for _, flops in order), 0, list[str]()
    for name, flops in order:
        repeated += flops
        if 1 + (draws - 1) * repeated / work > predict_cost:
            break
        chosen.append(name)
    if not chosen:
        raise PatchbayesError(
            f"bayesianize_(predict_cost={predict_cost}): {draws} draws of the last layer alone, "
            f'"{order[0][0]}", cost {1 + (draws - 1) * order[0][1] / work:.2f} passes.\n'
            "  do       allow more, or take fewer draws."
        )
    return chosen


def _first(model: nn.Module, order: list[str], limit: float, method: Method, at_least: int = 1) -> Layers:
    """The first layers whose sizes stay within the limit, and so many in any case."""
    chosen, size = list[str](), 0
    for name in order:
        size += _size(model, name, method)
        if len(chosen) >= at_least and size > limit:
            break
        chosen.append(name)
    return Layers(dict.fromkeys(chosen, method))


def _all(model: nn.Module, order: list[str], limit: float, method: Method, small: Method) -> Layers:
    """All layers, each with the small method; in turn, those that fit into what this leaves of the limit with the other one."""
    taken = dict.fromkeys(order, 0.0)
    methods: dict[str, Method] = {}
    for form, sizes in (
        (small, {name: _small_size(model, name, small) for name in order}),
        (method, {name: _size(model, name, method) for name in order}),
    ):
        for name, size in sizes.items():
            if sum(taken.values()) - taken[name] + size <= limit or (
                form is small and name == order[0] and size < math.inf
            ):
                methods[name], taken[name] = form, size
    notes = [
        f"{name} is left out: it would take the patch above its limit of {limit:,.0f} bytes"
        if name not in methods
        else f"{name} has {small.label} in place of {method.label}: its {sizes[name]:,} bytes would take the patch above its "
        f"limit of {limit:,.0f}"
        for name in order
        if methods.get(name) != method
    ]
    return Layers({name: methods[name] for name in order if name in methods}, tuple(notes))


def _size(model: nn.Module, name: str, method: Method) -> int:
    own = own_parameters(model.get_submodule(name)).values()
    return method.copies * sum(p.numel() * p.element_size() for p in own)


def _small_size(model: nn.Module, name: str, small: Method) -> float:
    """What a method adds to a layer, in bytes; infinite where it is not for such a layer."""
    module = model.get_submodule(name)
    try:
        posterior = small.posterior(module, torch.Generator().manual_seed(0))
        posterior.start_({n: p.detach() for n, p in own_parameters(module).items()}, torch.Generator().manual_seed(0))
    except NotASite:
        return math.inf
    return sum(p.numel() * p.element_size() for p in posterior.parameters())


def layers_left_out(model: nn.Module) -> tuple[str, ...]:
    """A sentence on layers of other kinds, which no set has, where they hold a tenth of the parameters or more."""
    sizes: dict[str, int] = {}
    for module in layers_of(model).values():
        if not (is_norm(module) or _multiplies(module)):
            kind = type(module).__name__
            sizes[kind] = sizes.get(kind, 0) + sum(p.numel() for p in own_parameters(module).values())
    share = sum(sizes.values()) / max(sum(p.numel() for p in model.parameters()), 1)
    if share < _TOLD:
        return ()
    kinds = ", ".join(sorted(kind for kind, size in sizes.items() if size))
    return (
        f"no draws in {kinds} ({100 * share:.0f} % of the parameters): norm, convolution and linear layers have them",
    )


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
