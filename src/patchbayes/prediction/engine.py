"""The fast path of prediction: trace once, check against the loop, then do every piece of work once.

Never a wrong answer: what cannot be traced is run whole, several draws at once where torch.func.vmap allows it; what does
not agree with the loop on the first batch, or changes the network as it runs, goes through the loop.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..draws import Draws
from ..network import Network
from .calibration import ASSIGNMENTS, MOST, Calibration, Setting
from .checking import check_
from .execution import Execution, Results, num_values, out_of_memory, tensors_in
from .forms import Form, Itinerary, look_up
from .loop import Outputs, check_finite, loop
from .memory import default_memory_limit
from .plan import Plan
from .schedule import Chunk

_PICKING = (
    2_000  # flops that drawing one element costs; with 50, heads of ECMP at batch 1 cost up to 4 times what they gained
)
_RECORDING = 32  # times the memory of a computation, while it is recorded


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
        self.memory_limit = memory_limit if memory_limit is not None else default_memory_limit(network.device)
        self.plan = Plan.of_draws(draws)

    def outputs(self, inputs: Any, examples: Tensor, output: Callable[[Any], Tensor]) -> Outputs:
        """The outputs of all draws for one batch."""
        if self.by_loop or len(self.draws) == 1:
            self.plan.fallback = "as asked for" if self.by_loop else "a single draw"
            return loop(self.model, self.network, inputs, self.draws, examples, output)
        form, arguments = self._form(inputs, examples, output)
        if form.fallback is not None:
            self.plan.engine, self.plan.fallback = "loop", form.fallback
            return loop(self.model, self.network, inputs, self.draws, examples, output)
        return self._by_stages(form, arguments, examples, output)

    def marginalize_head_(self, inputs: Any, examples: Tensor, output: Callable[[Any], Tensor]) -> None:
        """Give every draw several heads where the last site is cheap beside the rest: less error for almost no work.

        A site with one draw group (EMP) is averaged over all its components, exactly; of others as many heads are drawn as
        cost a tenth of a pass, counting as much for picking the component of one element as for 2,000 multiplications.
        """
        if len(self.draws) == 1:
            return
        form, arguments = self._form(inputs, examples, output)
        if form.fallback is not None or form.traced is None or not any(form.flops.values()) or self.draws.is_exact:
            return
        last = form.sites[-1]
        head = self.network.sites[last]
        spans = [span for span in self.draws.layout.spans if span.name == head.name]
        if last not in form.result or len(spans) != 1 or head.posterior.unbounded:
            return
        scale = num_values(arguments) / form.num_values  # flops were counted on the first batch that came
        cost = scale * form.flops[form.result] + _PICKING * spans[0].length
        affordable = int(0.1 * scale * sum(form.flops.values()) / cost)
        heads = spans[0].outcomes if spans[0].length == 1 else min(affordable, 2 * spans[0].outcomes)
        if affordable >= heads > 1:
            self.draws = self.draws.with_heads(head.name, heads)
            self.plan = Plan.of_draws(self.draws)

    def restricted_to(self, draws: Draws) -> "Engine":
        """The same for other draws of the network."""
        return Engine(
            self.model, self.network, draws, compile=self.compile, memory_limit=self.memory_limit, by_loop=self.by_loop
        )

    def _form(self, inputs: Any, examples: Tensor, output: Callable[[Any], Tensor]) -> tuple[Form, dict[str, Any]]:
        """The network's stages for inputs of this form, traced and checked; and the arguments by name."""
        form, arguments = look_up(self.model, self.network, inputs, self.compile)
        if not form.checked:
            check_(form, inputs, arguments, self.draws, examples, output, self.memory_limit)
        return form, arguments

    def _by_stages(
        self, form: Form, arguments: dict[str, Any], examples: Tensor, output: Callable[[Any], Tensor]
    ) -> Outputs:
        itinerary = form.itinerary(self.draws, self.memory_limit // ASSIGNMENTS)
        setting, scale = self._setting(form, itinerary, arguments, examples)
        size, carried = setting.fitting(itinerary.schedule, self.memory_limit, scale)
        size = self.plan.chunk = min(size, len(itinerary.walk.order))
        self._describe(form, itinerary, size)

        def run(some: dict[str, Any]) -> Iterator[tuple[Chunk, Results]]:
            return self._run(itinerary, some, examples, size, carried)

        small = size >= len(itinerary.walk.order) and _RECORDING * max(setting.peak.values()) < self.memory_limit
        exact = form.traced is not None and not self.compile and not self.network.layout.unbounded
        done = itinerary.recordings.run(arguments, lambda some: list(run(some))) if small and exact else run(arguments)
        for chunk, results in done:
            values = _collect(results, output)
            check_finite(values, chunk.members)
            self._count(form, itinerary, chunk)
            yield chunk.members, values

    def _run(
        self, itinerary: Itinerary, arguments: dict[str, Any], examples: Tensor, size: int, carried: frozenset[int]
    ) -> Iterator[tuple[Chunk, Results]]:
        """The results chunk by chunk; where memory runs out, of half as many draws."""
        execution = Execution(itinerary.graph, self.network, itinerary.assignments, arguments, examples)
        position, chunks = 0, itinerary.schedule.chunks(size, carried)
        while position < len(itinerary.walk.order):
            chunk = next(chunks)
            try:
                results = execution.chunk(chunk)
            except RuntimeError as error:
                if size == 1 or not out_of_memory(error):
                    raise
                size //= 2
                execution.blocks.clear()
                chunks = itinerary.schedule.chunks(size, carried, start=position)
                continue
            position, self.plan.chunk = chunk.stop, size
            yield chunk, results

    def _count(self, form: Form, itinerary: Itinerary, chunk: Chunk) -> None:
        stages, place = itinerary.graph.stages, {sites: number for number, sites in enumerate(form.operations)}
        for step in chunk.steps:
            for sites in stages[step.stage].keys:
                self.plan.evaluated[place[sites]] += len(step.draws)
        self.plan.folded = sum(pair.folds for stage in stages for pair in stage.folded)

    def _setting(
        self, form: Form, itinerary: Itinerary, arguments: dict[str, Any], examples: Tensor
    ) -> tuple[Setting, float]:
        """What is known of batches like this one, and how large it is beside the one that was measured.

        Timed apart from the prediction and remembered, so that a prediction that is repeated is repeated to the bit.
        """

        def start(kind: type[Execution]) -> Execution:
            return kind(itinerary.graph, self.network, itinerary.assignments, arguments, examples)

        results = min(len(itinerary.walk.order), MOST).bit_length()
        likeness = tuple(_like(tensor) for tensor in tensors_in(arguments))
        key = (likeness, torch.get_num_threads(), results, itinerary.joined)
        known = form.settings.get(key)
        if known is None or (known.limited is not None and self.memory_limit > 2 * known.limited):
            calibration = Calibration(start, itinerary.schedule, self.memory_limit)
            form.settings[key] = calibration.run(several=not self.compile)
            form.settings[key].num_values = num_values(arguments)
        return form.settings[key], num_values(arguments) / form.settings[key].num_values

    def _describe(self, form: Form, itinerary: Itinerary, size: int) -> None:
        plan, walk = self.plan, itinerary.walk
        plan.engine, plan.networks, plan.compiled = "stages", len(walk.order), self.compile
        plan.opaque = form.traced.opaque if form.traced else []
        if form.traced is None:
            together = size > 1 and not itinerary.graph.stages[0].apart
            plan.engine, plan.fallback = "vmap" if together else "loop", form.reason
        plan.stages = list(itinerary.stages)
        plan.evaluated = [0] * len(plan.stages)


def _collect(results: Results, output: Callable[[Any], Tensor]) -> Tensor:
    """What `output` takes from the results of each draw, (D, B, ...)."""
    whole = results.whole
    if whole is not None:
        first = results.one(0)
        probe = first.clone()
        if output(probe) is probe and torch.equal(probe, first):  # it takes the output as it is
            return whole
    return torch.stack([output(results.one(number)) for number in range(len(results))])


def _like(tensor: Tensor) -> tuple[Any, ...]:
    """Shape and kind, batches of about the same size taken together."""
    batch = tensor.shape[0].bit_length() if tensor.dim() else 0
    return batch, tensor.shape[1:], tensor.dtype, tensor.device
