"""calibrate_ and bayesianize_: what they find where the answer is known, for every task."""

import copy
import dataclasses
import math

import pytest
import torch
from torch import nn

import patchbayes as pb
from calibrated_networks import batches, classifier, inputs, labels_from, nll
from patchbayes.bayesianizing.score import Average, best_temperature
from patchbayes.draws.draws import Draws
from patchbayes.errors import PatchbayesError
from patchbayes.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian
from patchbayes.patching.network import network_of
from patchbayes.posteriors import LowRank, Spread
from patchbayes.views import mirror


def test_an_overconfident_network_gets_its_temperature() -> None:
    net, x = classifier(scale=4.0), inputs(3000)
    with torch.no_grad():
        y = labels_from(torch.softmax(net(x) / 3.0, -1))
    report = pb.bayesianize_(net, batches(x, y), budget=8000)
    assert 2.6 < report.mean_temperature < 3.4
    assert report.after.nll <= report.temperature_scaled.nll
    assert report.temperature_scaled.nll < report.before.nll - 0.1
    assert float(network_of(net).likelihood.mean_temperature) == report.mean_temperature


def test_an_underconfident_network_comes_out_sharpened() -> None:
    net, x = classifier(scale=6.0), inputs(3000)
    with torch.no_grad():
        y = labels_from(torch.softmax(net(x), -1))
        net[4].weight.mul_(0.5)
        net[4].bias.mul_(0.5)
        before = -float(torch.log_softmax(net(x), -1)[torch.arange(3000), y].mean())
    report = pb.bayesianize_(net, batches(x[:2000], y[:2000]), budget=8000)
    assert report.mean_temperature < 0.6
    assert report.temperature < 0.7
    assert nll(net, x[2000:], y[2000:]) < before - 0.02


def linear_model(number: int, deviation: float) -> tuple[nn.Linear, torch.Tensor, torch.Tensor]:
    """Regression whose every target has weights of its own, N(m, deviation^2), and noise of deviation 0.5."""
    torch.manual_seed(0)
    net = nn.Linear(6, 1, bias=False).eval()
    with torch.no_grad():
        net.weight.fill_(1.0)
    x = inputs(number) * torch.linspace(-1, 1, number)[torch.randperm(number)].exp().unsqueeze(1)
    y = (x * (1 + deviation * torch.randn(number, 6))).sum(1, keepdim=True) + 0.5 * torch.randn(number, 1)
    return net, x, y


@pytest.mark.parametrize("deviation", [0.3, 0.9])
def test_a_planted_spread_is_recovered(deviation: float) -> None:
    """In a linear model the spread that the targets have is the best: found from a start that is far too small or large."""
    net, x, y = linear_model(2000, deviation)
    pb.patch_(net, Spread(size=0.2), "all", likelihood=Gaussian(precision=4.0))
    report = pb.calibrate_(net, batches(x, y), draws=50, budget=500_000, examples=2000)
    assert report.chosen == "learned"
    # the temperature is a factor on the whole variance, that of the weights too
    assert report.spread[""] * report.temperature**0.5 == pytest.approx(deviation, rel=0.2)
    assert report.gain is not None
    assert report.gain_error is not None
    assert report.gain > 3 * report.gain_error
    assert "The spread that was learned: NLL lower by" in str(report)
    assert "#" in str(report)
    assert report.after.nll < report.temperature_scaled.nll


@pytest.mark.parametrize("unit", [1e-3, 1.0, 77.0, 1e5])
def test_error_bars_are_right_whatever_the_unit_of_the_targets(unit: float) -> None:
    """A precision that nobody has fitted says nothing: the noise is found where it is thousands of times larger or smaller."""
    torch.manual_seed(0)
    net, x = nn.Linear(6, 1).eval(), inputs(800)
    with torch.no_grad():
        net.weight.mul_(unit)
        net.bias.mul_(unit)
        y = net(x) + 0.5 * unit * torch.randn(800, 1)
    for calibrated in (pb.calibrate_, pb.bayesianize_):
        model = copy.deepcopy(net)
        report = calibrated(model, batches(x[:400], y[:400]), likelihood=Gaussian(), budget=4000)
        assert report.mean_temperature == pytest.approx((0.5 * unit) ** 2, rel=0.15)
        assert "variance factor" in str(report)
        bounds = pb.predict(model, x[400:], 20, keep_draws=True).interval(0.9)
        covered = float(((y[400:] >= bounds[0]) & (y[400:] <= bounds[1])).float().mean())
        assert 0.86 < covered < 0.94


@pytest.mark.parametrize("number", [120, 400])
def test_the_verdict_says_what_it_was_judged_on(number: int) -> None:
    net, x, y = linear_model(number, 0.9)
    pb.patch_(net, Spread(size=0.8), "all", likelihood=Gaussian(precision=4.0))
    report = pb.calibrate_(net, batches(x, y), draws=20, budget=20_000)
    assert report.chosen != "none"
    assert report.judged == (0 if number == 120 else 128)
    judged = "128 examples that it was not learned on" if report.judged else "the examples that it was learned on"
    assert f", on {judged}." in report.verdict
    chance = report.gain is not None and report.gain_error is not None and report.gain < 2 * report.gain_error
    assert ("may be chance" in report.verdict) == chance
    worse = dataclasses.replace(report, chosen="none", gain=-0.081, gain_error=0.01)
    assert "gain in NLL -0.0810 +- 0.0100" in worse.verdict
    assert "may be chance" in dataclasses.replace(report, gain=0.01, gain_error=0.008).verdict


def test_no_spread_where_none_helps() -> None:
    """A linear network whose own answers are true: spread can only harm, and the report says what to do instead."""
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(6, 4)).eval(), inputs(1000)
    with torch.no_grad():
        y = labels_from(torch.softmax(net(x), -1))
    pb.patch_(net, Spread(size=3.0), "all")
    report = pb.calibrate_(net, batches(x, y), budget=200)
    assert report.chosen == "none"
    assert "predict in one pass" in str(report)
    prediction = pb.predict(net, x[:20])
    assert torch.allclose(prediction.averaged_probs, torch.softmax(net(x[:20]), -1), atol=1e-6)
    assert report.temperature == report.mean_temperature


def test_no_spread_where_none_helps_beside_dropout_of_training() -> None:
    """Masks that are off in prediction do not keep the other sites from losing their spread."""
    net, x = classifier(), inputs(1000)
    with torch.no_grad():
        y = labels_from(torch.softmax(net(x), -1))
    pb.patch_(net, {"output": Spread(size=3.0), "hidden": pb.Dropout(0.1, predict=False)})
    report = pb.calibrate_(net, batches(x, y), budget=200)
    assert report.chosen == "none"
    drawn, mean = (pb.predict(net, x[:20], draws) for draws in (5, "mean"))
    assert torch.allclose(drawn.probs, mean.probs, atol=1e-6)


def test_fifty_examples_do_no_harm() -> None:
    """A number fitted to N examples costs 1 / 2N nats on average where none was needed: 0.01 here."""
    harm = []
    for seed in range(6):
        net, x = classifier(seed, scale=3.0), inputs(2050, seed)
        with torch.no_grad():
            y = labels_from(torch.softmax(net(x), -1), seed + 100)
            before = -float(torch.log_softmax(net(x[50:]), -1)[torch.arange(2000), y[50:]].mean())
        pb.bayesianize_(net, batches(x[:50], y[:50]), budget=4000)
        harm.append(nll(net, x[50:], y[50:]) - before)
    assert sum(harm) / len(harm) < 0.025
    assert max(harm) < 0.08


def test_the_same_seed_gives_the_same_network() -> None:
    x = inputs(300)
    y = labels_from(torch.softmax(classifier()(x), -1).detach())
    reports, found = [], []
    for seed in (0, 0, 1):
        net = classifier(scale=3.0)
        reports.append(pb.bayesianize_(net, batches(x, y), budget=3000, seed=seed))
        found.append([p.detach().clone() for p in net.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(found[0], found[1], strict=True))
    assert reports[0].temperature == reports[1].temperature
    assert reports[0].losses == reports[1].losses != reports[2].losses


@pytest.mark.parametrize("kind", ["classes", "labels", "numbers", "varying", "dense"])
def test_scores_are_those_of_predict(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    likelihoods = {
        "classes": (Categorical(), (7, 4), torch.tensor([0, 1, 2, 3, 0, -100, 2])),
        "labels": (Bernoulli(), (7, 4), torch.randint(0, 2, (7, 4), generator=generator)),
        "numbers": (Gaussian(2.0), (7, 2), torch.randn(7, 2, generator=generator)),
        "varying": (HeteroscedasticGaussian(), (7, 4), torch.randn(7, 2, generator=generator)),
        "dense": (Categorical(class_dim=1), (7, 4, 2, 3), torch.randint(0, 4, (7, 2, 3), generator=generator)),
    }
    likelihood, shape, y = likelihoods[kind]
    softened = 2.5 if kind in ("classes", "labels", "dense") else 1.0
    net = nn.Sequential(nn.Linear(6, math.prod(shape[1:])), nn.Unflatten(1, shape[1:])).eval()
    pb.patch_(net, Spread(size=0.5), "all", likelihood=likelihood.set_temperature_(1.7, draw_temperature=softened))
    x = inputs(7)
    draws = Draws.stratified(net, 10)
    with torch.no_grad():
        outputs = pb.forward_draws(net, x, draws)
    score = Average.of_outputs(likelihood, outputs, softened).log_score(y, math.log(1.7))
    prediction = pb.predict(net, x, draws, keep_draws=True)
    again = Average.of_prediction(likelihood, prediction).log_score(y, math.log(1.7))
    assert torch.allclose(score, again.to(score), atol=1e-5)
    if kind == "classes":
        counted = y >= 0
        expected = prediction.log_probs[torch.arange(7)[counted], y[counted]]
        assert torch.allclose(score[counted], expected, atol=1e-5)
        assert float(score[5]) == 0
    elif kind == "dense":
        expected = prediction.log_probs.gather(-1, y.unsqueeze(-1)).flatten(1).mean(1)
        assert torch.allclose(score, expected, atol=1e-5)
    else:
        expected = prediction.log_prob(y) / (4 if kind == "labels" else 1)
        assert torch.allclose(score, expected.to(score), atol=1e-5)
    fitted = best_temperature([Average.of_outputs(likelihood, outputs, softened)], [y])
    assert fitted == pytest.approx(prediction.fit_temperature(y), rel=2e-3)


def test_each_draw_is_softened_before_the_average() -> None:
    net, x = classifier(scale=3.0), inputs(20)
    likelihood = Categorical().set_temperature_(0.6, draw_temperature=2.0)
    pb.patch_(net, Spread(size=0.5), "all", likelihood=likelihood)
    draws = Draws.stratified(net, 10)
    with torch.no_grad():
        outputs = pb.forward_draws(net, x, draws).double()
        average = torch.softmax(outputs / 2, -1).mean(0)
        expected = torch.softmax(average.log() / 0.6, -1).float()
        plain = torch.softmax(net(x), -1)
    prediction = pb.predict(net, x, draws, keep_draws=True)
    assert torch.allclose(prediction.probs, expected, atol=1e-5)
    assert torch.allclose(prediction.draw_probs, torch.softmax(outputs / 2, -1).float(), atol=1e-5)
    assert torch.allclose(pb.predict(net, x, "mean").probs, plain, atol=1e-5)  # the mean network has its own alone
    with pytest.raises(PatchbayesError, match="draw_temperature"):
        likelihood.set_temperature_(draw_temperature=0.0)
    old = {name: value for name, value in likelihood.state_dict().items() if name != "draw_temperature"}
    likelihood.load_state_dict(old)  # files from before there was one
    assert float(likelihood.draw_temperature) == 1


def test_draws_that_are_sure_of_different_answers_are_softened() -> None:
    """Labels that follow the average of the logits over draws of a known spread: softening, then sharpening, comes close."""
    net, x = classifier(scale=6.0), inputs(1500)
    pb.patch_(net, Spread(size=0.3), "all")
    with torch.no_grad():
        y = labels_from(torch.softmax(pb.forward_draws(net, x, Draws.stratified(net, 20)).mean(0), -1))
    report = pb.calibrate_(net, batches(x, y), spread="keep")
    assert report.draw_temperature > 1
    assert report.temperature < 1
    assert f"20 draws {report.draw_temperature:.3f} each, then their average {report.temperature:.3f}" in str(report)


def normed(blocks: int) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.ReLU()) for _ in range(blocks)]
    return nn.Sequential(*layers, nn.Linear(6, 4)).eval()


def test_many_norms_are_sites_together_with_the_first_layers() -> None:
    net, x = normed(12), inputs(200)
    y = labels_from(torch.softmax(8 * net(x), -1).detach())
    report = pb.bayesianize_(net, batches(x, y), budget=2000)
    assert {site.name for site in report.patch.sites} == {
        f"{block}.{part}" for block in range(12) for part in (0, 1)
    } | {"12"}
    assert {one.layers for one in report.tried} == {"norm and first layers"}
    few = normed(1)
    report = pb.bayesianize_(few, batches(x, y), budget=2000)
    assert [site.name for site in report.patch.sites] == ["0.0", "1"]


def test_a_tolerance_is_given_up_for_caution() -> None:
    net, x = classifier(scale=2.0), inputs(600)
    y = labels_from(torch.softmax(net(x) / 2, -1).detach())
    usual, cautious = copy.deepcopy(net), copy.deepcopy(net)
    best = pb.calibrate_(usual, batches(x, y))
    raised = pb.calibrate_(cautious, batches(x, y), tolerance=0.02)
    assert raised.mean_temperature > 1.1 * best.mean_temperature
    assert raised.temperature == raised.mean_temperature
    assert best.after.nll + 0.018 < raised.after.nll < best.after.nll + 0.0201
    drawn = copy.deepcopy(net)
    pb.patch_(drawn, Spread(size=0.1), "all")
    again = copy.deepcopy(drawn)
    first = pb.calibrate_(drawn, batches(x, y), spread="keep")
    second = pb.calibrate_(again, batches(x, y), spread="keep", tolerance=0.02)
    assert second.temperature > first.temperature
    assert second.chosen == first.chosen
    for given in (-0.1, math.inf, True, "much"):
        with pytest.raises(PatchbayesError, match="tolerance"):
            pb.calibrate_(net, batches(x, y), tolerance=given)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [0, 1])
def test_few_held_out_examples_do_not_make_it_much_worse(seed: int) -> None:
    """What looks better on 50 or 100 examples must do so clearly: on fresh data it is not behind the temperature alone."""
    net, x = normed(3), inputs(3000, seed)
    with torch.no_grad():
        net[3].weight.mul_(6)
        y = labels_from(torch.softmax(net(x), -1), seed)
    for number in (50, 100):
        scaled, drawn = copy.deepcopy(net), copy.deepcopy(net)
        pb.calibrate_(scaled, batches(x[:number], y[:number]))
        pb.bayesianize_(drawn, batches(x[:number], y[:number]), budget=8000, seed=seed)
        assert nll(drawn, x[1000:], y[1000:]) < nll(scaled, x[1000:], y[1000:]) + 0.01


@pytest.mark.parametrize("seed", [0, 1])
def test_of_several_sets_of_layers_the_held_out_data_choose_the_better(seed: int) -> None:
    net, x = normed(3), inputs(400, seed)
    y = labels_from(torch.softmax(8 * net(x), -1).detach(), seed)
    report = pb.bayesianize_(net, batches(x, y), budget=8000, seed=seed)
    looked = [one for one in report.tried if one.examples == report.tried[0].examples]
    best = min(looked, key=lambda one: one.nll).layers
    first, norms = ["0.0", "1.0", "2.0", "3"], ["0.1", "1.1", "2.1"]
    sites = {"norm and first layers": sorted([*first, *norms]), "first layers": first}
    assert {one.layers for one in looked} == set(sites)
    assert [site.name for site in report.patch.sites] == sites[best]
    assert {one.layers for one in report.tried if one.examples > looked[0].examples} == {best}
    assert report.passes <= 8000
    assert best in str(report)


@pytest.mark.parametrize("kind", ["numbers", "varying", "labels", "dense"])
def test_every_task(kind: str) -> None:
    x = inputs(600)
    torch.manual_seed(0)
    width = {"numbers": 1, "varying": 2, "labels": 3, "dense": 12}[kind]
    net = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, width)).eval()
    with torch.no_grad():
        outputs = net(x)
    generator = torch.Generator().manual_seed(3)
    if kind == "numbers":
        likelihood, y = Gaussian(), outputs + 0.1 * torch.randn(600, 1, generator=generator)
    elif kind == "varying":
        noise = (0.5 * outputs[:, 1:]).exp() * 2.0
        likelihood, y = HeteroscedasticGaussian(), outputs[:, :1] + noise * torch.randn(600, 1, generator=generator)
    elif kind == "labels":
        likelihood, y = Bernoulli(), torch.bernoulli(torch.sigmoid(3 * outputs), generator=generator).long()
    else:
        net.append(nn.Unflatten(1, (3, 2, 2)))
        probs = torch.softmax(3 * outputs.view(-1, 3, 2, 2), 1).movedim(1, -1)
        y = torch.multinomial(probs.reshape(-1, 3), 1, generator=generator).view(600, 2, 2)
        likelihood = Categorical(class_dim=1)
    report = pb.bayesianize_(net, batches(x, y), likelihood=likelihood, budget=4000)
    expected = {"numbers": 0.01, "varying": 4.0, "labels": 1 / 3, "dense": 1 / 3}[kind]
    assert report.mean_temperature == pytest.approx(expected, rel=0.3)
    assert report.after.nll <= report.temperature_scaled.nll < report.before.nll
    assert type(network_of(net).likelihood) is type(likelihood)
    assert pb.predict(net, x[:5]).temperature == report.temperature


def test_the_result_is_saved_and_loaded(tmp_path) -> None:  # type: ignore[no-untyped-def]
    net, x = classifier(scale=3.0), inputs(300)
    y = labels_from(torch.softmax(classifier()(x), -1).detach())
    report = pb.bayesianize_(net, batches(x, y), budget=3000)
    pb.save(net, tmp_path / "patch.safetensors")
    other = classifier(scale=3.0)
    pb.load_(other, tmp_path / "patch.safetensors")
    assert torch.equal(pb.predict(net, x[:9]).probs, pb.predict(other, x[:9]).probs)
    assert pb.predict(other, x[:9]).temperature == report.temperature


def test_sites_within_a_cost_of_prediction() -> None:
    x = inputs(100)
    y = labels_from(torch.softmax(classifier()(x), -1).detach())
    cheap, dear = classifier(scale=3.0), classifier(scale=3.0)
    few = pb.bayesianize_(cheap, batches(x, y), budget=500, predict_cost=3.0)
    assert [site.name for site in few.patch.sites] == ["4"]
    many = pb.bayesianize_(dear, batches(x, y), budget=500, predict_cost=20.0)
    assert [site.name for site in many.patch.sites] == ["0", "2", "4"]
    with pytest.raises(PatchbayesError, match="cost"):
        pb.bayesianize_(classifier(), batches(x, y), predict_cost=1.01)


def test_keep_fits_temperatures_alone() -> None:
    net, x = classifier(scale=3.0), inputs(300)
    y = labels_from(torch.softmax(classifier()(x), -1).detach())
    pb.patch_(net, pb.ECMP(3, jitter=0.1), "all")
    held = [p.detach().clone() for p in net.parameters()]
    report = pb.calibrate_(net, batches(x, y), spread="keep")
    assert report.chosen == "start"
    assert report.temperature != report.mean_temperature != 1
    assert all(torch.equal(a, b) for a, b in zip(held, net.parameters(), strict=True))


def test_the_report_shows_what_was_done() -> None:
    net, x, y = linear_model(600, 0.9)
    text = str(pb.bayesianize_(net, batches(x, y), likelihood=Gaussian(precision=4.0), budget=20_000))
    for expected in ("variance factor alone", "20 draws", "work", "size", "load", "#", "NLL"):
        assert expected in text


@pytest.mark.parametrize(("number", "said"), [(99, True), (100, False)])
def test_the_report_says_when_examples_are_few(number: int, said: bool) -> None:
    net, x = classifier(scale=3.0), inputs(number)
    y = labels_from(torch.softmax(classifier()(x), -1).detach())
    report = pb.calibrate_(net, batches(x, y))
    assert (f"on {number} held-out examples (fewer than 100" in str(report)) == said
    assert "one pass" in str(pb.predict(net, x, "mean"))
    assert ", 1 draw," in str(pb.predict(net, x, 1))


def test_the_report_says_what_was_added_and_what_the_patch_file_takes(tmp_path) -> None:  # type: ignore[no-untyped-def]
    net, x, y = linear_model(600, 0.9)
    report = pb.bayesianize_(net, batches(x, y), likelihood=Gaussian(precision=4.0), budget=20_000)
    pb.save(net, tmp_path / "patch.safetensors")
    layers = sum(p.numel() for site in pb.patched_sites(net).values() for p in site.module.parameters())
    added = report.patch.parameters_after - report.patch.parameters_before
    assert 0 < added < layers
    assert 4 * added <= report.patch_bytes < 4 * layers
    assert report.patch_bytes < (tmp_path / "patch.safetensors").stat().st_size
    expected = f"size    {added} parameters were added; their values take {report.patch_bytes} bytes"
    assert expected in str(report)


def looker(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 16, 4)).eval()
    with torch.no_grad():
        net[3].weight.mul_(8)
    return net


def test_draws_and_views_are_calibrated_together() -> None:
    net, x = looker(), torch.randn(400, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        y = labels_from((torch.softmax(net(x), -1) + torch.softmax(net(x.flip(-1)), -1)) / 2)
    with_views, without = copy.deepcopy(net), copy.deepcopy(net)
    seen = pb.bayesianize_(with_views, batches(x, y), budget=4000, views=mirror)
    unseen = pb.bayesianize_(without, batches(x, y), budget=4000)
    assert seen.temperature_scaled.nll < unseen.temperature_scaled.nll - 0.05
    assert "views: mirror (2)" in str(seen)
    prediction = pb.predict(with_views, x, views=mirror)
    nll_of_views = -float(prediction.log_probs[torch.arange(400), y].mean())
    assert nll_of_views == pytest.approx(seen.after.nll, abs=1e-4)
    assert pb.predict(with_views, x, "mean", views=mirror).temperature == seen.mean_temperature


def test_a_network_without_patches_gets_its_temperature(tmp_path) -> None:  # type: ignore[no-untyped-def]
    net, x = classifier(scale=4.0), inputs(1000)
    with torch.no_grad():
        logits = net(x)
        y = labels_from(torch.softmax(logits / 3.0, -1))
    report = pb.calibrate_(net, batches(x, y))
    assert report.chosen == "none"
    assert 2.4 < report.temperature < 3.6
    assert "no better" not in str(report)
    expected = torch.softmax(logits / report.temperature, -1)
    assert torch.allclose(pb.predict(net, x).probs, expected, atol=1e-5)
    assert torch.allclose(pb.predict(net, x, "mean").probs, expected, atol=1e-5)
    assert torch.equal(net(x), logits)
    pb.save(net, tmp_path / "temperature.safetensors")
    other = classifier(scale=4.0)
    pb.load_(other, tmp_path / "temperature.safetensors")
    assert torch.equal(pb.predict(other, x).probs, pb.predict(net, x).probs)
    pb.unpatch_(net)
    assert not pb.is_patched(net)
    with pytest.raises(PatchbayesError, match="no example"):
        pb.calibrate_(net, [])
    assert not pb.is_patched(net)


def test_the_spread_that_was_there_comes_back_to_the_last_digit() -> None:
    """Learning that fails its judges leaves the components exactly as they were, before the start itself is judged."""
    net, x = classifier(scale=3.0), inputs(300)
    y = labels_from(torch.softmax(classifier()(x), -1).detach())
    pb.patch_(net, LowRank(2, 3, jitter=0.05), "all")
    held = [p.detach().clone() for p in net.parameters()]
    report = pb.calibrate_(net, batches(x, y), budget=600)
    if report.chosen == "start":
        assert all(torch.equal(a, b) for a, b in zip(held, net.parameters(), strict=True))
    assert report.after.nll <= report.temperature_scaled.nll + 1e-6


def test_every_keyword_changes_the_result() -> None:
    net, x = classifier(scale=4.0), inputs(400)
    with torch.no_grad():
        y = labels_from(torch.softmax(net(x) / 3.0, -1))
    data, images = batches(x, y), batches(torch.randn(400, 1, 6, 6), y)

    def bayesianize_(model: nn.Module | None = None, held_out: object = data, **options: object) -> tuple[object, ...]:
        report = pb.bayesianize_(model or copy.deepcopy(net), held_out, **{"budget": 4000, **options})  # type: ignore[arg-type]
        return report.losses, report.after.nll, report.temperature, tuple(report.spread), report.num_held_out

    usual = bayesianize_()
    assert bayesianize_(method=pb.ECMP(3, jitter=0.1)) != usual
    assert bayesianize_(sites="output") != usual
    assert bayesianize_(predict_cost=3.0) != usual
    limited = bayesianize_(patch_bytes=3000)
    assert limited != usual
    assert bayesianize_(patch_bytes=3000, small=None) != limited
    assert bayesianize_(draws=8) != usual
    assert bayesianize_(budget=8000) != usual
    assert bayesianize_(examples=200)[-1] == 200
    assert bayesianize_(likelihood=Categorical(ignore_index=0)) != usual
    assert bayesianize_(seed=1) != usual
    assert bayesianize_(tolerance=0.05) != usual
    assert bayesianize_(select=lambda batch: (batch[0].flip(0), batch[1])) != usual
    assert bayesianize_(output=lambda logits: 2 * logits) != usual
    assert bayesianize_(looker(), images) != bayesianize_(looker(), images, views=mirror)
    patched = copy.deepcopy(net)
    pb.patch_(patched, pb.ECMP(3, jitter=0.1), "all")

    def calibrate_(model: nn.Module = patched, held_out: object = data, **options: object) -> tuple[object, ...]:
        report = pb.calibrate_(copy.deepcopy(model), held_out, **{"budget": 4000, **options})  # type: ignore[arg-type]
        return report.losses, report.after.nll, report.temperature, report.num_held_out

    usual = calibrate_()
    assert calibrate_(draws=8) != usual
    assert calibrate_(spread="keep") != usual
    assert calibrate_(budget=8000) != usual
    assert calibrate_(examples=200)[-1] == 200
    assert calibrate_(likelihood=Categorical(ignore_index=0)) != usual
    assert calibrate_(seed=1) != usual
    assert calibrate_(select=lambda batch: (batch[0].flip(0), batch[1])) != usual
    assert calibrate_(output=lambda logits: 2 * logits) != usual
    told: list[str] = []
    assert calibrate_(progress=lambda stage, left: told.append(stage)) == usual
    assert set(told) == {"spread", "scores"}
    seeing = looker()
    pb.patch_(seeing, Spread(), "all")
    assert calibrate_(seeing, images) != calibrate_(seeing, images, views=mirror)
