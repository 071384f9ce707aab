"""predict for regression: a mixture of Gaussians, against SciPy."""

from collections import OrderedDict

import numpy as np
import pytest
import scipy.optimize
import scipy.special
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import patchbayes as pb
from patchbayes.errors import PatchbayesError
from patchbayes.prediction import RegressionPrediction
from statistics_helper import FALSE_ALARM, assert_standard_normal

P = (0.5, 0.3, 0.2)


def regressor(targets=2, seed=0):
    torch.manual_seed(seed)
    layers = OrderedDict(hidden=nn.Linear(3, 8), norm=nn.LayerNorm(8), tanh=nn.Tanh(), fc=nn.Linear(8, targets))
    return nn.Sequential(layers).double()


def patched(method=None, targets=2):
    model = regressor(targets)
    pb.patch_(model, method or pb.EMP(3, jitter=0.7, probabilities=P))
    return model


def some_inputs(rows=5, seed=3):
    return torch.randn(rows, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def explicit_means(model, inputs, draws):
    """(S, B, D), a plain evaluation forward for each draw."""
    model.eval()
    outputs = []
    for i in range(len(draws)):
        with pb.use_draw(model, draws[i]):
            outputs.append(model(inputs).numpy())
    model.train()
    return np.stack(outputs)


@pytest.fixture(scope="module")
def mixture():
    """A prediction over all nine networks, with unequal weights; the weights and the means, computed apart from it."""
    with torch.random.fork_rng():
        model, x = patched(), some_inputs()
        draws = pb.Draws.enumerate(model)
        weights = np.prod(np.asarray(P)[draws.assignments().numpy()], axis=1)
        means = explicit_means(model, x, draws)
        prediction = pb.predict(model, x, draws, likelihood=pb.likelihoods.Gaussian(precision=4.0), keep_draws=True)
    return prediction, weights, means


def test_mean_and_covariance_are_those_of_the_mixture(mixture):
    prediction, weights, means = mixture
    assert isinstance(prediction, RegressionPrediction)
    assert isinstance(prediction, pb.prediction.Prediction)
    assert prediction.standard_error_kind == "exact"
    assert (prediction.standard_error == 0).all()
    assert prediction.precision == pytest.approx(4.0, rel=1e-12)
    np.testing.assert_allclose(prediction.weights.numpy(), weights, rtol=1e-12)
    np.testing.assert_allclose(prediction.draw_means.numpy(), means, rtol=1e-12)
    mean = np.einsum("s,sbd->bd", weights, means)
    np.testing.assert_allclose(prediction.mean.numpy(), mean, rtol=1e-12)
    for b in range(len(prediction)):
        epistemic = np.cov(means[:, b], rowvar=False, aweights=weights, ddof=0)
        # Appendix B.3: (1/S) sum f f^T - mean mean^T + I / tau.
        printed = np.einsum("s,sd,se->de", weights, means[:, b], means[:, b]) - np.outer(mean[b], mean[b])
        np.testing.assert_allclose(epistemic, printed, rtol=1e-9)
        np.testing.assert_allclose(prediction.epistemic_covariance[b].numpy(), epistemic, rtol=1e-9)
        np.testing.assert_allclose(prediction.covariance[b].numpy(), epistemic + np.eye(2) / 4, rtol=1e-9)
        np.testing.assert_allclose(prediction.epistemic_variance[b].numpy(), np.diag(epistemic), rtol=1e-9)
        np.testing.assert_allclose(prediction.variance[b].numpy(), np.diag(epistemic) + 0.25, rtol=1e-9)
    np.testing.assert_allclose(prediction.aleatoric_variance.numpy(), np.full((5, 2), 0.25), rtol=1e-12)


@pytest.mark.parametrize("make", [pb.Draws.sample, pb.Draws.stratified])
def test_draws_are_averaged_with_their_standard_error(make, generator):
    model, x = patched(pb.EMP(3, jitter=0.7)), some_inputs()
    draws = make(model, 12, generator)
    means = explicit_means(model, x, draws)
    prediction = pb.predict(model, x, draws, likelihood=pb.likelihoods.Gaussian())
    assert prediction.draw_means is None
    assert prediction.num_draws == 12
    np.testing.assert_allclose(prediction.mean.numpy(), means.mean(0), rtol=1e-10)
    np.testing.assert_allclose(prediction.epistemic_variance.numpy(), means.var(0), rtol=1e-9)
    independent = means if make == pb.Draws.sample else means.reshape(4, 3, 5, 2).mean(1)
    error = independent.std(0, ddof=1) / np.sqrt(len(independent))
    np.testing.assert_allclose(prediction.standard_error.numpy(), error, rtol=1e-8)


def test_a_large_offset_does_not_drown_the_epistemic_variance():
    model, x = patched(), some_inputs()
    plain = pb.predict(model, x, 8, likelihood=pb.likelihoods.Gaussian())
    shifted = pb.predict(model, x, 8, likelihood=pb.likelihoods.Gaussian(), output=lambda y: y + 1e7)
    torch.testing.assert_close(shifted.epistemic_variance, plain.epistemic_variance, rtol=1e-6, atol=0)
    torch.testing.assert_close(shifted.standard_error, plain.standard_error, rtol=1e-6, atol=0)


@settings(max_examples=40, deadline=None)
@given(values=st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=6), scale=st.sampled_from([1e-6, 1.0, 1e6]))
def test_epistemic_variance_is_never_negative(values, scale):
    model = patched(pb.EMP(2), targets=1)
    remaining = iter(values)
    prediction = pb.predict(
        model,
        some_inputs(1),
        pb.Draws.sample(model, len(values)),
        likelihood=pb.likelihoods.Gaussian(),
        output=lambda y: torch.full_like(y, next(remaining) * scale),
        engine="loop",
    )
    expected = np.var(np.asarray(values) * scale)
    assert float(prediction.epistemic_variance) >= 0
    np.testing.assert_allclose(float(prediction.epistemic_variance), expected, rtol=1e-6, atol=1e-9 * scale**2)


def test_precision_of_the_likelihood_sets_the_noise_only():
    model, x = patched(), some_inputs()
    fine, coarse = (
        pb.predict(model, x, 6, likelihood=pb.likelihoods.Gaussian(precision)) for precision in (100.0, 0.1)
    )
    assert torch.equal(fine.mean, coarse.mean)
    assert torch.equal(fine.epistemic_covariance, coarse.epistemic_covariance)
    np.testing.assert_allclose((coarse.variance - fine.variance).numpy(), 10 - 0.01, rtol=1e-9)
    learned = pb.likelihoods.Gaussian(3.0, learn=True)
    with torch.no_grad():
        learned.log_precision += np.log(2)
    prediction = pb.predict(model, x, 6, likelihood=learned)
    assert prediction.precision == pytest.approx(6.0, rel=1e-12)
    assert not prediction.variance.requires_grad


def test_gaussian_log_prob_is_that_of_independent_normals():
    outputs = torch.randn(3, 4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    targets = torch.randn(4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    expected = scipy.stats.norm.logpdf(targets.numpy(), outputs.numpy(), 0.2)
    likelihood = pb.likelihoods.Gaussian(precision=25.0)
    np.testing.assert_allclose(likelihood.log_prob(outputs, targets).detach().numpy(), expected.sum(-1), rtol=1e-10)
    one = likelihood.log_prob(outputs[..., 0], targets[:, 0]).detach().numpy()
    np.testing.assert_allclose(one, expected[..., 0], rtol=1e-10)
    with pytest.raises(PatchbayesError, match="shape of one output"):
        likelihood.log_prob(outputs, targets[:, :1])


def test_log_prob_is_that_of_the_mixture(mixture):
    prediction, weights, means = mixture
    targets = torch.tensor(means[0] + np.linspace(-1.5, 2, 10).reshape(5, 2))
    expected = [
        scipy.special.logsumexp(
            [scipy.stats.multivariate_normal(mean, np.eye(2) / 4).logpdf(y) for mean in means[:, b]], b=weights
        )
        for b, y in enumerate(targets.numpy())
    ]
    np.testing.assert_allclose(prediction.log_prob(targets).numpy(), expected, rtol=1e-10)
    far = prediction.log_prob(targets + 1e3)  # where every density underflows
    assert torch.isfinite(far).all()
    assert (far < -1e5).all()


def test_log_prob_integrates_to_one():
    prediction = pb.predict(
        patched(targets=1), some_inputs(1), 7, likelihood=pb.likelihoods.Gaussian(precision=2.0), keep_draws=True
    )
    grid = torch.linspace(-15, 15, 3001, dtype=torch.float64)
    density = torch.stack([prediction.log_prob(y.view(1, 1)).exp() for y in grid])
    assert float(torch.trapezoid(density.flatten(), grid)) == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("level", [1e-4, 0.05, 0.3, 0.5, 0.9, 0.999])
def test_quantile_is_the_root_of_the_mixture_cdf(mixture, level):
    prediction, weights, means = mixture
    found = prediction.quantile(level).numpy()
    for b, d in np.ndindex(found.shape):

        def cdf(y, b=b, d=d):
            return weights @ scipy.stats.norm.cdf(y, means[:, b, d], 0.5) - level

        root = scipy.optimize.brentq(cdf, means.min() - 10, means.max() + 10, xtol=1e-13)
        assert found[b, d] == pytest.approx(root, rel=1e-8, abs=1e-9)


def test_unequal_weights_move_the_quantile(mixture):
    prediction, _, means = mixture
    equal = scipy.optimize.brentq(
        lambda y: scipy.stats.norm.cdf(y, means[:, 0, 0], 0.5).mean() - 0.5, means.min() - 10, means.max() + 10
    )
    assert abs(float(prediction.quantile(0.5)[0, 0]) - equal) > 1e-3


def test_interval_is_central_and_its_default_level_is_95_percent(mixture):
    prediction, weights, means = mixture
    low, high = prediction.interval(level=0.8)
    torch.testing.assert_close(low, prediction.quantile(0.1), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(high, prediction.quantile(0.9), rtol=1e-12, atol=1e-12)
    low, high = (bound.numpy() for bound in prediction.interval())
    inside = scipy.stats.norm.cdf(high, means, 0.5) - scipy.stats.norm.cdf(low, means, 0.5)
    np.testing.assert_allclose(np.einsum("s,sbd->bd", weights, inside), 0.95, rtol=1e-9)


def test_samples_have_the_moments_of_the_mixture(mixture):
    prediction, _, _ = mixture
    number = 20_000
    samples = prediction.sample(number, torch.Generator().manual_seed(1))
    assert samples.shape == (number, 5, 2)
    limit = scipy.stats.norm.isf(FALSE_ALARM / 20)  # ten means and ten variances, two-sided
    z = (samples.mean(0) - prediction.mean) / (prediction.variance / number).sqrt()
    assert z.abs().max() < limit
    squares = (samples - prediction.mean).square()
    z = (squares.mean(0) - prediction.variance) / (squares.std(0) / number**0.5)
    assert z.abs().max() < limit
    assert ((squares.mean(0) - prediction.aleatoric_variance) / (squares.std(0) / number**0.5)).max() > limit  # control


def test_a_replicate_is_one_network_for_all_inputs(mixture):
    _, _, means = mixture
    model, x = patched(), some_inputs()
    certain = pb.predict(
        model, x, pb.Draws.enumerate(model), likelihood=pb.likelihoods.Gaussian(precision=1e16), keep_draws=True
    ).sample(50)
    distance = np.abs(certain.numpy()[:, None] - means[None]).max(axis=(2, 3))
    assert (distance.min(1) < 1e-6).all()
    assert len(set(distance.argmin(1))) > 3


def test_samples_follow_the_generator_and_repeat_without_one(mixture):
    prediction, _, _ = mixture
    assert prediction.sample().shape == (1, 5, 2)
    assert torch.equal(prediction.sample(4), prediction.sample(4))
    one, other = (prediction.sample(4, generator=torch.Generator().manual_seed(s)) for s in (1, 2))
    assert not torch.equal(one, other)


def well_specified():
    model, x = patched(), some_inputs(30)
    return pb.predict(
        model, x, pb.Draws.enumerate(model), likelihood=pb.likelihoods.Gaussian(precision=4.0), keep_draws=True
    )


def p_values(prediction, shift, statistic, repetitions=200, replicates=99):
    """p-values of data that the model made itself, moved by `shift`."""
    data, replication = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    targets = prediction.sample(repetitions, data) + shift
    return np.array([prediction.check(y, statistic, replicates, generator=replication).p_value for y in targets])


def test_p_values_of_the_predictive_check_are_uniform_for_a_right_model_and_extreme_for_a_wrong_one():
    prediction = well_specified()

    def spread(y):
        return y.std()

    ranks = p_values(prediction, 0, spread) * 99 + np.random.default_rng(0).uniform(0, 1, 200)
    assert_standard_normal(scipy.stats.norm.ppf(ranks / 100), detects=0.35)
    wrong = p_values(prediction, 3 * torch.randn(30, 2, generator=torch.Generator().manual_seed(5)), spread)
    assert (wrong == 0).all()
    with pytest.raises(AssertionError, match="distance"):
        assert_standard_normal(scipy.stats.norm.ppf((99 * wrong + 0.5) / 100), detects=0.35)


def test_predictive_check_reports_the_statistics_it_compares():
    prediction = well_specified()
    targets = prediction.sample(1, torch.Generator().manual_seed(9))[0]

    def largest(y):
        return y.max()

    check = prediction.check(targets, largest, replicates=150, generator=torch.Generator().manual_seed(4))
    replicated = prediction.sample(150, torch.Generator().manual_seed(4)).amax(dim=(1, 2))
    assert check.observed == float(targets.max())
    assert torch.equal(check.replicated, replicated)
    assert check.p_value == float((replicated >= targets.max()).double().mean())
    assert prediction.check(targets, largest).replicated.shape == (1000,)
    assert prediction.check(targets + 1e3, largest).p_value == 0
    assert prediction.check(targets - 1e3, largest).p_value == 1


class Squeezed(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = regressor(1)

    def forward(self, x):
        return self.net(x).squeeze(-1)


def test_outputs_without_a_target_axis_get_one():
    x = some_inputs()
    flat, full = Squeezed(), regressor(1)
    for model in (flat, full):
        pb.patch_(model, pb.EMP(3, jitter=0.7))
    flat, full = (pb.predict(m, x, 5, likelihood=pb.likelihoods.Gaussian(2.0), keep_draws=True) for m in (flat, full))
    assert flat.mean.shape == (5, 1)
    for name in ("mean", "variance", "covariance", "standard_error", "draw_means"):
        assert torch.equal(getattr(flat, name), getattr(full, name)), name


def test_outputs_with_more_axes_are_refused_with_the_remedy():
    model = regressor(4)
    pb.patch_(model, pb.EMP(3))
    with pytest.raises(PatchbayesError, match=r"\(5, 2, 2\)[\s\S]*flatten\(1\)"):
        pb.predict(model, some_inputs(), likelihood=pb.likelihoods.Gaussian(), output=lambda y: y.view(5, 2, 2))


def test_batches_parts_and_joins_agree_with_the_whole():
    model, x = patched(), some_inputs()
    whole = pb.predict(model, x, 6, likelihood=pb.likelihoods.Gaussian(2.0), keep_draws=True)
    parts = pb.predict(model, [x[:2], x[2:]], 6, likelihood=pb.likelihoods.Gaussian(2.0), keep_draws=True)
    joined = RegressionPrediction.concatenate([whole[:1], whole[[1, 2]], whole[3:]])
    names = ("mean", "standard_error", "epistemic_covariance", "variance", "draw_means", "weights")
    for name in names:
        torch.testing.assert_close(getattr(parts, name), getattr(whole, name), rtol=1e-9, atol=1e-12)
        assert torch.equal(getattr(joined, name), getattr(whole, name)), name
    assert len(whole[1:3]) == 2
    assert whole[1:3].precision == whole.precision
    y = torch.zeros(5, 2, dtype=torch.float64)
    assert torch.equal(whole[1:3].log_prob(y[1:3]), whole.log_prob(y)[1:3])
    assert torch.equal(whole[1:3].quantile(0.2), whole.quantile(0.2)[1:3])


def test_single_precision_networks_predict_in_single_precision():
    prediction = pb.predict(
        patched().float(), some_inputs().float(), 6, likelihood=pb.likelihoods.Gaussian(4.0), keep_draws=True
    )
    exact = pb.predict(patched(), some_inputs(), 6, likelihood=pb.likelihoods.Gaussian(4.0), keep_draws=True)
    y = torch.zeros(5, 2)
    values = {
        "mean": lambda p: p.mean,
        "variance": lambda p: p.variance,
        "log_prob": lambda p: p.log_prob(y.to(p.mean)),
        "quantile": lambda p: p.quantile(0.1),
        "sample": lambda p: p.sample(3)[:0],
    }
    for name, of in values.items():
        assert of(prediction).dtype == torch.float32, name
        torch.testing.assert_close(of(prediction).double(), of(exact), rtol=1e-4, atol=1e-5)


def test_what_needs_every_draw_says_so():
    prediction = pb.predict(patched(), some_inputs(), 4, likelihood=pb.likelihoods.Gaussian())
    y = torch.zeros(5, 2, dtype=torch.float64)
    for name, act in {
        "log_prob": lambda: prediction.log_prob(y),
        "quantile": lambda: prediction.quantile(0.5),
        "quantile ": lambda: prediction.interval(),
        "sample": lambda: prediction.sample(),
        "sample ": lambda: prediction.check(y, torch.mean),
    }.items():
        with pytest.raises(PatchbayesError, match=rf"{name.strip()} needs every draw.*keep_draws=True"):
            act()


@pytest.mark.parametrize("level", [0, 1, -0.1, 1.5, float("nan")])
def test_levels_outside_zero_and_one_are_refused(mixture, level):
    for ask in (mixture[0].quantile, mixture[0].interval):
        with pytest.raises(PatchbayesError, match="level"):
            ask(level)


def test_targets_of_another_shape_are_refused(mixture):
    prediction, _, _ = mixture
    for shape in [(5,), (5, 1), (2,), (4, 2)]:
        with pytest.raises(PatchbayesError, match="shape"):
            prediction.log_prob(torch.zeros(shape))
        with pytest.raises(PatchbayesError, match="shape"):
            prediction.check(torch.zeros(shape), torch.mean, 2)
    with pytest.raises(PatchbayesError, match="at least 1"):
        prediction.sample(0)
