"""The paper's family, Eq. (1): a mixture of K Gaussians with a shared sigma, and its named members.

    W = sum_k 1[Z = k] * (M_k + sigma * eps_k)

The members differ in how widely one categorical draw Z is shared (`tie`) and in whether a component is pinned at zero.
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import nn

from ..errors import PatchbayesError
from .components import MixturePosterior
from .local import Form, LocalForm, check_form, check_local
from .method import Method, constructor

Tie = Literal["network", "site", "unit", "element"]
Init = Literal["copies", "independent"]
Statistics = Literal["shared", "per_component"]


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
    learn_probabilities  learn p, from `probabilities` on: the softmax of logits that every site has for itself. `kl` then
                 holds log K - H(p) for every independent draw, the divergence from a uniform prior on the assignment. Train
                 with `forward_draws`, of two draws or more: only its outputs tell `negative_elbo` what was drawn.
    form         "weights", or with tie "element" also "local": the outputs of linear layers are drawn for every example, of the
                 mean and variance that drawn weights give them (`posteriors.local`).
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
    learn_probabilities: bool = False
    form: Form = "weights"

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
            name = "GaussianNoise"
        more = (f", sigma={self.sigma:g}" if self.sigma else "") + (", local" if self.form == "local" else "")
        return f"{name}(K={self.components}{more})" if not self.zero else f"{name}{more}"

    start_fields: ClassVar[tuple[str, ...]] = ("init", "jitter", "norm_scale", "per_example")

    @property
    def default_sites(self) -> str:  # type: ignore[override]
        """Norms and output (section 3.3); a dropped weight is one of a matrix, and an ensemble is of everything (table 2)."""
        if self.tie == "network":
            return "all"
        return "linear+conv" if self.zero else "norm+output"

    @property
    def copies(self) -> int:
        return self.components

    @property
    def random_at_start(self) -> bool:
        return bool(self.zero or self.sigma)

    def without_spread(self) -> "Mixture":
        return replace(self, init="copies", jitter=0.0, norm_scale=None)

    def posterior(self, module: nn.Module, generator: torch.Generator) -> MixturePosterior:
        if self.form == "weights":
            return MixturePosterior(self, module, generator)
        check_local(module)
        return LocalMixturePosterior(self, module, generator)


class LocalMixturePosterior(LocalForm, MixturePosterior):
    """The same mixture, with outputs drawn in the place of weights."""


@constructor
def EMP(
    components: int = 5,
    *,
    sigma: float = 0.0,
    probabilities: tuple[float, ...] | None = None,
    init: Init = "copies",
    jitter: float = 0.1,
    norm_scale: float | None = None,
    zero: bool = False,
    mix_bias: bool | None = None,
    statistics: Statistics = "shared",
    per_example: bool = False,
    learn_probabilities: bool = False,
) -> Mixture:
    """Ensemble Model Patching, Eq. (4): one draw picks the component of a whole layer, weight and bias together."""
    return Mixture(
        components=components,
        tie="site",
        sigma=sigma,
        probabilities=probabilities,
        init=init,
        jitter=jitter,
        norm_scale=norm_scale,
        zero=zero,
        mix_bias=mix_bias,
        statistics=statistics,
        per_example=per_example,
        learn_probabilities=learn_probabilities,
    )


@constructor
def ECMP(
    components: int = 5,
    *,
    sigma: float = 0.0,
    probabilities: tuple[float, ...] | None = None,
    init: Init = "copies",
    jitter: float = 0.1,
    norm_scale: float | None = None,
    zero: bool = False,
    mix_bias: bool | None = None,
    per_example: bool = False,
    learn_probabilities: bool = False,
    form: Form = "weights",
) -> Mixture:
    """Ensemble Cross Model Patching, Eq. (5): every element of weight and bias draws its own component."""
    return Mixture(
        components=components,
        tie="element",
        sigma=sigma,
        probabilities=probabilities,
        init=init,
        jitter=jitter,
        norm_scale=norm_scale,
        zero=zero,
        mix_bias=mix_bias,
        per_example=per_example,
        learn_probabilities=learn_probabilities,
        form=form,
    )


@constructor
def DropConnect(
    rate: float,
    *,
    sigma: float = 0.0,
    mix_bias: bool | None = None,
    learn_rate: bool = False,
    form: Form = "weights",
) -> Mixture:
    """DropConnect (table 2): every weight is dropped with probability `rate`; the bias stays. No rescaling, as in Eq. (1)."""
    check_rate("DropConnect", rate)
    return Mixture(
        components=1,
        tie="element",
        zero=True,
        probabilities=(1 - rate, rate),
        sigma=sigma,
        mix_bias=mix_bias,
        learn_probabilities=learn_rate,
        form=form,
    )


@constructor
def Ensemble(
    components: int = 5,
    *,
    sigma: float = 0.0,
    probabilities: tuple[float, ...] | None = None,
    init: Init = "independent",
    jitter: float = 0.1,
    norm_scale: float | None = None,
    statistics: Statistics = "per_component",
    learn_probabilities: bool = False,
) -> Mixture:
    """An explicit ensemble (table 2): one draw picks the member for the whole network.

    Patch it onto sites="all". Members start independently and keep their own running statistics. One forward pass trains
    the one member drawn; to train all in a step, pass `Draws.enumerate(model)` to `forward_draws`.
    """
    return Mixture(
        components=components,
        tie="network",
        sigma=sigma,
        probabilities=probabilities,
        init=init,
        jitter=jitter,
        norm_scale=norm_scale,
        statistics=statistics,
        learn_probabilities=learn_probabilities,
    )


@constructor
def GaussianNoise(sigma: float) -> Mixture:
    """Gaussian noise on a layer with a single component, Eq. (3): the shared layers, where a sigma is wanted on them."""
    return Mixture(components=1, sigma=sigma)


def _check(method: Mixture) -> None:
    def refuse(given: str, required: str) -> None:
        raise PatchbayesError(f"Mixture({given}): {required}.")

    k = method.components
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        refuse(f"components={k!r}", "the number of components K is an integer of at least 1")
    for name in ("zero", "per_example", "learn_probabilities"):
        if not isinstance(getattr(method, name), bool):
            refuse(f"{name}={getattr(method, name)!r}", "expected True or False")
    if method.mix_bias is not None and not isinstance(method.mix_bias, bool):
        refuse(f"mix_bias={method.mix_bias!r}", "expected True, False or None")
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
        if isinstance(p, str) or not hasattr(p, "__len__") or not all(_is_number(x) or x != x for x in p):
            refuse(f"probabilities={p!r}", "give a probability for each component")
        if len(p) != method.outcomes:
            what = f"{k} components and the zero component" if method.zero else f"{k} components"
            refuse(f"probabilities={tuple(p)!r}", f"{len(p)} probabilities were given for {what}")
        if not all(math.isfinite(x) and x >= 0 for x in p) or abs(sum(p) - 1) > 1e-6:
            refuse(
                f"probabilities={tuple(p)!r}", f"probabilities are at least 0 and sum to 1 (their sum is {sum(p):g})"
            )

    check_form("Mixture", method.form)
    if method.form == "local" and (method.tie != "element" or method.per_example or method.learn_probabilities):
        refuse(
            'form="local"', 'it goes with tie="element" (ECMP, DropConnect), fixed probabilities and per_example=False'
        )
    if method.learn_probabilities and (method.outcomes == 1 or (p is not None and not min(p) > 0)):
        what = "a single component has none" if method.outcomes == 1 else "all must start above 0"
        refuse(f"learn_probabilities=True, probabilities={p!r}", f"probabilities cannot be learned: {what}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def check_rate(name: str, rate: float) -> None:
    if not (_is_number(rate) and 0 <= rate < 1):
        raise PatchbayesError(f"{name}(rate={rate!r}): the rate is the probability to drop, at least 0 and below 1.")
