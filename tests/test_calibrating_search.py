"""The search for a spread: where it looks, and that it believes in nothing that it has not tried."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

import patchbayes as pb
from patchbayes.bayesianizing.held_out import HeldOut
from patchbayes.bayesianizing.spread import SpreadSearch
from patchbayes.bayesianizing.tries import Tried
from patchbayes.likelihoods import Categorical
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
