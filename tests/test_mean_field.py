"""The mean-field Gaussian, the usual rival."""

import numpy as np
import pytest
import torch
from torch import nn

import patchbayes as pb
from statistics_helper import assert_standard_normal, assert_uncorrelated
from stored import mean_field, patched, posterior, seeded

# The mean-field Gaussian


@pytest.mark.parametrize("scale", [0.1, 0.5])
def test_mean_field_starts_at_the_modules_value_with_a_deviation_relative_to_its_size(scale):
    plain = nn.Linear(4, 3).double()
    start = {name: p.detach().clone() for name, p in plain.named_parameters()}
    model = patched(plain, pb.posteriors.MeanField(scale=scale))
    for name, value in start.items():
        mean, before_softplus = mean_field(model, "0", name)
        assert torch.equal(mean, value)
        deviation = np.log1p(np.exp(before_softplus.numpy()))
        np.testing.assert_allclose(deviation, scale * np.sqrt((value.numpy() ** 2).mean()), rtol=1e-10)


def test_mean_field_draws_are_mean_plus_deviation_times_standard_normal_noise():
    model = patched(nn.Linear(100, 100), pb.posteriors.MeanField(scale=0.5))
    mean, before_softplus = mean_field(model)
    values = pb.patched_sites(model)["0"].realize(pb.Draws.sample(model, 2, seeded(1)))["weight"].detach()
    noise = (values - mean) / nn.functional.softplus(before_softplus)
    assert_standard_normal(noise[0], detects=0.06)
    assert_uncorrelated(noise[0], noise[1], detects=0.1)


def test_mean_field_gradients_are_the_reparametrized_ones():
    """w = m + softplus(s) eps: dL/dm = dL/dw and dL/ds = dL/dw eps sigmoid(s)."""
    torch.manual_seed(0)
    model = patched(nn.Linear(3, 2), pb.posteriors.MeanField(scale=0.5))
    x, target = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)
    one = pb.Draws.sample(model, 1, seeded(5))
    (pb.forward_draws(model, x, one)[0] - target).square().sum().backward()
    drawn = {name: value[0].detach().numpy() for name, value in pb.patched_sites(model)["0"].realize(one).items()}
    residual = x.numpy() @ drawn["weight"].T + drawn["bias"] - target.numpy()
    outer = {"weight": 2 * residual.T @ x.numpy(), "bias": 2 * residual.sum(0)}
    for name, gradient in outer.items():
        mean, s = (part.numpy() for part in mean_field(model, "0", name))
        noise = (drawn[name] - mean) / np.log1p(np.exp(s))
        np.testing.assert_allclose(model[0]._parameters[name].grad, gradient, rtol=1e-10)
        ours = posterior(model).before_softplus[name].grad
        np.testing.assert_allclose(ours, gradient * noise / (1 + np.exp(-s)), rtol=1e-9, atol=1e-12)
