"""monte_carlo_interval: how often it holds the exact average, by simulation; plus and minus 1.96 standard errors do not."""

import numpy as np
import pytest
import scipy.stats
import torch
from torch import nn

import patchbayes as pb
from patchbayes.errors import PatchbayesError
from patchbayes.metrics.student import student_t
from patchbayes.prediction.averages import average
from patchbayes.prediction.loop import Members
from patchbayes.prediction.plan import Plan

REPETITIONS = 1000


class Table:
    """A network of which all outputs are known, so that a prediction is a look into a table."""

    def __init__(self, sites, components, jitter):
        torch.manual_seed(0)
        layers = [nn.Linear(3, 6)]
        for _ in range(sites):
            layers += [nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 6)]
        self.model = nn.Sequential(*layers[:-1], nn.Linear(6, 3)).double().eval()
        pb.patch_(self.model, pb.EMP(components, jitter=jitter), "norm")
        x = torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        self.everything = pb.Draws.enumerate(self.model)
        outputs = pb.predict(
            self.model, x, self.everything, likelihood=pb.likelihoods.Gaussian(), keep_draws=True
        ).draw_means
        self.powers = components ** torch.arange(sites)
        self.outputs = torch.empty_like(outputs)
        self.outputs[(self.everything.assignments() * self.powers).sum(1)] = outputs

    def predict(self, draws, likelihood):
        rows = (draws.assignments() * self.powers).sum(1)
        outputs = iter([(Members([[i] for i in range(len(draws))]), self.outputs[rows])])
        return average(outputs, draws, likelihood, False, Plan.of_draws(draws))


@pytest.fixture(scope="module")
def tables():
    with torch.random.fork_rng():
        return {5: Table(4, 5, 0.7), 3: Table(4, 3, 0.8)}


def coverage(table, make, number, likelihood, level=0.95):
    """The share of intervals that hold the exact value: by Student's quantiles, and at 1.96 standard errors; and the kind."""
    exact = table.predict(table.everything, likelihood)
    exact = getattr(exact, exact.estimate)
    generator = torch.Generator().manual_seed(7)
    held = np.zeros(2)
    for _ in range(REPETITIONS):
        found = table.predict(make(table.model, number, generator), likelihood)
        low, high = found.monte_carlo_interval(level)
        held[0] += float(((low <= exact) & (exact <= high)).double().mean())
        reach = 1.96 * found.standard_error
        held[1] += float(((getattr(found, found.estimate) - exact).abs() <= reach).double().mean())
    return *(held / REPETITIONS), found.standard_error_kind


CASES = {
    "default, K = 5": (5, pb.Draws.stratified, 20),
    "three blocks, K = 5": (5, pb.Draws.stratified, 15),
    "six blocks, K = 3": (3, pb.Draws.stratified, 18),
    "orthogonal, three blocks, K = 3": (3, pb.Draws.orthogonal, 27),
    "orthogonal, four blocks, K = 5": (5, pb.Draws.orthogonal, 100),
}


@pytest.mark.parametrize(("components", "make", "number"), CASES.values(), ids=CASES)
def test_balanced_draws_cover_what_they_claim_and_1_96_standard_errors_do_not(tables, components, make, number):
    covered, plain, kind = coverage(tables[components], make, number, pb.likelihoods.Categorical())
    assert kind == "independent blocks"
    assert 0.93 <= covered <= 0.97
    assert plain < 0.90  # the control


@pytest.mark.parametrize(
    "likelihood",
    [
        pb.likelihoods.Categorical().set_temperature_(2.0),
        pb.likelihoods.Categorical().set_temperature_(0.5),
        pb.likelihoods.Gaussian(),
        pb.likelihoods.Bernoulli(),
    ],
    ids=["softened", "sharpened", "regression", "labels"],
)
def test_every_likelihood_covers_what_it_claims(tables, likelihood):
    covered, plain, _ = coverage(tables[5], pb.Draws.stratified, 20, likelihood)
    assert 0.93 <= covered <= 0.97
    assert plain < 0.90


def test_independent_draws_cover_what_they_claim_at_other_levels_too(tables):
    for level in (0.8, 0.95):
        covered, _, kind = coverage(tables[5], pb.Draws.sample, 20, pb.likelihoods.Categorical(), level)
        assert kind == "independent draws"
        assert covered == pytest.approx(level, abs=0.025)


def test_an_incomplete_block_makes_intervals_wider_never_narrower(tables):
    """Its draws count as independent, which they are not quite."""
    covered, _, kind = coverage(tables[3], pb.Draws.stratified, 20, pb.likelihoods.Categorical())
    assert kind == "independent blocks"
    assert covered >= 0.95


@pytest.mark.parametrize("make", [pb.Draws.stratified, pb.Draws.orthogonal])
def test_two_blocks_are_told_by_their_draws_and_cover_at_least_what_they_claim(tables, make):
    number = 10 if make == pb.Draws.stratified else 50
    covered, _, kind = coverage(tables[5], make, number, pb.likelihoods.Categorical())
    assert kind == "upper estimate"
    assert covered >= 0.95


def test_two_blocks_are_told_by_their_draws_because_that_is_shorter(tables):
    """The interval of two blocks by themselves has Student's quantile 12.7: it is longer, though the draws overestimate."""
    generator = torch.Generator().manual_seed(3)
    ours, blocks = [], []
    for _ in range(200):
        draws = pb.Draws.stratified(tables[5].model, 10, generator)
        low, high = tables[5].predict(draws, pb.likelihoods.Categorical()).monte_carlo_interval()
        ours.append(float((high - low).mean()))
        halves = [
            tables[5].predict(draws[part], pb.likelihoods.Categorical()).probs for part in (slice(0, 5), slice(5, 10))
        ]
        blocks.append(2 * student_t(1) * float((halves[0] - halves[1]).abs().mean()) / 2)
    assert np.mean(ours) < 0.8 * np.mean(blocks)


# Degrees of freedom


def test_degrees_of_freedom_count_replicates(tables):
    table, make = tables[5], pb.Draws.stratified
    everything = table.everything

    def freedom(draws, likelihood=None):
        return table.predict(draws, likelihood or pb.likelihoods.Categorical()).degrees_of_freedom

    assert freedom(make(table.model, 20)).tolist() == [3.0] * 3
    assert freedom(make(table.model, 23)).tolist() == [3.0] * 3  # an incomplete block is not counted
    assert freedom(make(table.model, 10)).tolist() == [9.0] * 3
    assert freedom(make(table.model, 5 * 60)).tolist() == [24.0] * 3  # joined to 25
    assert freedom(make(table.model, 5 * 30)).tolist() == [24.0] * 3
    assert freedom(pb.Draws.sample(table.model, 40)).tolist() == [39.0] * 3
    assert (
        freedom(pb.Draws.sample(table.model, 40), pb.likelihoods.Categorical().set_temperature_(2.0)).tolist()
        == [24.0] * 3
    )
    assert freedom(everything).tolist() == [torch.inf] * 3
    assert freedom(everything[:7]).isnan().all()


def test_blocks_are_shared_out_evenly_and_none_is_lost(tables):
    """60 blocks make 25 replicates of two or three: the variance is that of all of them."""
    table = tables[5]
    draws = pb.Draws.stratified(table.model, 5 * 60)
    rows = (draws.assignments() * table.powers).sum(1)
    blocks = table.outputs[rows].reshape(60, 5, 3, 3).mean(1)
    group = np.arange(60) * 25 // 60
    means = np.stack([blocks.numpy()[group == g].mean(0) for g in range(25)])
    share = np.bincount(group)[:, None, None] / 60
    expected = (share**2 * (means - blocks.numpy().mean(0)) ** 2).sum(0) / (1 - (share**2).sum())
    found = table.predict(draws, pb.likelihoods.Gaussian()).standard_error.numpy()
    np.testing.assert_allclose(found, np.sqrt(expected), rtol=1e-8)


def test_draws_with_unequal_weights_are_weighed_in_the_error():
    """Heads with unequal probabilities: each trunk is one value, the weighted average over its heads."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3)).double()
    pb.patch_(model, pb.EMP(3, jitter=0.8, probabilities=(0.7, 0.2, 0.1)))
    x = torch.randn(4, 3, dtype=torch.float64)
    draws = pb.Draws.sample(model, 8).with_heads("3", 3)
    found = pb.predict(model, x, draws, keep_draws=True)
    trunks = np.einsum("h,thbc->tbc", [0.7, 0.2, 0.1], found.draw_probs.numpy().reshape(8, 3, 4, 3))
    np.testing.assert_allclose(found.probs.numpy(), trunks.mean(0), rtol=1e-9)
    np.testing.assert_allclose(found.standard_error.numpy(), trunks.std(0, ddof=1) / np.sqrt(8), rtol=1e-8)
    assert (found.degrees_of_freedom == 7).all()


def test_the_interval_is_student_s_and_stays_between_zero_and_one(tables):
    prediction = tables[5].predict(pb.Draws.stratified(tables[5].model, 20), pb.likelihoods.Categorical())
    low, high = prediction.monte_carlo_interval(0.9)
    reach = scipy.stats.t.ppf(0.95, 3) * prediction.standard_error
    torch.testing.assert_close(low, (prediction.probs - reach).clamp(0, 1))
    torch.testing.assert_close(high, (prediction.probs + reach).clamp(0, 1))
    narrow, wide = (prediction.monte_carlo_interval(level=level) for level in (0.5, 0.999))
    assert (wide[1] - wide[0] >= narrow[1] - narrow[0]).all()
    assert (wide[0] >= 0).all()
    assert (wide[1] <= 1).all()


def test_unknown_errors_and_impossible_levels_are_refused(tables):
    single = tables[5].predict(pb.Draws.sample(tables[5].model, 1), pb.likelihoods.Categorical())
    with pytest.raises(PatchbayesError, match="the error of these 1 draws is unknown"):
        single.monte_carlo_interval()
    exact = tables[5].predict(tables[5].everything, pb.likelihoods.Categorical())
    assert torch.equal(*exact.monte_carlo_interval())
    for level in (0, 1, 1.5, float("nan")):
        with pytest.raises(PatchbayesError, match="level"):
            exact.monte_carlo_interval(level)


# Plain arrays


def test_numpy_gives_plain_arrays_that_can_be_written(tables, tmp_path):
    prediction = tables[5].predict(
        pb.Draws.stratified(tables[5].model, 20), pb.likelihoods.Categorical().set_temperature_(1.5)
    )
    arrays = prediction.numpy()
    assert all(type(value) is np.ndarray for value in arrays.values())
    for name in (
        "probs",
        "log_probs",
        "entropy",
        "mutual_information",
        "standard_error",
        "degrees_of_freedom",
        "weights",
    ):
        np.testing.assert_array_equal(arrays[name], getattr(prediction, name).numpy())
    assert arrays["temperature"] == 1.5
    assert arrays["num_draws"] == 20
    assert "draw_probs" not in arrays
    np.savez(tmp_path / "prediction.npz", **arrays)
    with np.load(tmp_path / "prediction.npz", allow_pickle=False) as read:
        assert set(read) == set(arrays)
    regression = tables[5].predict(pb.Draws.stratified(tables[5].model, 20), pb.likelihoods.Gaussian()).numpy()
    assert {"mean", "variance", "epistemic_variance", "aleatoric_variance"} <= regression.keys()


def test_one_input_is_asked_for_by_a_slice(tables):
    prediction = tables[5].predict(pb.Draws.stratified(tables[5].model, 20), pb.likelihoods.Categorical())
    with pytest.raises(PatchbayesError, match=r"prediction\[1:2\]"):
        prediction[1]
    assert len(prediction[1:2]) == 1
    other = tables[5].predict(prediction.draws, pb.likelihoods.Categorical().set_temperature_(2.0))
    with pytest.raises(PatchbayesError, match="one temperature, got 1 and 2"):
        type(prediction).concatenate([prediction, other])


def test_parts_of_an_orthogonal_array_are_no_replicates():
    """Why arrays are not divided for more degrees of freedom: their balanced parts are not independent."""
    model = nn.Sequential(*(nn.LayerNorm(2) for _ in range(3)))
    pb.patch_(model, pb.EMP(3), "norm")
    arrays = 1500
    z = pb.Draws.orthogonal(model, 9 * arrays, torch.Generator().manual_seed(0)).assignments().reshape(arrays, 9, 3)
    together = (z.unsqueeze(2) != z.unsqueeze(1)).all(-1) | torch.eye(9, dtype=torch.bool)  # (arrays, run, run)
    assert (together.sum(-1) == 3).all()  # three runs along the unused column: every group takes all components once
    ratios = {}
    for number in (1, 2, 3):
        values = torch.cos(2 * torch.pi * z[..., :number].sum(-1).double() / 3)
        parts = (together.double() @ values.unsqueeze(-1)).squeeze(-1) / 3  # of each run its part's mean
        claimed = (parts - parts.mean(1, keepdim=True)).square().sum(1) / 3 / 2 / 3
        ratios[number] = float(claimed.mean()), float(values.mean(1).square().mean())  # the exact average is 0
    assert ratios[1] == pytest.approx((0.0, 0.0), abs=1e-12)
    assert ratios[2][0] > 0.01
    assert ratios[2][1] == pytest.approx(0.0, abs=1e-12)  # the array has no error there
    assert ratios[3][0] < 0.5 * ratios[3][1]
