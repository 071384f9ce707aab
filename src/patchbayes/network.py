"""A patched network at work: what is stored on its modules, and how one draw reaches all of its sites.

Everything lives on the modules themselves (attributes and module-level hook functions, no closures), so that a deepcopy is
a network of its own. The root's class is replaced by a subclass whose `forward` draws first: unlike a hook, that also holds
for `model.forward(x)` and `torch.compile(model.forward)`.
"""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from .draws import Draws, network_of
from .errors import PatchbayesError, WrongDraws
from .layout import Drawn, Layout, Span
from .posteriors.posterior import Method, Posterior
from .prior import LearnedPrior, Prior
from .randomness import fold
from .schemes import assign

GENERATOR_KEY = "patchbayes_generator"


@dataclass(eq=False)
class Site:
    """A patched module: its name, the method, the posterior, and the modules that share its parameters.

    `components("weight")` are the stored components, (K, *shape): initialize or inspect a patched layer through them,
    since `module.weight` is only the value of the current draw.
    """

    name: str
    module: nn.Module
    method: Method
    posterior: Posterior
    network: "Network"
    parameter_order: tuple[str, ...]
    tied: dict[str, list[tuple[str, nn.Module, str]]]
    layouts: dict[str, torch.memory_format] = field(default_factory=dict)

    def components(self, name: str) -> Tensor:
        """The stored tensor of a parameter, with its leading component axis."""
        return self.posterior.stored(name)


class Network:
    """The record that a patched root module carries: its sites, their layout, its generator, the current draw.

    The generator is a seed and a counter, (2,) int64, kept outside the buffers: DDP would overwrite those from rank 0.
    """

    def __init__(self, seed: int, prior: Prior | LearnedPrior) -> None:
        self.sites: list[Site] = []
        self.layout = Layout([])
        self.generator = torch.tensor([seed, 0], dtype=torch.int64)
        self.prior = prior
        self.current = Drawn(torch.tensor(0), torch.zeros(0, dtype=torch.int64))
        self.held: Drawn | None = None
        self.active = 0
        self.restored = False
        self.warned = False

    def lay_out(self) -> None:
        """Give every site its place in the draw, after sites were added or removed."""
        spans: list[Span] = []
        starts: dict[str, int] = {}
        position, stream = 0, 16
        unbounded = []
        for site in self.sites:
            shared = site.posterior.networkwide
            own = [Span(site.name, s.length, s.outcomes, s.probabilities) for s in site.posterior.spans]
            if shared is not None:
                own = [] if "network" in starts else [shared]
            site.posterior.bind(starts["network"] if shared and "network" in starts else position, stream)
            stream += max(16, len(site.posterior.names))  # a stream of noise for each parameter
            if shared is not None:
                starts.setdefault("network", position)
            spans += own
            position += sum(span.length for span in own)
            if site.posterior.unbounded:
                unbounded.append(f"{site.name}: {site.posterior.unbounded}")
        self.layout = Layout(spans, unbounded)
        self.current = self._draw(self.generator.clone())

    def advance(self) -> None:
        """Make the next draw of the network's own generator the current one."""
        self.current = self._draw(self.generator)
        self.generator[1] += 1
        self.restored = False

    def _draw(self, generator: Tensor) -> Drawn:
        key = fold(fold(generator[0], _rank()), generator[1])
        return Drawn(key, assign(self.layout, key, 0, self.layout.num_groups, self.device))

    @property
    def device(self) -> torch.device | None:
        return next((p.device for site in self.sites for p in site.module.parameters()), None)

    def check(self, draws: Draws) -> None:
        """Refuse draws that were made for another network."""
        if draws.layout.fingerprint != self.layout.fingerprint:
            theirs = f"{len(draws.layout.spans)} sites, {draws.layout.num_groups} draw groups"
            ours = f"{len(self.layout.spans)} sites, {self.layout.num_groups} draw groups"
            raise WrongDraws(
                f"the draws were made for another network ({theirs}); this one has {ours}.\n"
                "  do       make them with Draws.sample(model, ...), .stratify or .enumerate for this model."
            )


@contextlib.contextmanager
def drawn(model: nn.Module, draws: Draws | None = None) -> Iterator[None]:
    """Hold one draw of the network for all calls in the block, whichever methods they go through.

    For calls that do not start at the patched network's `forward` (a model's `forward_features`, one of its parts) or that
    make several forward passes of one network (`generate`). Without `draws` the network's generator makes a fresh draw;
    with `draws`, that one (a `Draws` of length 1). Where such calls recompute activations (checkpointing), call backward in
    the block too.
    """
    network = network_of(model)
    if draws is None:
        network.advance()
        held = network.current
    else:
        network.check(draws)
        if len(draws) != 1:
            raise PatchbayesError(f"drawn: one draw is held at a time, {len(draws)} were given; pass draws[i].")
        held = draws.drawn(0, network.device)
    with hold(network, held):
        yield


@contextlib.contextmanager
def hold(network: Network, held: Drawn) -> Iterator[None]:
    before = network.held, network.current
    network.held = network.current = held
    try:
        yield
    finally:
        network.held, network.current = before
        network.restored = False


def forward_draws(model: nn.Module, inputs: Any, draws: int | Draws = 1) -> Tensor:
    """The outputs of S draws of the network on one batch, with gradients: (S, *output.shape).

    With a number, S fresh draws of the network's own generator; with `Draws`, those. For training with S > 1, up to
    `Draws.enumerate(model)`, which marginalizes the assignments exactly (appendix B.4). tuple and dict inputs are spread.
    """
    from .selection import call

    network = network_of(model)
    outputs = []
    if isinstance(draws, Draws):
        network.check(draws)
    elif isinstance(draws, bool) or not isinstance(draws, int) or draws < 1:
        raise PatchbayesError(f"forward_draws(draws={draws!r}): give a number of draws of at least 1, or Draws.")
    for number in range(draws if isinstance(draws, int) else len(draws)):
        with drawn(model, None if isinstance(draws, int) else draws[number]):
            outputs.append(call(model, inputs))
    if not all(isinstance(output, Tensor) for output in outputs):
        raise PatchbayesError(
            f"forward_draws: the network returns a {type(outputs[0]).__name__}; a tensor is required."
        )
    return torch.stack(outputs)


def install_root_(root: nn.Module, network: Network) -> None:
    """Make `root` draw before every forward, and carry its generator in its state dict."""
    cls = type(root)

    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _with_draw(self, cls.forward, args, kwargs)

    namespace = {
        "forward": forward,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
    }
    if root._parameters:  # the root may be a site itself, whose hooks run before its forward and need the draw

        def called(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return _with_draw(self, cls.__call__, args, kwargs)

        namespace["__call__"] = called
    root.__class__ = type(cls.__name__, (cls,), namespace)
    root.__dict__["_patchbayes"] = network
    root.__dict__["_patchbayes_handles"] = [
        root.register_state_dict_post_hook(_save_generator),
        root.register_load_state_dict_pre_hook(_load_generator),
    ]


def remove_root_(root: nn.Module) -> None:
    for handle in root.__dict__.pop("_patchbayes_handles"):
        handle.remove()
    del root.__dict__["_patchbayes"]
    root.__class__ = type(root).__bases__[0]


def _with_draw(root: nn.Module, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    network: Network = root.__dict__["_patchbayes"]
    if network.active:
        return function(root, *args, **kwargs)
    if not torch.compiler.is_compiling() and in_backward():
        require_restored(network, "the whole patched network")
    elif network.held is not None:
        network.current = network.held
    else:
        network.advance()
        if not torch.compiler.is_compiling() and not root.training:
            warn_single_draw(network)
    if torch.compiler.is_compiling():
        return function(root, *args, **kwargs)
    network.active += 1
    try:
        outputs = function(root, *args, **kwargs)
    finally:
        network.active -= 1
    if torch.is_grad_enabled():
        _remember_for_backward(network, outputs)
    return outputs


def warn_single_draw(network: Network) -> None:
    if not network.warned:
        network.warned = True
        warnings.warn(
            "A patched network was called in eval mode: the output is that of one random draw, not the prediction. "
            "Average draws with patchbayes.predict(model, inputs, draws=...), or wrap the network once in "
            "patchbayes.Predictor(model, draws=...). (Said once for each network.)",
            stacklevel=4,
        )


def _remember_for_backward(network: Network, outputs: Any) -> None:
    """Restore this forward's draw when backward reaches its outputs: activation checkpointing then recomputes with it."""
    current = network.current
    leaves = tree_leaves(outputs)
    leaves += [inner for leaf in leaves if hasattr(leaf, "__dict__") for inner in tree_leaves(dict(vars(leaf)))]
    for output in leaves:
        if isinstance(output, Tensor) and output.grad_fn is not None:
            output.register_hook(functools.partial(_restore, network, current))


def _restore(network: Network, current: Drawn, _gradient: Tensor) -> None:
    network.current = current
    network.restored = True


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def require_restored(network: Network, what: str) -> None:
    """In a backward pass a module runs again to recompute activations: it must see the draw of its forward."""
    if network.restored:
        return
    if network.held is None:
        raise PatchbayesError(
            f"Activation checkpointing runs {what} again in the backward pass, and the draw of its forward is not known.\n"
            "  do       checkpoint(..., use_reentrant=False) around a call of the patched network; or call backward() too "
            "inside the block of `with patchbayes.drawn(model):`."
        )
    network.current = network.held


def _save_generator(module: nn.Module, state_dict: dict[str, Any], prefix: str, _metadata: Any) -> None:
    state_dict[prefix + GENERATOR_KEY] = module.__dict__["_patchbayes"].generator.clone()


def _load_generator(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    state = state_dict.pop(prefix + GENERATOR_KEY, None)
    if state is not None:
        module.__dict__["_patchbayes"].generator.copy_(state)


def _rank() -> int:
    initialized = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if initialized else 0
