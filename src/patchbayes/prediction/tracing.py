"""The network as a graph of operations, each with the sites that its value depends on (torch.fx, patched sites as leaves)."""

import functools
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
from .attributes import Attributes


@dataclass
class Traced:
    """The operations of a network.

    depends   for each operation, the numbers of the sites that its value depends on.
    runs      for each operation, the numbers of the sites that run in it.
    sites     all sites in the order of execution, as numbers into `network.sites`.
    targets   the modules and tensors that the operations name.
    opaque    parts that could not be traced and are single operations.
    """

    graph: fx.Graph
    depends: dict[fx.Node, frozenset[int]]
    runs: dict[fx.Node, list[int]]
    sites: list[int]
    targets: dict[str, Any]
    opaque: list[str]


class Untraceable(Exception):
    """The network's own forward cannot be traced; the message says why."""


def trace(model: nn.Module, network: Network, constants: dict[str, Any]) -> Traced:
    """The operations of a patched network. Parts with control flow of their own become single operations.

    `constants` are arguments of its forward that are not tensors, with their values: the graph holds for these.
    """
    names = {module: name for name, module in model.named_modules()}
    site_modules = _site_modules(network)
    opaque: set[nn.Module] = set()
    attributes = Attributes(model)
    while True:
        tracer = _Tracer(site_modules, opaque)
        try:
            with _tracing(network), torch.inference_mode(False), torch.no_grad():
                graph = tracer.trace(model, constants or None)
            targets = _targets(model, graph)
            break
        except Exception as error:
            culprit = tracer.failed
            if culprit is None or culprit is model or culprit in opaque:
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
                raise Untraceable(f"{type(error).__name__}: {reason}") from None
            opaque.add(culprit)
        finally:
            attributes.restore()  # a forward that stores what it computes has stored the tracer's stand-ins
    for node in list(graph.nodes):  # constants are checked by assertions on placeholders that nothing else uses
        if node.op == "placeholder" and str(node.target) not in inspect.signature(model.forward).parameters:
            _erase(graph, node)
    return _with_sites(network, graph, targets, site_modules, [names[module] for module in opaque])


def _erase(graph: fx.Graph, node: fx.Node) -> None:
    for user in list(node.users):
        _erase(graph, user)
    graph.erase_node(node)


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True  # else what is computed from buffers alone would be frozen into the graph

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


def _targets(model: nn.Module, graph: fx.Graph) -> dict[str, Any]:
    named = {str(node.target) for node in graph.nodes if node.op in ("call_module", "get_attr")}
    return {name: functools.reduce(getattr, name.split("."), model) for name in named}


def _with_sites(
    network: Network,
    graph: fx.Graph,
    targets: dict[str, Any],
    site_modules: dict[nn.Module, list[int]],
    opaque: list[str],
) -> Traced:
    order: list[int] = []
    runs: dict[fx.Node, list[int]] = {}
    depends: dict[fx.Node, frozenset[int]] = {}
    for node in graph.nodes:
        sites = set(itertools.chain.from_iterable(depends[argument] for argument in node.all_input_nodes))
        if node.op == "call_module":
            inside = [n for m in targets[str(node.target)].modules() for n in site_modules.get(m, [])]
            order += [number for number in dict.fromkeys(inside) if number not in order]
            runs[node] = inside
            sites |= set(inside)
        depends[node] = frozenset(sites)
    order += [number for number in range(len(network.sites)) if number not in order]
    return Traced(graph, depends, runs, order, targets, opaque)
