"""predict for classifiers: Algorithm 1, its error, its inputs, and that the network comes back as it was."""

import gc
import warnings
from collections import OrderedDict
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import patchbayes as pb
from patchbayes.errors import NotPatched, PatchbayesError, WrongDraws
from patchbayes.prediction import ClassPrediction
from statistics_helper import assert_frequencies

# Two-sided normal quantile at a false alarm of 1e-6 (4.89), with room for the approximation.
Z_LIMIT = 5.3


def classifier(seed=0):
    torch.manual_seed(seed)
    layers = OrderedDict(
        hidden=nn.Linear(4, 6), norm=nn.BatchNorm1d(6), relu=nn.ReLU(), middle=nn.LayerNorm(6), fc=nn.Linear(6, 3)
    )
    model = nn.Sequential(layers).double()
    model.norm.running_mean.normal_()
    model.norm.running_var.uniform_(0.5, 2)
    return model


def patched(method, sites="norm+output", seed=0):
    model = classifier(seed)
    pb.patch_(model, method, sites)
    return model


def some_inputs(rows=7, seed=3):
    return torch.randn(rows, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def softmax(logits):
    return scipy.special.softmax(np.asarray(logits), axis=-1)


@torch.no_grad()
def explicit_probs(model, inputs, draws):
    """(S, B, C), a plain evaluation forward for each draw."""
    was_training = model.training
    model.eval()
    outputs = []
    for i in range(len(draws)):
        with pb.drawn(model, draws[i]):
            outputs.append(model(inputs).numpy())
    model.train(was_training)
    return softmax(np.stack(outputs))


def numpy_probs(model, inputs, draws):
    """(S, B, C) from the realized weights, by a forward pass written in NumPy."""
    drawn = {name: site.posterior.realize(site.posterior.draw(draws)) for name, site in pb.patched_sites(model).items()}
    weights = {name: {k: v.detach().numpy() for k, v in values.items()} for name, values in drawn.items()}
    mean, var = model.norm.running_mean.numpy(), model.norm.running_var.numpy()
    first_weight, first_bias = model.hidden.weight.detach().numpy(), model.hidden.bias.detach().numpy()
    outputs = []
    for s in range(len(draws)):
        h = inputs.numpy() @ first_weight.T + first_bias
        h = (h - mean) / np.sqrt(var + 1e-5) * weights["norm"]["weight"][s] + weights["norm"]["bias"][s]
        h = np.maximum(h, 0)
        h = (h - h.mean(1, keepdims=True)) / np.sqrt(h.var(1, keepdims=True) + 1e-5)
        h = h * weights["middle"]["weight"][s] + weights["middle"]["bias"][s]
        outputs.append(h @ weights["fc"]["weight"][s].T + weights["fc"]["bias"][s])
    return softmax(np.stack(outputs))


METHODS = {
    "EMP": pb.EMP(3, jitter=0.5),
    "ECMP": pb.ECMP(3, jitter=0.5),
    "noisy": pb.EMP(2, jitter=0.5, sigma=0.2),
    "skewed": pb.EMP(3, jitter=0.5, probabilities=(0.6, 0.3, 0.1)),
    "Ensemble": pb.Ensemble(3, init="copies", jitter=0.5, statistics="shared"),
    "MeanField": pb.MeanField(scale=0.5),
}


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("make", [pb.Draws.sample, pb.Draws.stratify])
def test_probs_are_the_average_over_explicit_forwards_and_over_a_numpy_network(method, make, generator):
    model, x = patched(method), some_inputs()
    draws = make(model, 7, generator)
    expected = numpy_probs(model, x, draws)
    assert len(np.unique(expected[:, 0, 0])) > 1
    np.testing.assert_allclose(explicit_probs(model, x, draws), expected, rtol=1e-10)
    np.testing.assert_allclose(pb.predict(model, x, draws).probs.numpy(), expected.mean(0), rtol=1e-10)


@pytest.mark.parametrize("num_draws", [1, 2, 5])
def test_running_mean_divides_by_s_and_not_by_s_plus_one(num_draws):
    """Algorithm 1 as printed, y <- y + (y_s - y) / (s + 1) from s = 1, halves the first draw; that is not what we do."""
    model, x = patched(METHODS["EMP"]), some_inputs()
    draws = pb.Draws.sample(model, num_draws)
    values = explicit_probs(model, x, draws)
    printed = np.zeros_like(values[0])
    for s, value in enumerate(values, start=1):
        printed = printed + (value - printed) / (s + 1)
    probs = pb.predict(model, x, draws).probs.numpy()
    np.testing.assert_allclose(probs, values.mean(0), rtol=1e-10)
    np.testing.assert_allclose(probs.sum(1), 1, rtol=1e-12)
    np.testing.assert_allclose(printed.sum(1), num_draws / (num_draws + 1), rtol=1e-12)


def test_enumerated_draws_are_weighted_with_their_probabilities():
    p = (0.5, 0.3, 0.2)
    model, x = patched(pb.EMP(3, jitter=0.5, probabilities=p)), some_inputs()
    draws = pb.Draws.enumerate(model)
    assert len(draws) == 27
    weights = np.prod(np.asarray(p)[draws.assignments().numpy()], axis=1)
    values = explicit_probs(model, x, draws)
    prediction = pb.predict(model, x, draws)
    np.testing.assert_allclose(prediction.weights.numpy(), weights, rtol=1e-12)
    np.testing.assert_allclose(prediction.probs.numpy(), np.einsum("s,sbc->bc", weights, values), rtol=1e-10)
    assert np.abs(prediction.probs.numpy() - values.mean(0)).max() > 1e-3
    entropies = scipy.stats.entropy(values, axis=-1)
    np.testing.assert_allclose(prediction.expected_entropy.numpy(), weights @ entropies, rtol=1e-10)


def test_every_field_of_a_class_prediction_follows_its_formula():
    model, x = patched(METHODS["ECMP"]), some_inputs()
    draws = pb.Draws.sample(model, 9)
    values = explicit_probs(model, x, draws)
    mean = values.mean(0)
    prediction = pb.predict(model, x, draws)
    assert isinstance(prediction, ClassPrediction)
    assert isinstance(prediction, pb.Prediction)
    assert len(prediction) == 7
    assert prediction.num_draws == 9
    assert prediction.standard_error_kind == "independent draws"
    assert prediction.draw_probs is None
    expected_entropy = scipy.stats.entropy(values, axis=-1).mean(0)
    expected = {
        "weights": np.full(9, 1 / 9),
        "probs": mean,
        "log_probs": np.log(mean),
        "confidence": mean.max(1),
        "entropy": scipy.stats.entropy(mean, axis=-1),
        "expected_entropy": expected_entropy,
        "standard_error": values.std(0, ddof=1) / 3,
        # The mean divergence from the average: another formula than the difference of entropies.
        "mutual_information": scipy.special.rel_entr(values, mean).sum(-1).mean(0),
    }
    for name, value in expected.items():
        np.testing.assert_allclose(getattr(prediction, name).numpy(), value, rtol=1e-9, err_msg=name)
    assert prediction.predicted_class.tolist() == mean.argmax(1).tolist()


def test_log_probs_stay_finite_where_probabilities_underflow():
    model = nn.Sequential(OrderedDict(fc=nn.Linear(1, 2)))
    pb.patch_(model, pb.EMP(2), "output")
    fc = pb.patched_sites(model)["fc"]
    fc.components("weight").data.zero_()
    fc.components("bias").data.copy_(torch.tensor([[0.0, -1000.0], [0.0, -1200.0]]))
    prediction = pb.predict(model, torch.zeros(1, 1), pb.Draws.enumerate(model))
    assert prediction.probs[0, 1] == 0
    assert float(prediction.log_probs[0, 1]) == pytest.approx(-1000 - np.log(2), rel=1e-6)


def test_draws_that_agree_carry_no_mutual_information():
    prediction = pb.predict(patched(pb.EMP(3, jitter=0)), some_inputs(), 4)
    np.testing.assert_allclose(prediction.mutual_information.numpy(), 0, atol=1e-12)
    assert (prediction.mutual_information >= 0).all()
    assert (prediction.entropy > 0.1).all()


def test_single_precision_and_half_precision_networks_report_in_single_precision():
    x = some_inputs()
    exact = pb.predict(patched(METHODS["EMP"]), x, 6)
    assert exact.probs.dtype == torch.float64
    for dtype, tolerance in [(torch.float32, 1e-5), (torch.bfloat16, 0.1)]:
        prediction = pb.predict(patched(METHODS["EMP"]).to(dtype), x.to(dtype), 6)
        tensors = (prediction.probs, prediction.standard_error, prediction.expected_entropy, prediction.log_probs)
        assert {t.dtype for t in tensors} == {torch.float32}
        torch.testing.assert_close(prediction.probs.double(), exact.probs, rtol=0, atol=tolerance)


# Standard errors


def test_standard_error_of_stratified_draws_is_that_of_their_blocks():
    model, x = patched(pb.EMP(3, jitter=0.5)), some_inputs()
    draws = pb.Draws.stratify(model, 12)
    blocks = explicit_probs(model, x, draws).reshape(4, 3, 7, 3).mean(1)
    prediction = pb.predict(model, x, draws)
    assert prediction.standard_error_kind == "independent blocks"
    np.testing.assert_allclose(prediction.standard_error.numpy(), blocks.std(0, ddof=1) / 2, rtol=1e-8)


def test_standard_error_of_an_incomplete_last_block_counts_its_draws_as_independent():
    model, x = patched(pb.EMP(3, jitter=0.5)), some_inputs()
    draws = pb.Draws.stratify(model, 14)
    values = explicit_probs(model, x, draws)
    blocks = values[:12].reshape(4, 3, 7, 3).mean(1)
    variance = (4 * 9 * blocks.var(0, ddof=1) + 2 * values.var(0, ddof=1)) / 14**2
    np.testing.assert_allclose(pb.predict(model, x, draws).standard_error.numpy(), np.sqrt(variance), rtol=1e-8)


def test_one_site_in_whole_blocks_has_no_error_but_an_incomplete_block_has():
    model, x = patched(pb.EMP(3, jitter=0.5), "output"), some_inputs()
    exact = pb.predict(model, x, pb.Draws.enumerate(model)).probs
    whole = pb.predict(model, x, pb.Draws.stratify(model, 6))
    torch.testing.assert_close(whole.probs, exact, rtol=1e-12, atol=0)
    assert whole.standard_error.max() < 1e-8
    rest = pb.predict(model, x, pb.Draws.stratify(model, 7))
    assert (rest.probs - exact).abs().max() > 1e-4
    assert (rest.standard_error > (rest.probs - exact).abs() / 5).all()


def test_enumeration_is_exact_and_says_so():
    model, x = patched(METHODS["EMP"]), some_inputs()
    prediction = pb.predict(model, x, pb.Draws.enumerate(model))
    assert prediction.standard_error_kind == "exact"
    assert (prediction.standard_error == 0).all()


def test_a_single_draw_has_an_unknown_error():
    prediction = pb.predict(patched(METHODS["EMP"]), some_inputs(), 1)
    assert prediction.standard_error_kind == "unknown"
    assert prediction.standard_error.isnan().all()


def test_kind_of_standard_error_follows_what_was_done_to_the_draws():
    model, x = patched(METHODS["EMP"]), some_inputs(2)
    iid = pb.Draws.sample(model, 12, torch.Generator().manual_seed(1))
    other = pb.Draws.sample(model, 12, torch.Generator().manual_seed(2))
    stratified, everything = pb.Draws.stratify(model, 12), pb.Draws.enumerate(model)
    kinds = {
        "independent draws": [iid, iid[3:], iid + other],
        "independent blocks": [stratified, stratified[3:], stratified[:8]],
        "upper estimate": [stratified[1:], stratified[::3], stratified[:4], stratified + iid, stratified[[3, 1, 7, 2]]],
        "exact": [everything, everything[list(reversed(range(27)))]],
        "unknown": [iid[:1], everything[:20], everything + iid, iid + iid, iid[[0, 0, 1]], stratified[[0, 0]]],
    }
    for kind, all_draws in kinds.items():
        for draws in all_draws:
            prediction = pb.predict(model, x, draws)
            assert prediction.standard_error_kind == kind, draws
            assert prediction.standard_error.isnan().all() == (kind == "unknown")


class TwoSites(nn.Module):
    """Two sites that interact a little, as cheap as a network can be: for thousands of repetitions."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)

    def forward(self, x):
        logit = self.first(x) * (1 + 0.3 * self.second(x)) + self.second(x)
        return torch.cat([logit, torch.zeros_like(logit)], dim=1)


def repeated_errors(make, num_draws, repetitions=400, seed=20):
    """Squared error of the mean, and squared standard errors: as reported, and by the formula for independent draws."""
    model = TwoSites().double()
    pb.patch_(model, pb.EMP(3), "linear")
    pb.patched_sites(model)["first"].components("weight").data.copy_(torch.tensor([-2.0, 0.3, 1.8]).view(3, 1, 1))
    pb.patched_sites(model)["second"].components("weight").data.copy_(torch.tensor([-1.5, 0.2, 2.0]).view(3, 1, 1))
    x = torch.ones(1, 1, dtype=torch.float64)
    exact = float(pb.predict(model, x, pb.Draws.enumerate(model)).probs[0, 0])
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(repetitions):
        prediction = pb.predict(model, x, make(model, num_draws, generator), keep_draws=True)
        iid = prediction.draw_probs[:, 0, 0].var() / num_draws
        rows.append(
            ((float(prediction.probs[0, 0]) - exact) ** 2, float(prediction.standard_error[0, 0]) ** 2, float(iid))
        )
    return np.array(rows).T


def excess(claimed, squared_error):
    """z of mean(claimed - squared error), which is zero for an unbiased variance; R = 400 sees a factor of 3."""
    gap = claimed - squared_error
    return gap.mean() / (gap.std(ddof=1) / np.sqrt(len(gap)))


def test_reported_standard_error_is_the_true_spread_of_independent_draws():
    squared_error, reported, _ = repeated_errors(pb.Draws.sample, 6)
    assert abs(excess(reported, squared_error)) < Z_LIMIT
    assert abs(excess(3 * reported, squared_error)) > Z_LIMIT


def test_reported_standard_error_is_the_true_spread_of_stratified_draws():
    squared_error, reported, iid = repeated_errors(pb.Draws.stratify, 9)
    assert abs(excess(reported, squared_error)) < Z_LIMIT
    assert abs(excess(3 * reported, squared_error)) > Z_LIMIT
    assert excess(iid, squared_error) > Z_LIMIT  # the control: the formula for independent draws overstates


def test_reported_standard_error_is_no_understatement_with_an_incomplete_block():
    squared_error, reported, _ = repeated_errors(pb.Draws.stratify, 7)
    assert excess(reported, squared_error) > -Z_LIMIT
    assert reported.mean() < 4 * squared_error.mean()


# Draws, seeds, what is kept


def test_default_draws_are_twenty_with_a_fixed_seed():
    model, x = patched(METHODS["ECMP"]), some_inputs()
    first, second = pb.predict(model, x), pb.predict(model, x)
    assert first.num_draws == 20
    torch.testing.assert_close(first.probs, second.probs)
    torch.testing.assert_close(first.probs, pb.predict(model, x, pb.Draws.stratify(model, 20), engine="loop").probs)


def test_generator_seeds_the_draws():
    model, x = patched(METHODS["ECMP"]), some_inputs()

    def with_seed(seed):
        options = {"generator": torch.Generator().manual_seed(seed), "sampling": "iid", "engine": "loop"}
        return pb.predict(model, x, 5, **options).probs

    assert torch.equal(with_seed(1), with_seed(1))
    assert not torch.equal(with_seed(1), with_seed(2))
    drawn = pb.Draws.sample(model, 5, torch.Generator().manual_seed(1))
    assert torch.equal(with_seed(1), pb.predict(model, x, draws=drawn, engine="loop").probs)


def test_keep_draws_keeps_the_probabilities_of_every_draw():
    model, x = patched(METHODS["EMP"]), some_inputs()
    draws = pb.Draws.sample(model, 6)
    prediction = pb.predict(model, x, draws, keep_draws=True)
    np.testing.assert_allclose(prediction.draw_probs.numpy(), explicit_probs(model, x, draws), rtol=1e-10)


@settings(max_examples=15, deadline=None)
@given(first=st.integers(1, 6), second=st.integers(1, 6), seed=st.integers(0, 2**31))
def test_concatenated_draws_average_by_size(first, second, seed):
    model, x = patched(METHODS["ECMP"]), some_inputs(2)
    generator = torch.Generator().manual_seed(seed)
    a, b = pb.Draws.sample(model, first, generator), pb.Draws.sample(model, second, generator)
    joined = pb.predict(model, x, a + b)
    for name in ("probs", "expected_entropy"):
        of_a, of_b = (getattr(pb.predict(model, x, d), name) for d in (a, b))
        expected = (first * of_a + second * of_b) / (first + second)
        torch.testing.assert_close(getattr(joined, name), expected, rtol=1e-12, atol=1e-14)


def test_sampled_labels_have_the_predicted_probabilities_and_share_a_draw_within_a_replicate():
    model = nn.Sequential(OrderedDict(fc=nn.Linear(1, 2))).double()
    pb.patch_(model, pb.EMP(2, probabilities=(0.7, 0.3)), "output")
    fc = pb.patched_sites(model)["fc"]
    fc.components("weight").data.zero_()
    fc.components("bias").data.copy_(torch.tensor([[40.0, -40.0], [-40.0, 40.0]]))
    x = torch.zeros(3, 1, dtype=torch.float64)
    prediction = pb.predict(model, x, pb.Draws.enumerate(model), keep_draws=True)
    labels = prediction.sample(4000, torch.Generator().manual_seed(1))
    assert labels.shape == (4000, 3)
    assert (labels == labels[:, :1]).all()  # certain networks that disagree: all inputs follow the same one
    assert_frequencies(labels[:, 0].bincount(), [0.7, 0.3], detects=0.06)
    assert torch.equal(prediction.sample(5), prediction.sample(5))
    assert prediction.sample().shape == (1, 3)
    other = prediction.sample(50, generator=torch.Generator().manual_seed(2))
    assert not torch.equal(other, labels[:50])


def test_predictive_check_of_labels_finds_a_wrong_class_frequency():
    model, x = patched(METHODS["EMP"]), some_inputs(40)
    prediction = pb.predict(model, x, 10, keep_draws=True)

    def zeros(labels):
        return (labels == 0).double().mean()

    targets = prediction.sample(1, torch.Generator().manual_seed(3))[0]
    fine = prediction.check(targets, zeros, replicates=200)
    assert fine.observed == float(zeros(targets))
    assert fine.replicated.shape == (200,)
    assert fine.p_value == float((fine.replicated >= fine.observed).double().mean())
    assert 0.005 < fine.p_value < 0.995
    assert prediction.check(torch.zeros_like(targets), zeros, replicates=200).p_value == 0


# Inputs


class Named(nn.Module):
    """Two inputs, of which the second may be left out."""

    def __init__(self):
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, a, b=None):
        return self.fc(self.norm(a if b is None else a * b.sin()))


def two_inputs():
    torch.manual_seed(0)
    model = Named().double()
    pb.patch_(model, pb.ECMP(3, jitter=0.5))
    return model, some_inputs(6, seed=1), some_inputs(6, seed=2)


def test_tuples_spread_over_arguments_and_mappings_over_keywords():
    model, a, b = two_inputs()
    draws = pb.Draws.sample(model, 4)
    with torch.no_grad(), pb.drawn(model, draws[0]):
        expected = torch.softmax(model.eval()(a, b), -1)
    both = pb.predict(model, (a, b), draws[0]).probs
    torch.testing.assert_close(both, expected)
    assert not torch.allclose(both, pb.predict(model, a, draws[0]).probs)
    torch.testing.assert_close(both, pb.predict(model, {"b": b, "a": a}, draws[0]).probs)
    torch.testing.assert_close(pb.predict(model, (a,), draws).probs, pb.predict(model, a, draws).probs)


def iterables(x, y):
    pairs = [(x[:4], y[:4]), (x[4:], y[4:])]
    return {
        "tensors": [x[:4], x[4:]],
        "pairs": pairs,
        "lists": [list(pair) for pair in pairs],
        "mappings": [{"a": part} for part, _ in pairs],
        "generator": (part for part in (x[:4], x[4:])),
        "loader": DataLoader(TensorDataset(x, y), batch_size=4),
        "loader without labels": DataLoader(x, batch_size=3),
    }


@pytest.mark.parametrize("kind", iterables(torch.zeros(6, 4), torch.zeros(6)))
def test_iterables_of_batches_give_what_one_batch_gives(kind):
    model, x, _ = two_inputs()
    whole = pb.predict(model, x, 5, keep_draws=True)
    parts = pb.predict(model, iterables(x, torch.arange(6))[kind], 5, keep_draws=True)
    assert len(parts) == 6
    for name in ("probs", "log_probs", "expected_entropy", "standard_error", "draw_probs"):
        torch.testing.assert_close(getattr(parts, name), getattr(whole, name), rtol=1e-10, atol=1e-14)


def test_select_says_what_of_a_batch_is_the_input():
    model, a, b = two_inputs()
    labels = torch.arange(6)
    loader = DataLoader(TensorDataset(labels, a, b), batch_size=4)
    alone = pb.predict(model, loader, 4, select=lambda batch: batch[1])
    torch.testing.assert_close(alone.probs, pb.predict(model, a, 4).probs)
    both = pb.predict(model, loader, 4, select=lambda batch: (batch[1], batch[2]))
    torch.testing.assert_close(both.probs, pb.predict(model, (a, b), 4).probs)
    keywords = pb.predict(model, loader, 4, select=lambda batch: {"a": batch[1], "b": batch[2]})
    torch.testing.assert_close(keywords.probs, both.probs)


@pytest.mark.parametrize("make", [lambda a: (torch.arange(6), a), lambda a: {"labels": torch.arange(6), "a": a}])
def test_select_also_applies_to_a_single_batch(make):
    model, a, _ = two_inputs()
    batch = make(a)
    key = "a" if isinstance(batch, dict) else 1
    torch.testing.assert_close(
        pb.predict(model, batch, 4, select=lambda b: b[key]).probs, pb.predict(model, a, 4).probs
    )


class Wrapped(nn.Module):
    """Returns its logits inside something else."""

    def __init__(self, wrap):
        super().__init__()
        self.net, self.wrap = classifier(), wrap

    def forward(self, x):
        return self.wrap(self.net(x))


def test_output_picks_the_tensor_and_an_attribute_named_logits_is_found():
    x = some_inputs()
    plain = patched(pb.EMP(3))
    expected = pb.predict(plain, x, 4).probs
    wrapped = Wrapped(lambda y: {"scores": y, "other": -y})
    pb.patch_(wrapped, pb.EMP(3))
    torch.testing.assert_close(pb.predict(wrapped, x, 4, output=lambda y: y["scores"]).probs, expected)
    assert not torch.equal(pb.predict(wrapped, x, 4, output=lambda y: y["other"]).probs, expected)
    with pytest.raises(PatchbayesError, match="returns a dict"):
        pb.predict(wrapped, x, 4)
    wrapped.wrap = lambda y: SimpleNamespace(logits=y)
    torch.testing.assert_close(pb.predict(wrapped, x, 4).probs, expected)


def test_classes_may_stand_on_any_axis():
    torch.manual_seed(0)
    model = nn.Sequential(OrderedDict(conv=nn.Conv2d(2, 5, 3), norm=nn.BatchNorm2d(5), fc=nn.Conv2d(5, 3, 1))).double()
    pb.patch_(model, pb.EMP(3, jitter=0.5))
    x = torch.randn(2, 2, 6, 7, dtype=torch.float64)
    draws = pb.Draws.sample(model, 4)
    model.eval()
    logits = []
    with torch.no_grad():
        for draw in draws:
            with pb.drawn(model, draw):
                logits.append(model(x).numpy())
    expected = scipy.special.softmax(np.stack(logits), axis=2).mean(0).transpose(0, 2, 3, 1)
    prediction = pb.predict(model, x, draws, likelihood=pb.Categorical(class_dim=1))
    assert prediction.probs.shape == (2, 4, 5, 3)
    assert prediction.entropy.shape == (2, 4, 5)
    np.testing.assert_allclose(prediction.probs.numpy(), expected, rtol=1e-10)
    assert pb.predict(model, x, draws, likelihood=pb.Categorical()).probs.shape == (2, 3, 4, 5)


def test_categorical_log_prob_is_the_log_softmax_at_the_target():
    outputs = torch.randn(2, 5, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    targets = torch.randint(3, (5, 4), generator=torch.Generator().manual_seed(2))
    expected = scipy.special.log_softmax(outputs.numpy(), axis=2)
    log_probs = pb.Categorical(class_dim=1).log_probs(outputs, lead=1)  # the draws stand before the output's own axes
    np.testing.assert_allclose(log_probs.numpy(), expected.transpose(0, 1, 3, 2), rtol=1e-12)
    chosen = np.take_along_axis(expected, targets.numpy()[None, :, None], axis=2)[:, :, 0]
    np.testing.assert_allclose(pb.Categorical(1).log_prob(outputs, targets).numpy(), chosen, rtol=1e-12)
    flat = pb.Categorical().log_probs(outputs[0])
    np.testing.assert_allclose(flat.numpy(), scipy.special.log_softmax(outputs[0].numpy(), axis=-1), rtol=1e-12)
    for wrong in (targets.double(), targets[:3], targets.T):
        with pytest.raises(PatchbayesError, match="class numbers of shape"):
            pb.Categorical(1).log_prob(outputs, wrong)


@pytest.mark.parametrize("sizes", [[1] * 7, [3, 1, 3], [6, 1]])
@pytest.mark.parametrize(
    "rules",
    [
        pb.EMP(3),
        pb.ECMP(3),
        pb.Dropout(0.4),
        pb.MeanField(),
        {"norm": pb.EMP(3, per_example=True), "fc": pb.Dropout(0.5)},
    ],
    ids=["EMP", "ECMP", "Dropout", "MeanField", "mixed"],
)
def test_prediction_does_not_depend_on_the_batches(rules, sizes):
    model, x = classifier(), some_inputs()
    pb.patch_(model, rules)
    whole = pb.predict(model, x, 6)
    parts = pb.predict(model, list(x.split(sizes)), 6)
    torch.testing.assert_close(parts.probs, whole.probs, rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(parts.standard_error, whole.standard_error, rtol=1e-6, atol=1e-12)


def test_dropout_masks_are_fresh_for_every_example_and_draw():
    model, x = patched(pb.Dropout(0.5), "output"), some_inputs(1).repeat(5, 1)
    probs = pb.predict(model, x, 3, keep_draws=True).draw_probs[..., 0]
    assert len(probs.flatten().unique()) > 10  # of 15; equal inputs under one mask would give 3, under one draw 5
    assert torch.equal(probs, pb.predict(model, x, 3, keep_draws=True).draw_probs[..., 0])


class Tokens(nn.Module):
    """Folds positions into the batch axis before the site, as token classifiers do."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        return self.fc(x.flatten(0, 1)).view(len(x), -1, 3).mean(1)


def test_dropout_masks_follow_the_example_where_rows_of_the_layer_are_positions():
    model = Tokens().double()
    pb.patch_(model, pb.Dropout(0.5), "output")
    x = torch.randn(4, 5, 4, dtype=torch.float64)
    whole = pb.predict(model, x, 4).probs
    torch.testing.assert_close(pb.predict(model, list(x.split(1)), 4).probs, whole, rtol=1e-10, atol=0)
    assert not torch.allclose(pb.predict(model, x.flip(0), 4).probs.flip(0), whole)


def test_a_network_that_contains_the_patched_one_predicts():
    inner, x = patched(METHODS["EMP"]), some_inputs()
    outer = nn.Sequential(nn.Identity(), inner)
    assert torch.equal(pb.predict(outer, x, 4).probs, pb.predict(inner, x, 4).probs)


# The network comes back as it was


class Restless(nn.Module):
    """Does in eval mode all that a well-behaved module would not: changes, replaces and makes buffers, draws numbers."""

    def __init__(self, fail_at=None):
        super().__init__()
        self.net, self.fail_at = classifier(), fail_at
        self.frozen = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5)).double()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("last", torch.zeros(2))
        self.register_buffer("cache", None)

    def forward(self, x):
        self.calls += 1
        self.last = x.detach().clone()
        self.cache = x.mean()
        if not hasattr(self, "late"):
            self.register_buffer("late", torch.ones(2), persistent=False)
        torch.rand(3)
        if self.fail_at is not None and self.calls >= self.fail_at:
            raise RuntimeError("in the middle")
        return self.net(self.frozen(x))


def restless(method=None, fail_at=None):
    torch.manual_seed(0)
    model = Restless(fail_at)
    pb.patch_(model, method or pb.ECMP(3, jitter=0.5))
    model.train()
    model.frozen.eval()
    model.net.relu.eval()
    return model


def state_of(model):
    """Everything that prediction must give back; tensors by value (bits) and by identity."""
    buffers = {
        f"{name}.{key}": (id(value), None if value is None else value.clone().numpy().tobytes())
        for name, module in model.named_modules()
        for key, value in module._buffers.items()
    }
    return {
        "modes": [(name, module.training) for name, module in model.named_modules()],
        "buffers": buffers,
        "parameters": [(n, id(p), p.detach().numpy().tobytes()) for n, p in model.named_parameters()],
        "gradients": [None if p.grad is None else p.grad.numpy().tobytes() for p in model.parameters()],
        "state dict": {key: value.numpy().tobytes() for key, value in model.state_dict().items()},
        "global random state": torch.random.get_rng_state().numpy().tobytes(),
        "current draw": [m.weight.detach().numpy().tobytes() for m in (model.net.norm, model.net.fc)],
        "gradient mode": torch.is_grad_enabled(),
    }


@pytest.mark.parametrize(
    "method", [pb.ECMP(3), pb.EMP(3, statistics="per_component"), pb.EMP(2, per_example=True), pb.MeanField()]
)
def test_the_network_comes_back_exactly_as_it_was(method):
    rules, x = {"norm": method, "net.fc": pb.Dropout(0.2)}, some_inputs()
    model, twin = restless(rules), restless(rules)
    for m in (model, twin):
        m(x).sum().backward()
        del m._buffers["late"]
    before = state_of(model)
    prediction = pb.predict(model, [x, x[:2]], 3, keep_draws=True)
    assert prediction.probs.shape == (9, 3)
    after = state_of(model)
    for what, value in before.items():
        assert after[what] == value, what
    assert torch.equal(model(x), twin(x))  # and goes on as if nothing had been


@pytest.mark.parametrize("where", ["forward", "inputs", "output", "statistics"])
def test_the_network_comes_back_after_an_exception_in_the_middle(where):
    def broken_batches():
        yield some_inputs(3)
        raise RuntimeError("in the middle")

    outputs = []

    def broken_output(y):
        outputs.append(y)
        if len(outputs) == 3:
            raise RuntimeError("in the middle")
        return y

    def bad_output(y):
        outputs.append(y)
        return y / (0 if len(outputs) == 3 else 1)

    model = restless(fail_at=3 if where == "forward" else None)
    twin = restless()
    before = state_of(model)
    inputs = broken_batches() if where == "inputs" else some_inputs(3)
    pick = {"output": broken_output, "statistics": bad_output}.get(where)
    with pytest.raises((RuntimeError, PatchbayesError), match=r"in the middle|not finite"):
        pb.predict(model, inputs, 4, output=pick, engine="loop")
    after = state_of(model)
    for what, value in before.items():
        assert after[what] == value, what
    model.fail_at = None
    states = []
    for m in (model, twin):
        torch.manual_seed(0)
        states.append(m(some_inputs()))
    assert torch.equal(*states)


def test_the_network_comes_back_also_where_the_inputs_are_made_with_it():
    model, x = restless(), some_inputs()

    def made_with_the_network():
        for _ in range(2):
            with pb.drawn(model):  # advances the network's own generator
                yield model(x).tanh() @ torch.ones(3, 4, dtype=torch.float64)
            model.net.norm.train()

    before = state_of(model)
    pb.predict(model, made_with_the_network(), 3)
    after = state_of(model)
    for what, value in before.items():
        assert after[what] == value, what


def test_a_held_draw_is_still_held_after_prediction():
    model, x = patched(METHODS["EMP"]).eval(), some_inputs()
    draws = pb.Draws.sample(model, 6, torch.Generator().manual_seed(3))
    with torch.no_grad(), pb.drawn(model, draws[2]):
        before = model(x)
        pb.predict(model, x, 3)
        assert torch.equal(model(x), before)


def test_prediction_builds_no_autograd_graph():
    model, x = patched(METHODS["EMP"]), some_inputs().requires_grad_()
    seen = []
    prediction = pb.predict(model, x, 3, keep_draws=True, output=lambda y: seen.append(y) or y)
    tensors = [*seen, prediction.probs, prediction.log_probs, prediction.standard_error, prediction.draw_probs]
    assert not any(t.requires_grad for t in tensors)
    assert x.grad is None
    model(x).sum().backward()
    assert x.grad is not None


def test_prediction_under_inference_mode_leaves_a_network_that_trains():
    model, x = patched(pb.EMP(3, statistics="per_component")), some_inputs()
    expected = pb.predict(model, x, 4).probs
    with torch.inference_mode():
        frozen = x.clone()
        torch.testing.assert_close(pb.predict(model, frozen, 4).probs, expected)
    torch.testing.assert_close(pb.predict(model, frozen, 4).probs, expected)
    model.train()(x).sum().backward()
    assert model.hidden.weight.grad is not None


def live_values_at_the_end(model, x, num_draws, **options):
    counts = []

    def count(y):
        late = len(counts) >= num_draws - 2  # the walk over all objects is slow
        counts.append(sum(t.numel() for t in gc.get_objects() if type(t) is torch.Tensor) if late else 0)
        return y

    gc.collect()
    pb.predict(model, x, num_draws, output=count, engine="loop", **options)
    return max(counts)


def test_memory_does_not_grow_with_the_number_of_draws_unless_they_are_kept():
    model, x = patched(METHODS["ECMP"]), some_inputs()
    live_values_at_the_end(model, x, 2)  # whatever is made once
    few, many = live_values_at_the_end(model, x, 90), live_values_at_the_end(model, x, 180)
    assert many <= few + 180 * 4  # weights and keys, not outputs
    kept = live_values_at_the_end(model, x, 180, keep_draws=True)
    assert kept >= many + 180 * len(x) * 3


def caught_warnings(action):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    return [str(w.message) for w in caught if "one random draw" in str(w.message)]


def test_a_single_draw_in_eval_mode_is_warned_of_exactly_once():
    model, x = patched(METHODS["EMP"]), some_inputs()
    assert caught_warnings(lambda: model.train()(x)) == []
    assert caught_warnings(lambda: pb.predict(model.eval(), [x, x], 3)) == []
    (message,) = caught_warnings(lambda: [model.eval()(x) for _ in range(4)])
    assert "patchbayes.predict" in message
    assert "patchbayes.Predictor" in message
    assert caught_warnings(lambda: model.eval()(x)) == []
    assert len(caught_warnings(lambda: patched(METHODS["EMP"]).eval()(x))) == 1  # another network, another warning


# Parts of predictions


@pytest.mark.parametrize("which", [slice(2, 5), [0, 3, 6], torch.tensor([True, False] * 3 + [True])], ids=repr)
def test_a_part_of_a_prediction_is_the_prediction_of_the_part(which):
    model, x = patched(METHODS["EMP"]), some_inputs()
    part = pb.predict(model, x, 5, keep_draws=True)[which]
    alone = pb.predict(model, x[which], 5, keep_draws=True)
    assert len(part) == len(alone) == len(x[which])
    assert (part.num_draws, part.standard_error_kind) == (5, "upper estimate")
    assert torch.equal(part.weights, alone.weights)
    for name in ("probs", "log_probs", "standard_error", "expected_entropy", "draw_probs", "entropy"):
        torch.testing.assert_close(getattr(part, name), getattr(alone, name), rtol=1e-10, atol=1e-12)


def test_parts_joined_are_the_whole():
    model, x = patched(METHODS["EMP"]), some_inputs()
    whole = pb.predict(model, x, 5, keep_draws=True)
    joined = ClassPrediction.concatenate([whole[:3], whole[3:4], whole[4:]])
    for name in ("probs", "log_probs", "standard_error", "expected_entropy", "draw_probs", "weights"):
        assert torch.equal(getattr(joined, name), getattr(whole, name)), name
    without = pb.predict(model, x, 5)
    assert ClassPrediction.concatenate([without[:3], without[3:]]).draw_probs is None


def test_predictions_of_other_draws_are_not_joined():
    model, x = patched(METHODS["EMP"]), some_inputs()
    five, six = pb.predict(model, x, 5), pb.predict(model, x, 6)
    with pytest.raises(PatchbayesError, match="same draws"):
        ClassPrediction.concatenate([five, six])
    with pytest.raises(PatchbayesError, match="keep_draws"):
        ClassPrediction.concatenate([five, pb.predict(model, x, 5, keep_draws=True)])
    with pytest.raises(PatchbayesError, match="at least one"):
        ClassPrediction.concatenate([])


# Bad input


def test_bad_input_is_an_error_that_leaves_the_network_alone():
    model, x = restless(), some_inputs()
    foreign = pb.Draws.sample(patched(pb.EMP(2)), 3)
    nan = x.clone()
    nan[1, 2] = torch.nan
    before = state_of(model)
    cases = [
        (lambda: pb.predict(model, nan), PatchbayesError, "holds NaN, 1 of 28"),
        (lambda: pb.predict(model, {"x": nan}), PatchbayesError, "holds NaN"),
        (lambda: pb.predict(model, [x, (nan, 0)]), PatchbayesError, "holds NaN"),
        (lambda: pb.predict(model, x * torch.inf), PatchbayesError, "not finite"),
        (lambda: pb.predict(model, []), PatchbayesError, "no batch"),
        (lambda: pb.predict(model, iter(())), PatchbayesError, "no batch"),
        (lambda: pb.predict(model, 3), PatchbayesError, "not a int"),
        (lambda: pb.predict(model, ()), PatchbayesError, "no tensor"),
        (lambda: pb.predict(model, ["text"]), PatchbayesError, "no tensor"),
        (lambda: pb.predict(model, x, foreign), WrongDraws, "another network"),
        (lambda: pb.predict(model, x, 0), PatchbayesError, "at least 1"),
        (lambda: pb.predict(model, x, 2.5), PatchbayesError, "at least 1"),
        (lambda: pb.predict(model, x, True), PatchbayesError, "at least 1"),
        (lambda: pb.predict(model, x, pb.Draws.sample(model, 2)[:0]), PatchbayesError, "no draw"),
        (
            lambda: pb.predict(model, x, pb.Draws.sample(model, 2), generator=torch.Generator()),
            PatchbayesError,
            "made already",
        ),
        (lambda: pb.predict(model, x, likelihood="categorical"), PatchbayesError, "likelihood="),
        (lambda: pb.predict(classifier(), x), NotPatched, "not a patched network"),
        (lambda: pb.predict(model, x).sample(), PatchbayesError, "keep_draws=True"),
        (lambda: pb.predict(model, x).check(torch.zeros(7), torch.mean), PatchbayesError, "keep_draws=True"),
        (lambda: pb.predict(model, x, keep_draws=True).sample(0), PatchbayesError, "at least 1"),
        (
            lambda: pb.predict(model, x, keep_draws=True).check(torch.zeros(3), torch.mean),
            PatchbayesError,
            r"shape \(3,\), not \(7,\)",
        ),
    ]
    for act, kind, message in cases:
        with pytest.raises(kind, match=message):
            act()
        after = state_of(model)
        for what, value in before.items():
            assert after[what] == value, (message, what)
