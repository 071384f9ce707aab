"""What is drawn for a site, as tensors that enter the captured graph.

Two kinds of tensors, of which a graph uses what it needs: "value.<name>", the realized parameters that the layer reads, and
"draw.<name>", what the posterior drew, where its `apply` computes with that (masks, factors, statistics of a component).
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from ...draws.layout import NetworkDraw
from ...patching.drawing import hold
from ...patching.network import PatchedNetwork, Site, network_of
from ...posteriors.posterior import Posterior, SiteDraw

EXAMPLES = "examples"  # the numbers of a batch's examples, for what is drawn for each of them
_VALUE, _DRAW = "value.", "draw."


class DrawnSite:
    """The drawn tensors of one site for many draws: those that the graph uses by `names`, of `bytes` for a draw."""

    def __init__(self, posterior: Posterior, names: set[str], bytes: int) -> None:
        self.posterior, self.names, self.bytes = posterior, names, bytes
        groups = posterior.groups()
        self.groups, self.outcomes = (groups.length, groups.outcomes) if groups is not None else (0, 1)

    def tensors(self, z: Tensor, keys: Tensor) -> dict[str, Tensor]:
        """The tensors that the graph uses, each with a leading axis for the draws: z (S, groups) are their component indices
        of the site's draw groups, keys (S,) name their streams of noise."""
        posterior = self.posterior
        d = posterior.draw(z, keys)
        made = {_DRAW + name: tensor for name, tensor in d.items()}
        if any(name.startswith(_VALUE) for name in self.names):
            made |= {_VALUE + name: tensor for name, tensor in posterior.realize_several(d).items()}
        return {name: made[name] for name in self.names}


def _one(posterior: Posterior) -> dict[str, Tensor]:
    """Tensors like those of one draw."""
    groups = posterior.groups()
    z = torch.zeros(groups.length if groups is not None else 0, dtype=torch.int64)
    device = next((p.device for p in posterior.parameters()), None)
    d = posterior.draw(z.to(device), torch.tensor(0))
    values = posterior.realize(d) if posterior.names else {}
    named = {_DRAW + name: tensor for name, tensor in d.items()}
    return named | {_VALUE + name: tensor.detach() for name, tensor in values.items()}


def example_tensors(network: PatchedNetwork) -> dict[tuple[int, str], Tensor]:
    """All drawn tensors of one draw, by number of the site and name."""
    return {
        (number, name): tensor
        for number, site in enumerate(network.sites)
        for name, tensor in _one(site.posterior).items()
    }


class _CapturedSite(Site):
    """A site of a network that is being captured: its draw is what enters the graph."""

    given: Mapping[str, Tensor]

    def draw_of(self, draw: NetworkDraw) -> SiteDraw:
        return {name.removeprefix(_DRAW): t for name, t in self.given.items() if not name.startswith(_VALUE)}

    def values_of(self, d: SiteDraw | None) -> dict[str, Tensor]:
        return {name.removeprefix(_VALUE): t for name, t in self.given.items() if name.startswith(_VALUE)}


def drawing(twin: nn.Module) -> Callable[[Mapping[tuple[int, str], Tensor], Tensor], AbstractContextManager[Any]]:
    """The context in which a copy of a patched network computes with given drawn tensors and numbers of examples."""
    network = network_of(twin)
    for site in network.sites:
        site.__class__ = _CapturedSite

    @contextlib.contextmanager
    def held(drawn: Mapping[tuple[int, str], Tensor], examples: Tensor) -> Iterator[None]:
        for number, site in enumerate(network.sites):
            assert isinstance(site, _CapturedSite)
            mine = {name: tensor for (place, name), tensor in drawn.items() if place == number}
            site.given = mine | ({EXAMPLES: examples} if f"{_DRAW}key" in mine else {})
        draw = NetworkDraw(torch.tensor(0), torch.zeros(0, dtype=torch.int64), explicit=True)
        with hold(network, draw):
            yield

    return held
