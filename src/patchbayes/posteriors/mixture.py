"""The paper's family, Eq. (1): a mixture of K Gaussians with a shared sigma, and its named members.

    W = sum_k 1[Z = k] * (M_k + sigma * eps_k)

The members differ in how widely one categorical draw Z is shared (`tie`) and in whether a component is pinned at zero.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from ..errors import PatchbayesError
from ..layout import Span
from ..randomness import fold, normal_like
from ..selection import is_norm
from .posterior import Entropy, Method, Posterior, is_bias, own_parameters, quadratic, root_mean_square

Tie = Literal["network", "site", "unit", "element"]
Init = Literal["copies", "independent"]
Statistics = Literal["shared", "per_component"]

#: Forwards of norm layers whose affine part can be applied after them, an affine for each example. A subclass with a
#: forward of its own (a fused activation, channels in another place) would get it in the wrong place.
_SEPARABLE_FORWARDS = {
    nn.modules.batchnorm._BatchNorm.forward,
    nn.modules.instancenorm._InstanceNorm.forward,
    nn.SyncBatchNorm.forward,
    nn.LayerNorm.forward,
    nn.GroupNorm.forward,
    nn.RMSNorm.forward,
}


@dataclass(frozen=True)
class Mixture(Method):
    """K learned components for every parameter of a site, and a categorical draw that picks among them (Eq. 1).

    components   K, the number of learned components.
    tie          what shares one draw: "network" (explicit ensemble), "site" (EMP, Eq. 4: weight and bias together), "unit"
                 (an input unit, a column of W; the bias is the column of the constant input) or "element" (ECMP, Eq. 5).
    sigma        standard deviation of the Gaussian noise on every component.
    probabilities  mixing probabilities p, fixed, one for each component (the zero component last); None is uniform.
    zero         add a component pinned at zero. It is not stored, and the bias is then not mixed (table 2).
    mix_bias     overrides that last rule.
    init         "copies": component 0 is the module's value, the others that plus `jitter` times the parameter's root mean
                 square times N(0, 1). "independent": component 0 is the module's value, the others come from the module's
                 own initializer.
    norm_scale   start value of a norm layer's weight in all components (the paper's regression networks: 0.2).
    statistics   batch-norm running statistics: one "shared" set, or one "per_component" (tie "site" or "network").
    per_example  in training, draw for each example of a batch instead of once (norm layers). `predict` is not affected.
    """

    components: int = 5
    tie: Tie = "site"
    sigma: float = 0.0
    probabilities: tuple[float, ...] | None = None
    zero: bool = False
    mix_bias: bool | None = None
    init: Init = "copies"
    jitter: float = 0.1
    norm_scale: float | None = None
    statistics: Statistics = "shared"
    per_example: bool = False

    def __post_init__(self) -> None:
        _check(self)
        if self.probabilities is not None:
            object.__setattr__(self, "probabilities", tuple(float(p) for p in self.probabilities))

    @property
    def outcomes(self) -> int:
        """What one draw chooses among: K, and the zero component."""
        return self.components + self.zero

    @property
    def label(self) -> str:
        names = {("site", False): "EMP", ("element", False): "ECMP", ("network", False): "Ensemble"}
        names |= {("element", True): "DropConnect"} if self.components == 1 else {}
        name = names.get((self.tie, self.zero), f"Mixture({self.tie}{', zero' if self.zero else ''})")
        if self.outcomes == 1:
            name = "Shared"
        sigma = f", sigma={self.sigma:g}" if self.sigma else ""
        return f"{name}(K={self.components}{sigma})" if not self.zero else f"{name}{sigma}"

    def from_module(self, module: nn.Module, generator: torch.Generator) -> "MixturePosterior":
        return MixturePosterior(self, module, generator)


class MixturePosterior(Posterior):
    """The mixture over the parameters of one module; stored tensors are (K, *shape)."""

    def __init__(self, method: Mixture, module: nn.Module, generator: torch.Generator) -> None:
        super().__init__(module)
        self.method = method
        where = type(module).__name__
        if method.per_example and type(module).forward not in _SEPARABLE_FORWARDS:
            raise PatchbayesError(
                f"per_example=True at a {where}: only torch's own norm layers can take a draw for each example.\n"
                '  do       sites="norm", or per_example=False.'
            )
        if method.statistics == "per_component" and method.tie not in ("site", "network"):
            raise PatchbayesError(
                f'statistics="per_component" with tie="{method.tie}": a running statistic needs one component a layer.\n'
                '  do       tie="site" (EMP) or "network" (Ensemble), or statistics="shared".'
            )
        values: dict[str, Tensor] = {name: p.detach() for name, p in own_parameters(module).items()}
        mix_bias = method.mix_bias if method.mix_bias is not None else not method.zero
        fixed = {name for name in values if is_bias(name) and not mix_bias}
        self.names = tuple(name for name in values if name not in fixed or method.sigma)
        self.fixed_names = tuple(name for name in values if name not in self.names)
        self._unmixed = fixed
        self._shapes = {name: values[name].shape for name in self.names}
        self._local_spans: list[Span] = []
        self._groups: dict[str, tuple[int, int]] = {}
        self._lay_out()
        self._fresh = (
            _initialized_again(module, method.components - 1, generator) if method.init == "independent" else []
        )

    def _lay_out(self) -> None:
        """Which of the site's draw groups belong to which parameter: name -> (first, number)."""
        method, position = self.method, 0
        if method.outcomes == 1:
            return
        for name, shape in self._shapes.items():
            if name in self._unmixed:
                continue
            if method.tie in ("network", "site"):
                self._groups[name] = (0, 1)
                continue
            number = math.prod(shape) if method.tie == "element" else _num_units(self.module, name, shape)
            self._groups[name] = (position, number)
            position += number
        if method.tie == "site" and self._groups:
            position = 1
        if position:
            self._local_spans = [Span("", position, method.outcomes, method.probabilities)]

    @property
    def spans(self) -> Sequence[Span]:
        return self._local_spans

    @property
    def networkwide(self) -> Span | None:
        if self.method.tie != "network" or self.method.outcomes == 1:
            return None
        return Span("network", 1, self.method.outcomes, self.method.probabilities)

    @property
    def unbounded(self) -> str | None:
        return f"Gaussian noise, sigma={self.method.sigma:g}" if self.method.sigma else None

    def start(self, values: dict[str, Tensor], generator: torch.Generator, *, fresh: bool = True) -> dict[str, Tensor]:
        method = self.method
        values = dict(values)
        if fresh and method.norm_scale is not None and is_norm(self.module):
            values["weight"] = torch.full_like(values["weight"], method.norm_scale)
        stored = {}
        for name in self.names:
            learned = 1 if name in self._unmixed else method.components
            components = values[name].detach().unsqueeze(0).repeat(learned, *[1] * values[name].dim())
            if method.init == "copies" and method.jitter:
                step = method.jitter * root_mean_square(name, values)
                noise = torch.randn(components[1:].shape, generator=generator) * step
                components[1:] += noise.to(components)
            for number, again in enumerate(self._fresh[: learned - 1], start=1):
                components[number] = again[name]
            stored[name] = components
        if fresh and method.norm_scale is not None and method.init == "independent" and is_norm(self.module):
            stored["weight"].fill_(method.norm_scale)
        return stored

    def value(self, name: str, stored: Tensor, indices: Tensor, key: Tensor) -> Tensor:
        selected = self.select(name, stored, indices)
        if self.method.sigma:
            number = self.names.index(name)
            selected = selected + self.method.sigma * normal_like(selected, fold(key, self.stream + number))
        return selected

    def select(self, name: str, stored: Tensor, indices: Tensor) -> Tensor:
        """The components that the draws pick, without noise: indices (*lead, groups) give (*lead, *shape)."""
        if name not in self._groups:
            return stored[0].expand(*indices.shape[:-1], *stored.shape[1:])
        first, number = self._groups[name]
        indices = indices[..., first : first + number].to(stored.device)
        if self.method.tie in ("network", "site"):
            which = indices.reshape(*indices.shape[:-1], *[1] * (stored.dim() - 1))
            learned = indices.reshape(-1).clamp(max=stored.shape[0] - 1) if self.method.zero else indices.reshape(-1)
            chosen = stored.index_select(0, learned).reshape(*indices.shape[:-1], *stored.shape[1:])
        else:
            which = self._spread(name, indices)
            chosen = _pick(stored, which.clamp(max=stored.shape[0] - 1) if self.method.zero else which)
        return chosen * (which < stored.shape[0]) if self.method.zero else chosen

    def _spread(self, name: str, indices: Tensor) -> Tensor:
        """Indices of draw groups (*lead, groups) in the parameter's shape: (*lead, *shape)."""
        shape, lead = self._shapes[name], indices.shape[:-1]
        if indices.shape[-1] == math.prod(shape):  # every element draws for itself
            return indices.reshape(*lead, *shape)
        axis = _unit_axis(self.module, name, shape)
        if axis is None:
            return indices.reshape(*lead, *[1] * len(shape)).expand(*lead, *shape)
        if axis == 0:
            return indices.reshape(*lead, -1, *[1] * (len(shape) - 1)).expand(*lead, *shape)
        blocks = int(getattr(self.module, "groups", 1))  # a grouped convolution: every block of rows has its own inputs
        columns = indices.reshape(*lead, blocks, 1, -1, *[1] * (len(shape) - 2))
        return columns.expand(*lead, blocks, shape[0] // blocks, *shape[1:]).reshape(*lead, *shape)

    def mean(self, name: str, stored: Tensor) -> Tensor:
        if name in self._unmixed:
            return stored[0]
        p = self.probabilities(stored)[: stored.shape[0]]
        return torch.tensordot(p, stored, dims=1)

    def component(self, name: str, stored: Tensor, number: int) -> Tensor:
        if name in self._unmixed:
            return stored[0]
        if not 0 <= number < self.method.outcomes:
            raise PatchbayesError(f"component {number}: this site has the components 0 to {self.method.outcomes - 1}.")
        return stored[number] if number < stored.shape[0] else torch.zeros_like(stored[0])

    def kl(self, tau: Tensor | float, rho: Tensor | float, *, normalized: bool, entropy: Entropy | None) -> Tensor:
        sigma = self.method.sigma
        if entropy is not None and not sigma:
            raise PatchbayesError(
                f'kl(entropy="{entropy}") at a {type(self.module).__name__}: sigma is 0, where the entropy is minus infinity.'
                "\n  do       give the method a sigma > 0, or use entropy=None (Eqs. 2 and 6, up to a constant)."
            )
        terms = []
        for name in (*self.names, *self.fixed_names):
            stored = self.stored(name)
            precision = rho if is_bias(name) else tau
            if name in self._groups:
                squares = stored.square().flatten(1).sum(1)
                square = (self.probabilities(stored)[: len(squares)] * squares).sum()
                size = stored[0].numel()
            else:
                square, size = stored.square().sum(), stored.numel()
            noisy = name in self.names
            if noisy and (normalized or entropy is not None):
                square = square + size * sigma**2
            terms.append(quadratic(precision, square, size, normalized=normalized or entropy is not None))
            if entropy is not None and noisy:
                terms.append(-0.5 * size * (1 + math.log(sigma**2)) * torch.ones_like(square))
            elif entropy is not None:
                raise PatchbayesError(
                    f'kl(entropy="{entropy}"): the fixed parameter "{name}" has no noise, so no entropy.'
                )
        return torch.stack(terms).sum()

    @property
    def log10_outcomes(self) -> float:
        return math.inf if self.method.sigma else sum(s.length * math.log10(s.outcomes) for s in self._all_spans)

    def probabilities(self, like: Tensor) -> Tensor:
        """Mixing probabilities p of all outcomes, (K,) or with the zero component (K + 1,), in the dtype of `like`."""
        p = self.method.probabilities or (1 / self.method.outcomes,) * self.method.outcomes
        return torch.tensor(p, dtype=like.dtype, device=like.device)


def EMP(components: int = 5, **options: object) -> Mixture:
    """Ensemble Model Patching, Eq. (4): one draw picks the component of a whole layer, weight and bias together."""
    return Mixture(components=components, tie="site", **options)  # type: ignore[arg-type]


def ECMP(components: int = 5, **options: object) -> Mixture:
    """Ensemble Cross Model Patching, Eq. (5): every element of weight and bias draws its own component."""
    return Mixture(components=components, tie="element", **options)  # type: ignore[arg-type]


def DropConnect(rate: float, **options: object) -> Mixture:
    """DropConnect (table 2): every weight is dropped with probability `rate`; the bias stays. No rescaling, as in Eq. (1)."""
    _check_rate("DropConnect", rate)
    return Mixture(components=1, tie="element", zero=True, probabilities=(1 - rate, rate), **options)  # type: ignore[arg-type]


def Ensemble(components: int = 5, **options: object) -> Mixture:
    """An explicit ensemble (table 2): one draw picks the member for the whole network.

    Patch it onto sites="all". Members start independently and keep their own running statistics. One forward pass trains
    the one member drawn; to train all in a step, pass `Draws.enumerate(model)` to `forward_draws`.
    """
    settings: dict[str, object] = {"init": "independent", "statistics": "per_component"} | options
    return Mixture(components=components, tie="network", **settings)  # type: ignore[arg-type]


def Shared(sigma: float) -> Mixture:
    """Gaussian noise on a layer with a single component, Eq. (3): the shared layers, where a sigma is wanted on them."""
    return Mixture(components=1, sigma=sigma)


def _check(method: Mixture) -> None:
    def refuse(given: str, required: str) -> None:
        raise PatchbayesError(f"Mixture({given}): {required}.")

    k = method.components
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        refuse(f"components={k!r}", "the number of components K is an integer of at least 1")
    if method.tie not in ("network", "site", "unit", "element"):
        refuse(f"tie={method.tie!r}", 'a draw is shared by the "network", "site", "unit" or "element"')
    if not (_is_number(method.sigma) and method.sigma >= 0):
        refuse(f"sigma={method.sigma!r}", "the noise sigma is a finite standard deviation of at least 0")
    if method.init not in ("copies", "independent"):
        refuse(f"init={method.init!r}", 'components start as "copies" or "independent"')
    if not (_is_number(method.jitter) and method.jitter >= 0):
        refuse(f"jitter={method.jitter!r}", "the jitter is a finite multiple of the root mean square, at least 0")
    if method.norm_scale is not None and not _is_number(method.norm_scale):
        refuse(f"norm_scale={method.norm_scale!r}", "the start value of norm weights is a finite number")
    if method.statistics not in ("shared", "per_component"):
        refuse(f"statistics={method.statistics!r}", 'running statistics are "shared" or "per_component"')
    if method.per_example and (method.tie == "network" or method.statistics == "per_component"):
        refuse("per_example=True", 'a draw for each example fits neither tie="network" nor statistics="per_component"')
    p = method.probabilities
    if p is not None:
        if not hasattr(p, "__len__"):
            refuse(f"probabilities={p!r}", "give a probability for each component")
        if len(p) != method.outcomes:
            what = f"{k} components and the zero component" if method.zero else f"{k} components"
            refuse(f"probabilities={tuple(p)!r}", f"{len(p)} probabilities were given for {what}")
        if not all(math.isfinite(x) and x >= 0 for x in p) or abs(sum(p) - 1) > 1e-6:
            refuse(
                f"probabilities={tuple(p)!r}", f"probabilities are at least 0 and sum to 1 (their sum is {sum(p):g})"
            )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _check_rate(name: str, rate: float) -> None:
    if not (_is_number(rate) and 0 <= rate < 1):
        raise PatchbayesError(f"{name}(rate={rate!r}): the rate is the probability to drop, at least 0 and below 1.")


def _initialized_again(module: nn.Module, times: int, generator: torch.Generator) -> list[dict[str, Tensor]]:
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if reset is None:
        raise PatchbayesError(
            f'init="independent" at a {type(module).__name__}: it has no reset_parameters() to run again.\n'
            '  do       init="copies" for this site.'
        )
    seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
    fresh = []
    parameter = next(iter(own_parameters(module).values()))
    devices = [parameter.device] if parameter.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        clone = copy.deepcopy(module)
        for _ in range(times):
            (getattr(clone, "reset_parameters", None) or clone._reset_parameters)()  # type: ignore[operator]
            fresh.append({name: p.detach().clone() for name, p in own_parameters(clone).items()})
    return fresh


def _unit_axis(module: nn.Module, name: str, shape: torch.Size) -> int | None:
    """The axis of a parameter that runs over input units; None for a bias, which belongs to the constant input."""
    if is_bias(name):
        return None
    if len(shape) == 1 or isinstance(module, nn.Embedding | nn.modules.conv._ConvTransposeNd):
        return 0
    return 1


def _num_units(module: nn.Module, name: str, shape: torch.Size) -> int:
    axis = _unit_axis(module, name, shape)
    if axis is None:
        return 1
    if is_norm(module):  # a weight for every normalized input, over however many axes
        return math.prod(shape)
    return shape[axis] * (int(getattr(module, "groups", 1)) if axis == 1 else 1)


def _pick(stored: Tensor, which: Tensor) -> Tensor:
    """stored (K, *shape) at which (*lead, *shape): the element-wise choice (*lead, *shape)."""
    if which.dim() == stored.dim() - 1:
        return stored.gather(0, which.unsqueeze(0)).squeeze(0)
    lead = which.shape[: which.dim() - stored.dim() + 1]
    flat = which.reshape(-1, 1, *stored.shape[1:])
    return stored.expand(flat.shape[0], *stored.shape).gather(1, flat).reshape(*lead, *stored.shape[1:])
