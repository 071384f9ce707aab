"""Accumulators give what the functions give on all data, however those are cut into batches and processes."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from patchbayes.errors import PatchbayesError
from patchbayes.metrics import accuracy, brier, calibration_bins, log_density, nll, rmse
from patchbayes.metrics.streaming import NLL, RMSE, Accuracy, Brier, Calibration, LogDensity, Mean

SIZE, CLASSES, DRAWS = 57, 4, 3
PRECISION = torch.tensor([2.0, 0.3])
WEIGHTS = torch.tensor([0.5, 0.3, 0.2])


def data(seed):
    generator = torch.Generator().manual_seed(seed)
    probs = (2 * torch.randn(SIZE, CLASSES, generator=generator)).softmax(1)
    targets = torch.randint(CLASSES, (SIZE,), generator=generator)
    means, values = torch.randn(DRAWS, SIZE, 2, generator=generator), torch.randn(SIZE, 2, generator=generator)
    return probs, targets, means, values


# name: (a new accumulator, count some examples of the data, the value on all data)
KINDS = {
    "mean": (Mean, lambda a, d, i: a.update(d[3][i, 0]), lambda d: float(d[3][:, 0].double().mean())),
    "accuracy": (Accuracy, lambda a, d, i: a.update(d[0][i], d[1][i]), lambda d: accuracy(d[0], d[1])),
    "top 2": (lambda: Accuracy(top=2), lambda a, d, i: a.update(d[0][i], d[1][i]), lambda d: accuracy(d[0], d[1], 2)),
    "nll": (NLL, lambda a, d, i: a.update(d[0][i].log(), d[1][i]), lambda d: nll(d[0].log(), d[1])),
    "brier": (Brier, lambda a, d, i: a.update(d[0][i], d[1][i]), lambda d: brier(d[0], d[1])),
    "calibration": (
        lambda: Calibration(num_bins=7, min_count=3),
        lambda a, d, i: a.update(d[0][i], d[1][i]),
        lambda d: calibration_bins(d[0], d[1], 7, 3),
    ),
    "rmse": (
        lambda: RMSE(num_targets=2),
        lambda a, d, i: a.update(d[2][0, i], d[3][i]),
        lambda d: rmse(d[2][0], d[3]),
    ),
    "rmse of one": (
        RMSE,
        lambda a, d, i: a.update(d[2][0, i, 0], d[3][i, 0]),
        lambda d: rmse(d[2][0, :, 0], d[3][:, 0]),
    ),
    "log density": (
        LogDensity,
        lambda a, d, i: a.update(d[2][:, i], d[3][i], PRECISION, WEIGHTS),
        lambda d: float(log_density(d[2], d[3], PRECISION, WEIGHTS).mean()),
    ),
}


def assert_same(found, expected):
    if isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-12, abs=1e-12)
        return
    assert torch.equal(found.count, expected.count)
    torch.testing.assert_close(found.confidence, expected.confidence, equal_nan=True)
    torch.testing.assert_close(found.accuracy, expected.accuracy, equal_nan=True)
    assert (found.num_examples, found.min_count) == (expected.num_examples, expected.min_count)
    assert found.expected_error == pytest.approx(expected.expected_error, abs=1e-12)
    assert found.maximum_error == pytest.approx(expected.maximum_error, abs=1e-12)


@settings(max_examples=120, deadline=None)
@given(
    st.sampled_from(sorted(KINDS)),
    st.integers(0, 10**6),
    st.lists(st.integers(0, SIZE), max_size=8),
    st.integers(1, 4),
    st.randoms(use_true_random=False),
)
def test_any_batching_order_and_number_of_processes_gives_the_same(kind, seed, cuts, processes, random):
    """Batches may also be empty."""
    make, update, whole = KINDS[kind]
    everything = data(seed)
    bounds = [0, *sorted(cuts), SIZE]
    batches = [torch.arange(start, stop) for start, stop in itertools.pairwise(bounds)]
    random.shuffle(batches)
    parts = [make() for _ in range(processes)]
    for batch in batches:
        update(random.choice(parts), everything, batch)
    total = make()
    for part in parts:
        total.merge(part)
    assert_same(total.value(), whole(everything))


def test_totals_add_up_across_processes():
    """What all_reduce does to them."""
    make, update, whole = KINDS["calibration"]
    everything, parts = data(1), [make(), make()]
    for part, batch in zip(parts, torch.arange(SIZE).split(30), strict=True):
        update(part, everything, batch)
    parts[0].totals += parts[1].totals
    assert_same(parts[0].value(), whole(everything))


def test_reading_a_value_changes_nothing():
    make, update, _ = KINDS["calibration"]
    accumulator, everything = make(), data(2)
    update(accumulator, everything, torch.arange(20))
    first = accumulator.value()
    update(accumulator, everything, torch.arange(20, SIZE))
    assert first.num_examples == 20
    assert accumulator.value().num_examples == SIZE


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_needs_examples(kind):
    with pytest.raises(PatchbayesError, match="update first"):
        KINDS[kind][0]().value()


def test_only_accumulators_of_one_kind_are_merged():
    for one, other in (
        (Accuracy(), Accuracy(top=5)),
        (NLL(), Brier()),
        (Calibration(), Calibration(num_bins=10)),
        (Calibration(), Calibration(min_count=1)),
        (RMSE(), RMSE(num_targets=2)),
    ):
        with pytest.raises(PatchbayesError, match="one kind"):
            one.merge(other)


def test_bad_input_is_refused():
    probs, targets, means, values = data(3)
    wrong = {
        "mean of a table": lambda: Mean().update(probs),
        "logits": lambda: Accuracy().update(probs.log(), targets),
        "classes": lambda: NLL().update(probs.log(), targets + CLASSES),
        "shapes": lambda: Brier().update(probs[:-1], targets),
        "not a number": lambda: Calibration().update(probs * math.nan, targets),
        "number of targets": lambda: RMSE().update(values, values),
        "shape of targets": lambda: LogDensity().update(means, values[:, :1]),
        "top": lambda: Accuracy(top=0),
        "top of too few classes": lambda: Accuracy(top=CLASSES + 1).update(probs, targets),
        "bins": lambda: Calibration(num_bins=0),
        "least count": lambda: Calibration(min_count=0),
        "targets": lambda: RMSE(num_targets=0),
    }
    for what, call in wrong.items():
        with pytest.raises(PatchbayesError):
            pytest.fail(f"{what} was accepted: {call()}")
