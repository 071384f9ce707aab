"""What every method of the family keeps: the contract on the zoo, the textual form, files, and both paths of prediction."""

import json

import pytest
import torch
from torch import nn

import patchbayes as pb
from patchbayes.posteriors import (
    MNF,
    BatchEnsemble,
    BayesByBackprop,
    FiLMEnsemble,
    Flow,
    GaussianDropout,
    GaussianMixture,
    LowRank,
    RankOne,
    Spread,
    method_from_config,
)
from patchbayes.posteriors.text import parse_method, text_of
from zoo import ZOO

METHODS = {
    "GaussianMixture": (GaussianMixture(3), "gaussianmixture(3)"),
    "GaussianMixture of elements": (
        GaussianMixture(2, tie="element", per="element"),
        "gaussianmixture(2, tie='element', per='element')",
    ),
    "GaussianMixture of units": (GaussianMixture(2, tie="unit"), "gaussianmixture(2, tie='unit')"),
    "GaussianMixture of networks": (GaussianMixture(2, tie="network"), "gaussianmixture(2, tie='network')"),
    "BayesByBackprop": (BayesByBackprop(narrow=0.1), "bayesbybackprop(0.1, narrow=0.1)"),
    "FiLMEnsemble": (FiLMEnsemble(3), "filmensemble(3)"),
    "Flow": (Flow(hidden=6), "flow(2, hidden=6)"),
    "MNF": (MNF(hidden=6), "mnf(2, hidden=6)"),
    "GaussianDropout": (GaussianDropout(0.2), "gaussiandropout(0.2)"),
    "learned alpha": (GaussianDropout(0.2, learn_alpha=True), "gaussiandropout(0.2, learn_alpha=True)"),
    "EMP, p learned": (pb.EMP(3, learn_probabilities=True), "emp(3, learn_probabilities=True)"),
    "ECMP, p learned": (pb.ECMP(3, learn_probabilities=True), "ecmp(3, learn_probabilities=True)"),
    "Dropout, rate learned": (pb.Dropout(0.2, learn_rate=True), "dropout(0.2, learn_rate=True)"),
    "DropConnect, p learned": (pb.posteriors.DropConnect(0.2, learn_rate=True), "dropconnect(0.2, learn_rate=True)"),
    "Ensemble, p learned": (pb.Ensemble(3, learn_probabilities=True), "ensemble(3, learn_probabilities=True)"),
    "MeanField": (pb.posteriors.MeanField(0.2), "meanfield(0.2)"),
    "RankOne": (RankOne(3), "rankone(3)"),
    "RankOne of layers": (RankOne(3, tie="site"), "rankone(3, tie='site')"),
    "BatchEnsemble": (BatchEnsemble(3), "batchensemble(3)"),
    "LowRank": (LowRank(1, components=3), "lowrank(1, components=3)"),
    "Spread": (Spread(3), "spread(3)"),
}
NOT_ON_NORMS = ("MNF", "RankOne", "RankOne of layers", "BatchEnsemble", "LowRank")


def sites_for(name: str, entry) -> str:
    if name.startswith("Dropout") and entry.sites == "all":  # an embedding has no activations to drop
        return "norm+linear"
    return "linear+conv+output" if name in NOT_ON_NORMS else entry.sites


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("network", ["mlp", "lstm", "unet", "tied"])
def test_the_contract_holds(network, name):
    entry = ZOO[network]
    contract = pb.check_patchable(entry.build(), entry.inputs(), METHODS[name][0], sites_for(name, entry))
    assert contract, str(contract)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("network", [name for name in ZOO if name not in ("mlp", "lstm", "unet", "tied")])
def test_the_contract_holds_on_the_rest_of_the_zoo(network, name):
    test_the_contract_holds(network, name)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_known_by_its_text_and_its_description(name):
    method, text = METHODS[name]
    assert parse_method(text) == method
    assert parse_method(text_of(method)) == method
    assert method_from_config(json.loads(json.dumps(method.config()))) == method
    assert method.label


@pytest.mark.parametrize("name", METHODS)
def test_the_engine_gives_the_numbers_of_the_loop(name):
    entry = ZOO["mlp"]
    model = entry.build()
    pb.patch_(model, METHODS[name][0], sites_for(name, entry), example_input=entry.inputs())
    draws = pb.Draws.sample(model, 5)
    fast, slow = (pb.predict(model, entry.inputs(), draws, engine=engine) for engine in ("auto", "loop"))
    torch.testing.assert_close(fast.log_probs, slow.log_probs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", METHODS)
def test_kl_is_finite_has_gradients_and_moves_everything_that_is_learned(name):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3))
    pb.patch_(model, METHODS[name][0], "linear" if name in NOT_ON_NORMS else "all")
    x, y = torch.randn(8, 4), torch.randint(3, (8,))
    outputs = pb.forward_draws(model, x, 3)
    loss = pb.objective.negative_elbo(outputs, y, pb.kl(model), num_data=100)
    assert torch.isfinite(loss)
    loss.backward()
    starts_without = ("enter",)  # behind a last layer of zeros
    missing = [
        n
        for n, p in model.named_parameters()
        if (p.grad is None or not p.grad.any()) and not n.endswith(starts_without)
    ]
    assert [n for n in missing if "enter" not in n and "leave_bias" not in n] == []


@pytest.mark.parametrize("name", METHODS)
def test_a_learned_prior_and_precisions_of_layers_reach_every_method(name):
    """Twice the precision changes the KL, and the best precision of a layer is found."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    pb.patch_(model, METHODS[name][0], "all")
    assert pb.kl(model, pb.prior.Prior(2.0, 2.0)) != pb.kl(model)
    prior = pb.prior.LearnedPrior(model)
    before = pb.kl(model, prior)
    pb.objective.maximize_prior_(model, prior)
    assert pb.kl(model, prior) <= before
