"""The fast path of prediction: trace once, check against the loop, then do every piece of work once.

Never a wrong answer: what cannot be traced, or does not agree with the loop on the first batch, goes through the loop.
"""

import inspect
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from ..draws import Draws
from ..network import Network
from .execution import Execution, Walk, out_of_memory, plan_walk
from .graph import Stage, StageGraph, Untraceable, clone_tensors, trace
from .loop import Outputs, check_finite, loop
from .plan import Plan, StagePlan

_WORTH_FOLDING = (
    400e-6  # seconds for an operation: above, arithmetic dominates and draws gain nothing from going together
)
_FOLDS = (1, 16, 64, 256)
_SHARE_OF_FREE_MEMORY = 0.25
_FORMS = 16  # remembered for a network
_PICKING = (
    2_000  # flops that drawing one element costs; with 50, heads of ECMP at batch 1 cost up to 4 times what they gained
)


@dataclass
class _Known:
    """What was found out about one network in one form of call, for as long as the network lives."""

    graph: StageGraph | None
    fallback: str | None = None
    foldable: bool = True
    checked: bool = False
    flops: list[int] = field(default_factory=list)
    num_values: int = 1
    chunk: dict[Any, int] = field(default_factory=dict)
    bytes: dict[Any, int] = field(default_factory=dict)


_known: "weakref.WeakKeyDictionary[Network, dict[Any, _Known]]" = weakref.WeakKeyDictionary()


class Engine:
    """Outputs of all draws for one batch after the other, by stages where that can be done and saves work.

    A traced network is remembered while it lives, with the attributes of its modules: a network whose forward depends on
    other state that changes between predictions (a global, the content of a list) must be run with engine="loop".
    """

    def __init__(
        self,
        model: nn.Module,
        network: Network,
        draws: Draws,
        *,
        compile: bool,
        memory_limit: int | None,
        by_loop: bool,
    ) -> None:
        self.model, self.network, self.draws = model, network, draws
        self.compile, self.by_loop = compile, by_loop
        self.memory_limit = memory_limit if memory_limit is not None else _default_memory_limit(network.device)
        self.plan = Plan.of_draws(draws)
        self._walk: tuple[StageGraph, Walk] | None = None

    def outputs(self, inputs: Any, examples: Tensor, output: Callable[[Any], Tensor]) -> Outputs:
        """The outputs of all draws for one batch."""
        if self.by_loop or len(self.draws) == 1:
            self.plan.fallback = "as asked for" if self.by_loop else "a single draw"
            return loop(self.model, self.network, inputs, self.draws, examples, output)
        known, arguments = self._known(inputs, examples, output)
        if known.graph is None:
            self.plan.engine, self.plan.fallback = "loop", known.fallback
            return loop(self.model, self.network, inputs, self.draws, examples, output)
        return self._by_stages(known, known.graph, arguments, examples, output)

    def marginalize_head_(self, inputs: Any, examples: Tensor, output: Callable[[Any], Tensor]) -> None:
        """Give every draw several heads where the last site is cheap beside the rest: less error for almost no work.

        A site with one draw group (EMP) is averaged over all its components, exactly; of others as many heads are drawn as
        cost a tenth of a pass, counting as much for picking the component of one element as for 2,000 multiplications.
        """
        if len(self.draws) == 1:
            return
        known, arguments = self._known(inputs, examples, output)
        if known.graph is None or not any(known.flops) or self.draws.is_exact:
            return
        graph = known.graph
        head = self.network.sites[graph.sites[-1]]
        final = graph.stages[graph.result]
        spans = [span for span in self.draws.layout.spans if span.name == head.name]
        if not final.sites or final.sites[-1] != graph.sites[-1] or len(spans) != 1 or head.posterior.unbounded:
            return
        scale = _num_values(arguments) / known.num_values  # flops were counted on the first batch that came
        cost = scale * known.flops[graph.result] + _PICKING * spans[0].length
        affordable = int(0.1 * scale * sum(known.flops) / cost)
        heads = spans[0].outcomes if spans[0].length == 1 else min(affordable, 2 * spans[0].outcomes)
        if affordable >= heads > 1:
            self.draws = self.draws.with_heads(head.name, heads)
            self.plan = Plan.of_draws(self.draws)
            self._walk = None

    def _known(self, inputs: Any, examples: Tensor, output: Callable[[Any], Tensor]) -> tuple[_Known, dict[str, Any]]:
        """The stages of the network for inputs of this form, traced and checked; and the arguments by name."""
        try:
            arguments = _bind(self.model, inputs)
            known = _look_up(self.model, self.network, arguments, self.compile)
        except Untraceable as error:
            return _Known(None, str(error)), {}
        if known.graph is not None and not known.checked:
            self._check(known, inputs, arguments, examples, output)
        return known, arguments

    def restricted_to(self, draws: Draws) -> "Engine":
        """The same for other draws of the network."""
        return Engine(
            self.model, self.network, draws, compile=self.compile, memory_limit=self.memory_limit, by_loop=self.by_loop
        )

    def _by_stages(
        self,
        known: _Known,
        graph: StageGraph,
        arguments: dict[str, Any],
        examples: Tensor,
        output: Callable[[Any], Tensor],
    ) -> Outputs:
        walk = self._walk_of(graph)
        results = min(len(walk.order), _FOLDS[-1]).bit_length()
        form = (tuple(_like(tensor) for tensor in _tensors(arguments)), torch.get_num_threads(), results)
        if form not in known.chunk:
            known.chunk[form] = self._calibrate(known, graph, arguments, examples)
        execution = Execution(graph, self.network, self.draws, walk, arguments, examples)
        execution.fold = known.foldable and not self.compile
        self._describe(known, graph, walk)
        position, most = 0, _FOLDS[-1]
        while position < len(walk.order):
            held = max(known.bytes.get(form, 0), execution.bytes_per_draw)
            known.bytes[form] = held
            size = max(1, min(known.chunk[form], most, self.memory_limit // (3 * max(held, 1))))
            stop = min(position + size, len(walk.order))
            try:
                entries = execution.chunk(position, stop)
            except RuntimeError as error:
                if size == 1 or not out_of_memory(error):
                    raise
                most = size // 2
                continue
            members = walk.members[position:stop]
            values = _collect(entries, output)
            check_finite(values, members)
            self.plan.chunk = size
            yield members, values
            position = stop

    def _calibrate(self, known: _Known, graph: StageGraph, arguments: dict[str, Any], examples: Tensor) -> int:
        """How many draws to compute together: the fastest of a few sizes, timed on the first draws.

        Timed apart from the prediction and remembered, so that a prediction that is repeated is repeated to the bit.
        """
        walk = self._walk_of(graph)
        if self.compile or not known.foldable or len(walk.order) < 4:
            return 1
        best, chosen, held = float("inf"), 1, 1
        for size in _FOLDS:
            if size > 1 and (size > len(walk.order) or 3 * held * size > self.memory_limit):
                break
            execution = Execution(graph, self.network, self.draws, walk, arguments, examples)
            warm = min(size, 2)
            execution.chunk(0, warm)
            before, began = execution.work, time.perf_counter()
            try:
                execution.chunk(warm, min(warm + size, len(walk.order)))
            except RuntimeError as error:
                if size == 1 or not out_of_memory(error):
                    raise
                break
            held = max(held, execution.bytes_per_draw)
            times = (time.perf_counter() - began) / max(execution.work - before, 1)
            known.foldable = execution.fold
            if not execution.fold or (size == 1 and times > _WORTH_FOLDING) or times > 0.95 * best:
                return chosen if size > 1 else 1
            best, chosen = times, size
        return chosen

    def _describe(self, known: _Known, graph: StageGraph, walk: Walk) -> None:
        names = [site.name for site in self.network.sites]
        flops = known.flops or [0] * len(graph.stages)
        self.plan.engine, self.plan.networks, self.plan.opaque = "stages", len(walk.order), graph.opaque
        self.plan.stages = [
            StagePlan(tuple(names[n] for n in stage.sites), stage.num_operations, distinct, cost)
            for stage, distinct, cost in zip(graph.stages, walk.distinct, flops, strict=True)
        ]

    def _walk_of(self, graph: StageGraph) -> Walk:
        if self._walk is None or self._walk[0] is not graph:
            self._walk = graph, plan_walk(graph, self.network, self.draws)
        return self._walk[1]

    def _check(
        self, known: _Known, inputs: Any, arguments: dict[str, Any], examples: Tensor, output: Callable[[Any], Tensor]
    ) -> None:
        """Compare stages and loop on two draws, and find stages that change their inputs in place."""
        assert known.graph is not None
        graph, known.checked = known.graph, True
        walk = self._walk_of(graph)
        last = walk.order[-1]
        try:
            with torch.inference_mode(False), torch.no_grad():
                arguments = clone_tensors(arguments)
                inspection = _Inspection(graph, self.network, self.draws, walk, clone_tensors(arguments), examples)
                inspection.flops = {}
                inspection.chunk(0, 1)
                known.num_values = _num_values(arguments)
                known.flops = [inspection.flops.get(id(stage), 0) for stage in graph.stages]
                execution = Execution(graph, self.network, self.draws, walk, arguments, examples)
                execution.chunk(0, 1)
                raw = execution.chunk(len(walk.order) - 1, len(walk.order))[0].output(0)
                mine = output(raw)
        except Exception as error:
            known.graph, known.fallback = None, f"running by stages failed ({type(error).__name__}: {error})"
            return
        kinds: list[type] = []

        def watched(value: Any) -> Tensor:
            kinds.append(type(value))
            return output(value)

        ((_, reference),) = loop(self.model, self.network, inputs, self.draws[last], examples, watched)
        if kinds != [type(raw)]:
            known.graph, known.fallback = (
                None,
                f"the network returns a {kinds[0].__name__}, which tracing does not keep",
            )
            return
        tolerance = 1e-9 if mine.dtype == torch.float64 else 1e-4 if mine.dtype == torch.float32 else 5e-2
        scale = float(reference.abs().max())
        if mine.shape != reference[0].shape or float((mine - reference[0]).abs().max()) > tolerance * max(scale, 1e-6):
            known.graph, known.fallback = (
                None,
                "the traced network does not agree with the loop (its forward has side effects)",
            )


class _Inspection(Execution):
    """A first run that counts the arithmetic of each stage and finds stages that change their inputs in place."""

    flops: dict[int, int]

    def run(self, stage: Stage, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        tensors = _tensors(arguments)
        versions = [tensor._version for tensor in tensors]
        with FlopCounterMode(display=False) as counter:
            outputs = stage.run(*arguments)
        self.flops[id(stage)] = counter.get_total_flops()
        stage.clone_inputs = versions != [tensor._version for tensor in tensors]
        return outputs


def _look_up(model: nn.Module, network: Network, arguments: dict[str, Any], compile: bool) -> _Known:
    constants = {name: value for name, value in arguments.items() if not _tensors(value)}
    structure = tuple((id(module), *_state(module)) for module in model.modules())
    form = (structure, id(network.layout), tuple(arguments), repr(constants), compile)
    remembered = _known.setdefault(network, {})
    if form not in remembered:
        if len(remembered) >= _FORMS:  # attributes that change with every call would fill the memory with graphs
            del remembered[next(iter(remembered))]
        try:
            remembered[form] = _Known(trace(model, network, constants))
        except Untraceable as error:
            remembered[form] = _Known(None, f"the network cannot be traced ({error})")
    return remembered[form]


def _state(module: nn.Module) -> Iterator[Any]:
    """What tracing takes from a module as constant: the attributes of modules that hold others (leaves run as they are)."""
    if module._modules:
        for name, value in vars(module).items():
            if not name.startswith("_"):
                yield name, value if isinstance(value, int | float | str | None) else id(value)


def _bind(model: nn.Module, inputs: Any) -> dict[str, Any]:
    """The arguments of the network's forward by name."""
    signature = inspect.signature(model.forward)
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    if kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
        raise Untraceable("its forward takes any number of arguments")
    if isinstance(inputs, tuple):
        bound = signature.bind(*inputs)
    elif isinstance(inputs, Mapping):
        bound = signature.bind(**inputs)
    else:
        bound = signature.bind(inputs)
    bound.apply_defaults()
    return dict(bound.arguments)


def _collect(entries: list[Any], output: Callable[[Any], Tensor]) -> Tensor:
    first = entries[0]
    whole = first.values[0]
    together = all(entry.values is first.values and entry.index == place for place, entry in enumerate(entries))
    if together and len(entries) == first.size and isinstance(whole, Tensor):
        try:
            sample = output(first.output(0))
            if sample.shape == whole.shape[1:] and sample.data_ptr() == whole.data_ptr():
                return whole
        except RuntimeError:
            pass
    return torch.stack([output(entry.output(0)) for entry in entries])


def _num_values(arguments: dict[str, Any]) -> int:
    return max(1, sum(tensor.numel() for tensor in _tensors(arguments)))


def _like(tensor: Tensor) -> tuple[Any, ...]:
    """Shape and kind, batches of about the same size taken together."""
    batch = tensor.shape[0].bit_length() if tensor.dim() else 0
    return batch, tensor.shape[1:], tensor.dtype, tensor.device


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _default_memory_limit(device: torch.device | None) -> int:
    """A quarter of the memory that is free on the device."""
    if device is not None and device.type == "cuda":
        return int(_SHARE_OF_FREE_MEMORY * torch.cuda.mem_get_info(device)[0])
    information = Path("/proc/meminfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("MemAvailable"):
                return int(_SHARE_OF_FREE_MEMORY * 1024 * int(line.split()[1]))
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 2**32
    return int(_SHARE_OF_FREE_MEMORY * pages)
