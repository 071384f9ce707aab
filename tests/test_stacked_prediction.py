"""Predictions of stacked networks equal those of the patched modules, and their scores the definitions."""

import math

import pytest
import torch

import patchbayes as pb
from patchbayes.draws.layout import NetworkDraw
from patchbayes.errors import PatchbayesError
from patchbayes.patching.drawing import hold
from patchbayes_reproduce import stacked_prediction
from patchbayes_reproduce.stacked_prediction import DrawnNetworks, Score, drawn_outputs
from test_stacked_training import INPUTS, NETWORKS, RECIPES, TARGETS, module_of, stack

TAU = 0.1


@pytest.fixture
def inputs(generator):
    return torch.randn(11, INPUTS, generator=generator, dtype=torch.float64)


def trained_looking(recipe, generator):
    """A stack with components apart and running statistics away from their start."""
    networks = stack(recipe, generator)
    for values in (networks.parameters["patches"], networks.running_mean):
        values += 0.3 * torch.randn(values.shape, generator=generator, dtype=torch.float64)
    networks.running_var += torch.rand(networks.running_var.shape, generator=generator, dtype=torch.float64)
    return networks


def evaluating(networks, number):
    model = module_of(networks, number).eval()
    if networks.recipe.norm != "none":
        for kind in ("mean", "var"):
            parts = getattr(networks, f"running_{kind}")[number].split(networks.sizes[1:3])
            for norm, values in zip((model.norm0, model.norm1), parts, strict=True):
                getattr(norm, f"running_{kind}").copy_(values)
    return model


@pytest.mark.parametrize("name", ["vanilla", "ensemble", "norm before ReLU"])
def test_a_single_network_is_the_module(name, inputs, generator):
    networks = trained_looking(RECIPES[name], generator)
    for number in range(NETWORKS):
        (outputs,) = drawn_outputs(networks, number, inputs, 1, generator)
        torch.testing.assert_close(outputs[0].T, evaluating(networks, number)(inputs), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["emp", "ecmp", "ecmp, norm before ReLU"])
def test_a_drawn_network_is_the_module_under_that_draw(name, inputs, generator):
    networks = trained_looking(RECIPES[name], generator)
    model = evaluating(networks, 1)
    groups = 2 * sum(networks.sizes[1:3])
    if RECIPES[name].tie == "site":
        sites = torch.randint(3, (4, 2), generator=generator)
        components = sites.repeat_interleave(torch.tensor([2 * INPUTS, groups - 2 * INPUTS]), dim=1)
    else:
        components = sites = torch.randint(3, (4, groups), generator=generator)
    outputs = DrawnNetworks.realize(networks, 1, components).outputs(inputs.T)
    for output, indices in zip(outputs, sites, strict=True):
        with hold(model.__dict__["_patchbayes"], NetworkDraw(torch.tensor(0), indices)):
            torch.testing.assert_close(output.T, model(inputs), rtol=0, atol=1e-12)


def test_emp_is_the_exact_prediction_of_the_patched_module(inputs, generator):
    networks = trained_looking(RECIPES["emp"], generator)
    targets = torch.randn(len(inputs), TARGETS, generator=generator, dtype=torch.float64)
    score = Score(targets, torch.ones(TARGETS, dtype=torch.float64), TAU)
    chunks = list(drawn_outputs(networks, 2, inputs, 1, generator))
    for outputs in chunks:
        score.add(outputs.clone())
    assert sum(len(outputs) for outputs in chunks) == 3**2
    likelihood = pb.likelihoods.Gaussian(precision=TAU)
    model = evaluating(networks, 2)
    exact = pb.predict(model, inputs, "exact", likelihood=likelihood, keep_draws=True, engine="loop")
    rmse = (exact.mean - targets).square().mean(0).sqrt()
    torch.testing.assert_close(torch.tensor(score.rmse), rmse.float(), rtol=1e-5, atol=1e-6)
    # One target at a time: the library's log_prob is of all targets jointly.
    density = torch.distributions.Normal(torch.cat(chunks).double(), TAU**-0.5).log_prob(targets.T)
    expected = (density.logsumexp(0) - math.log(9)).mean(-1)
    torch.testing.assert_close(torch.tensor(score.lpd), expected.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["dropout", "dropout with norm"])
def test_dropout_is_the_module_with_those_masks(name, inputs, generator, monkeypatch):
    networks = trained_looking(RECIPES[name], generator)
    model = evaluating(networks, 0)
    draws, batch, hidden = 3, len(inputs), RECIPES[name].hidden
    masks = [(torch.rand(draws, n, batch, generator=generator) < 0.7).double() for n in (INPUTS, hidden)]
    zeros = [(mask.flatten() == 0).nonzero().squeeze(1) for mask in masks]
    outputs = DrawnNetworks.realize(networks, 0).masked_outputs(inputs.T, *zeros, draws=draws)
    for draw in range(draws):
        queue = iter([mask[draw].T.clone() for mask in masks])
        monkeypatch.setattr("patchbayes.posteriors.dropout.bernoulli_like", lambda *_, q=queue: next(q))
        with hold(model.__dict__["_patchbayes"], NetworkDraw(torch.tensor(0), torch.zeros(0, dtype=torch.int64))):
            torch.testing.assert_close(outputs[draw].T, model(inputs), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["ecmp", "dropout"])
def test_draws_come_in_chunks_and_differ(name, inputs, generator, monkeypatch):
    networks = trained_looking(RECIPES[name], generator)
    monkeypatch.setattr(stacked_prediction, "CHUNK", 4 * RECIPES[name].hidden * len(inputs))
    chunks = list(drawn_outputs(networks, 0, inputs, 10, generator))
    assert [len(outputs) for outputs in chunks] == [4, 4, 2]
    assert len(torch.cat(chunks).flatten(1).unique(dim=0)) > 5
    with pytest.raises(PatchbayesError, match="draws=0"):
        next(drawn_outputs(networks, 0, inputs, 0, generator))


def test_the_score_does_not_depend_on_chunks_and_is_in_the_targets_units(generator):
    outputs = torch.randn(12, TARGETS, 7, generator=generator)
    targets, unit = torch.randn(7, TARGETS, generator=generator), torch.tensor([2.0, 0.5])
    whole, parts = (Score(targets, unit, TAU) for _ in range(2))
    whole.add(outputs.clone())
    for part in outputs.split(5):
        parts.add(part.clone())
    assert whole.rmse == pytest.approx(parts.rmse, rel=1e-6)
    assert whole.lpd == pytest.approx(parts.lpd, rel=1e-6)
    scaled, own = outputs.double() * unit.unsqueeze(-1), targets.T.double() * unit.unsqueeze(-1)
    assert whole.rmse == pytest.approx((scaled.mean(0) - own).square().mean(-1).sqrt().tolist(), rel=1e-5)
    density = torch.distributions.Normal(scaled, TAU**-0.5).log_prob(own).logsumexp(0) - math.log(12)
    assert whole.lpd == pytest.approx(density.mean(-1).tolist(), rel=1e-5)
    sharper = Score(targets, unit, 10 * TAU)
    sharper.add(outputs.clone())
    assert sharper.lpd != pytest.approx(whole.lpd, rel=1e-2)
