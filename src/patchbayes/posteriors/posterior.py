"""The interface of posteriors: everything outside this package asks these questions and no others.

A posterior is a module of its own, the child "patchbayes" of the layer that it makes random. It owns variational parameters
of any number and shape; what it leaves in the layer stays there, as the same Parameter object under the same name.
"""

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ..draws.layout import example_keys, probabilities_of
from ..draws.randomness import fold, normal_like
from ..errors import PatchbayesError
from .method import Method

Entropy = Literal["lower", "upper"]
Noise = Literal["none", "draw", "example"]
Role = Literal["weight", "bias", "law"]
#: What was drawn for a site: tensors by name, noise included, never the weights themselves.
SiteDraw = dict[str, Tensor]

#: The name under which a layer holds its posterior.
CHILD = "patchbayes"


@dataclass(frozen=True)
class Groups:
    """The categorical draws of a site: `length` independent ones, each among `outcomes`.

    tie   "site": the draws belong to this site alone. "network": one draw, shared by all sites with this tie.
    """

    length: int
    outcomes: int
    tie: Literal["site", "network"] = "site"


class KL(NamedTuple):
    """A term of the KL, (), and what it is: "exact" up to a constant, an upper "bound", or a "monte_carlo" estimate."""

    value: Tensor
    kind: Literal["exact", "bound", "monte_carlo"]


@dataclass(frozen=True)
class PriorTerms:
    """What a KL is taken to: N(0, 1/tau) on weights and N(0, 1/rho) on biases, and which terms of it are wanted.

    normalized   keep all terms in tau and rho, for they are learned: - 1/2 log tau for every element.
    entropy      the bound on the entropy of mixtures with noise that is wanted, if one is.
    """

    tau: Tensor | float
    rho: Tensor | float
    normalized: bool = False
    entropy: Entropy | None = None

    def precision(self, name: str) -> Tensor | float:
        """That of the parameter `name`."""
        return self.rho if is_bias(name) else self.tau

    def precision_like(self, value: Tensor, name: str) -> Tensor:
        """The same as a tensor (), beside `value`; a learned one keeps its own dtype, in which the log is taken."""
        precision = self.precision(name)
        if isinstance(precision, Tensor):
            return precision
        return torch.tensor(precision, dtype=value.dtype, device=value.device)

    def quadratic(self, name: str, square: Tensor, size: int) -> Tensor:
        """The term of `size` elements of `name` whose squares sum to `square`."""
        return quadratic(self.precision(name), square, size, normalized=self.normalized)


class Posterior(nn.Module):
    """A distribution over the parameters of one layer.

    names   the layer's parameters that are random.
    kept    those that stay in the layer and enter this posterior's `kl`: by default the random ones that it did not take.
    noise   what is drawn besides the categorical draws: nothing, something for each "draw", or for each "example" (then
            `realize` does not suffice, and `apply_to` says what happens).
    joint   whether a draw is one function of all inputs; where it is not, what needs functions is refused.
    offset, stream   the place in the network's draw: the first draw group, and the first stream of noise.
    """

    noise: Noise = "none"
    noise_source: str | None = None  # noise in words, for messages
    joint: ClassVar[bool] = True
    settled: ClassVar[bool] = False  # whether all that `apply_to` reads, besides tensors, follows from the method
    num_components: int = 0  # how many `component` knows
    kl_draws: bool = False  # whether `kl` is estimated from a draw, and wants it as `d`
    learns_law: bool = False  # whether the probabilities of the categorical draws are learned
    names: tuple[str, ...]
    layer: ClassVar[Any]

    def __init__(self, method: Method, layer: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.method, self.names = method, names
        self.offset, self.stream = 0, 0
        self.__dict__["layer"] = layer  # not a child: the layer holds the posterior
        self._shapes = {name: tuple(layer._parameters[name].shape) for name in names}  # type: ignore[union-attr]

    @property
    def kept(self) -> tuple[str, ...]:
        return tuple(name for name in self.names if self.layer._parameters.get(name) is not None)

    def groups(self) -> Groups | None:
        """The categorical draws that the site needs."""
        return None

    def log_p(self) -> Tensor | None:
        """The law of each categorical draw, (outcomes,), fixed or learned; None is uniform."""
        return None

    def share_law_(self, owner: "Posterior") -> None:
        """Take the law of another site, where both share the network's draw (tie "network"): needed if it is learned."""

    @abstractmethod
    def start_(self, values: Mapping[str, Tensor], generator: torch.Generator) -> None:
        """Start from the layer's ordinary values: at patching, and whenever an ordinary checkpoint is loaded."""

    def draw(self, z: Tensor, keys: Tensor) -> SiteDraw:
        """What is drawn for the site. z (*lead, groups) int64, keys (*lead,) int64; tensors (*lead, ...)."""
        return {"z": z, "key": keys} if self.noise == "example" else {"z": z}

    @abstractmethod
    def realize(self, d: SiteDraw) -> dict[str, Tensor]:
        """The values of one draw by name, (*shape): pure, differentiable, and fit for vmap over `d`."""

    def realize_several(self, d: SiteDraw) -> dict[str, Tensor]:
        """The values of several draws by name, (S, *shape), of d (S, ...)."""
        try:
            return torch.vmap(self.realize)(d)
        except (RuntimeError, ValueError, NotImplementedError, TypeError):  # an operation that vmap cannot do
            number = len(next(iter(d.values())))
            each = [self.realize({name: tensor[i] for name, tensor in d.items()}) for i in range(number)]
            return {name: torch.stack([values[name] for values in each]) for name in each[0]}

    def apply_to(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], d: SiteDraw | None) -> Any:
        """The layer's output under one draw; d None stands for the mean. By default its own forward with those values."""
        return self.run(layer, args, kwargs)

    @abstractmethod
    def mean(self) -> dict[str, Tensor]:
        """The expectation of every random parameter, (*shape)."""

    def variance(self) -> dict[str, Tensor]:
        """The variance of every element of every random parameter, (*shape), where elements are independent."""
        raise PatchbayesError(f"variance: the elements of {self.method.label} are not independent.")

    def component(self, number: int) -> dict[str, Tensor]:
        """Component `number` of every random parameter, (*shape)."""
        raise PatchbayesError(f"component {number}: {self.method.label} has no components.")

    def scale_spread_(self, factor: float) -> None:
        """Multiply all deviations from the mean by `factor`; the mean stays."""
        raise PatchbayesError(f"scale_spread_: the spread of {self.method.label} cannot be scaled.")

    def expected_squares(self) -> dict[str, Tensor]:
        """E ||w||^2 of every random parameter, (): all that the default `kl` has to know of a law without noise."""
        raise PatchbayesError(
            f"{type(self).__name__}: its KL is not known.\n  do       define expected_squares, or kl where the law has noise."
        )

    def kl(self, prior: PriorTerms, d: SiteDraw | None = None) -> KL:
        """KL of the random and kept parameters to the prior, as `objective.kl` documents.

        By default Eqs. (2) and (6), tau / 2 times `expected_squares`, up to a constant: for laws on finitely many values. With
        `normalized`, where tau and rho are learned, all terms in these are kept: - 1/2 log tau for every element.
        """
        if prior.entropy is not None:
            raise PatchbayesError(
                f'kl(entropy="{prior.entropy}") with {self.method.label}: sigma is 0, where the entropy is minus infinity.\n'
                "  do       use entropy=None (Eqs. 2 and 6, up to a constant)."
            )
        terms = [
            prior.quadratic(name, square, math.prod(self._shapes[name]))
            for name, square in self.expected_squares().items()
        ]
        return KL(torch.stack(terms).sum(), "exact")

    def share_gradients_(self, share: float) -> None:
        """Let parts that were not drawn take a share of the gradient, as `objective.share_gradients_` says; by default none."""

    def roles(self) -> dict[str, Role]:
        """What each of the posterior's own parameters is. A "law" (sigma, logits of p, a flow) is never decayed."""
        return {name: "bias" if is_bias(name) else "weight" for name, _ in self.named_parameters()}

    def upgrade(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The layer's state dict from what version 0.1.0 stored, a tensor for each random parameter."""
        raise PatchbayesError(f"{self.method.label} did not exist in files of version 0.1.0.")

    # What follows is for posteriors to use, and is not to be overridden.

    @property
    def log10_outcomes(self) -> float:
        """log10 of how many values the layer can take, infinite for a continuous law."""
        groups = self.groups()
        if self.noise != "none":
            return math.inf
        return groups.length * math.log10(groups.outcomes) if groups else 0.0

    def probabilities(self) -> tuple[float, ...] | None:
        """The law of the categorical draws now, as numbers that sum to one; None is uniform."""
        log_p = self.log_p()
        return None if log_p is None else probabilities_of(log_p, self.method.label)

    def run(
        self,
        layer: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        values: Mapping[str, Tensor] | None = None,
    ) -> Any:
        """The layer's own forward: with the values of the current draw, or with the given ones in their place."""
        return layer._patchbayes_forward(values, *args, **kwargs)  # type: ignore[operator]

    def standard_normal(self, name: str, keys: Tensor, like: Tensor) -> Tensor:
        """The noise on a parameter, (*lead, *shape), for keys (*lead,): equal whatever else is drawn with it."""
        streams = fold(keys, self.stream + self.names.index(name))
        if streams.dim() == 0:
            return normal_like(like, streams)
        return torch.stack([normal_like(like, key) for key in streams.unbind(0)])

    def example_keys(self, d: SiteDraw, num_rows: int) -> Tensor:
        """A key for each row of a batch, () where the whole batch has one stream."""
        return example_keys(d["key"], num_rows, d["examples"]) if "examples" in d else d["key"]

    def take_(self, holder: nn.ParameterDict, name: str, value: Tensor) -> None:
        """Put `value` into the holder: at first in the layer's own Parameter object, which moves here from the layer."""
        if name in holder:
            holder[name].data.copy_(value)
            return
        parameter = self.layer._parameters.pop(name)
        parameter.__dict__["_patchbayes_shape_before"] = tuple(parameter.shape)
        set_value_(parameter, value)
        holder[name] = parameter

    def add_(self, holder: nn.ParameterDict, name: str, value: Tensor) -> None:
        """Put `value` into the holder as a new Parameter, learned if the layer's own is."""
        if name in holder:
            holder[name].data.copy_(value)
        else:
            holder[name] = nn.Parameter(value, requires_grad=self.layer._parameters[name].requires_grad)

    def extra_repr(self) -> str:
        return self.method.label


def set_value_(parameter: nn.Parameter, value: Tensor) -> None:
    """Another value of any shape in the same Parameter object, without a gradient.

    While a loss of an earlier step is alive, torch keeps the node that takes the parameter's gradients, with the old shape. It
    makes a new one when the dtype has changed, so the dtype changes on the way.
    """
    parameter.grad = None
    parameter.data = value.new_empty(0, dtype=torch.float16 if value.dtype != torch.float16 else torch.float32)
    parameter.data = value


def is_bias(name: str) -> bool:
    """Biases take the prior precision rho, all other parameters tau."""
    return "bias" in name.rpartition(".")[2]


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that belong to the module itself, without those of its children."""
    return {name: p for name, p in module._parameters.items() if p is not None and p.is_floating_point()}


def root_mean_square(name: str, values: Mapping[str, Tensor]) -> float:
    """The size of a parameter; where it is all zero, the size of the module's largest parameter."""
    sizes = {key: float(value.detach().double().square().mean().sqrt()) for key, value in values.items()}
    return sizes[name] or max(sizes.values())


def quadratic(precision: Tensor | float, square: Tensor, size: int, *, normalized: bool) -> Tensor:
    """precision / 2 * square, and with `normalized` also - size / 2 * log(precision)."""
    total = 0.5 * precision * square
    if normalized:
        total = total - 0.5 * size * torch.as_tensor(precision, dtype=square.dtype, device=square.device).log()
    return total
