"""Spread, RankOne and LowRank: exact where outcomes can be counted, and small in a file."""

import math

import pytest
import torch
from torch import nn

import patchbayes as pb
from patchbayes.draws.draws import Draws
from patchbayes.errors import NothingToPatch, PatchbayesError
from patchbayes.posteriors import LowRank, RankOne, Spread
from patchbayes.posteriors.posterior import PriorTerms
from patchbayes.posteriors.spread import steps
from patchbayes.posteriors.text import parse_method, text_of

METHODS = [
    Spread(2, 0.3),
    RankOne(2, "unit", 0.3),
    RankOne(3, "site", 0.3),
    RankOne(3, "network", 0.3),
    LowRank(1, 3, 0.3),
]


def layer(kind: str = "linear") -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(2, 2) if kind == "linear" else nn.Conv2d(2, 1, (1, 2), bias=False)


@pytest.mark.parametrize("kind", ["linear", "conv"])
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_mean_and_kl_are_those_of_all_outcomes(method, kind) -> None:  # type: ignore[no-untyped-def]
    net = nn.Sequential(layer(kind)).eval()
    start = {name: p.detach().clone() for name, p in net[0].named_parameters()}
    pb.patch_(net, method, "all")
    (site,) = pb.patched_sites(net).values()
    draws = Draws.enumerate(net)
    values = site.realize(draws)
    weights = draws.weights
    assert len(draws) == site.posterior.groups().outcomes ** site.posterior.groups().length
    expected_kl = 0.0
    for name, all_values in values.items():
        flat = all_values.double().flatten(1)
        assert torch.allclose((weights @ flat).float(), site.posterior.mean()[name].flatten(), atol=1e-6)
        if name in start and not (isinstance(method, RankOne) and method.tie != "unit"):
            assert torch.allclose(site.posterior.mean()[name], start[name], atol=1e-6)
        precision = 3.0 if name == "bias" else 2.0
        expected_kl += 0.5 * precision * float(weights @ flat.square().sum(1))
    kl = site.posterior.kl(PriorTerms(2.0, 3.0))
    assert kl.kind == "exact"
    assert float(kl.value) == pytest.approx(expected_kl, rel=1e-5)


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_spread_is_scaled_around_the_mean(method) -> None:  # type: ignore[no-untyped-def]
    net = nn.Sequential(layer()).eval()
    pb.patch_(net, method, "all")
    (site,) = pb.patched_sites(net).values()
    draws = Draws.enumerate(net)
    mean, before = site.posterior.mean()["weight"].detach().clone(), site.realize(draws)["weight"].detach().clone()
    site.posterior.scale_spread_(0.1)
    after = site.realize(draws)["weight"].detach()
    second_order = 0.0 if not isinstance(method, RankOne) else 0.1 * float((before - mean).abs().max())
    assert torch.allclose(after - mean, 0.1 * (before - mean), atol=1e-6 + second_order)
    site.posterior.scale_spread_(0.0)
    still = site.realize(draws)["weight"]
    assert torch.allclose(still, still[:1].expand_as(still), atol=1e-7)


@pytest.mark.parametrize("method", [*METHODS, LowRank(2, 1), RankOne(1)], ids=str)
def test_saved_loaded_and_named(method, tmp_path) -> None:  # type: ignore[no-untyped-def]
    assert parse_method(text_of(method)) == method
    net, x = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).eval(), torch.randn(5, 6)
    state = {name: value.clone() for name, value in net.state_dict().items()}
    pb.patch_(net, method, "all")
    expected = pb.predict(net, x).probs
    assert torch.allclose(pb.predict(net, x, engine="loop").probs, expected, atol=1e-6)
    pb.save(net, tmp_path / "patch.safetensors")
    other = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    other.load_state_dict(state)
    pb.load_(other, tmp_path / "patch.safetensors")
    assert torch.equal(pb.predict(other, x).probs, expected)


@pytest.mark.parametrize("method", [Spread(size=0.0), RankOne(jitter=0.0), LowRank(jitter=0.0)], ids=str)
def test_without_spread_the_network_is_the_same_and_comes_back(method) -> None:  # type: ignore[no-untyped-def]
    net, x = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).eval(), torch.randn(5, 6)
    before, objects = net(x).detach(), list(net.parameters())
    pb.patch_(net, method, "all")
    with pb.use_draw(net):
        assert torch.allclose(net(x), before, atol=1e-7)
    pb.unpatch_(net)
    assert torch.equal(net(x), before)
    assert all(a is b for a, b in zip(objects, net.parameters(), strict=True))


def test_gradients_reach_what_is_learned() -> None:
    for method in METHODS:
        net = nn.Sequential(nn.Linear(6, 3)).eval()
        pb.patch_(net, method, "all")
        (pb.forward_draws(net, torch.randn(4, 6), 3).square().sum() + pb.kl(net)).backward()
        assert all(p.grad is not None and bool(p.grad.ne(0).any()) for p in net.parameters()), method


def test_the_steps_of_spread_have_mean_zero_and_variance_one() -> None:
    for number in (2, 3, 5, 20):
        levels = steps(number)
        assert float(levels.mean()) == pytest.approx(0, abs=1e-12)
        assert float(levels.square().mean()) == pytest.approx(1, abs=1e-12)
        assert bool((levels.diff() > 0).all())


def test_a_patch_is_as_small_as_said() -> None:
    numbers = {}
    for method in (Spread(), RankOne(5), LowRank(2, 5), pb.ECMP(5)):
        net = nn.Sequential(nn.Linear(64, 100))
        report = pb.patch_(net, method, "all")
        numbers[type(method).__name__] = report.parameters_after - report.parameters_before
    assert numbers["Spread"] == 2
    assert numbers["RankOne"] == 5 * 164
    assert numbers["LowRank"] == 5 * 2 * 164
    assert numbers["Mixture"] == 4 * 6500


def test_what_does_not_fit_is_refused() -> None:
    for make in (
        lambda: Spread(1),
        lambda: Spread(size=-1.0),
        lambda: Spread(size=math.nan),
        lambda: RankOne(0),
        lambda: RankOne(tie="element"),  # type: ignore[arg-type]
        lambda: RankOne(jitter=-1.0),
        lambda: LowRank(0),
        lambda: LowRank(components=True),
    ):
        with pytest.raises(PatchbayesError, match="expected"):
            make()
    with pytest.raises(NothingToPatch, match="for linear and convolution layers"):
        pb.patch_(nn.Sequential(nn.LayerNorm(4)), RankOne(), "all")
    net = nn.Sequential(nn.Linear(2, 2))
    weight = net[0].weight
    with pytest.raises(NothingToPatch, match="rank 3 is above the layer's size: its weights have a rank of at most 2"):
        pb.patch_(net, LowRank(3), "all")
    assert net[0].weight is weight
    pb.patch_(net, Spread(), "all")
    (site,) = pb.patched_sites(net).values()
    with pytest.raises(PatchbayesError, match="only its mean"):
        site.posterior.component(1)
    with pytest.raises(PatchbayesError, match="minus infinity"):
        site.posterior.kl(PriorTerms(1.0, 1.0, entropy="lower"))
