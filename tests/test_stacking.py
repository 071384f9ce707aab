"""Stacking: weights against an independent solver, the duality gap, and what weighted draws mean elsewhere."""

import copy
import itertools
import math

import numpy as np
import pytest
import torch
from scipy import optimize
from torch import nn

import patchbayes as pb
from patchbayes.draws.draws import law_of
from patchbayes.errors import PatchbayesError, WrongDraws
from patchbayes.stacking import best_weights, stack, stack_components_


def score(log_probs, weights) -> float:
    log_probs, weights = np.asarray(log_probs), np.asarray(weights)
    return float(np.log(np.maximum(weights @ np.exp(log_probs), 1e-300)).mean())


def solved_by_scipy(log_probs) -> float:
    """The best score, by a general solver from several starts."""
    size, best = len(log_probs), -math.inf
    p = np.exp(np.asarray(log_probs))
    for start in [np.full(size, 1 / size), *np.random.default_rng(0).dirichlet(np.ones(size), 3)]:
        found = optimize.minimize(
            lambda w: -np.log(np.maximum(w @ p, 1e-300)).mean(),
            start,
            jac=lambda w: -(p / np.maximum(w @ p, 1e-300)).mean(1),
            bounds=[(0, 1)] * size,
            constraints={"type": "eq", "fun": lambda w: w.sum() - 1},
            method="SLSQP",
            options={"ftol": 1e-13, "maxiter": 1000},
        )
        best = max(best, score(log_probs, found.x / found.x.sum()))
    return best


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("shape", [(2, 3), (5, 40), (12, 7)])
def test_weights_are_those_of_an_independent_solver(shape, seed):
    log_probs = torch.log_softmax(3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed)), 0).double()
    weights, gap = best_weights(log_probs)
    assert weights.sum().item() == pytest.approx(1, abs=1e-12)
    assert weights.min() >= 0
    assert gap <= 1e-6
    reference = solved_by_scipy(log_probs)
    assert score(log_probs, weights) >= reference - 1e-7
    assert reference <= score(log_probs, weights) + gap + 1e-12


def test_the_gap_bounds_what_is_missing_for_any_weights():
    """max_s g_s - 1 at weights that are not the best: the control is the weaker gap of a tenth of it, which fails."""
    log_probs = torch.log_softmax(2 * torch.randn(4, 30, generator=torch.Generator().manual_seed(1)), 0).double()
    best = solved_by_scipy(log_probs)
    for w in np.random.default_rng(2).dirichlet(np.ones(4), 20):
        gap = (np.exp(log_probs.numpy()) / (w @ np.exp(log_probs.numpy()))).mean(1).max() - 1
        assert best - score(log_probs, w) <= gap + 1e-9
        assert best - score(log_probs, w) > 0.02 * gap


def test_a_draw_that_is_best_everywhere_takes_all_weight():
    log_probs = torch.tensor([[-1.0, -2.0, -0.5], [-1.1, -2.1, -0.6], [-3.0, -4.0, -5.0]])
    weights, gap = best_weights(log_probs)
    assert weights.tolist() == [1, 0, 0]
    assert gap == pytest.approx(0, abs=1e-9)


def test_labels_of_very_small_probability_do_not_underflow():
    log_probs = torch.tensor([[-2000.0, -1.0], [-2001.0, -3.0], [-3000.0, -0.5]], dtype=torch.float64)
    weights, gap = best_weights(log_probs)
    assert torch.isfinite(weights).all()
    assert gap <= 1e-6
    assert weights[1] == 0


def test_labels_that_no_draw_allows_are_refused():
    with pytest.raises(PatchbayesError, match="1 held-out labels have probability zero"):
        best_weights(torch.tensor([[-math.inf, -1.0], [-math.inf, -2.0]]))
    with pytest.raises(PatchbayesError, match="2 held-out labels have a log-probability that is not finite"):
        best_weights(torch.tensor([[math.nan, -1.0, -2.0], [-1.0, math.nan, -2.0]]))


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, 3)).double()
    pb.patch_(model, pb.EMP(3, jitter=1.0))
    return model


def data(size: int, seed: int = 1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 4, generator=generator, dtype=torch.float64)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 1).long()


def test_the_score_is_that_of_the_prediction_with_these_draws(model):
    x, y = data(200)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    stacked = stack(model, (x, y), draws=30)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for engine in ("loop", "auto"):
        prediction = pb.predict(model, x, stacked.draws, engine=engine)
        found = prediction.log_probs[torch.arange(200), y].mean().item()
        assert found == pytest.approx(stacked.log_score, abs=1e-6)
        assert torch.isnan(prediction.standard_error).all()
    plain = pb.predict(model, x, pb.Draws.sample(model, 30), engine="loop")
    assert plain.log_probs[torch.arange(200), y].mean().item() == pytest.approx(stacked.log_score_before, abs=1e-6)
    assert stacked.log_score > stacked.log_score_before + 0.01
    assert len(stacked.draws) < 30
    assert stacked.duality_gap <= 1e-6
    assert stacked.num_held_out == 200


def test_batches_give_what_one_batch_gives(model):
    x, y = data(60)
    whole = stack(model, (x, y), draws=10)
    parts = stack(model, [(x[:25], y[:25]), (x[25:], y[25:])], draws=10)
    torch.testing.assert_close(whole.draws.weights, parts.draws.weights)


def test_the_seed_of_the_draws_comes_from_the_generator(model):
    held_out = data(50)
    scores = {stack(model, held_out, 10, generator=torch.Generator().manual_seed(s)).log_score for s in (1, 2)}
    assert len(scores) == 2


def test_a_gaussian_likelihood_stacks_densities():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 1)).double()
    pb.patch_(model, pb.EMP(3, jitter=1.0), "0", likelihood=pb.likelihoods.Gaussian(2.0))
    x = torch.randn(50, 4, dtype=torch.float64)
    y = x.sum(1, keepdim=True)
    stacked = stack(model, (x, y), pb.Draws.enumerate(model))
    logs = []
    for k in range(3):
        site = pb.patched_sites(model)["0"]
        mean = x @ site.components("weight")[k].T + site.components("bias").view(3, 1)[k]
        logs.append(torch.distributions.Normal(mean, 2.0**-0.5).log_prob(y).flatten())
    assert stacked.log_score == pytest.approx(solved_by_scipy(torch.stack(logs).detach()), abs=1e-6)


def test_weighted_draws_slice_save_and_load(model, tmp_path):
    draws = pb.Draws.sample(model, 5).weighted([0.5, 0.0, 1.5, 2.0, 0.0])
    assert len(draws) == 3
    assert draws.weights.tolist() == [0.125, 0.375, 0.5]
    assert torch.equal(draws.keys(), pb.Draws.sample(model, 5).keys()[[0, 2, 3]])
    assert draws[1:].weights.tolist() == pytest.approx([3 / 7, 4 / 7])
    assert "weighted" in repr(draws)
    draws.save(tmp_path / "draws.json")
    again = pb.Draws.load(tmp_path / "draws.json", model)
    assert torch.equal(again.weights, draws.weights)
    assert torch.equal(again.assignments(), draws.assignments())
    with pytest.raises(WrongDraws, match="cannot be joined"):
        draws + draws
    text = (tmp_path / "draws.json").read_text().replace("0.5,", "-0.5,")
    (tmp_path / "damaged.json").write_text(text)
    with pytest.raises(PatchbayesError, match=r"damaged\.json"):
        pb.Draws.load(tmp_path / "damaged.json", model)


def test_weights_of_all_networks_are_no_enumeration(model):
    draws = pb.Draws.enumerate(model)
    assert draws.is_exact
    assert not draws.weighted(torch.rand(9) + 0.1).is_exact


@pytest.mark.parametrize("weights", [[1.0], [1, -1, 1, 1, 1], [0, 0, 0, 0, 0], [math.nan] * 5])
def test_bad_weights_are_refused(model, weights):
    with pytest.raises(PatchbayesError, match=r"Draws\.weighted: expected 5 finite weights"):
        pb.Draws.sample(model, 5).weighted(weights)


def test_components_are_stacked_site_by_site(model, tmp_path):
    x, y = data(150)
    plain = copy.deepcopy(model)
    scores = stack_components_(model, (x, y))
    assert all(later >= earlier - 1e-12 for earlier, later in itertools.pairwise(scores))
    assert scores[-1] > scores[0] + 0.005
    exact = pb.predict(model, x, "exact", engine="loop").log_probs[torch.arange(150), y].mean().item()
    assert exact == pytest.approx(scores[-1], abs=1e-6)
    laws = law_of(model).probabilities
    assert all(p is not None and abs(sum(p) - 1) < 1e-9 for p in laws)
    # no other p of the first site is better: the stationarity of its convex problem, by brute force
    for step in torch.eye(3, dtype=torch.float64):
        clone = copy.deepcopy(model)
        first = pb.patched_sites(clone)["1"].posterior
        first.set_probabilities_(0.98 * torch.tensor(laws[0], dtype=torch.float64) + 0.02 * step)
        other = pb.predict(clone, x, "exact", engine="loop").log_probs[torch.arange(150), y].mean().item()
        assert other <= scores[-1] + 1e-7
    pb.save(model, tmp_path / "stacked.safetensors")
    pb.unpatch_(plain)
    pb.load_(plain, tmp_path / "stacked.safetensors")
    assert law_of(plain).probabilities == laws


def test_components_of_an_ensemble_keep_one_law():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    pb.patch_(model, pb.Ensemble(3), "all")
    stack_components_(model, data(80))
    first, second = (site.posterior.probabilities() for site in pb.patched_sites(model).values())
    assert first == second


@pytest.mark.parametrize("held_out", [[], None, torch.zeros(3, 4), [torch.zeros(3, 4)]])
def test_without_held_out_data_stacking_is_refused(model, held_out):
    with pytest.raises(PatchbayesError, match="stack: expected"):
        stack(model, held_out, draws=3)


def test_what_cannot_be_stacked_is_refused(model):
    with pytest.raises(PatchbayesError, match="tolerance"):
        stack(model, data(5), tolerance=0.0)
    with pytest.raises(PatchbayesError, match="sweeps"):
        stack_components_(model, data(5), sweeps=0)
    with pytest.raises(PatchbayesError, match="made already"):
        stack(model, data(5), pb.Draws.sample(model, 2), generator=torch.Generator())
    other = nn.Sequential(nn.Linear(4, 3)).double()
    pb.patch_(other, pb.ECMP(2), "0")
    with pytest.raises(PatchbayesError, match="many draws"):
        stack_components_(other, data(5))
