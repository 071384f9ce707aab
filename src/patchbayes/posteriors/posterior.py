"""The interface that every posterior keeps, in one order: from_module, draw, realize, kl, num_outcomes."""

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..draws import Draws
from ..layout import Drawn, Span

Entropy = Literal["lower", "upper"]


class Method(ABC):
    """A recipe for the posterior of a site: what the user passes to `patch_`. Frozen and comparable."""

    @property
    @abstractmethod
    def label(self) -> str:
        """The method's name in a table, with its main numbers."""

    @abstractmethod
    def from_module(self, module: nn.Module, generator: torch.Generator) -> "Posterior":
        """The posterior over the parameters of `module`, started at the module's own values."""

    def config(self) -> dict[str, Any]:
        """The method as JSON: its class and fields."""
        assert dataclasses.is_dataclass(self)
        return {"method": type(self).__name__, **dataclasses.asdict(self)}


@dataclass(frozen=True)
class SiteDraw:
    """What was drawn for one site: component indices (S, groups) of the site, and the S keys of its noise."""

    indices: Tensor
    keys: Tensor


class Posterior(ABC):
    """A distribution over the parameters of one site.

    `names` are the parameters that are random; their stored tensors carry the variational parameters in a leading axis.
    `fixed_names` are the module's other parameters, which keep their shape and enter the KL as a single component.
    """

    names: tuple[str, ...]
    fixed_names: tuple[str, ...]

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.offset = 0
        self.stream = 0

    def bind(self, offset: int, stream: int) -> None:
        """Take the place in the network's draw: the first draw group, and the number of the noise stream."""
        self.offset, self.stream = offset, stream

    @property
    def spans(self) -> Sequence[Span]:
        """The site's own draw groups (empty where there are none)."""
        return ()

    @property
    def networkwide(self) -> Span | None:
        """The draw group that the site shares with all others of the same law, if it has one."""
        return None

    @property
    def unbounded(self) -> str | None:
        """What makes the outcomes uncountable, or None."""
        return None

    @abstractmethod
    def start(self, values: dict[str, Tensor], generator: torch.Generator, *, fresh: bool = True) -> dict[str, Tensor]:
        """Stored tensors for a module whose ordinary parameters are `values`: adds the leading axis to each name.

        `fresh` tells patching from loading a checkpoint, which overrides start values that the method sets.
        """

    def draw(self, draws: Draws) -> SiteDraw:
        """The part of the network's draws that concerns this site: never weights."""
        stop = self.offset + max(sum(span.length for span in self.spans), 1 if self.networkwide else 0)
        return SiteDraw(draws.assignments(self.offset, stop), draws.keys())

    def realize(self, draw: SiteDraw) -> dict[str, Tensor]:
        """The weights of those draws: for every name (S, *shape)."""
        return {
            name: torch.stack(
                [self.value(name, self.stored(name), i, key) for i, key in zip(draw.indices, draw.keys, strict=True)]
            )
            for name in self.names
        }

    def realize_one(self, name: str, stored: Tensor, drawn: Drawn) -> Tensor:
        """One parameter under the network's current draw: (*shape)."""
        return self.value(name, stored, drawn.indices[self.offset :], drawn.key)

    @abstractmethod
    def value(self, name: str, stored: Tensor, indices: Tensor, key: Tensor) -> Tensor:
        """One parameter for one draw, (*shape). indices (>= groups,) int64 begin at the site's first group; key () int64."""

    @abstractmethod
    def mean(self, name: str, stored: Tensor) -> Tensor:
        """The expectation of a parameter under the posterior: (*shape)."""

    @abstractmethod
    def component(self, name: str, stored: Tensor, number: int) -> Tensor:
        """Component `number` of a parameter: (*shape)."""

    @abstractmethod
    def kl(self, tau: Tensor | float, rho: Tensor | float, *, normalized: bool, entropy: Entropy | None) -> Tensor:
        """KL to N(0, 1/tau) on weights and N(0, 1/rho) on biases, as `objective.kl` documents."""

    @property
    @abstractmethod
    def log10_outcomes(self) -> float:
        """log10 of how many distinct values the site can take, infinite for a continuous law."""

    @property
    def num_outcomes(self) -> int | float:
        """How many distinct values the site can take."""
        return math.inf if self.unbounded else math.prod(s.outcomes**s.length for s in self._all_spans)

    @property
    def _all_spans(self) -> tuple[Span, ...]:
        return (*self.spans, self.networkwide) if self.networkwide else tuple(self.spans)

    def stored(self, name: str) -> Tensor:
        """The stored tensor: variational parameters with their leading axis, or the plain parameter of a fixed name."""
        if name in self.names:
            tensor = self.module.parametrizations[name].original  # type: ignore[index, union-attr]
        else:
            tensor = self.module._parameters[name]
        assert isinstance(tensor, Tensor)
        return tensor


def is_bias(name: str) -> bool:
    """Biases take the prior precision rho, all other parameters tau."""
    return "bias" in name


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that belong to the module itself, without those of its children."""
    return {name: p for name, p in module._parameters.items() if p is not None and p.is_floating_point()}


def root_mean_square(name: str, values: dict[str, Tensor]) -> float:
    """The size of a parameter; where it is all zero, the size of the module's largest parameter."""
    sizes = {key: float(value.detach().double().square().mean().sqrt()) for key, value in values.items()}
    return sizes[name] or max(sizes.values())


def quadratic(precision: Tensor | float, square: Tensor, size: int, *, normalized: bool) -> Tensor:
    """precision / 2 * square, and with `normalized` also - size / 2 * log(precision)."""
    total = 0.5 * precision * square
    if normalized:
        total = total - 0.5 * size * torch.as_tensor(precision, dtype=square.dtype, device=square.device).log()
    return total
