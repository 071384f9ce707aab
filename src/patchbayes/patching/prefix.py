"""What a network computes before anything random or learned enters it: found once, and then kept instead of run again.

While the shared parameters rest (a turn of coordinate descent, appendix C.2) or nothing is learned at all, everything before
the first site is a fixed function of an example. Which module calls those are is found by running the network, not by
reading its code: a call is fixed if its output needs no gradient, is the same in two draws under two states of the random
generators, and is the same for an example whatever else is in the batch (unlike that of a batch norm in training mode).
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..draws.draws import Draws
from .drawing import hold
from .network import PatchedNetwork, network_of, root_of, site_of

#: How far rows of two batches of different sizes may lie apart, relative to the largest value: kernels round differently.
_ROUNDING = 1e-4


@dataclass(frozen=True)
class _Call:
    """A module call of the forward pass: the n-th of that module, with an output (B, *shape).

    needed   whether something that is not kept reads the output.
    """

    module: nn.Module
    number: int
    shape: tuple[int, ...] = ()
    needed: bool = True


class _Enough(Exception):
    """The last needed output is there; the rest of the forward pass need not run."""


class FixedPrefix:
    """The fixed calls of a network's forward pass.

    `values(inputs)` are the outputs that the rest of the network reads, (B, ...) each; within `serving(values)` the network
    takes them instead of running the calls. They stay right as long as parameters and modes of the prefix do.
    """

    def __init__(self, root: nn.Module, calls: Sequence[_Call], lengths: dict[nn.Module, int], example: Tensor) -> None:
        self._root, self._calls, self._lengths = root, tuple(calls), lengths
        self.bytes_per_example = sum(v[0].numel() * v.element_size() for v in self.values(example[:1]))

    @property
    def modules(self) -> list[nn.Module]:
        """The modules that do not run while their outputs are served."""
        return [call.module for call in self._calls]

    @torch.no_grad()
    def values(self, inputs: Tensor) -> list[Tensor]:
        """What the rest of the network reads, for these inputs."""
        needed = {(call.module, call.number): n for n, call in enumerate(c for c in self._calls if c.needed)}
        found: dict[int, Tensor] = {}

        def keep(module: nn.Module, number: int, output: Tensor) -> Tensor:
            place = needed.get((module, number))
            if place is not None:
                found[place] = output.clone()
                if len(found) == len(needed):
                    raise _Enough
            return output

        with _replaced(self.modules, self._lengths, lambda m, n, run: keep(m, n, run())):
            with contextlib.suppress(_Enough), _drawn(self._root, 0):
                self._root(inputs)
        return [found[n] for n in range(len(needed))]

    @contextlib.contextmanager
    def serving(self, values: Sequence[Tensor]) -> Iterator[None]:
        """In the block, the network's forward takes these values (B, ...) instead of running the prefix on its inputs."""
        kept, zero = iter(values), values[0].new_zeros(())
        served = {
            (c.module, c.number): next(kept) if c.needed else zero.expand(len(values[0]), *c.shape) for c in self._calls
        }

        def serve(module: nn.Module, number: int, run: Callable[[], Any]) -> Any:
            return served[module, number].clone() if (module, number) in served else run()  # for work in place

        with _replaced(self.modules, self._lengths, serve):
            yield


def find_prefix(model: nn.Module, inputs: Tensor) -> FixedPrefix | None:
    """The fixed prefix of a patched network as it stands (modes, frozen parameters), or None where nothing is fixed.

    inputs (B, ...): an example batch of at least two. Buffers, gradients and random states stay as they are.
    """
    root, _ = root_of(model)
    if len(inputs) < 2:
        return None
    with untouched_buffers(root):
        first, second = (_recorded(root, inputs, seed) for seed in (0, 1))
        if [(c.module, c.number) for c in first.calls] != [(c.module, c.number) for c in second.calls]:
            return None
        part = _recorded(root, inputs[: -(-len(inputs) // 2)], 0)
        fixed = _outermost(first, second, part)
        if not fixed:
            return None
        lengths: dict[nn.Module, int] = {}
        for call in first.calls:
            lengths[call.module] = lengths.get(call.module, 0) + 1
        calls = _with_needs(root, inputs, [first.calls[n] for n in fixed], [first.outputs[n] for n in fixed], lengths)
        if not any(call.needed for call in calls):
            return None
        prefix = FixedPrefix(root, calls, lengths, inputs)
        with torch.no_grad(), prefix.serving(prefix.values(inputs)), _drawn(root, 0):
            again = _tensors(root(inputs))
    same = len(again) == len(first.results) and all(map(torch.equal, again, first.results))
    return prefix if same else None


@contextlib.contextmanager
def sites_alone_learn(network: PatchedNetwork, model: nn.Module) -> Iterator[None]:
    """In the block, gradients tell what depends on a site: its parameters have them, and no others."""
    inside = {id(parameter) for site in network.sites for parameter in site.parameters().values()}
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        for parameter, _ in flags:
            parameter.requires_grad_(id(parameter) in inside and parameter.is_floating_point())
        yield
    finally:
        for parameter, learned in flags:
            parameter.requires_grad_(learned)


@dataclass
class _Record:
    """What a forward pass did: its module calls in the order of their ends, their outputs, the calls that ran inside which."""

    calls: list[_Call]
    outputs: list[Any]
    parents: list[int | None]
    results: list[Tensor]


def _recorded(root: nn.Module, inputs: Tensor, seed: int) -> _Record:
    """Run the network once, in a draw and under a random state of its own for each seed."""
    record = _Record([], [], [], [])
    open_calls: list[tuple[nn.Module, int, list[int]]] = []
    counts: dict[nn.Module, int] = {}

    def enter(module: nn.Module, _args: Any) -> None:
        number = counts.get(module, 0)
        counts[module] = number + 1
        open_calls.append((module, number, []))

    def leave(module: nn.Module, _args: Any, output: Any) -> None:
        _, number, inside = open_calls.pop()
        place = len(record.calls)
        record.calls.append(_Call(module, number, tuple(output.shape[1:]) if isinstance(output, Tensor) else ()))
        usable = isinstance(output, Tensor) and output.is_floating_point() and not output.requires_grad
        record.outputs.append(output.detach().clone() if usable else None)
        record.parents.append(None)
        for child in inside:
            record.parents[child] = place
        if open_calls:
            open_calls[-1][2].append(place)

    layers = [module for module in root.modules() if module is not root and not _has_site(module)]
    handles = [m.register_forward_pre_hook(enter) for m in layers] + [m.register_forward_hook(leave) for m in layers]
    try:
        with torch.enable_grad(), _drawn(root, seed):
            record.results = _tensors(root(inputs))
    finally:
        for handle in handles:
            handle.remove()
    return record


def _has_site(module: nn.Module) -> bool:
    return any(site_of(inner) is not None for inner in module.modules())


def _outermost(first: _Record, second: _Record, part: _Record) -> list[int]:
    """The numbers of the fixed calls that do not run inside another fixed call."""
    if len(part.calls) != len(first.calls):
        return []
    fixed = {
        n
        for n, (one, other, rows) in enumerate(zip(first.outputs, second.outputs, part.outputs, strict=True))
        if one is not None and other is not None and rows is not None and _is_fixed(one, other, rows)
    }

    def inside_fixed(n: int) -> bool:
        parent = first.parents[n]
        return parent is not None and (parent in fixed or inside_fixed(parent))

    return [n for n in sorted(fixed) if not inside_fixed(n)]


def _is_fixed(one: Tensor, other: Tensor, rows: Tensor) -> bool:
    if not torch.equal(one, other) or one.dim() < 1 or rows.shape[1:] != one.shape[1:] or len(rows) >= len(one):
        return False
    scale = float(one.abs().max()) or 1.0
    return torch.allclose(one[: len(rows)], rows, rtol=0, atol=_ROUNDING * scale)


def _with_needs(
    root: nn.Module, inputs: Tensor, calls: list[_Call], outputs: list[Tensor], lengths: dict[nn.Module, int]
) -> list[_Call]:
    """Which of the fixed outputs something else reads: those that the result has a gradient with respect to."""
    leaves = {(c.module, c.number): value.clone().requires_grad_() for c, value in zip(calls, outputs, strict=True)}

    def serve(module: nn.Module, number: int, run: Callable[[], Any]) -> Any:
        leaf = leaves.get((module, number))
        return run() if leaf is None else leaf.clone()

    with torch.enable_grad(), _replaced([c.module for c in calls], lengths, serve), _drawn(root, 0):
        results = [t for t in _tensors(root(inputs), keep_graph=True) if t.requires_grad]
    if not results:
        return calls
    with torch.enable_grad():
        total = torch.stack([t.double().sum() for t in results]).sum()
        gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    return [replace(call, needed=g is not None) for call, g in zip(calls, gradients, strict=True)]


def _tensors(output: Any, keep_graph: bool = False) -> list[Tensor]:
    found = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point()]
    return found if keep_graph else [t.detach() for t in found]


@contextlib.contextmanager
def _drawn(root: nn.Module, number: int) -> Iterator[None]:
    """The draw of that number for the block, and a random state of its own."""
    network = network_of(root)
    draw = Draws.sample(root, number + 1).network_draw(number, network.device)
    devices = sorted({p.device for p in root.parameters() if p.device.type == "cuda"}, key=str)
    with torch.random.fork_rng(devices=devices), hold(network, draw):
        torch.manual_seed(number)
        yield


@contextlib.contextmanager
def _replaced(
    modules: Sequence[nn.Module],
    lengths: dict[nn.Module, int],
    through: Callable[[nn.Module, int, Callable[[], Any]], Any],
) -> Iterator[None]:
    """In the block, calls of the modules go `through(module, number, run)`; run() is the module's own forward.

    Calls are numbered within a forward pass of the network; `lengths`: how many of a module one pass has.
    """
    counts: dict[nn.Module, int] = {}

    def going(module: nn.Module, own: Any) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            number = counts.get(module, 0)
            counts[module] = (number + 1) % lengths[module]
            return through(module, number, lambda: own(*args, **kwargs))

        return forward

    before = {module: module.__dict__.get("forward") for module in modules}
    try:
        for module in before:
            module.__dict__["forward"] = going(module, module.forward)
        yield
    finally:
        for module, own in before.items():
            if own is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = own


@contextlib.contextmanager
def untouched_buffers(root: nn.Module) -> Iterator[None]:
    """After the block, buffers (running statistics) are what they were."""
    contents = [(buffer, buffer.clone()) for buffer in root.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, content in contents:
                buffer.copy_(content)
