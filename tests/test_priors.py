"""Priors beside fixed Gaussian ones: a Gamma law on precisions against the integral, and the Laplace prior."""

import copy
import math

import pytest
import torch
from scipy import integrate, special
from torch import nn

import patchbayes as pb
from patchbayes.errors import PatchbayesError
from patchbayes.objective import maximize_prior_
from patchbayes.patching.network import network_of
from patchbayes.prior import GammaPrior, LaplacePrior, LearnedPrior


def one_layer(method=None, bias: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2, bias=bias)).double()
    pb.patch_(model, method or pb.EMP(1), "0")
    return model


def test_the_best_gamma_law_gives_the_evidence_of_the_weights():
    """With a single set of weights the bound is -log of the integral over tau of Gamma(tau) N(w; 0, 1/tau), exactly."""
    model, shape, rate = one_layer(), 2.5, 0.7
    prior = GammaPrior(model, shape, rate)
    maximize_prior_(model, prior)
    square = pb.patched_sites(model)["0"].components("weight").square().sum().item()
    size = 6

    def integrand(tau):
        log_prior = shape * math.log(rate) - special.gammaln(shape) + (shape - 1) * math.log(tau) - rate * tau
        return math.exp(log_prior + 0.5 * size * math.log(tau) - 0.5 * tau * square)  # without (2 pi)^(-D/2)

    evidence = integrate.quad(integrand, 1e-12, 60, epsabs=1e-14, limit=300)[0]
    # the layer has no bias, whose law stays the prior and adds nothing
    assert pb.kl(model, prior).item() == pytest.approx(-math.log(evidence), rel=1e-6)


def test_no_other_gamma_law_is_better():
    model = one_layer(pb.EMP(3, jitter=0.5), bias=True)
    prior = GammaPrior(model, 2.0, 1.0)
    maximize_prior_(model, prior)
    best = pb.kl(model, prior).item()
    for name in ("log_tau", "log_rho"):
        for step in (-0.1, 0.1):
            other = copy.deepcopy(prior)
            getattr(other, name).add_(step)
            assert pb.kl(model, other).item() > best


def test_the_mean_precision_lies_between_the_hyperprior_and_the_point_estimate():
    model = one_layer(pb.EMP(2, jitter=0.5))
    square = pb.patched_sites(model)["0"].components("weight").square().flatten(1).sum(1).mean().item()
    prior, points = GammaPrior(model, 3.0, 1.0), LearnedPrior(model)
    maximize_prior_(model, prior)
    maximize_prior_(model, points)
    assert prior.precisions("0")[0].item() == pytest.approx((3 + 3) / (1 + square / 2), rel=1e-6)
    assert points.precisions("0")[0].item() == pytest.approx(6 / square, rel=1e-6)
    assert not any(parameter.requires_grad for parameter in prior.parameters())


def test_the_gradient_of_the_components_is_that_of_the_mean_precision():
    model = one_layer(pb.EMP(2, jitter=0.5))
    prior = GammaPrior(model, 3.0, 1.0)
    maximize_prior_(model, prior)
    components = pb.patched_sites(model)["0"].components("weight")
    pb.kl(model, prior).backward()
    torch.testing.assert_close(
        components.grad, prior.precisions("0")[0].double() * 0.5 * components.detach(), rtol=1e-6, atol=0
    )


def test_a_gamma_prior_must_be_set_first():
    model = one_layer()
    with pytest.raises(PatchbayesError, match="have not been set"):
        pb.kl(model, GammaPrior(model))


@pytest.mark.parametrize(
    "make",
    [lambda m: GammaPrior(m, 2.0, 0.5), lambda m: LaplacePrior(2.0, {"0": 3.0, "*": 1.0})],
    ids=["gamma", "laplace"],
)
def test_priors_go_with_the_file(make, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    plain = copy.deepcopy(model)
    pb.patch_(model, pb.EMP(2), "all")
    network_of(model).prior = make(model)
    if isinstance(network_of(model).prior, GammaPrior):
        maximize_prior_(model)
    pb.save(model, tmp_path / "patch.safetensors")
    pb.load_(plain, tmp_path / "patch.safetensors")
    assert type(network_of(plain).prior) is type(network_of(model).prior)
    torch.testing.assert_close(pb.kl(plain), pb.kl(model))
    assert network_of(plain).prior.config() == network_of(model).prior.config()


def test_the_laplace_prior_is_the_l1_penalty():
    """sum_k p_k tau |M_k|_1 on patched layers, tau |M|_1 on shared ones (appendix A.1); the control is the Gaussian prior."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2), nn.Linear(2, 2)).double()
    pb.patch_(model, pb.ECMP(2, jitter=0.5, probabilities=(0.7, 0.3)), "1")
    pb.patch_(model, pb.posteriors.DropConnect(0.2), "2")
    expected = 2 * model[0].weight.abs().sum() + 3 * model[0].bias.abs().sum()
    norm, last = (pb.patched_sites(model)[name] for name in ("1", "2"))
    for name, rate in (("weight", 2), ("bias", 3)):
        parts = norm.components(name).view(2, -1).abs().sum(1)
        expected = expected + rate * (0.7 * parts[0] + 0.3 * parts[1])
    expected = expected + 2 * 0.8 * last.components("weight").abs().sum() + 3 * model[2].bias.abs().sum()
    torch.testing.assert_close(pb.kl(model, LaplacePrior(2.0, 3.0)), expected)
    assert not torch.isclose(pb.kl(model, pb.prior.Prior(2.0, 3.0)), expected)


def test_the_laplace_prior_brings_small_weights_to_zero_and_the_gaussian_does_not():
    torch.manual_seed(0)
    x = torch.randn(200, 5)
    y = (3 * x[:, :1] > 0).long().flatten()
    small = []
    for prior in (LaplacePrior(10.0), pb.prior.Prior(10.0)):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(5, 2, bias=False))
        pb.patch_(model, pb.EMP(2, jitter=0.1), "0", prior=prior)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        for step in range(400):
            optimizer.param_groups[0]["lr"] = 0.02 * (1 - step / 400)
            loss = pb.objective.negative_elbo(model(x)[None], y, pb.kl(model), num_data=200)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        weight = pb.patched_sites(model)["0"].components("weight").detach()
        small.append(int((weight[:, :, 1:].abs() < 2e-3).sum()))
    assert small[0] > small[1] + 4


def test_a_laplace_prior_is_for_posteriors_without_noise():
    model = one_layer(pb.posteriors.MeanField())
    with pytest.raises(PatchbayesError, match='LaplacePrior at "0": MeanField is not'):
        pb.kl(model, LaplacePrior())
    model = one_layer(pb.EMP(2))
    with pytest.raises(PatchbayesError, match="with a LaplacePrior"):
        pb.kl(model, LaplacePrior(), entropy="lower")


@pytest.mark.parametrize("options", [{"shape": 0.0}, {"rate": -1.0}, {"rate": math.nan}])
def test_bad_numbers_are_refused(options):
    with pytest.raises(PatchbayesError, match=f"GammaPrior\\({next(iter(options))}="):
        GammaPrior(one_layer(), **options)
    with pytest.raises(PatchbayesError, match="a precision is a finite number above 0"):
        LaplacePrior(tau=0.0)
