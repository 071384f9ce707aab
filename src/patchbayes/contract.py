"""check_patchable: run the contract of patching on a user's own network, and say what holds."""

import copy
import dataclasses
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from .checkpoint import load_, save
from .draws import Draws, network_of
from .network import drawn
from .patching import patch_, patched_sites, unpatch_
from .posteriors import ECMP, Method
from .posteriors.mixture import Mixture
from .prediction.loop import loop, undisturbed
from .selection import Sites, call


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
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        runs = promise("the network runs on the example, and twice alike in eval mode", tests.deterministic)
        if runs and promise("it can be patched", tests.patchable):
            promise("copies without jitter keep the function bit for bit", tests.keeps_function)
            promise("unpatching restores weights and outputs bit for bit", tests.restores)
            promise("different draws give different outputs", tests.draws_matter)
            promise("a training step reaches every site", tests.gradients)
            promise("state dicts go round", tests.state_dict)
            promise("a deepcopy draws for itself and alike", tests.copies)
            promise("a saved patch loads onto the ordinary network", tests.saves)
            promise("prediction does not depend on the batch an input came in", tests.batches)
            promise("prediction leaves modes and buffers alone", tests.undisturbed)
    return Contract(type(model).__name__, tuple(checks))


class _Tests:
    def __init__(self, model: nn.Module, example_input: Any, method: Method, sites: Sites) -> None:
        self.model, self.input, self.method, self.sites = model, example_input, method, sites

    def patched(self, method: Method | None = None) -> nn.Module:
        clone = copy.deepcopy(self.model)
        patch_(clone, method or self.method, self.sites, example_input=self.input)
        return clone

    def outputs(self, model: nn.Module, seed: int = 0) -> list[Tensor]:
        """All output tensors of one draw in eval mode."""
        network = network_of(model)
        draws = Draws.sample(model, 1, torch.Generator().manual_seed(seed))
        with undisturbed(model, network), drawn(model, draws):
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
        if not isinstance(self.method, Mixture) or self.method.zero or self.method.sigma:
            return True, "this method is random from the start"
        fields = {**vars(self.method), "init": "copies", "jitter": 0.0, "norm_scale": None}
        with torch.no_grad():
            plain = _tensors(call(copy.deepcopy(self.model).eval(), self.input))
        return _equal(plain, self.outputs(self.patched(Mixture(**fields)))), ""

    def restores(self) -> tuple[bool, str]:
        clone = self.patched()
        self.outputs(clone)
        unpatch_(clone)
        before, after = self.model.state_dict(), clone.state_dict()
        same = list(before) == list(after) and all(torch.equal(before[key], after[key]) for key in before)
        with torch.no_grad():
            plain, again = (
                _tensors(call(m, self.input)) for m in (copy.deepcopy(self.model).eval(), copy.deepcopy(clone).eval())
            )
        same = same and _equal(plain, again)
        changed = isinstance(self.method, Mixture) and self.method.norm_scale is not None
        return same or changed, "started from another norm_scale" if changed else ""

    def draws_matter(self) -> tuple[bool, str]:
        method = self.method
        if isinstance(method, Mixture):
            if method.outcomes == 1 and not method.sigma:
                return True, "not tried: a single component without noise"
            method = dataclasses.replace(method, init="copies", jitter=method.jitter or 0.1)  # components that differ
        clone = self.patched(method)
        first = self.outputs(clone)
        return any(not _equal(first, self.outputs(clone, seed)) for seed in range(1, 64)), ""

    def gradients(self) -> tuple[bool, str]:
        clone = self.patched().train()
        with torch.random.fork_rng():
            for _ in range(3):
                outputs = [t for t in _tensors(call(clone, self.input)) if t.requires_grad]
                torch.stack([t.float().square().mean() for t in outputs]).sum().backward()
        without = [
            name
            for name, site in patched_sites(clone).items()
            if all(site.components(p).grad is None for p in (*site.posterior.names, *site.posterior.fixed_names))
            and any(site.components(p).requires_grad for p in (*site.posterior.names, *site.posterior.fixed_names))
        ]
        return not without, f"no gradient at {', '.join(without[:3])}" if without else ""

    def state_dict(self) -> tuple[bool, str]:
        first, second = self.patched(), self.patched()
        for parameter in first.parameters():
            parameter.data.mul_(1.01)
        second.load_state_dict(first.state_dict())
        return _equal(self.outputs(first), self.outputs(second)), ""

    def copies(self) -> tuple[bool, str]:
        first = self.patched().eval()
        second = copy.deepcopy(first)
        with torch.no_grad():
            a, b, _ = (_tensors(call(m, self.input)) for m in (first, second, second))
        counts = [int(network_of(m).generator[1]) for m in (first, second)]
        return _equal(a, b) and counts == [1, 2], ""

    def saves(self) -> tuple[bool, str]:
        first, second = self.patched(), copy.deepcopy(self.model)
        for site in patched_sites(first).values():
            for name in site.posterior.names:
                site.components(name).data.mul_(1.01)
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
        with undisturbed(clone, network):
            ids = torch.arange(size)
            ((_, (whole,)),) = loop(clone, network, self.input, draws, ids, lambda y: _tensors(y)[0])
            parts = []
            for piece in (slice(0, half), slice(half, size)):
                some = tree_map(lambda t, piece=piece: t[piece] if isinstance(t, Tensor) and t.dim() else t, self.input)
                parts += [v[0] for _, v in loop(clone, network, some, draws, ids[piece], lambda y: _tensors(y)[0])]
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
