"""Dependence of operations on sites, and the network cut into stages that are run once for each class of draws."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from .capture import Capture
from .counts import Cost, flops, is_view, name_of, size_in_bytes

Sites = frozenset[int]

_RULES = (
    "FuncTorchBatched",
    "FuncTorchBatchedDecomposition",
)  # dispatch keys under which an operation has its vmap rule


@dataclass
class Operations:
    """All operations that depend on the same sites: how many, their flops and bytes for the example's sizes."""

    nodes: list[fx.Node] = field(default_factory=list)
    flops: int = 0
    bytes: int = 0
    made: int = 0


@dataclass
class Stage:
    """Operations run together.

    inputs    nodes whose values it takes: inputs of the graph and outputs of other stages.
    outputs   nodes whose values others take.
    run       the values of the inputs -> those of the outputs.
    apart     whether draws are run one after the other, however small.
    cost      of its operations for one draw, `held`: bytes of its outputs; with the example's sizes.
    """

    inputs: list[fx.Node]
    outputs: list[fx.Node]
    run: Callable[..., tuple[Any, ...]]
    apart: bool
    cost: Cost
    held: int


class Network:
    """A captured network with the dependence of its operations.

    depends     for each node, the sites it can be reached from.
    operations  the operations by the sites they depend on, in the order of execution.
    itineraries  of draws that went through it, by what tells them apart.
    """

    def __init__(self, capture: Capture, example: list[Any]) -> None:
        self.capture = capture
        self._example = numbers(example)
        self.depends: dict[fx.Node, Sites] = {}
        self.operations: dict[Sites, Operations] = {}
        self.itineraries: dict[Any, Any] = {}
        self._stages: dict[Any, list[Stage]] = {}
        nowhere: Sites = frozenset()
        known: dict[tuple[Sites, ...], Sites] = {}
        for node in capture.graph.nodes:
            source = capture.sources.get(node)
            if source is not None:
                self.depends[node] = frozenset((source.place,)) if source.kind == "drawn" else nowhere
                continue
            before = tuple(dict.fromkeys(self.depends.get(other, nowhere) for other in node.all_input_nodes))
            if before not in known:
                known[before] = nowhere.union(*before)
            self.depends[node] = known[before]
            if node.op == "call_function":
                group = self.operations.setdefault(known[before], Operations())
                group.nodes.append(node)
                group.flops += flops(node)
                if not is_view(node):
                    group.bytes += size_in_bytes(node.meta.get("val"))
                    group.made += 1

    def scale(self, arguments: list[Any]) -> float:
        """How large arguments are beside those of the example, for which bytes and flops were counted."""
        return numbers(arguments) / self._example

    def fixed(self, arguments: list[Any], examples: Tensor) -> dict[fx.Node, Any]:
        """The values of the graph's inputs that are the same for all draws, read now."""
        return {
            node: source.value(arguments, examples)
            for node, source in self.capture.sources.items()
            if source.kind != "drawn"
        }

    @functools.cached_property
    def drawn(self) -> dict[int, tuple[set[str], int]]:
        """For each site, the names of its drawn tensors that the graph uses, and their bytes for one draw."""
        found: dict[int, tuple[set[str], int]] = {}
        for node, source in self.capture.sources.items():
            if source.kind == "drawn":
                names, size = found.get(source.place, (set(), 0))
                found[source.place] = names | {source.name}, size + size_in_bytes(node.meta["val"])
        return found

    @functools.cached_property
    def sites(self) -> list[int]:
        """The sites in the order of execution."""
        return list(dict.fromkeys(site for node in self.depends.values() for site in sorted(node)))

    def result(self, leaves: list[int]) -> Sites:
        """The sites that some leaves of the output depend on."""
        outputs = self.capture.outputs
        return frozenset().union(
            *(self.depends[outputs[leaf]] for leaf in leaves if isinstance(outputs[leaf], fx.Node))
        )

    def stages(self, joined: Mapping[Sites, int], leaves: list[int]) -> list[Stage]:
        """The operations that these leaves of the output need, in stages: `joined` numbers those of each set of sites."""
        key = tuple(joined.items()), tuple(leaves)
        found = self._stages.get(key)  # another thread may drop it at any time
        if found is None:
            if len(self._stages) >= 16:
                self._stages.pop(next(iter(self._stages)), None)
            found = self._stages[key] = self._cut(joined, leaves)
        return found

    def _cut(self, joined: Mapping[Sites, int], leaves: list[int]) -> list[Stage]:
        needed = self._needed(leaves)
        wanted = {self.capture.outputs[leaf] for leaf in leaves}
        place = {node: joined[self.depends[node]] for node in needed if node.op == "call_function"}
        members: dict[int, list[fx.Node]] = {}
        for node in self.capture.graph.nodes:
            if node in place:
                members.setdefault(place[node], []).append(node)
        attributes = self.capture.attributes
        return [
            self._stage(members.get(number, []), place, wanted, attributes)
            for number in range(max(joined.values(), default=-1) + 1)
        ]

    def _needed(self, leaves: list[int]) -> set[fx.Node]:
        waiting = [node for node in (self.capture.outputs[leaf] for leaf in leaves) if isinstance(node, fx.Node)]
        found = set(waiting)
        while waiting:
            for node in waiting.pop().all_input_nodes:
                if node not in found:
                    found.add(node)
                    waiting.append(node)
        return found

    def _stage(
        self, nodes: list[fx.Node], place: Mapping[fx.Node, int], wanted: set[Any], attributes: dict[str, Any]
    ) -> Stage:
        inside = set(nodes)
        graph, copies = fx.Graph(), {}
        inputs: dict[fx.Node, None] = {}
        for node in nodes:
            for other in node.all_input_nodes:
                if other not in inside and other.op != "get_attr":
                    inputs.setdefault(other)
        for node in inputs:
            copies[node] = graph.placeholder(node.name)
        for node in nodes:
            for other in node.all_input_nodes:
                if other.op == "get_attr" and other not in copies:
                    copies[other] = graph.get_attr(str(other.target))
            copies[node] = graph.node_copy(node, copies.__getitem__)
        outputs = [
            node for node in nodes if node in wanted or any(user in place and user not in inside for user in node.users)
        ]
        graph.output(tuple(copies[node] for node in outputs))
        made = [size_in_bytes(node.meta.get("val")) for node in nodes if not is_view(node)]
        apart = any(not _has_rule(node) for node in nodes) or bool(attributes)
        apart = apart or any(not isinstance(node.meta.get("val"), Tensor) for node in outputs)
        run = fx.GraphModule(attributes, graph).forward
        held = sum(size_in_bytes(node.meta.get("val")) for node in outputs)
        cost = Cost(len(nodes), len(made), sum(map(flops, nodes)), sum(made))
        return Stage(list(inputs), outputs, run, apart, cost, held)


def _has_rule(node: fx.Node) -> bool:
    """Whether `torch.vmap` does an operation for several draws at once: others it does one draw after the other, slowly,
    and attention by its parts."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return True
    known = any(torch._C._dispatch_has_kernel_for_dispatch_key(node.target.name(), key) for key in _RULES)
    return known and name_of(node) != "scaled_dot_product_attention"


def numbers(arguments: list[Any]) -> int:
    """How many numbers the arguments of a call consist of."""
    return max(1, sum(leaf.numel() for leaf in arguments if isinstance(leaf, Tensor)))
