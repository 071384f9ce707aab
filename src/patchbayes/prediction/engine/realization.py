"""The weights of draws, made once for all batches where memory allows it."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ...draws.draws import Draws
from .classes import Chosen, Itinerary, Numbers
from .drawn import DrawnSite

_FEW = 2**20  # component indices of a site that are remembered, in a byte each
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

    def several(self, site: int, name: str, chosen: Chosen) -> tuple[Tensor, int | None]:
        """A drawn tensor for several classes, and its axis: None where it is the same for all."""
        if site in self.keeps:
            return chosen.of(self.whole(site)[name])
        if chosen.same:
            return self.one(site, name, chosen.first), None
        return self._some(site, tuple(chosen.numbers.tolist()))[name], 0

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

    def _make(self, site: int, classes: list[int]) -> dict[str, Tensor]:
        classified, drawn = self.itinerary.sites[site], self.sites[site]
        step = max(1, _BLOCK // max(drawn.groups, 1))
        if len(classes) == len(classified) <= step:
            return drawn.tensors(*self._remembered(site))
        parts = []
        for low in range(0, len(classes), step):
            numbers = self.itinerary.order[classified.first[classes[low : low + step]]]
            parts.append(drawn.tensors(*self._drawn(site, numbers)))
        if len(parts) == 1:
            return parts[0]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def _remembered(self, site: int) -> tuple[Tensor, Tensor]:
        """Component indices and keys of all classes of a site. They are remembered with the itinerary, where they are few: they
        follow from the draws, whatever the weights are."""
        known = self.itinerary.drawn.get(site)
        if known is not None:
            return known[0].long(), known[1]
        indices, keys = self._drawn(site, self.itinerary.order[self.itinerary.sites[site].first])
        if indices.numel() <= _FEW and self.sites[site].outcomes <= 256:
            self.itinerary.drawn[site] = indices.byte(), keys
        return indices, keys

    def _drawn(self, site: int, numbers: Numbers) -> tuple[Tensor, Tensor]:
        """Component indices and keys of some draws."""
        drawn = self.sites[site]
        start = drawn.posterior.offset
        with torch.inference_mode(False):  # what is remembered is used where gradients are too
            some = self.draws[numbers.tolist()]
            return some.assignments(start, start + drawn.groups, self.device), some.keys()
