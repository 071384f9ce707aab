"""The network as stages, to be computed once for each distinct assignment of the sites that they depend on.

A *stage* holds all operations whose values depend on the same set of sites: the deterministic prefix depends on none, what
follows the first site on that one, and so on across skip connections and branches. For given draws, sets of sites that tell
the same draws apart are joined: after a few sites all draws differ, and the rest of the network is one stage.
"""

import itertools
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from .folding import FoldedNorm, affine_norms, fold_norms
from .tracing import Traced, Untraceable

Sites = frozenset[int]


@dataclass
class Stage:
    """Operations that are computed together.

    keys      the sets of sites that the operations depend on, one set where nothing was joined.
    sites     numbers of all those sites, in the order of execution.
    own       numbers of the sites that run in this stage.
    inputs    where the arguments of `run` come from: ("input", name of a model input) or (number of a stage, its output).
    outputs   how many values other stages (or the result) take from this one.
    run       the operations for one draw: arguments -> tuple of outputs.
    run_many  the same in the form that torch.func.vmap takes over several draws.
    folded    batch norms that `run` may fold into the convolution before them.
    sources   the traced operations that the inputs come from; members: those of this stage.
    """

    keys: tuple[Sites, ...]
    sites: tuple[int, ...]
    own: Sites
    inputs: list[tuple[int | str, int | str]]
    outputs: int
    run: Callable[..., tuple[Any, ...]]
    run_many: Callable[..., tuple[Any, ...]]
    num_operations: int
    folded: list[FoldedNorm] = field(default_factory=list)
    sources: list[fx.Node] = field(default_factory=list)
    members: frozenset[fx.Node] = frozenset()
    clone_inputs: bool = False
    apart: bool = False


@dataclass
class StageGraph:
    """Stages in an order in which they can be computed. The network's output is output 0 of stage `result`."""

    stages: list[Stage]
    result: int


def stage_keys(traced: Traced) -> dict[Sites, int]:
    """The sets of sites that operations depend on, in an order of computation, with the number of their operations."""
    groups = _grouped(traced, lambda sites: sites)
    return {
        sites: sum(node.op.startswith("call") for node in groups[sites]) for sites in _ordered(groups, traced.depends)
    }


def cut(traced: Traced, joined: Mapping[Sites, Hashable] | None = None) -> StageGraph:
    """The stages of a network; sets of sites with the same value in `joined` go into one."""

    def group_of(sites: Sites) -> Hashable:
        return sites if joined is None else joined[sites]

    groups = _grouped(traced, group_of)
    belongs = {node: key for key, nodes in groups.items() for node in nodes}
    order = _ordered(groups, belongs)
    result = next(node for node in traced.graph.nodes if node.op == "output")
    number_of = {key: number for number, key in enumerate(order)}
    exported: dict[fx.Node, tuple[int, int]] = {}
    for number, key in enumerate(order):
        count = int(result in groups[key])  # output 0 is the network's
        for node in groups[key]:
            if node is not result and any(belongs[user] != key for user in node.users):
                exported[node] = number, count
                count += 1
    stages = [_stage(traced, groups[key], belongs, exported, result) for key in order]
    return StageGraph(stages, number_of[belongs[result]])


def _grouped(traced: Traced, group_of: Callable[[Sites], Hashable]) -> dict[Hashable, list[fx.Node]]:
    """Operations by group. The result's structure (dict, tuple) is rebuilt with those that depend on all it holds."""
    groups: dict[Hashable, list[fx.Node]] = {}
    for node in traced.graph.nodes:
        if node.op != "placeholder":
            groups.setdefault(group_of(traced.depends[node]), []).append(node)
    return groups


def _ordered(groups: Mapping[Any, list[fx.Node]], belongs: Mapping[fx.Node, Hashable]) -> list[Any]:
    """Groups so that each comes after those it takes values from."""
    done: list[Hashable] = []
    waiting = dict(groups)
    while waiting:
        for key, nodes in waiting.items():
            needed = {belongs[a] for n in nodes for a in n.all_input_nodes if a.op != "placeholder"} - {key}
            if all(other in done for other in needed):
                break
        else:
            raise Untraceable("the stages depend on each other in a circle")
        done.append(key)
        del waiting[key]
    return done


def _stage(
    traced: Traced,
    nodes: list[fx.Node],
    belongs: dict[fx.Node, Hashable],
    exported: dict[fx.Node, tuple[int, int]],
    result: fx.Node,
) -> Stage:
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    inputs: list[tuple[int | str, int | str]] = []
    sources: list[fx.Node] = []
    for node in nodes:  # placeholders must stand before all else
        for argument in node.all_input_nodes:
            outside = argument.op == "placeholder" or belongs[argument] != belongs[node]
            if outside and argument not in copied:
                copied[argument] = graph.placeholder(f"argument_{len(inputs)}")
                inputs.append(("input", str(argument.target)) if argument.op == "placeholder" else exported[argument])
                sources.append(argument)
    final: list[Any] = []
    for node in nodes:
        if node is result:
            final.append(fx.map_arg(node.args[0], lambda n: copied[n]))
        else:
            copied[node] = graph.node_copy(node, lambda n: copied[n])
    outputs = final + [copied[node] for node in nodes if node in exported]
    graph.output(tuple(outputs))
    keys = tuple(dict.fromkeys(traced.depends[node] for node in nodes))
    sites: Sites = frozenset().union(*keys)
    own: Sites = frozenset(itertools.chain.from_iterable(traced.runs.get(node, []) for node in nodes))
    single, folded = fold_norms(graph, traced.targets)
    return Stage(
        keys,
        tuple(sorted(sites, key=traced.sites.index)),
        own,
        inputs,
        len(outputs),
        single,
        affine_norms(graph, traced.targets),
        sum(node.op.startswith("call") for node in nodes),
        folded,
        sources,
        frozenset(nodes),
    )
