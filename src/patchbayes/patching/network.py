"""The record of a patched network: its sites, their place in the draw, its generator, its prior and its likelihood.

Everything that lasts lives on the modules themselves (attributes, no closures), so that a deepcopy is a network of its own.
"""

import threading
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn

from ..draws.draws import RECORD, Draws, check_is_module, record_of
from ..draws.layout import Law, Layout, NetworkDraw, Probabilities, Span
from ..draws.randomness import fold, fold_number
from ..draws.schemes import assign, assign_live
from ..errors import PatchbayesError, WrongDraws
from ..likelihoods import Likelihood
from ..posteriors.method import Method
from ..posteriors.posterior import CHILD, Posterior, SiteDraw
from ..prior import LearnedPrior, Prior
from .frames import MEAN, frame_of, in_backward
from .offloading import brought_in, execution_device, is_offloaded

SITE = "_patchbayes_site"

Eval = Literal["mean", "draw", "error"]

_advancing = threading.Lock()
_REMEMBERED = 64  # backward passes whose draws are known at a time


@dataclass(eq=False)
class Site:
    """A patched module: its name, the posterior, and the modules that share its parameters.

    `components("weight")` are a mixture's components, (K, *shape): initialize or inspect a patched layer through them,
    since `module.weight` is only the value of the current draw, or the mean.
    """

    name: str
    module: nn.Module
    network: "PatchedNetwork"
    parameter_order: tuple[str, ...]
    tied: dict[str, list[tuple[str, nn.Module, str]]]
    layouts: dict[str, torch.memory_format] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of the module's parameters before patching
    taken: dict[str, str] = field(default_factory=dict)  # where the posterior keeps the layer's own Parameter objects
    override: Mapping[str, Tensor] | None = None  # only while compiling; else the frame knows

    @property
    def posterior(self) -> Posterior:
        """The distribution over the module's parameters, a child of the module."""
        found = self.module._modules[CHILD]
        assert isinstance(found, Posterior)
        return found

    @property
    def method(self) -> Method:
        """What the posterior was made from."""
        return self.posterior.method

    def components(self, name: str) -> Tensor:
        """All components of a parameter, with their leading axis; where a posterior has none, an error."""
        stored = getattr(self.posterior, "stored", None)
        if stored is None or name not in self.posterior.names:
            raise PatchbayesError(f'site "{self.name}": {self.method.label} has no components of "{name}".')
        return stored(name)

    def parameters(self) -> dict[str, nn.Parameter]:
        """What the posterior learns and what the layer has kept, by name below the layer."""
        own = {f"{CHILD}.{name}": parameter for name, parameter in self.posterior.named_parameters()}
        return own | {name: p for name, p in self.module._parameters.items() if p is not None}

    def draw_of(self, draw: NetworkDraw) -> SiteDraw | None:
        """The site's part of a draw of the network; None for the mean."""
        if draw.is_mean:
            return None
        posterior = self.posterior
        groups = posterior.groups()
        stop = posterior.offset + (groups.length if groups else 0)
        d = posterior.draw(draw.indices[posterior.offset : stop], draw.key)
        if draw.explicit and "key" in d:
            d["examples"] = torch.arange(0) if draw.examples is None else draw.examples
        return d

    def realized(self, draw: NetworkDraw) -> dict[str, Tensor]:
        """The values of all random parameters under a draw of the network."""
        return self.values_of(self.draw_of(draw))

    def values_of(self, d: SiteDraw | None) -> dict[str, Tensor]:
        """The values of all random parameters under a draw of the site; None: their means. In the layout of the layer's own."""
        if not torch.compiler.is_dynamo_compiling() and is_offloaded(self.posterior):
            with brought_in(self.posterior):
                return self.values_of(d)
        values = self.posterior.mean() if d is None else self.posterior.realize(d)
        laid_out = {n: values[n].contiguous(memory_format=form) for n, form in self.layouts.items() if n in values}
        return {**values, **laid_out} if laid_out else values

    def realize(self, draws: Draws) -> dict[str, Tensor]:
        """The values of all random parameters under S draws of the network, (S, *shape) each."""
        self.network.check(draws)
        posterior = self.posterior
        groups = posterior.groups()
        z = draws.assignments(
            posterior.offset, posterior.offset + (groups.length if groups else 0), self.network.device
        )
        d = posterior.draw(z, draws.keys())
        return torch.vmap(posterior.realize, in_dims=(dict.fromkeys(d, 0),))(d)

    def value(self, name: str) -> Tensor:
        """What `module.<name>` is now: the value of the current draw, or outside of any the mean."""
        if torch.compiler.is_dynamo_compiling():
            override = self.override
            return override[name] if override is not None else self.realized(self.network.compiling)[name]
        frame = frame_of(self.network)
        if frame is None:
            draw = self.network.draw_in_backward() if in_backward() else None
            return self.realized(draw or MEAN)[name]
        return frame.value(self, name)


class PatchedNetwork:
    """The record that a patched root module carries: its sites, their layout, its generator, its prior, its likelihood.

    The generator is a seed and a counter, (2,) int64, kept outside the buffers: DDP would overwrite those from rank 0.
    """

    def __init__(self, seed: int, prior: Prior | LearnedPrior, likelihood: Likelihood) -> None:
        self.sites: list[Site] = []
        self.layout = Layout([])
        self.generator = torch.tensor([seed, 0], dtype=torch.int64)
        self.prior = prior
        self.likelihood = likelihood
        self.calibration: dict[str, Any] | None = None  # what was measured on held-out data when it was calibrated
        self.given: dict[str, str] = {}  # digests of the sites' own tensors that files leave to the ordinary network
        self.eval: Eval = "mean"
        self.share: float | None = None  # of the calls in training that draw; None: all of them (`warm_up_`)
        self._turn = 0.0
        self.same_draws = False  # whether all processes of a distributed training draw alike
        self.compiling = MEAN  # the draw of compiled code, which knows no frames
        self.held: NetworkDraw | None = None  # the draw that a block holds, for compiled code alone
        self.holds: list[NetworkDraw] = []  # those of all blocks that run, the newest last
        self._owners: list[Site] = []
        self._law: Law | None = None
        self._in_backward: dict[int, NetworkDraw] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> "PatchedNetwork":
        import copy

        clone = object.__new__(type(self))
        memo[id(self)] = clone
        clone.__dict__ = self.__getstate__()
        clone.generator = self.generator.clone()
        for name in ("sites", "_owners", "prior", "likelihood"):
            setattr(clone, name, copy.deepcopy(getattr(self, name), memo))
        return clone

    def __getstate__(self) -> dict[str, Any]:
        """What a copy, or another process, gets: all but the draws of calls that are running."""
        return {**self.__dict__, "_in_backward": {}, "held": None, "holds": [], "compiling": MEAN}

    def lay_out(self) -> None:
        """Give every site its place in the draw, after sites were added or removed."""
        spans: list[Span] = []
        networkwide: int | None = None
        position, stream = 0, 16
        unbounded = []
        self._owners = []
        for site in self.sites:
            posterior = site.posterior
            groups = posterior.groups()
            shared = groups is not None and groups.tie == "network"
            posterior.offset = networkwide if shared and networkwide is not None else position
            posterior.stream = stream
            stream += max(16, len(posterior.names))  # a stream of noise for each parameter
            if groups is not None and not (shared and networkwide is not None):
                spans.append(Span("network" if shared else site.name, groups.length, groups.outcomes))
                self._owners.append(site)
                networkwide = position if shared else networkwide
                position += groups.length
            elif shared:
                posterior.share_law_(next(s.posterior for s in self._owners if s.posterior.offset == networkwide))
            if posterior.noise != "none":
                unbounded.append(f"{site.name}: {posterior.noise_source or site.method.label}")
        apart = [site.name for site in self.sites if not site.posterior.joint]
        self.layout, self._law = Layout(spans, unbounded, apart), None
        self.law()

    @property
    def owners(self) -> list[Site]:
        """For each span of the layout the site whose posterior has its law."""
        return self._owners

    def law(self) -> Law:
        """The layout with the probabilities that the posteriors have now."""
        probabilities: tuple[Probabilities, ...] = tuple(site.posterior.probabilities() for site in self._owners)
        if self._law is None or self._law.probabilities != probabilities:
            self._law = Law(self.layout, probabilities)
        return self._law

    def takes_turn(self) -> bool:
        """Whether this call in training draws: `share` of them do, evenly spread; in compiled code all of them or none."""
        if self.share is None:
            return True
        if torch.compiler.is_dynamo_compiling():
            return self.share >= 0.5
        self._turn += self.share
        drawn = self._turn >= 1
        self._turn -= drawn
        return drawn

    def advance(self) -> NetworkDraw:
        """The next draw of the network's own generator."""
        if torch.compiler.is_dynamo_compiling():
            return self._draw()
        with _advancing:
            return self._draw()

    def _draw(self) -> NetworkDraw:
        rank = 0 if self.same_draws else _rank()
        if torch.compiler.is_dynamo_compiling():
            key = fold(fold(self.generator[0], rank), self.generator[1])
            indices = self._assign_compiled(key)
        else:  # numbers: of a small network's step, operations on tensors of one element would be a large part
            seed, counter = self.generator.tolist()
            key = torch.tensor(fold_number(fold_number(seed, rank), counter))
            indices = assign(self.law(), key, 0, self.layout.num_groups, self.device)
        self.generator[1].add_(1)
        return NetworkDraw(key, indices)

    def _assign_compiled(self, key: Tensor) -> Tensor:
        laws = [site.posterior.log_p() for site in self._owners]
        if all(law is None for law in laws):
            assert self._law is not None
            return assign(self._law, key, 0, self.layout.num_groups, self.device)
        return assign_live(self.layout, laws, key, self.device)

    @property
    def device(self) -> torch.device | None:
        for site in self.sites:  # a loop, which torch 2.6 compiles, unlike next(..., None)
            for parameter in site.module.parameters():
                return parameter.device if not parameter.is_meta else execution_device(site.module)
        return None

    def check(self, draws: Draws) -> None:
        """Refuse draws that were made for another network."""
        if draws.layout.fingerprint != self.layout.fingerprint:
            theirs = f"{len(draws.layout.spans)} sites, {draws.layout.num_groups} draw groups"
            ours = f"{len(self.layout.spans)} sites, {self.layout.num_groups} draw groups"
            raise WrongDraws(
                f"the draws were made for another network ({theirs}); this one has {ours}.\n"
                "  do       make them with Draws.sample(model, ...), .stratified or .enumerate for this model."
            )

    def draw_in_backward(self) -> NetworkDraw | None:
        """The draw of the forward pass that the running backward pass belongs to, if it is known."""
        return self._in_backward.get(torch._C._current_graph_task_id())

    def restore(self, draw: NetworkDraw) -> None:
        """Let the running backward pass know the draw of its forward."""
        known = self._in_backward
        known[torch._C._current_graph_task_id()] = draw
        for old in list(known)[:-_REMEMBERED]:
            known.pop(old, None)


def network_of(model: nn.Module) -> PatchedNetwork:
    """The record of the one patched network that `model` is, wraps or contains."""
    check_is_module(model)
    modules = list(model.modules())
    network = record_of(model, modules)
    assert isinstance(network, PatchedNetwork)
    present = {id(module) for module in modules}
    for module in modules:
        if SITE in module.__dict__ and module.__dict__[SITE].network is not network:
            place = next(name for name, other in model.named_modules() if other is module)
            raise_copied(module.__dict__[SITE].name, place)
    gone = [site for site in network.sites if id(site.module) not in present]
    if gone and not torch.compiler.is_dynamo_compiling():
        network.sites = [site for site in network.sites if site not in gone]
        network.lay_out()
        names = ", ".join(f'"{site.name}"' for site in gone[:3]) + (", ..." if len(gone) > 3 else "")
        warnings.warn(
            f"{len(gone)} patched module(s) are no longer in the network and do not count any more: {names}. "
            "Draws and files made before do not fit it now.",
            stacklevel=3,
        )
    return network


def raise_copied(site: str, name: str = "") -> NoReturn:
    """A copy of a single patched layer belongs to no network: no draw reaches it, and nothing would train it."""
    raise PatchbayesError(
        f'A copy of the patched layer "{site}" is in the network'
        + (f' as "{name}"' if name else "")
        + ", where no draw reaches it (PEFT copies the layers of modules_to_save).\n"
        "  do       make the adapters first (get_peft_model), then patch_(model, ...) the result."
    )


def own_network(model: nn.Module) -> PatchedNetwork | None:
    """The record of `model` where it is itself the root of a patched network."""
    return model.__dict__.get(RECORD)


def site_of(module: nn.Module) -> Site | None:
    """The site that a module is, if it is one."""
    return module.__dict__.get(SITE)


def root_of(model: nn.Module) -> tuple[nn.Module, PatchedNetwork]:
    """The root of the patched network that `model` is, wraps or contains, and its record."""
    network = network_of(model)
    return next(module for module in model.modules() if module.__dict__.get(RECORD) is network), network


def _rank() -> int:
    initialized = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if initialized else 0
