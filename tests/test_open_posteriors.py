"""Posteriors from outside the package get everything: contract, files, KL, unpatching, prediction, copies, compiling."""

import contextlib
import copy
import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import patchbayes as pb
from outside_posteriors import LearnedLaw, OuterScales
from patchbayes.patching.network import network_of
from patchbayes.posteriors import method as method_module
from patchbayes.posteriors.text import parse_method, text_of
from saved_networks import description_of
from statistics_helper import assert_frequencies
from zoo import ZOO, assert_same, snapshot

METHODS = {"OuterScales": OuterScales(4, jitter=0.5), "LearnedLaw": LearnedLaw(3, jitter=0.5)}
X = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
TARGETS = torch.tensor([0, 1, 1, 0, 1, 0])


def network() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


@pytest.fixture(params=METHODS)
def method(request) -> pb.posteriors.Method:
    return METHODS[request.param]


@pytest.fixture
def model(method) -> nn.Sequential:
    model = network()
    pb.patch_(model, method, "linear")
    return model


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(X), TARGETS) + pb.kl(model) / 1000
    loss.backward()
    optimizer.step()
    return loss.item()


# ---- what every posterior is promised


@pytest.mark.parametrize("training", [True, False])
def test_all_promises_of_the_contract_hold(method, training):
    contract = pb.check_patchable(network().train(training), X, method, "linear")
    assert contract, str(contract)
    assert len(contract.checks) == 12


@pytest.mark.parametrize("name", ["mlp", "resnet18", "unet", "lstm", "transformer", "tied", "frozen", "dict output"])
def test_they_hold_on_networks_of_many_kinds(name, method):
    entry = ZOO[name]
    model = entry.build()
    before = snapshot(model)
    sites = "output" if isinstance(method, OuterScales) else entry.sites
    if isinstance(method, OuterScales) and name == "unet":
        pytest.skip("its output layer is a convolution")
    contract = pb.check_patchable(model, entry.inputs(), method, sites)
    assert contract, str(contract)
    assert_same(before, model)


def test_training_learns_every_parameter_and_lowers_the_loss(model):
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step(model, optimizer)
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters())
    losses = [step(model, optimizer) for _ in range(60)]
    assert sum(losses[-10:]) < sum(losses[:10])


def test_the_report_and_the_groups_know_what_is_stored(method):
    model = network()
    plain = sum(p.numel() for p in model.parameters())
    report = pb.patch_(model, method, "linear")
    added = {
        "OuterScales": 4 * (3 + 5) + 4 * (5 + 2),
        "LearnedLaw": 2 * (15 + 5 + 10 + 2) + 2 * 3,
    }[type(method).__name__]
    assert report.parameters_after == plain + added == sum(p.numel() for p in model.parameters())
    assert report.ensemble_size == {"OuterScales": "16", "LearnedLaw": "9"}[type(method).__name__]
    groups = {group["name"]: group for group in pb.objective.parameter_groups(model, pb.objective.Lambdas.equal(0.1))}
    laws = {"OuterScales": 4, "LearnedLaw": 2}[type(method).__name__]
    assert len(groups["law"]["params"]) == laws
    assert groups["law"]["weight_decay"] == 0
    listed = [id(p) for group in groups.values() for p in group["params"]]
    assert sorted(listed) == sorted(id(p) for p in model.parameters())
    undecayed = pb.no_decay_names(model)
    assert all(
        name in undecayed for name, _ in model.named_parameters() if name.endswith(("logits", "rows", "columns"))
    )


# ---- draws, prediction


def test_draws_name_the_networks_that_a_forward_pass_computes(model):
    draws = pb.Draws.enumerate(model)
    realized = {name: site.realize(draws) for name, site in pb.patched_sites(model).items()}
    outputs = pb.forward_draws(model, X, draws)
    for number in range(len(draws)):
        plain = network()
        state = plain.state_dict() | {
            f"{n}.{key}": v[number] for n, values in realized.items() for key, v in values.items()
        }
        plain.load_state_dict(state)
        torch.testing.assert_close(outputs[number], plain(X), rtol=1e-5, atol=1e-6)
    assert len({tuple(output.flatten().tolist()) for output in outputs}) == len(draws)


@pytest.mark.parametrize("engine", ["loop", "auto"])
def test_predictions_are_averages_over_draws(model, engine):
    draws = pb.Draws.sample(model, 5, torch.Generator().manual_seed(1))
    expected = pb.forward_draws(model.eval(), X, draws).softmax(-1).mean(0)
    prediction = pb.predict(model, X, draws, engine=engine)
    torch.testing.assert_close(prediction.probs, expected.detach(), rtol=1e-5, atol=1e-6)
    exact = pb.Draws.enumerate(model)
    probs = pb.forward_draws(model, X, exact).softmax(-1)
    average = torch.tensordot(exact.weights.float(), torch.as_tensor(probs), 1)
    torch.testing.assert_close(
        pb.predict(model, X, "exact", engine=engine).probs, average.detach(), rtol=1e-5, atol=1e-6
    )


def test_eval_mode_is_the_mean_of_all_draws(model):
    exact = pb.Draws.enumerate(model)
    for site in pb.patched_sites(model).values():
        for name, values in site.realize(exact).items():
            average = torch.tensordot(exact.weights.to(values), values, 1)
            torch.testing.assert_close(site.posterior.mean()[name], average, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(getattr(site.module, name), average, rtol=1e-5, atol=1e-6)
    plain = copy.deepcopy(model)
    pb.unpatch_(plain, keep="mean")
    torch.testing.assert_close(model.eval()(X), plain.eval()(X))


def test_learned_probabilities_are_those_of_the_draws():
    model = network()
    pb.patch_(model, LearnedLaw(3), "0")
    with torch.no_grad():
        model[0].patchbayes.logits.copy_(torch.tensor([0.7, 0.1, 0.2]).log())
    early = pb.Draws.sample(model, 20_000, torch.Generator().manual_seed(1))
    for draws, p in ((early, (0.7, 0.1, 0.2)), (pb.Draws.stratified(model, 20_000), (0.7, 0.1, 0.2))):
        assert_frequencies(torch.bincount(draws.assignments()[:, 0], minlength=3), p, detects=0.03)
    torch.testing.assert_close(pb.Draws.enumerate(model).weights, torch.tensor([0.7, 0.1, 0.2]).double())
    before = early.assignments()
    with torch.no_grad():
        model[0].patchbayes.logits.copy_(torch.tensor([0.1, 0.8, 0.1]).log())
    assert torch.equal(early.assignments(), before)  # draws keep the probabilities they were made with
    pb.forward_draws(model, X, early[:2])
    late = pb.Draws.sample(model, 20_000, torch.Generator().manual_seed(1))
    assert_frequencies(torch.bincount(late.assignments()[:, 0], minlength=3), (0.1, 0.8, 0.1), detects=0.03)
    own, seen = torch.zeros(3), []
    model[0].register_forward_hook(lambda module, *_: seen.append(module.weight.detach().clone()))
    for _ in range(600):
        model(X)
    for weight in seen:
        own[int((model[0].patchbayes.values["weight"] - weight).abs().flatten(1).amax(1).argmin())] += 1
    assert_frequencies(own, (0.1, 0.8, 0.1), detects=0.16)


# ---- KL


def test_kl_is_the_posteriors_own_and_that_of_what_it_left_alone(method, model):
    prior = pb.prior.Prior(tau=2.0, rho=3.0)
    expected = 0.0
    for layer in (model[0], model[2]):
        posterior = layer.patchbayes
        if isinstance(method, OuterScales):
            pairs = zip(posterior.rows, posterior.columns, strict=True)
            drawn = [layer._parameters["weight"] * torch.outer(rows, columns) for rows, columns in pairs]
            expected += sum(w.square().sum() for w in drawn) / 4 + 1.5 * layer.bias.square().sum()
        else:
            values = posterior.values
            squares = sum(v.square().sum() * (1.0 if n == "weight" else 1.5) for n, v in values.items())
            expected += squares / 3  # p is uniform at the start
    torch.testing.assert_close(pb.kl(model, prior), torch.as_tensor(expected))
    for layer in (model[0], model[2]):
        layer.requires_grad_(False)
    assert pb.kl(model, prior) == 0
    torch.testing.assert_close(pb.kl(model, prior, frozen=True), torch.as_tensor(expected))


def test_the_penalty_leaves_laws_alone(model):
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    pb.objective.l2_penalty(model, pb.objective.Lambdas.equal(0.5)).backward()
    for name, parameter in model.named_parameters():
        law = name.endswith(("logits", "rows", "columns"))
        expected = torch.zeros_like(parameter) if law else before[name]
        found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(found, expected)


# ---- undoing, copying, compiling


def test_unpatching_keeps_the_mean_a_draw_or_a_component(method, model):
    draws = pb.Draws.sample(model, 4, torch.Generator().manual_seed(3))
    expected = pb.forward_draws(model, X, draws)
    for number in range(4):
        clone = copy.deepcopy(model)
        pb.unpatch_(clone, keep=draws[number])
        torch.testing.assert_close(clone(X), expected[number], rtol=1e-5, atol=1e-6)
        assert list(clone.state_dict()) == list(network().state_dict())
    if isinstance(method, OuterScales):
        before = snapshot(model)
        with pytest.raises(pb.PatchbayesError, match="has no components"):
            pb.unpatch_(model, keep=0)
        assert_same(before, model)
    else:
        pb.unpatch_(model, keep=0)
        assert_same(snapshot(network()), model)


@dataclasses.dataclass(frozen=True)
class Renamed(pb.posteriors.Method):
    """Two values of a weight, kept under another name than the layer's: its own Parameter, or a new one."""

    new: bool = False
    jitter: float = 0.5

    def posterior(self, module, generator):
        return RenamedPosterior(self, module, ("weight",))


class RenamedPosterior(pb.posteriors.Posterior):
    num_components = 2

    def groups(self):
        return pb.posteriors.Groups(1, 2)

    def start_(self, values, generator):
        step = self.method.jitter * torch.randn(values["weight"].shape, generator=generator).to(values["weight"])
        both = torch.stack([values["weight"], values["weight"] + step])
        if hasattr(self, "matrix"):
            self.matrix.data.copy_(both)
            return
        self.matrix = self.layer._parameters.pop("weight")
        if self.method.new:
            self.matrix = nn.Parameter(both)
        else:
            self.matrix.data = both

    def realize(self, d):
        return {"weight": self.matrix.index_select(0, d["z"])[0]}

    def mean(self):
        return {"weight": self.matrix.mean(0)}

    def component(self, number):
        return {"weight": self.matrix[number]}

    def expected_squares(self):
        return {"weight": self.matrix.square().flatten(1).sum(1).mean()}


@pytest.mark.parametrize("new", [False, True])
def test_parameters_may_be_kept_under_another_name(new, tmp_path):
    model, before = network(), network().state_dict()
    weights = [model[0].weight, model[2].weight]
    pb.patch_(model, Renamed(new), "linear")
    pb.save(model, tmp_path / "file")
    again = network()
    pb.load_(again, tmp_path / "file")
    assert torch.equal(again[0].patchbayes.matrix, model[0].patchbayes.matrix)
    for one in (copy.deepcopy(model), again, model):
        pb.unpatch_(one, keep=0)
        assert list(one.state_dict()) == list(before)
        assert all(torch.equal(value, before[key]) for key, value in one.state_dict().items())
        assert all(p.requires_grad for p in one.parameters())
    assert new or (model[0].weight is weights[0] and model[2].weight is weights[1])
    pb.patch_(model, Renamed(new), "0")
    model[0].weight = torch.ones(5, 3)
    assert torch.equal(model[0].patchbayes.matrix, torch.ones(2, 5, 3))


def test_patched_without_spread_it_comes_back_to_the_bit(method):
    model = network()
    before = snapshot(model)
    pb.patch_(model, method.without_spread(), "linear")
    pb.unpatch_(model, keep="mean")
    assert_same(before, model)


def test_a_deepcopy_has_a_posterior_of_its_own(model):
    clone = copy.deepcopy(model)
    for one, other in zip(model.modules(), clone.modules(), strict=True):
        assert one is not other
    assert clone[0].patchbayes.layer is clone[0]
    before = snapshot(model)
    for parameter in clone.parameters():
        parameter.data.mul_(2.0)
    step(clone, torch.optim.SGD(clone.parameters(), 0.1))
    assert_same(before, model)


def test_an_ordinary_checkpoint_starts_it_anew(method, model):
    torch.manual_seed(5)
    source = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    step(model, torch.optim.SGD(model.parameters(), 0.1))
    model.load_state_dict(source.state_dict(), strict=True)
    fresh = copy.deepcopy(source)
    pb.patch_(fresh, method.without_spread(), "linear")
    if isinstance(method, LearnedLaw):
        pb.unpatch_(model, keep=0)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), source.parameters(), strict=True))
    else:
        assert torch.equal(model[0]._parameters["weight"], source[0].weight)
        assert not torch.equal(model[0].weight, source[0].weight)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_it_draws_and_learns_as_in_eager_mode(model):
    torch._dynamo.reset()
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (model, eager)]
    seen = set()
    for _ in range(5):
        outputs = [compiled(X), eager(X)]
        torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-6)
        seen.add(tuple(outputs[1].flatten().tolist()))
        for output, optimizer in zip(outputs, optimizers, strict=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(output, TARGETS).backward()
            optimizer.step()
        assert torch.equal(network_of(model).generator, network_of(eager).generator)
    assert len(seen) == 5
    for (name, one), other in zip(model.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, msg=name)
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_draws_follow_probabilities_as_they_are_learned():
    torch._dynamo.reset()
    model = network()
    pb.patch_(model, LearnedLaw(3, jitter=1.0), "0")
    compiled = torch.compile(model, backend="aot_eager")
    assert len({tuple(compiled(X).flatten().tolist()) for _ in range(30)}) == 3
    with torch.no_grad():
        model[0].patchbayes.logits.copy_(torch.tensor([-50.0, 50.0, -50.0]))
    second = copy.deepcopy(model)
    pb.unpatch_(second, keep=1)
    for _ in range(30):
        torch.testing.assert_close(compiled(X), second(X))
    torch._dynamo.reset()


# ---- files


@pytest.mark.parametrize("whole", [False, True], ids=["patch only", "whole"])
def test_files_bring_it_back(model, method, whole, tmp_path):
    optimizer = torch.optim.SGD([p for n, p in model.named_parameters() if "patchbayes" in n], 0.1)
    for _ in range(3):
        step(model, optimizer)
    pb.save(model, tmp_path / "file", whole=whole)
    assert description_of(tmp_path / "file")["sites"][0]["method"] == method.config()
    target = network()
    pb.load_(target, tmp_path / "file")
    assert {site.method for site in pb.patched_sites(target).values()} == {method}
    assert all(torch.equal(v, target.state_dict()[k]) for k, v in model.state_dict().items())
    draws = pb.Draws.sample(model, 4)
    assert torch.equal(pb.forward_draws(model, X, draws), pb.forward_draws(target, X, draws))
    pb.load_(target, tmp_path / "file")  # into a network that is patched alike
    assert torch.equal(model(X), target(X))
    other = network()
    pb.patch_(other, type(method)(method.components + 1), "linear")
    before = snapshot(other)
    with pytest.raises(pb.errors.CheckpointMismatch, match=f"components is {method.components} in the file"):
        pb.load_(other, tmp_path / "file")
    assert_same(before, other)


STRANGER = """
import sys
import torch
from torch import nn
import patchbayes as pb
model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
before, loaded = {k: v.clone() for k, v in model.state_dict().items()}, set(sys.modules)
try:
    pb.load_(model, sys.argv[1])
except pb.PatchbayesError as error:
    print(error)
assert not pb.is_patched(model)
assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
new = {name for name in set(sys.modules) - loaded if "outside" in name or "posterior" in name}
assert not new, new
"""


def test_a_file_of_a_class_that_is_not_defined_is_refused_and_nothing_is_imported_for_it(model, method, tmp_path):
    """The module lies on the path of the process that reads the file, and is not imported all the same."""
    pb.save(model, tmp_path / "file")
    name = type(method).__name__
    environment = {"PYTHONPATH": f"{Path(__file__).parent}:{Path(pb.__file__).parents[1]}", "PATH": ""}
    ended = subprocess.run(
        [sys.executable, "-c", STRANGER, str(tmp_path / "file")],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert name in ended.stdout
    assert f"import the module that defines the class {name}" in ended.stdout
    assert 'site "0"' in ended.stdout


def test_draws_and_learned_probabilities_go_through_files(tmp_path):
    model = network()
    pb.patch_(model, LearnedLaw(3), "linear")
    with torch.no_grad():
        model[0].patchbayes.logits.copy_(torch.tensor([0.7, 0.1, 0.2]).log())
    draws = pb.Draws.stratified(model, 12, torch.Generator().manual_seed(1))
    draws.save(tmp_path / "draws.json")
    pb.save(model, tmp_path / "file", whole=True)
    target = network()
    pb.load_(target, tmp_path / "file")
    assert pb.Draws.enumerate(target).law.probabilities == pb.Draws.enumerate(model).law.probabilities
    loaded = pb.Draws.load(tmp_path / "draws.json", target)
    assert torch.equal(loaded.assignments(), draws.assignments())
    assert torch.equal(pb.forward_draws(model, X, draws), pb.forward_draws(target, X, loaded))


def test_a_class_of_ones_own_does_not_take_the_name_of_a_method_in_files(monkeypatch):
    """Files name the class alone: a second class of that name, from another module, must not be read in its place."""
    monkeypatch.setattr(method_module, "_METHODS", dict(method_module._METHODS))
    with contextlib.suppress(pb.PatchbayesError):

        @dataclasses.dataclass(frozen=True)
        class Dropout(pb.posteriors.Method):
            rate: float = 0.5

            def posterior(self, module, generator):
                raise NotImplementedError

    assert type(pb.posteriors.method_from_config({"method": "Dropout", "rate": 0.3})) is pb.Dropout


# ---- what it does not do


def test_what_a_posterior_does_not_offer_is_an_error_that_says_so(model):
    site = pb.patched_sites(model)["0"]
    with pytest.raises(pb.PatchbayesError, match="cannot be scaled"):
        site.posterior.scale_spread_(2.0)
    with pytest.raises(pb.PatchbayesError, match=r'site "0".*no components of "weight"'):
        site.components("weight")
    before = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    pb.objective.share_gradients_(model)
    assert all(before[n] is None for n, p in model.named_parameters() if p.grad is None)


def test_a_layer_that_is_no_site_of_the_method_is_skipped_with_the_reason():
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    report = pb.patch_(model, OuterScales(), "all")
    assert report.skipped == {"1": "it is no linear layer"}
    assert [site.name for site in report.sites] == ["0", "2"]


def test_the_textual_form_knows_it():
    for method in METHODS.values():
        assert parse_method(text_of(method)) == method
    assert parse_method("outerscales(2, jitter=0.3)") == OuterScales(2, jitter=0.3)
