"""Running the stages of a network for many draws, as the schedule says.

The assignments of one step are computed together (`torch.func.vmap`) where their number is above one and the stage allows
it, else one after the other.
"""

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ..layout import Drawn
from ..network import Network, hold
from .graph import Stage, StageGraph
from .schedule import Chunk, Fetch, Step
from .walk import Assignments

_NO_VMAP = (RuntimeError, ValueError, NotImplementedError, TypeError)  # what vmap says to operations that it cannot do


@dataclass
class Block:
    """The outputs of a stage for n assignments: tensors with a leading axis of n, or (apart) a list of n outputs."""

    values: Any
    apart: bool

    def one(self, index: int, place: int) -> Any:
        """Output `place` for one assignment."""
        if self.apart:
            return self.values[index][place]
        return tree_map(lambda t: t[index] if isinstance(t, Tensor) else t, self.values[place])

    def some(self, indices: Tensor) -> "Block":
        """The block of some of its assignments, without holding the others."""
        if self.apart:
            return Block([self.values[index] for index in indices.tolist()], True)
        return Block(tree_map(lambda t: _rows(t, indices), self.values), False)


class Execution:
    """One batch going through the stages, chunk after chunk of draws."""

    def __init__(
        self,
        graph: StageGraph,
        network: Network,
        assignments: Assignments,
        arguments: dict[str, Any],
        examples: Tensor,
    ) -> None:
        self.graph, self.network, self.assignments = graph, network, assignments
        self.arguments, self.examples = arguments, examples
        self.blocks: dict[int, Block] = {}

    def chunk(self, chunk: Chunk) -> "Results":
        """The network's outputs for the draws of one chunk."""
        for step in chunk.steps:
            self.blocks[step.block] = self._compute(self.graph.stages[step.stage], step)
            for block, indices, new in step.carry:
                self.blocks[new] = self.blocks[block].some(indices)
            for block in step.drop:
                del self.blocks[block]
        results = Results(self.blocks, chunk.result)
        for block in chunk.drop:
            del self.blocks[block]
        return results

    def _compute(self, stage: Stage, step: Step) -> Block:
        if len(step.draws) > 1 and not stage.apart:
            try:
                return Block(self._together(stage, step), False)
            except _NO_VMAP as error:
                if out_of_memory(error):
                    raise
                stage.apart = True  # an operation that vmap cannot do: one after the other from now on
        rows = self.assignments.rows(step.draws)
        outputs = []
        for number, draw in enumerate(step.draws):
            arguments = tuple(
                self._argument(name, place, fetch, number)
                for (name, place), fetch in zip(stage.inputs, step.fetches, strict=True)
            )
            drawn = Drawn(self.assignments.keys[draw], rows[number], explicit=True, examples=self.examples)
            with hold(self.network, drawn):
                outputs.append(self.run(stage, clone_tensors(arguments) if stage.clone_inputs else arguments))
        return Block(outputs, True)

    def run(self, stage: Stage, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """One stage for the draw that is held."""
        return stage.run(*arguments)

    def _together(self, stage: Stage, step: Step) -> tuple[Any, ...]:
        arguments, axes = [], []
        for (name, place), fetch in zip(stage.inputs, step.fetches, strict=True):
            argument, axis = self._stacked(name, place, fetch)
            arguments.append(argument)
            axes.append(axis)
        if stage.clone_inputs:
            arguments = list(clone_tensors(tuple(arguments)))
        key = self.assignments.keys[step.draws[0]]  # names streams of noise, which such stages do not have

        def run(one: Tensor, *some: Any) -> tuple[Any, ...]:
            with hold(self.network, Drawn(key, one, explicit=True, examples=self.examples)):
                return stage.run_many(*some)

        with warnings.catch_warnings():  # calibration sees for itself what is slow
            warnings.filterwarnings("ignore", "There is a performance drop")
            return torch.func.vmap(run, in_dims=(0, *axes))(self.assignments.rows(step.draws), *arguments)

    def _argument(self, name: int | str, place: int | str, fetch: Fetch | None, number: int) -> Any:
        if fetch is None:
            return self.arguments[str(place)]
        block, index = fetch.entries[number]
        return self.blocks[block].one(index, int(place))

    def _stacked(self, name: int | str, place: int | str, fetch: Fetch | None) -> tuple[Any, int | None]:
        """An argument for several draws with its vmap axis: None where it is the same for all."""
        if fetch is None or fetch.same:
            return self._argument(name, place, fetch, 0), None
        block = None if fetch.block is None else self.blocks[fetch.block]
        if block is None or block.apart:
            values = [self._argument(name, place, fetch, number) for number in range(len(fetch.entries))]
            return tree_map(lambda *ts: torch.stack(ts), *values), 0
        value = block.values[int(place)]
        return value if fetch.index is None else tree_map(lambda t: _rows(t, fetch.index), value), 0


class Results:
    """The network's outputs for the draws of one chunk."""

    def __init__(self, blocks: dict[int, Block], fetch: Fetch) -> None:
        self._blocks = {block: blocks[block] for block, _ in fetch.entries}
        self._fetch = fetch

    def __len__(self) -> int:
        return len(self._fetch.entries)

    def like(self, whole: Tensor) -> "Results":
        """The same for another batch, from the outputs of all draws."""
        assert self._fetch.block is not None
        return Results({self._fetch.block: Block((whole,), False)}, self._fetch)

    def one(self, number: int) -> Any:
        """What the network returned for one of the draws."""
        block, index = self._fetch.entries[number]
        return self._blocks[block].one(index, 0)

    @property
    def whole(self) -> Tensor | None:
        """The outputs of all draws, (D, ...), where the network returns one tensor and they lie together."""
        if self._fetch.block is None or self._fetch.index is not None:
            return None
        block = self._blocks[self._fetch.block]
        return None if block.apart or not isinstance(block.values[0], Tensor) else block.values[0]


def _rows(value: Any, indices: Tensor | None) -> Any:
    return value[indices.to(value.device)] if isinstance(value, Tensor) and indices is not None else value


def clone_tensors(values: Any) -> Any:
    """The same structure with ordinary copies of its tensors."""
    return tree_map(lambda v: v.clone() if isinstance(v, Tensor) else v, values)


def tensors_in(values: Any) -> list[Tensor]:
    """All tensors of a structure."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def out_of_memory(error: Exception) -> bool:
    """Whether an allocator gave up."""
    text = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in text or "can't allocate memory" in text


def num_values(arguments: dict[str, Any]) -> int:
    """How many numbers a batch consists of."""
    return max(1, sum(tensor.numel() for tensor in tensors_in(arguments)))
