"""Bootstrap intervals and calibration floors: fast forms against the plain loop, and whether they hold what they promise."""

import math
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from patchbayes.errors import PatchbayesError
from patchbayes.metrics import (
    Floor,
    Interval,
    accuracy,
    adaptive_calibration_error,
    aurc,
    bootstrap,
    brier,
    calibration_floor,
    classwise_calibration_error,
    correct,
    expected_calibration_error,
    interval_coverage,
    interval_width,
    maximum_calibration_error,
    nll,
    rmse,
)
from statistics_helper import FALSE_ALARM

CALIBRATION = [
    expected_calibration_error,
    maximum_calibration_error,
    adaptive_calibration_error,
    classwise_calibration_error,
]


def classifier(size, classes=5, sharpness=1.0, seed=0):
    """Probabilities that are `sharpness` times too sure (on the scale of logits), targets, and the true probabilities."""
    generator = torch.Generator().manual_seed(seed)
    logits = 1.5 * torch.randn(size, classes, generator=generator, dtype=torch.float64)
    true = logits.softmax(1)
    targets = torch.multinomial(true, 1, generator=generator).squeeze(1)
    return (sharpness * logits).softmax(1), targets, true


def plain(statistic):
    """The same statistic as a function that bootstrap does not know, so that it calls it once for each data set."""
    return lambda *arguments, **options: statistic(*arguments, **options)


def regression_case(size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    predicted, targets = torch.randn(2, size, 2, generator=generator, dtype=torch.float64)
    return predicted, targets


PROBS, TARGETS, _ = classifier(60, seed=1)
TIED = (PROBS * 4).round().clamp_min(0.25) / (PROBS * 4).round().clamp_min(0.25).sum(1, keepdim=True)
PREDICTED, VALUES = regression_case(60)
CASES = {
    "mean": (torch.mean, (VALUES,), {}),
    "accuracy": (accuracy, (PROBS, TARGETS), {}),
    "top 2": (accuracy, (PROBS, TARGETS), {"top": 2}),
    "nll": (nll, (PROBS.log(), TARGETS), {}),
    "brier": (brier, (PROBS, TARGETS), {}),
    "ece": (expected_calibration_error, (PROBS, TARGETS), {}),
    "ece of 7 bins": (expected_calibration_error, (PROBS, TARGETS), {"num_bins": 7, "min_count": 10}),
    "mce": (maximum_calibration_error, (PROBS, TARGETS), {"num_bins": 7}),
    "adaptive": (adaptive_calibration_error, (PROBS, TARGETS), {}),
    "adaptive with ties": (adaptive_calibration_error, (TIED, TARGETS), {"num_bins": 3}),
    "classwise": (classwise_calibration_error, (PROBS, TARGETS), {}),
    "classwise of 3 bins": (classwise_calibration_error, (PROBS, TARGETS), {"num_bins": 3}),
    "aurc": (aurc, (PROBS.amax(1), correct(PROBS, TARGETS)), {}),
    "aurc with ties": (aurc, (TIED.amax(1), correct(TIED, TARGETS)), {}),
    "rmse": (rmse, (PREDICTED, VALUES), {}),
    "coverage": (interval_coverage, (PREDICTED - 1, PREDICTED + 1, VALUES), {}),
    "width": (interval_width, (PREDICTED - 1, PREDICTED + VALUES.abs()), {}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_fast_form_gives_what_calling_the_function_gives(name):
    statistic, examples, options = CASES[name]
    fast = bootstrap(statistic, *examples, replicates=61, seed=3, **options)
    slow = bootstrap(plain(statistic), *examples, replicates=61, seed=3, **options)
    assert fast.value == pytest.approx(slow.value, abs=1e-12) == pytest.approx(float(statistic(*examples, **options)))
    if statistic in CALIBRATION:  # whose interval comes from the percentiles that the other form gives
        median = bootstrap(plain(statistic), *examples, replicates=61, seed=3, level=1e-9, **options).low
        assert fast.low == pytest.approx(min(max(2 * fast.value**2 - slow.high**2, 0) ** 0.5, fast.value), abs=1e-9)
        assert fast.high == pytest.approx(fast.value + median - slow.low, abs=1e-12)
    else:
        assert (fast.low, fast.high) == pytest.approx((slow.low, slow.high), abs=1e-12)
        assert fast.low < fast.value < fast.high


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 30), st.integers(1, 9), st.booleans())
def test_fast_forms_agree_on_every_single_resampled_data_set(seed, size, bins, ties):
    """With two replicates and a level near 0, the interval's ends are one of the two values themselves."""
    probs, targets, _ = classifier(size, seed=seed)
    if ties:
        probs = (probs * 3).round().clamp_min(0.5)
        probs = probs / probs.sum(1, keepdim=True)
    for statistic, examples, options in (
        (aurc, (probs.amax(1), correct(probs, targets)), {}),
        (nll, (probs.log(), targets), {}),
    ):
        fast, slow = (
            bootstrap(s, *examples, replicates=2, seed=seed, **options) for s in (statistic, plain(statistic))
        )
        assert (fast.low, fast.high) == pytest.approx((slow.low, slow.high), abs=1e-12)
    for statistic in CALIBRATION:
        fast = bootstrap(statistic, probs, targets, replicates=2, seed=seed, num_bins=bins)
        slow = bootstrap(plain(statistic), probs, targets, replicates=2, seed=seed, num_bins=bins)
        # The lower of two values is their median: the upper end is the value itself.
        assert fast.high == pytest.approx(fast.value, abs=1e-12)
        expected = min(max(2 * slow.value**2 - slow.high**2, 0) ** 0.5, slow.value)
        assert fast.low**2 == pytest.approx(expected**2, abs=1e-12)


def test_seed_replicates_and_level_matter_and_seeds_repeat():
    examples = (PROBS.log(), TARGETS)
    first = bootstrap(nll, *examples, seed=1)
    assert bootstrap(nll, *examples, seed=1) == first != bootstrap(nll, *examples, seed=2)
    assert bootstrap(nll, *examples, seed=1, replicates=200) != first
    narrow = bootstrap(nll, *examples, seed=1, level=0.5)
    assert first.low < narrow.low < narrow.high < first.high


def test_the_interval_of_a_mean_is_that_of_the_normal_law():
    values = torch.randn(4000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    interval = bootstrap(torch.mean, values, replicates=4000)
    error = float(values.std()) / 4000**0.5
    assert interval.value == pytest.approx(float(values.mean()))
    assert interval.low == pytest.approx(interval.value - 1.96 * error, abs=0.15 * error)
    assert interval.high == pytest.approx(interval.value + 1.96 * error, abs=0.15 * error)
    assert bootstrap(torch.mean, values > 0, replicates=50).value == pytest.approx(0.5, abs=0.05)


def test_an_infinite_loss_gives_an_infinite_end():
    probs = torch.tensor([[0.5, 0.5]] * 3 + [[1.0, 0.0]], dtype=torch.float64)
    interval = bootstrap(nll, probs.log(), torch.tensor([0, 0, 0, 1]))
    assert interval == Interval(math.inf, pytest.approx(math.log(2)), math.inf)


def test_bootstrap_leaves_the_global_random_state_alone():
    before = torch.random.get_rng_state()
    bootstrap(nll, PROBS.log(), TARGETS)
    calibration_floor(PROBS, replicates=5)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_no_calibration_error_takes_long(generator):
    """10,000 examples of 100 classes: under two seconds of processor time each."""
    logits = 3 * torch.randn(10_000, 100, generator=generator)
    probs = logits.softmax(1)
    targets = torch.multinomial(probs, 1, generator=generator).squeeze(1)
    cases = [(error, (probs, targets)) for error in CALIBRATION]
    cases += [(nll, (logits.log_softmax(1), targets)), (aurc, (probs.amax(1), correct(probs, targets)))]
    for statistic, examples in cases:
        start = time.process_time()
        bootstrap(statistic, *examples)
        # Processor time, and three times what is claimed, as other work on the machine slows memory down.
        assert time.process_time() - start < 6, statistic


# Do the intervals hold the true value?


def true_error(statistic, sharpness, bins=10):
    """The error of the whole population, from many examples with probabilities in place of labels."""
    probs, _, true = classifier(200_000, sharpness=sharpness, seed=99)
    if statistic is classwise_calibration_error:
        total = 0.0
        for c in range(probs.shape[1]):
            which = (probs[:, c] * bins).ceil().clamp_min(1).long() - 1
            gap = torch.zeros(bins, dtype=torch.float64).index_add(0, which, probs[:, c] - true[:, c])
            total += float(gap.abs().sum())
        return total / probs.numel()
    confidence, predicted = probs.max(1)
    gaps = confidence - true.gather(1, predicted.unsqueeze(1)).squeeze(1)
    if statistic is adaptive_calibration_error:
        return float(gaps[confidence.argsort()].reshape(bins, -1).mean(1).abs().mean())
    which = (confidence * bins).ceil().clamp_min(1).long() - 1
    sums = torch.zeros(bins, dtype=torch.float64).index_add(0, which, gaps).abs()
    if statistic is maximum_calibration_error:
        return float((sums / torch.bincount(which, minlength=bins).clamp_min(1)).max())
    return float(sums.sum()) / len(gaps)


@pytest.mark.parametrize("sharpness", [1.0, 1.3, 2.0])
@pytest.mark.parametrize("statistic", CALIBRATION)
def test_calibration_intervals_hold_the_true_error(statistic, sharpness):
    """In at least 90 % of 150 data sets, for a nominal 95 %."""
    truth, trials = true_error(statistic, sharpness), 150
    held = 0
    for seed in range(trials):
        probs, targets, _ = classifier(1000, sharpness=sharpness, seed=seed)
        interval = bootstrap(statistic, probs, targets, replicates=200, seed=seed, num_bins=10)
        held += interval.low <= truth <= interval.high
    assert held / trials >= 0.9


def test_percentiles_would_not_hold_it():
    """The negative control, and the reason for not using them."""
    for seed in range(20):
        probs, targets, _ = classifier(1000, seed=seed)
        interval = bootstrap(plain(expected_calibration_error), probs, targets, replicates=100, seed=seed, num_bins=10)
        assert interval.low > 0.5 * interval.value  # the true error is 0


@pytest.mark.parametrize("statistic", [accuracy, nll])
def test_percentile_intervals_of_means_hold_the_mean(statistic):
    _, _, true = classifier(200_000, seed=99)
    truth = float((true.amax(1) if statistic is accuracy else torch.special.entr(true).sum(1)).mean())
    trials, held = 300, 0
    for seed in range(trials):
        probs, targets, _ = classifier(300, seed=seed)
        interval = bootstrap(statistic, probs.log() if statistic is nll else probs, targets, replicates=200, seed=seed)
        held += interval.low <= truth <= interval.high
    assert stats.binom.cdf(held, trials, 0.93) > FALSE_ALARM
    assert stats.binom.sf(held, trials, 0.97) > FALSE_ALARM


# The floor


@pytest.mark.parametrize("statistic", CALIBRATION)
def test_the_floor_is_the_error_under_labels_drawn_from_the_probabilities(statistic):
    probs, _, _ = classifier(300, seed=5)
    generator = torch.Generator().manual_seed(11)
    labels = torch.multinomial(probs, 1500, replacement=True, generator=generator).T
    errors = torch.tensor([statistic(probs, row, num_bins=8) for row in labels], dtype=torch.float64)
    floor = calibration_floor(probs, statistic, replicates=1500, seed=1, num_bins=8)
    spread = float(errors.std())
    # Two means of 1,500 values each: five standard errors of their difference.
    assert floor.mean == pytest.approx(float(errors.mean()), abs=5 * spread * (2 / 1500) ** 0.5)
    assert floor.low == pytest.approx(float(errors.quantile(0.025)), abs=0.4 * spread)
    assert floor.high == pytest.approx(float(errors.quantile(0.975)), abs=0.6 * spread)
    assert floor.low < floor.mean < floor.high


def test_the_floor_of_one_bin_has_a_closed_form():
    """Right or not is a fair coin n times: the error is |Binomial(n, 1/2) / n - 1/2|."""
    size = 400
    floor = calibration_floor(torch.full((size, 2), 0.5), replicates=20_000, num_bins=1)
    exact = stats.binom(size, 0.5).expect(lambda k: abs(k / size - 0.5), lb=0, ub=size)
    assert floor.mean == pytest.approx(exact, rel=0.03)
    assert floor.high == pytest.approx(stats.norm.isf(0.025 / 2) * 0.5 / size**0.5, rel=0.08)


def test_the_floor_falls_with_the_number_of_examples_and_repeats_with_its_seed():
    small, large = (calibration_floor(classifier(size)[0], replicates=200) for size in (500, 8000))
    assert large.mean == pytest.approx(small.mean / 4, rel=0.15)
    probs = classifier(500)[0]
    assert calibration_floor(probs, replicates=50, seed=1) == calibration_floor(probs, replicates=50, seed=1)
    assert calibration_floor(probs, replicates=50, seed=1) != calibration_floor(probs, replicates=50, seed=2)
    assert calibration_floor(probs, replicates=50, seed=1) != calibration_floor(probs, replicates=80, seed=1)
    one = calibration_floor(probs, replicates=1)
    assert one == Floor(one.mean, one.mean, one.mean)
    assert calibration_floor(probs, min_count=100).mean < calibration_floor(probs, min_count=1).mean


def test_a_calibrated_model_lies_within_its_floor_and_another_does_not():
    inside, trials = 0, 200
    for seed in range(trials):
        probs, targets, _ = classifier(400, seed=seed)
        floor = calibration_floor(probs, replicates=200, seed=seed)
        inside += floor.low <= expected_calibration_error(probs, targets) <= floor.high
    assert stats.binom.cdf(inside, trials, 0.93) > FALSE_ALARM
    assert stats.binom.sf(inside, trials, 0.97) > FALSE_ALARM
    probs, targets, _ = classifier(2000, sharpness=1.5)
    assert expected_calibration_error(probs, targets) > 2 * calibration_floor(probs, replicates=100).high


def test_bad_input_is_refused():
    wrong = {
        "no examples given": lambda: bootstrap(nll),
        "numbers of examples": lambda: bootstrap(nll, PROBS.log(), TARGETS[:-1]),
        "an option by position": lambda: bootstrap(accuracy, PROBS, TARGETS, 5),
        "a number": lambda: bootstrap(torch.mean, torch.tensor(1.0)),
        "empty": lambda: bootstrap(torch.mean, torch.zeros(0)),
        "replicates": lambda: bootstrap(nll, PROBS.log(), TARGETS, replicates=1),
        "level": lambda: bootstrap(nll, PROBS.log(), TARGETS, level=1.0),
        "logits": lambda: bootstrap(accuracy, PROBS.log(), TARGETS),
        "floor of another statistic": lambda: calibration_floor(PROBS, nll),
        "floor of one example": lambda: calibration_floor(PROBS[0]),
        "floor of none": lambda: calibration_floor(PROBS[:0]),
        "floor of logits": lambda: calibration_floor(PROBS.log()),
        "floor of sums": lambda: calibration_floor(PROBS / 2),
        "floor, replicates": lambda: calibration_floor(PROBS, replicates=0),
        "floor, bins": lambda: calibration_floor(PROBS, num_bins=0),
        "floor, not a number": lambda: calibration_floor(PROBS * math.nan),
    }
    for what, call in wrong.items():
        with pytest.raises(PatchbayesError):
            pytest.fail(f"{what} was accepted: {call()}")
