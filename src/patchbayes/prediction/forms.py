"""What was found out about a network in one form of call, remembered for as long as the network lives.

A form is the network's structure and attributes, which arguments it is given, and the values of those that are no tensors.
"""

import functools
import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from ..draws import Draws
from ..network import Network
from ..selection import call
from .attributes import PLAIN, described, has_hooks
from .calibration import Setting
from .execution import tensors_in
from .graph import Sites, Stage, StageGraph, cut, stage_keys
from .memory import make_room
from .plan import StagePlan
from .recording import Recordings
from .schedule import Schedule
from .tracing import Traced, Untraceable, trace
from .walk import Assignments, Walk, plan_walk

_INTERNAL = frozenset(vars(nn.Module()))
_SEVERAL = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_FORMS = 16  # remembered for a network, and ways to join its stages for a form
_ITINERARIES = 4  # remembered for a form


@dataclass
class Itinerary:
    """Given draws on their way through the stages of a network.

    joined   for each set of sites, the number of the stage that it went into.
    stages   what the plan says about each set of sites.
    """

    walk: Walk
    joined: tuple[int, ...]
    graph: StageGraph
    schedule: Schedule
    assignments: Assignments
    recordings: Recordings
    stages: list[StagePlan]


@dataclass
class Form:
    """One form of call.

    traced      the operations, or None where the network is run whole.
    reason      why it is run whole.
    fallback    why it must go through the plain loop, if it must.
    operations  for each set of sites, how many operations depend on just these.
    flops       their multiplications and additions for a batch of `num_values` input numbers.
    result      the sites that the network's output depends on.
    joins       whether stages may be joined: not where one changes what another computed.
    """

    model: nn.Module
    network: Network
    traced: Traced | None
    whole: StageGraph | None
    reason: str | None
    compile: bool
    operations: dict[Sites, int]
    result: Sites
    pinned: list[Any]
    fallback: str | None = None
    checked: bool = False
    joins: bool = True
    flops: dict[Sites, int] = field(default_factory=dict)
    num_values: int = 1
    settings: dict[Any, Setting] = field(default_factory=dict)
    _graphs: dict[Any, StageGraph] = field(default_factory=dict)
    _itineraries: dict[Any, Itinerary] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module, network: Network, constants: dict[str, Any] | None, compile: bool) -> Self:
        """Trace the network; `constants` None: its arguments have no names."""
        pinned = [value for module in model.modules() for value in vars(module).values()]
        everything = frozenset(range(len(network.sites)))
        try:
            if constants is None:
                raise Untraceable("its forward takes any number of arguments")
            if any(has_hooks(module) for module in _modules(model) if module is model or _is_traced(module)):
                raise Untraceable("a part of it that holds others has hooks")
            traced = trace(model, network, constants)
        except Untraceable as error:
            reason = f"the network cannot be traced ({error})"
            whole = _whole(model, network)
            return cls(model, network, None, whole, reason, compile, {everything: 1}, everything, pinned)
        result = next(traced.depends[node] for node in traced.graph.nodes if node.op == "output")
        return cls(model, network, traced, None, None, compile, stage_keys(traced), result, pinned)

    @property
    def sites(self) -> list[int]:
        """All sites in the order of execution."""
        return list(range(len(self.network.sites))) if self.traced is None else self.traced.sites

    @property
    def finest(self) -> StageGraph:
        """The stages with nothing joined."""
        return self._graph(tuple(range(len(self.operations))))

    def itinerary(self, draws: Draws, limit: int) -> Itinerary:
        """How these draws go through the network; what was drawn is kept in `limit` bytes."""
        key = draws._parts, limit.bit_length()
        known = self._itineraries.pop(key, None)
        if known is None:
            walk = plan_walk(self.operations, self.result, self.sites, self.network, draws, limit)
            joined = self._joined(walk)
            graph = self._graph(joined)
            known = Itinerary(
                walk,
                joined,
                graph,
                Schedule(graph, walk),
                Assignments(draws, walk.order, self.network.device, 2 ** limit.bit_length() // 2),
                Recordings(self.model),
                self._described(walk),
            )
            make_room(self._itineraries, _ITINERARIES)
        self._itineraries[key] = known  # the latest come last
        return known

    def _described(self, walk: Walk) -> list[StagePlan]:
        names = [(number, self.network.sites[number].name) for number in self.sites]
        return [
            StagePlan(
                tuple(name for number, name in names if number in sites),
                operations,
                walk.distinct[sites],
                self.flops.get(sites, 0),
            )
            for sites, operations in self.operations.items()
        ]

    def forget_itineraries(self) -> None:
        """After `joins` has changed."""
        self._itineraries.clear()

    def _joined(self, walk: Walk) -> tuple[int, ...]:
        """A number for each set of sites, equal for those that tell the same draws apart."""
        noisy = {number for number, site in enumerate(self.network.sites) if site.posterior.unbounded}
        numbers: dict[Hashable, int] = {}
        joined = []
        for sites in self.operations:
            alike: Hashable = (walk.likes[sites].tobytes(), bool(sites & noisy)) if self.joins else sites
            joined.append(numbers.setdefault(alike, len(numbers)))
        return tuple(joined)

    def _graph(self, joined: tuple[int, ...]) -> StageGraph:
        if self.whole is not None:
            return self.whole
        assert self.traced is not None
        if joined not in self._graphs:
            graph = cut(self.traced, dict(zip(self.operations, joined, strict=True)))
            for stage in graph.stages:
                stage.apart = _is_noisy(self.network, stage)
                if self.compile:
                    stage.run = torch.compile(stage.run_many)
            make_room(self._graphs, _FORMS)
            self._graphs[joined] = graph
        return self._graphs[joined]


def _is_traced(module: nn.Module) -> bool:
    """Whether tracing goes through the module; sites and parts without one run as they are, hooks and all."""
    return not _is_site(module) and any(map(_is_site, module.modules()))


def _is_site(module: nn.Module) -> bool:
    return "_patchbayes_site" in vars(module)


def _whole(model: nn.Module, network: Network) -> StageGraph:
    """A network that cannot be traced, as a single stage."""

    def run(inputs: Any) -> tuple[Any, ...]:
        return (call(model, inputs),)

    numbers = tuple(range(len(network.sites)))
    stage = Stage((frozenset(numbers),), numbers, frozenset(numbers), [("input", "inputs")], 1, run, run, 1)
    stage.apart = _is_noisy(network, stage)
    return StageGraph([stage], 0)


def _is_noisy(network: Network, stage: Stage) -> bool:
    """Noise and masks are drawn for one draw at a time."""
    return any(network.sites[number].posterior.unbounded for number in stage.own)


def look_up(model: nn.Module, network: Network, inputs: Any, compile: bool) -> tuple[Form, dict[str, Any]]:
    """The form of a call, and its arguments by name."""
    bound = _bind(model, inputs)
    arguments = {"inputs": inputs} if bound is None else bound
    constants = {name: value for name, value in arguments.items() if not tensors_in(value)}
    structure = tuple(_state(module) for module in _modules(model))
    leaves, spec = tree_flatten(arguments)
    fixed = tuple("tensor" if isinstance(leaf, Tensor) else described(leaf) for leaf in leaves)
    key = (structure, id(network.layout), bound is None, str(spec), fixed, compile)
    remembered: _Remembered = vars(network).setdefault("_forms", _Remembered())
    if key not in remembered:
        make_room(remembered, _FORMS)  # attributes that change with every call would fill the memory with graphs
        remembered[key] = Form.of(model, network, None if bound is None else constants, compile)
        strange = [leaf for leaf in leaves if not isinstance(leaf, (Tensor, *PLAIN))]
        if strange:
            remembered[key].fallback = f"an argument holds a {type(strange[0]).__name__}, which may change unseen"
            remembered[key].checked = True
    form = remembered[key]
    return form, {"inputs": inputs} if form.traced is None else arguments


class _Remembered(dict[Any, Form]):
    """The forms of one network. They hold its modules, so a copy of the network starts without."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Remembered":
        return _Remembered()


def _modules(model: nn.Module) -> list[nn.Module]:
    """All modules, without what parametrizes them: leaves run as they are."""
    found, waiting = {model: None}, [model]
    while waiting:
        for name, module in waiting.pop()._modules.items():
            if module is not None and module not in found and name != "parametrizations":
                found[module] = None
                waiting.append(module)
    return list(found)


def _state(module: nn.Module) -> tuple[Any, ...]:
    """What tracing takes from a module as constant: of those that hold others, all attributes (leaves run as they are)."""
    hooks = (*module._forward_pre_hooks, None, *module._forward_hooks)
    state: list[Any] = [id(module), type(module), *hooks, "forward" in vars(module)]
    if module._modules:
        state += map(described, _attributes(module))
    return tuple(state)


def _attributes(module: nn.Module) -> Iterator[Any]:
    for name, value in vars(module).items():
        if name not in _INTERNAL and not name.startswith("_patchbayes"):
            yield name
            yield value
    yield from module._parameters.values()
    yield from module._buffers.values()


def _bind(model: nn.Module, inputs: Any) -> dict[str, Any] | None:
    """The arguments of the network's forward by name, or None where it takes any number of them."""
    function = getattr(model.forward, "__func__", model.forward)
    signature = _signature(function, method=function is not model.forward)
    if any(parameter.kind in _SEVERAL for parameter in signature.parameters.values()):
        return None
    if isinstance(inputs, tuple):
        bound = signature.bind(*inputs)
    elif isinstance(inputs, Mapping):
        bound = signature.bind(**inputs)
    else:
        bound = signature.bind(inputs)
    bound.apply_defaults()
    return dict(bound.arguments)


@functools.lru_cache(maxsize=64)
def _signature(function: Callable[..., Any], *, method: bool) -> inspect.Signature:
    signature = inspect.signature(function)
    return signature.replace(parameters=list(signature.parameters.values())[1:]) if method else signature
