"""The weights of draws, made once for all batches where memory allows it."""

import functools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ...draws.draws import Draws
from .classes import Itinerary
from .drawn import DrawnSite

_FEW = 2**18  # indices of a whole network that are made together
_BLOCK = 2**22  # draw groups whose indices are made together


class Realization:
    """What is drawn for the sites of a network, in the form in which it enters the graph, by class.

    Sites are kept for as long as this object lives, those that take least memory first, while they fit into `limit` bytes
    together; what does not fit is made anew whenever it is asked for.
    """

    def __init__(
        self,
        sites: Mapping[int, DrawnSite],
        draws: Draws,
        itinerary: Itinerary,
        limit: int,
        device: torch.device | None,
    ) -> None:
        self.sites, self.draws, self.itinerary, self.device = sites, draws, itinerary, device
        self._kept: dict[int, dict[str, Tensor]] = {}
        self._last: dict[int, tuple[tuple[int, ...], dict[str, Tensor]]] = {}
        size = {number: len(itinerary.sites[number]) * site.bytes for number, site in sites.items()}
        self.keeps: set[int] = set()
        for number in sorted(size, key=size.__getitem__):
            if size[number] <= limit:
                limit -= size[number]
                self.keeps.add(number)

    def one(self, site: int, name: str, number: int) -> Tensor:
        """A drawn tensor for one class."""
        if site in self.keeps:
            return self.whole(site)[name][number]
        return self._some(site, (number,))[name][0]

    def several(self, site: int, name: str, some: Sequence[int]) -> tuple[Tensor, int | None]:
        """A drawn tensor for several classes, and its axis: None where it is the same for all."""
        if len(set(some)) == 1:
            return self.one(site, name, some[0]), None
        if site not in self.keeps:
            return self._some(site, tuple(some))[name], 0
        whole = self.whole(site)[name]
        if list(some) == list(range(some[0], some[0] + len(some))):
            return whole[some[0] : some[0] + len(some)], 0
        return whole[torch.tensor(some, device=whole.device)], 0

    def whole(self, site: int) -> dict[str, Tensor]:
        """All drawn tensors of a site, with a leading axis for its classes; kept from now on."""
        if site not in self._kept:
            self._kept[site] = self._make(site, list(range(len(self.itinerary.sites[site]))))
        return self._kept[site]

    def _some(self, site: int, some: tuple[int, ...]) -> dict[str, Tensor]:
        known = self._last.get(site)  # the tensors of one site are asked for in turn
        if known is None or known[0] != some:
            known = self._last[site] = some, self._make(site, list(some))
        return known[1]

    @functools.cached_property
    def _assigned(self) -> Tensor | None:
        """The component indices of all sites, made together where they are few."""
        few = len(self.draws) * self.draws.layout.num_groups <= _FEW
        return self.draws.assignments(device=self.device) if few else None

    def _make(self, site: int, classes: list[int]) -> dict[str, Tensor]:
        first, order = self.itinerary.sites[site].first, self.itinerary.order
        numbers = [order[int(first[number])] for number in classes]
        drawn = self.sites[site]
        step = max(1, _BLOCK // max(drawn.groups, 1))
        if numbers == list(range(len(self.draws))) and len(numbers) <= step:
            return drawn.tensors(self.draws, self.device, self._assigned)
        parts = [
            drawn.tensors(self.draws[numbers[low : low + step]], self.device) for low in range(0, len(numbers), step)
        ]
        if len(parts) == 1:
            return parts[0]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
