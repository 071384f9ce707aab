"""What a draw of a network consists of: one flat vector of component indices, and which part of it belongs to whom."""

import functools
import hashlib
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import torch
from torch import Tensor

from .randomness import fold

Scheme = Literal["iid", "stratified", "orthogonal", "enumerated"]


@dataclass(frozen=True)
class Span:
    """Consecutive draw groups with one law: `length` groups of `outcomes` components with `probabilities` (None: uniform)."""

    name: str
    length: int
    outcomes: int
    probabilities: tuple[float, ...] | None = None


class Layout:
    """What a draw of the network consists of: the spans of all sites, one after the other.

    `unbounded` names what else is random (Gaussian noise, dropout masks), which makes the outcomes uncountable.
    """

    def __init__(self, spans: Sequence[Span], unbounded: Sequence[str] = ()) -> None:
        self.spans = tuple(spans)
        self.unbounded = tuple(unbounded)
        starts = itertools.accumulate((span.length for span in self.spans), initial=0)
        *self.starts, self.num_groups = starts
        self.runs = _merge(self.spans)

    @property
    def log10_outcomes(self) -> float:
        """log10 of the number of distinct networks, infinite with noise or masks."""
        if self.unbounded:
            return math.inf
        return sum(span.length * math.log10(span.outcomes) for span in self.spans)

    @property
    def num_outcomes(self) -> int | float:
        """The number of distinct networks: the product over all draw groups."""
        if self.unbounded:
            return math.inf
        return math.prod(span.outcomes**span.length for span in self.spans)

    @functools.cached_property
    def orthogonal_block(self) -> tuple[int, int] | None:
        """(K, t): orthogonal arrays of strength 2 with K^t runs have a column for every draw group; None where none has.

        All groups must choose evenly among the same prime number K of components, and number at most (K^t - 1) / (K - 1),
        with at most 4,096 runs.
        """
        if len(self.runs) != 1 or self.runs[0][2] is not None or self.unbounded:
            return None
        outcomes = self.runs[0][1]
        if any(outcomes % divisor == 0 for divisor in range(2, outcomes)):
            return None
        for exponent in range(2, 13):
            if outcomes**exponent > 4096:
                return None
            if (outcomes**exponent - 1) // (outcomes - 1) >= self.num_groups:
                return outcomes, exponent
        return None

    @functools.cached_property
    def fingerprint(self) -> str:
        """Equal for two networks exactly when draws of one fit the other."""
        text = json.dumps(
            [[s.name, s.length, s.outcomes, s.probabilities] for s in self.spans] + [list(self.unbounded)]
        )
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @functools.cached_property
    def block(self) -> int:
        """Draws of one stratified block: independent blocks of this length are exchangeable replicates."""
        return math.lcm(*(strata_of(outcomes, p) for _, outcomes, p in self.runs)) if self.runs else 1


@dataclass(frozen=True)
class Drawn:
    """The draw that a forward pass computes with: z of the whole network, and the key of its noise and masks.

    indices (num_groups,) int64; key () int64 on the CPU. `explicit` tells a draw that was passed in (prediction, a draw
    context) from one that the network made for itself. `examples` (B,) int64 numbers the examples of the batch, so that
    what is drawn for an example does not depend on its batch; None: rows are numbered as they come.
    """

    key: Tensor
    indices: Tensor
    explicit: bool = False
    examples: Tensor | None = None

    def example_keys(self, num_rows: int) -> Tensor:
        """A key for each row of a batch, (num_rows,) int64."""
        rows = torch.arange(num_rows)
        if self.examples is not None and len(self.examples):
            repeats = num_rows // len(self.examples)
            if repeats * len(self.examples) == num_rows:  # rows that belong to one example stay together
                rows = (self.examples.unsqueeze(1) * repeats + torch.arange(repeats)).flatten()
        return fold(fold(self.key, 0), rows)


@dataclass(frozen=True)
class Part:
    """Draws made together. With `heads` R > 1, counter c is draw c // R of the network with its head span drawn anew."""

    scheme: Scheme
    seed: int
    counters: range | tuple[int, ...]
    heads: int = 1
    head_span: int = -1


def strata_of(outcomes: int, p: tuple[float, ...] | None) -> int:
    if p is None:
        return outcomes
    fractions = [Fraction(x).limit_denominator(256) for x in p]
    if any(abs(float(f) - x) > 1e-9 for f, x in zip(fractions, p, strict=True)):
        return 16
    exact = math.lcm(*(f.denominator for f in fractions))
    return exact if exact <= 256 else 16


def _merge(spans: Sequence[Span]) -> tuple[tuple[int, int, tuple[float, ...] | None], ...]:
    grouped = itertools.groupby(spans, lambda span: (span.outcomes, span.probabilities))
    return tuple((sum(span.length for span in group), *law) for law, group in grouped)
