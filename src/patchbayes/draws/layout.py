"""What a draw of a network consists of: one flat vector of component indices, and which part of it belongs to whom."""

import functools
import hashlib
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal

import torch
from torch import Tensor

from ..errors import PatchbayesError
from .randomness import fold

Scheme = Literal["iid", "stratified", "orthogonal", "enumerated"]
Probabilities = tuple[float, ...] | None


@dataclass(frozen=True)
class Span:
    """Consecutive draw groups of one site: `length` groups that choose among `outcomes` components each."""

    name: str
    length: int
    outcomes: int


class Layout:
    """What a draw of the network consists of: the spans of all sites, one after the other.

    `unbounded` names what else is random (Gaussian noise, dropout masks), which makes the outcomes uncountable. How likely
    the components are is not part of it (see `Law`): draws fit a network whatever its probabilities have become. `apart` names
    sites that draw for every input by itself what one function would give to all of them.
    """

    def __init__(self, spans: Sequence[Span], unbounded: Sequence[str] = (), apart: Sequence[str] = ()) -> None:
        self.spans = tuple(spans)
        self.unbounded, self.apart = tuple(unbounded), tuple(apart)
        starts = itertools.accumulate((span.length for span in self.spans), initial=0)
        *self.starts, self.num_groups = starts

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
    def fingerprint(self) -> str:
        """Equal for two networks exactly when draws of one fit the other."""
        return _hash([[s.name, s.length, s.outcomes] for s in self.spans] + [list(self.unbounded)])


class Law:
    """A layout with the probabilities of its components, one tuple for each span (None: uniform), as they were when read."""

    def __init__(self, layout: Layout, probabilities: Sequence[Probabilities] | None = None) -> None:
        self.layout = layout
        self.probabilities = tuple(probabilities) if probabilities is not None else (None,) * len(layout.spans)
        grouped = itertools.groupby(
            zip(layout.spans, self.probabilities, strict=True), lambda pair: (pair[0].outcomes, pair[1])
        )
        #: Consecutive groups with one law: (length, outcomes, probabilities).
        self.runs = tuple((sum(span.length for span, _ in pairs), *law) for law, pairs in grouped)

    @functools.cached_property
    def orthogonal_block(self) -> tuple[int, int] | None:
        """(K, t): orthogonal arrays of strength 2 with K^t runs have a column for every draw group; None where none has.

        All groups must choose evenly among the same prime number K of components, and number at most (K^t - 1) / (K - 1),
        with at most 4,096 runs.
        """
        if len(self.runs) != 1 or self.runs[0][2] is not None or self.layout.unbounded:
            return None
        outcomes = self.runs[0][1]
        if any(outcomes % divisor == 0 for divisor in range(2, outcomes)):
            return None
        for exponent in range(2, 13):
            if outcomes**exponent > 4096:
                return None
            if (outcomes**exponent - 1) // (outcomes - 1) >= self.layout.num_groups:
                return outcomes, exponent
        return None

    @functools.cached_property
    def block(self) -> int:
        """Draws of one stratified block: independent blocks of this length are exchangeable replicates."""
        return math.lcm(*(strata_of(outcomes, p) for _, outcomes, p in self.runs)) if self.runs else 1

    @property
    def fingerprint_1(self) -> str:
        """The fingerprint that version 0.1.0 wrote into files of draws: with the probabilities."""
        spans = zip(self.layout.spans, self.probabilities, strict=True)
        return _hash([[s.name, s.length, s.outcomes, p] for s, p in spans] + [list(self.layout.unbounded)])


@dataclass(frozen=True)
class NetworkDraw:
    """The draw that a forward pass computes with: z of the whole network, and the key of its noise and masks.

    indices (num_groups,) int64; key () int64 on the CPU. `explicit` tells a draw that was passed in (prediction, a draw
    context) from one that the network made for itself. `examples` (B,) int64 numbers the examples of the batch, so that
    what is drawn for an example does not depend on its batch; None: rows are numbered as they come. `is_mean` stands for
    no draw at all: every site takes its mean. `log_probs` is filled while the draw is used, by sites that draw for themselves
    (for each example) from a law that is learned: site name -> log p of what was drawn, () or (B,).
    """

    key: Tensor
    indices: Tensor
    explicit: bool = False
    examples: Tensor | None = None
    is_mean: bool = False
    log_probs: dict[str, Tensor] = field(default_factory=dict, compare=False, repr=False)


def example_keys(key: Tensor, num_rows: int, examples: Tensor | None = None) -> Tensor:
    """A key for each row of a batch, (num_rows,) int64, from the key of a draw and the numbers of the batch's examples."""
    rows = torch.arange(num_rows)
    if examples is not None and examples.shape[0]:  # not len(), which an exported graph would take for a constant
        repeats = num_rows // examples.shape[0]
        if repeats * examples.shape[0] == num_rows:  # rows that belong to one example stay together
            rows = (examples.unsqueeze(1) * repeats + torch.arange(repeats)).flatten()
    return fold(fold(key, 0), rows)


@dataclass(frozen=True)
class Series:
    """Draws made together. With `heads` R > 1, counter c is draw c // R of the network with its head span drawn anew."""

    scheme: Scheme
    seed: int
    counters: range | tuple[int, ...]
    heads: int = 1
    head_span: int = -1


def probabilities_of(log_p: Tensor, where: str) -> tuple[float, ...]:
    """The probabilities of a law, (outcomes,), as numbers that sum to one."""
    p = log_p.detach().double().exp()
    if not p.isfinite().all():
        raise PatchbayesError(
            f"{where}: its mixing probabilities are not finite ({p.tolist()}): training has diverged.\n"
            "  do       a smaller learning rate, or load the last good checkpoint."
        )
    return tuple(float(f"{x:.15g}") for x in p.tolist())


def strata_of(outcomes: int, p: tuple[float, ...] | None) -> int:
    if p is None:
        return outcomes
    fractions = [Fraction(x).limit_denominator(256) for x in p]
    if any(abs(float(f) - x) > 1e-9 for f, x in zip(fractions, p, strict=True)):
        return 16
    exact = math.lcm(*(f.denominator for f in fractions))
    return exact if exact <= 256 else 16


def _hash(content: object) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
