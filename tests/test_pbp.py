"""Probabilistic backpropagation: its moments against integrals, one update against Bayes, and its published errors."""

import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from patchbayes.errors import PatchbayesError
from patchbayes_reproduce import registry
from patchbayes_reproduce.experiment import Workspace, reproduce
from patchbayes_reproduce.pbp import (
    PBP,
    Weights,
    _first,
    _PriorFactors,
    _slopes,
    _with_constant,
    log_evidence,
    moments,
    relu,
    rmse_on_test,
)
from patchbayes_reproduce.pbp_errors import PUBLISHED
from patchbayes_reproduce.regression_splits import SETS, read_splits


@pytest.mark.parametrize(("mean", "variance"), [(0.0, 1.0), (1.3, 0.4), (-0.8, 2.0), (-3.0, 0.7), (5.0, 0.1)])
def test_moments_after_a_relu_are_the_integrals(mean, variance):
    law = stats.norm(mean, math.sqrt(variance))
    first = integrate.quad(lambda a: a * law.pdf(a), 0, mean + 12 * math.sqrt(variance) + 12)[0]
    second = integrate.quad(lambda a: a**2 * law.pdf(a), 0, mean + 12 * math.sqrt(variance) + 12)[0]
    found = relu(torch.tensor(mean, dtype=torch.float64), torch.tensor(variance, dtype=torch.float64))
    assert found.mean.item() == pytest.approx(first, rel=1e-8)
    assert found.variance.item() == pytest.approx(second - first**2, rel=1e-7)


def test_units_that_are_almost_surely_off_have_finite_moments_and_gradients():
    mean = torch.tensor([-40.0, -29.9, -100.0], dtype=torch.float64, requires_grad=True)
    found = relu(mean, torch.ones(3, dtype=torch.float64))
    out, variance = found.mean, found.variance
    (out.sum() + variance.sum()).backward()
    assert torch.isfinite(torch.cat([out, variance, mean.grad])).all()


def test_slopes_are_those_of_autograd():
    generator = torch.Generator().manual_seed(3)
    network = PBP(2, 3, 5)
    for layer in network.layers:
        layer.variance = 0.1 + torch.rand(layer.mean.shape, generator=generator, dtype=torch.float64)
    x, y = (torch.randn(2, *size, generator=generator, dtype=torch.float64) for size in ((3,), ()))
    learned = [t.requires_grad_() for layer in network.layers for t in (layer.mean, layer.variance)]
    mean, variance = moments(network.layers, x)
    wanted = torch.autograd.grad(log_evidence(y - mean, variance + 1.2).sum(), learned)
    with torch.no_grad():
        inputs = _with_constant(x).unsqueeze(-1)
        by_mean = (y - mean) / (variance + 1.2)
        by_variance = 0.5 * (by_mean.square() - 1 / (variance + 1.2))
        found = _slopes(network.layers[1], inputs, _first(network.layers[0], inputs), by_mean, by_variance)
    torch.testing.assert_close(tuple(t for one in found for t in one), wanted)


def test_moments_of_the_output_are_those_of_drawn_weights():
    """With a wide hidden layer the sums are as Gaussian as is assumed: mean and variance by simulation."""
    generator = torch.Generator().manual_seed(0)
    network = PBP(1, 200, 3)
    x = torch.randn(1, 200, generator=generator, dtype=torch.float64)
    found = moments(network.layers, x)
    drawn = []
    for _ in range(4000):
        values = torch.cat([x[0], torch.ones(1, dtype=torch.float64)])
        for number, layer in enumerate(network.layers):
            noise = torch.randn(layer.mean[0].shape, generator=generator, dtype=torch.float64)
            values = (layer.mean[0] + layer.variance[0].sqrt() * noise) @ values / math.sqrt(len(values))
            if number == 0:
                values = torch.cat([values.relu(), torch.ones(1, dtype=torch.float64)])
        drawn.append(values)
    drawn = torch.cat(drawn)
    assert found[0].item() == pytest.approx(drawn.mean().item(), abs=5 * drawn.std().item() / math.sqrt(4000))
    assert found[1].item() == pytest.approx(drawn.var().item(), rel=0.12)


def test_one_update_of_weights_that_enter_linearly_is_bayes_rule():
    """With hidden units that are surely on and known, the output is Gaussian in the last weights: the exact posterior."""
    network = PBP(1, 2, 3)
    generator = torch.Generator().manual_seed(1)
    x, y = torch.tensor([[0.3, 0.8]], dtype=torch.float64), torch.tensor([0.7], dtype=torch.float64)
    first, second = network.layers
    first.mean, first.variance = 20 + torch.rand_like(first.mean), torch.full_like(first.mean, 1e-16)
    prior_mean = torch.randn(4, generator=generator, dtype=torch.float64)
    prior = 0.1 + torch.rand(4, generator=generator, dtype=torch.float64)
    second.mean, second.variance = prior_mean.view(1, 1, 4).clone(), prior.view(1, 1, 4).clone()
    known = torch.cat(
        [first.mean[0] @ torch.cat([x[0], torch.ones(1, dtype=torch.float64)]) / math.sqrt(3), torch.ones(1)]
    )
    network._learn_(x, y)
    phi = known / 2
    gain = prior * phi / ((prior * phi) @ phi + 6.0 / 5.0)
    torch.testing.assert_close(second.mean.flatten(), prior_mean + gain * (y - phi @ prior_mean), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(second.variance.flatten(), prior - gain * phi * prior, rtol=1e-6, atol=1e-8)


def test_refining_the_prior_keeps_a_weight_at_the_prior_where_it_was():
    """A factor is divided out and put back: with weights at their start nothing but lambda's law can change."""
    layers = [Weights(torch.zeros(2, 1, 2, dtype=torch.float64), torch.full((2, 1, 2), 1.2, dtype=torch.float64))]
    factors = _PriorFactors(layers, 2, 1.2)
    factors.refine_(layers)
    assert (layers[0].variance > 0).all()
    assert np.isfinite(factors.a).all()
    assert np.isfinite(factors.b).all()


def test_a_line_is_learned_with_its_noise_and_splits_do_not_touch_each_other():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 120, 1, generator=generator, dtype=torch.float64)
    noise = 0.2 * torch.randn(2, 120, generator=generator, dtype=torch.float64)
    y = torch.stack([x[0, :, 0], -x[1, :, 0]]) + noise
    network = PBP(2, 1, 10)
    network.fit_(x, y, epochs=8)
    grid = torch.linspace(-1.5, 1.5, 9, dtype=torch.float64).reshape(1, 9, 1).repeat(2, 1, 1)
    mean, variance = network.predict(grid)
    torch.testing.assert_close(mean[0], grid[0, :, 0], rtol=0, atol=0.25)
    torch.testing.assert_close(mean[1], -grid[1, :, 0], rtol=0, atol=0.25)
    assert (variance > 0.01).all()
    assert (variance < 0.4).all()


def test_the_experiment_needs_data_and_says_what_it_ran(tmp_path, monkeypatch):
    found = registry.experiment("pbp")
    data = os.environ.get("PATCHBAYES_DATA")
    monkeypatch.delenv("PATCHBAYES_DATA", raising=False)
    with pytest.raises(PatchbayesError, match="pbp: needs a data folder"):
        reproduce(found, "smoke", Workspace(work_dir=tmp_path), tmp_path)
    if data is None:
        pytest.skip("the regression sets are not here: set PATCHBAYES_DATA")
    result = reproduce(found, "smoke", Workspace(Path(data), tmp_path), tmp_path)["result"]
    (table,) = found.tables(result).values()
    assert [line[0] for line in table[1]] == ["yacht"]
    verdicts = {row.what: row.verdict for row in found.rows(result)}
    assert set(verdicts.values()) == {"not comparable"}  # one epoch
    full = {
        "epochs": 40,
        "sets": {name: {"rmse": [m - 1e-3, m + 1e-3], "hidden": 50} for name, (m, _) in PUBLISHED.items()},
    }
    assert {row.verdict for row in found.rows(full)} == {"within"}
    full["sets"]["yacht"]["rmse"] = [1.2, 1.21]
    assert [row.what for row in found.rows(full) if row.verdict == "outside"] == ["test RMSE of yacht, PBP"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["yacht", "boston"])
def test_the_published_errors_come_out(name):
    """Within two standard errors of the difference, over all twenty published splits."""
    if "PATCHBAYES_DATA" not in os.environ:
        pytest.skip("the regression sets are not here: set PATCHBAYES_DATA")
    stacks = read_splits(name, Path(os.environ["PATCHBAYES_DATA"]), range(SETS[name].splits))
    errors = torch.cat([rmse_on_test(stack, SETS[name].hidden) for stack in stacks])
    published, published_error = PUBLISHED[name]
    error = float(errors.std()) / math.sqrt(len(errors))
    assert abs(float(errors.mean()) - published) < 2 * math.hypot(error, published_error)
