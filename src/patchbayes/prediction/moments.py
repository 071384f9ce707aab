"""Running averages over draws: memory for the sums, never for the draws."""

from typing import Literal

import torch
from torch import Tensor

from ..draws import Draws
from .loop import Members

StandardErrorKind = Literal["exact", "independent draws", "independent blocks", "upper estimate", "unknown"]

_MOST_REPLICATES = 25


class Moments:
    """Weighted running mean and spread of values that come a few draws at a time, in any order (Chan et al.).

        mean <- mean + (w / W) (mean of the new - mean)

    Deviation: Algorithm 1 divides by s + 1 with s starting at 1, which would halve the first value; 1 / s is meant.
    """

    def __init__(self) -> None:
        self.mean = torch.zeros(())
        self.squares = torch.zeros(())
        self.weight = 0.0

    def add(self, values: Tensor, weights: Tensor) -> None:
        """values (D, ...), weights (D,)."""
        weights = weights.to(values).reshape(-1, *[1] * (values.dim() - 1))
        weight = float(weights.sum())
        if not weight:
            return
        mean = values[0] if len(values) == 1 else (weights * values).sum(0) / weight
        squares = torch.zeros_like(mean) if len(values) == 1 else (weights * (values - mean).square()).sum(0)
        if not self.weight:
            self.mean, self.squares, self.weight = mean, squares, weight
            return
        total = self.weight + weight
        step = mean - self.mean
        self.mean = self.mean + step * (weight / total)
        self.squares = self.squares + squares + step.square() * (self.weight * weight / total)
        self.weight = total

    @property
    def variance(self) -> Tensor:
        """The weighted mean square around the mean: (1/S) sum_s (x_s - mean)^2 for equal weights."""
        return self.squares / self.weight


class MonteCarloMean:
    """The mean over draws of a value, with the standard error that is right for how the draws were made.

    Independent draws: the spread of the draws over sqrt(S). Stratified draws: the spread of independent blocks (`Layout.block`
    draws each, every component its share of times) over the square root of their number, the draws of an incomplete last
    block counted as independent; with fewer than two blocks, or a slice that cuts through them, the formula for independent
    draws, which overestimates. A full enumeration has no Monte-Carlo error. A part of an enumeration, or draws that come
    twice, are no sample: their error is unknown. More than 25 blocks are joined to at most 25 replicates, so that memory
    does not grow with the number of draws.
    """

    def __init__(self, draws: Draws) -> None:
        self.draws = draws
        self.weights = draws.weights
        self.is_sample = "enumerated" not in draws.schemes and not draws.has_repeats
        self.all = Moments()
        length = draws.block_length
        if length > 1 and len(draws) < 2 * length:
            length = draws.heads  # too few blocks: at least the draws of one trunk stay together
        self.whole_blocks = length == draws.block_length
        blocks = len(draws) // length if length > 1 else 0
        self.num_replicates = min(blocks, _MOST_REPLICATES)
        self.replicate_length = blocks // self.num_replicates * length if blocks else 0
        self.replicates: Tensor | None = None

    def add(self, members: Members, values: Tensor, weights: Tensor) -> None:
        """values (D, ...): value d belongs to the draws members[d], which together weigh weights[d]."""
        self.all.add(values, weights)
        if self.num_replicates >= 2:
            if self.replicates is None:
                self.replicates = torch.zeros(
                    self.num_replicates, *values.shape[1:], dtype=values.dtype, device=values.device
                )
            rows, draws = (part.to(values.device) for part in members.pairs)
            replicates = draws // self.replicate_length
            whole = replicates < self.num_replicates  # the draws of an incomplete last block belong to none
            self.replicates.index_add_(0, replicates[whole], values[rows[whole]])

    def weights_of(self, members: Members) -> Tensor:
        """The weight of each value in the average, (D,) float64."""
        rows, draws = members.pairs
        return torch.zeros(len(members), dtype=torch.float64).index_add_(0, rows, self.weights[draws])

    @property
    def mean(self) -> Tensor:
        return self.all.mean

    @property
    def kind(self) -> StandardErrorKind:
        if self.draws.is_exact:
            return "exact"
        if len(self.draws) < 2 or not self.is_sample:
            return "unknown"
        if self.num_replicates >= 2:
            return "independent blocks" if self.whole_blocks else "upper estimate"
        if self.draws.heads > 1:
            return "unknown"
        return "independent draws" if self.draws.schemes == {"iid"} else "upper estimate"

    @property
    def standard_error(self) -> Tensor:
        """Of the mean, in its shape; zero when exact, NaN when unknown."""
        kind, number = self.kind, len(self.draws)
        if kind == "exact":
            return torch.zeros_like(self.mean)
        if kind == "unknown":
            return torch.full_like(self.mean, torch.nan)
        variance, rest = torch.zeros_like(self.mean), number
        if self.num_replicates >= 2:
            assert self.replicates is not None
            rest = number - self.num_replicates * self.replicate_length
            variance = self.num_replicates * self.replicates.var(dim=0)
        variance = variance + rest * self.all.variance * number / (number - 1)
        return (variance / number**2).clamp_min(0).sqrt()
