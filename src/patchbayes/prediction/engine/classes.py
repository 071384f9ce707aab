"""Which draws are alike: the order in which draws go through a network, and what they share on the way."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...draws.draws import Draws
from ..loop import Members
from .stages import Sites

_FEW_GROUPS = 32  # a site with more draw groups practically never repeats an assignment
_BLOCK = 2**14  # assignments looked at together
_MOST_CHOSEN = 64  # parts of an itinerary

Numbers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Classes:
    """Results with equal values of something: the class of each result, and its first and last result.

    Classes are numbered as they come along the itinerary.
    """

    of: Numbers
    first: Numbers
    last: Numbers

    @classmethod
    def number(cls, keys: Numbers) -> "Classes":
        _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
        last = len(keys) - 1 - np.unique(keys[::-1], return_index=True)[1]
        rank = np.argsort(np.argsort(first))
        order = np.argsort(first)
        return cls(rank[inverse.reshape(-1)], first[order], last[order])

    def __len__(self) -> int:
        return len(self.first)


class Chosen:
    """Entries of something that are asked for together: the same for all (`same`), a run of neighbors, or any."""

    def __init__(self, numbers: Numbers) -> None:
        self.numbers, self.first, size = numbers, int(numbers[0]), len(numbers)
        self.same = size == 1 or bool((numbers == self.first).all())
        self.run = slice(self.first, self.first + size)
        if self.same or not (numbers == np.arange(self.first, self.first + size)).all():
            self.run = slice(0)

    def of(self, whole: Tensor) -> tuple[Tensor, int | None]:
        """The chosen entries of a tensor with a leading axis for all, and their axis: None where they are the same."""
        if self.same:
            return whole[self.first], None
        if self.run.stop:
            return whole if not self.first and self.run.stop == whole.shape[0] else whole[self.run], 0
        # made anew each time: while a graph is exported, a tensor that is made has no values
        return whole.index_select(0, torch.from_numpy(self.numbers).to(whole.device)), 0


@dataclass
class Itinerary:
    """Given draws on their way through a network.

    order     a draw for each distinct result, in lexicographic order of their assignments, sites in the order of execution.
    members   for each of these, the draws that share its result.
    stages    for each stage, its classes of results; `joined` says which sets of sites went into which.
    sites     for each site, its classes of results.
    distinct  for each set of sites, how many classes it has.
    variants  the same with some stages joined, by what decides which.
    drawn     component indices and keys of some sites, for all their classes, once they have been asked for.
    """

    order: Numbers
    members: Members
    joined: dict[Sites, int]
    stages: list[Classes]
    sites: dict[int, Classes]
    distinct: dict[Sites, int]
    variants: dict[Any, "Itinerary"] = field(default_factory=dict)
    _chosen: dict[bytes, dict[int, Chosen]] = field(default_factory=dict)
    drawn: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def chosen(self, positions: Numbers) -> dict[int, Chosen]:
        """For each site, its classes of the results at these positions; remembered for the next batch."""
        key = positions.tobytes()
        found = self._chosen.get(key)  # another thread may clear them at any time
        if found is None:
            if len(self._chosen) >= _MOST_CHOSEN:
                self._chosen.clear()
            found = self._chosen[key] = {site: Chosen(c.of[positions]) for site, c in self.sites.items()}
        return found


def plan_itinerary(
    keys: Iterable[Sites], result: Sites, order: Sequence[int], identities: dict[int, Numbers], number: int
) -> Itinerary:
    """Sort `number` draws and find those with equal assignments, for every set of sites in `keys`.

    order        the sites as they are executed.
    identities   for each site a number for each draw, equal where the site has the same value.
    """
    ranks: dict[tuple[int, ...], Numbers] = {(): np.zeros(number, np.int64)}

    def rank(sites: tuple[int, ...]) -> Numbers:
        """Equal for draws with equal assignments, and in their lexicographic order."""
        for stop in range(1, len(sites) + 1):
            if sites[:stop] not in ranks:
                last = identities[sites[stop - 1]]
                pairs = ranks[sites[: stop - 1]] * (int(last.max()) + 1) + last
                ranks[sites[:stop]] = np.unique(pairs, return_inverse=True)[1].reshape(-1)
        return ranks[sites]

    def ordered(sites: Sites) -> tuple[int, ...]:
        return tuple(site for site in order if site in sites)

    whole = rank(ordered(result))
    by_rank = np.argsort(whole, kind="stable").tolist()
    groups: dict[int, list[int]] = {}
    for draw in by_rank:
        groups.setdefault(int(whole[draw]), []).append(draw)
    firsts = [members[0] for members in groups.values()]
    parts = {sites: Classes.number(rank(ordered(sites & result))[firsts]) for sites in keys}
    by_partition: dict[bytes, list[Sites]] = {}
    for sites, part in parts.items():
        by_partition.setdefault(part.of.tobytes(), []).append(sites)
    coarse_first = sorted(by_partition.values(), key=lambda some: len(parts[some[0]]))
    joined = {sites: place for place, some in enumerate(coarse_first) for sites in some}
    return Itinerary(
        order=np.array(firsts, np.int64),
        members=Members(list(groups.values())),
        joined=joined,
        stages=[parts[some[0]] for some in coarse_first],
        sites={site: Classes.number(identities[site][firsts]) for site in order},
        distinct={sites: len(part) for sites, part in parts.items()},
    )


def identities(posterior: Any, draws: Draws) -> Numbers:
    """A number for each draw, equal for two draws exactly when the site has the same value in both."""
    groups = posterior.groups()
    length = 0 if groups is None else groups.length
    if posterior.noise != "none" or length > _FEW_GROUPS:
        if length and posterior.offset in draws.head_groups:
            return np.arange(len(draws))
        return _numbered(draws.keys().tolist())
    if not length:
        return np.zeros(len(draws), np.int64)
    start, stop = posterior.offset, posterior.offset + length
    size = max(1, _BLOCK // length)
    blocks = (draws[first : first + size] for first in range(0, len(draws), size)) if size < len(draws) else (draws,)
    if length == 1:
        return np.concatenate([some.assignments(start, stop)[:, 0].numpy() for some in blocks])
    return _numbered([row.tobytes() for some in blocks for row in some.assignments(start, stop).numpy()])


def _numbered(values: list[Any]) -> Numbers:
    """Equal values get equal numbers, in the order of appearance."""
    seen: dict[Any, int] = {}
    return np.array([seen.setdefault(value, len(seen)) for value in values], np.int64)
