"""From the outputs of draws to a prediction: running averages, whichever engine and order the outputs come in."""

import warnings
from collections.abc import Generator, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from ..draws.draws import Draws
from ..errors import PatchbayesError
from ..likelihoods import Categorical, Likelihood
from ..likelihoods.categorical import LOGITS_INSTEAD, PROBABILITIES
from .loop import Members, Outputs
from .moments import MonteCarloMean
from .plan import Plan
from .prediction import Prediction, prediction_class
from .running import is_large

Statistics = Literal["all", "averages"]

_LOOKED_AT = 16  # examples


def average(
    outputs: Outputs,
    draws: Draws | None,
    likelihood: Likelihood,
    keep: bool,
    plan: Plan,
    *,
    mean: bool = False,
    statistics: Statistics | None = "all",
) -> Prediction:
    """The prediction for one batch, tempered as the likelihood says.

    draws  None where nothing was drawn: one output, without Monte-Carlo error.
    mean   the output is that of the mean network: `likelihood.mean_temperature` counts.
    statistics   "all", or "averages" alone; None: by the size of the outputs.
    """
    before = 1.0 if mean else float(likelihood.draw_temperature)
    after = float(likelihood.mean_temperature if mean else likelihood.temperature)
    kind = prediction_class(likelihood.offers)
    try:
        first = next(outputs)
        if isinstance(likelihood, Categorical) and likelihood.are_probabilities(first[1][:1, :_LOOKED_AT]):
            warnings.warn(f"predict: {PROBABILITIES}, read as logits here: {LOGITS_INSTEAD}", stacklevel=5)
        lean = statistics == "averages" or (statistics is None and not keep and is_large(first[1]))
        coming = _with_first([first], outputs)
        del first
        if lean:
            return kind.running(coming, draws, likelihood, before, after, plan)
        return kind.averaged(coming, draws, likelihood, before, after, keep, plan)
    finally:  # an error must not leave the modes on in which outputs were being made
        if isinstance(outputs, Generator):
            outputs.close()


def _with_first(first: list[tuple[Members, Tensor]], rest: Outputs) -> Outputs:
    """The first output again, and then the rest; none is held while the next is made."""
    yield first.pop()
    yield from rest


def predictives(
    outputs: Outputs, likelihood: Likelihood, expected: tuple[str, ...]
) -> Iterator[tuple[Members, torch.dtype, Mapping[str, Tensor]]]:
    """What each draw says by itself (D, B, ...), not softened, in double precision; in which to report the average."""
    for members, values in outputs:
        found = likelihood.predictive(values.to(accumulator(values)))
        shapes = {name: tuple(value.shape) for name, value in found.items()}
        if tuple(found) != expected or any(shape[:2] != values.shape[:2] for shape in shapes.values()):
            raise PatchbayesError(
                f"{type(likelihood).__name__} offers a {likelihood.offers}: expected its predictive to give "
                f"{', '.join(expected)} of shape {(*values.shape[:2], '...')}, got {shapes}."
            )
        yield members, torch.promote_types(values.dtype, torch.float32), found


def of_all(
    draws: Draws | None, plan: Plan, estimate: MonteCarloMean, temperature: float, draw_temperature: float = 1.0
) -> dict[str, Any]:
    """The fields that every prediction has, but for the standard error."""
    size = estimate.mean.shape[:1]
    return {
        "num_draws": estimate.number,
        "standard_error_kind": estimate.kind,
        "degrees_of_freedom": torch.full(size, estimate.degrees_of_freedom, dtype=torch.float64),
        "weights": estimate.weights,
        "draws": draws,
        "plan": plan,
        "draws_used": torch.full(size, estimate.number),
        "temperature": temperature,
        "draw_temperature": draw_temperature,
    }


class Kept:
    """Every draw's value, (S, B, ...), filled in any order; nothing where none are wanted."""

    def __init__(self, number: int, wanted: bool) -> None:
        self.number, self.wanted = number, wanted
        self.values: Tensor | None = None

    def add(self, members: Members, values: Tensor) -> None:
        """values (D, B, ...)."""
        if not self.wanted:
            return
        if self.values is None:
            self.values = torch.empty(self.number, *values.shape[1:], dtype=values.dtype, device=values.device)
        for some, value in zip(members, values, strict=True):
            self.values[some] = value


def accumulator(value: Tensor) -> torch.dtype:
    """Sums are kept in double precision where the device has it."""
    return torch.float32 if value.device.type == "mps" else torch.float64
