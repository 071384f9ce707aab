"""The likelihood's temperature in predictions: definitions against NumPy, errors by the delta method, what it leaves alone."""

from collections import OrderedDict

import numpy as np
import pytest
import scipy.integrate
import scipy.optimize
import scipy.special
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import patchbayes as pb
from patchbayes.errors import PatchbayesError
from patchbayes.prediction.averages import average
from patchbayes.prediction.loop import Members
from patchbayes.prediction.plan import Plan
from statistics_helper import FALSE_ALARM

P = (0.5, 0.3, 0.2)


def network(outputs=3, seed=0, **options):
    torch.manual_seed(seed)
    layers = OrderedDict(hidden=nn.Linear(4, 6), norm=nn.LayerNorm(6), tanh=nn.Tanh(), fc=nn.Linear(6, outputs))
    model = nn.Sequential(layers).double()
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


def at(temperature, likelihood=None):
    return (likelihood or pb.likelihoods.Categorical()).set_temperature_(temperature)


# Classes


@pytest.mark.parametrize("temperature", [0.3, 0.8, 1.0, 2.5])
def test_the_averaged_probabilities_are_tempered_and_not_the_draws(temperature):
    model, x = network(probabilities=P), some_inputs()
    draws = pb.Draws.enumerate(model)
    values = scipy.special.softmax(explicit(model, x, draws), -1)
    average = np.einsum("s,sbc->bc", draws.weights.numpy(), values)
    expected = scipy.special.log_softmax(np.log(average) / temperature, -1)
    prediction = pb.predict(model, x, draws, likelihood=at(temperature), keep_draws=True)
    assert prediction.temperature == temperature
    np.testing.assert_allclose(prediction.log_probs.numpy(), expected, rtol=1e-10)
    np.testing.assert_allclose(prediction.probs.numpy(), np.exp(expected), rtol=1e-10)
    np.testing.assert_allclose(prediction.confidence.numpy(), np.exp(expected).max(1), rtol=1e-10)
    np.testing.assert_allclose(prediction.entropy.numpy(), scipy.stats.entropy(np.exp(expected), axis=-1), rtol=1e-10)
    np.testing.assert_allclose(prediction.averaged_probs.numpy(), average, rtol=1e-10)
    np.testing.assert_allclose(prediction.averaged_log_probs.numpy(), np.log(average), rtol=1e-10)
    np.testing.assert_allclose(prediction.draw_probs.numpy(), values, rtol=1e-10)
    assert prediction.predicted_class.tolist() == average.argmax(1).tolist()
    before = scipy.special.softmax(np.log(values) / temperature, -1)  # tempering each draw would be another prediction
    same = np.allclose(np.einsum("s,sbc->bc", draws.weights.numpy(), before), np.exp(expected), rtol=1e-3)
    assert same == (temperature == 1)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_what_the_draws_disagree_on_does_not_depend_on_the_temperature(temperature):
    model, x = network(), some_inputs()
    plain, tempered = (pb.predict(model, x, "exact", likelihood=at(t)) for t in (1.0, temperature))
    assert torch.equal(plain.mutual_information, tempered.mutual_information)
    assert torch.equal(plain.expected_entropy, tempered.expected_entropy)
    torch.testing.assert_close(plain.entropy, plain.expected_entropy + plain.mutual_information)
    assert ((tempered.entropy > plain.entropy) == (temperature > 1)).all()
    assert (plain.mutual_information > 1e-3).all()


SOFTENED = {
    "loop": {"engine": "loop"},
    "graph": {"engine": "graph"},
    "averages": {"statistics": "averages"},
    "kept": {"keep_draws": True},
}


@pytest.mark.parametrize("way", SOFTENED)
@pytest.mark.parametrize("softened", [0.6, 4.0])
def test_what_the_draws_disagree_on_is_that_of_unsoftened_draws(way, softened):
    """By the definition from every draw's own probabilities; from softened ones, as once computed, it is another number."""
    model, x = network(probabilities=P), some_inputs()
    draws = pb.Draws.stratified(model, 12)
    likelihood = pb.likelihoods.Categorical().set_temperature_(0.8, draw_temperature=softened)
    prediction = pb.predict(model, x, draws, likelihood=likelihood, **SOFTENED[way])
    values, weights = scipy.special.softmax(explicit(model, x, draws), -1), draws.weights.numpy()
    entropies = scipy.stats.entropy(values, axis=-1)
    expected = scipy.stats.entropy(np.einsum("s,sbc->bc", weights, values), axis=-1) - weights @ entropies
    rounding = {"rtol": 1e-4, "atol": 1e-6} if way == "averages" else {"rtol": 1e-9}
    np.testing.assert_allclose(prediction.mutual_information.numpy(), expected, **rounding)
    np.testing.assert_allclose(prediction.expected_entropy.numpy(), weights @ entropies, **rounding)
    soft = scipy.special.softmax(np.log(values) / softened, -1)
    np.testing.assert_allclose(prediction.averaged_probs.numpy(), np.einsum("s,sbc->bc", weights, soft), **rounding)
    old = scipy.stats.entropy(prediction.averaged_probs.numpy(), axis=-1) - weights @ scipy.stats.entropy(soft, axis=-1)
    assert np.abs(old / expected - 1).min() > 0.1
    assert prediction.draw_temperature == softened
    assert prediction.numpy()["draw_temperature"] == softened


def test_softened_draws_hide_what_unsoftened_ones_disagree_on():
    """Draws that contradict each other on one input and agree, less surely, on another: the first is the unfamiliar one."""
    logits = torch.tensor([[[8.0, 0.0], [1.0, 0.0]], [[-8.0, 0.0], [0.0, 0.0]]], dtype=torch.float64)  # (S, B, C)
    model = network()
    draws = pb.Draws.sample(model, 2)
    information = {}
    for softened in (1.0, 40.0):
        likelihood = pb.likelihoods.Categorical().set_temperature_(draw_temperature=softened)
        found = average(iter([(Members([[0], [1]]), logits)]), draws, likelihood, True, Plan(2, "iid", False))
        information[softened] = found.mutual_information
        assert float(found.averaged_probs[0, 0]) == pytest.approx(0.5)
    assert torch.equal(information[1.0], information[40.0])
    assert float(information[40.0][0]) > 0.6  # softened to 40 the draws say 0.55 and 0.45, which is 0.005 nats


def test_labels_disagree_as_unsoftened_draws_do_and_parts_of_them_merge():
    model, x = network(4), some_inputs()
    draws = pb.Draws.sample(model, 30, torch.Generator().manual_seed(2))
    rows = torch.arange(len(x))
    for likelihood in (pb.likelihoods.Categorical(), pb.likelihoods.Bernoulli()):
        plain = pb.predict(model, x, draws, likelihood=likelihood)
        likelihood.set_temperature_(draw_temperature=3.0)
        first, second, whole = (pb.predict(model, x, d, likelihood=likelihood) for d in (draws[:10], draws[10:], draws))
        for found in (whole, first.merged(second, rows), type(whole).concatenate([whole[:2], whole[2:]])):
            torch.testing.assert_close(found.mutual_information, plain.mutual_information, rtol=1e-8, atol=1e-10)
            torch.testing.assert_close(found.expected_entropy, plain.expected_entropy, rtol=1e-8, atol=1e-10)
        assert not torch.allclose(whole.probs, plain.probs, rtol=1e-2)
        with pytest.raises(PatchbayesError, match="expected one draw_temperature, got 3 and 1"):
            type(whole).concatenate([whole, plain])


def test_log_probs_stay_finite_where_tempered_probabilities_underflow():
    model = nn.Sequential(OrderedDict(fc=nn.Linear(1, 2)))
    pb.patch_(model, pb.EMP(2), "output")
    fc = pb.patched_sites(model)["fc"]
    fc.components("weight").data.zero_()
    fc.components("bias").data.copy_(torch.tensor([[0.0, -1000.0], [0.0, -1200.0]]))
    prediction = pb.predict(model, torch.zeros(1, 1), pb.Draws.enumerate(model), likelihood=at(2.0))
    assert float(prediction.log_probs[0, 1]) == pytest.approx((-1000 - np.log(2)) / 2, rel=1e-6)


@pytest.mark.parametrize("number", [12, 14, 6, 90])
@pytest.mark.parametrize("make", [pb.Draws.sample, pb.Draws.stratified])
def test_the_standard_error_follows_by_the_delta_method(make, number):
    """Against the derivative by finite differences, applied to the means of blocks (or of 25 groups of independent draws)."""
    model, x, temperature = network(), some_inputs(), 1.8
    draws = make(model, number, torch.Generator().manual_seed(1))
    values = scipy.special.softmax(explicit(model, x, draws), -1)
    length = 3 if make == pb.Draws.stratified and number >= 9 else 1
    units = number // length
    count = min(units, 25)
    group = np.minimum(np.arange(number) // length * count // units, count)
    sizes = np.bincount(group, minlength=count + 1)
    means = np.stack([values[group == g].mean(0) for g in range(count)])
    center = values[group < count].mean(0)

    def temper(p):
        return scipy.special.softmax(np.log(p) / temperature, -1)

    def derivative(deviation):
        step = 1e-6
        mean = values.mean(0)
        return (temper(mean + step * deviation) - temper(mean - step * deviation)) / (2 * step)

    share = sizes[:count] / sizes[:count].sum()
    variance = sum(w**2 * derivative(m - center) ** 2 for w, m in zip(share, means, strict=True)) / (
        1 - (share**2).sum()
    )
    rest = sizes[count] / number
    variance = (1 - rest) ** 2 * variance
    if rest:
        variance = variance + rest**2 * derivative(values[group == count].mean(0) - center) ** 2
    prediction = pb.predict(model, x, draws, likelihood=at(temperature))
    np.testing.assert_allclose(prediction.standard_error.numpy(), np.sqrt(variance), rtol=1e-4)
    assert (prediction.degrees_of_freedom == count - 1).all()


def test_the_tempered_standard_error_is_the_true_spread():
    """500 predictions, each with its squared error: their difference has mean zero; the error of T = 1 is found wrong."""
    model, x = network(), some_inputs(1)
    exact = pb.predict(model, x, "exact", likelihood=at(0.5)).probs
    generator = torch.Generator().manual_seed(5)
    gaps, wrong = [], []
    for _ in range(500):
        draws = pb.Draws.sample(model, 40, generator)
        tempered, plain = (pb.predict(model, x, draws, likelihood=at(t)) for t in (0.5, 1.0))
        square = float((tempered.probs - exact)[0, 0].square())
        gaps.append(float(tempered.standard_error[0, 0] ** 2) - square)
        wrong.append(float(plain.standard_error[0, 0] ** 2) - square)
    limit = scipy.stats.norm.isf(FALSE_ALARM / 2)

    def z(gap):
        return np.mean(gap) / (np.std(gap, ddof=1) / np.sqrt(len(gap)))

    assert abs(z(gaps)) < limit
    assert abs(z(wrong)) > limit


def test_impossible_classes_have_no_error():
    model, x = network(), some_inputs()
    prediction = pb.predict(
        model,
        x,
        pb.Draws.sample(model, 8),
        likelihood=at(2.0),
        output=lambda y: y.index_fill(-1, torch.tensor([1]), -torch.inf),
    )
    assert (prediction.probs[:, 1] == 0).all()
    assert (prediction.standard_error[:, 1] == 0).all()
    assert torch.isfinite(prediction.standard_error).all()
    assert (prediction.standard_error[:, 0] > 0).all()


def test_replicates_of_a_tempered_average_are_refused():
    prediction = pb.predict(network(), some_inputs(), 6, likelihood=at(2.0), keep_draws=True)
    with pytest.raises(PatchbayesError, match="temperature 2 belongs to their average"):
        prediction.sample()
    labels = pb.predict(network(), some_inputs(), 6, likelihood=at(2.0, pb.likelihoods.Bernoulli()), keep_draws=True)
    with pytest.raises(PatchbayesError, match="temperature 2 belongs to their average"):
        labels.sample()


def test_dense_outputs_are_tempered_position_by_position():
    torch.manual_seed(0)
    model = nn.Sequential(OrderedDict(conv=nn.Conv2d(2, 5, 3), norm=nn.BatchNorm2d(5), fc=nn.Conv2d(5, 3, 1))).double()
    pb.patch_(model, pb.EMP(3, jitter=0.5))
    x = torch.randn(2, 2, 5, 6, dtype=torch.float64)
    draws = pb.Draws.stratified(model, 12)
    whole = pb.predict(model, x, draws, likelihood=at(1.7, pb.likelihoods.Categorical(class_dim=1)))
    flat = pb.predict(
        model, x, draws, likelihood=at(1.7), output=lambda y: y.permute(0, 2, 3, 1).reshape(2, -1, 3)[:, 4]
    )
    torch.testing.assert_close(whole.probs.reshape(2, -1, 3)[:, 4], flat.probs)
    torch.testing.assert_close(whole.standard_error.reshape(2, -1, 3)[:, 4], flat.standard_error)


def test_the_mean_network_has_a_temperature_of_its_own():
    outputs = torch.randn(1, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    likelihood = pb.likelihoods.Categorical().set_temperature_(0.9, mean_temperature=1.6)

    def predict(**options):
        return average(iter([(Members([[0]]), outputs)]), None, likelihood, False, Plan(1, "mean", True), **options)

    for options, temperature in (({}, 0.9), ({"mean": True}, 1.6)):
        prediction = predict(**options)
        expected = scipy.special.log_softmax(outputs[0].numpy() / temperature, -1)
        np.testing.assert_allclose(prediction.log_probs.numpy(), expected, rtol=1e-12)
        assert prediction.temperature == temperature
        assert (prediction.num_draws, prediction.standard_error_kind, prediction.draws) == (1, "exact", None)
        assert (prediction.standard_error == 0).all()
        low, high = prediction.monte_carlo_interval()
        assert torch.equal(low, high)


# Early stopping averages before it tempers


@pytest.mark.parametrize(
    "likelihood",
    [
        pb.likelihoods.Categorical(),
        pb.likelihoods.Gaussian(2.0),
        pb.likelihoods.Bernoulli(),
        pb.likelihoods.HeteroscedasticGaussian(),
    ],
    ids=lambda v: type(v).__name__,
)
def test_parts_of_the_draws_merge_to_the_whole(likelihood):
    model, x = network(4), some_inputs()
    likelihood.set_temperature_(1.4)
    draws = pb.Draws.sample(model, 30, torch.Generator().manual_seed(2))
    first, second, whole = (pb.predict(model, x, d, likelihood=likelihood) for d in (draws[:10], draws[10:], draws))
    rows = torch.tensor([0, 2, 3])
    merged = first.merged(second[rows], rows)
    names = {
        "probs",
        "log_probs",
        "expected_entropy",
        "mutual_information",
        "mean",
        "variance",
        "aleatoric_variance",
        "entropy",
    }
    compared = [name for name in names if hasattr(whole, name)]
    assert len(compared) >= 3
    for name in compared:
        torch.testing.assert_close(getattr(merged, name)[rows], getattr(whole, name)[rows], rtol=1e-8, atol=1e-10)
        assert torch.equal(getattr(merged, name)[1], getattr(first, name)[1])
    assert merged.draws_used.tolist() == [30, 10, 30, 30, 10]
    assert merged.degrees_of_freedom.tolist()[:2] == [9 + 19, 9]
    ratio = merged.standard_error[rows] / whole.standard_error[rows]
    assert ((ratio > 0.6) & (ratio < 1.6)).all()
    stopped = pb.predict(model, x, "auto", likelihood=likelihood, tolerance=0.02, sampling="iid")
    assert stopped.temperature == 1.4
    exact = pb.predict(model, x, pb.Draws.enumerate(model), likelihood=likelihood)
    assert (getattr(stopped, stopped.estimate) - getattr(exact, stopped.estimate)).abs().max() < 0.3


# Regression: a factor on the predictive variance


@pytest.fixture(scope="module")
def stretched():
    """A prediction over nine networks with unequal weights, its variance times 2.3; the weights, means, deviations."""
    with torch.random.fork_rng():
        model, x = network(2, probabilities=P), some_inputs()
        draws = pb.Draws.enumerate(model)
        weights = np.prod(np.asarray(P)[draws.assignments().numpy()], axis=1)
        means = explicit(model, x, draws)
        likelihood = at(2.3, pb.likelihoods.Gaussian([4.0, 1.0]))
        prediction = pb.predict(model, x, draws, likelihood=likelihood, keep_draws=True)
    center = np.einsum("s,sbd->bd", weights, means)
    return prediction, weights, center + 2.3**0.5 * (means - center), np.sqrt(2.3 / np.array([4.0, 1.0])), center


def test_both_parts_of_the_variance_take_the_factor_and_the_mean_none(stretched):
    prediction, weights, means, deviation, center = stretched
    np.testing.assert_allclose(prediction.mean.numpy(), center, rtol=1e-10)
    epistemic = np.einsum("s,sbd->bd", weights, (means - center) ** 2)
    np.testing.assert_allclose(prediction.epistemic_variance.numpy(), epistemic, rtol=1e-8)
    np.testing.assert_allclose(prediction.aleatoric_variance.numpy(), np.broadcast_to(deviation**2, (5, 2)), rtol=1e-10)
    np.testing.assert_allclose(prediction.variance.numpy(), epistemic + deviation**2, rtol=1e-8)
    diagonal = prediction.covariance.diagonal(dim1=1, dim2=2)
    np.testing.assert_allclose(diagonal.numpy(), epistemic + deviation**2, rtol=1e-8)
    np.testing.assert_allclose(prediction.precision.numpy(), [4.0, 1.0], rtol=1e-10)
    plain = pb.predict(
        network(2, probabilities=P), some_inputs(), "exact", likelihood=pb.likelihoods.Gaussian([4.0, 1.0])
    )
    torch.testing.assert_close(prediction.variance, 2.3 * plain.variance)
    torch.testing.assert_close(prediction.standard_error, plain.standard_error)
    got_means, got_variances = prediction.mixture()
    np.testing.assert_allclose(got_means.numpy(), means, rtol=1e-10)
    np.testing.assert_allclose(
        np.broadcast_to(got_variances.numpy(), means.shape), np.broadcast_to(deviation**2, means.shape)
    )


def test_density_and_quantiles_are_those_of_the_stretched_mixture(stretched):
    prediction, weights, means, deviation, center = stretched
    targets = torch.tensor(center + np.linspace(-2, 2, 10).reshape(5, 2))
    each = scipy.stats.norm.logpdf(targets.numpy(), means, deviation).sum(-1)
    expected = scipy.special.logsumexp(each, axis=0, b=weights[:, None])
    np.testing.assert_allclose(prediction.log_prob(targets).numpy(), expected, rtol=1e-10)
    for level in (0.01, 0.4, 0.9):
        found = prediction.quantile(level).numpy()
        for b, d in np.ndindex(found.shape):
            below = weights @ scipy.stats.norm.cdf(found[b, d], means[:, b, d], deviation[d])
            assert below == pytest.approx(level, abs=1e-9)
    single = pb.predict(
        network(1), some_inputs(1), 6, likelihood=at(3.0, pb.likelihoods.Gaussian(2.0)), keep_draws=True
    )

    def density(y):
        return float(single.log_prob(torch.tensor([[y]], dtype=torch.float64)).exp())

    assert scipy.integrate.quad(density, -30, 30, limit=200)[0] == pytest.approx(1, abs=1e-7)


def test_samples_have_the_stretched_moments(stretched):
    prediction, *_ = stretched
    number = 20_000
    samples = prediction.sample(number, torch.Generator().manual_seed(1))
    squares = (samples - prediction.mean).square()
    limit = scipy.stats.norm.isf(FALSE_ALARM / 20)
    z = (squares.mean(0) - prediction.variance) / (squares.std(0) / number**0.5)
    assert z.abs().max() < limit
    assert ((squares.mean(0) - prediction.variance / 2.3) / (squares.std(0) / number**0.5)).min() > limit  # the control


@settings(max_examples=25, deadline=None)
@given(factor=st.floats(0.05, 20), seed=st.integers(0, 1000))
def test_stretching_commutes_with_quantiles(factor, seed):
    model, x = network(2, seed=seed % 7), some_inputs(2, seed)
    plain, wide = (
        pb.predict(model, x, 4, likelihood=at(t, pb.likelihoods.Gaussian(3.0)), keep_draws=True) for t in (1.0, factor)
    )
    for level in (0.1, 0.5, 0.8):
        expected = plain.mean + factor**0.5 * (plain.quantile(level) - plain.mean)
        torch.testing.assert_close(wide.quantile(level), expected, rtol=1e-8, atol=1e-9)


def test_a_prediction_prints_as_one_line():
    model = nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.Linear(8, 4))
    pb.patch_(model, pb.EMP(2))
    x = torch.ones(5, 3)
    drawn, mean = pb.predict(model, x, draws=2), pb.predict(model, x, draws="mean")
    confidence = f"mean confidence {float(drawn.confidence.mean()):.3g}, entropy "
    assert str(drawn).startswith(f"ClassPrediction: 5 inputs, {drawn.num_draws} draws, temperature 1; {confidence}")
    assert "\n" not in str(drawn)
    assert "one pass" in str(mean)
