"""Accuracy, likelihood and calibration against formulas written out, and against other packages where those agree."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import log_loss, top_k_accuracy_score

from patchbayes.errors import PatchbayesError
from patchbayes.metrics import (
    accuracy,
    adaptive_calibration_error,
    brier,
    brier_per_example,
    calibration_bins,
    classwise_calibration_error,
    correct,
    expected_calibration_error,
    maximum_calibration_error,
    nll,
    nll_per_example,
)


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


def test_the_metrics_are_means_of_what_they_are_for_each_example():
    probs, targets = random_case(4)
    assert correct(probs, targets, top=2).double().mean() == accuracy(probs, targets, top=2) > accuracy(probs, targets)
    assert nll_per_example(probs.log(), targets).mean() == nll(probs.log(), targets)
    assert brier_per_example(probs, targets).mean() == brier(probs, targets)


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


def reference_classwise(probs, targets, bins):
    probs, targets = probs.numpy(), targets.numpy()
    total = 0.0
    for c in range(probs.shape[1]):
        for r in range(bins):
            inside = (probs[:, c] > r / bins) & (probs[:, c] <= (r + 1) / bins) | (r == 0) & (probs[:, c] == 0)
            if inside.any():
                total += inside.mean() * abs((targets[inside] == c).mean() - probs[inside, c].mean())
    return total / probs.shape[1]


@pytest.mark.parametrize("bins", [1, 5, 20])
def test_classwise_error_is_the_mean_of_the_errors_of_each_class(bins):
    probs, targets = random_case(5)
    assert classwise_calibration_error(probs, targets, bins) == pytest.approx(reference_classwise(probs, targets, bins))


def test_classwise_error_sees_what_the_top_class_hides():
    """Right about the top class, wrong about which of the others comes instead."""
    probs = torch.tensor([[0.6, 0.3, 0.1]] * 1000, dtype=torch.float64)
    targets = torch.tensor([0] * 600 + [1] * 100 + [2] * 300)
    assert expected_calibration_error(probs, targets) == pytest.approx(0, abs=1e-12)
    assert classwise_calibration_error(probs, targets) == pytest.approx(0.4 / 3)


@pytest.mark.parametrize("bins", [1, 4, 20])
def test_adaptive_error_has_bins_of_equal_mass(bins):
    probs, targets = random_case(6)
    confidence, predicted = probs.max(1)
    order = confidence.argsort()
    gaps = (confidence - (predicted == targets).double())[order].reshape(bins, -1).mean(1)
    assert adaptive_calibration_error(probs, targets, bins) == pytest.approx(float(gaps.abs().mean()))


def test_adaptive_error_shares_examples_on_a_border():
    probs = torch.tensor([[0.9, 0.1], [0.7, 0.3], [0.6, 0.4]], dtype=torch.float64)
    targets = torch.tensor([0, 1, 0])  # gaps -0.1, 0.7, -0.4; half of the middle one belongs to each of two bins
    assert adaptive_calibration_error(probs, targets, 2) == pytest.approx((abs(-0.1 + 0.35) + abs(0.35 - 0.4)) / 3)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(2, 4))
def test_calibration_errors_do_not_depend_on_the_order_of_the_examples(seed, bins, grid):
    """Also where many confidences are equal."""
    generator = torch.Generator().manual_seed(seed)
    top = 0.5 + torch.randint(grid, (60,), generator=generator).double() / (2 * grid)
    probs, targets = torch.stack([top, 1 - top], 1), torch.randint(2, (60,), generator=generator)
    order = torch.randperm(60, generator=generator)
    for error in (expected_calibration_error, adaptive_calibration_error, classwise_calibration_error):
        one, other = (error(probs[o], targets[o], num_bins=bins) for o in (order, torch.arange(60)))
        assert one == pytest.approx(other, abs=1e-12)
        assert 0 <= one <= 1


@pytest.mark.parametrize("bins", [7, 20])
def test_calibration_errors_agree_with_netcal(bins):
    netcal = pytest.importorskip("netcal.metrics")
    probs, targets = random_case(1)
    arrays = probs.numpy(), targets.numpy()
    assert expected_calibration_error(probs, targets, bins, 1) == pytest.approx(netcal.ECE(bins).measure(*arrays))
    assert maximum_calibration_error(probs, targets, bins, 1) == pytest.approx(netcal.MCE(bins).measure(*arrays))
    removed = netcal.ECE(bins, sample_threshold=6).measure(*arrays)
    assert expected_calibration_error(probs, targets, bins) == pytest.approx(removed)
    assert expected_calibration_error(probs, targets, bins, min_count=40) < removed


@pytest.mark.parametrize("bins", [7, 20])
def test_calibration_errors_agree_with_torchmetrics(bins):
    functional = pytest.importorskip("torchmetrics.functional.classification")
    probs, targets = random_case(1)
    for norm, mine in (("l1", expected_calibration_error), ("max", maximum_calibration_error)):
        theirs = functional.multiclass_calibration_error(probs, targets, 6, n_bins=bins, norm=norm)
        assert mine(probs, targets, num_bins=bins, min_count=1) == pytest.approx(float(theirs), abs=1e-6)  # float32


def test_calibration_curve_agrees_with_scikit_learn():
    from sklearn.calibration import calibration_curve

    probs, targets = random_case(7, size=2000)
    bins = calibration_bins(probs, targets, 10)
    accuracy_of_bin, confidence_of_bin = calibration_curve(correct(probs, targets), probs.amax(1), n_bins=10)
    filled = bins.count > 0
    np.testing.assert_allclose(bins.accuracy[filled], accuracy_of_bin)
    np.testing.assert_allclose(bins.confidence[filled], confidence_of_bin)


def test_known_disagreements_confidences_on_an_edge():
    """The paper's bins are (a, b]; netcal and torchmetrics have [a, b), the latter with a bin of its own for exactly 1."""
    netcal = pytest.importorskip("netcal.metrics")
    functional = pytest.importorskip("torchmetrics.functional.classification")
    on_edge = torch.tensor([[0.5, 0.3, 0.2]] * 10 + [[0.6, 0.2, 0.2]] * 10, dtype=torch.float64)
    targets = torch.tensor([0] * 10 + [1] * 5 + [2] * 5)
    assert expected_calibration_error(on_edge, targets, num_bins=2) == pytest.approx((0.5 + 0.6) / 2)
    assert netcal.ECE(2).measure(on_edge.numpy(), targets.numpy()) == pytest.approx(0.05)
    theirs = functional.multiclass_calibration_error(on_edge, targets, 3, n_bins=2, norm="l1")
    assert float(theirs) == pytest.approx(0.05, abs=1e-6)
    certain = torch.tensor([[1.0, 0.0, 0.0]] * 10 + [[0.96, 0.02, 0.02]] * 10, dtype=torch.float64)
    targets = torch.tensor([0] * 5 + [1] * 3 + [2] * 2 + [0] * 10)
    assert expected_calibration_error(certain, targets) == pytest.approx(abs(0.98 - 0.75))
    assert netcal.ECE(20).measure(certain.numpy(), targets.numpy()) == pytest.approx(abs(0.98 - 0.75))
    theirs = functional.multiclass_calibration_error(certain, targets, 3, n_bins=20, norm="l1")
    assert float(theirs) == pytest.approx((0.5 + 0.04) / 2, abs=1e-6)


def test_metrics_refuse_what_does_not_fit():
    probs, targets = random_case(2)
    wrong = {
        "shape": lambda: accuracy(probs, targets[:-1]),
        "kind of target": lambda: nll(probs.log(), targets.double()),
        "truth values as targets": lambda: accuracy(probs, targets > 2),
        "one example": lambda: brier(probs[0], targets),
        "top": lambda: accuracy(probs, targets, top=7),
        "bins": lambda: calibration_bins(probs, targets, num_bins=0),
        "fraction of a bin": lambda: calibration_bins(probs, targets, num_bins=2.5),
        "least count": lambda: calibration_bins(probs, targets, min_count=0),
        "adaptive bins": lambda: adaptive_calibration_error(probs, targets, num_bins=0),
        "classwise bins": lambda: classwise_calibration_error(probs, targets, num_bins=0),
        "logits": lambda: accuracy(probs.log(), targets),
        "probabilities for log": lambda: nll(probs, targets),
        "class too large": lambda: accuracy(probs, targets + 1),
        "class too small": lambda: brier(probs, targets - 1),
        "not a number": lambda: expected_calibration_error(probs * math.nan, targets),
        "not a number, log": lambda: nll(probs.log() * math.nan, targets),
        "nothing": lambda: accuracy(probs[:0], targets[:0]),
        "nothing, nll": lambda: nll(probs[:0].log(), targets[:0]),
        "nothing, brier": lambda: brier(probs[:0], targets[:0]),
        "nothing, bins": lambda: calibration_bins(probs[:0], targets[:0]),
        "nothing, adaptive": lambda: adaptive_calibration_error(probs[:0], targets[:0]),
        "nothing, classwise": lambda: classwise_calibration_error(probs[:0], targets[:0]),
    }
    for what, call in wrong.items():
        with pytest.raises(PatchbayesError):
            pytest.fail(f"{what} was accepted: {call()}")


def test_metrics_take_low_precision_any_integer_and_tensors_with_gradients():
    probs, targets = random_case(8)
    half = probs.to(torch.bfloat16)
    for small in (targets.to(torch.uint8), targets.to(torch.int32)):
        assert accuracy(probs.float().requires_grad_(), small) == pytest.approx(accuracy(probs, targets), abs=0.01)
        assert nll(probs.log().requires_grad_(), small) == nll(probs.log(), targets)
        assert brier(half, small) == pytest.approx(brier(probs, targets), abs=0.01)
        assert expected_calibration_error(half, small) == pytest.approx(
            expected_calibration_error(probs, targets), abs=0.01
        )


def test_an_impossible_event_that_happened_costs_infinitely_much():
    assert math.isinf(nll(torch.tensor([[1.0, 0.0]]).log(), torch.tensor([1])))
    assert not np.isnan(brier(torch.tensor([[1.0, 0.0]]), torch.tensor([1])))
