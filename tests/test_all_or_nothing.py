"""A patch_ or load_ that fails leaves the network as it was, to the bit: values, objects, classes, hooks, outputs."""

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import patchbayes as pb
from patchbayes.errors import CheckpointMismatch, NothingToPatch, PatchbayesError
from patchbayes.patching.network import network_of
from patchbayes.posteriors import KL, Method, Posterior
from saved_networks import description_of, rewritten
from zoo import ZOO, TiedLanguageModel, assert_same, snapshot

HUGE = 10**12
X = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))


def network() -> nn.Sequential:
    """Three sites, a frozen layer, a user's hook, gradients, and a mode of its own for one layer."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.LayerNorm(4), nn.Linear(4, 2))
    model(X).square().sum().backward()
    model[3].requires_grad_(False)
    model[1].eval()
    model[0].register_forward_hook(lambda *_: None)
    return model


def objects(model: nn.Module) -> dict[str, Any]:
    """Which objects make up the network: modules, parameters, their storage and gradients, buffers, hooks."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {
        "modules": [(name, id(module)) for name, module in model.named_modules(remove_duplicate=False)],
        "parameters": [(name, id(p), p.data_ptr()) for name, p in parameters.items()],
        "gradients": [(name, id(p.grad)) for name, p in parameters.items()],
        "buffers": [(name, id(buffer)) for name, buffer in model.named_buffers(remove_duplicate=False)],
        "hooks": [
            (name, key, list(value))
            for name, module in model.named_modules()
            for key, value in vars(module).items()
            if "hooks" in key and isinstance(value, dict)
        ],
    }


def outputs(model: nn.Module) -> list[Tensor]:
    """In both modes, from a copy, so that asking changes nothing."""
    found = []
    for training in (True, False):
        with torch.no_grad():
            found.append(copy.deepcopy(model).train(training)(X))
    return found


class Untouched:
    """Everything about a network now, to be compared with everything about it later."""

    def __init__(self, model: nn.Module, run: bool = True) -> None:
        self.model, self.run = model, run
        self.before, self.objects = snapshot(model), objects(model)
        self.outputs = outputs(model) if run else []
        self.random = torch.get_rng_state()
        self.patched = pb.is_patched(model)
        if self.patched:
            record = network_of(model)
            self.record = dict(record.__dict__), list(record.sites), record.generator.clone()
            self.places = [(s.posterior.offset, s.posterior.stream, s.method) for s in record.sites]
            self.draws = pb.Draws.sample(model, 3)

    def check(self) -> None:
        assert_same(self.before, self.model)
        assert objects(self.model) == self.objects
        assert torch.equal(torch.get_rng_state(), self.random)
        assert pb.is_patched(self.model) is self.patched
        for one, other in zip(self.outputs, outputs(self.model) if self.run else [], strict=True):
            assert torch.equal(one, other)
        if self.patched:
            record = network_of(self.model)
            fields, sites, generator = self.record
            assert [id(site) for site in record.sites] == [id(site) for site in sites]
            assert torch.equal(record.generator, generator)
            for name in ("prior", "likelihood", "eval"):
                assert getattr(record, name) is fields[name]
            assert record.layout.fingerprint == fields["layout"].fingerprint
            assert [(s.posterior.offset, s.posterior.stream, s.method) for s in record.sites] == self.places
            pb.forward_draws(copy.deepcopy(self.model), X, self.draws)


def fails(model: nn.Module, action: Callable[[nn.Module], Any], *texts: str, kind: type[Exception] = PatchbayesError):
    untouched = Untouched(model)
    with pytest.raises(kind) as error:
        action(model)
    for text in texts:
        assert text in str(error.value)
    untouched.check()


# ---- methods of a test, defined as a user would


@dataclass(frozen=True)
class Failing(Method):
    """Starts well twice, and fails at the third site, in one of several ways."""

    way: str = "error"
    works: int = 2

    def posterior(self, module, generator):
        return FailingPosterior(self, module, tuple(n for n, p in module._parameters.items() if p is not None))


class FailingPosterior(Posterior):
    started = 0

    def __init__(self, method, layer, names):
        super().__init__(method, layer, names)
        self.held = nn.ParameterDict()
        self.register_buffer("count", torch.zeros(3))

    def start_(self, values, generator):
        for name in self.names:
            self.take_(self.held, name, values[name].repeat(2, *[1] * values[name].dim()))
        type(self).started += 1
        if type(self).started > self.method.works:
            if self.method.way == "interrupt":
                raise KeyboardInterrupt
            if self.method.way == "shape":
                torch.zeros(2) + torch.zeros(3)
            raise {"error": ValueError, "memory": MemoryError}[self.method.way]("no start")

    def realize(self, d):
        return {name: value[0] for name, value in self.held.items()}

    def mean(self):
        return {name: value[0] for name, value in self.held.items()}

    def kl(self, prior, d=None):
        return KL(torch.zeros(()), "exact")


@pytest.fixture(autouse=True)
def _not_started_yet():
    FailingPosterior.started = 0


WAYS = {"error": ValueError, "interrupt": KeyboardInterrupt, "memory": PatchbayesError, "shape": PatchbayesError}


@pytest.mark.parametrize("way", WAYS)
def test_a_posterior_that_fails_at_the_third_site_undoes_the_first_two(way):
    fails(network(), lambda m: pb.patch_(m, Failing(way), "all"), kind=WAYS[way])
    assert FailingPosterior.started == 3
    FailingPosterior.started = 0
    model = network()
    report = pb.patch_(model, Failing(way, works=4), "all")  # nothing is in the way of a method that works
    assert len(report.sites) == 4


@pytest.mark.parametrize("way", WAYS)
def test_it_also_unties_nothing(way):
    for tied in ("together", "separate"):
        FailingPosterior.started = 0
        model = TiedLanguageModel()
        untouched = Untouched(model, run=False)
        with pytest.raises(WAYS[way]):
            pb.patch_(model, Failing(way, works=1), "all", tied=tied)
        untouched.check()
        assert model.decoder.weight is model.embedding.weight


@pytest.mark.parametrize("name", ["lstm", "transformer", "tied", "frozen", "unet"])
def test_networks_of_many_kinds_come_back(name):
    entry = ZOO[name]
    model = entry.build()
    with torch.no_grad():
        expected = entry.logits(copy.deepcopy(model).eval(), entry.inputs())
    untouched = Untouched(model, run=False)
    with pytest.raises(ValueError, match="no start"):
        pb.patch_(model, {"norm": pb.ECMP(3), "*": Failing(works=0)})
    untouched.check()
    with torch.no_grad():
        assert torch.equal(entry.logits(model.eval(), entry.inputs()), expected)


# ---- what cannot be patched


@pytest.mark.parametrize("zero", [0.5, 1, "yes", None])
def test_a_zero_component_is_there_or_not(zero):
    fails(
        network(),
        lambda m: pb.patch_(m, pb.posteriors.Mixture(components=2, zero=zero)),
        f"zero={zero!r}",
        "True or False",
    )


@pytest.mark.parametrize("tie", ["network", "site", "unit", "element"])
def test_components_beyond_memory(tie):
    fails(network(), lambda m: pb.patch_(m, pb.posteriors.Mixture(HUGE, tie=tie)), 'patch_ at "', f"{HUGE}")
    rules = {"norm": pb.EMP(3), "output": pb.posteriors.Mixture(HUGE, tie=tie)}
    fails(network(), lambda m: pb.patch_(m, rules), 'patch_ at "4"')


INDEPENDENT = """
import resource, sys
import torch
from torch import nn
import patchbayes as pb
model = nn.Sequential(nn.Linear(3, 4))
before = {key: value.clone() for key, value in model.state_dict().items()}
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, used + 2**30))
resource.setrlimit(resource.RLIMIT_CPU, (10, 10))
try:
    pb.patch_(model, pb.EMP(10**12, init="independent"), "all")
except pb.PatchbayesError as error:
    assert "1000000000000" in str(error)
assert not pb.is_patched(model)
assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
print("refused")
"""


def test_independent_components_beyond_memory_are_refused_at_once():
    """In a process with limits of its own: components made one by one would take hours, or all memory, before an error."""
    ended = subprocess.run(
        [sys.executable, "-c", INDEPENDENT], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.stdout.startswith("refused"), f"exit code {ended.returncode}: {ended.stderr[-500:]}"


def test_parameters_without_values():
    model = network().to("meta")
    before = [(name, id(p), p.is_meta, type(p)) for name, p in model.named_parameters()]
    with pytest.raises(NothingToPatch, match="meta"):
        pb.patch_(model, pb.EMP(3), "all")
    assert [(name, id(p), p.is_meta, type(p)) for name, p in model.named_parameters()] == before
    assert not pb.is_patched(model)
    assert type(model) is nn.Sequential


def test_layers_without_values_are_passed_over_and_the_rest_can_be_undone():
    model = network()
    model[4].to("meta")
    report = pb.patch_(model, pb.EMP(3), "all")
    assert [site.name for site in report.sites] == ["0", "1", "3"]
    assert "meta" in report.skipped["4"]
    pb.unpatch_(model)
    assert type(model[0]) is nn.Linear
    with pytest.raises(NothingToPatch, match="meta"):
        pb.patch_(model, pb.EMP(3), "output")


def test_a_predicate_that_fails_half_way():
    def predicate(name: str, module: nn.Module) -> bool:
        if name == "3":
            raise RuntimeError("no such layer")
        return True

    fails(network(), lambda m: pb.patch_(m, pb.EMP(3), predicate), "no such layer", kind=RuntimeError)


# ---- a second call


def patched() -> nn.Sequential:
    model = network()
    pb.patch_(model, pb.EMP(3, statistics="per_component"), "1", prior=pb.prior.Prior(tau=2.0))
    model(X)
    return model


SECOND = {
    "huge": (lambda m: pb.patch_(m, pb.ECMP(HUGE), "all", prior=pb.prior.Prior(9.0)), PatchbayesError),
    "fails at the third": (
        lambda m: pb.patch_(m, Failing(), "all", likelihood=pb.likelihoods.Gaussian(3.0)),
        ValueError,
    ),
    "interrupted": (lambda m: pb.patch_(m, Failing("interrupt"), "all"), KeyboardInterrupt),
    "nothing left": (lambda m: pb.patch_(m, pb.ECMP(2), "1"), NothingToPatch),
    "other laws of one draw": (
        lambda m: pb.patch_(m, {"0": pb.Ensemble(2), "4": pb.Ensemble(3)}),
        PatchbayesError,
    ),
    "no method": (lambda m: pb.patch_(m, pb.EMP), PatchbayesError),
}


@pytest.mark.parametrize("name", SECOND)
def test_a_second_call_that_fails_leaves_the_first(name):
    action, kind = SECOND[name]
    fails(patched(), action, kind=kind)


def test_after_a_failed_call_a_good_one_gives_what_it_would_have_given():
    once, twice = network(), network()
    with pytest.raises(ValueError, match="no start"):
        pb.patch_(twice, Failing(), "all")
    with pytest.raises(PatchbayesError):
        pb.patch_(twice, pb.EMP(HUGE))
    for model in (once, twice):
        pb.patch_(model, pb.ECMP(3), generator=torch.Generator().manual_seed(4))
    assert torch.equal(once(X), twice(X))
    state = once.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in twice.state_dict().items())


def test_an_optimizer_and_an_ordinary_training_loop_go_on_after_a_failed_call():
    once, twice = network(), network()
    optimizers = [torch.optim.Adam(model.parameters(), 0.1) for model in (once, twice)]
    for number in range(3):
        for model, optimizer in zip((once, twice), optimizers, strict=True):
            optimizer.zero_grad()
            model(X).square().sum().backward()
            optimizer.step()
        FailingPosterior.started = 0
        with pytest.raises(ValueError, match="no start"):
            pb.patch_(twice, Failing(works=number), "all")
    assert all(torch.equal(a, b) for a, b in zip(once.parameters(), twice.parameters(), strict=True))


# ---- files


class Largest(TorchDispatchMode):
    """The largest tensor with memory of its own that an operation made, in elements."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor) and not t.is_meta]
        self.elements = max([self.elements, *(t.numel() for t in made)])
        return result


def saved(path: Path, method: Method | None = None) -> Path:
    model = network()
    pb.patch_(model, method or pb.EMP(3), "all")
    pb.save(model, path)
    return path


def with_components(number: int, **fields: Any) -> Callable[[dict, dict], None]:
    def change(description: dict, tensors: dict) -> None:
        for site in description["sites"]:
            site["method"] |= {"components": number, **fields}

    return change


def without_tensors(number: int) -> Callable[[dict, dict], None]:
    def change(description: dict, tensors: dict) -> None:
        with_components(number)(description, tensors)
        for key in [key for key in tensors if "patchbayes." in key]:
            del tensors[key]

    return change


EDITS = {
    "huge": with_components(HUGE),
    "large": with_components(10**6),
    "large, independent": with_components(10**6, init="independent"),
    "large, elements": with_components(10**6, tie="element"),
    "large, statistics": with_components(10**6, statistics="per_component"),
    "large, and no tensors": without_tensors(10**6),
}


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize("make", [network, patched], ids=["ordinary", "patched"])
def test_a_small_file_that_asks_for_large_components_takes_no_memory(name, make, tmp_path):
    path = rewritten(saved(tmp_path / "file"), EDITS[name])
    largest = Largest()

    def load(model: nn.Module) -> None:
        with largest:
            pb.load_(model, path)

    fails(make(), load, str(path), kind=CheckpointMismatch)
    assert largest.elements < 1000, f"a tensor of {largest.elements:,} elements was made"


def test_the_measure_of_memory_sees_a_large_tensor():
    with Largest() as largest:
        torch.randn(10**6)
    assert largest.elements == 10**6


def test_a_large_ordinary_file_is_refused_before_it_is_read(tmp_path):
    state = network().state_dict()
    save_file({**state, "0.weight": torch.zeros(1000, 1000)}, tmp_path / "file")
    fails(patched(), lambda m: pb.load_(m, tmp_path / "file"), "(1000, 1000) in the file", kind=CheckpointMismatch)


def test_a_file_whose_method_fails_to_start(tmp_path):
    model = network()
    pb.patch_(model, Failing(works=10), "all")
    pb.save(model, tmp_path / "file")
    FailingPosterior.started = (
        4  # the four stand-ins that compare shapes start well, the network's own third site does not
    )
    fails(network(), lambda m: pb.load_(m, tmp_path / "file"), "no start", kind=ValueError)
    assert FailingPosterior.started == 11


def test_a_file_that_fails_late_leaves_a_patched_network_whole(tmp_path):
    """Everything fits but the learned prior, which is compared last."""
    model = network()
    pb.patch_(model, pb.EMP(3), "all", prior=pb.prior.LearnedPrior(model))
    pb.save(model, tmp_path / "file")

    def other_layers(description: dict, tensors: dict) -> None:
        description["prior"]["learned_layers"][0] = "elsewhere"

    path = rewritten(tmp_path / "file", other_layers)
    assert description_of(path) != description_of(tmp_path / "file")
    fails(network(), lambda m: pb.load_(m, path), "other layers", kind=CheckpointMismatch)
    target = network()
    pb.patch_(target, pb.EMP(3), "all")
    fails(target, lambda m: pb.load_(m, path), "other layers", kind=CheckpointMismatch)


def test_a_tensor_of_another_type_that_does_not_convert(tmp_path):
    path = saved(tmp_path / "file")
    tensors = load_file(path)
    key = "4.patchbayes.components.weight"
    tensors[key] = torch.complex(tensors[key], tensors[key])
    save_file(tensors, tmp_path / "other", metadata={"patchbayes": json.dumps(description_of(path))})
    for model in (network(), patched()):
        untouched = Untouched(model)
        with pytest.raises((CheckpointMismatch, RuntimeError)):
            pb.load_(model, tmp_path / "other")
        untouched.check()
