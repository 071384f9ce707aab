"""Running the stages of a network for many draws: every value once for each distinct assignment of its sites.

The draws are put in lexicographic order of their assignments, sites in the order of execution, and the stages of the network
(`graph.py`) are computed chunk by chunk of draws; a stage's value is kept only while a later chunk needs it. That walks the
tree of distinct prefixes depth first: memory holds one path, not the tree. Within a chunk, the distinct assignments of a stage
are computed together (`torch.func.vmap`).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ..draws import Draws
from ..layout import Drawn
from ..network import Network, hold
from ..posteriors.posterior import Posterior
from .graph import Stage, StageGraph, clone_tensors

_FEW_GROUPS = 256  # a site with more draw groups practically never repeats an assignment


@dataclass
class Walk:
    """How a set of draws goes through the stages.

    order      draw numbers in lexicographic order, one for each distinct result.
    members    the draws that share the result of each entry of `order`.
    keys       for each stage, the assignment number of each draw, (S,).
    distinct   for each stage, how many assignments there are.
    """

    order: list[int]
    members: list[list[int]]
    keys: list[list[int]]
    distinct: list[int]


def plan_walk(graph: StageGraph, network: Network, draws: Draws) -> Walk:
    """Sort the draws and number the distinct assignments of every stage."""
    identities = {number: _identities(network.sites[number].posterior, draws) for number in graph.sites}
    columns = [identities[number] for number in graph.sites]
    keys, distinct = [], []
    for stage in graph.stages:
        mine = [identities[number] for number in stage.sites]
        keys.append(_numbered(list(zip(*mine, strict=True)) if mine else [()] * len(draws)))
        distinct.append(max(keys[-1]) + 1)
    by_result: dict[int, list[int]] = {}
    for draw, key in enumerate(keys[graph.result]):
        by_result.setdefault(key, []).append(draw)
    members = sorted(by_result.values(), key=lambda some: [column[some[0]] for column in columns])
    return Walk([some[0] for some in members], members, keys, distinct)


def _identities(posterior: Posterior, draws: Draws) -> list[int]:
    """A number for each draw, equal for two draws exactly when the site has the same value in both."""
    groups = sum(span.length for span in posterior.spans) or (1 if posterior.networkwide else 0)
    if posterior.unbounded or groups > _FEW_GROUPS:
        if posterior.offset in draws.head_groups:
            return list(range(len(draws)))
        return _numbered(draws.keys().tolist())
    if not groups:
        return [0] * len(draws)
    rows = draws.assignments(posterior.offset, posterior.offset + groups)
    return _numbered([row.tobytes() for row in rows.numpy()])


def _numbered(values: list[Any]) -> list[int]:
    """Equal values get equal numbers, in the order of appearance."""
    seen: dict[Any, int] = {}
    return [seen.setdefault(value, len(seen)) for value in values]


@dataclass
class _Entry:
    """The outputs of a stage for one assignment: entry `index` of tensors with a leading axis, or (None) as they are."""

    values: tuple[Any, ...]
    index: int | None
    size: int

    def output(self, number: int) -> Any:
        value = self.values[number]
        return value if self.index is None else tree_map(lambda t: t[self.index] if isinstance(t, Tensor) else t, value)


class Execution:
    """One batch going through the stages, chunk after chunk of draws."""

    def __init__(
        self, graph: StageGraph, network: Network, draws: Draws, walk: Walk, arguments: dict[str, Any], examples: Tensor
    ) -> None:
        self.graph, self.network, self.draws, self.walk = graph, network, draws, walk
        self.arguments, self.examples = arguments, examples
        self.kept: list[dict[int, _Entry]] = [{} for _ in graph.stages]
        self.fold = True
        noisy = {n for n, site in enumerate(network.sites) if site.posterior.unbounded}
        self.apart = {
            n for n, stage in enumerate(graph.stages) if stage.own & noisy
        }  # noise is drawn for one draw at a time
        self.work = 0
        self.last_use = [
            {walk.keys[stage][draw]: place for place, draw in enumerate(walk.order)}
            for stage in range(len(graph.stages))
        ]
        self.bytes_per_draw = 0
        few = len(draws) * draws.layout.num_groups <= 2**22
        self._keys = draws.keys()
        self._assignments = draws.assignments(device=network.device) if few else None

    def chunk(self, start: int, stop: int) -> list[_Entry]:
        """The results of entries start..stop-1 of the walk's order."""
        chosen = self.walk.order[start:stop]
        needed = self._needed(chosen)
        drawn: dict[int, Drawn] = {}
        for number, stage in enumerate(self.graph.stages):
            if needed[number]:
                self._compute(number, stage, needed[number], drawn)
        if stop - start == 1:
            self.bytes_per_draw = max(self.bytes_per_draw, self._bytes_held())
        result = self.graph.result
        entries = [self.kept[result][self.walk.keys[result][draw]] for draw in chosen]
        self._forget(stop)
        return entries

    def _needed(self, chosen: list[int]) -> list[dict[int, int]]:
        """For each stage, the assignments to compute now, with a draw that has it."""
        needed: list[dict[int, int]] = [{} for _ in self.graph.stages]
        for draw in chosen:
            key = self.walk.keys[self.graph.result][draw]
            if key not in self.kept[self.graph.result]:
                needed[self.graph.result][key] = draw
        for number in range(len(self.graph.stages) - 1, -1, -1):
            for source, _ in self.graph.stages[number].inputs:
                if isinstance(source, int):
                    for draw in needed[number].values():
                        key = self.walk.keys[source][draw]
                        if key not in self.kept[source]:
                            needed[source].setdefault(key, draw)
        return needed

    def _compute(self, number: int, stage: Stage, needed: dict[int, int], drawn: dict[int, Drawn]) -> None:
        self.work += len(needed) * stage.num_operations
        if len(needed) > 1 and self.fold and number not in self.apart:
            try:
                values = self._together(stage, list(needed.values()))
                for index, key in enumerate(needed):
                    self.kept[number][key] = _Entry(values, index, len(needed))
                return
            except (RuntimeError, ValueError, NotImplementedError, TypeError) as error:
                if out_of_memory(error):
                    raise
                self.fold = False  # an operation that vmap cannot do: one after the other from now on
        for key, draw in needed.items():
            if draw not in drawn:
                drawn[draw] = self._drawn(draw)
            arguments = tuple(self._argument(source, place, draw) for source, place in stage.inputs)
            if stage.clone_inputs:
                arguments = clone_tensors(arguments)
            with hold(self.network, drawn[draw]):
                self.kept[number][key] = _Entry(self.run(stage, arguments), None, 1)

    def run(self, stage: Stage, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """One stage for the draw that is held."""
        return stage.run(*arguments)

    def _together(self, stage: Stage, draws: list[int]) -> tuple[Any, ...]:
        arguments, axes = [], []
        for source, place in stage.inputs:
            argument, axis = self._stacked(source, place, draws)
            arguments.append(argument)
            axes.append(axis)
        if stage.clone_inputs:
            arguments = list(clone_tensors(tuple(arguments)))
        indices = torch.stack([self._drawn(draw).indices for draw in draws])
        key = torch.tensor(0)

        def run(one: Tensor, *some: Any) -> tuple[Any, ...]:
            with hold(self.network, Drawn(key, one, explicit=True, examples=self.examples)):
                return stage.run(*some)

        return torch.func.vmap(run, in_dims=(0, *axes))(indices, *arguments)

    def _stacked(self, source: int | str, place: int | str, draws: list[int]) -> tuple[Any, int | None]:
        """An argument for several draws with its vmap axis: None where it is the same for all."""
        if source == "input":
            return self.arguments[str(place)], None
        assert isinstance(source, int)
        assert isinstance(place, int)
        entries = [self.kept[source][self.walk.keys[source][draw]] for draw in draws]
        first = entries[0]
        if all(entry is first for entry in entries):
            return first.output(place), None
        values = first.values[place]
        if all(entry.values is first.values for entry in entries):
            indices = [entry.index for entry in entries]
            if indices == list(range(first.size)):
                return values, 0
            index = torch.tensor(indices)
            return tree_map(lambda t: t[index.to(t.device)] if isinstance(t, Tensor) else t, values), 0
        return tree_map(lambda *ts: torch.stack(ts), *(entry.output(place) for entry in entries)), 0

    def _argument(self, source: int | str, place: int | str, draw: int) -> Any:
        if source == "input":
            return self.arguments[str(place)]
        assert isinstance(source, int)
        assert isinstance(place, int)
        return self.kept[source][self.walk.keys[source][draw]].output(place)

    def _drawn(self, draw: int) -> Drawn:
        if self._assignments is None:
            return self.draws.drawn(draw, self.network.device, self.examples)
        return Drawn(self._keys[draw], self._assignments[draw], explicit=True, examples=self.examples)

    def _forget(self, stop: int) -> None:
        """Drop what no later entry of the walk needs."""
        for number, entries in enumerate(self.kept):
            last = self.last_use[number]
            self.kept[number] = {key: entry for key, entry in entries.items() if last[key] >= stop}

    def _bytes_held(self) -> int:
        tensors = [
            t for entries in self.kept for e in entries.values() for t in tree_leaves(e.values) if isinstance(t, Tensor)
        ]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def out_of_memory(error: Exception) -> bool:
    text = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in text or "can't allocate memory" in text
