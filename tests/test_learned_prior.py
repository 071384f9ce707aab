"""Learned prior precisions: the best ones in one step, by gradients, and what is refused."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import patchbayes as pb
from objective_network import ONE, Tied, flat, network, stored_gaussian, uniform
from patchbayes.errors import PatchbayesError
from stored import stored_values

# Learned precisions


def best_precisions(model: nn.Module, p: np.ndarray, sigma: float = 0.0) -> dict[tuple[str, str], float]:
    """tau = D / sum_k p_k (||M_k||^2 + D sigma^2), for patched ("1", "3") and shared ("0") layers."""
    best = {}
    for site in ("0", "1", "3"):
        for name in ("weight", "bias"):
            values = flat(model, site, name)
            weights = p if site != "0" else ONE
            noise = sigma**2 if site != "0" else 0.0
            size = values.shape[1]
            best[site, name] = size / ((weights[: len(values), None] * values**2).sum() + size * noise)
    return best


def learned(prior: pb.prior.LearnedPrior) -> dict[tuple[str, str], float]:
    found = {}
    for site in ("0", "1", "3"):
        tau, rho = prior.precisions(site)
        found[site, "weight"], found[site, "bias"] = tau.item(), rho.item()
    return found


P = np.array([0.5, 0.2, 0.3])


@pytest.mark.parametrize("sigma", [0.0, 0.5])
def test_the_best_precisions_are_set_in_one_step(sigma):
    model = network()
    pb.patch_(model, pb.EMP(3, probabilities=tuple(P), sigma=sigma), "norm+output")
    prior = pb.prior.LearnedPrior(model, tau=3.0, rho=0.1).double()
    pb.objective.maximize_prior_(model, prior)
    expected = best_precisions(model, P, sigma)
    assert learned(prior) == pytest.approx(expected, rel=1e-9)
    assert len({round(value, 6) for value in expected.values()}) == 6


@pytest.mark.parametrize(
    "method", [pb.posteriors.MeanField(scale=0.5), pb.Dropout(0.25), pb.posteriors.DropConnect(0.25), pb.ECMP(2)]
)
def test_the_best_precisions_leave_no_gradient_and_are_a_minimum(method):
    model = network()
    pb.patch_(model, method, "norm+output")
    prior = pb.prior.LearnedPrior(model).double()
    pb.objective.maximize_prior_(model, prior)
    least = pb.kl(model, prior)
    least.backward()
    for parameter in (prior.log_tau, prior.log_rho):
        torch.testing.assert_close(parameter.grad, torch.zeros_like(parameter), rtol=0, atol=1e-8)
    with torch.no_grad():
        for parameter in (prior.log_tau, prior.log_rho):
            for step in (0.1, -0.1):
                parameter += step
                assert pb.kl(model, prior) > least
                parameter -= step


@pytest.mark.parametrize("sigma", [0.0, 0.5])
def test_gradient_descent_on_the_kl_reaches_the_best_precisions(sigma):
    model = network()
    pb.patch_(model, pb.EMP(3, probabilities=tuple(P), sigma=sigma), "norm+output")
    prior = pb.prior.LearnedPrior(model).double()
    optimizer = torch.optim.LBFGS(
        prior.parameters(), max_iter=200, line_search_fn="strong_wolfe", tolerance_grad=1e-11, tolerance_change=0
    )

    def closure():
        optimizer.zero_grad()
        loss = pb.kl(model, prior)
        loss.backward()
        return loss

    optimizer.step(closure)
    assert learned(prior) == pytest.approx(best_precisions(model, P, sigma), rel=1e-6)


@pytest.mark.parametrize("size", [1e-4, 1e4])
@pytest.mark.parametrize("method", [pb.EMP(2, jitter=0), pb.posteriors.MeanField(scale=0.5)])
def test_the_best_precision_is_found_for_tiny_and_for_huge_parameters_in_single_precision(method, size):
    model = nn.Sequential(nn.Linear(64, 64))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_().mul_(size)
    pb.patch_(model, method, "linear")
    prior = pb.prior.LearnedPrior(model)
    pb.objective.maximize_prior_(model, prior)
    for name, precision in zip(("weight", "bias"), prior.precisions("0"), strict=True):
        if isinstance(method, pb.posteriors.MeanField):
            values = stored_gaussian(model, "0", name).astype(float)
            values = np.stack([values[0], np.logaddexp(0, values[1])])
            square = (values**2).sum()
        else:
            values = stored_values(model, "0", name).astype(float)
            square = (values**2).sum() / 2
        assert precision.item() == pytest.approx(values[0].size / square, rel=1e-4)


def test_the_best_precision_of_tied_parameters_counts_them_once():
    model = Tied().double()
    pb.patch_(model, pb.EMP(3), "decoder", tied="together")
    prior = pb.prior.LearnedPrior(model).double()
    pb.objective.maximize_prior_(model, prior)
    values = pb.patched_sites(model)["decoder"].components("weight").detach()
    assert prior.precisions("decoder")[0].item() == pytest.approx(15 / (values.square().sum().item() / 3), rel=1e-9)


def test_a_layer_of_zeros_keeps_its_precision():
    model = nn.Sequential(nn.Linear(2, 2)).double()
    nn.init.zeros_(model[0].bias)
    pb.patch_(model, pb.EMP(2, jitter=0), "linear")
    prior = pb.prior.LearnedPrior(model, rho=7.0).double()
    pb.objective.maximize_prior_(model, prior)
    assert prior.precisions("0")[1].item() == pytest.approx(7.0, rel=1e-6)


def test_maximizing_uses_the_prior_of_the_network_and_refuses_a_fixed_one():
    model = network()
    pb.patch_(model, pb.EMP(2), "norm", prior=pb.prior.LearnedPrior(model).double())
    pb.objective.maximize_prior_(model)
    expected = best_precisions(model, uniform(2))
    tau, rho = model.__dict__["_patchbayes"].prior.precisions("1")
    assert (tau.item(), rho.item()) == pytest.approx((expected["1", "weight"], expected["1", "bias"]), rel=1e-9)
    fixed = network()
    pb.patch_(fixed, pb.EMP(2), "norm")
    with pytest.raises(PatchbayesError, match="LearnedPrior"):
        pb.objective.maximize_prior_(fixed)


def test_learned_precisions_start_where_they_are_told_and_keep_the_logarithm_in_the_kl():
    model = network()
    pb.patch_(model, pb.EMP(2), "norm+output")
    prior = pb.prior.LearnedPrior(model, tau={"3": 4.0, "*": 2.0}, rho=0.5).double()
    fixed = pb.prior.Prior(tau={"3": 4.0, "*": 2.0}, rho=0.5)
    logarithms = 0.5 * (12 * math.log(2) + 4 * math.log(2) + 8 * math.log(4) + (4 + 4 + 2) * math.log(0.5))
    assert pb.kl(model, prior).item() == pytest.approx(pb.kl(model, fixed).item() - logarithms, rel=1e-6)


def test_a_learned_prior_of_another_network_is_refused():
    model = network()
    pb.patch_(model, pb.EMP(2), "norm")
    with pytest.raises(PatchbayesError, match='layer "1" was not in the network'):
        pb.kl(model, pb.prior.LearnedPrior(nn.ModuleDict({"other": nn.Linear(2, 2)})))
