"""What calibrate_ and bayesianize_ leave alone: ensembles, networks that need no draws, and the budget."""

import copy
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import patchbayes as pb
from calibrated_networks import batches, classifier, inputs, labels_from
from patchbayes import metrics
from patchbayes.bayesianizing.calibrate import Calibration
from patchbayes.bayesianizing.spread import Learned, SpreadSearch
from patchbayes.posteriors import LowRank, Spread
from patchbayes.posteriors.method import Method
from patchbayes.views import mirror


def test_an_ensemble_gets_temperatures_and_keeps_its_members() -> None:
    """Its members are no spread around a mean network: with all of them at their mean, only one network would be left."""
    net, x = classifier(), inputs(1200)
    pb.patch_(net, pb.Ensemble(3), "all", generator=torch.Generator().manual_seed(0))
    for name in ("weight", "bias"):
        pb.patched_sites(net)["4"].components(name).data.mul_(20)
    before = copy.deepcopy(net.state_dict())
    with torch.no_grad():  # true answers are softer than the ensemble's, by a known temperature
        average = pb.predict(net, x, "exact").probs
        y = labels_from(torch.softmax(average.log() / 2.0, -1))
    report = pb.calibrate_(net, batches(x, y), draws=3)
    assert report.chosen == "start"
    assert report.factors == {}
    assert report.spread == {}
    assert report.verdict == ""
    for name, value in net.state_dict().items():
        if "temperature" not in name:
            assert torch.equal(value, before[name]), name
    nll = {"before": 1.0, "after": report.temperature}
    for name, temperature in nll.items():
        scored = torch.log_softmax(pb.predict(net, x, "exact").averaged_log_probs / temperature, -1)
        expected = -float(scored[torch.arange(len(y)), y].mean())
        assert getattr(report, name).nll == pytest.approx(expected, abs=1e-4)
    assert report.after.nll < report.before.nll - 0.02


def test_draws_that_cannot_lose_their_spread_keep_their_own_temperature() -> None:
    """Beside masks that stay on, a spread that does not help is given up; the average still has the temperature it needs."""
    net, x = classifier(scale=3.0), inputs(1000)
    with torch.no_grad():
        y = labels_from(torch.softmax(net(x) / 2.5, -1))
    pb.patch_(net, {"output": Spread(size=3.0), "hidden": pb.Dropout(0.3)})
    report = pb.calibrate_(net, batches(x, y), budget=200)
    assert report.chosen == "none"
    assert report.mean_temperature > 2
    drawn = pb.predict(net, x)
    best = drawn.fit_temperature(y)
    assert drawn.temperature == pytest.approx(best, rel=0.1)  # other examples have other masks
    assert pb.predict(net, x, "mean").temperature == report.mean_temperature


def test_masks_are_not_left_with_a_spread_that_few_examples_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the search says: the draws that it leaves are no worse on all examples than those that were there."""
    net, x = classifier(scale=3.0), inputs(1000)
    with torch.no_grad():
        y = labels_from(torch.softmax(net(x) / 1.5, -1))
    pb.patch_(net, {"output": Spread(size=0.05), "hidden": pb.Dropout(0.3)})
    before = copy.deepcopy(net)
    raw = pb.predict(before, x).averaged_log_probs
    best = metrics.nll(torch.log_softmax(raw / metrics.fit_temperature(raw, y), -1), y)

    def too_far(search: SpreadSearch, stopped: bool = False) -> Learned:
        return Learned(dict.fromkeys(search.sites, math.log(60.0)), 5.0, 0.0)

    monkeypatch.setattr(SpreadSearch, "run", too_far)
    pb.calibrate_(net, batches(x, y), examples=1000, budget=4000)
    assert metrics.nll(pb.predict(net, x).log_probs, y) <= best + 0.01
    for name, value in before.state_dict().items():
        if "temperature" not in name:
            assert torch.equal(net.state_dict()[name], value), name


def test_where_no_draws_are_chosen_no_patches_are_left(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(6, 4)).eval(), inputs(1000)
    with torch.no_grad():
        logits = net(x)
        y = labels_from(torch.softmax(logits / 1.5, -1))
    given = copy.deepcopy(net)
    report = pb.bayesianize_(net, batches(x, y), budget=2000, method=Spread(size=3.0))
    assert report.calibration.chosen == "none"
    assert report.patch_bytes == 0
    assert pb.patched_sites(net) == {}
    assert "tried, then removed: patched 1 site of" in str(report)
    assert "no patches (those that were tried: 24 bytes); the network's own" in str(report)
    assert all(torch.equal(net.state_dict()[name], value) for name, value in given.state_dict().items())
    expected = torch.softmax(logits / report.temperature, -1)
    prediction = pb.predict(net, x)
    assert torch.allclose(prediction.probs, expected, atol=1e-5)
    assert prediction.num_draws == 1
    pb.save(net, tmp_path / "patch.safetensors")
    pb.load_(given, tmp_path / "patch.safetensors")
    assert torch.equal(pb.predict(given, x).probs, prediction.probs)
    pb.export(net, tmp_path / "m.pt2", example_input=x[:3])
    probs = torch.export.load(tmp_path / "m.pt2").module()(x)[0]
    assert torch.allclose(probs, expected, atol=1e-5)


class Counting(nn.Module):
    """Counts the inputs that go through it."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = [0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows[0] += len(x)
        return 1 * x


def convolutions(norms: int) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for number in range(max(norms, 1)):
        layers += [nn.Conv2d(3 if number == 0 else 4, 4, 3, padding=1), nn.BatchNorm2d(4) if norms else nn.Identity()]
    end = [nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 5)]
    return nn.Sequential(Counting(), *layers, *end, Counting())


def turned(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.rot90(x, int(torch.randint(4, (), generator=generator)), (-2, -1))


BUDGETS: dict[str, tuple[Callable[[], nn.Sequential], dict[str, Any]]] = {
    "norms": (lambda: convolutions(13), {}),
    "norms and first layers": (lambda: convolutions(4), {}),
    "first layers": (lambda: convolutions(0), {}),
    "last layers": (lambda: convolutions(3), {"predict_cost": 1.5}),
    "two views": (lambda: convolutions(4), {"views": mirror}),
    "a view for each of many draws": (lambda: convolutions(2), {"views": turned, "draws": 60}),
    "few draws": (lambda: convolutions(4), {"draws": 2}),
}


def answered(net: nn.Module, number: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    x = torch.randn(number, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return [(x, labels_from(torch.softmax(8 * net(x), -1)))]


def without_scorings(net: nn.Sequential, monkeypatch: pytest.MonkeyPatch) -> tuple[Callable[[], int], list[int]]:
    """What goes through the network from now on, but for the last scores, and how often these are made."""
    counters = [module.rows for module in net if isinstance(module, Counting)]
    start, scorings, scored = max(rows[0] for rows in counters), [0], Calibration._averages

    def uncounted(self: Calibration, may_stop: bool) -> Any:
        before = [rows[0] for rows in counters]
        found = scored(self, may_stop)
        scorings[0] += 1
        for rows, number in zip(counters, before, strict=True):
            rows[0] = number
        return found

    monkeypatch.setattr(Calibration, "_averages", uncounted)
    return lambda: max(rows[0] for rows in counters) - start, scorings


@pytest.mark.parametrize("number", [97, 150, 211])
def test_the_budget_holds_for_any_numbers(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of held-out examples that no batch divides, and of passes: down to budgets that have no room for a search."""
    given = convolutions(4).eval()
    data = answered(given, number + 150)
    for budget in (200, 777, 1009, 2503):
        net = copy.deepcopy(given)
        with monkeypatch.context() as patching:
            counted, _ = without_scorings(net, patching)
            report = pb.bayesianize_(net, data, budget=budget, examples=number)
            assert counted() <= report.passes <= budget
        net = copy.deepcopy(given)
        pb.patch_(net, Spread(), "all")
        with monkeypatch.context() as patching:
            counted, scorings = without_scorings(net, patching)
            report = pb.calibrate_(net, data, budget=budget, examples=number)
            assert counted() <= report.passes <= budget
            assert scorings[0] == 1
            assert report.scoring_passes == 20 * report.num_held_out


@pytest.mark.parametrize("kind", BUDGETS)
def test_the_budget_holds(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a tenth of the default, with a tenth of the examples: as many inputs as said, and one scoring at the end."""
    build, options = BUDGETS[kind]
    net, lines = build().eval(), list[tuple[str, float]]()
    data = answered(net, 150)
    counted, scorings = without_scorings(net, monkeypatch)
    report = pb.bayesianize_(
        net, data, budget=4000, progress=lambda stage, left: lines.append((stage, left)), **options
    )
    assert counted() <= report.passes <= 4000
    assert scorings[0] == 1
    assert report.scoring_passes == options.get("draws", 20) * report.num_held_out
    assert {stage for stage, _ in lines} == {"spread", "scores"}
    assert all(math.isfinite(left) and left >= 0 for _, left in lines)
    assert lines[-1] == ("scores", 0.0)
    if kind == "a view for each of many draws":
        assert report.num_held_out == 33  # more would leave nothing for the search


@pytest.mark.parametrize("method", [Spread(size=2.0), LowRank(2, 3, jitter=3.0)], ids=str)
def test_a_spread_that_was_learned_stays_when_it_is_calibrated_again(method: Method) -> None:
    """What the search then finds is hardly better: the network keeps its own spread to the last bit, and is scored once."""
    planted, x = classifier(scale=3.0), inputs(1000)
    pb.patch_(planted, dataclasses.replace(method, **{method.start_fields[0]: 0.6}), "all")
    y = labels_from(pb.predict(planted, x, 200).probs)
    net = classifier(scale=3.0)
    pb.patch_(net, method, "all")
    first = pb.calibrate_(net, batches(x, y))
    assert first.chosen == "learned"
    held = [p.detach().clone() for p in net.parameters()]
    again = pb.calibrate_(net, batches(x, y))
    assert again.chosen == "start"
    assert first.scoring_passes == again.scoring_passes == 20 * 1000
    assert all(torch.equal(a, b) for a, b in zip(held, net.parameters(), strict=True))
    assert again.after.nll == pytest.approx(first.after.nll, abs=0.002)


def test_a_network_without_patches_sees_all_its_views(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 4)).eval()
    x = torch.randn(200, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        average = (torch.softmax(9 * net(x), -1) + torch.softmax(9 * net(x.flip(-1)), -1)) / 2
    report = pb.calibrate_(net, [(x, labels_from(average))], views=mirror)
    with torch.no_grad():
        log_average = ((torch.softmax(net(x), -1) + torch.softmax(net(x.flip(-1)), -1)) / 2).log()
    expected = torch.softmax(log_average / report.temperature, -1)
    for draws in (20, "mean"):
        assert torch.allclose(pb.predict(net, x, draws, views=mirror).probs, expected, atol=1e-5)
    assert torch.allclose(pb.Predictor(net, views=mirror)(x).exp(), expected, atol=1e-5)
    pb.export(net, tmp_path / "m.pt2", example_input=x[:3], views=mirror)
    assert torch.allclose(torch.export.load(tmp_path / "m.pt2").module()(x)[0], expected, atol=1e-5)
