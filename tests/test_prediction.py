"""predict for classifiers: Algorithm 1, its draws, what it keeps, and parts of predictions."""

from collections import OrderedDict

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import patchbayes as pb
from patchbayes.errors import PatchbayesError
from patchbayes.likelihoods import Categorical
from patchbayes.prediction import ClassPrediction
from prediction_networks import METHODS, explicit_probs, numpy_probs, patched, some_inputs
from statistics_helper import assert_frequencies


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("make", [pb.Draws.sample, pb.Draws.stratified])
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
    assert isinstance(prediction, pb.prediction.Prediction)
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


# Draws, seeds, what is kept


def test_default_draws_are_twenty_with_a_fixed_seed():
    model, x = patched(METHODS["ECMP"]), some_inputs()
    first, second = pb.predict(model, x), pb.predict(model, x)
    assert first.num_draws == 20
    torch.testing.assert_close(first.probs, second.probs)
    torch.testing.assert_close(first.probs, pb.predict(model, x, pb.Draws.stratified(model, 20), engine="loop").probs)


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


def test_the_log_probability_of_labels_is_at_the_temperature_and_leaves_out_ignored_ones():
    model, x = patched(METHODS["ECMP"]), some_inputs()
    likelihood = Categorical()
    likelihood.set_temperature_(1.7)
    prediction = pb.predict(model, x, 6, likelihood=likelihood)
    labels = torch.arange(len(x)) % prediction.probs.shape[-1]
    labels[0] = -100
    expected = -torch.nn.functional.nll_loss(prediction.log_probs, labels, reduction="none")
    assert torch.equal(prediction.log_prob(labels), expected)
    assert prediction.log_prob(labels)[0] == 0
    with pytest.raises(PatchbayesError, match=r"log_prob: expected labels from 0 to \d+ \(or -100: ignored\)"):
        prediction.log_prob(labels + 100)
    with pytest.raises(PatchbayesError, match="log_prob"):
        prediction.log_prob(labels[1:])
