"""bayesianize_: a trained network becomes a calibrated Bayesian one, keeps its mean, and comes back whole after an error."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

import patchbayes as pb
from patchbayes.bayesianizing import DEFAULT_JITTER, BayesianizeReport, Scores, bayesianize_
from patchbayes.bayesianizing.search import best_factor, crossing
from patchbayes.bayesianizing.spread import Spread
from patchbayes.nets import small_cnn


class Loader(list):
    """Batches that can be read again."""

    def __init__(self, inputs, targets, size=50):
        super().__init__(zip(inputs.split(size), targets.split(size), strict=True))


@pytest.fixture(scope="module")
def digits():
    """train, held-out and test batches, under noise that a network can be too sure about."""
    images = torch.from_numpy(load_digits().images).float().unsqueeze(1) / 8 - 1
    labels = torch.from_numpy(load_digits().target).long()
    generator = torch.Generator().manual_seed(0)
    images = images + torch.randn(images.shape, generator=generator)
    order = torch.randperm(len(labels), generator=generator)
    parts = order.split([600, 600, len(order) - 1200])
    return [Loader(images[part], labels[part]) for part in parts]


@pytest.fixture(scope="module")
def trained(digits):
    """The state of a network that has learned its training images by heart."""
    torch.set_num_threads(1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = small_cnn().train()
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        for _ in range(40):
            for inputs, targets in digits[0]:
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
    return model.state_dict()


@pytest.fixture
def model(trained):
    network = small_cnn().eval()
    network.load_state_dict(trained)
    return network


def again(trained):
    network = small_cnn().eval()
    network.load_state_dict(trained)
    return network


@torch.no_grad()
def plain_scores(model, batches):
    logits = torch.cat([model(inputs) for inputs, _ in batches])
    return Scores.of(torch.log_softmax(logits, -1), targets_of(batches))


def patched_scores(model, batches, draws=20):
    return Scores.of(pb.predict(model, batches, draws).log_probs, targets_of(batches))


def targets_of(batches):
    return torch.cat([targets for _, targets in batches])


def components(model):
    return {
        f"{name}.{own}": site.components(own).detach().clone()
        for name, site in pb.patched_sites(model).items()
        for own in site.posterior.names
    }


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_an_overconfident_network_becomes_calibrated_and_keeps_its_accuracy(model, digits):
    train, held_out, test = digits
    before = plain_scores(model, test)
    report = bayesianize_(model, train, held_out, draws=20)
    after = patched_scores(model, test)
    assert before.ece > 0.1  # it was far too sure
    assert after.nll < before.nll - 0.08
    assert after.ece < before.ece / 2
    assert after.accuracy > before.accuracy - 0.02
    assert report.after.nll < report.before.nll - 0.08
    assert report.temperature > 1.3
    assert report.temperature_scaled.nll < report.before.nll
    assert report.jitter_source == "held-out"
    assert report.num_held_out == 600
    assert report.after.nll <= min(trial.scores.nll for trial in report.tried) + 0.02


def test_confidence_is_balanced_with_accuracy(model, digits):
    report = bayesianize_(model, digits[0], digits[1])
    tried = {trial.scales["trunk"]: trial.scores for trial in report.tried if trial.stage == "balance"}
    assert len(tried) == 3
    assert report.after == tried[report.balance]
    allowed = [scores for scores in tried.values() if scores.nll <= tried[1.0].nll + 0.02]
    assert abs(report.after.overconfidence) == min(abs(scores.overconfidence) for scores in allowed)
    assert patched_scores(model, digits[1]).nll == pytest.approx(report.after.nll, abs=2e-3)  # the factor was applied


def test_the_crossing_of_a_line_is_found():
    for zero in (0.6, 0.9, 1.4):
        for step in (0.85, 1.2):
            values = -0.3 * math.log(zero), 0.3 * math.log(step / zero)
            assert crossing(*values, step, 2.0) == pytest.approx(zero)
            assert crossing(*values, step, 1.05) == pytest.approx(min(max(zero, 1 / 1.05), 1.05))
    assert crossing(0.1, 0.1, 0.85, 2.0) is None


def test_untrained_components_keep_the_mean_network(model, trained, digits):
    bayesianize_(model, None, digits[1], epochs=0)
    for site in pb.patched_sites(model).values():
        for own in site.posterior.names:
            original = trained[f"{site.name}.{own}"]
            stored = site.components(own).detach()
            torch.testing.assert_close(stored.mean(0), original, rtol=1e-5, atol=1e-6)
            assert not torch.equal(stored[0], stored[1])


def test_a_given_jitter_is_the_spread_of_the_components(model, trained):
    report = bayesianize_(model, None, jitter=0.03, epochs=0)
    assert report.jitter == {"trunk": 0.03, "output": 0.09}
    assert report.jitter_source == "given"
    for key, value in components(model).items():
        deviation = value - value.mean(0)
        of = {k.rpartition(".")[2]: trained[k] for k in (f"{key.split('.')[0]}.weight", f"{key.split('.')[0]}.bias")}
        size = of[key.rpartition(".")[2]].square().mean().sqrt()
        wanted = 0.09 if key.startswith("fc") else 0.03
        assert float(deviation.square().mean().sqrt() / size) == pytest.approx(wanted, rel=1e-4)


def test_without_held_out_data_the_documented_jitter_is_taken_and_said(model, digits):
    report = bayesianize_(model, digits[0], epochs=0.2)
    assert report.jitter == {"trunk": DEFAULT_JITTER, "output": 3 * DEFAULT_JITTER}
    assert report.jitter_source == "default"
    assert report.before is report.after is report.temperature is None
    assert report.tried == ()
    assert report.num_steps == round(0.2 * 12)
    assert "no held-out data" in str(report)


def test_training_changes_the_patches_and_nothing_else(model, trained, digits):
    bayesianize_(model, digits[0], jitter=0.05, epochs=1)
    untrained = again(trained)
    bayesianize_(untrained, None, jitter=0.05, epochs=0)
    assert all(
        not torch.equal(a, b) for a, b in zip(components(model).values(), components(untrained).values(), strict=True)
    )
    state = model.state_dict()
    shared = [key for key in trained if key in state]
    assert {"conv1.weight", "conv2.weight", "bn1.running_mean", "bn1.running_var"} <= set(shared)
    assert all(torch.equal(state[key], trained[key]) for key in shared)


def test_the_loss_falls(model, digits):
    report = bayesianize_(model, digits[0], jitter=0.1, epochs=10, lr=0.01)
    assert report.num_steps == 120
    assert report.last_loss < report.first_loss


def test_the_same_seed_gives_the_same_bits(trained, digits):
    first, second = again(trained), again(trained)
    before = torch.random.get_rng_state()
    reports = [bayesianize_(m, digits[0], digits[1], examples=100, draws=5, seed=3) for m in (first, second)]
    assert torch.equal(torch.random.get_rng_state(), before)
    assert equal(components(first), components(second))
    assert equal(first.state_dict(), second.state_dict())
    one, other = (dataclasses.replace(report, seconds={}) for report in reports)
    assert one == other


DEFAULTS = {"jitter": "auto", "epochs": 1.0, "examples": 200, "draws": 5}


@pytest.fixture(scope="module")
def usual(trained, digits):
    network = again(trained)
    bayesianize_(network, digits[0], digits[1], **DEFAULTS)
    return components(network)


@pytest.mark.parametrize(
    "change",
    [
        {"method": pb.EMP(5)},
        {"method": pb.ECMP(3)},
        {"sites": "norm"},
        {"jitter": 0.02},
        {"examples": 150},
        {"draws": 9},
        {"seed": 1},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_keyword_changes_the_result(change, model, digits, usual):
    bayesianize_(model, digits[0], digits[1], **(DEFAULTS | change))
    assert not equal(components(model), usual)


def test_the_method_is_the_one_that_is_put_in(model, digits):
    bayesianize_(model, None, jitter=0.05, epochs=0, method=pb.EMP(3))
    assert {site.method.label for site in pb.patched_sites(model).values()} == {"EMP(K=3)"}


@pytest.mark.parametrize("change", [{"epochs": 0.25}, {"lr": 0.003}], ids=["epochs", "lr"])
def test_every_keyword_of_training_changes_the_result(change, trained, digits):
    one, other = again(trained), again(trained)
    bayesianize_(one, digits[0], jitter=0.05)
    bayesianize_(other, digits[0], jitter=0.05, **change)
    assert not equal(components(one), components(other))


def test_training_that_does_not_help_is_undone(model, trained, digits):
    train = [(inputs, (targets + 1) % 10) for inputs, targets in digits[0]]  # teaches the wrong classes
    report = bayesianize_(model, train, digits[1], epochs=5, lr=0.05, draws=5)
    assert report.kept == "untrained"
    assert report.spread == {"trunk": 1.0, "output": 1.0}
    assert "did not improve" in str(report)
    for site in pb.patched_sites(model).values():
        for own in site.posterior.names:
            mean = site.components(own).detach().mean(0)
            torch.testing.assert_close(mean, trained[f"{site.name}.{own}"], rtol=1e-5, atol=1e-6)
    assert report.after.nll < report.before.nll


@pytest.mark.parametrize("training", [True, False])
def test_modes_and_frozen_flags_come_back(training, model, digits):
    model.train(training)
    model.bn1.train(not training)
    model.conv2.weight.requires_grad_(False)
    model.fc.bias.requires_grad_(False)
    modes = {name: module.training for name, module in model.named_modules()}
    bayesianize_(model, digits[0], digits[1], examples=50, draws=2, epochs=0.1)
    assert {name: module.training for name, module in model.named_modules() if name in modes} == modes
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {"conv2.weight", "fc.parametrizations.bias.original"}
    assert all(parameter.grad is None for parameter in model.parameters())


class Interrupted(Loader):
    def __iter__(self):
        yield from list(super().__iter__())[:2]
        raise KeyboardInterrupt


def test_an_interruption_leaves_the_network_as_it_was(model, trained, digits):
    model.train()
    model.conv1.weight.requires_grad_(False)
    parameters = {name: id(parameter) for name, parameter in model.named_parameters()}
    gradient = model.conv2.weight.grad = torch.ones_like(model.conv2.weight)
    broken = Interrupted(torch.cat([x for x, _ in digits[0]]), targets_of(digits[0]))
    with pytest.raises(KeyboardInterrupt):
        bayesianize_(model, broken, digits[1], examples=50, draws=2)
    assert not pb.is_patched(model)
    assert equal(model.state_dict(), trained)
    assert type(model) is torch.nn.Sequential
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == parameters
    assert model.training
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["conv1.weight"]
    assert model.conv2.weight.grad is gradient


def test_a_loss_that_explodes_is_an_error_that_names_the_learning_rate(model, trained, digits):
    with pytest.raises(pb.errors.PatchbayesError, match=r"loss is (nan|inf).*\n.*smaller lr \(it was 1e\+30\)"):
        bayesianize_(model, digits[0], lr=1e30)
    assert equal(model.state_dict(), trained)


def test_the_result_is_saved_as_a_patch_and_loaded_on_the_original(model, trained, digits, tmp_path):
    report = bayesianize_(model, digits[0], digits[1], examples=100, draws=5)
    pb.save(model, tmp_path / "patch.safetensors")
    other = again(trained)
    pb.load_(other, tmp_path / "patch.safetensors")
    inputs = digits[2][0][0]
    assert torch.equal(pb.predict(model, inputs, 5).probs, pb.predict(other, inputs, 5).probs)
    file_size = (tmp_path / "patch.safetensors").stat().st_size
    assert report.patch_bytes < file_size < report.patch_bytes + 8000  # the header beside the tensors
    assert report.model_bytes == sum(value.numel() * value.element_size() for value in trained.values())


def test_the_report_tells_what_was_done(model, digits):
    report = bayesianize_(model, digits[0], digits[1], examples=100, draws=5)
    assert isinstance(report, BayesianizeReport)
    text = str(report)
    for part in (
        str(report.patch),
        "jitter  trunk",
        "tried jitter",
        "before",
        "temperature",
        "% of the network",
        "time",
    ):
        assert part in text
    assert {trial.stage for trial in report.tried} == {"jitter", "spread", "balance"}
    assert report.seconds.keys() == {"held-out data", "jitter", "training", "spread", "balance"}
    assert all(value >= 0 for value in report.seconds.values())


def test_a_network_whose_only_site_is_the_output(model, digits):
    report = bayesianize_(model, digits[0], digits[1], sites="output", examples=100, draws=5)
    assert report.jitter.keys() == {"output"}
    assert report.after.nll < report.before.nll


def test_the_output_is_the_layer_that_runs_last(digits):
    class Turned(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.output = torch.nn.Linear(16, 10)
            self.hidden = torch.nn.Linear(64, 16)

        def forward(self, x):
            return self.output(self.hidden(x.flatten(1)))

    shown = digits[1][0][0]
    for held_out, example, found in ((digits[1], None, "output"), (None, shown, "output"), (None, None, "hidden")):
        network = Turned()
        bayesianize_(network, None, held_out, sites="output", epochs=0, examples=50, draws=2, example_input=example)
        assert list(pb.patched_sites(network)) == [found]


def test_inputs_of_several_tensors(digits):
    class Sum(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = torch.nn.Linear(64, 10)

        def forward(self, one, other):
            return self.fc((one + other).flatten(1))

    double = [((inputs, inputs), targets) for inputs, targets in digits[0]]
    report = bayesianize_(Sum(), double, double, sites="output", examples=100, draws=3)
    assert report.num_held_out == 100


BAD = {
    "model": (lambda d: {"model": "resnet"}, "torch.nn.Module"),
    "method": (lambda d: {"method": pb.Dropout(0.1)}, "mixture of several components"),
    "one component": (lambda d: {"method": pb.ECMP(1)}, "mixture of several components"),
    "init": (lambda d: {"method": pb.ECMP(3, init="independent")}, 'init="copies"'),
    "norm_scale": (lambda d: {"method": pb.ECMP(3, norm_scale=0.2)}, "norm_scale"),
    "jitter": (lambda d: {"jitter": 0}, "above 0"),
    "jitter text": (lambda d: {"jitter": "automatic"}, '"auto" or a number'),
    "epochs": (lambda d: {"epochs": -1}, "at least 0"),
    "lr": (lambda d: {"lr": float("nan")}, "learning rate"),
    "examples": (lambda d: {"examples": 0}, "at least 1"),
    "draws": (lambda d: {"draws": 2.5}, "integer"),
    "no train": (lambda d: {"train": None}, "give training data, or epochs=0"),
    "train tensor": (lambda d: {"train": torch.zeros(3)}, "give batches"),
    "train without length": (lambda d: {"train": iter(d[0])}, "without a length"),
    "train empty": (lambda d: {"train": []}, "train gave no batch"),
    "train batch": (lambda d: {"train": [torch.zeros(4, 1, 8, 8)]}, "pair"),
    "train targets": (lambda d: {"train": [(d[0][0][0], d[0][0][1].float())]}, "class numbers"),
    "held-out empty": (lambda d: {"held_out": []}, "held_out gave no example"),
    "held-out generator": (lambda d: {"held_out": iter(d[1])}, "readable several times"),
    "held-out class": (lambda d: {"held_out": [(d[1][0][0], d[1][0][1] + 90)]}, "10 outputs"),
    "held-out sizes": (lambda d: {"held_out": [(d[1][0][0][:3], d[1][0][1])]}, "50 targets, and inputs for"),
    "sites": (lambda d: {"sites": "nothing-like-it"}, "nothing-like-it"),
}


@pytest.mark.parametrize(("make", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_refused_and_changes_nothing(make, message, model, trained, digits):
    given = {"model": model, "train": digits[0], "held_out": digits[1], "examples": 50, "draws": 2} | make(digits)
    with pytest.raises(pb.errors.PatchbayesError, match=message):
        bayesianize_(given.pop("model"), given.pop("train"), given.pop("held_out"), **given)
    assert not pb.is_patched(model)
    assert equal(model.state_dict(), trained)


def test_a_patched_network_is_refused(model, digits):
    pb.patch_(model, pb.ECMP(3))
    with pytest.raises(pb.errors.PatchbayesError, match="unpatch_"):
        bayesianize_(model, digits[0])


def test_progress_is_shown_on_a_terminal_only(model, trained, digits, monkeypatch, capsys):
    bayesianize_(model, digits[0], jitter=0.05, epochs=0.2)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    bayesianize_(again(trained), digits[0], jitter=0.05, epochs=0.2)
    assert "step 2 of 2" in capsys.readouterr().err


@pytest.mark.parametrize("lowest", [0.3, 0.8, 1.0, 1.7, 6.0])
def test_the_search_finds_the_minimum_of_a_parabola_exactly(lowest):
    scores = {}

    def score(factor):
        scores[factor] = float((torch.tensor(factor / lowest, dtype=torch.float64).log()) ** 2)
        return scores[factor]

    assert best_factor(score, step=1.5, most=20) == pytest.approx(lowest, rel=1e-9)
    assert 1.0 in scores


def test_the_search_stops_after_its_number_of_scores_and_on_a_plain():
    asked = []
    assert best_factor(lambda f: asked.append(f) or -f, step=2, most=4) == 8
    assert asked == [1, 2, 4, 8]
    assert best_factor(lambda f: 0.0, step=2, most=10) == 1


def test_scales_move_components_around_a_mean_that_stays(model, generator):
    pb.patch_(model, pb.Mixture(3, tie="element", jitter=0, probabilities=(0.5, 0.3, 0.2)))
    sites = pb.patched_sites(model)
    groups = {name: "output" if name == "fc" else "trunk" for name in sites}
    p = torch.tensor([0.5, 0.3, 0.2])
    original = components(model)
    Spread.random(sites, groups, generator).scale_({"trunk": 0.1, "output": 0.3})
    drawn = components(model)
    for key, value in drawn.items():
        torch.testing.assert_close(torch.tensordot(p, value, 1), original[key][0], rtol=1e-5, atol=1e-6)
    Spread.of(sites, groups).scale_({"trunk": 2.0, "output": 0.0})
    for key, value in components(model).items():
        if key.startswith("fc"):
            torch.testing.assert_close(value, original[key], rtol=1e-5, atol=1e-6)
        else:
            torch.testing.assert_close(value - original[key], 2 * (drawn[key] - original[key]), rtol=1e-3, atol=1e-6)
