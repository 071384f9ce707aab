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

    @property
    def sample_variance(self) -> Tensor:
        """Unbiased for independent values of equal weight: (1/(S-1)) sum_s (x_s - mean)^2."""
        return self.variance * self.count / (self.count - 1)


class MonteCarloMean:
    """The mean over draws of a value, with the standard error that is right for how the draws were made.

    Independent draws: the spread of the draws over sqrt(S). Stratified draws: the spread of independent blocks (`Layout.block`
    draws each, every component its share of times) over the square root of their number, the draws of an incomplete last
    block counted as independent; with fewer than two blocks, or a slice that cuts through them, the formula for independent
    draws, which overestimates. A full enumeration has no Monte-Carlo error. A part of an enumeration, or draws that come
    twice, are no sample: their error is unknown.
    """

    def __init__(self, draws: Draws) -> None:
        self.draws = draws
        self.block_length = draws.block_length
        self.is_sample = "enumerated" not in draws.schemes and len(draws.keys().unique()) == len(draws)
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
        if self.all.count < 2 or not self.is_sample:
            return "unknown"
        if self.blocks.count >= 2:
            return "independent blocks"
        return "independent draws" if self.draws.schemes == {"iid"} else "upper estimate"

    @property
    def standard_error(self) -> Tensor:
        """Of the mean, in its shape; zero when exact, NaN when unknown."""
        kind = self.kind
        if kind == "exact":
            return torch.zeros_like(self.mean)
        if kind == "unknown":
            return torch.full_like(self.mean, torch.nan)
        number, rest = self.all.count, self.all.count
        variance = torch.zeros_like(self.mean)
        if kind == "independent blocks":
            rest = number - self.blocks.count * self.block_length
            variance = self.blocks.count * self.block_length**2 * self.blocks.sample_variance
        variance = variance + rest * self.all.sample_variance
        return (variance / number**2).clamp_min(0).sqrt()
