"""Running averages and nothing else, in single precision: for outputs so large that every further statistic is felt.

A language model says B x T x C numbers with each draw. Kept are the sum of the probabilities and that of the entropies; every
draw is worked off a few positions at a time, so that beside its output no second tensor of that size comes into being.
"""

from typing import Any

import torch
from torch import Tensor

from ..draws.draws import Draws
from ..likelihoods import Likelihood
from ..likelihoods.likelihood import tempered
from .loop import Members
from .plan import Plan

_AT_ONCE = 2**19  # numbers that are worked off together: they stay in the cache
#: Numbers of a draw, at several positions for each input, from which on `predict` keeps averages alone.
MANY = 2**22


class RunningAverages:
    """The mean probabilities (B, ..., C) of softened draws and the mean entropy (B, ...) of draws as they are, float32.

    unsoftened   the mean probabilities of draws as they are; None where no draw is softened, and the two are the same.

    weights   (S,) of the draws; None for a single output.
    """

    def __init__(self, number: int, weights: Tensor | None) -> None:
        self.weights = torch.ones(number, dtype=torch.float64) if weights is None else weights
        self.probs: Tensor | None = None
        self.unsoftened: Tensor | None = None
        self.entropy: Tensor | None = None
        self.shape: torch.Size = torch.Size()

    def add(self, members: Members, values: Tensor, likelihood: Likelihood, temperature: float) -> None:
        """values (D, B, ..., C): value d belongs to the draws members[d]."""
        self.shape = values.shape[1:]
        classes = values.shape[-1]
        for some, value in zip(members, values, strict=True):
            weight = float(self.weights[some].sum())
            flat = value.reshape(-1, classes)
            for start in range(0, len(flat), rows := max(1, _AT_ONCE // classes)):
                self._add_rows(flat[start : start + rows], start, len(flat), weight, likelihood, temperature)

    def _add_rows(
        self, rows: Tensor, start: int, number: int, weight: float, likelihood: Likelihood, temperature: float
    ) -> None:
        said = likelihood.predictive(rows.float().unsqueeze(0))
        log_probs = said["log_probs"][0]
        probs = log_probs.exp()
        entropy = -torch.linalg.vecdot(probs, log_probs)
        if not bool(entropy.isfinite().all()):  # classes that cannot be
            entropy = torch.special.entr(probs).sum(-1)
        if self.probs is None or self.entropy is None:
            self.probs, self.entropy = probs.new_zeros(number, probs.shape[-1]), probs.new_zeros(number)
            self.unsoftened = torch.zeros_like(self.probs) if temperature != 1 else None
        if self.unsoftened is not None:
            self.unsoftened[start : start + len(rows)].add_(probs, alpha=weight)
            probs = tempered(said, temperature)["log_probs"][0].exp()
        self.probs[start : start + len(rows)].add_(probs, alpha=weight)
        self.entropy[start : start + len(rows)].add_(entropy, alpha=weight)

    def result(self) -> dict[str, Any]:
        """The averages as fields of a `ClassPrediction`."""
        assert self.probs is not None
        assert self.entropy is not None
        shape = (*self.shape[:-1], -1)
        return {
            "averaged_probs": self.probs.reshape(shape),
            "unsoftened_probs": None if self.unsoftened is None else self.unsoftened.reshape(shape),
            "expected_entropy": self.entropy.reshape(self.shape[:-1]),
        }


def is_large(values: Tensor) -> bool:
    """Whether outputs (D, B, ..., C) are so large that only averages are kept unless more is asked for."""
    return values.dim() > 3 and values[0].numel() > MANY


def fields_without_error(
    draws: Draws | None, plan: Plan, size: int, temperature: float, draw_temperature: float
) -> dict[str, Any]:
    """The fields that every prediction has, where no Monte-Carlo error was followed; but for `standard_error`."""
    number = 1 if draws is None else len(draws)
    return {
        "num_draws": number,
        "standard_error_kind": "unknown",
        "degrees_of_freedom": torch.full((size,), torch.nan, dtype=torch.float64),
        "weights": torch.ones(1, dtype=torch.float64) if draws is None else draws.weights,
        "draws": draws,
        "plan": plan,
        "draws_used": torch.full((size,), number),
        "temperature": temperature,
        "draw_temperature": draw_temperature,
    }


def unknown_like(values: Tensor) -> Tensor:
    """NaN in the shape of `values`, in the memory of one number."""
    with torch.inference_mode(False):
        return torch.full((), torch.nan, device=values.device).expand(values.shape)
