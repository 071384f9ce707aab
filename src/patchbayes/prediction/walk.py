"""Which draws are alike: the order in which draws go through a network, and what they share on the way."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..draws import Draws
from ..network import Network
from ..posteriors.posterior import Posterior
from .loop import Members

_FEW_GROUPS = 256  # a site with more draw groups practically never repeats an assignment
_BLOCK = 2**18  # assignments looked at together
_BYTES = 32  # that making one assignment takes

Sites = frozenset[int]
Numbers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass
class Walk:
    """How a set of draws goes through a network.

    order      draw numbers in lexicographic order of their assignments, sites in the order of execution, one for each
               distinct result: neighbours share as much of the network as can be.
    members    for each entry of `order`, the draws that share its result.
    likes      for each set of sites, the first draw with the same assignment of these, for each draw: (S,).
    distinct   for each set of sites, how many assignments it has among the draws.
    """

    order: list[int]
    members: Members
    likes: dict[Sites, Numbers]
    distinct: dict[Sites, int]


def plan_walk(
    keys: Iterable[Sites], result: Sites, order: Sequence[int], network: Network, draws: Draws, limit: int
) -> Walk:
    """Sort the draws and find those with equal assignments, for every set of sites in `keys`.

    limit   bytes that assignments may take while they are compared.
    """
    values = {site: _identities(network.sites[site].posterior, draws, limit) for site in order}
    ranks: dict[tuple[int, ...], Numbers] = {(): np.zeros(len(draws), np.int64)}

    def rank(sites: tuple[int, ...]) -> Numbers:
        """Equal for draws with equal assignments, and in their lexicographic order."""
        if sites not in ranks:
            pairs = rank(sites[:-1]) * (int(values[sites[-1]].max()) + 1) + values[sites[-1]]
            ranks[sites] = np.unique(pairs, return_inverse=True)[1]
        return ranks[sites]

    def ordered(sites: Sites) -> tuple[int, ...]:
        return tuple(site for site in order if site in sites)

    likes, distinct = {}, {}
    for sites in {*keys, result}:
        _, first, inverse = np.unique(rank(ordered(sites)), return_index=True, return_inverse=True)
        likes[sites], distinct[sites] = first[inverse], len(first)
    by_rank = np.argsort(rank(ordered(result)), kind="stable").tolist()
    groups: dict[int, list[int]] = {}
    for draw in by_rank:
        groups.setdefault(int(likes[result][draw]), []).append(draw)
    return Walk(list(groups), Members(list(groups.values())), likes, distinct)


def _identities(posterior: Posterior, draws: Draws, limit: int) -> Numbers:
    """A number for each draw, equal for two draws exactly when the site has the same value in both."""
    groups = sum(span.length for span in posterior.spans) or (1 if posterior.networkwide else 0)
    if posterior.unbounded or groups > _FEW_GROUPS:
        if posterior.offset in draws.head_groups:
            return np.arange(len(draws))
        return _numbered(draws.keys().tolist())
    if not groups:
        return np.zeros(len(draws), np.int64)
    start, stop = posterior.offset, posterior.offset + groups
    size = max(1, min(limit // _BYTES, _BLOCK) // groups)
    blocks = (draws[first : first + size] for first in range(0, len(draws), size)) if size < len(draws) else (draws,)
    if groups == 1:
        return np.concatenate([some.assignments(start, stop)[:, 0].numpy() for some in blocks])
    return _numbered([row.tobytes() for some in blocks for row in some.assignments(start, stop).numpy()])


def _numbered(values: list[Any]) -> Numbers:
    """Equal values get equal numbers, in the order of appearance."""
    seen: dict[Any, int] = {}
    return np.array([seen.setdefault(value, len(seen)) for value in values], np.int64)


class Assignments:
    """The assignments of the draws of a walk, computed a few draws ahead where there are many draw groups.

    limit   bytes that these may take; one draw's are always made.
    """

    def __init__(self, draws: Draws, order: list[int], device: torch.device | None, limit: int) -> None:
        self.draws, self.order, self.device = draws, order, device
        self.keys = draws.keys()
        self._row: dict[int, int] = {}
        self._rows = torch.zeros(0, 0, dtype=torch.int64)
        each = _BYTES * max(draws.layout.num_groups, 1)
        self._ahead = max(1, min(limit, _BYTES * _BLOCK) // each)
        if len(draws) <= self._ahead:
            self._load(list(range(len(draws))))

    def rows(self, draws: list[int]) -> torch.Tensor:
        """(n, num_groups) int64."""
        missing = [draw for draw in draws if draw not in self._row]
        if missing:
            place = self.order.index(missing[0])
            ahead = self.order[place : place + self._ahead]
            self._load([*ahead, *(draw for draw in draws if draw not in ahead)])
        return self._rows[[self._row[draw] for draw in draws]]

    def _load(self, draws: list[int]) -> None:
        self._row = {draw: row for row, draw in enumerate(draws)}
        self._rows = self.draws[draws].assignments(device=self.device)
