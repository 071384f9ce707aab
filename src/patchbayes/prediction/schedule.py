"""In which order the stages of a network are computed for which draws, and what is kept for later.

Results come chunk by chunk in the order of the walk. A stage is computed once for each distinct assignment of its sites, in
the chunk that first needs it, and is kept while a later chunk needs it: that walks the tree of distinct prefixes depth first,
so that memory holds one path of it, not the tree. Within a chunk, a value is dropped after the last stage that takes it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from .graph import StageGraph
from .loop import Members
from .walk import Walk

_MOST_STEPS = 2_000  # remembered


@dataclass
class Fetch:
    """Where the values of n assignments are found: (block, index) each, and the short cuts that this allows.

    block   the one block that holds all of them, or None.
    same    whether it is one value n times.
    index   the places in that block, or None for all of them in their order.
    """

    entries: list[tuple[int, int]]
    block: int | None
    same: bool
    index: Tensor | None


@dataclass
class Step:
    """Compute one stage for n assignments, each with a draw that has it, into a new block; then drop blocks.

    carry   (block, indices, new block): of a block that is dropped, some values are needed by later chunks.
    """

    stage: int
    draws: list[int]
    fetches: list[Fetch | None]
    block: int
    carry: list[tuple[int, Tensor, int]] = field(default_factory=list)
    drop: list[int] = field(default_factory=list)


@dataclass
class Chunk:
    """The steps to the results start..stop-1 of the walk, where these are found, and the blocks to drop then."""

    start: int
    stop: int
    members: Members
    steps: list[Step]
    result: Fetch
    drop: list[int]


class Schedule:
    """The chunks of a walk through the stages of a network."""

    def __init__(self, graph: StageGraph, walk: Walk) -> None:
        self.graph, self.walk = graph, walk
        self._made: dict[tuple[int, frozenset[int], int], list[Chunk]] = {}
        likes = [walk.likes[stage.keys[0]] for stage in graph.stages]
        self.keys: list[list[int]] = [like.tolist() for like in likes]
        places = np.arange(len(walk.order))
        self.last: list[dict[int, int]] = []
        self.alive: list[int] = []
        for like in likes:
            in_order = like[walk.order]
            self.last.append(dict(zip(in_order.tolist(), places.tolist(), strict=True)))
            _, first = np.unique(in_order, return_index=True)
            last = len(in_order) - 1 - np.unique(in_order[::-1], return_index=True)[1]
            change = np.zeros(len(in_order) + 1, np.int64)
            np.add.at(change, first, 1)
            np.add.at(change, last, -1)
            self.alive.append(int(change.cumsum().max()))

    def chunks(self, size: int, carried: frozenset[int], start: int = 0) -> Iterator[Chunk]:
        """Chunks of `size` results from `start` on; stages in `carried` are kept from one chunk to the next."""
        if (size, carried, start) in self._made:
            yield from self._made[size, carried, start]
            return
        made, steps = [], 0
        kept: list[dict[int, tuple[int, int]]] = [{} for _ in self.graph.stages]
        size_of: dict[int, int] = {}
        begin = start
        while begin < len(self.walk.order):
            stop = min(begin + size, len(self.walk.order))
            chunk = self._chunk(begin, stop, carried, kept, size_of)
            steps += len(chunk.steps)
            if steps <= _MOST_STEPS:
                made.append(chunk)
            yield chunk
            begin = stop
        if steps <= _MOST_STEPS:
            self._made = {(size, carried, start): made}

    def _chunk(
        self,
        start: int,
        stop: int,
        carried: frozenset[int],
        kept: list[dict[int, tuple[int, int]]],
        size_of: dict[int, int],
    ) -> Chunk:
        chosen = self.walk.order[start:stop]
        steps: list[Step] = []
        for number, needed in enumerate(self._needed(chosen, kept)):
            if needed:
                draws, block = list(needed.values()), max(size_of, default=-1) + 1
                fetches: list[Fetch | None] = []
                for source, _ in self.graph.stages[number].inputs:
                    fetches.append(self._fetch(source, draws, kept, size_of) if isinstance(source, int) else None)
                size_of[block] = len(draws)
                kept[number] |= {key: (block, index) for index, key in enumerate(needed)}
                steps.append(Step(number, draws, fetches, block))
        result = self._fetch(self.graph.result, chosen, kept, size_of)
        carry = {block: (block, indices, new) for block, indices, new in self._forget(stop, carried, kept, size_of)}
        staying = {block for entries in kept for block, _ in entries.values()}
        last_step = {step.block: step for step in steps} | {
            block: step for step in steps for fetch in step.fetches if fetch for block, _ in fetch.entries
        }
        in_result, at_end = {block for block, _ in result.entries}, []
        for block in [block for block in size_of if block not in staying]:
            if block in in_result:
                at_end.append(block)
            else:
                step = last_step.get(block, steps[-1])
                step.carry += [carry[block]] if block in carry else []
                step.drop.append(block)
            del size_of[block]
        return Chunk(start, stop, self.walk.members.part(start, stop), steps, result, at_end)

    def _needed(self, chosen: list[int], kept: list[dict[int, tuple[int, int]]]) -> list[dict[int, int]]:
        """For each stage, the assignments to compute now, with a draw that has it."""
        needed: list[dict[int, int]] = [{} for _ in self.graph.stages]
        result = self.graph.result
        for draw in chosen:
            if self.keys[result][draw] not in kept[result]:
                needed[result].setdefault(self.keys[result][draw], draw)
        for number in range(len(self.graph.stages) - 1, -1, -1):
            for source, _ in self.graph.stages[number].inputs:
                if isinstance(source, int):
                    for draw in needed[number].values():
                        key = self.keys[source][draw]
                        if key not in kept[source]:
                            needed[source].setdefault(key, draw)
        return needed

    def _fetch(
        self, source: int, draws: list[int], kept: list[dict[int, tuple[int, int]]], size_of: dict[int, int]
    ) -> Fetch:
        entries = [kept[source][self.keys[source][draw]] for draw in draws]
        block, _ = entries[0]
        if any(other != block for other, _ in entries):
            return Fetch(entries, None, False, None)
        indices = [index for _, index in entries]
        whole = indices == list(range(size_of[block]))
        return Fetch(entries, block, len(set(indices)) == 1, None if whole else torch.tensor(indices))

    def _forget(
        self,
        stop: int,
        carried: frozenset[int],
        kept: list[dict[int, tuple[int, int]]],
        size_of: dict[int, int],
    ) -> list[tuple[int, Tensor, int]]:
        """Forget what no later chunk needs; what is left of a block that is needed in part becomes a block of its own."""
        carry = []
        for number, entries in enumerate(kept):
            last = self.last[number]
            staying = {key: entry for key, entry in entries.items() if number in carried and last[key] >= stop}
            by_block: dict[int, list[int]] = {}
            for key, (block, _) in staying.items():
                by_block.setdefault(block, []).append(key)
            for block, keys in by_block.items():
                if len(keys) < size_of[block]:
                    new = max(size_of) + 1
                    size_of[new] = len(keys)
                    carry.append((block, torch.tensor([staying[key][1] for key in keys]), new))
                    staying |= {key: (new, index) for index, key in enumerate(keys)}
            kept[number] = staying
        return carry
