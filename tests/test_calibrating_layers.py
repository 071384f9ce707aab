"""Which layers `bayesianize_` makes random by itself, and how far they spread at the start."""

import math

import pytest
import torch
from torch import nn

import patchbayes as pb
from calibrated_networks import batches, classifier, inputs, labels_from
from patchbayes.bayesianizing.layers import BOTH, BYTES, FIRST, NORMS, candidate_layers, layers_left_out
from patchbayes.bayesianizing.spread import start_norms_
from patchbayes.patching.network import network_of
from patchbayes.posteriors import Spread


def deep(blocks: int, width: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
    for _ in range(blocks - 1):
        layers += [nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 5)).eval()


X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def candidates(model: nn.Module, limit: float = 1e9, example: torch.Tensor = X):  # type: ignore[no-untyped-def]
    return candidate_layers(model, example, limit, Spread(), None, None, 20)


def test_deep_networks_have_norms_and_first_layers() -> None:
    model = deep(12)
    found = candidates(model)
    assert list(found) == [BOTH]
    assert set(found[BOTH].methods) == {
        name for name, layer in model.named_modules() if isinstance(layer, nn.Conv2d | nn.BatchNorm2d | nn.Linear)
    }
    assert list(candidates(deep(11))) == [BOTH, FIRST]


@pytest.mark.parametrize("limit", [3_000, 10_000])
def test_first_layers_stay_within_what_norms_leave(limit: int) -> None:
    model = deep(12)
    chosen = candidates(model, limit)[BOTH].methods
    size = sum(4 * p.numel() for name in chosen for p in model.get_submodule(name).parameters())
    assert limit - 2_400 < size <= limit  # a convolution has 2,336 bytes
    norms = [name for name, layer in model.named_modules() if isinstance(layer, nn.BatchNorm2d)]
    assert set(norms) <= set(chosen)


def test_layers_that_have_no_draws_are_named_where_they_are_many() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.norm, self.out = nn.LSTM(6, 16, batch_first=True), nn.LayerNorm(16), nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.norm(self.lstm(x.unsqueeze(1))[0][:, -1]))

    torch.manual_seed(0)
    net, x = Recurrent().eval(), inputs(200)
    y = labels_from(torch.softmax(classifier()(x), -1).detach())
    assert "no draws in LSTM (94 % of the parameters)" in str(pb.bayesianize_(net, batches(x, y), budget=2000))
    assert layers_left_out(deep(3)) == ()


def test_first_layers_stay_within_a_fixed_size_however_large_the_network() -> None:
    model = deep(30, 40)
    first = [name for name in candidates(model)[BOTH].methods if isinstance(model.get_submodule(name), nn.Conv2d)]
    size = sum(4 * p.numel() for name in first for p in model.get_submodule(name).parameters())
    assert 0.6 * BYTES < size <= BYTES
    assert first == [str(3 * number) for number in range(len(first))]


def test_where_the_first_layer_is_too_large_norms_are_alone() -> None:
    blocks = [layer for _ in range(12) for layer in (nn.Linear(300, 300), nn.LayerNorm(300))]
    assert list(candidates(nn.Sequential(*blocks).eval(), example=torch.randn(2, 300))) == [NORMS]


@pytest.mark.parametrize("beside_others", [False, True])
def test_the_spread_of_norms_falls_with_their_depth(beside_others: bool) -> None:
    model = deep(12)
    pb.patch_(model, Spread(size=0.1), "norm+conv" if beside_others else "norm")
    network = network_of(model)
    before = {site.name: site.posterior.variance() for site in network.sites}
    start_norms_(network)
    norms = [site for site in network.sites if isinstance(site.module, nn.BatchNorm2d)]
    for site in network.sites:
        found = (site.posterior.variance()["weight"] / before[site.name]["weight"]).sqrt().unique()
        depth = norms.index(site) / 11 - 0.5 if site in norms else 0.0
        expected = math.exp(-depth) * (0.5 if beside_others else 1.0) if site in norms else 1.0
        assert torch.allclose(found, torch.full_like(found, expected), rtol=1e-4)


def test_a_deep_network_is_bayesianized_at_both() -> None:
    model = deep(12)
    x = torch.randn(60, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    y = torch.randint(5, (60,), generator=torch.Generator().manual_seed(2))
    report = pb.bayesianize_(model, [(x, y)], draws=4, budget=2_000)
    sites = {site.name for site in report.patch.sites}
    assert {"0", "1"} <= sites
    assert len(sites) == 25
