"""The network as a graph of stages, each with the sites that its values depend on.

A *stage* holds all operations whose values depend on the same set of sites: the deterministic prefix depends on none, what
follows the first site on that one, and so on across skip connections and branches. A stage needs to be computed once for
each distinct assignment of its sites, whatever the number of draws.
"""

import inspect
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from ..network import Network, Site
from ..sites import DrawnParameter


@dataclass
class Stage:
    """Operations that depend on the same sites.

    sites     numbers of those sites, in the order of execution.
    own       numbers of the sites that run in this stage.
    inputs    where the arguments of `run` come from: ("input", name of a model input) or (number of a stage, its output).
    outputs   how many values other stages (or the result) take from this one.
    run       the operations: arguments -> tuple of outputs.
    """

    sites: tuple[int, ...]
    own: frozenset[int]
    inputs: list[tuple[int | str, int | str]]
    outputs: int
    run: Callable[..., tuple[Any, ...]]
    num_operations: int
    clone_inputs: bool = False


@dataclass
class StageGraph:
    """Stages in an order in which they can be computed. The last output of the network is output 0 of `result`.

    sites    the patched sites in the order of execution, as numbers into `network.sites`.
    opaque   parts that could not be traced and are run whole.
    """

    stages: list[Stage]
    sites: list[int]
    result: int
    argument_names: list[str]
    opaque: list[str]


class Untraceable(Exception):
    """The network's own forward cannot be traced; the message says why."""


def trace(model: nn.Module, network: Network, constants: dict[str, Any]) -> StageGraph:
    """The stages of a patched network. Parts with control flow of their own become single operations.

    `constants` are arguments of its forward that are not tensors, with their values: the graph holds for these.
    """
    names = {module: name for name, module in model.named_modules()}
    site_modules = _site_modules(network)
    opaque: set[nn.Module] = set()
    while True:
        tracer = _Tracer(site_modules, opaque)
        try:
            with _tracing(network):
                graph = tracer.trace(model, constants or None)
            break
        except Exception as error:
            culprit = tracer.failed
            if culprit is None or culprit is model or culprit in opaque:
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
                raise Untraceable(f"{type(error).__name__}: {reason}") from None
            opaque.add(culprit)
    for node in list(graph.nodes):  # constants are checked by assertions on placeholders that nothing else uses
        if node.op == "placeholder" and str(node.target) not in inspect.signature(model.forward).parameters:
            _erase(graph, node)
    return _cut(model, network, graph, site_modules, [names[module] for module in opaque])


def _erase(graph: fx.Graph, node: fx.Node) -> None:
    for user in list(node.users):
        _erase(graph, user)
    graph.erase_node(node)


class _Tracer(fx.Tracer):
    def __init__(self, site_modules: dict[nn.Module, list[int]], opaque: set[nn.Module]) -> None:
        super().__init__()
        self.site_modules = site_modules
        self.opaque = opaque
        self.failed: nn.Module | None = None

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Sites, parts that could not be traced, and parts without a site run as they are."""
        if m in self.site_modules or m in self.opaque:
            return True
        return not any(child in self.site_modules for child in m.modules())

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            self.failed = self.failed or m
            raise


@contextmanager
def _tracing(network: Network) -> Iterator[None]:
    network.active += 1
    try:
        yield
    finally:
        network.active -= 1


def _site_modules(network: Network) -> dict[nn.Module, list[int]]:
    """Modules that hold a drawn parameter (or a mask) with the numbers of the sites, owners of tied parameters included."""
    found: dict[nn.Module, list[int]] = {}
    for number, site in enumerate(network.sites):
        for module in _owners(site):
            found.setdefault(module, []).append(number)
    return found


def _owners(site: Site) -> set[nn.Module]:
    """The site's module, those that share its parameters, and what other modules run to read a drawn parameter."""
    owners = {site.module, *(other for others in site.tied.values() for _, other, _ in others)}
    lists = {module for owner in owners for module in owner.modules() if _reads(module, site)}
    return owners | lists


def _reads(module: nn.Module, site: Site) -> bool:
    if not isinstance(module, nn.utils.parametrize.ParametrizationList):
        return False
    first = module[0]
    return isinstance(first, DrawnParameter) and first.site is site


def _cut(
    model: nn.Module, network: Network, graph: fx.Graph, site_modules: dict[nn.Module, list[int]], opaque: list[str]
) -> StageGraph:
    modules = dict(model.named_modules(remove_duplicate=False))
    order: list[int] = []
    runs: dict[fx.Node, list[int]] = {}
    depends: dict[fx.Node, frozenset[int]] = {}
    for node in graph.nodes:
        sites = set(itertools.chain.from_iterable(depends[argument] for argument in node.all_input_nodes))
        if node.op == "call_module":
            inside = [n for m in modules[str(node.target)].modules() for n in site_modules.get(m, [])]
            order += [number for number in inside if number not in order]
            runs[node] = inside
            sites |= set(inside)
        depends[node] = frozenset(sites)
    order += [number for number in range(len(network.sites)) if number not in order]
    rank = {number: position for position, number in enumerate(order)}
    body = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    result = next(node for node in graph.nodes if node.op == "output")
    # The result's own structure (dict, tuple) is rebuilt in the last stage, which depends on everything it holds.
    groups: dict[frozenset[int], list[fx.Node]] = {}
    for node in [*body, result]:
        groups.setdefault(depends[node], []).append(node)
    keys = _ordered(groups, depends)
    number_of = {key: number for number, key in enumerate(keys)}
    exported: dict[fx.Node, int] = {}
    counts = [0] * len(keys)
    stages: list[Stage] = []
    for key in keys:
        number = number_of[key]
        if result in groups[key]:
            counts[number] += 1  # output 0 is the network's
        for node in groups[key]:
            if node is not result and any(depends[user] != key for user in node.users):
                exported[node] = counts[number]
                counts[number] += 1
    for key in keys:
        own = frozenset(itertools.chain.from_iterable(runs.get(node, []) for node in groups[key]))
        stages.append(_stage(model, groups[key], key, own, depends, exported, number_of, result, rank))
    names = [str(node.target) for node in graph.nodes if node.op == "placeholder"]
    return StageGraph(stages, order, number_of[depends[result]], names, opaque)


def _ordered(
    groups: dict[frozenset[int], list[fx.Node]], depends: dict[fx.Node, frozenset[int]]
) -> list[frozenset[int]]:
    """Stages so that each comes after those it takes values from."""
    done: list[frozenset[int]] = []
    waiting = dict(groups)
    while waiting:
        for key, nodes in waiting.items():
            needed = {depends[a] for n in nodes for a in n.all_input_nodes if a.op != "placeholder"} - {key}
            if all(other in done for other in needed):
                break
        else:
            raise Untraceable("the stages depend on each other in a circle")
        done.append(key)
        del waiting[key]
    return done


def _stage(
    model: nn.Module,
    nodes: list[fx.Node],
    key: frozenset[int],
    own: frozenset[int],
    depends: dict[fx.Node, frozenset[int]],
    exported: dict[fx.Node, int],
    number_of: dict[frozenset[int], int],
    result: fx.Node,
    rank: dict[int, int],
) -> Stage:
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    inputs: list[tuple[int | str, int | str]] = []

    def take(argument: fx.Node) -> fx.Node:
        if argument not in copied:
            copied[argument] = graph.placeholder(f"argument_{len(inputs)}")
            if argument.op == "placeholder":
                inputs.append(("input", str(argument.target)))
            else:
                inputs.append((number_of[depends[argument]], exported[argument]))
        return copied[argument]

    for node in nodes:  # placeholders must stand before all else
        for argument in node.all_input_nodes:
            if argument.op == "placeholder" or depends[argument] != key:
                take(argument)
    final: Any = None
    for node in nodes:
        if node is result:
            final = fx.map_arg(node.args[0], lambda n: copied[n])
        else:
            copied[node] = graph.node_copy(node, lambda n: copied[n])
    kept = sorted((place, node) for node, place in exported.items() if depends[node] == key and node in nodes)
    outputs = ([final] if result in nodes else []) + [copied[node] for _, node in kept]
    graph.output(tuple(outputs))
    module = fx.GraphModule(model, graph)
    operations = sum(node.op.startswith("call") for node in nodes)
    return Stage(tuple(sorted(key, key=lambda n: rank[n])), own, inputs, len(outputs), module, operations)


def clone_tensors(values: Any) -> Any:
    """The same structure with ordinary copies of its tensors."""
    return torch.utils._pytree.tree_map(lambda v: v.clone() if isinstance(v, torch.Tensor) else v, values)
