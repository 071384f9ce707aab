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
from .prediction import Prediction

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
        part = machine.part(start, stop)
        chosen = _rows(inputs, active, len(examples))
        new = average(part.outputs(chosen, examples[active], output), part.draws, likelihood, False, part.plan)
        state = new if state is None else state.merged(new, active)
        machine.plan = machine.plan if start else part.plan
        freedom += max(
            min(len(part.draws) // length, 25) - 1, 1
        )  # MonteCarloMean joins blocks to at most 25 replicates
        active = active[state.tolerated_error[active] * _caution(freedom) > tolerance]
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
