"""Running the stages of a captured network for many draws, one batch at a time."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, fx
from torch._C import _functorch
from torch._functorch.vmap import lazy_load_decompositions  # type: ignore[attr-defined]

from ..loop import Members
from .classes import Chosen, Classes, Itinerary, Numbers
from .counts import FEWEST_AT_ONCE
from .stages import Network, Stage

_NO_VMAP = (RuntimeError, ValueError, NotImplementedError, TypeError)  # what vmap says to operations that it cannot do


@dataclass(eq=False)
class Block:
    """The outputs of a stage for n of its classes: for each output a tensor (n, ...), or (apart) a list of n values."""

    values: list[Any]
    size: int

    def one(self, place: int, index: int) -> Any:
        return self.values[place][index]


class Kept:
    """What is kept of a stage: for each class, where its values are."""

    def __init__(self, classes: Classes) -> None:
        self.classes = classes
        self.where: dict[int, tuple[Block, int]] = {}
        self._latest: tuple[list[int], Block] | None = None

    def add(self, some: list[int], block: Block) -> None:
        self.where |= {number: (block, index) for index, number in enumerate(some)}
        self._latest = some, block

    def forget(self, stop: int) -> None:
        """What no result from `stop` on needs."""
        last = self.classes.last
        self.where = {number: entry for number, entry in self.where.items() if last[number] >= stop}

    def chosen(self, some: Numbers) -> "_Stacking":
        """How the values of several classes are put together."""
        numbers = some.tolist()
        if self._latest is not None and self._latest[0] == numbers:
            return _Stacking([(self._latest[1], index) for index in range(len(numbers))], None, whole=True)
        entries = [self.where[number] for number in numbers]
        block = entries[0][0]
        together = all(other is block for other, _ in entries)
        return _Stacking(entries, Chosen(np.array([index for _, index in entries])) if together else None)


@dataclass(eq=False)
class _Stacking:
    """Where the values of several classes are; `chosen`: which of one block, where it is one block; `whole`: all of it."""

    entries: list[tuple[Block, int]]
    chosen: Chosen | None
    whole: bool = False

    def of(self, place: int) -> tuple[Any, int | None]:
        """Output `place` for the classes, and its vmap axis: None where it is the same for all."""
        block, start = self.entries[0]
        value = block.values[place]
        if self.whole and isinstance(value, Tensor):
            return value, 0
        if self.chosen is not None and isinstance(value, Tensor):
            return self.chosen.of(value)
        if self.chosen is not None and self.chosen.same:
            return block.one(place, start), None
        return torch.stack([other.one(place, index) for other, index in self.entries]), 0


class DrawnTensors(Protocol):
    """What is drawn for the sites, by class (a `Realization`)."""

    def one(self, site: int, name: str, number: int) -> Tensor: ...

    def several(self, site: int, name: str, chosen: Chosen) -> tuple[Tensor, int | None]: ...


class Execution:
    """One batch on its way through the stages.

    fixed   values of the graph's inputs that are the same for all draws.
    sizes   for each stage, how many classes are run together.
    """

    def __init__(
        self,
        network: Network,
        stages: list[Stage],
        itinerary: Itinerary,
        realization: DrawnTensors,
        fixed: Mapping[fx.Node, Any],
        sizes: Sequence[int],
    ) -> None:
        self.network, self.stages, self.itinerary = network, stages, itinerary
        self.realization, self.fixed, self.sizes = realization, fixed, sizes
        self.kept = [Kept(classes) for classes in itinerary.stages]
        self.made = {node: (s, k) for s, stage in enumerate(stages) for k, node in enumerate(stage.outputs)}
        self.evaluated = [0] * len(stages)
        self.chunk = 1

    def run(self, chunk: int, leaves: list[Any]) -> Iterator[tuple[Members, list[tuple[Any, int | None]]]]:
        """The leaves of the output, `chunk` results at a time: each a value and the axis of the results, or None."""
        number, start, self.chunk = len(self.itinerary.order), 0, chunk
        while start < number:
            stop = min(start + self.chunk, number)
            try:
                for place in range(len(self.stages)):
                    self._compute(place, start, stop)
                values = [self._leaf(leaf, start, stop) for leaf in leaves]
            except RuntimeError as error:
                if self.chunk == 1 or not out_of_memory(error):
                    raise
                self.chunk //= 2  # the same again, of half as many
                self.sizes = [max(1, size // 2) for size in self.sizes]
                continue
            for kept in self.kept if stop < number else ():
                kept.forget(stop)
            yield self.itinerary.members.part(start, stop), values
            start = stop

    def _leaf(self, leaf: Any, start: int, stop: int) -> tuple[Any, int | None]:
        return self._inputs([leaf], np.arange(start, stop))[0] if isinstance(leaf, fx.Node) else (leaf, None)

    def _compute(self, place: int, start: int, stop: int) -> None:
        stage, kept = self.stages[place], self.kept[place]
        if not stage.outputs:
            return
        missing = [c for c in dict.fromkeys(kept.classes.of[start:stop].tolist()) if c not in kept.where]
        size = self.sizes[place]
        for first in range(0, len(missing), size):
            some = missing[first : first + size]
            kept.add(some, self._block(place, some))
            self.evaluated[place] += len(some)

    def _block(self, place: int, some: list[int]) -> Block:
        stage = self.stages[place]
        at = self.kept[place].classes.first[some]
        if len(some) >= FEWEST_AT_ONCE and not stage.apart:
            try:
                inputs = self._inputs(stage.inputs, at)
                return Block(_together(stage, inputs, len(some)), len(some))
            except _NO_VMAP as error:
                if out_of_memory(error):
                    raise
                stage.apart = True  # an operation that vmap cannot do: one after the other from now on
        results = [stage.run(*(self._one(node, position) for node in stage.inputs)) for position in at.tolist()]
        return Block([list(values) for values in zip(*results, strict=True)], len(some))

    def _one(self, node: fx.Node, position: int) -> Any:
        """The value of a node for the draw at a position of the itinerary."""
        if node in self.fixed:
            return self.fixed[node]
        if node in self.made:
            place, output = self.made[node]
            block, index = self.kept[place].where[int(self.itinerary.stages[place].of[position])]
            return block.one(output, index)
        source = self.network.capture.sources[node]
        return self.realization.one(source.place, source.name, int(self.itinerary.sites[source.place].of[position]))

    def _inputs(self, nodes: Sequence[fx.Node], positions: Numbers) -> list[tuple[Any, int | None]]:
        """The values of nodes for the draws at several positions, each with its axis."""
        found: list[tuple[Any, int | None]] = []
        stacked: dict[int, _Stacking] = {}
        chosen = self.itinerary.chosen(positions)
        for node in nodes:
            if node in self.fixed:
                found.append((self.fixed[node], None))
            elif node in self.made:
                place, output = self.made[node]
                if place not in stacked:
                    stacked[place] = self.kept[place].chosen(self.itinerary.stages[place].of[positions])
                found.append(stacked[place].of(output))
            else:
                source = self.network.capture.sources[node]
                found.append(self.realization.several(source.place, source.name, chosen[source.place]))
        return found


def _together(stage: Stage, inputs: list[tuple[Any, int | None]], number: int) -> list[Any]:
    """The outputs of a stage for `number` draws at once: inputs with an axis of None are the same for all of them.

    What `torch.vmap` does, without its handling of nested arguments, which takes as long as a small network.
    """
    lazy_load_decompositions()
    level = _functorch._vmap_increment_nesting(number, "error")
    try:
        made = stage.run(*[v if axis is None else _functorch._add_batch_dim(v, axis, level) for v, axis in inputs])
        return [_functorch._remove_batch_dim(value, level, number, 0) for value in made]
    finally:
        _functorch._vmap_decrement_nesting()


def out_of_memory(error: Exception) -> bool:
    """Whether an allocator gave up."""
    text = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in text or "can't allocate memory" in text
