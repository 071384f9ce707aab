"""Running averages over draws: memory for the sums, never for the draws."""

import functools
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from ..draws.draws import Draws
from .loop import Members

StandardErrorKind = Literal["exact", "independent draws", "independent blocks", "upper estimate", "unknown"]

_MOST_REPLICATES = 25
_FEWEST_BLOCKS = 3  # two say next to nothing about their spread: Student's quantile is 12.7


class Mean:
    """Weighted running mean of values that come a few draws at a time, in any order (Chan et al.).

        mean <- mean + (w / W) (mean of the new - mean)

    Deviation: Algorithm 1 divides by s + 1 with s starting at 1, which would halve the first value; 1 / s is meant.
    """

    def __init__(self) -> None:
        self.mean = torch.zeros(())
        self.weight = 0.0

    def add(self, values: Tensor, weights: Tensor) -> None:
        """values (D, ...), weights (D,)."""
        weights = weights.to(values)
        weight = float(weights.sum())
        if weight:
            self._add(values, weights, weight, values[0] if len(values) == 1 else _sum(weights, values) / weight)

    def _add(self, values: Tensor, weights: Tensor, weight: float, mean: Tensor) -> None:
        self.mean = self.mean + (mean - self.mean) * (weight / (self.weight + weight)) if self.weight else mean
        self.weight += weight


class Moments(Mean):
    """The mean, and the spread around it."""

    def __init__(self) -> None:
        super().__init__()
        self.squares = torch.zeros(())

    def _add(self, values: Tensor, weights: Tensor, weight: float, mean: Tensor) -> None:
        squares = torch.zeros_like(mean) if len(values) == 1 else _sum(weights, (values - mean).square())
        if self.weight:
            between = (mean - self.mean).square() * (self.weight * weight / (self.weight + weight))
            squares = self.squares + squares + between
        self.squares = squares
        super()._add(values, weights, weight, mean)

    @property
    def variance(self) -> Tensor:
        """The weighted mean square around the mean: (1/S) sum_s (x_s - mean)^2 for equal weights."""
        return self.squares / self.weight


def _sum(weights: Tensor, values: Tensor) -> Tensor:
    """sum_d weights[d] values[d]."""
    return (weights @ values.reshape(len(values), -1)).reshape(values.shape[1:])


class LogMean:
    """The logarithm of the weighted mean of exp(value), also where every exp(value) underflows."""

    def __init__(self) -> None:
        self._value: Tensor | None = None

    def add(self, logarithms: Tensor, weights: Tensor) -> None:
        """logarithms (D, ...), weights (D,), which sum to one over all calls."""
        log_weights = weights.to(logarithms).log().reshape(-1, *[1] * (logarithms.dim() - 1))
        found = torch.logsumexp(logarithms + log_weights, dim=0)
        self._value = found if self._value is None else torch.logaddexp(self._value.to(logarithms), found)

    @property
    def value(self) -> Tensor:
        return torch.full((), -torch.inf) if self._value is None else self._value


class MonteCarloMean:
    """The mean over draws of a value, with the standard error that is right for how the draws were made.

    Independent draws: the spread of the draws over sqrt(S). Stratified and orthogonal draws: the spread of independent blocks
    (every component its share of times) over the square root of their number, the draws of an incomplete last block counted
    as independent. Two blocks say too little: then, and where a slice cuts through blocks, the formula for independent
    draws, which overestimates ("upper estimate"). A full enumeration has no Monte-Carlo error, nor has a single network that
    is no draw (draws=None). A part of an enumeration, or draws that come twice, are no sample: their error is unknown.

    Orthogonal arrays are not divided further, though every part of one along a column that no draw group uses is balanced
    too: the parts are not independent. What two sites do together cancels between them, so that their spread is too large;
    what three do together may be alike in all of them, so that it is too small, and no bound either way. The arrays are the
    smallest of K^t runs already, so independent replicates are as many as there are.

    More than 25 blocks are joined to 25 replicates, so that memory does not grow with the number of draws. `joint=True`
    keeps replicates of independent draws too: what the error of a function of several means needs.
    """

    def __init__(self, draws: Draws | None, *, joint: bool = False) -> None:
        self.draws = draws
        self.number = 1 if draws is None else len(draws)
        self.weights = torch.ones(1, dtype=torch.float64) if draws is None else draws.weights
        self.all = Moments()
        self.heads = 1 if draws is None else draws.heads
        length = 1 if draws is None else draws.block_length
        self.whole_blocks = length > 1 and self.number >= _FEWEST_BLOCKS * length
        if not self.whole_blocks:
            length = self.heads  # at least the draws of one trunk stay together
        units = self.number // length
        self.num_replicates = min(units, _MOST_REPLICATES) if length > 1 or joint else 0
        if self.num_replicates:  # units shared out as equally as can be; an incomplete one is the last replicate
            unit = torch.arange(self.number) // length
            self.replicate_of = (unit * self.num_replicates // units).clamp(max=self.num_replicates)
        self.replicates: Tensor | None = None

    def add(self, members: Members, values: Tensor, weights: Tensor) -> None:
        """values (D, ...): value d belongs to the draws members[d], which together weigh weights[d]."""
        self.all.add(values, weights)
        if self.num_replicates >= 2:
            if self.replicates is None:
                shape = (self.num_replicates + 1, *values.shape[1:])
                self.replicates = torch.zeros(shape, dtype=values.dtype, device=values.device)
            rows, draws = members.pairs
            weighted = self.weights[draws].to(values).reshape(-1, *[1] * (values.dim() - 1))
            self.replicates.index_add_(
                0, self.replicate_of[draws].to(values.device), weighted * values[rows.to(values.device)]
            )

    def weights_of(self, members: Members) -> Tensor:
        """The weight of each value in the average, (D,) float64."""
        rows, draws = members.pairs
        if len(rows) == len(members):
            return self.weights[draws]
        return torch.zeros(len(members), dtype=torch.float64).index_add_(0, rows, self.weights[draws])

    @property
    def mean(self) -> Tensor:
        return self.all.mean

    @functools.cached_property
    def kind(self) -> StandardErrorKind:
        if self.draws is None or self.draws.is_exact:
            return "exact"
        if self.number < 2 or "enumerated" in self.draws.schemes or self.draws.has_repeats:
            return "unknown"
        if self.whole_blocks:
            return "independent blocks"
        if self.heads > 1:
            return "upper estimate" if self.num_replicates >= 2 else "unknown"
        return "independent draws" if self.draws.schemes == {"iid"} else "upper estimate"

    @property
    def degrees_of_freedom(self) -> float:
        """Of the standard error, for Student's quantiles: replicates or draws, less one; infinite when exact, NaN when unknown.

        An incomplete last block is not counted, which errs on the side of wider intervals.
        """
        if self.kind in ("exact", "unknown"):
            return torch.inf if self.kind == "exact" else torch.nan
        return (self.num_replicates or self.number) - 1.0

    def standard_error(self, linear: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Of the mean, in its shape; zero when exact, NaN when unknown.

        With `linear` (joint=True), of a function of all means: the derivative of the function at the mean, applied to
        deviations (..., of the mean's shape) (the delta method).
        """
        if self.kind in ("exact", "unknown"):
            return torch.full_like(self.mean, 0.0 if self.kind == "exact" else torch.nan)
        draw_variance = self.all.variance * self.number / (self.number - 1)
        if self.num_replicates < 2:
            assert linear is None
            return (draw_variance * float(self.weights.square().sum())).clamp_min(0).sqrt()
        assert self.replicates is not None
        sizes = torch.zeros(self.num_replicates + 1, dtype=torch.float64).index_add_(0, self.replicate_of, self.weights)
        share, rest = sizes[:-1] / sizes[:-1].sum(), float(sizes[-1])
        whole = 1 - rest
        weight = sizes.to(self.replicates).reshape(-1, *[1] * self.mean.dim())
        center = self.replicates[:-1].sum(0) / whole
        deviation = self.replicates[:-1] / weight[:-1] - center
        deviation = deviation if linear is None else linear(deviation)
        square = share.square().to(deviation).reshape(-1, *[1] * self.mean.dim())
        variance = whole**2 * (square * deviation.square()).sum(0) / (1 - float(share.square().sum()))
        if rest > 0 and linear is None:  # heads of one trunk may agree, so that they count as one draw
            alone = self.weights[self.replicate_of == self.num_replicates].square().sum() * self.heads
            variance = variance + float(alone) * draw_variance
        elif rest > 0 and linear is not None:
            variance = variance + rest**2 * linear(self.replicates[-1:] / rest - center)[0].square()
        return variance.clamp_min(0).sqrt()
