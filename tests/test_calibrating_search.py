"""The search for a spread: where it looks, and that it believes in nothing that it has not tried."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

import patchbayes as pb
from calibrated_networks import classifier, inputs
from patchbayes.bayesianizing.held_out import HeldOut
from patchbayes.bayesianizing.spread import ScaledFrame, SpreadSearch, scalable_sites
from patchbayes.bayesianizing.tries import Tried
from patchbayes.draws.draws import Draws
from patchbayes.likelihoods import Categorical
from patchbayes.patching.frames import pushed
from patchbayes.patching.network import network_of
from patchbayes.patching.selection import as_tensor
from patchbayes.posteriors import Spread

Surface = Callable[[float, float], float]


def search(monkeypatch: pytest.MonkeyPatch, nll: Surface, budget: int = 4000) -> SpreadSearch:
    torch.manual_seed(0)
    net = nn.Sequential(*(layer for _ in range(5) for layer in (nn.Linear(4, 4), nn.ReLU()))).eval()
    pb.patch_(net, Spread(), "all")
    x, y = torch.randn(100, 4), torch.arange(100) % 4
    held_out = HeldOut.read([(x, y)], 100, 64, torch.Generator().manual_seed(0))

    def scored(self: SpreadSearch, level: float, slope: float, examples: int) -> Tried:
        return Tried(level, slope, nll(level, slope), 1.0, 0.0, examples)

    monkeypatch.setattr(SpreadSearch, "_scored", scored)
    network = network_of(net)
    return SpreadSearch(
        net, network, held_out, Categorical(), draws=5, budget=budget, temperature=1.0, rival=2.0, output=as_tensor
    )


def place(found: SpreadSearch) -> tuple[float, float]:
    learned = found.run()
    first, last = (learned.log_factors[site] for site in (found.sites[0], found.sites[-1]))
    return (first + last) / 2, last - first


def test_a_bowl_is_found_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    found = search(monkeypatch, lambda level, slope: 1 + (level - 0.2) ** 2 + (slope + 0.5) ** 2)
    level, slope = place(found)
    assert level == pytest.approx(0.2, abs=1e-6)
    assert slope == pytest.approx(-0.5, abs=0.02)  # few examples hold it to 0
    assert found.tried[-1].level == pytest.approx(0.2, abs=1e-6)  # it was tried
    assert found.passes <= 4000


def test_two_numbers_that_go_too_far_together_are_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each alone is better than none, both are far worse: the better one of them is taken."""

    def nll(level: float, slope: float) -> float:
        return 1 + (level - 0.3) ** 2 + 0.1 * (slope + 1) ** 2 + 20 * max(0.0, -level * slope - 0.05)

    found = search(monkeypatch, nll)
    level, slope = place(found)
    assert nll(level, slope) == pytest.approx(min(one.nll for one in found.tried[-6:]))
    assert nll(level, slope) < nll(0.0, 0.0)
    assert max(one.nll for one in found.tried[-6:]) > 2


def test_a_place_that_is_known_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    found = search(monkeypatch, lambda level, slope: 1 - 0.01 * math.tanh(level) ** 2 + 0.01 * slope**2)
    found.run()
    last = [(one.level, one.slope) for one in found.tried if one.examples == found.tried[-1].examples]
    assert len(set(last)) == len(last)


def test_a_scaled_draw_is_the_draw_of_the_scaled_network() -> None:
    net, x = classifier(), inputs(5)
    pb.patch_(net, {"0": Spread(size=0.2), "2": pb.ECMP(3, jitter=0.2), "4": pb.posteriors.MeanField(0.1)})
    network = network_of(net)
    sites = scalable_sites(network)
    assert [site.name for site in sites] == ["0", "2", "4"]
    draw = Draws.stratified(net, 3)[1].network_draw(0)
    factors = {site: torch.tensor(f, requires_grad=True) for site, f in zip(sites, (0.5, 2.0, 1.5), strict=True)}
    with pushed(ScaledFrame(network, draw, factors)):
        scaled = net(x)
    scaled.sum().backward()
    assert all(factor.grad is not None and float(factor.grad) != 0 for factor in factors.values())
    for site, factor in factors.items():
        site.posterior.scale_spread_(factor.item())
    with pb.use_draw(net, Draws.stratified(net, 3)[1]):
        again = net(x)
    assert torch.allclose(scaled, again, atol=1e-5)


def test_a_scaled_draw_that_is_kept_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = classifier(), inputs(5)
    pb.patch_(net, {"0": Spread(size=0.2), "2": Spread(size=0.1)})
    network = network_of(net)
    draw = Draws.stratified(net, 3)[1].network_draw(0)
    factors = {site: torch.tensor(2.0) for site in network.sites}
    with pushed(ScaledFrame(network, draw, factors)):
        expected = net(x)
    made = []
    whole = type(network.sites[0].posterior).realize
    monkeypatch.setattr(type(network.sites[0].posterior), "realize", lambda own, d: made.append(own) or whole(own, d))
    frame = ScaledFrame(network, draw, factors, keep=True)
    for _ in range(3):
        with pushed(frame):
            assert torch.equal(net(x), expected)
    assert len(made) == 2
