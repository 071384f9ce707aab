"""Stop when sure: draw for each input until its Monte-Carlo error is small enough."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ..likelihoods import Likelihood
from .averages import average
from .engine import Engine
from .prediction import ClassPrediction, Prediction, RegressionPrediction

_FIRST_BLOCKS = 10  # independent blocks before a spread is believed
_GROWTH = 0.5  # of the draws so far, in the next round


def until_sure(
    machine: Engine,
    inputs: Any,
    examples: Tensor,
    output: Callable[[Any], Tensor],
    likelihood: Likelihood,
    tolerance: float,
) -> Prediction:
    """The prediction of one batch, each input with as many of the machine's draws as it needs.

    Draws come in rounds of whole independent blocks; after each, inputs leave the batch whose standard error is below
    `tolerance` with a confidence of 90 %: the estimate from n blocks is multiplied by sqrt((n - 1) / chi2), chi2 being the
    10 % quantile with n - 1 degrees of freedom, since a spread seen a few times, and looked at repeatedly, tends to be seen too
    small when one stops. The statement is one about Gaussian block means; a test measures the true error.
    """
    draws = machine.draws
    length = draws.block_length
    state: Any = None
    active = torch.arange(len(examples))
    start = freedom = 0
    while len(active) and start < len(draws):
        blocks = _FIRST_BLOCKS if start == 0 else max(2, round(_GROWTH * start / length))
        stop = min(start + blocks * length, len(draws))
        if len(draws) - stop < 2 * length:  # what is left alone would be too little to tell its spread
            stop = len(draws)
        part = machine.restricted_to(draws[start:stop])
        chosen = _rows(inputs, active, len(examples))
        new = average(part.outputs(chosen, examples[active], output), part.draws, likelihood, False, part.plan)
        state = new if state is None else _merge(state, new, active)
        machine.plan = machine.plan if start else part.plan
        freedom += max(
            min(len(part.draws) // length, 25) - 1, 1
        )  # MonteCarloMean joins blocks to at most 25 replicates
        active = active[_error(state)[active] * _caution(freedom) > tolerance]
        start = stop
    return dataclasses.replace(state, num_draws=len(draws), weights=draws.weights, draws=draws, plan=machine.plan)


def _rows(inputs: Any, active: Tensor, size: int) -> Any:
    """The inputs of some examples: every tensor with a row for each example is cut."""

    def cut(value: Any) -> Any:
        rows = isinstance(value, Tensor) and value.dim() > 0 and len(value) == size
        return value[active.to(value.device)] if rows else value

    return tree_map(cut, inputs)


def _caution(freedom: int) -> float:
    """sqrt(freedom / chi2) with the 10 % quantile of chi2 after Wilson and Hilferty."""
    part = 2 / (9 * freedom)
    return (1 - part - 1.2816 * part**0.5) ** -1.5


def _error(state: ClassPrediction | RegressionPrediction) -> Tensor:
    """What is compared with the tolerance, (B,)."""
    if isinstance(state, ClassPrediction):
        top = state.probs.argmax(-1, keepdim=True)
        return state.standard_error.gather(-1, top).flatten(1).amax(1).cpu()
    return (state.standard_error / state.variance.sqrt()).flatten(1).amax(1).cpu()


def _merge(old: Any, new: Any, active: Tensor) -> Any:
    """The averages of some inputs over both sets of draws; sets are independent, so variances of the means add up."""
    before = old[active]
    share = (new.draws_used / (new.draws_used + before.draws_used)).to(new.standard_error)

    def mix(a: Tensor, b: Tensor) -> Tensor:
        weight = share.reshape(-1, *[1] * (a.dim() - 1))
        return a + weight * (b - a)

    def spread(a: Tensor, b: Tensor) -> Tensor:
        weight = share.reshape(-1, *[1] * (a.dim() - 1))
        return ((1 - weight).square() * a.square() + weight.square() * b.square()).sqrt()

    fields: dict[str, Tensor] = {
        "draws_used": before.draws_used + new.draws_used,
        "standard_error": spread(before.standard_error, new.standard_error),
    }
    if isinstance(new, ClassPrediction):
        log_share = share.log().reshape(-1, *[1] * (new.probs.dim() - 1))
        log_rest = (-share).log1p().reshape(log_share.shape)
        fields["probs"] = mix(before.probs, new.probs)
        fields["expected_entropy"] = mix(before.expected_entropy, new.expected_entropy)
        fields["log_probs"] = torch.logaddexp(before.log_probs + log_rest, new.log_probs + log_share)
    else:
        gap = new.mean - before.mean
        weight = (share * (1 - share)).reshape(-1, 1, 1)
        between = weight * gap.unsqueeze(-1) * gap.unsqueeze(-2)
        fields["mean"] = mix(before.mean, new.mean)
        fields["epistemic_covariance"] = mix(before.epistemic_covariance, new.epistemic_covariance) + between
    merged = {}
    for name, value in fields.items():
        merged[name] = getattr(old, name).clone()
        merged[name][active.to(merged[name].device)] = value
    return dataclasses.replace(old, **merged)
