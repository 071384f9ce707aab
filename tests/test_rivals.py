"""Bayes by Backprop, Gaussian dropout and FiLM-Ensemble, against code and numbers that are not ours."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import integrate
from torch import nn
from torch.nn import functional as F

import patchbayes as pb
from patchbayes.errors import PatchbayesError
from patchbayes.patching.drawing import forward_draws
from patchbayes.posteriors import BatchEnsemble, BayesByBackprop, FiLMEnsemble, GaussianDropout
from patchbayes.posteriors.gaussian_dropout import log_uniform_kl
from patchbayes.posteriors.posterior import PriorTerms
from patchbayes.posteriors.text import parse_method, text_of


def test_the_loss_of_bayes_by_backprop_is_that_of_its_paper():
    """Blundell et al. (2015), Eq. 2: log q(w) - log p(w) at a draw, up to what the noise itself contributes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2)).double()
    pb.patch_(
        model, BayesByBackprop(scale=0.3, mixing=0.25, wide=1.0, narrow=0.05), "0", prior=pb.prior.Prior(2.0, 3.0)
    )
    posterior = pb.patched_sites(model)["0"].posterior
    d = {name: torch.randn(posterior._shapes[name], dtype=torch.float64) for name in posterior.names}
    total = 0.0
    for name, precision in (("weight", 2.0), ("bias", 3.0)):
        mean, rho = model[0]._parameters[name], posterior.before_softplus[name]
        sigma = torch.log1p(rho.exp())
        w = mean + sigma * d[name]
        log_q = torch.distributions.Normal(mean, sigma).log_prob(w).sum()
        scale = precision**-0.5
        normal = [torch.distributions.Normal(torch.zeros_like(w), s * scale) for s in (1.0, 0.05)]
        log_p = (0.25 * normal[0].log_prob(w).exp() + 0.75 * normal[1].log_prob(w).exp()).log().sum()
        total = total + log_q - log_p + 0.5 * (d[name].square() - 1).sum()
    torch.testing.assert_close(posterior.kl(PriorTerms(2.0, 3.0), d).value, total, rtol=1e-10, atol=0)


def test_with_one_width_bayes_by_backprop_is_mean_field():
    torch.manual_seed(0)
    layers = nn.Linear(2, 1, bias=False).double()
    values = []
    for method in (BayesByBackprop(wide=1.0, narrow=1.0), pb.posteriors.MeanField()):
        model = nn.Sequential(nn.Linear(2, 1, bias=False)).double()
        model[0].load_state_dict(layers.state_dict())
        pb.patch_(model, method, "0", prior=pb.prior.Prior(2.0))
        values.append((model, pb.patched_sites(model)["0"].posterior))
    x, w = np.polynomial.hermite_e.hermegauss(5)
    w = w / w.sum()
    total = sum(
        a * b * values[0][1].kl(PriorTerms(2.0, 1.0), {"weight": torch.tensor([[x[i], x[j]]])}).value
        for i, a in enumerate(w)
        for j, b in enumerate(w)
    )
    torch.testing.assert_close(total, pb.kl(values[1][0]))


@pytest.mark.parametrize("alpha", [1e-4, 0.9e-3, 1.1e-3, 0.05, 0.5, 1.0, 7.0, 1e3])
def test_the_kl_to_a_log_uniform_prior_is_the_integral(alpha):
    """E log|1 + sqrt(alpha) eps| - log(alpha) / 2 by quadrature around the singularity."""
    root = math.sqrt(alpha)

    def integrand(eps):
        return math.exp(-0.5 * eps**2) / math.sqrt(2 * math.pi) * math.log(abs(1 + root * eps) + 1e-300)

    edges = sorted({-38.0, max(-38.0, -1 / root), -6.0, 0.0, 6.0, 38.0})
    total = sum(integrate.quad(integrand, a, b, limit=400, epsabs=1e-13)[0] for a, b in itertools.pairwise(edges))
    found = log_uniform_kl(torch.tensor(math.log(alpha), dtype=torch.float64)).item()
    assert found == pytest.approx(total - 0.5 * math.log(alpha), abs=3e-8)


def test_the_kl_differs_from_the_fit_of_kingma_by_a_constant_for_small_alpha():
    """-KL = log(alpha)/2 + 1.16145124 alpha - 1.50204118 alpha^2 + 0.58629921 alpha^3, fitted for alpha up to 1."""
    alphas = [0.05, 0.2, 0.5, 0.9]
    gaps = []
    for alpha in alphas:
        fit = -(0.5 * math.log(alpha) + 1.16145124 * alpha - 1.50204118 * alpha**2 + 0.58629921 * alpha**3)
        gaps.append(log_uniform_kl(torch.tensor(math.log(alpha))).item() - fit)
    assert max(gaps) - min(gaps) < 0.03


def test_the_gradient_of_the_kl_with_respect_to_alpha_is_its_slope():
    for alpha in (0.9e-3, 0.3, 4.0):
        log_alpha = torch.tensor(math.log(alpha), dtype=torch.float64, requires_grad=True)
        log_uniform_kl(log_alpha).backward()
        step = 1e-5
        ends = [log_uniform_kl(log_alpha.detach() + sign * step).item() for sign in (1, -1)]
        assert log_alpha.grad.item() == pytest.approx((ends[0] - ends[1]) / (2 * step), abs=1e-6)


def test_gaussian_dropout_has_the_moments_of_dropout():
    model = nn.Sequential(nn.Linear(1, 1, bias=False)).double()
    model[0].weight.data.fill_(1.0)
    pb.patch_(model, GaussianDropout(0.3), "0")
    x = torch.full((40_000, 1), 2.0, dtype=torch.float64)
    with torch.no_grad(), pb.use_draw(model):
        y = model(x)
    alpha = 0.3 / 0.7
    assert y.mean().item() == pytest.approx(2.0, abs=5 * 2 * math.sqrt(alpha / 40_000))
    assert y.std().item() == pytest.approx(2 * math.sqrt(alpha), rel=0.03)
    with torch.no_grad():
        assert torch.equal(model.eval()(x), x)  # the mean network


def test_an_alpha_that_is_not_finite_is_named():
    model = nn.Sequential(nn.Linear(3, 2))
    pb.patch_(model, GaussianDropout(0.3, learn_alpha=True), "0")
    pb.patched_sites(model)["0"].posterior.log_alpha.data.fill_(math.nan)
    with pytest.raises(PatchbayesError, match="log alpha is nan: training has diverged"):
        pb.kl(model)


def test_alpha_is_learned_through_noise_and_kl():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2)).double()
    pb.patch_(model, GaussianDropout(0.3, learn_alpha=True), "0")
    posterior = pb.patched_sites(model)["0"].posterior
    assert dict(posterior.named_parameters()).keys() == {"log_alpha"}
    assert posterior.roles() == {"log_alpha": "law"}
    kl = pb.kl(model)
    expected = 6 * log_uniform_kl(posterior.log_alpha) + 0.5 * model[0]._parameters["bias"].square().sum()
    torch.testing.assert_close(kl, expected)
    model(torch.randn(4, 3, dtype=torch.float64)).square().sum().backward()
    assert posterior.log_alpha.grad.abs() > 0


def test_members_of_a_film_ensemble_are_networks_of_their_own_affine_parameters():
    """Turkoglu et al. (2022): gamma_k and beta_k of every norm layer, all else shared, statistics of each member."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)
    ).double()
    report = pb.patch_(model, FiLMEnsemble(3, jitter=0.5), FiLMEnsemble().default_sites)
    assert set(pb.patched_sites(model)) == {"1", "4"}
    assert len(report.sites) == 2
    draws = pb.Draws.enumerate(model)
    assert len(draws) == 3
    x = torch.randn(6, 2, 8, 8, dtype=torch.float64)
    outputs = forward_draws(model.train(), x, draws)
    by_hand = []
    for k in range(3):
        y = x
        for number in (0, 3):
            conv, site = model[number], pb.patched_sites(model)[str(number + 1)]
            y = F.conv2d(y, conv.weight, conv.bias)
            mean, variance = y.mean((0, 2, 3), keepdim=True), y.var((0, 2, 3), unbiased=False, keepdim=True)
            gamma, beta = (site.components(name).view(3, 4)[k].view(1, 4, 1, 1) for name in ("weight", "bias"))
            y = gamma * (y - mean) / (variance + 1e-5).sqrt() + beta
            if number == 0:
                expected = 0.1 * mean.flatten()
                torch.testing.assert_close(site.posterior.running_mean[k], expected)
                y = F.relu(y)
        by_hand.append(y)
    torch.testing.assert_close(outputs, torch.stack(by_hand))
    pb.objective.negative_elbo(outputs.flatten(2), torch.zeros(6, dtype=torch.int64), 0.0, num_data=6).backward()
    for site in pb.patched_sites(model).values():  # one step trains all members
        assert (site.posterior.components["weight"].grad.view(3, 4).abs().sum(1) > 0).all()


def test_members_of_a_batch_ensemble_are_networks_with_factors_on_inputs_and_outputs():
    """Wen et al. (2020), Eq. 5: ((x * s_k) W) * r_k, one k for all layers; computed without weights of members."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    method = BatchEnsemble(3, jitter=0.5)
    pb.patch_(model, method, method.default_sites)
    assert parse_method("batchensemble(3, jitter=0.5)") == method
    assert text_of(method) == "batchensemble(3, jitter=0.5)"
    draws = pb.Draws.enumerate(model)
    assert len(draws) == 3
    x = torch.randn(5, 3, dtype=torch.float64)
    outputs = forward_draws(model.train(), x, draws)
    for k in range(3):
        y = x
        for number in (0, 2):
            posterior = pb.patched_sites(model)[str(number)].posterior
            weight, bias = (model[number]._parameters[name] for name in ("weight", "bias"))
            y = (y * posterior.inputs[k]) @ weight.T * posterior.outputs[k] + bias
            y = torch.tanh(y) if number == 0 else y
        torch.testing.assert_close(outputs[k], y)
    pb.objective.negative_elbo(outputs, torch.zeros(5, dtype=torch.int64), 0.0, num_data=5).backward()
    for site in pb.patched_sites(model).values():  # one step trains all members
        assert (site.posterior.inputs.grad.abs().sum(1) > 0).all()


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: BayesByBackprop(mixing=1.5), "mixing=1.5"),
        (lambda: BayesByBackprop(narrow=0.0), "narrow=0.0"),
        (lambda: BayesByBackprop(wide=math.inf), "wide=inf"),
        (lambda: GaussianDropout(0.0), "rate=0.0"),
        (lambda: GaussianDropout(1.0), "rate=1.0"),
        (lambda: GaussianDropout(0.1, learn_alpha=1), "learn_alpha=1"),
        (lambda: FiLMEnsemble(3, tie="site"), "tie='site'"),
    ],
)
def test_what_cannot_be_is_refused(make, complaint):
    with pytest.raises(PatchbayesError, match=complaint):
        make()
