"""Draws: which component every draw group of the network takes, as an explicit value.

A network's assignment is one flat vector z of component indices, a number for every *draw group* (the network, a site,
an input unit or an element, as the posterior's tie says). `Layout` says which part of z belongs to which site; `Draws` is
S such vectors, kept as seeds and counters only: any slice of any vector is computed when asked for.
"""

import bisect
import functools
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from ..errors import NotPatched, PatchbayesError, TooManyOutcomes, WrongDraws
from ..files import read_json, write_atomically
from .json_form import probabilities_from_json, series_from_json, series_to_json
from .layout import Law, Layout, NetworkDraw, Scheme, Series
from .schemes import assigned, enumerated, is_marginal, keys_of

#: Where a patched root module keeps its record.
RECORD = "_patchbayes"


class Draws:
    """S draws of a whole network: a value to make once and to pass to every path that computes with it.

    Make it with `sample` (independent, the paper's), `stratified` or `enumerate`; slice it, add two, save it. It holds seeds
    and counters, not assignments: S = 200 draws of an ECMP ResNet-18 would be 836 MB of indices, and here are two numbers.
    Draws fit the network they were made for (same sites, ties, components), whatever its weights, and keep the
    probabilities that they were made with. `weighted` gives them other weights in averages (`stack` finds good ones).
    """

    def __init__(self, law: Law, parts: Sequence[Series], given: Sequence[float] | None = None) -> None:
        self.law = law
        self._parts = tuple(part for part in parts if len(part.counters))
        self._given = None if given is None else tuple(given)

    @classmethod
    def sample(cls, model: nn.Module, num_draws: int, generator: torch.Generator | None = None) -> Self:
        """Independent draws from q (Algorithm 1). The seed comes from `generator`; without one it is 0."""
        check_count(num_draws)
        return cls(law_of(model), [Series("iid", _seed_from(generator), range(num_draws))])

    @classmethod
    def stratified(cls, model: nn.Module, num_draws: int, generator: torch.Generator | None = None) -> Self:
        """Draws in which every component comes equally often in every draw group: unbiased, less variance.

        In each block of K consecutive draws, a group runs through its K components in a random order of its own; groups
        and blocks are independent (a Latin hypercube). With unequal probabilities p a block is as long as it takes to
        hold every component its exact share of times (at most 256; else 16 equal slices of [0, 1)).
        """
        check_count(num_draws)
        return cls(law_of(model), [Series("stratified", _seed_from(generator), range(num_draws))])

    @classmethod
    def orthogonal(cls, model: nn.Module, num_draws: int, generator: torch.Generator | None = None) -> Self:
        """Draws in which every *pair* of components comes equally often in every pair of draw groups.

        Blocks are randomized orthogonal arrays of strength 2 (Bose construction: runs are the points of Z_K^t, columns its
        lines through zero), with columns, symbols and the order of runs shuffled for each block: unbiased, and exact for any
        function that is a sum of functions of two groups. For EMP with a prime number of components: K = 5 needs 25
        draws a block for up to 6 sites, 125 for up to 31.
        """
        check_count(num_draws)
        law = law_of(model)
        if law.orthogonal_block is None:
            raise PatchbayesError(
                "Draws.orthogonal: needs one draw group a site, with the same prime number of components and equal "
                f"probabilities everywhere, and few of them ({law.layout.num_groups} here).\n  do       Draws.stratified."
            )
        return cls(law, [Series("orthogonal", _seed_from(generator), range(num_draws))])

    @classmethod
    def enumerate(cls, model: nn.Module, limit: int = 100_000) -> Self:
        """Every distinct network once, with its probability as weight: averages over it have no Monte-Carlo error."""
        law = law_of(model)
        layout = law.layout
        if layout.unbounded:
            raise TooManyOutcomes(
                f"Draws.enumerate: the outcomes of this network cannot be counted ({', '.join(layout.unbounded)}).\n"
                f"  do       Draws.sample(model, num_draws)"
            )
        if layout.log10_outcomes > math.log10(limit) + 1e-9:
            raise TooManyOutcomes(
                f"Draws.enumerate: this network has {format_count(layout.log10_outcomes)} outcomes, "
                f"more than limit={limit:,}.\n"
                f"  do       Draws.sample or Draws.stratified, fewer sites or components, or a larger limit."
            )
        return cls(law, [Series("enumerated", 0, range(int(layout.num_outcomes)))])

    def with_heads(self, site: str, heads: int) -> Self:
        """Each draw `heads` times, with the components of one site (the output layer) drawn anew: S * heads draws.

        A site with one draw group takes each of its components once, weighted with its probability, where `heads` is their
        number: the average over the site is then exact for each draw of the rest. Other sites are stratified over the
        heads. The draws of one trunk are not independent of each other; `block_length` counts them as one block.
        """
        (number,) = [n for n, span in enumerate(self.layout.spans) if span.name == site]
        if self.is_weighted or heads < 1 or any(part.heads > 1 or part.scheme == "enumerated" for part in self._parts):
            raise PatchbayesError(
                "with_heads: takes sampled or stratified draws without weights of their own, once, and at least one head."
            )
        parts = []
        for part in self._parts:
            crossed = _as_range([c * heads + head for c in part.counters for head in range(heads)])
            parts.append(Series(part.scheme, part.seed, crossed, heads, number))
        return type(self)(self.law, parts)

    def weighted(self, weights: Sequence[float] | Tensor) -> Self:
        """The same draws with weights of your own, (S,), each at least 0; draws of weight 0 are left out.

        An average over them is no longer one over a sample of q: its Monte-Carlo error is not defined, and a prediction's
        `standard_error` is NaN. They cannot be joined to other draws.
        """
        values = weights.tolist() if isinstance(weights, Tensor) else [float(w) for w in weights]
        if len(values) != len(self) or not all(math.isfinite(w) and w >= 0 for w in values) or not sum(values) > 0:
            raise PatchbayesError(
                f"Draws.weighted: expected {len(self)} finite weights of at least 0, some above, got {len(values)}"
                + (f" from {min(values):g} to {max(values):g}." if values else ".")
            )
        chosen = [i for i, w in enumerate(values) if w > 0]
        return type(self)(self.law, self[chosen]._parts, [values[i] for i in chosen])

    @classmethod
    def concatenate(cls, draws: Sequence[Self]) -> Self:
        """All draws of several, one after the other."""
        if not draws:
            raise PatchbayesError("Draws.concatenate: nothing given; pass at least one Draws.")
        for other in draws[1:]:
            if other.layout.fingerprint != draws[0].layout.fingerprint:
                raise WrongDraws("Draws.concatenate: the draws were made for networks with different sites.")
            if other.law.probabilities != draws[0].law.probabilities:
                raise WrongDraws("Draws.concatenate: the draws were made with different mixing probabilities.")
        if len(draws) > 1 and any(one.is_weighted for one in draws):
            raise WrongDraws("Draws.concatenate: draws with weights of their own cannot be joined to others.")
        return cls(draws[0].law, [part for one in draws for part in one._parts], draws[0]._given)

    def __add__(self, other: Self) -> Self:
        return self.concatenate([self, other])

    def __len__(self) -> int:
        return sum(len(part.counters) for part in self._parts)

    def __getitem__(self, which: int | slice | Sequence[int]) -> Self:
        """The chosen draws, again as `Draws` (an integer gives a Draws of length one)."""
        everything = range(len(self))
        if isinstance(which, int):
            if not -len(everything) <= which < len(everything):
                raise IndexError(f"draw {which} of {len(everything)}")
            which = [which]
        chosen = everything[which] if isinstance(which, slice) else [everything[i] for i in which]
        parts: list[Series] = []
        bounds = list(itertools.accumulate((len(part.counters) for part in self._parts), initial=0))
        for number, group in itertools.groupby(chosen, lambda i: bisect.bisect_right(bounds, i) - 1):
            part = self._parts[number]
            counters = _as_range([part.counters[i - bounds[number]] for i in group])
            parts.append(replace(part, counters=counters))
        return type(self)(self.law, parts, None if self._given is None else [self._given[i] for i in chosen])

    def __iter__(self) -> Iterator[Self]:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        what = " + ".join(f"{len(part.counters)} {part.scheme}" for part in self._parts) or "none"
        weighted = ", weighted" if self.is_weighted else ""
        return f"Draws({what}{weighted}; {self.layout.num_groups} draw groups)"

    @property
    def layout(self) -> Layout:
        """The draw groups of the network that the draws are for."""
        return self.law.layout

    @property
    def series(self) -> tuple[Series, ...]:
        """The seeds and counters."""
        return self._parts

    @property
    def is_weighted(self) -> bool:
        """Whether the draws have weights of their own (`weighted`), not those of a sample or an enumeration."""
        return self._given is not None

    @property
    def schemes(self) -> frozenset[Scheme]:
        """How the draws were made."""
        return frozenset(part.scheme for part in self._parts)

    @property
    def is_exact(self) -> bool:
        """Whether the draws are a full enumeration, so that averages over them are exact."""
        if self.is_weighted:
            return False
        counters = self._parts[0].counters if len(self._parts) == 1 and self.schemes == {"enumerated"} else ()
        return len(counters) > 0 and sorted(counters) == list(range(int(self.layout.num_outcomes)))

    @property
    def has_repeats(self) -> bool:
        """Whether a draw comes twice, or has a weight of its own, so that the draws are no sample."""
        if self.is_weighted:
            return True
        if len(self._parts) == 1 and isinstance(self._parts[0].counters, range):
            return False
        made = [(part.scheme, part.seed, part.heads, c) for part in self._parts for c in part.counters]
        return len(set(made)) < len(made)

    @property
    def heads(self) -> int:
        """How many draws share all sites but one (`with_heads`)."""
        return max((part.heads for part in self._parts), default=1)

    @property
    def head_groups(self) -> range:
        """The draw groups of the site that `with_heads` draws anew."""
        part = next((part for part in self._parts if part.heads > 1), None)
        if part is None:
            return range(0)
        start = self.layout.starts[part.head_span]
        return range(start, start + self.layout.spans[part.head_span].length)

    @property
    def block_length(self) -> int:
        """Draws of one independent block where the draws run through blocks from the start of one, else 1.

        A block is `Layout.block` stratified draws, an orthogonal array, or one draw that was sampled, with all their heads.
        """
        if len(self._parts) != 1 or self._parts[0].scheme == "enumerated":
            return 1
        (part,) = self._parts
        symbols, exponent = self.law.orthogonal_block or (1, 1)
        length = {"iid": 1, "stratified": self.law.block, "orthogonal": symbols**exponent}[part.scheme] * part.heads
        counters = part.counters
        in_order = isinstance(counters, range) and counters.step == 1 and counters.start % length == 0
        return length if in_order else 1

    @functools.cached_property
    def weights(self) -> Tensor:
        """The weight of each draw in an average, (S,) float64, summing to one."""
        if self._given is not None:
            given = torch.tensor(self._given, dtype=torch.float64)
            return given / given.sum()
        if all(part.scheme != "enumerated" and part.heads == 1 for part in self._parts):
            return torch.full((len(self),), 1 / max(len(self), 1), dtype=torch.float64)
        weights = torch.cat([self._relative_weights(part) for part in self._parts])
        return weights / weights.sum()

    def _relative_weights(self, part: Series) -> Tensor:
        weights = torch.ones(len(part.counters), dtype=torch.float64)
        if part.scheme == "enumerated":
            digits = enumerated(self.law, torch.tensor(list(part.counters)), 0, self.layout.num_groups)
            laws = zip(self.layout.starts, self.layout.spans, self.law.probabilities, strict=True)
            for start, span, probabilities in laws:
                if probabilities is not None:
                    p = torch.tensor(probabilities, dtype=torch.float64) * span.outcomes
                    weights *= p[digits[:, start : start + span.length]].prod(dim=1)
        elif part.heads > 1:
            span, probabilities = self.layout.spans[part.head_span], self.law.probabilities[part.head_span]
            if is_marginal(span, part.heads) and probabilities is not None:
                p = torch.tensor(probabilities, dtype=torch.float64) * span.outcomes
                weights *= p[torch.tensor(list(part.counters)) % part.heads]
        return weights

    def keys(self) -> Tensor:
        """A key for each draw, (S,) int64: names the draw's streams of noise and masks (heads share their trunk's)."""
        return self._keys

    @functools.cached_property
    def _keys(self) -> Tensor:
        return torch.cat([torch.zeros(0, dtype=torch.int64), *(keys_of(part) for part in self._parts)])

    def assignments(self, start: int = 0, stop: int | None = None, device: torch.device | None = None) -> Tensor:
        """Component indices of the draw groups start..stop-1, (S, stop - start) int64."""
        stop = self.layout.num_groups if stop is None else stop
        made = [assigned(self.law, part, start, stop, device) for part in self._parts]
        none = torch.zeros(0, stop - start, dtype=torch.int64, device=device)
        return made[0] if len(made) == 1 else torch.cat([none, *made])

    def network_draw(
        self, number: int, device: torch.device | None = None, examples: Tensor | None = None
    ) -> NetworkDraw:
        """Draw `number` in the form that a forward pass takes."""
        one = self[number]
        return NetworkDraw(one.keys()[0], one.assignments(device=device)[0], explicit=True, examples=examples)

    def save(self, path: str | Path) -> None:
        """Write the draws as JSON (seeds, counters and probabilities, and the fingerprint of the layout)."""
        parts = [series_to_json(part) for part in self._parts]
        content: dict[str, Any] = {
            "format": "patchbayes-draws-2",
            "layout": self.layout.fingerprint,
            "probabilities": list(self.law.probabilities),
            "parts": parts,
        }
        if self._given is not None:
            content |= {"format": "patchbayes-draws-3", "weights": list(self._given)}
        text = json.dumps(content, indent=1)
        write_atomically(Path(path), text.encode())

    @classmethod
    def load(cls, path: str | Path, model: nn.Module) -> Self:
        """Read draws written by `save`, for the network they were made for."""
        try:
            content = read_json(Path(path))
        except PatchbayesError as error:
            raise PatchbayesError(f"Draws.load: {path} is not a file of draws: {error}") from None
        try:
            if content["format"] not in ("patchbayes-draws-1", "patchbayes-draws-2", "patchbayes-draws-3"):
                raise KeyError("format")
            parts = [series_from_json(part) for part in content["parts"]]
            weights = [float(w) for w in content["weights"]] if content["format"] == "patchbayes-draws-3" else None
            if weights is not None and (
                len(weights) != sum(len(part.counters) for part in parts)
                or not 0 < min(weights) <= max(weights) < math.inf
            ):
                raise ValueError("weights")
            fingerprint = content["layout"]
            law = law_of(model)
            if content["format"] == "patchbayes-draws-1":
                fits = fingerprint == law.fingerprint_1
            else:
                fits = fingerprint == law.layout.fingerprint
                law = Law(law.layout, probabilities_from_json(content["probabilities"], law.layout)) if fits else law
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise PatchbayesError(f"Draws.load: {path} is not a file of draws ({error!r}).") from None
        if not fits:
            raise WrongDraws(f"Draws.load: {path} holds draws of a network with other sites (layout {fingerprint}).")
        found = cls(law, parts)
        return found if weights is None else found.weighted(weights)


def law_of(model: nn.Module) -> Law:
    """The law of the patched network that `model` is or holds, with its probabilities as they are now."""
    law = record_of(model).law()
    assert isinstance(law, Law)
    return law


def record_of(model: nn.Module, modules: Sequence[nn.Module] | None = None) -> Any:
    """What `patch_` keeps about the one patched network that `model` is, wraps or contains; `modules` are its own."""
    check_is_module(model)
    found = [m.__dict__[RECORD] for m in modules or model.modules() if RECORD in m.__dict__]
    if not found:
        raise NotPatched(
            f"{type(model).__name__} is not a patched network, nor does it contain one.\n"
            "  do       bayesianize_(model, held_out) if it is trained already, else patch_(model, mixed()) before training."
        )
    if len(found) > 1:
        raise PatchbayesError(
            f"{type(model).__name__} contains {len(found)} separately patched networks; a draw belongs to one.\n"
            "  do       unpatch_ them and patch_ the whole network in one call."
        )
    return found[0]


def check_is_module(model: Any) -> None:
    """Refuse what is no network, such as the inputs in its place."""
    if not isinstance(model, nn.Module):
        raise PatchbayesError(
            f"expected a network, a torch.nn.Module, as the first argument, got {with_article(type(model).__name__)}."
        )


def with_article(noun: str) -> str:
    return f"{'an' if noun[0] in 'AEIOUaeiou' else 'a'} {noun}"


def format_count(log10: float) -> str:
    """A number of outcomes for people: 25, 3,125 or 10^1234.5."""
    if math.isinf(log10):
        return "infinitely many"
    return f"{round(10**log10):,}" if log10 < 9 else f"10^{log10:,.1f}"


def _seed_from(generator: torch.Generator | None) -> int:
    if generator is None:
        return 0
    return int(torch.randint(2**62, (), generator=generator, device=generator.device))


def check_count(num_draws: Any) -> None:
    """Refuse what is no number of draws."""
    if isinstance(num_draws, bool) or not isinstance(num_draws, int) or num_draws < 1:
        raise PatchbayesError(f"draws={num_draws!r}: a number of draws is an integer of at least 1.")


def _as_range(counters: list[int]) -> range | tuple[int, ...]:
    step = counters[1] - counters[0] if len(counters) > 1 else 1
    candidate = range(counters[0], counters[0] + step * len(counters), step) if step else None
    return candidate if candidate is not None and list(candidate) == counters else tuple(counters)
