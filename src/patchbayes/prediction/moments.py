"""Running averages over draws: memory for the sums, never for the draws."""

from typing import Literal

import torch
from torch import Tensor

from ..draws import Draws

StandardErrorKind = Literal["exact", "independent draws", "independent blocks", "upper estimate", "unknown"]


class Moments:
    """Weighted running mean and spread of values that come one draw at a time (Welford, West).

        mean_s = mean_{s-1} + (w_s / W_s) (x_s - mean_{s-1})

    Deviation: Algorithm 1 divides by s + 1 with s starting at 1, which would halve the first value; 1 / s is meant.
    """

    def __init__(self) -> None:
        self.mean = torch.zeros(())
        self.squares = torch.zeros(())
        self.weight = 0.0
        self.count = 0

    def add(self, value: Tensor, weight: float = 1.0) -> None:
        if self.count == 0:
            self.mean, self.squares = torch.zeros_like(value), torch.zeros_like(value)
        self.count += 1
        self.weight += weight
        step = value - self.mean
        self.mean = self.mean + step * (weight / self.weight) if self.weight else self.mean
        self.squares = self.squares + weight * step * (value - self.mean)

    @property
    def variance(self) -> Tensor:
        """The weighted mean square around the mean: (1/S) sum_s (x_s - mean)^2 for equal weights."""
        return self.squares / self.weight


class MonteCarloMean:
    """The mean over draws of a value, with the standard error that is right for how the draws were made.

    Independent draws: the spread of the draws over sqrt(S). Stratified draws: the spread of independent blocks (`Layout.block`
    draws each, every component once) over the square root of their number; with fewer than two blocks the formula for
    independent draws, which overestimates. A full enumeration has no Monte-Carlo error.
    """

    def __init__(self, draws: Draws) -> None:
        self.draws = draws
        self.block_length = draws.layout.block if draws.schemes == {"stratified"} and draws.num_parts == 1 else 1
        self.all = Moments()
        self.block = Moments()
        self.blocks = Moments()

    def add(self, value: Tensor, weight: float) -> None:
        self.all.add(value, weight)
        if self.block_length > 1:
            self.block.add(value)
            if self.block.count == self.block_length:
                self.blocks.add(self.block.mean)
                self.block = Moments()

    @property
    def mean(self) -> Tensor:
        return self.all.mean

    @property
    def kind(self) -> StandardErrorKind:
        if self.draws.is_exact:
            return "exact"
        if self.blocks.count >= 2:
            return "independent blocks"
        if self.all.count < 2:
            return "unknown"
        return "independent draws" if self.draws.schemes == {"iid"} else "upper estimate"

    @property
    def standard_error(self) -> Tensor:
        """Of the mean, in its shape; zero when exact, NaN with a single draw."""
        kind = self.kind
        if kind == "exact":
            return torch.zeros_like(self.mean)
        if kind == "unknown":
            return torch.full_like(self.mean, torch.nan)
        moments = self.blocks if kind == "independent blocks" else self.all
        length = self.block_length if kind == "independent blocks" else 1
        variance = moments.variance * moments.count / (moments.count - 1)
        return (variance * length / self.all.count).clamp_min(0).sqrt()
