"""A draw, realized, is what a forward pass computes with: values, gradients, and the noise on them."""

import copy
import itertools

import pytest
import torch
from torch import nn

import patchbayes as pb
from statistics_helper import assert_standard_normal, assert_uncorrelated
from stored import deviation, gradient, mean_field, patched, seeded

# A draw, realized, is what the forward pass computes with


METHODS = {
    "EMP": pb.EMP(3),
    "ECMP": pb.ECMP(3),
    "unit": pb.posteriors.Mixture(components=2, tie="unit", zero=True),
    "DropConnect": pb.posteriors.DropConnect(0.4),
    "Ensemble": pb.Ensemble(3),
    "EMP with sigma": pb.EMP(3, sigma=0.2),
    "DropConnect with sigma": pb.posteriors.DropConnect(0.4, sigma=0.2),
    "Shared": pb.posteriors.GaussianNoise(0.2),
    "MeanField": pb.posteriors.MeanField(),
    "unequal": pb.ECMP(2, probabilities=(0.9, 0.1)),
}


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_realized_draws_are_what_a_forward_pass_reads(method):
    torch.manual_seed(2)
    plain = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).double().eval()
    x = torch.randn(5, 3, dtype=torch.float64)
    model = copy.deepcopy(plain)
    pb.patch_(model, method, "all")
    draws = pb.Draws.sample(model, 4, seeded(4))
    realized = {}
    for name, site in pb.patched_sites(model).items():
        values = site.realize(draws)
        for parameter, value in values.items():
            assert value.shape == (4, *getattr(plain.get_submodule(name), parameter).shape)
            realized[f"{name}.{parameter}"] = value.detach()
    outputs = pb.forward_draws(model, x, draws)
    for number in range(4):
        state = plain.state_dict() | {name: value[number] for name, value in realized.items()}
        same = copy.deepcopy(plain)
        same.load_state_dict(state)
        assert torch.equal(outputs[number], same(x))
    assert outputs.unique(dim=0).shape[0] > 1


def test_one_draw_serves_all_uses_of_a_layer_in_a_pass():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x):
            return self.layer(x) - self.layer(x)

    model = Twice()
    pb.patch_(model, pb.ECMP(4, sigma=0.1), "layer")
    for _ in range(5):
        assert torch.equal(model(torch.ones(2, 3)), torch.zeros(2, 3))


def test_equal_components_make_the_draw_irrelevant():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    x = torch.randn(5, 3)
    expected = plain(x)
    for tie in ("network", "site", "unit", "element"):
        model = copy.deepcopy(plain)
        pb.patch_(model, pb.posteriors.Mixture(components=4, tie=tie, jitter=0), "all")
        for output in pb.forward_draws(model, x, pb.Draws.sample(model, 5)):
            assert torch.equal(output, expected)


@pytest.mark.parametrize("tie", ["network", "site", "unit", "element"])
def test_one_component_is_the_unpatched_network_bit_for_bit(tie):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2))
    x, y = torch.randn(6, 1, 4, 4), torch.tensor([0, 1, 1, 0, 1, 0])
    model = copy.deepcopy(plain)
    pb.patch_(model, pb.posteriors.Mixture(components=1, tie=tie), "all")
    for network in (plain, model):
        nn.functional.cross_entropy(network(x), y).backward()
    assert torch.equal(plain(x), model(x))
    for name, site in pb.patched_sites(model).items():
        for parameter in site.posterior.names:
            expected = getattr(plain.get_submodule(name), parameter).grad
            assert torch.equal(gradient(model, name, parameter)[0], expected)
    for name, buffer in plain.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer)


def test_gradients_reach_the_drawn_components_only():
    model = patched(nn.Linear(2, 2), pb.EMP(3))
    draws = pb.Draws.enumerate(model)
    for one in draws:
        model.zero_grad()
        pb.forward_draws(model, torch.ones(1, 2, dtype=torch.float64), one).sum().backward()
        k = int(one.assignments()[0, 0])
        for parameter in ("weight", "bias"):
            found = gradient(model, "0", parameter)
            assert torch.equal(found[k], torch.ones_like(found[k]))
            assert found.abs().sum() == found[k].abs().sum()


# Noise


def noise_of(model: nn.Module, draws) -> dict[str, torch.Tensor]:
    """What noise adds to every parameter: the model's components must all be equal."""
    noise = {}
    for name, site in pb.patched_sites(model).items():
        center = site.posterior.component(0)
        for parameter, value in site.realize(draws).items():
            noise[f"{name}.{parameter}"] = (value - center[parameter]).detach()
    return noise


@pytest.mark.parametrize(
    "method", [pb.EMP(3, sigma=0.3, jitter=0), pb.ECMP(2, sigma=0.3, jitter=0), pb.posteriors.GaussianNoise(0.3)]
)
def test_noise_is_gaussian_with_deviation_sigma_and_independent_everywhere(method):
    model = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 100)).double()
    pb.patch_(model, method, "linear")
    noise = {name: value / 0.3 for name, value in noise_of(model, pb.Draws.sample(model, 2, seeded(1))).items()}
    first, other_draw = noise["0.weight"]
    assert_standard_normal(first, detects=0.06)
    assert_uncorrelated(first, other_draw, detects=0.1)
    assert_uncorrelated(first, noise["1.weight"][0], detects=0.1)
    assert_uncorrelated(first[:, :-1], first[:, 1:], detects=0.1)
    many = noise_of(model, pb.Draws.sample(model, 100, seeded(2)))
    assert_standard_normal(many["0.bias"] / 0.3, detects=0.06)
    assert_uncorrelated(many["0.bias"], many["1.bias"], detects=0.1)


def test_noise_on_weight_and_bias_of_a_layer_is_independent():
    for method in (pb.EMP(2, sigma=0.3, jitter=0), pb.posteriors.MeanField()):
        model = patched(nn.LayerNorm(4000), method)
        noise = noise_of(model, pb.Draws.sample(model, 1))
        assert_uncorrelated(noise["0.weight"], noise["0.bias"], detects=0.15)


def test_sigma_scales_the_noise_exactly():
    def noise(sigma):
        torch.manual_seed(0)
        model = patched(nn.Linear(5, 5), pb.EMP(2, sigma=sigma, jitter=0))
        return noise_of(model, pb.Draws.sample(model, 3))["0.weight"]

    torch.testing.assert_close(noise(0.5), 5 * noise(0.1), rtol=1e-12, atol=1e-12)


def test_noise_lies_on_the_zero_component_too():
    """Eq. (1): the component that is pinned at zero is M = 0, not W = 0."""
    model = patched(nn.Linear(3, 3), pb.posteriors.DropConnect(0.5, sigma=0.1))
    weights = pb.patched_sites(model)["0"].realize(pb.Draws.sample(model, 20))["weight"]
    assert (weights != 0).all()
    assert (weights.abs() < 0.05).any()


def test_noise_streams_of_a_layer_with_many_parameters_do_not_run_into_the_next_layer():
    """A deep bidirectional LSTM has 24 parameters. Streams that overlap would give other parameters the same noise."""
    model = nn.ModuleDict({"lstm": nn.LSTM(5, 5, num_layers=3, bidirectional=True), "fc": nn.Linear(5, 20)})
    pb.patch_(model, pb.posteriors.MeanField(), "lstm+fc")
    draws = pb.Draws.sample(model, 1)
    seen = {}
    for name, site in pb.patched_sites(model).items():
        for parameter, value in site.realize(draws).items():
            mean, _ = mean_field(model, name, parameter)
            noise = ((value[0] - mean) / deviation(model, name, parameter)).detach()
            seen[f"{name}.{parameter}"] = noise.flatten()[:16]
    assert len(seen) == 26
    for (one, first), (other, second) in itertools.combinations(seen.items(), 2):
        assert not torch.allclose(first, second, atol=1e-3), (one, other)
