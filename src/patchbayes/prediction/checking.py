"""The first batch of a form of call: whether the stages give what the loop gives, and whether a forward leaves a trace."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ..draws import Draws
from .attributes import Attributes
from .calibration import ASSIGNMENTS, close
from .execution import Execution, clone_tensors, num_values, tensors_in
from .forms import Form, Itinerary
from .graph import Sites, Stage
from .loop import loop, undisturbed
from .schedule import Schedule


def check_(
    form: Form,
    inputs: Any,
    arguments: dict[str, Any],
    draws: Draws,
    examples: Tensor,
    output: Callable[[Any], Tensor],
    memory_limit: int,
) -> None:
    """Note in `form` why the network must go through the plain loop, if it must, and what its stages cost."""
    model = form.model
    if any(_is_compiled(module) for module in model.modules()):  # to watch what it does would undo that
        form.fallback, form.checked = "it is compiled; compile=True compiles what draws share instead", True
        return
    attributes = Attributes(model)
    with torch.inference_mode(False), torch.no_grad(), undisturbed(model, form.network):
        inputs, arguments = clone_tensors(inputs), clone_tensors(arguments)
        try:
            if form.traced is None:
                form.fallback = _check_whole(form, inputs, draws, examples, output)
            else:
                itinerary = form.itinerary(draws, memory_limit // ASSIGNMENTS)
                form.fallback = _check_stages(form, itinerary, inputs, arguments, draws, examples, output)
        finally:
            attributes.restore()
    form.checked = True


def _check_stages(
    form: Form,
    itinerary: Itinerary,
    inputs: Any,
    arguments: dict[str, Any],
    draws: Draws,
    examples: Tensor,
    output: Callable[[Any], Tensor],
) -> str | None:
    schedule = Schedule(form.finest, itinerary.walk)
    assert form.traced is not None
    constants = [
        (t, t._version) for t in form.traced.targets.values() if isinstance(t, Tensor) and not t.is_inference()
    ]
    inspection = _Inspection(schedule.graph, form.network, itinerary.assignments, arguments, examples)
    last = itinerary.walk.order[-1]
    try:
        chunk = next(schedule.chunks(1, frozenset(), start=len(itinerary.walk.order) - 1))
        raw = inspection.chunk(chunk).one(0)
        mine = output(raw)
    except Exception as error:
        return f"running by stages failed ({type(error).__name__}: {error})"
    if inspection.conflict or any(tensor._version != version for tensor, version in constants):
        return "it changes in place what another part of it uses"
    form.flops, form.num_values = inspection.flops, num_values(arguments)
    form.joins = not any(stage.clone_inputs for stage in schedule.graph.stages)
    form.forget_itineraries()
    kinds: list[type] = []

    def watched(value: Any) -> Tensor:
        kinds.append(type(value))
        return output(value)

    def reference() -> Tensor:
        ((_, value),) = loop(form.model, form.network, inputs, draws[last], examples, watched)
        return value[0]

    attributes = Attributes(form.model)
    first = reference()
    if kinds != [type(raw)]:
        return f"the network returns a {kinds[0].__name__}, which tracing does not keep"
    if not close(mine, first) or (attributes.changed() and not close(reference(), first)):
        return "the traced network does not agree with the loop (its forward has side effects)"
    return None


class _Inspection(Execution):
    """A first run that counts the arithmetic of each stage and finds stages that change their inputs in place."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.flops: dict[Sites, int] = {}
        self.conflict = False

    def run(self, stage: Stage, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        held = [*tensors_in(self.arguments), *(t for block in self.blocks.values() for t in tensors_in(block.values))]
        given = [tensors_in(argument) for argument in arguments]
        versions = [[tensor._version for tensor in tensors] for tensors in given]
        with FlopCounterMode(display=False) as counter:
            outputs = stage.run_many(*arguments)
        self.flops[stage.keys[0]] = counter.get_total_flops()
        for source, tensors, before in zip(stage.sources, given, versions, strict=True):
            for tensor, version in zip(tensors, before, strict=True):
                if tensor._version != version:
                    stage.clone_inputs = True
                    outside = source.op == "placeholder" or any(user not in stage.members for user in source.users)
                    self.conflict |= outside or _is_shared(tensor, [*held, *(t for some in given for t in some)])
        return outputs


def _is_shared(tensor: Tensor, others: list[Tensor]) -> bool:
    """Whether another tensor looks at the same memory."""
    memory = tensor.untyped_storage().data_ptr()
    return any(
        other is not tensor and other.layout == torch.strided and other.untyped_storage().data_ptr() == memory
        for other in others
    )


def _check_whole(
    form: Form, inputs: Any, draws: Draws, examples: Tensor, output: Callable[[Any], Tensor]
) -> str | None:
    """A network that is run whole may be run once for draws that are alike only if a run depends on nothing but the draw."""

    def run() -> Tensor:
        ((_, value),) = loop(form.model, form.network, inputs, draws[-1], examples, output)
        return value

    run()  # a first call may fill caches
    attributes = Attributes(form.model)
    first = run()
    if attributes.changed():
        return f"{form.reason}, and its forward changes attributes or buffers"
    if not close(run(), first):
        return f"{form.reason}, and its forward gives something else each time"
    return None


def _is_compiled(module: nn.Module) -> bool:
    return type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None
