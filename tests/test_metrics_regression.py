"""Error, log density, CRPS and intervals of mixtures of Gaussians against quadrature, scipy and scikit-learn."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats
from sklearn.metrics import root_mean_squared_error

import patchbayes.metrics.regression as regression
from patchbayes.errors import PatchbayesError
from patchbayes.metrics import (
    crps,
    gaussian_crps,
    interval_coverage,
    interval_width,
    log_density,
    pit,
    quantile_calibration,
    rmse,
)


def mixture(seed, draws=4, size=5, targets=2):
    generator = torch.Generator().manual_seed(seed)
    means = 2 * torch.randn(draws, size, targets, generator=generator, dtype=torch.float64)
    y = 2 * torch.randn(size, targets, generator=generator, dtype=torch.float64)
    weights = torch.rand(draws, generator=generator, dtype=torch.float64) + 0.1
    return means, y, weights / weights.sum()


PRECISION = torch.tensor([0.5, 3.0], dtype=torch.float64)


def test_rmse_is_averaged_over_targets_as_in_scikit_learn():
    predicted, targets, _ = mixture(0)
    predicted = predicted[0] * torch.tensor([1.0, 30.0])
    assert rmse(predicted, targets) == pytest.approx(root_mean_squared_error(targets, predicted))
    assert rmse(predicted[:, 0], targets[:, 0]) == pytest.approx(
        root_mean_squared_error(targets[:, 0], predicted[:, 0])
    )
    assert rmse(predicted, predicted) == 0


def test_rmse_agrees_with_torchmetrics():
    functional = pytest.importorskip("torchmetrics.functional")
    predicted, targets, _ = mixture(1)
    theirs = functional.mean_squared_error(predicted[0], targets, squared=False, num_outputs=2)
    assert rmse(predicted[0], targets) == pytest.approx(float(theirs.mean()), abs=1e-6)


def test_log_density_is_that_of_the_mixture_written_out():
    means, y, weights = mixture(2)
    found = log_density(means, y, PRECISION, weights)
    for b in range(5):
        density = sum(
            float(w) * np.prod(stats.norm.pdf(y[b], means[s, b], PRECISION**-0.5)) for s, w in enumerate(weights)
        )
        assert float(found[b]) == pytest.approx(math.log(density))
    equal = log_density(means, y, PRECISION, torch.full((4,), 0.25))
    torch.testing.assert_close(log_density(means, y, PRECISION), equal)
    assert not torch.allclose(log_density(means, y, PRECISION), found)
    torch.testing.assert_close(log_density(means, y, 2.0), log_density(means, y, torch.tensor([2.0, 2.0])))
    torch.testing.assert_close(log_density(means, y), log_density(means, y, 1.0))


def test_the_papers_value_at_zero_error():
    """tau = 0.1: the log density of a perfect prediction is -2.07, its Kin8nm row."""
    y = torch.zeros(3, 1)
    assert float(log_density(torch.zeros(2, 3, 1), y, 0.1).mean()) == pytest.approx(-2.07, abs=0.005)


def test_log_density_does_not_underflow():
    found = log_density(torch.zeros(3, 1, 1), torch.full((1, 1), 1e4), 1.0)
    assert float(found) == pytest.approx(-0.5e8, rel=1e-6)


def test_the_distribution_function_is_that_of_the_mixture():
    means, y, weights = mixture(3)
    expected = sum(
        float(w) * stats.norm.cdf(y.numpy(), means[s].numpy(), (PRECISION**-0.5).numpy()) for s, w in enumerate(weights)
    )
    np.testing.assert_allclose(pit(means, y, PRECISION, weights), expected, rtol=1e-12)
    assert not torch.allclose(pit(means, y, PRECISION), pit(means, y, PRECISION, weights))
    assert not torch.allclose(pit(means, y), pit(means, y, PRECISION))


@pytest.mark.parametrize("draws", [1, 2, 3, 4, 7])
def test_crps_is_the_integral_of_the_squared_distance_of_distribution_functions(draws):
    means, y, weights = mixture(draws, draws=draws)
    found = crps(means, y, PRECISION, weights)
    for b in range(2):
        for d in range(2):

            def function(x, b=b, d=d):
                z = (x - means[:, b, d]) * PRECISION[d] ** 0.5
                return float((weights * torch.special.ndtr(z)).sum())

            target = float(y[b, d])
            below = integrate.quad(lambda x, f=function: f(x) ** 2, target - 30, target, limit=300, epsabs=1e-10)[0]
            above = integrate.quad(lambda x, f=function: (1 - f(x)) ** 2, target, target + 30, limit=300, epsabs=1e-10)[
                0
            ]
            assert float(found[b, d]) == pytest.approx(below + above, rel=1e-6)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 8), st.integers(1, 4), st.integers(1, 3))
def test_crps_is_the_double_sum_written_out(seed, draws, size, targets):
    means, y, weights = mixture(seed, draws, size, targets)

    def distance(mean, variance):
        deviation = variance**0.5
        normal = torch.distributions.Normal(0.0, 1.0)
        z = mean / deviation
        return 2 * deviation * normal.log_prob(z).exp() + mean * (2 * normal.cdf(z) - 1)

    first = (weights.view(-1, 1, 1) * distance(y - means, 0.5)).sum(0)
    pairs = weights.view(-1, 1, 1, 1) * weights.view(1, -1, 1, 1) * distance(means[:, None] - means[None], 1.0)
    torch.testing.assert_close(crps(means, y, 2.0, weights), first - pairs.sum((0, 1)) / 2)


def test_crps_of_one_gaussian():
    means, y, _ = mixture(4, draws=1)
    deviation = torch.full_like(y, 0.5)
    torch.testing.assert_close(gaussian_crps(means[0], deviation, y), crps(means, y, 4.0))
    # The known value at the mean: sigma (sqrt(2) - 1) / sqrt(pi).
    assert float(gaussian_crps(torch.zeros(1), torch.full((1,), 2.0), torch.zeros(1))) == pytest.approx(
        2 * (math.sqrt(2) - 1) / math.sqrt(math.pi)
    )
    # Far away it is the distance less sigma / sqrt(pi).
    assert float(gaussian_crps(torch.zeros(1), torch.ones(1), torch.full((1,), 50.0))) == pytest.approx(
        50 - 1 / math.sqrt(math.pi)
    )


def test_crps_of_sharp_draws_is_the_score_of_an_ensemble():
    functional = pytest.importorskip("torchmetrics.functional.regression")
    means, y, _ = mixture(5, draws=9, targets=1)
    if not hasattr(functional, "continuous_ranked_probability_score"):
        pytest.skip("this version of torchmetrics has no CRPS")
    theirs = functional.continuous_ranked_probability_score(means[..., 0].T, y[:, 0])
    assert float(crps(means, y, 1e12).mean()) == pytest.approx(float(theirs), abs=1e-5)


@pytest.mark.parametrize("function", [log_density, pit, crps])
def test_pieces_and_precision_of_the_input_do_not_matter(function, monkeypatch):
    means, y, weights = mixture(6, draws=5, size=11)
    whole = function(means, y, PRECISION, weights)
    monkeypatch.setattr(regression, "_VALUES", 23)
    torch.testing.assert_close(function(means, y, PRECISION, weights), whole)
    single = function(means.float(), y.float(), PRECISION.float(), weights.float())
    torch.testing.assert_close(single, whole, rtol=1e-4, atol=1e-5)
    assert single.dtype == torch.float64


def test_coverage_and_width():
    low, high = torch.tensor([[0.0], [0.0], [1.0]]), torch.tensor([[1.0], [2.0], [5.0]])
    y = torch.tensor([[1.0], [2.5], [3.0]])
    assert interval_coverage(low, high, y) == pytest.approx(2 / 3)
    assert interval_coverage(low[:, 0], high[:, 0], y[:, 0]) == pytest.approx(2 / 3)
    assert interval_width(low, high) == pytest.approx(7 / 3)


def test_quantiles_of_a_calibrated_prediction_are_reached_as_often_as_they_say():
    generator = torch.Generator().manual_seed(8)
    means = torch.randn(6, 20_000, 1, generator=generator, dtype=torch.float64)
    drawn = torch.randint(6, (20_000,), generator=generator)
    y = means[drawn, torch.arange(20_000)] + torch.randn(20_000, 1, generator=generator, dtype=torch.float64) * 0.5
    right = quantile_calibration(pit(means, y, 4.0))
    # The bound of Dvoretzky, Kiefer, Wolfowitz and Massart for a false alarm of 1e-6.
    bound = math.sqrt(math.log(2 / 1e-6) / (2 * 20_000))
    assert (right.observed - right.level).abs().max() < bound
    assert right.error < bound
    overconfident = quantile_calibration(pit(means, y, 40.0))
    assert (overconfident.observed - overconfident.level).abs().max() > 3 * bound
    torch.testing.assert_close(right.level, torch.arange(1, 20, dtype=torch.float64) / 20)
    three = quantile_calibration(pit(means, y, 4.0), num_levels=3)
    assert three.level.tolist() == [0.25, 0.5, 0.75]
    assert float(three.observed[1]) == float(right.observed[9])


def test_observed_shares_are_counted_exactly():
    found = quantile_calibration(torch.tensor([0.1, 0.25, 0.3, 0.9]), num_levels=3)
    assert found.observed.tolist() == [0.5, 0.75, 0.75]
    assert found.error == pytest.approx((0.25 + 0.25 + 0) / 3)


def test_bad_input_is_refused():
    means, y, weights = mixture(7)
    wrong = {
        "rmse, shapes": lambda: rmse(means[0], y[:, 0]),
        "rmse, draws": lambda: rmse(means, means),
        "rmse, nothing": lambda: rmse(y[:0], y[:0]),
        "density, shapes": lambda: log_density(means[0], y),
        "density, targets": lambda: log_density(means, y[:, :1]),
        "density, no draws": lambda: log_density(means[:0], y),
        "precision": lambda: log_density(means, y, 0.0),
        "precision, infinite": lambda: pit(means, y, math.inf),
        "precision, not a number": lambda: pit(means, y, math.nan),
        "precision, shape": lambda: crps(means, y, torch.ones(3)),
        "weights, number": lambda: crps(means, y, 1.0, weights[:-1]),
        "weights, sum": lambda: crps(means, y, 1.0, weights * 2),
        "weights, negative": lambda: crps(means, y, 1.0, torch.tensor([1.5, -0.5, 0.0, 0.0])),
        "deviation": lambda: gaussian_crps(y, 0 * y, y),
        "deviation, shape": lambda: gaussian_crps(y, y[:1], y),
        "interval, shapes": lambda: interval_coverage(y[:-1], y, y),
        "interval, order": lambda: interval_coverage(y + 1, y, y),
        "interval, not a number": lambda: interval_width(y * math.nan, y),
        "interval, nothing": lambda: interval_width(y[:0], y[:0]),
        "levels": lambda: quantile_calibration(torch.rand(3), num_levels=0),
        "no distribution function": lambda: quantile_calibration(torch.tensor([1.5])),
        "no values": lambda: quantile_calibration(torch.zeros(0)),
    }
    for what, call in wrong.items():
        with pytest.raises(PatchbayesError):
            pytest.fail(f"{what} was accepted: {call()}")
