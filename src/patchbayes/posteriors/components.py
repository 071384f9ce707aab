"""The posterior of the paper's family: components of a layer, and draws that pick among them."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..draws.layout import example_keys
from ..draws.schemes import assign_with
from ..errors import PatchbayesError
from ..layers import is_norm
from .initializing import check_memory, initialized_again
from .posterior import (
    CHILD,
    KL,
    Groups,
    Posterior,
    PriorTerms,
    Role,
    SiteDraw,
    is_bias,
    own_parameters,
    quadratic,
    root_mean_square,
)
from .units import counting, num_units, pick, spread

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")

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


class MixturePosterior(Posterior):
    """The mixture over the parameters of one layer.

    `components[name]` is (K, *shape); those of a one-dimensional parameter lie flat, (K * n,), so that optimizers which
    decay by the number of axes leave norms and biases alone.
    """

    settled = True
    method: Any  # a Mixture

    def __init__(self, method: Any, layer: nn.Module, generator: torch.Generator) -> None:
        _check_fit(method, layer)
        values = own_parameters(layer)
        check_memory(method.components, values)
        mix_bias = method.mix_bias if method.mix_bias is not None else not method.zero
        unmixed = {name for name in values if is_bias(name) and not mix_bias}
        super().__init__(method, layer, tuple(name for name in values if name not in unmixed or method.sigma))
        self._unmixed = unmixed
        self.noise = "draw" if method.sigma else "none"
        self.noise_source = f"Gaussian noise, sigma={method.sigma:g}" if method.sigma else None
        self.num_components = method.components
        self.components = nn.ParameterDict()
        self._places, self._num_groups = self._lay_out()
        self._groups = Groups(self._num_groups, method.outcomes) if self._num_groups else None
        # Vectors whose elements draw for themselves are picked in one operation, with one more in the backward pass.
        alone = method.tie == "element" and not method.zero
        self._flat = {name for name in self._places if alone and len(self._shapes[name]) == 1}
        self._fresh = initialized_again(layer, method.components - 1, generator) if method.init == "independent" else []
        p = method.probabilities
        self._log_p = None if p is None else torch.tensor(p, dtype=torch.float64).log()
        self._p = self.probabilities()
        self.learns_law = method.learn_probabilities and method.outcomes > 1
        if self.learns_law:
            like = next(iter(values.values()))
            start = torch.zeros(method.outcomes, dtype=torch.float64) if self._log_p is None else self._log_p
            self.logits = nn.Parameter(start.to(like), any(v.requires_grad for v in values.values()))

    def _lay_out(self) -> tuple[dict[str, tuple[int, int]], int]:
        """Which of the site's draw groups belong to which parameter, name -> (first, number); and how many there are."""
        method, position = self.method, 0
        places: dict[str, tuple[int, int]] = {}
        if method.outcomes == 1:
            return places, 0
        for name, shape in self._shapes.items():
            if name in self._unmixed:
                continue
            if method.tie in ("network", "site"):
                places[name], position = (0, 1), 1
                continue
            number = math.prod(shape) if method.tie == "element" else num_units(self.layer, name, shape)
            places[name] = (position, number)
            position += number
        return places, position

    def groups(self) -> Groups | None:
        if self.method.tie == "network":
            return Groups(1, self.method.outcomes, "network") if self.method.outcomes > 1 else None
        return self._groups

    def log_p(self) -> Tensor | None:
        return torch.log_softmax(self.logits.double(), 0) if self.learns_law else self._log_p

    @torch.no_grad()
    def set_probabilities_(self, p: Tensor) -> None:
        """Other mixing probabilities, (outcomes,): fixed ones, or a new start of those that are learned."""
        if self.learns_law:
            self.logits.copy_(p.clamp_min(1e-12).log())
        else:
            self.method = replace(self.method, probabilities=tuple((p / p.sum()).tolist()))
            self._log_p = p.detach().double().cpu().log()
            self._p = self.probabilities()

    def share_law_(self, owner: Posterior) -> None:
        if self.learns_law != owner.learns_law:
            raise PatchbayesError(
                'sites with tie="network" share one draw: learn_probabilities must be the same in all of them.'
            )
        if self.learns_law:
            self.logits = owner.logits  # type: ignore[assignment]

    def start_(self, values: Mapping[str, Tensor], generator: torch.Generator) -> None:
        method, first = self.method, not self.components
        started = dict(values)
        rescaled = first and method.norm_scale is not None and is_norm(self.layer)
        if rescaled:
            started["weight"] = torch.full_like(values["weight"], method.norm_scale)
        for name in self.names:
            learned = 1 if name in self._unmixed else method.components
            components = started[name].detach().unsqueeze(0).repeat(learned, *[1] * started[name].dim())
            if method.init == "copies" and method.jitter:
                step = method.jitter * root_mean_square(name, started)
                noise = torch.randn(components[1:].shape, generator=generator) * step
                components[1:] += noise.to(components)
            for number, again in enumerate(self._fresh[: learned - 1], start=1):
                components[number] = again[name]
            if rescaled and method.init == "independent" and name == "weight":
                components.copy_(started["weight"].expand_as(components))
            self.take_(self.components, name, _flat(components))
        if method.statistics == "per_component" and _has_statistics(self.layer):
            for name in _STATISTICS:
                statistic = values[name] if name in values else getattr(self.layer, name)
                self.register_buffer(name, statistic.unsqueeze(0).repeat(method.outcomes, *[1] * statistic.dim()))

    def stored(self, name: str) -> Tensor:
        """All components of a parameter, (K, *shape), or (1, *shape) where it is not mixed."""
        parameter = self.components[name]
        return parameter if parameter.dim() > 1 or not self._shapes[name] else parameter.view(-1, *self._shapes[name])

    def draw(self, z: Tensor, keys: Tensor) -> SiteDraw:
        d = {"z": z}
        if self.method.sigma:
            for name in self.names:
                like = self.stored(name)[0]
                d[f"noise.{name}"] = self.standard_normal(name, keys, like)
        if self.method.per_example:
            d["key"] = keys
        return d

    def realize(self, d: SiteDraw) -> dict[str, Tensor]:
        values = {name: self.select(name, d["z"]) for name in self.names}
        if self.method.sigma:
            values = {name: v + self.method.sigma * d[f"noise.{name}"] for name, v in values.items()}
        if self._has_own_statistics:
            which = self._component_of(d)
            values.update({name: stored.index_select(0, which)[0] for name, stored in self._statistics().items()})
        return values

    def realize_several(self, d: SiteDraw) -> dict[str, Tensor]:
        return super().realize_several(d) if self._has_own_statistics else self.realize(d)  # picks for any leading axes

    def apply_to(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], d: SiteDraw | None) -> Any:
        if self._has_own_statistics:
            return self._normalize(layer, args[0] if args else kwargs["input"], d)
        if d is not None and self.method.per_example and "examples" not in d:
            return self._affine_per_example(layer, args, kwargs, d)
        return self.run(layer, args, kwargs)

    def select(self, name: str, indices: Tensor, stored: Tensor | None = None) -> Tensor:
        """The components that the draws pick, without noise: indices (*lead, groups) give (*lead, *shape).

        stored   (K, *shape), to pick from something else that every component has.
        """
        if stored is None and indices.dim() == 1 and name in self._flat:
            flat, (first, number) = self.components[name], self._places[name]
            places = counting(number, flat.device)
            return flat.index_select(0, places.add(indices[first : first + number].to(flat.device), alpha=number))
        stored = self.stored(name) if stored is None else stored
        if name not in self._places:
            return stored[0].expand(*indices.shape[:-1], *stored.shape[1:])
        first, number = self._places[name]
        indices = indices[..., first : first + number].to(stored.device)
        if self.method.tie not in ("network", "site"):
            which = self._spread(name, indices)
            chosen = pick(stored, which.clamp(max=stored.shape[0] - 1) if self.method.zero else which)
            return chosen * (which < stored.shape[0]) if self.method.zero else chosen
        which = indices.reshape(-1)
        learned = which.clamp(max=stored.shape[0] - 1) if self.method.zero else which
        chosen = stored.index_select(0, learned).reshape(*indices.shape[:-1], *stored.shape[1:])
        if not self.method.zero:
            return chosen
        return chosen * (which < stored.shape[0]).reshape(*indices.shape[:-1], *[1] * (stored.dim() - 1))

    def _spread(self, name: str, indices: Tensor) -> Tensor:
        """Indices of draw groups (*lead, groups) in the parameter's shape: (*lead, *shape)."""
        shape, lead = self._shapes[name], indices.shape[:-1]
        if indices.shape[-1] == math.prod(shape):  # every element draws for itself
            return indices.reshape(*lead, *shape)
        return spread(self.layer, name, shape, indices)

    def mean(self) -> dict[str, Tensor]:
        values = {name: self._mean_of(name, self.stored(name)) for name in self.names}
        for name, stored in self._statistics().items():
            wide = stored.double()
            p = self._law(wide)
            values[name] = torch.tensordot(p, wide, 1).to(stored) if stored.is_floating_point() else stored[0]
        return values

    def _mean_of(self, name: str, stored: Tensor) -> Tensor:
        if name in self._unmixed:
            return stored[0]
        p = self._law(stored)[: stored.shape[0]]
        if self.method.zero:
            return torch.tensordot(p, stored, dims=1)
        return stored[0] + torch.tensordot(
            p[1:], stored[1:] - stored[0], dims=1
        )  # equal components are their mean exactly

    def variance(self) -> dict[str, Tensor]:
        if self.method.tie != "element":
            return super().variance()
        values = {}
        for name in self.names:
            stored = self.stored(name)
            if name in self._unmixed:
                values[name] = torch.zeros_like(stored[0])
            else:  # around the mean, so that nothing cancels; a component at zero lies one mean away from it
                mean, p = self._mean_of(name, stored), self._law(stored)
                values[name] = torch.tensordot(p[: len(stored)], (stored - mean).square(), dims=1)
                if self.method.zero:
                    values[name] = values[name] + p[-1] * mean.square()
        return {name: value + self.method.sigma**2 for name, value in values.items()}

    def component(self, number: int) -> dict[str, Tensor]:
        if not 0 <= number < self.method.outcomes:
            raise PatchbayesError(f"component {number}: this site has the components 0 to {self.method.outcomes - 1}.")
        values = {}
        for name in self.names:
            stored = self.stored(name)
            if name in self._unmixed:
                values[name] = stored[0]
            else:
                values[name] = stored[number] if number < stored.shape[0] else torch.zeros_like(stored[0])
        return values | {name: stored[number] for name, stored in self._statistics().items()}

    @torch.no_grad()
    def scale_spread_(self, factor: float) -> None:
        """Deviations of the components from their mean; noise of a fixed sigma and a component at zero have no scale."""
        if self.method.zero or self.method.sigma:
            return super().scale_spread_(factor)
        for name in self.names:
            stored = self.stored(name)
            mean = self._mean_of(name, stored)
            stored.copy_(mean + factor * (stored - mean))
        return None

    def kl(self, prior: PriorTerms, d: SiteDraw | None = None) -> KL:
        sigma = self.method.sigma
        entropy, normalized = prior.entropy, prior.normalized or prior.entropy is not None
        if entropy is not None and not sigma:
            raise PatchbayesError(
                f'kl(entropy="{entropy}") at a {type(self.layer).__name__}: sigma is 0, where the entropy is minus infinity.'
                "\n  do       give the method a sigma > 0, or use entropy=None (Eqs. 2 and 6, up to a constant)."
            )
        terms = []
        for name in self.names:
            stored = self.stored(name)
            if name in self._places:
                squares = stored.square().flatten(1).sum(1)
                square = (self._law(stored)[: len(squares)] * squares).sum()
                size = stored[0].numel()
            else:
                square, size = stored.square().sum(), stored.numel()
            if normalized:
                square = square + size * sigma**2
            terms.append(quadratic(prior.precision(name), square, size, normalized=normalized))
            if entropy is not None:
                terms.append(-0.5 * size * (1 + math.log(sigma**2)) * torch.ones_like(square))
        mixed = bool(sigma and self._places)  # the entropy of a mixture of Gaussians is bounded, all else is exact
        return KL(torch.stack(terms).sum(), "bound" if mixed else "exact")

    @torch.no_grad()
    def share_gradients_(self, share: float) -> None:
        if self.method.tie == "network":
            return
        for name, parameter in self.components.items():
            if parameter.grad is not None:
                gradient = parameter.grad.view(self.stored(name).shape)
                scale = len(gradient) / (1 + share * (len(gradient) - 1))
                gradient.lerp_(gradient.sum(0).expand_as(gradient), share).mul_(scale)

    def roles(self) -> dict[str, Role]:
        return super().roles() | ({"logits": "law"} if self.learns_law else {})

    def upgrade(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = {f"{CHILD}.components.{name}": _flat(stored[name]) for name in self.names if name in stored}
        statistics = [name for name in _STATISTICS if f"component_{name}" in stored]
        return found | {f"{CHILD}.{name}": stored[f"component_{name}"] for name in statistics}

    def _law(self, like: Tensor) -> Tensor:
        """Probabilities of all outcomes, (K,) or with the zero component (K + 1,), in the dtype of `like`."""
        if self.learns_law:
            return torch.softmax(self.logits.double(), 0).to(like)
        p = self._p or (1 / self.method.outcomes,) * self.method.outcomes
        return torch.tensor(p, dtype=like.dtype, device=like.device)

    def _affine_per_example(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], d: SiteDraw
    ) -> Tensor:
        """A norm layer with unit affine, then the affine of each example's own draw."""
        key = d["key"]
        neutral = {
            name: (torch.zeros_like if is_bias(name) else torch.ones_like)(self.stored(name)[0]) for name in self.names
        }
        output: Tensor = self.run(layer, args, kwargs, neutral)
        keys = example_keys(key, output.shape[0])
        indices = assign_with(keys, self.offset, self._num_groups, self.method.outcomes, self.log_p(), output.device)
        if self.learns_law:
            d["log_prob"] = torch.log_softmax(self.logits.double(), 0)[indices].sum(-1)
        for name in self.names:
            values = self.select(name, indices)
            if self.method.sigma:
                values = values + self.method.sigma * self.standard_normal(name, key, values)
            trailing = isinstance(layer, (nn.LayerNorm, nn.RMSNorm))
            padding = [1] * (output.dim() - values.dim())
            shape = (len(values), *padding, *values.shape[1:]) if trailing else (*values.shape, *padding)
            output = output + values.view(shape) if is_bias(name) else output * values.view(shape)
        return output

    @property
    def _has_own_statistics(self) -> bool:
        return "running_mean" in self._buffers

    def _statistics(self) -> dict[str, Tensor]:
        return {name: self._buffers[name] for name in _STATISTICS if self._buffers.get(name) is not None}  # type: ignore[misc]

    def _component_of(self, d: SiteDraw) -> Tensor:
        """The component that the whole layer takes, (1,) int64."""
        z = d["z"] if self.method.outcomes > 1 else d["z"].new_zeros(1)
        return z[:1].to(self._buffers["running_mean"].device)  # type: ignore[union-attr]

    def _normalize(self, layer: nn.Module, x: Tensor, d: SiteDraw | None) -> Tensor:
        """Batch norm with the running statistics of the drawn component, which alone are updated in training."""
        if d is None:
            statistics = {name: v for name, v in self.mean().items() if name in _STATISTICS}
        else:
            which = self._component_of(d)
            statistics = {name: stored.index_select(0, which)[0] for name, stored in self._statistics().items()}
        layer._check_input_dim(x)  # type: ignore[operator]
        mean, variance, seen = (statistics[name] for name in _STATISTICS)
        momentum = layer.momentum
        if layer.training and d is not None:
            seen = seen + 1
            momentum = 1.0 / float(seen) if momentum is None else momentum
        weight, bias = layer.weight, layer.bias
        output = F.batch_norm(x, mean, variance, weight, bias, layer.training, momentum or 0.0, layer.eps)  # type: ignore[arg-type]
        if layer.training and d is not None:
            with torch.no_grad():
                for name, value in zip(_STATISTICS, (mean, variance, seen), strict=True):
                    self._statistics()[name].index_copy_(0, which, value.unsqueeze(0))
        return output


def _check_fit(method: Any, layer: nn.Module) -> None:
    where = type(layer).__name__
    if method.per_example and type(layer).forward not in _SEPARABLE_FORWARDS:
        raise PatchbayesError(
            f"per_example=True at a {where}: only torch's own norm layers can take a draw for each example.\n"
            '  do       sites="norm", or per_example=False.'
        )
    if method.statistics == "per_component" and method.tie not in ("site", "network"):
        raise PatchbayesError(
            f'statistics="per_component" with tie="{method.tie}": a running statistic needs one component a layer.\n'
            '  do       tie="site" (EMP) or "network" (Ensemble), or statistics="shared".'
        )


def _has_statistics(layer: nn.Module) -> bool:
    return isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.running_mean is not None


def _flat(components: Tensor) -> Tensor:
    """Components (K, n) of a vector as (K * n,); all others as they are."""
    return components.flatten() if components.dim() == 2 else components
