"""How many draws are computed together: the fastest of a few numbers, timed once for each form of batch, within the memory.

A network that computes near the limit of the machine gains nothing from draws that go together, and loses where activations
leave the cache; a small one gains ten times and more, for the calls cost more than the arithmetic.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .execution import Execution, Results, out_of_memory, tensors_in
from .graph import Stage
from .memory import LiveBytes
from .schedule import Chunk, Schedule

MOST = 256  # draws that go together
_SIZES = (1, 16, 64, MOST)
_TRIAL = 4  # draws that go together in a first try, to see whether they can and what memory they take
_WORTH_FOLDING = (
    400e-6  # seconds for an operation: above, arithmetic dominates and draws gain nothing from going together
)
_GAIN = 0.95  # of the time: less is not worth the memory
_ROUNDS, _BUDGET = 5, 0.2  # timings of one number, and the seconds after which no more are made
_UNMEASURED = 4  # several draws at once may take this much more memory each than one, before it is known
ASSIGNMENTS = 8  # the part of the memory that is left to what was drawn
_AVERAGING = 64  # bytes that averaging takes for each number that a draw puts out, in double precision


@dataclass
class Setting:
    """What was measured for one form of batch.

    size    the fastest number of draws to compute together.
    peak    bytes at the peak of computing so many draws together, values kept from before not counted.
    held    bytes that the outputs of each stage take for one assignment.
    output  numbers in the output of one draw.
    num_values  numbers in the batch that was measured.
    limited     the memory limit that kept larger numbers of draws from being tried, if it did.
    """

    size: int = 1
    peak: dict[int, int] = field(default_factory=dict)
    held: list[int] = field(default_factory=list)
    output: int = 0
    num_values: int = 1
    limited: int | None = None

    def fitting(self, schedule: Schedule, limit: int, scale: float) -> tuple[int, frozenset[int]]:
        """How many draws fit into the memory together, and which stages can be kept from one chunk to the next.

        scale is the size of this batch beside the one that was measured.
        """
        room, carried = self.room(schedule, limit, scale)
        largest = self.size
        for size in sorted(self.peak, reverse=True):  # between two measured numbers, each draw takes as at the smaller
            fits = min(largest, int(room / (scale * self._bytes(size) / size)))
            if fits >= size:
                return fits, carried
            largest = min(largest, size - 1)
        return 1, carried

    def room(self, schedule: Schedule, limit: int, scale: float) -> tuple[float, frozenset[int]]:
        """The bytes left for computing draws, beside the stages that are kept from one chunk to the next; and these."""
        one = scale * self._bytes(1)
        room, carried = limit - limit // ASSIGNMENTS - one, []
        costs = [alive * held * scale for alive, held in zip(schedule.alive, self.held, strict=True)]
        for number in sorted(range(len(costs)), key=lambda n: costs[n]):
            if costs[number] <= room:
                carried.append(number)
                room -= costs[number]
        return room + one, frozenset(carried)

    def _bytes(self, size: int) -> int:
        return self.peak[size] + size * self.output * _AVERAGING + 1


class Calibration:
    """Measures one form of batch; `start` makes a fresh execution of it."""

    def __init__(self, start: Callable[[type[Execution]], Execution], schedule: Schedule, limit: int) -> None:
        self.start, self.schedule, self.limit = start, schedule, limit
        self.setting = Setting()

    def run(self, *, several: bool) -> Setting:
        """`several`: whether draws may go together at all."""
        setting, total = self.setting, len(self.schedule.walk.order)
        first = self._measure(1)
        setting.output = sum(tensor.numel() for tensor in tensors_in(first[0]))
        if not several or total < 4 or self._seconds_for_an_operation() > _WORTH_FOLDING:
            return setting
        if not self._fits(_TRIAL, _UNMEASURED * setting.peak[1]):
            setting.limited = self.limit
            return setting
        if not _agree(self._measure(_TRIAL), self._one_by_one(_TRIAL)):
            for stage in self.schedule.graph.stages:
                stage.apart = True
        if all(stage.apart for stage in self.schedule.graph.stages):
            return setting
        for size in _SIZES[1:]:
            known = max(setting.peak)
            if known >= total:
                break
            if not self._fits(min(size, total), setting.peak[known] / known):
                setting.limited = self.limit
                break
            try:
                self._measure(min(size, total))
                if not self._faster(min(size, total)):
                    break
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
                setting.limited = self.limit
                break
            setting.size = size
        return setting

    def _fits(self, size: int, each: float) -> bool:
        """Whether so many draws, of so many bytes each, can be tried together."""
        room, _ = self.setting.room(self.schedule, self.limit, 1.0)
        return size * (each + self.setting.output * _AVERAGING) <= room

    def _measure(self, size: int) -> list[object]:
        """Note the memory that so many draws take together where they share least; their outputs."""
        execution = self.start(_Inspection if size == 1 else Execution)
        chunk = next(self.schedule.chunks(size, frozenset(), start=self._least_shared(size)))
        with LiveBytes() as memory:
            results = execution.chunk(chunk)
        if isinstance(execution, _Inspection):
            self.setting.held = [execution.held.get(id(stage), 0) for stage in self.schedule.graph.stages]
        self.setting.peak[size] = memory.peak
        return [results.one(number) for number in range(len(results))]

    def _least_shared(self, size: int) -> int:
        """Where the chunk of so many draws begins that has the most distinct values."""
        order, stages = self.schedule.walk.order, self.schedule.keys
        if size == 1:
            return 0
        held = self.setting.held

        def values(start: int) -> int:
            some = order[start : start + size]
            return sum(bytes * len({keys[draw] for draw in some}) for keys, bytes in zip(stages, held, strict=True))

        return max(range(0, len(order), size), key=values)

    def _one_by_one(self, size: int) -> list[object]:
        """What `_measure` gives, from one draw at a time."""
        execution, start = self.start(Execution), self._least_shared(size)
        chunks = itertools.islice(self.schedule.chunks(1, frozenset(), start), size)
        return [execution.chunk(chunk).one(0) for chunk in chunks]

    def _first(self, size: int, number: int) -> Iterator[Results]:
        execution = self.start(Execution)
        for chunk in self._chunks(size):
            if chunk.start >= number:
                break
            yield execution.chunk(chunk)

    def _chunks(self, size: int) -> Iterator[Chunk]:
        _, carried = self.setting.room(self.schedule, self.limit, 1.0)
        return self.schedule.chunks(size, carried)

    def _seconds_for_an_operation(self) -> float:
        """The shortest of a few times, of the first draw alone."""
        best = float("inf")
        for _ in range(_ROUNDS):
            chunk = next(self._chunks(1))
            operations = sum(self.schedule.graph.stages[step.stage].num_operations for step in chunk.steps)
            execution, watch = self.start(Execution), Stopwatch()
            execution.chunk(chunk)
            took = watch.seconds()
            best = min(best, took / operations)
            if best < _WORTH_FOLDING or took > _BUDGET:
                break
        return best

    def _faster(self, size: int) -> bool:
        """Whether so many at a time are faster than what was best so far, on the same draws, in turns."""
        best = [float("inf"), float("inf")]
        whole = Stopwatch()
        for _ in range(_ROUNDS):
            for which, candidate in enumerate((self.setting.size, size)):
                watch = Stopwatch()
                for _ in self._first(candidate, size):
                    pass
                best[which] = min(best[which], watch.seconds())
            if whole.seconds() > _BUDGET:
                break
        return best[1] < _GAIN * best[0]


class Stopwatch:
    """Seconds since it was made: by the clock, or of the processor where other programs held that up."""

    def __init__(self) -> None:
        self._began = time.perf_counter(), time.process_time()

    def seconds(self) -> float:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # the processor's own time says nothing of the device's
            return time.perf_counter() - self._began[0]
        return min(time.perf_counter() - self._began[0], time.process_time() - self._began[1])


class _Inspection(Execution):
    """Runs the stages in their plain form, and notes the bytes of their outputs."""

    held: dict[int, int]

    def run(self, stage: Stage, arguments: tuple[object, ...]) -> tuple[object, ...]:
        outputs = stage.run_many(*arguments)
        self.held = getattr(self, "held", {})
        self.held[id(stage)] = sum(t.numel() * t.element_size() for t in tensors_in(outputs))
        return outputs


def _agree(some: list[object], others: list[object]) -> bool:
    return all(
        close(a, b)
        for one, other in zip(some, others, strict=True)
        for a, b in zip(tensors_in(one), tensors_in(other), strict=True)
    )


def close(mine: Tensor, reference: Tensor) -> bool:
    """Whether two tensors are equal up to rounding, beside the largest number of the second."""
    if mine.shape != reference.shape or mine.dtype != reference.dtype:
        return False
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-4}.get(mine.dtype, 5e-2 if mine.is_floating_point() else 0.0)
    if not mine.numel():
        return True
    fine = torch.isfinite(reference)
    if not torch.equal(torch.isfinite(mine), fine):
        return False
    scale = float(reference[fine].abs().max()) if fine.any() else 0.0
    gap = (mine[fine] - reference[fine]).abs()
    return not gap.numel() or float(gap.max()) <= tolerance * max(scale, 1e-6)
