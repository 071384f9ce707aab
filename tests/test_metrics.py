"""Accuracy, likelihood and calibration against formulas written out, and against scikit-learn where that agrees."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import log_loss, top_k_accuracy_score

from patchbayes.errors import PatchbayesError
from patchbayes.metrics import accuracy, brier, calibration_bins, nll


def random_case(seed, size=400, classes=6):
    generator = torch.Generator().manual_seed(seed)
    probs = (3 * torch.randn(size, classes, generator=generator, dtype=torch.float64)).softmax(1)
    return probs, torch.randint(classes, (size,), generator=generator)


def test_accuracy_and_likelihood_agree_with_scikit_learn():
    probs, targets = random_case(0)
    labels = list(range(6))
    for top in (1, 3):
        assert accuracy(probs, targets, top) == pytest.approx(
            top_k_accuracy_score(targets, probs, k=top, labels=labels)
        )
    assert accuracy(probs, targets, 6) == 1.0
    assert nll(probs.log(), targets) == pytest.approx(log_loss(targets, probs, labels=labels))


def test_brier_is_zero_when_right_and_two_when_wrong_with_certainty():
    probs = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    assert brier(probs, torch.tensor([0, 1])) == 0
    assert brier(probs, torch.tensor([1, 0])) == 2
    assert brier(torch.tensor([[0.7, 0.3]]), torch.tensor([0])) == pytest.approx(2 * 0.3**2)


def reference_calibration(probs, targets, bins=20, least=6):
    """The paper's rule, bin by bin."""
    confidence, predicted = probs.max(1).values.numpy(), probs.argmax(1).numpy()
    expected, gaps = 0.0, [0.0]
    for r in range(1, bins + 1):
        inside = (confidence > (r - 1) / bins) & (confidence <= r / bins)
        if r == 1:
            inside |= confidence == 0
        if inside.sum() < least:
            continue
        gap = abs((predicted[inside] == targets.numpy()[inside]).mean() - confidence[inside].mean())
        expected += inside.sum() / len(confidence) * gap
        gaps.append(gap)
    return expected, max(gaps)


@pytest.mark.parametrize(("bins", "least"), [(20, 6), (20, 1), (7, 3), (1, 1)])
def test_calibration_errors_follow_the_papers_rule(bins, least):
    probs, targets = random_case(1)
    mine = calibration_bins(probs, targets, bins, least)
    expected, largest = reference_calibration(probs, targets, bins, least)
    assert mine.expected_error == pytest.approx(expected, abs=1e-12)
    assert mine.maximum_error == pytest.approx(largest, abs=1e-12)


def test_bins_with_at_most_five_examples_are_left_out_but_still_counted():
    probs = torch.tensor([[0.62, 0.38]] * 5 + [[0.93, 0.07]] * 15, dtype=torch.float64)
    targets = torch.tensor([1] * 5 + [0] * 15)
    bins = calibration_bins(probs, targets)
    assert bins.expected_error == pytest.approx(15 / 20 * 0.07)
    assert bins.maximum_error == pytest.approx(0.07)
    assert calibration_bins(probs, targets, min_count=5).maximum_error == pytest.approx(0.62)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(0, 40))
def test_a_confidence_on_an_edge_belongs_to_the_bin_below(bins, edge):
    edge = min(edge, bins)
    confidence = edge / bins
    probs = torch.tensor([[confidence, 0.0]], dtype=torch.float64)
    count = calibration_bins(probs, torch.tensor([0]), bins, 1).count
    assert count.tolist() == [int(r == max(edge - 1, 0)) for r in range(bins)]


def test_a_perfectly_calibrated_model_has_a_small_error_and_an_overconfident_one_has_not():
    generator = torch.Generator().manual_seed(3)
    confidence = 0.5 + 0.5 * torch.rand(20_000, generator=generator, dtype=torch.float64)
    right = torch.rand(20_000, generator=generator, dtype=torch.float64) < confidence
    probs = torch.stack([confidence, 1 - confidence], 1)
    assert calibration_bins(probs, (~right).long()).expected_error < 0.02
    overconfident = torch.stack([confidence**0.2, 1 - confidence**0.2], 1)
    gap = float((confidence**0.2 - confidence).mean())
    assert calibration_bins(overconfident, (~right).long()).expected_error == pytest.approx(gap, abs=0.02)


def test_metrics_refuse_what_does_not_fit():
    probs, targets = random_case(2)
    for bad in (
        lambda: accuracy(probs, targets[:-1]),
        lambda: nll(probs.log(), targets.double()),
        lambda: brier(probs[0], targets),
        lambda: accuracy(probs, targets, top=7),
        lambda: calibration_bins(probs, targets, num_bins=0),
    ):
        with pytest.raises(PatchbayesError):
            bad()


def test_an_impossible_event_that_happened_costs_infinitely_much():
    assert math.isinf(nll(torch.tensor([[1.0, 0.0]]).log(), torch.tensor([1])))
    assert not np.isnan(brier(torch.tensor([[1.0, 0.0]]), torch.tensor([1])))
