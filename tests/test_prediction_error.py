"""The standard error of a prediction: how it follows from the draws, and that it is the true spread."""

import numpy as np
import torch
from torch import nn

import patchbayes as pb
from prediction_networks import METHODS, Z_LIMIT, explicit_probs, patched, some_inputs

# Standard errors


def test_standard_error_of_stratified_draws_is_that_of_their_blocks():
    model, x = patched(pb.EMP(3, jitter=0.5)), some_inputs()
    draws = pb.Draws.stratified(model, 12)
    blocks = explicit_probs(model, x, draws).reshape(4, 3, 7, 3).mean(1)
    prediction = pb.predict(model, x, draws)
    assert prediction.standard_error_kind == "independent blocks"
    np.testing.assert_allclose(prediction.standard_error.numpy(), blocks.std(0, ddof=1) / 2, rtol=1e-8)


def test_standard_error_of_an_incomplete_last_block_counts_its_draws_as_independent():
    model, x = patched(pb.EMP(3, jitter=0.5)), some_inputs()
    draws = pb.Draws.stratified(model, 14)
    values = explicit_probs(model, x, draws)
    blocks = values[:12].reshape(4, 3, 7, 3).mean(1)
    variance = (4 * 9 * blocks.var(0, ddof=1) + 2 * values.var(0, ddof=1)) / 14**2
    np.testing.assert_allclose(pb.predict(model, x, draws).standard_error.numpy(), np.sqrt(variance), rtol=1e-8)


def test_one_site_in_whole_blocks_has_no_error_but_an_incomplete_block_has():
    model, x = patched(pb.EMP(3, jitter=0.5), "output"), some_inputs()
    exact = pb.predict(model, x, pb.Draws.enumerate(model)).probs
    whole = pb.predict(model, x, pb.Draws.stratified(model, 9))
    torch.testing.assert_close(whole.probs, exact, rtol=1e-12, atol=0)
    assert whole.standard_error.max() < 1e-8
    rest = pb.predict(model, x, pb.Draws.stratified(model, 10))
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
    stratified, everything = pb.Draws.stratified(model, 12), pb.Draws.enumerate(model)
    kinds = {
        "independent draws": [iid, iid[3:], iid + other],
        "independent blocks": [stratified, stratified[3:], stratified[:11]],
        "upper estimate": [
            *(stratified[1:], stratified[::3], stratified[:4], stratified[:8]),
            *(stratified + iid, stratified[[3, 1, 7, 2]]),
        ],
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
    squared_error, reported, iid = repeated_errors(pb.Draws.stratified, 9)
    assert abs(excess(reported, squared_error)) < Z_LIMIT
    assert abs(excess(3 * reported, squared_error)) > Z_LIMIT
    assert excess(iid, squared_error) > Z_LIMIT  # the control: the formula for independent draws overstates


def test_reported_standard_error_is_no_understatement_with_an_incomplete_block():
    squared_error, reported, _ = repeated_errors(pb.Draws.stratified, 10)
    assert excess(reported, squared_error) > -Z_LIMIT
    assert reported.mean() < 4 * squared_error.mean()
