"""The way of some draws through a captured network: in which stages, and how many draws at a time. All from counts."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from ...draws.draws import Draws
from ...patching.network import PatchedNetwork
from .classes import Classes, Itinerary, identities, plan_itinerary
from .drawn import DrawnSite
from .picking import Picked, pick
from .realization import Realization
from .stages import Network, Sites, Stage

_HELD = 8 * 2**20  # bytes of values on their way from stage to stage, and so many results at a time where draws
_FEW = 16  # are run one after the other
_KEPT = 0.5  # of the memory limit, for the weights of draws
_MOST_ITINERARIES = 8  # of different draws that are remembered for a captured network
_MOST_VARIANTS = 64  # of one of them, for different sizes of batches


@dataclass
class Route:
    """Draws on their way through one captured network, for batches of one size: how much of it goes together.

    sizes   for each stage, how many classes are run at once; `chunk`: how many results.
    """

    network: Network
    itinerary: Itinerary
    stages: list[Stage]
    picked: Picked
    realization: Realization
    sizes: list[int] = field(default_factory=list)
    chunk: int = 1


class Routes:
    """The routes of a patched network's draws, kept with their realized weights for the next batch."""

    def __init__(self, patched: PatchedNetwork, memory_limit: int) -> None:
        self.patched, self.memory_limit = patched, memory_limit
        self._known: dict[Any, Route] = {}

    def of(
        self,
        network: Network,
        draws: Draws,
        leaves: list[Any],
        output: Callable[[Any], Tensor],
        *,
        share_all: bool = False,
    ) -> Route:
        """The way of `draws` on arguments like `leaves`. share_all: nothing is computed twice, though it may take longer."""
        picked = pick(network.capture, output)
        key = id(network), tuple(picked.leaves), id(draws)
        if key not in self._known:
            self._known[key] = self._new(network, draws, picked)
        known = self._known[key]
        scale, limit = network.scale(leaves), int(self.memory_limit * (1 - _KEPT))
        itinerary, stages = known.itinerary, known.stages
        if not share_all:
            cheaper = _cheaper(itinerary, stages, scale, key[1])
            parts = network.stages(cheaper.joined, picked.leaves)
            if not any(stage.apart for stage in parts) or any(stage.apart for stage in stages):
                itinerary, stages = cheaper, parts
        sizes = [1 if stage.apart else stage.cost.at_once(scale, limit) for stage in stages]
        held = scale * sum(stage.held for stage in stages)
        chunk = max(*sizes, min(_FEW, int(_HELD / max(held, 1))), 1)
        chunk = min(chunk, max(1, int(limit / max(held, 1))), len(itinerary.order))
        return replace(known, itinerary=itinerary, stages=stages, picked=picked, sizes=sizes, chunk=chunk)

    def _new(self, network: Network, draws: Draws, picked: Picked) -> Route:
        posteriors = {number: self.patched.sites[number].posterior for number in network.sites}
        drawn = {n: DrawnSite(posterior, *network.drawn.get(n, (set(), 0))) for n, posterior in posteriors.items()}
        itinerary = self._itinerary(network, draws, network.result(picked.leaves))
        limit = int(self.memory_limit * _KEPT)
        realization = Realization(drawn, draws, itinerary, limit, self.patched.device)
        return Route(network, itinerary, network.stages(itinerary.joined, picked.leaves), picked, realization)

    def _itinerary(self, network: Network, draws: Draws, result: Sites) -> Itinerary:
        """The way of the draws through a network; remembered with it for the same draws, whatever the weights."""
        key = draws.series, draws.law.probabilities, draws.layout.fingerprint, result
        found = network.itineraries.get(key)
        if found is None:
            if len(network.itineraries) >= _MOST_ITINERARIES:
                network.itineraries.pop(next(iter(network.itineraries)), None)
            sites = network.sites
            alike = {number: identities(self.patched.sites[number].posterior, draws) for number in sites}
            found = plan_itinerary(network.operations, result, sites, alike, len(draws))
            network.itineraries[key] = found
        return found


def _cheaper(itinerary: Itinerary, stages: list[Stage], scale: float, leaves: tuple[int, ...]) -> Itinerary:
    """The same with neighboring stages in one, where running the earlier for every class of the later takes less than running
    it by itself. So it is with small operations: a stage costs more than it saves."""
    known, key = itinerary.variants, (scale, leaves)
    found = known.get(key)  # another thread may clear them at any time
    if found is None:
        if len(known) >= _MOST_VARIANTS:
            known.clear()
        places = _places(stages, itinerary.stages, scale)
        last = {new: old for old, new in enumerate(places)}
        found = known[key] = replace(
            itinerary,
            joined={sites: places[old] for sites, old in itinerary.joined.items()},
            stages=[itinerary.stages[old] for old in last.values()],
        )
    return found


def _places(stages: list[Stage], classes: list[Classes], scale: float) -> list[int]:
    """For each stage, the number of the one that it becomes a part of."""
    places = [0]
    whole, spent = stages[0].cost, stages[0].cost.seconds(len(classes[0]), scale)
    for before, (stage, here) in enumerate(zip(stages[1:], classes[1:], strict=True)):
        alone, both = stage.cost.seconds(len(here), scale), whole + stage.cost
        joined = both.seconds(len(here), scale)
        small = not stages[before].apart and not stage.apart and len(here) <= both.at_once(scale)
        if small and joined < spent + alone and _refines(here, classes[before]):
            whole, spent = both, joined
            places.append(places[-1])
        else:
            whole, spent = stage.cost, alone
            places.append(places[-1] + 1)
    return places


def _refines(fine: Classes, coarse: Classes) -> bool:
    """Whether results of one class are always of one class of the other."""
    return bool((coarse.of[fine.first][fine.of] == coarse.of).all())
