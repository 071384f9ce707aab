"""predict for labels (Bernoulli) and for noise that depends on the input: against NumPy, weighted and unweighted."""

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
from torch import nn

import patchbayes as pb
from patchbayes.errors import PatchbayesError
from patchbayes.prediction import HeteroscedasticPrediction, LabelPrediction, RegressionPrediction
from statistics_helper import FALSE_ALARM, assert_frequencies

P = (0.5, 0.3, 0.2)


def network(outputs, seed=0, **options):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, outputs)).double()
    pb.patch_(model, pb.EMP(3, jitter=0.8, **options))
    return model


def some_inputs(rows=5, seed=3):
    return torch.randn(rows, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def explicit(model, inputs, draws):
    """(S, B, ...), a plain evaluation forward for each draw."""
    model.eval()
    outputs = []
    for draw in draws:
        with pb.use_draw(model, draw):
            outputs.append(model(inputs).numpy())
    return np.stack(outputs)


def binary_entropy(p):
    return scipy.special.entr(p) + scipy.special.entr(1 - p)


# Labels


@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.0])
def test_every_field_of_a_label_prediction_follows_its_formula(temperature):
    model, x = network(4, probabilities=P), some_inputs()
    draws = pb.Draws.enumerate(model)
    weights = draws.weights.numpy()
    values = scipy.special.expit(2 * explicit(model, x, draws))
    average = np.einsum("s,sbl->bl", weights, values)
    expected = scipy.special.expit(scipy.special.logit(average) / temperature)
    likelihood = pb.likelihoods.Bernoulli().set_temperature_(temperature)
    prediction = pb.predict(model, x, draws, likelihood=likelihood, output=lambda y: 2 * y, keep_draws=True)
    assert type(prediction) is LabelPrediction
    assert len(prediction) == 5
    expected_entropy = np.einsum("s,sbl->bl", weights, binary_entropy(values))
    for name, value in {
        "probs": expected,
        "logits": scipy.special.logit(expected),
        "entropy": binary_entropy(expected),
        "expected_entropy": expected_entropy,
        "mutual_information": binary_entropy(average) - expected_entropy,
        "averaged_log_present": np.log(average),
        "averaged_log_absent": np.log1p(-average),
        "draw_probs": values,
        "answer": scipy.special.logit(expected),
    }.items():
        np.testing.assert_allclose(getattr(prediction, name).numpy(), value, rtol=1e-9, atol=1e-14, err_msg=name)
    assert np.array_equal(prediction.predicted_labels.numpy(), average > 0.5)
    targets = torch.tensor([[0, 1, 1, -100], [1, 1, 0, 0], [0, 0, 0, 1], [-100] * 4, [1, 0, 1, 0]])
    each = np.where(targets == 1, np.log(expected), np.log1p(-expected))
    total = np.where(targets == -100, 0, each).sum(1)
    np.testing.assert_allclose(prediction.log_prob(targets).numpy(), total, rtol=1e-9)
    np.testing.assert_allclose(prediction.log_prob(targets.clamp_min(-1), ignore_index=-1).numpy(), total, rtol=1e-9)


@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_labels_have_standard_errors(temperature):
    model, x = network(3), some_inputs()
    draws = pb.Draws.stratified(model, 12)
    values = scipy.special.expit(explicit(model, x, draws))
    blocks = values.reshape(4, 3, 5, 3).mean(1)
    mean = values.mean(0)
    error = blocks.std(0, ddof=1) / 2
    q = scipy.special.expit(scipy.special.logit(mean) / temperature)
    step = 1e-6
    slope = (scipy.special.expit(scipy.special.logit(mean + step) / temperature) - q) / step
    prediction = pb.predict(model, x, draws, likelihood=pb.likelihoods.Bernoulli().set_temperature_(temperature))
    np.testing.assert_allclose(prediction.standard_error.numpy(), slope * error, rtol=1e-4)
    np.testing.assert_allclose(prediction.tolerated_error.numpy(), (slope * error).max(1), rtol=1e-4)


def test_two_classes_are_a_label_of_the_difference_of_their_logits():
    model, x = network(2), some_inputs()
    draws = pb.Draws.stratified(model, 12)
    for temperature in (1.0, 0.4, 3.0):
        classes = pb.predict(model, x, draws, likelihood=pb.likelihoods.Categorical().set_temperature_(temperature))
        labels = pb.predict(
            model,
            x,
            draws,
            likelihood=pb.likelihoods.Bernoulli().set_temperature_(temperature),
            output=lambda y: y[:, 1] - y[:, 0],
        )
        assert labels.probs.shape == (5,)
        torch.testing.assert_close(labels.probs, classes.probs[:, 1])
        torch.testing.assert_close(labels.standard_error, classes.standard_error[:, 1])
        torch.testing.assert_close(labels.entropy, classes.entropy)
        torch.testing.assert_close(labels.mutual_information, classes.mutual_information, rtol=1e-6, atol=1e-12)
        targets = torch.tensor([0, 1, 1, 0, 1])
        chosen = classes.log_probs.gather(1, targets[:, None])[:, 0]
        torch.testing.assert_close(labels.log_prob(targets), chosen)
        assert labels.fit_temperature(targets) == pytest.approx(classes.fit_temperature(targets), rel=1e-9)


def test_certain_labels_stay_certain_and_finite():
    model, x = network(2), some_inputs()
    prediction = pb.predict(
        model,
        x,
        9,
        likelihood=pb.likelihoods.Bernoulli().set_temperature_(2.0),
        output=lambda y: y * torch.tensor([1.0, 1e5]),
    )
    assert torch.isfinite(prediction.standard_error).all()
    assert torch.isfinite(prediction.entropy).all()
    impossible = pb.predict(
        model, x, 9, likelihood=pb.likelihoods.Bernoulli(), output=lambda y: y * 0 - torch.inf * torch.ones(2)
    )
    assert (impossible.probs == 0).all()
    assert (impossible.entropy == 0).all()


def test_sampled_labels_have_the_predicted_probabilities_and_share_a_draw():
    model, x = network(2, probabilities=P), some_inputs(3)
    draws = pb.Draws.enumerate(model)
    prediction = pb.predict(
        model, x, draws, likelihood=pb.likelihoods.Bernoulli(), output=lambda y: 1e4 * y, keep_draws=True
    )
    labels = prediction.sample(4000, torch.Generator().manual_seed(1))
    assert labels.shape == (4000, 3, 2)
    share = float(prediction.probs[0, 0])
    counts = labels[:, 0, 0].bincount(minlength=2)
    assert_frequencies(counts, [1 - share, share], detects=0.06)
    together = {tuple(row) for row in labels.flatten(1).tolist()}
    assert len(together) <= 9  # certain networks: a replicate follows one of nine in all its labels
    check = prediction.check(labels[0], lambda y: y.double().mean(), replicates=50)
    assert 0 <= check.p_value <= 1


def test_labels_are_cut_joined_and_written():
    model, x = network(3), some_inputs()
    whole = pb.predict(model, x, 6, likelihood=pb.likelihoods.Bernoulli().set_temperature_(1.3), keep_draws=True)
    joined = LabelPrediction.concatenate([whole[:2], whole[[2, 3]], whole[4:]])
    arrays, again = whole.numpy(), joined.numpy()
    assert {"probs", "entropy", "mutual_information", "standard_error", "draw_probs", "temperature"} <= arrays.keys()
    for name, value in arrays.items():
        assert type(value) is np.ndarray
        assert np.array_equal(value, again[name]), name
    assert whole[1:2].temperature == 1.3


# Noise that depends on the input


@pytest.fixture(scope="module", params=[1.0, 0.5])
def noisy(request):
    """A prediction over nine networks with unequal weights; T, the weights, the means and the variances."""
    with torch.random.fork_rng():
        model, x = network(4, probabilities=P), some_inputs()
        draws = pb.Draws.enumerate(model)
        weights = np.prod(np.asarray(P)[draws.assignments().numpy()], axis=1)
        values = explicit(model, x, draws)
        likelihood = pb.likelihoods.HeteroscedasticGaussian().set_temperature_(request.param)
        prediction = pb.predict(model, x, draws, likelihood=likelihood, keep_draws=True)
    return prediction, request.param, weights, values[..., :2], np.exp(values[..., 2:])


def test_total_variance_splits_into_spread_of_means_and_mean_of_noise(noisy):
    prediction, factor, weights, means, variances = noisy
    assert type(prediction) is HeteroscedasticPrediction
    assert isinstance(prediction, RegressionPrediction)
    center = np.einsum("s,sbd->bd", weights, means)
    np.testing.assert_allclose(prediction.mean.numpy(), center, rtol=1e-10)
    epistemic = np.einsum("s,sbd->bd", weights, (means - center) ** 2)
    aleatoric = np.einsum("s,sbd->bd", weights, variances)
    np.testing.assert_allclose(prediction.epistemic_variance.numpy(), factor * epistemic, rtol=1e-8)
    np.testing.assert_allclose(prediction.aleatoric_variance.numpy(), factor * aleatoric, rtol=1e-8)
    np.testing.assert_allclose(prediction.variance.numpy(), factor * (epistemic + aleatoric), rtol=1e-8)
    np.testing.assert_allclose(prediction.draw_variances.numpy(), variances, rtol=1e-10)
    assert aleatoric.std() > 0.01  # the noise does depend on the input
    with pytest.raises(PatchbayesError, match="aleatoric_variance"):
        prediction.precision  # noqa: B018


def test_density_quantiles_and_intervals_are_those_of_the_mixture(noisy):
    prediction, factor, weights, means, variances = noisy
    center = np.einsum("s,sbd->bd", weights, means)
    means, deviation = center + factor**0.5 * (means - center), np.sqrt(factor * variances)
    targets = center + np.linspace(-2, 2, 10).reshape(5, 2)
    each = scipy.stats.norm.logpdf(targets, means, deviation).sum(-1)
    expected = scipy.special.logsumexp(each, axis=0, b=weights[:, None])
    np.testing.assert_allclose(prediction.log_prob(torch.tensor(targets)).numpy(), expected, rtol=1e-10)

    def below(y):
        return np.einsum("s,sbd->bd", weights, scipy.stats.norm.cdf(y, means, deviation))

    for level in (0.001, 0.3, 0.95):
        np.testing.assert_allclose(below(prediction.quantile(level).numpy()), level, atol=1e-9)
    low, high = (bound.numpy() for bound in prediction.interval(0.8))
    np.testing.assert_allclose(below(high) - below(low), 0.8, atol=1e-9)


def test_noisy_samples_have_the_moments_of_the_mixture(noisy):
    prediction, *_ = noisy
    number = 20_000
    samples = prediction.sample(number, torch.Generator().manual_seed(1))
    limit = scipy.stats.norm.isf(FALSE_ALARM / 20)
    squares = (samples - prediction.mean).square()
    z = (squares.mean(0) - prediction.variance) / (squares.std(0) / number**0.5)
    assert z.abs().max() < limit
    assert ((squares.mean(0) - prediction.epistemic_variance) / (squares.std(0) / number**0.5)).max() > limit


def test_equal_noise_everywhere_is_the_gaussian_prediction():
    model, x = network(2), some_inputs()
    y = torch.zeros(5, 2, dtype=torch.float64)
    plain = pb.predict(model, x, 9, likelihood=pb.likelihoods.Gaussian(4.0), keep_draws=True)
    noise = torch.full((5, 2), -np.log(4.0), dtype=torch.float64)
    same = pb.predict(
        model,
        x,
        9,
        likelihood=pb.likelihoods.HeteroscedasticGaussian(),
        keep_draws=True,
        output=lambda f: torch.cat([f, noise], -1),
    )
    for name in ("mean", "variance", "covariance", "standard_error"):
        torch.testing.assert_close(getattr(same, name), getattr(plain, name))
    torch.testing.assert_close(same.log_prob(y), plain.log_prob(y))
    torch.testing.assert_close(same.quantile(0.1), plain.quantile(0.1))


def test_noisy_predictions_are_cut_and_joined_and_need_their_draws():
    model, x = network(4), some_inputs()
    whole = pb.predict(model, x, 6, likelihood=pb.likelihoods.HeteroscedasticGaussian(), keep_draws=True)
    joined = HeteroscedasticPrediction.concatenate([whole[:2], whole[2:]])
    assert torch.equal(joined.draw_variances, whole.draw_variances)
    assert torch.equal(joined.quantile(0.3), whole.quantile(0.3))
    without = pb.predict(model, x, 6, likelihood=pb.likelihoods.HeteroscedasticGaussian())
    assert without.draw_variances is None
    for act in (without.sample, without.interval, without.mixture, lambda: without.log_prob(torch.zeros(5, 2))):
        with pytest.raises(PatchbayesError, match="keep_draws=True"):
            act()
    with pytest.raises(PatchbayesError, match="one kind"):
        RegressionPrediction.concatenate(
            [whole, pb.predict(model, x, 6, likelihood=pb.likelihoods.Gaussian(), keep_draws=True)]
        )


def test_an_odd_number_of_outputs_is_refused_with_the_remedy():
    with pytest.raises(PatchbayesError, match=r"torch\.cat\(pair, -1\)"):
        pb.predict(network(3), some_inputs(), 4, likelihood=pb.likelihoods.HeteroscedasticGaussian())


def test_predictor_answers_for_every_likelihood():
    model, x = network(4), some_inputs()
    for likelihood, names in (
        (pb.likelihoods.Categorical().set_temperature_(2.0), ("log_probs",)),
        (pb.likelihoods.Bernoulli().set_temperature_(2.0), ("logits",)),
        (pb.likelihoods.HeteroscedasticGaussian().set_temperature_(2.0), ("mean", "variance")),
    ):
        prediction = pb.predict(model, x, 6, likelihood=likelihood)
        answer = pb.Predictor(model, 6, likelihood=likelihood)(x)
        answer = answer if isinstance(answer, tuple) else (answer,)
        for name, value in zip(names, answer, strict=True):
            torch.testing.assert_close(value, getattr(prediction, name))
