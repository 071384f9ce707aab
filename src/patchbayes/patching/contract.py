"""check_patchable: run the contract of patching on a user's own network, and say what holds."""

import copy
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ..draws.draws import Draws
from ..posteriors import ECMP, Method
from .checkpoint import load_, save
from .drawing import hold, use_draw
from .network import network_of
from .patch import patch_, patched_sites, unpatch_
from .selection import Sites, call, evaluating


@dataclass(frozen=True)
class Check:
    """One promise, whether it holds, and what was seen."""

    promise: str
    holds: bool
    seen: str


@dataclass(frozen=True)
class Contract:
    """The result of `check_patchable`. Print it for a table; `bool(contract)` tells whether all promises hold."""

    network: str
    checks: tuple[Check, ...]

    def __bool__(self) -> bool:
        return all(check.holds for check in self.checks)

    def __str__(self) -> str:
        held = sum(check.holds for check in self.checks)
        lines = [f"{self.network}: {held} of {len(self.checks)} promises hold"]
        lines += [
            f"  {'ok  ' if c.holds else 'FAIL'}  {c.promise}" + (f"  ({c.seen})" if c.seen else "") for c in self.checks
        ]
        return "\n".join(lines)


def check_patchable(
    model: nn.Module, example_input: Any, method: Method | None = None, sites: Sites = "norm+output"
) -> Contract:
    """Try everything that patching promises on copies of `model`, which stays untouched.

    example_input   one batch of at least two examples; a tuple is spread over the arguments, a mapping over the keywords.
    """
    method = method or ECMP()
    checks: list[Check] = []

    def promise(text: str, test: Callable[[], tuple[bool, str]]) -> bool:
        try:
            holds, seen = test()
        except Exception as error:
            holds, seen = False, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        checks.append(Check(text, holds, seen))
        return holds

    tests = _Tests(model, example_input, method, sites)
    with warnings.catch_warnings(), torch.random.fork_rng(), _unfused_encoders():
        warnings.simplefilter("ignore")
        runs = promise("the network runs on the example, and twice alike in eval mode", tests.deterministic)
        if runs and promise("it can be patched", tests.patchable):
            promise("copies without jitter keep the function bit for bit", tests.keeps_function)
            promise("unpatching restores weights and outputs bit for bit", tests.restores)
            promise("different draws give different outputs", tests.draws_matter)
            promise("a training step reaches every site", tests.gradients)
            promise("state dicts go round", tests.state_dict)
            promise("a deepcopy draws for itself and alike", tests.copies)
            promise("eval mode is the mean network, deterministically", tests.mean)
            promise("a saved patch loads onto the ordinary network", tests.saves)
            promise("prediction does not depend on the batch an input came in", tests.batches)
            promise("prediction leaves modes and buffers alone", tests.undisturbed)
    return Contract(type(model).__name__, tuple(checks))


@contextmanager
def _unfused_encoders() -> Iterator[None]:
    """Without the fused kernel of `nn.TransformerEncoderLayer`: it rounds in another order than the layers it replaces,

    and a patched encoder never uses it, so that the two could only be compared to rounding.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


class _Tests:
    def __init__(self, model: nn.Module, example_input: Any, method: Method, sites: Sites) -> None:
        self.model, self.input, self.method, self.sites = model, example_input, method, sites

    def patched(self, method: Method | None = None) -> nn.Module:
        clone = copy.deepcopy(self.model)
        patch_(clone, method or self.method, self.sites, example_input=self.input)
        return clone

    def outputs(self, model: nn.Module, seed: int = 0) -> list[Tensor]:
        """All output tensors of one draw in eval mode."""
        draws = Draws.sample(model, 1, torch.Generator().manual_seed(seed))
        with evaluating(model), use_draw(model, draws):
            return _tensors(call(model, self.input))

    def deterministic(self) -> tuple[bool, str]:
        with torch.no_grad():
            clone = copy.deepcopy(self.model).eval()
            first, second = _tensors(call(clone, self.input)), _tensors(call(clone, self.input))
        return _equal(first, second) and bool(first), f"{len(first)} output tensors"

    def patchable(self) -> tuple[bool, str]:
        clone = copy.deepcopy(self.model)
        report = patch_(clone, self.method, self.sites, example_input=self.input)
        return True, f"{len(report.sites)} sites, {report.overhead_percent:+.3g} % parameters"

    def keeps_function(self) -> tuple[bool, str]:
        if self.method.random_at_start:
            return True, "this method is random from the start"
        with torch.no_grad():
            plain = _tensors(call(copy.deepcopy(self.model).eval(), self.input))
        return _equal(plain, self.outputs(self.patched(self.method.without_spread()))), ""

    def restores(self) -> tuple[bool, str]:
        clone = self.patched()
        if not self._starts_with_the_network(clone):
            clone = self.patched(self.method.without_spread())
        numbered = all(site.posterior.num_components for site in patched_sites(clone).values())
        if self.method.random_at_start and not numbered:
            return True, "not tried: this method has no component that is the network itself"
        self.outputs(clone)
        unpatch_(clone, keep=0 if numbered else "mean")
        before, after = self.model.state_dict(), clone.state_dict()
        same = list(before) == list(after) and all(torch.equal(before[key], after[key]) for key in before)
        with torch.no_grad():
            plain, again = (
                _tensors(call(m, self.input)) for m in (copy.deepcopy(self.model).eval(), copy.deepcopy(clone).eval())
            )
        return same and _equal(plain, again), ""

    def _starts_with_the_network(self, clone: nn.Module) -> bool:
        """Whether component 0 of every site is the value that the layer had."""
        plain = dict(self.model.named_parameters(remove_duplicate=False))
        for site in patched_sites(clone).values():
            if not site.posterior.num_components:
                return False
            prefix = f"{site.name}." if site.name else ""
            first = site.posterior.component(0)
            if not all(torch.equal(first[name], plain[prefix + name]) for name in site.posterior.names):
                return False
        return True

    def draws_matter(self) -> tuple[bool, str]:
        clone = self.patched()
        posteriors = [site.posterior for site in patched_sites(clone).values()]
        if all(q.noise == "none" and q.groups() is None for q in posteriors):
            return True, "not tried: a single component without noise"
        generator = torch.Generator().manual_seed(0)
        for parameter in (p for posterior in posteriors for p in posterior.parameters()):  # which may start alike
            noise = torch.randn(parameter.shape, generator=generator).to(parameter)
            parameter.data += 0.1 * (parameter.data.square().mean().sqrt() + 0.1) * noise
        first = self.outputs(clone)
        return any(not _equal(first, self.outputs(clone, seed)) for seed in range(1, 64)), ""

    def gradients(self) -> tuple[bool, str]:
        clone = self.patched().train()
        with torch.random.fork_rng():
            for _ in range(3):
                outputs = [t for t in _tensors(call(clone, self.input)) if t.requires_grad]
                torch.stack([t.float().square().mean() for t in outputs]).sum().backward()
        without = []
        for name, site in patched_sites(clone).items():
            learned = [p for p in site.parameters().values() if p.requires_grad]
            if learned and all(p.grad is None for p in learned):
                without.append(name)
        return not without, f"no gradient at {', '.join(without[:3])}" if without else ""

    def state_dict(self) -> tuple[bool, str]:
        first, second = self.patched(), self.patched()
        for parameter in first.parameters():
            parameter.data.mul_(1.01)
        second.load_state_dict(first.state_dict())
        return _equal(self.outputs(first), self.outputs(second)), ""

    def copies(self) -> tuple[bool, str]:
        first = self.patched().train()
        second = copy.deepcopy(first)
        with torch.no_grad(), torch.random.fork_rng():
            outputs = []
            for model in (first, second, second):
                torch.manual_seed(0)  # the network's own dropout layers
                outputs.append(_tensors(call(model, self.input)))
            a, b, _ = outputs
        counts = [int(network_of(m).generator[1]) for m in (first, second)]
        return _equal(a, b) and counts == [1, 2], ""

    def mean(self) -> tuple[bool, str]:
        clone = self.patched().eval()
        with torch.no_grad():
            first, second = _tensors(call(clone, self.input)), _tensors(call(clone, self.input))
            unpatch_(clone, keep="mean")
            collapsed = _tensors(call(clone, self.input))
        return _equal(first, second) and _equal(first, collapsed), ""

    def saves(self) -> tuple[bool, str]:
        first, second = self.patched(), copy.deepcopy(self.model)
        for site in patched_sites(first).values():
            for parameter in site.posterior.parameters():
                parameter.data.mul_(1.01)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "patch.safetensors"
            save(first, path)
            size = path.stat().st_size
            load_(second, path)
        return _equal(self.outputs(first), self.outputs(second)), f"{size:,} bytes"

    def batches(self) -> tuple[bool, str]:
        clone = self.patched()
        network = network_of(clone)
        draws = Draws.sample(clone, 1)
        leaves = [leaf for leaf in tree_leaves(self.input) if isinstance(leaf, Tensor) and leaf.dim()]
        size = leaves[0].shape[0]
        if size < 2 or any(leaf.shape[0] != size for leaf in leaves):
            return True, "not tried: one example, or no common batch axis"
        half = size // 2
        ids, device = torch.arange(size), network.device

        def output(inputs: Any, which: Tensor) -> Tensor:
            with evaluating(clone), hold(network, draws.network_draw(0, device, which)):
                return _tensors(call(clone, inputs))[0]

        whole = output(self.input, ids)
        parts = []
        for piece in (slice(0, half), slice(half, size)):
            some = tree_map(lambda t, piece=piece: t[piece] if isinstance(t, Tensor) and t.dim() else t, self.input)
            parts.append(output(some, ids[piece]))
        joined = torch.cat(parts)
        if joined.shape != whole.shape:
            return True, "not tried: the output has no batch axis in front"
        gap = float((joined - whole).abs().max() / whole.abs().max().clamp_min(1e-12))
        return gap < (
            5e-2 if whole.dtype in (torch.bfloat16, torch.float16) else 1e-4
        ), f"largest relative gap {gap:.1e}"

    def undisturbed(self) -> tuple[bool, str]:
        clone = self.patched().train()
        before = {key: value.clone() for key, value in clone.state_dict().items()}
        self.outputs(clone)
        after = clone.state_dict()
        return all(torch.equal(before[key], after[key]) for key in before) and clone.training, ""


def _tensors(outputs: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
