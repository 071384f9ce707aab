"""Conformal sets and intervals: the promised coverage by simulation, the definitions against NumPy, and what is refused."""

import numpy as np
import pytest
import torch
from torch import nn

import patchbayes as pb
from patchbayes.errors import PatchbayesError
from patchbayes.likelihoods import Bernoulli, Gaussian, HeteroscedasticGaussian
from patchbayes.prediction import Conformal


def classes(logits: torch.Tensor):
    """A prediction with these logits."""
    return pb.predict(nn.Identity(), logits)


def numbers(mean: torch.Tensor, deviation: torch.Tensor):
    return pb.predict(nn.Identity(), torch.cat([mean, 2 * deviation.log()], -1), likelihood=HeteroscedasticGaussian())


def simulated_classes(number: int, seed: int):
    """Logits of a network that is overconfident and partly wrong, and labels that follow others."""
    generator = torch.Generator().manual_seed(seed)
    true = torch.randn(number, 5, generator=generator, dtype=torch.float64) * 1.5
    labels = torch.multinomial(true.softmax(-1), 1, generator=generator)[:, 0]
    return 3 * true + torch.randn(number, 5, generator=generator, dtype=torch.float64), labels


def simulated_numbers(number: int, seed: int):
    """Means, deviations that are half of what they should be, and targets with heavy tails, of two kinds."""
    generator = torch.Generator().manual_seed(seed)
    mean = torch.randn(number, 2, generator=generator, dtype=torch.float64)
    deviation = torch.rand(number, 2, generator=generator, dtype=torch.float64) + 0.2
    noise = torch.randn(number, 2, generator=generator, dtype=torch.float64)
    tails = torch.randn(number, 2, generator=generator, dtype=torch.float64).abs() + 0.1
    return mean, deviation, mean + 2 * deviation * noise / tails


N, REPEATS = 49, 1000


def assert_covers(covered: np.ndarray, level: float, held_out: int) -> None:
    """The mean of Bernoulli trials is k / (n + 1), at a false-alarm rate of 1e-6 (4.9 standard deviations)."""
    expected = np.ceil((held_out + 1) * level - 1e-9) / (held_out + 1)
    error = np.sqrt(expected * (1 - expected) / covered.size)
    assert abs(covered.mean() - expected) < 4.9 * error, (covered.mean(), expected, error)


@pytest.mark.parametrize("score", ["lac", "aps"])
@pytest.mark.parametrize("level", [0.6, 0.9])
def test_sets_hold_the_label_as_often_as_promised(score, level):
    """One new input for each held-out part: trials are independent, and their mean is known exactly."""
    logits, labels = simulated_classes((N + 1) * REPEATS, seed=0)
    everything, covered = classes(logits), []
    for part in range(REPEATS):
        rows = slice(part * (N + 1), (part + 1) * (N + 1))
        prediction, known = everything[rows], labels[rows]
        found = pb.conformal(prediction[:N], known[:N], level, score)
        covered.append(bool(found.sets(prediction[N:])[0, known[N]]))
    assert_covers(np.array(covered), level, N)


def test_the_check_of_coverage_can_fail():
    """Sets of the most likely classes that sum to the level, without calibration, hold the label less often."""
    logits, labels = simulated_classes(5000, seed=0)
    ordered = classes(logits).probs.sort(descending=True)
    taken = (ordered.values.cumsum(-1) < 0.9).sum(-1) + 1
    rank = ordered.indices.argsort().gather(1, labels[:, None])[:, 0]
    with pytest.raises(AssertionError):
        assert_covers((rank < taken).numpy(), 0.9, N)


@pytest.mark.parametrize("level", [0.5, 0.9])
def test_intervals_hold_the_target_as_often_as_promised(level):
    mean, deviation, targets = simulated_numbers((N + 1) * REPEATS, seed=1)
    everything, covered = numbers(mean, deviation), []
    for part in range(REPEATS):
        rows = slice(part * (N + 1), (part + 1) * (N + 1))
        prediction, known = everything[rows], targets[rows]
        low, high = pb.conformal(prediction[:N], known[:N], level).interval(prediction[N:])
        covered.append(((low <= known[N:]) & (known[N:] <= high))[0].tolist())
    for target in (0, 1):
        assert_covers(np.array(covered)[:, target], level, N)


def test_scores_are_those_of_the_definitions():
    logits, labels = simulated_classes(60, seed=2)
    prediction = classes(logits)
    probs = prediction.probs.numpy()
    p_true = probs[np.arange(60), labels]
    lac = pb.conformal(prediction, labels, 0.8)
    assert float(lac.threshold) == np.sort(1 - p_true)[int(np.ceil(61 * 0.8)) - 1]
    assert (lac.sets(prediction).numpy() == (1 - probs <= float(lac.threshold))).all()
    aps = pb.conformal(prediction, labels, 0.8, score="aps")
    expected = np.sort([row[row >= row[label]].sum() for row, label in zip(probs, labels.numpy(), strict=True)])
    np.testing.assert_allclose(float(aps.threshold), expected[int(np.ceil(61 * 0.8)) - 1], rtol=1e-12)
    assert (aps.score, lac.score, lac.level, lac.num_held_out) == ("aps", "lac", 0.8, 60)
    assert not torch.equal(aps.sets(prediction), lac.sets(prediction))


def test_intervals_are_normalized_by_the_deviation():
    mean, deviation, targets = simulated_numbers(60, seed=3)
    prediction = numbers(mean, deviation)
    found = pb.conformal(prediction, targets)
    low, high = found.interval(prediction)
    torch.testing.assert_close((high - low) / 2, found.threshold * prediction.variance.sqrt())
    torch.testing.assert_close((high + low) / 2, prediction.mean)
    one = pb.predict(nn.Identity(), mean[:, :1], likelihood=Gaussian(4.0))
    flat, column = (pb.conformal(one, some) for some in (targets[:, 0], targets[:, :1]))
    assert torch.equal(flat.threshold, column.threshold)


def test_a_patched_network_end_to_end():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 3, generator=generator)
    y = (x[:, 0] + 0.5 * torch.randn(400, generator=generator) > 0).long()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 2))
    pb.patch_(model, pb.ECMP(3))
    draws = pb.Draws.stratified(model, 10)
    found = pb.conformal(pb.predict(model, x[:200], draws), y[:200], level=0.9)
    sets = found.sets(pb.predict(model, x[200:], draws))
    assert sets.shape == (200, 2)
    assert float(sets.gather(1, y[200:, None]).double().mean()) > 0.8


def test_what_cannot_be_answered_is_refused():
    logits, labels = simulated_classes(40, seed=4)
    prediction = classes(logits)
    with pytest.raises(PatchbayesError, match="at least 99 held-out examples"):
        pb.conformal(prediction, labels, level=0.99)
    with pytest.raises(PatchbayesError, match="between 0 and 1"):
        pb.conformal(prediction, labels, level=1.0)
    with pytest.raises(PatchbayesError, match='"lac" or "aps"'):
        pb.conformal(prediction, labels, score="raps")
    with pytest.raises(PatchbayesError, match="from 0 to 4"):
        pb.conformal(prediction, labels + 3)
    with pytest.raises(PatchbayesError, match="shape"):
        pb.conformal(prediction, labels[:-1])
    regression = numbers(*simulated_numbers(40, seed=5)[:2])
    with pytest.raises(PatchbayesError, match="one score, leave it out"):
        pb.conformal(regression, torch.zeros(40, 2), score="aps")
    with pytest.raises(PatchbayesError, match="not finite"):
        pb.conformal(regression, torch.full((40, 2), torch.nan))
    sets = pb.conformal(prediction, labels)
    with pytest.raises(PatchbayesError, match="sets of classes"):
        sets.interval(regression)
    with pytest.raises(PatchbayesError, match="intervals of numbers"):
        pb.conformal(regression, torch.zeros(40, 2)).sets(prediction)
    with pytest.raises(PatchbayesError, match="LabelPrediction"):
        pb.conformal(pb.predict(nn.Identity(), logits, likelihood=Bernoulli()), labels)
    with pytest.raises(PatchbayesError, match="one class for each input"):
        pb.conformal(classes(logits.reshape(20, 2, 5)), labels[:20])
    assert isinstance(sets, Conformal)
