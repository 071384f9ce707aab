"""fit_temperature and fit_variance_factor on few examples: never much worse than no temperature, right with many."""

import copy
import math

import numpy as np
import pytest
import scipy.optimize
import scipy.special
import scipy.stats
import torch
from torch import nn

import patchbayes as pb
from patchbayes.bayesianizing.score import Average, best_temperature
from patchbayes.errors import PatchbayesError
from patchbayes.metrics import fit_temperature, fit_variance_factor

SHARPNESS = {"unsure": (10, 2.0), "confident": (10, 6.0), "nearly always right": (2, 8.0)}


def labelled(size, temperature, sharpness, generator):
    """Logits whose labels come from softmax(logits / temperature)."""
    classes, scale = SHARPNESS[sharpness]
    logits = scale * torch.randn(size, classes, dtype=torch.float64, generator=generator)
    return logits, torch.multinomial((logits / temperature).softmax(1), 1, generator=generator).squeeze(1)


def expected_nll(logits, truth, temperature):
    """NLL at a temperature, expected over labels that come from the true one: fresh data without their noise."""
    return float(-((logits / truth).softmax(1) * (logits / temperature).log_softmax(1)).sum(1).mean())


def excess(size, truth, sharpness, repetitions, **options):
    """Mean expected NLL on fresh data above that of T = 1 and above the best; and the temperatures."""
    generator = torch.Generator().manual_seed(11)
    fresh, _ = labelled(4000, truth, sharpness, generator)
    found = [fit_temperature(*labelled(size, truth, sharpness, generator), **options) for _ in range(repetitions)]
    nll = np.mean([expected_nll(fresh, truth, t) for t in found])
    return nll - expected_nll(fresh, truth, 1.0), nll - expected_nll(fresh, truth, truth), np.array(found)


@pytest.mark.parametrize("sharpness", SHARPNESS)
@pytest.mark.parametrize("truth", [0.6, 1.0, 2.0])
@pytest.mark.parametrize("size", [30, 100, 1000])
def test_a_fitted_temperature_is_never_much_worse_than_none_and_finds_the_truth(size, truth, sharpness):
    above_one, above_best, found = excess(size, truth, sharpness, 60 if size < 1000 else 20)
    assert above_one < 0.7 / size  # a parameter fitted without any harm would cost 0.5 / size
    assert above_best < 1.2 / size
    assert np.all((found > 0.2) & (found < 5))
    if size == 1000:
        assert np.median(found) == pytest.approx(truth, rel=0.1)


def test_without_the_prior_thirty_examples_do_harm():
    """The control: the least NLL alone fails the bounds above, by far."""
    above_one, _, found = excess(30, 1.0, "nearly always right", 60, prior=None)
    assert above_one > 0.1
    assert found.min() < 0.05


def test_many_examples_leave_the_prior_nothing_to_say():
    generator = torch.Generator().manual_seed(2)
    gaps = []
    for size in (100, 1000, 10_000):
        data = labelled(size, 2.0, "unsure", generator)
        gaps.append(abs(math.log(fit_temperature(*data) / fit_temperature(*data, prior=None))))
    assert gaps[0] > 4 * gaps[1] > 16 * gaps[2] > 0


@pytest.mark.parametrize("prior", [0.1, 0.5, 2.0, None])
def test_it_is_the_minimum_of_what_the_docstring_says(prior):
    logits, targets = labelled(40, 2.0, "confident", torch.Generator().manual_seed(3))

    def loss(x):
        log_probs = scipy.special.log_softmax(logits.numpy() / math.exp(x), 1)
        return -log_probs[np.arange(40), targets.numpy()].sum() + (0 if prior is None else x**2 / (2 * prior**2))

    best = scipy.optimize.minimize_scalar(loss, bounds=(-4.6, 4.6), method="bounded", options={"xatol": 1e-10}).x
    assert math.log(fit_temperature(logits, targets, prior=prior)) == pytest.approx(best, abs=1e-6)


@pytest.mark.parametrize(("gap", "best"), [(0.05, -3.66), (0.03, -0.30)])
def test_the_deeper_of_two_minima_is_found(gap, best):
    """Sixty pairs of nearly equal logits, all of them right: one minimum far from T = 1, one near, either may be deeper."""
    logits = torch.tensor([[gap, 0.0]], dtype=torch.float64).expand(60, 2)

    def loss(x):
        return 60 * np.log1p(np.exp(-gap * np.exp(-x))) + 2 * x**2

    grid = np.linspace(-4.6, 4.6, 20_001)
    inner = (loss(grid)[1:-1] < loss(grid)[:-2]) & (loss(grid)[1:-1] < loss(grid)[2:])
    assert inner.sum() == 2
    assert grid[loss(grid).argmin()] == pytest.approx(best, abs=0.01)
    found = fit_temperature(logits, torch.zeros(60, dtype=torch.int64))
    assert math.log(found) == pytest.approx(grid[loss(grid).argmin()], abs=1e-3)


@pytest.mark.parametrize("prior", [0.0, -1.0, math.inf, math.nan])
def test_impossible_priors_are_refused(prior):
    logits, targets = labelled(10, 1.0, "unsure", torch.Generator().manual_seed(1))
    with pytest.raises(PatchbayesError, match="prior="):
        fit_temperature(logits, targets, prior=prior)


# A factor on the variance


def gaussian_data(size, factor, generator, draws=3, targets=2):
    """Means of draws, their noise's variances, and targets of the mixture stretched by the factor."""
    means = torch.randn(draws, size, targets, dtype=torch.float64, generator=generator)
    variances = 0.2 + torch.rand(draws, size, targets, dtype=torch.float64, generator=generator)
    weights = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)[:draws]
    weights = weights / weights.sum()
    center = (weights.view(-1, 1, 1) * means).sum(0)
    chosen = torch.multinomial(weights, size, replacement=True, generator=generator)
    rows = torch.arange(size)
    noise = torch.randn(size, targets, dtype=torch.float64, generator=generator)
    y = means[chosen, rows] + variances[chosen, rows].sqrt() * noise
    return means, variances, center + factor**0.5 * (y - center), weights


@pytest.mark.parametrize("factor", [0.4, 1.0, 4.0])
def test_the_variance_factor_is_found_and_is_the_minimum(factor):
    means, variances, y, weights = gaussian_data(3000, factor, torch.Generator().manual_seed(1))
    found = fit_variance_factor(means, variances, y, weights)
    assert found == pytest.approx(factor, rel=0.08)
    few = means[:, :25], variances[:, :25], y[:25], weights

    def loss(x, prior=1.0):
        f, v, t, w = (part.numpy() for part in few)
        center = np.einsum("s,sbd->bd", w, f)
        means = center + math.exp(x / 2) * (f - center)
        each = scipy.stats.norm.logpdf(t, means, np.sqrt(math.exp(x) * v)).sum(-1)
        return -scipy.special.logsumexp(each, axis=0, b=w[:, None]).sum() + math.log1p(x**2 / (2 * prior**2))

    best = scipy.optimize.minimize_scalar(loss, bounds=(-4.6, 4.6), method="bounded", options={"xatol": 1e-10}).x
    assert math.log(fit_variance_factor(*few)) == pytest.approx(best, abs=1e-6)
    tight = scipy.optimize.minimize_scalar(lambda x: loss(x, 0.2), bounds=(-4.6, 4.6), method="bounded").x
    assert math.log(fit_variance_factor(*few, prior=0.2)) == pytest.approx(tight, abs=1e-4)


@pytest.mark.parametrize("factor", [1e-9, 1e-4, 5000.0, 1e12])
@pytest.mark.parametrize("draws", [1, 3])
def test_a_variance_factor_may_be_any(factor, draws):
    """Targets in units of another size: 40 examples find the factor as well as they can, and are not pulled towards 1."""
    given = gaussian_data(40, factor, torch.Generator().manual_seed(2), draws)
    near = gaussian_data(40, 1.0, torch.Generator().manual_seed(2), draws)
    assert fit_variance_factor(*given) / factor == pytest.approx(fit_variance_factor(*near, prior=None), rel=0.05)


def test_targets_that_are_predicted_exactly_leave_a_small_factor():
    means = torch.randn(1, 30, 1, generator=torch.Generator().manual_seed(0))
    assert 1e-14 < fit_variance_factor(means, torch.ones(1), means[0]) < 1e-6
    assert 1e-14 < best_temperature([Average("numbers", (means, torch.ones_like(means)), None)], [means[0]]) < 1e-6


@pytest.mark.parametrize("factor", [0.4, 1.0, 4.0])
@pytest.mark.parametrize("size", [10, 30, 300])
def test_a_fitted_factor_is_never_much_worse_than_none(size, factor):
    """One Gaussian, where the expected NLL is known: (log T + factor / T) / 2 for each target."""
    generator = torch.Generator().manual_seed(4)
    costs = []
    for _ in range(200):
        means, variances, y, weights = gaussian_data(size, factor, generator, draws=1)
        found = fit_variance_factor(means, variances, y, weights)
        costs.append(math.log(found) + factor / found)  # of two targets
    assert np.mean(costs) - factor < 0.8 / size
    assert np.mean(costs) - (math.log(factor) + 1) < 1.0 / size


def test_variance_factors_refuse_bad_input():
    means, variances, y, weights = gaussian_data(6, 1.0, torch.Generator().manual_seed(1))
    cases = [
        (lambda: fit_variance_factor(means[0], variances, y, weights), "expected the means of the draws"),
        (lambda: fit_variance_factor(means, variances, y[:5], weights), "expected the means of the draws"),
        (lambda: fit_variance_factor(means[:, :0], variances[:, :0], y[:0], weights), "no examples"),
        (lambda: fit_variance_factor(means, variances[:, :4], y, weights), "expand to"),
        (lambda: fit_variance_factor(means, -variances, y, weights), "above 0"),
        (lambda: fit_variance_factor(means, variances, y / 0, weights), "finite targets"),
        (lambda: fit_variance_factor(means, variances, y, 2 * weights), "weights"),
        (lambda: fit_variance_factor(means, variances, y, weights, prior=0.0), "prior=0.0"),
    ]
    for act, message in cases:
        with pytest.raises(PatchbayesError, match=message):
            act()


# From predictions


def network(outputs):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, outputs)).double()
    pb.patch_(model, pb.EMP(3, jitter=0.8))
    return model


@pytest.mark.parametrize("set_before", [1.0, 3.0])
def test_a_prediction_finds_its_temperature_whatever_it_has_now(set_before):
    model, x = network(3), torch.randn(2000, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(2)
    draws = pb.Draws.enumerate(model)
    for likelihood in (pb.likelihoods.Categorical(), pb.likelihoods.Bernoulli(), pb.likelihoods.Gaussian(2.0)):
        truth = copy.deepcopy(likelihood).set_temperature_(0.5)
        scaled = {"output": lambda y: 3 * y, "keep_draws": True}
        said = pb.predict(model, x, draws, likelihood=truth, **scaled)
        if isinstance(likelihood, pb.likelihoods.Categorical):
            targets = torch.multinomial(said.probs, 1, generator=generator)[:, 0]
            targets[::10] = -100
        elif isinstance(likelihood, pb.likelihoods.Bernoulli):
            targets = torch.bernoulli(said.probs, generator=generator).long()
            targets[::10] = -100
        else:
            picked = torch.randint(9, (2000,), generator=generator)
            means, variances = said.mixture()
            noise = torch.randn(2000, 3, dtype=torch.float64, generator=generator)
            targets = means[picked, torch.arange(2000)] + noise * variances[0].sqrt()
        prediction = pb.predict(model, x, draws, likelihood=likelihood.set_temperature_(set_before), **scaled)
        found = prediction.fit_temperature(targets)
        assert found == pytest.approx(0.5, rel=0.1), likelihood
        likelihood.set_temperature_(found)
        fitted = pb.predict(model, x, draws, likelihood=likelihood, **scaled)
        for name in ("probs", "variance"):
            if hasattr(said, name):
                torch.testing.assert_close(getattr(fitted, name), getattr(said, name), rtol=0.2, atol=0.03)


def test_ignored_labels_do_not_move_the_temperature():
    model, x = network(3), torch.randn(60, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    targets = torch.randint(3, (60,), generator=torch.Generator().manual_seed(2))
    kept = torch.arange(60) % 3 != 0
    prediction = pb.predict(model, x, 6)
    ignoring = targets.where(kept, -100)
    assert prediction.fit_temperature(ignoring) == pytest.approx(prediction[kept].fit_temperature(targets[kept]))
    other = targets.where(kept, 7)
    assert prediction.fit_temperature(other, ignore_index=7) == pytest.approx(prediction.fit_temperature(ignoring))
    labels = pb.predict(model, x, 6, likelihood=pb.likelihoods.Bernoulli(), output=lambda y: y[:, 0])
    some = (targets > 0).long().where(kept, -100)
    assert labels.fit_temperature(some) == pytest.approx(labels[kept].fit_temperature(some[kept]))
    assert labels.fit_temperature(some.where(kept, 9), ignore_index=9) == pytest.approx(labels.fit_temperature(some))


def test_mean_and_variance_are_enough_for_a_factor_where_there_is_no_density():
    from test_likelihoods import Poisson

    model, x = network(2), torch.randn(500, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    prediction = pb.predict(model, x, "exact", likelihood=Poisson())
    noise = torch.randn(500, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    targets = prediction.mean + (3 * prediction.variance).sqrt() * noise
    assert prediction.fit_temperature(targets) == pytest.approx(3, rel=0.15)
    regression = pb.predict(model, x, 4, likelihood=pb.likelihoods.Gaussian())
    with pytest.raises(PatchbayesError, match="keep_draws=True"):
        regression.fit_temperature(targets)
    with pytest.raises(PatchbayesError, match="shape"):
        prediction.fit_temperature(targets[:4])
