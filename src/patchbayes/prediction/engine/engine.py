"""The engine: the loop's numbers from a captured network, each piece of work done once.

Whatever cannot be captured goes through the loop, with the reason in the plan; so does a call that would not pay for
capturing. Nothing is stored on the network, and nothing global is changed.
"""

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ...draws.draws import Draws
from ...errors import PatchbayesError
from ...layers import is_compiled
from ...patching.network import PatchedNetwork, network_of
from ..loop import Members, Outputs, at_rest, check_finite, loop, undisturbed
from ..plan import Plan, StagePlan
from .capture import CAPTURING, Capture, NotCapturable, batch_size, capture, evaluation_copy
from .counts import Work, default_memory_limit
from .drawn import drawing, example_tensors
from .execution import Execution, out_of_memory
from .picking import pick
from .remembering import Form, form_of, modules_of
from .route import Route, Routes
from .stages import Network, numbers

Mode = Literal["auto", "loop", "graph"]

_PICKING = 2_000  # flops that drawing one element of a head costs
_MANY_PASSES = 60  # counting a pass costs up to five of a small network
_LIGHT = 1e10  # numbers of a batch times parameters
_MOST_CAPTURES = 4  # for different sizes of one form of call


class Engine:
    """Outputs of all draws for one batch after the other, with everything done once that draws have in common.

    batches   how many batches will come, where that is known; whether capturing pays depends on it.
    """

    def __init__(
        self,
        model: nn.Module,
        network: PatchedNetwork,
        draws: Draws,
        *,
        mode: Mode,
        memory_limit: int | None,
        batches: int = 1,
    ) -> None:
        self.model, self.network, self.draws, self.mode = model, network, draws, mode
        self.memory_limit = memory_limit if memory_limit is not None else default_memory_limit(network.device)
        self.batches = batches
        self.plan = Plan.of_draws(draws)
        self._routes = Routes(network, self.memory_limit)
        self._parts: dict[tuple[int, int], Engine] = {}
        self._counted: tuple[Any, Draws, Tensor] | None = None

    def part(self, start: int, stop: int) -> "Engine":
        """The same for some of the draws; kept for the next batch."""
        if (start, stop) not in self._parts:
            self._parts[start, stop] = Engine(
                self.model,
                self.network,
                self.draws[start:stop],
                mode=self.mode,
                memory_limit=self.memory_limit,
                batches=self.batches,
            )
        return self._parts[start, stop]

    def outputs(self, inputs: Any, examples: Tensor, output: Callable[[Any], Tensor]) -> Outputs:
        """The outputs of all draws for one batch."""
        captured = self._captured(inputs, examples, output)
        if captured is not None:
            form, network, arguments = captured
            values = self._by_stages(network, arguments, examples, output)
            try:
                return _resumed(next(values), values)
            except _Unfit as error:
                form.reason, form.networks = str(error), []
                self.plan.fallback = form.reason
        self.plan.engine = "loop"
        return self._loop(self.draws, inputs, examples, output)

    def _loop(self, draws: Draws, inputs: Any, examples: Tensor, output: Callable[[Any], Tensor]) -> Outputs:
        resting = at_rest(self.model)
        counted, self._counted = self._counted, None
        done = int(counted is not None and counted[0] is inputs and counted[1] is draws)
        if counted is not None and done:
            yield Members([[0]]), counted[2]
        with undisturbed(resting):
            for members, values in loop(resting, network_of(resting), inputs, draws[done:], examples, output):
                yield Members([[number + done for number in some] for some in members]), values

    def marginalize_head_(self, inputs: Any, examples: Tensor, output: Callable[[Any], Tensor]) -> None:
        """Give every draw several heads where the last site is cheap beside the rest: less error for almost no work.

        A site with one draw group (EMP) is averaged over all its components, exactly; of others as many heads are drawn as
        cost a tenth of a pass, counting as much for picking the component of one element as for 2,000 multiplications.
        """
        if self.draws.is_exact or len(self.draws) == 1 or self.mode == "loop":
            return
        if self.mode == "auto" and not self._pays_alone(inputs, examples, output):
            return  # what is averaged must not depend on what was predicted before
        captured = self._captured(inputs, examples, output)
        if captured is None:
            return
        _, network, arguments = captured
        picked = pick(network.capture, output)
        operations, result = network.operations, network.result(picked.leaves)
        total = sum(group.flops for group in operations.values())
        last = network.sites[-1] if network.sites else None
        if not total or last is None or last not in result or result not in operations:
            return
        head = self.network.sites[last].posterior
        groups = head.groups()
        if groups is None or groups.tie == "network" or head.noise != "none":
            return
        scale = network.scale(arguments)
        cost = scale * operations[result].flops + _PICKING * groups.length
        affordable = int(0.1 * scale * total / cost)
        heads = groups.outcomes if groups.length == 1 else min(affordable, 2 * groups.outcomes)
        if affordable >= heads > 1:
            self.draws = self.draws.with_heads(self.network.sites[last].name, heads)
            self.plan = Plan.of_draws(self.draws)

    # Capturing

    def _captured(
        self, inputs: Any, examples: Tensor, output: Callable[[Any], Tensor], fewest: int = 2
    ) -> tuple[Form, Network, list[Any]] | None:
        """The captured network for such inputs, or None where the loop shall run, with the reason in the plan."""
        plan = self.plan
        if self.mode == "loop" or len(self.draws) < fewest:
            plan.fallback = "as asked for" if self.mode == "loop" else "a single draw"
            return None
        plan.fallback = _refused(self.model, self.network)
        if plan.fallback is not None:
            return None
        arguments = _arguments(inputs)
        leaves, spec = tree_flatten(arguments)
        form = form_of(self.model, leaves, spec)
        network = self._found(form, leaves)
        if network is None and form.reason is None:
            if self.mode == "auto" and not self._pays(form, inputs, leaves, examples, output):
                plan.fallback = "capturing the network would not pay"
                return None
            with CAPTURING:
                network = self._found(form, leaves) or self._capture(form, leaves, spec)
        if network is None:
            plan.fallback = form.reason
            return None
        return form, network, leaves

    def _found(self, form: Form, leaves: list[Any]) -> Network | None:
        return next((network for network in list(form.networks) if network.capture.fits(leaves)), None)

    def _capture(self, form: Form, leaves: list[Any], spec: Any) -> Network | None:
        if form.reason is not None:
            return None
        began = time.perf_counter()
        if len(form.networks) >= _MOST_CAPTURES:
            form.networks.pop(0)
        with torch.inference_mode(False), torch.no_grad():
            size = batch_size(leaves)
            for place, leaf in enumerate(leaves):
                if isinstance(leaf, Tensor):
                    form.dynamic.setdefault(place, set()).update(_varying(leaf, size, form.networks, place))
            example = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            try:
                made = self._captured_for(example, spec, form.dynamic)
            except NotCapturable as error:
                form.reason = f"the network cannot be captured ({error})"
                return None
        network = Network(made, example)
        form.networks.append(network)
        self.plan.capture_seconds = time.perf_counter() - began
        return network

    def _captured_for(self, example: list[Any], spec: Any, dynamic: dict[int, set[int]]) -> Capture:
        twin = evaluation_copy(self.model)
        arguments, drawn = tree_unflatten(example, spec), example_tensors(self.network)
        try:
            return capture(self.model, twin, arguments, drawn, drawing(twin), dynamic)
        except NotCapturable:  # perhaps since a size of one is stretched to another
            large = {place: {a for a in axes if example[place].shape[a] != 1} for place, axes in dynamic.items()}
            if large == dynamic:
                raise
            twin = evaluation_copy(self.model)
            return capture(self.model, twin, arguments, drawn, drawing(twin), large)

    def _pays(
        self, form: Form, inputs: Any, leaves: list[Any], examples: Tensor, output: Callable[[Any], Tensor]
    ) -> bool:
        """Whether loops of this form of call, this one and those before it, cost what capturing costs."""
        draws, later = len(self.draws), len(self.draws) * (self.batches - 1)
        form.passes += draws
        if form.work is None and self._is_light(leaves, form.passes + later):
            return False
        counted = form.work is not None
        work, size = self._work(form, inputs, examples, output), numbers(leaves)
        form.spent += work.seconds(size) * (draws if counted else form.passes)
        return form.spent + work.seconds(size) * later > work.seconds_of_capture

    def _pays_alone(self, inputs: Any, examples: Tensor, output: Callable[[Any], Tensor]) -> bool:
        """Whether this call alone, with all its batches, would cost by the loop what capturing costs."""
        arguments = _arguments(inputs)
        (leaves, spec), passes = tree_flatten(arguments), len(self.draws) * self.batches
        if self._is_light(leaves, passes) or _refused(self.model, self.network) is not None:
            return False
        work = self._work(form_of(self.model, leaves, spec), inputs, examples, output)
        return work.seconds(numbers(leaves)) * passes > work.seconds_of_capture

    def _is_light(self, leaves: list[Any], passes: int) -> bool:
        """Whether so few passes of so small a network pay for no capture, and not even for counting what a pass does."""
        if passes >= _MANY_PASSES:
            return False
        return numbers(leaves) * self._parameters < _LIGHT

    @functools.cached_property
    def _parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def _work(self, form: Form, inputs: Any, examples: Tensor, output: Callable[[Any], Tensor]) -> Work:
        """What one draw by the loop does: counted once, by running it. A loop that follows does not run it again."""
        if form.work is None:
            work = Work(numbers(tree_flatten(_arguments(inputs))[0]))
            with work:
                ((_, value),) = self._loop(self.draws[0], inputs, examples, output)
            form.work, self._counted = work, (inputs, self.draws, value)
        return form.work

    # Running

    def _by_stages(
        self, network: Network, leaves: list[Any], examples: Tensor, output: Callable[[Any], Tensor]
    ) -> Iterator[tuple[Members, Tensor]]:
        route = self._routes.of(network, self.draws, leaves, output)
        picked, chunk = route.picked, route.chunk
        fixed = network.fixed(leaves, examples)
        execution = Execution(network, route.stages, route.itinerary, route.realization, fixed, route.sizes)
        self._describe(network, route, chunk)
        wanted = [network.capture.outputs[leaf] for leaf in picked.leaves]
        results = execution.run(chunk, wanted)
        started = False
        while True:
            try:
                members, values = next(results)
                collected = picked.collect(values, len(members))
            except StopIteration:
                return
            except Exception as error:
                if started or out_of_memory(error):
                    raise
                raise _Unfit(
                    f"its captured graph does not run on these inputs ({type(error).__name__}: {error})"
                ) from error
            started = True
            self.plan.evaluated = [execution.evaluated[place] for place in route.itinerary.joined.values()]
            self.plan.chunk = execution.chunk
            check_finite(collected, members)
            yield members, collected

    def route(self, inputs: Any, output: Callable[[Any], Tensor]) -> Route:
        """How the draws go through the captured network on such inputs; where it cannot be captured, an error."""
        captured = self._captured(inputs, torch.arange(0), output, fewest=1)
        if captured is None:
            raise PatchbayesError(
                f"export: {type(self.model).__name__} cannot be captured as a graph: {self.plan.fallback}.\n"
                '  do       see docs/prediction.md, "Networks that cannot be captured".'
            )
        _, network, leaves = captured
        return self._routes.of(network, self.draws, leaves, output, share_all=True)

    def _describe(self, network: Network, route: Route, chunk: int) -> None:
        plan, names = self.plan, [site.name for site in self.network.sites]
        plan.engine, plan.networks, plan.chunk = "graph", len(route.itinerary.order), chunk
        order = network.sites
        plan.stages = [
            StagePlan(
                tuple(names[number] for number in order if number in sites),
                len(group.nodes),
                route.itinerary.distinct[sites],
                group.flops,
            )
            for sites, group in network.operations.items()
        ]


class _Unfit(Exception):
    """A captured graph that does not run on some inputs."""


def _resumed(first: tuple[Members, Tensor], rest: Iterator[tuple[Members, Tensor]]) -> Outputs:
    yield first
    yield from rest


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """args and kwargs, as `call` spreads them."""
    if isinstance(inputs, tuple):
        return inputs, {}
    if hasattr(inputs, "keys") and hasattr(inputs, "__getitem__"):
        return (), {key: inputs[key] for key in inputs.keys()}  # noqa: SIM118
    return (inputs,), {}


def _refused(model: nn.Module, network: PatchedNetwork) -> str | None:
    """Why a network is not captured now: what a graph would not see."""
    device = network.device.type if network.device is not None else "cpu"
    if torch.is_autocast_enabled(device):
        return "autocast is on"
    everywhere = torch.nn.modules.module
    if everywhere._global_forward_hooks or everywhere._global_forward_pre_hooks:
        return "hooks are registered on all modules"
    for module in modules_of(model):
        reason = None
        if module._compiled_call_impl is not None or is_compiled(module):
            reason = "is compiled"
        elif "_hf_hook" in module.__dict__:
            reason = "gets its weights from accelerate when it runs"
        elif (module._forward_hooks or module._forward_pre_hooks) and any(
            not str(getattr(hook, "__module__", "")).startswith("patchbayes.")
            for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        ):
            reason = "has forward hooks"
        if reason is not None:
            name = next(name for name, other in model.named_modules() if other is module)
            return f'"{name}" {reason}' if name else f"the network {reason}"
    return None


def _varying(leaf: Tensor, size: int, networks: list[Network], place: int) -> set[int]:
    """The dimensions of an argument that may have another size in the next call: the batch, the length of sequences of
    numbers or of a mask, and those that had another size in an earlier call."""
    axes = {0} if leaf.dim() and leaf.shape[0] == size else set()
    if leaf.dim() > 1 and not leaf.is_floating_point():
        axes.add(1)
    for network in networks:
        shape = network.capture.shapes[place]
        axes |= {axis for axis, known in enumerate(shape or ()) if known is not None and known != leaf.shape[axis]}
    return axes
