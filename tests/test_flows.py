"""Flows and MNF: determinants, inverses, and KL against quadrature and closed forms."""

import copy
import math

import numpy as np
import pytest
import torch
from scipy import integrate
from torch import nn

import patchbayes as pb
from patchbayes.errors import NothingToPatch, PatchbayesError
from patchbayes.posteriors import MNF, Flow
from patchbayes.posteriors.coupling import CouplingFlow
from patchbayes.posteriors.posterior import PriorTerms

TAU, RHO = 1.7, 0.6


def shaken(module: nn.Module, size: float = 0.7) -> None:
    """All parameters of a flow somewhere, so that it is not the identity."""
    generator = torch.Generator().manual_seed(5)
    for name, parameter in module.named_parameters():
        if "enter" in name or "leave" in name:
            parameter.data = size * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def noise_grid(dimensions: int, nodes: int):
    x, w = np.polynomial.hermite_e.hermegauss(nodes)
    w = w / w.sum()
    points = np.stack(np.meshgrid(*[x] * dimensions, indexing="ij"), -1).reshape(-1, dimensions)
    weights = np.prod(np.stack(np.meshgrid(*[w] * dimensions, indexing="ij"), -1).reshape(-1, dimensions), -1)
    return torch.tensor(points), torch.tensor(weights)


def patched(layer: nn.Module, method, sites="0"):
    model = nn.Sequential(copy.deepcopy(layer)).double()
    pb.patch_(model, method, sites)
    return pb.patched_sites(model)["0"].posterior


@pytest.mark.parametrize("size", [2, 5])
def test_the_determinant_is_that_of_the_jacobian_and_the_inverse_inverts(size):
    flow = CouplingFlow(size, 3, 4, torch.zeros(1, dtype=torch.float64))
    shaken(flow)
    x = torch.randn(6, size, dtype=torch.float64)
    y, log_determinant = flow(x)
    for row in range(6):
        jacobian = torch.autograd.functional.jacobian(lambda v: flow(v)[0], x[row])
        assert torch.linalg.slogdet(jacobian)[1].item() == pytest.approx(log_determinant[row].item(), abs=1e-12)
    torch.testing.assert_close(flow.inverse(y), x)
    assert log_determinant.abs().min() > 1e-3  # not the identity


def test_a_flow_starts_as_the_identity():
    flow = CouplingFlow(4, 2, 8, torch.zeros(1))
    flow.start_(torch.Generator().manual_seed(0))
    x = torch.randn(3, 4)
    y, log_determinant = flow(x)
    assert torch.equal(x, y)
    assert torch.equal(log_determinant, torch.zeros(3))
    assert flow.enter.abs().max() > 0


def expected_kl(posterior, dimensions, nodes=60):
    points, weights = noise_grid(dimensions, nodes)
    return weights @ torch.vmap(lambda eps: posterior.kl(PriorTerms(TAU, RHO), {"noise": eps}).value)(points)


def test_the_kl_of_an_identity_flow_is_that_of_a_gaussian():
    """In any dimension, and a norm's weight and bias have their own precisions."""
    posterior = patched(nn.LayerNorm(3), Flow(scale=0.3))
    posterior.layer._parameters["weight"].data = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
    posterior.layer._parameters["bias"].data = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)
    posterior.law.before_softplus.data = torch.linspace(-2, 1, 6, dtype=torch.float64)
    deviation = torch.nn.functional.softplus(posterior.law.before_softplus)
    center = torch.cat([posterior.layer._parameters[name] for name in ("weight", "bias")])
    q = torch.distributions.Normal(center, deviation)
    precision = torch.tensor([TAU] * 3 + [RHO] * 3, dtype=torch.float64)
    truth = torch.distributions.kl_divergence(q, torch.distributions.Normal(0.0, precision**-0.5)).sum()
    points, weights = noise_grid(6, 3)  # the estimate is a square in the noise: three nodes are exact
    found = weights @ torch.vmap(lambda eps: posterior.kl(PriorTerms(TAU, RHO), {"noise": eps}).value)(points)
    torch.testing.assert_close(found, truth, rtol=1e-10, atol=0)


@pytest.mark.parametrize("stretched", [False, True])
def test_the_kl_of_a_flow_is_the_integral_in_two_dimensions(stretched):
    posterior = patched(nn.RMSNorm(2), Flow(layers=2, hidden=3, scale=0.5))
    shaken(posterior)
    posterior.layer._parameters["weight"].data = torch.tensor([0.4, -0.7], dtype=torch.float64)
    if stretched:
        posterior.scale_spread_(1.4)
    flow = posterior.law.flow
    axis = np.linspace(-9, 9, 1201)
    grid = torch.tensor(np.stack(np.meshgrid(axis, axis, indexing="ij"), -1).reshape(-1, 2))
    with torch.no_grad():
        base = flow.inverse((grid - posterior.law.shift) / posterior.law.stretch)
        _, log_determinant = flow(base)
        deviation = torch.nn.functional.softplus(posterior.law.before_softplus)
        log_q = torch.distributions.Normal(posterior._center(), deviation).log_prob(base).sum(1)
        log_q = log_q - log_determinant - 2 * posterior.law.stretch.log()
        log_prior = torch.distributions.Normal(0.0, TAU**-0.5).log_prob(grid).sum(1)
    density = log_q.exp().reshape(1201, 1201).numpy()
    values = (log_q.exp() * (log_q - log_prior)).reshape(1201, 1201).numpy()
    integral = lambda v: integrate.trapezoid(integrate.trapezoid(v, axis, axis=1), axis)  # noqa: E731
    assert integral(density) == pytest.approx(1, abs=1e-4)
    found = expected_kl(posterior, 2).item()
    assert found == pytest.approx(integral(values), abs=2e-3)
    without = weighted_determinant(posterior)
    assert abs(without) > 0.05  # an estimate that forgot the determinant would be off by this much


def weighted_determinant(posterior) -> float:
    points, weights = noise_grid(2, 40)
    with torch.no_grad():
        deviation = torch.nn.functional.softplus(posterior.law.before_softplus)
        _, log_determinant = posterior.law.flow(posterior._center() + deviation * points)
    return float(weights @ log_determinant)


def test_factors_have_a_prior_around_one_and_the_weights_one_around_zero():
    posterior = patched(nn.Linear(2, 3, bias=False), Flow(scale=0.3))
    weight = posterior.layer._parameters["weight"]
    deviation = torch.nn.functional.softplus(posterior.law.before_softplus)
    q = torch.distributions.Normal(posterior.center, deviation)
    truth = torch.distributions.kl_divergence(q, torch.distributions.Normal(1.0, TAU**-0.5)).sum()
    truth = truth + 0.5 * TAU * weight.square().sum()
    torch.testing.assert_close(expected_kl(posterior, 2, 5), truth)


@pytest.mark.parametrize(
    "layer", [nn.Linear(3, 2), nn.Conv2d(4, 6, 2, groups=2), nn.ConvTranspose2d(3, 2, 2), nn.Embedding(4, 3)], ids=str
)
@pytest.mark.parametrize("method", [Flow(hidden=4), MNF(hidden=4)], ids=["Flow", "MNF"])
def test_factors_multiply_input_units(layer, method):
    """Factor h times the weights that input h meets: the layer with inputs multiplied, computed without our code."""
    posterior = patched(layer, method)
    posterior.center.data = torch.linspace(0.5, 1.5, len(posterior.center), dtype=torch.float64)
    drawn = posterior.component(0)["weight"].detach()
    weight = posterior.layer._parameters["weight"].detach()
    plain = {
        "Linear": lambda w, f: torch.eye(3, dtype=w.dtype).mul(f) @ w.T,
        "Conv2d": lambda w, f: torch.nn.functional.conv2d(_units(4, f), w, groups=2),
        "ConvTranspose2d": lambda w, f: torch.nn.functional.conv_transpose2d(_units(3, f), w),
        "Embedding": lambda w, f: torch.eye(4, dtype=w.dtype).mul(f) @ w,
    }[type(layer).__name__.removeprefix("Patched")]
    ones = torch.ones_like(posterior.center)
    torch.testing.assert_close(plain(drawn, ones), plain(weight, posterior.center.detach()))


def _units(number: int, factors):
    """One image for each input channel, with that channel alone, times its factor."""
    return torch.eye(number, dtype=torch.float64).mul(factors).reshape(number, number, 1, 1).repeat(1, 1, 2, 2)


def mnf_posterior():
    posterior = patched(nn.Linear(2, 1, bias=False), MNF(layers=2, hidden=3, scale=0.4))
    shaken(posterior, 0.5)
    posterior.to_back.data = torch.tensor([[0.8, -0.5], [0.6, 1.2], [-0.4, 0.3]], dtype=torch.float64)
    posterior.layer._parameters["weight"].data = torch.tensor([[0.9, -1.1]], dtype=torch.float64)
    return posterior


def test_the_terms_of_mnf_are_those_of_the_paper():
    """Louizos and Welling (2017), Eqs. 5 to 12, for one draw, with distributions of torch."""
    posterior = mnf_posterior()
    eps, eps_v = torch.tensor([[0.3, -0.8]], dtype=torch.float64), torch.tensor([0.5, 1.1], dtype=torch.float64)
    with torch.no_grad():
        found = posterior.kl(PriorTerms(TAU, RHO), {"weight": eps, "factors": eps_v}).value
        deviation = torch.nn.functional.softplus(posterior.factors.before_softplus)
        base = posterior.center + deviation * eps_v
        v, log_determinant = posterior.factors.flow(base)
        # the entropy of the base is taken at its mean, which is the same number on average
        log_q = -torch.distributions.Normal(posterior.center, deviation).entropy().sum() - log_determinant
        s = posterior.deviation("weight")
        mean = posterior.layer._parameters["weight"] * v
        weight = mean + s * eps
        given_v = torch.distributions.kl_divergence(
            torch.distributions.Normal(mean, s), torch.distributions.Normal(0.0, TAU**-0.5)
        ).sum()
        c, b_1, b_2 = posterior.to_back
        seen = torch.tanh(weight @ c).mean()
        back, back_determinant = posterior.back(v)
        log_r = torch.distributions.Normal(b_1 * seen, (0.5 * b_2 * seen).exp()).log_prob(back).sum() + back_determinant
    torch.testing.assert_close(found, given_v + log_q - log_r, rtol=1e-7, atol=0)


def test_the_bound_of_mnf_lies_above_the_integral_and_gets_closer_by_learning_the_way_back():
    posterior = mnf_posterior()
    points, weights = noise_grid(4, 9)

    def bound():
        one = lambda e: posterior.kl(PriorTerms(TAU, RHO), {"weight": e[None, :2], "factors": e[2:]}).value  # noqa: E731
        return weights @ torch.vmap(one)(points)

    with torch.no_grad():
        v, p = noise_grid(2, 30)
        deviation = torch.nn.functional.softplus(posterior.factors.before_softplus)
        factors, _ = posterior.factors.flow(posterior.center + deviation * v)
        mean = posterior.layer._parameters["weight"] * factors
        axis = torch.linspace(-5, 5, 201, dtype=torch.float64)
        grid = torch.stack(torch.meshgrid(axis, axis, indexing="ij"), -1).reshape(-1, 1, 2)
        s = posterior.deviation("weight")
        logs = torch.distributions.Normal(mean, s).log_prob(grid).sum(-1)
        log_q = torch.logsumexp(logs + p.log(), 1)
        log_prior = torch.distributions.Normal(0.0, TAU**-0.5).log_prob(grid).sum((1, 2))
        cell = float(axis[1] - axis[0]) ** 2
        assert float(log_q.exp().sum() * cell) == pytest.approx(1, abs=1e-3)
        truth = float((log_q.exp() * (log_q - log_prior)).sum() * cell)
    before = bound().item()
    optimizer = torch.optim.Adam([*posterior.back.parameters(), posterior.to_back], lr=0.05)
    for _ in range(40):
        optimizer.zero_grad()
        loss = bound()
        loss.backward()
        optimizer.step()
    after = bound().item()
    assert truth < after < before - 0.05
    assert after - truth < before - truth


def test_the_number_of_parameters_of_mnf_is_what_its_flows_need():
    """W and s, the bias twice, and for D inputs: center, deviation, c, b_1, b_2 and two flows of L layers of H units."""
    inputs, outputs, layers, hidden = 7, 5, 2, 50
    model = nn.Sequential(nn.Linear(inputs, outputs))
    pb.patch_(model, MNF(layers=layers, hidden=hidden), "0")
    flow = layers * (inputs * hidden + hidden + 2 * inputs * hidden + 2 * inputs)
    expected = 2 * (inputs * outputs + outputs) + 5 * inputs + 2 * flow
    assert sum(p.numel() for p in model.parameters()) == expected


def test_a_factor_for_every_weight_would_cost_three_hundred_numbers_a_weight():
    """The one reading of table 1's count: one layer of 50 units in each of the two flows."""
    size = 10_000
    with torch.device("meta"):
        flow = CouplingFlow(size, 1, 50, torch.zeros(1))
    assert 2 * sum(p.numel() for p in flow.parameters()) / size == pytest.approx(300, rel=0.02)


@pytest.mark.parametrize("method", [Flow(hidden=4, scale=0.2), MNF(hidden=4, scale=0.2)], ids=["Flow", "MNF"])
def test_the_mean_is_near_the_average_of_draws_and_spread_scales_around_it(method):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2)).double()
    pb.patch_(model, method, "0")
    site = pb.patched_sites(model)["0"]
    shaken(site.posterior, 0.5)
    draws = pb.Draws.sample(model, 3000)
    with torch.no_grad():
        before = site.realize(draws)["weight"]
        mean = site.posterior.mean()["weight"].clone()
        assert (before.mean(0) - mean).abs().max() < 0.25 * before.std(0).max()
        site.posterior.scale_spread_(0.5)
        after = site.realize(draws)["weight"]
        torch.testing.assert_close(site.posterior.mean()["weight"], mean, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(after - mean, 0.5 * (before - mean), rtol=1e-6, atol=1e-6)


def test_training_a_flow_lowers_its_objective():
    torch.manual_seed(0)
    x = torch.randn(64, 4)
    y = (x[:, :1] * x[:, 1:2] > 0).long().flatten()
    for method, sites in ((Flow(), "norm+output"), (MNF(hidden=8), "linear")):
        model = nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 2))
        pb.patch_(model, method, sites)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        losses = []
        for _ in range(60):
            loss = pb.objective.negative_elbo(model(x)[None], y, pb.kl(model), num_data=640)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert np.mean(losses[-10:]) < np.mean(losses[:10]) - 0.05
        laws = {n for s in pb.patched_sites(model).values() for n, r in s.posterior.roles().items() if r == "law"}
        assert any("leave" in name for name in laws)


@pytest.mark.parametrize("method", [Flow(), MNF()], ids=["Flow", "MNF"])
def test_a_flow_over_one_number_is_refused_and_nothing_is_changed(method):
    model = nn.Sequential(nn.Linear(1, 3))
    weight = model[0].weight
    with pytest.raises(NothingToPatch, match="at least two numbers, and this one has 1"):
        pb.patch_(model, method, "0")
    assert model[0].weight is weight


@pytest.mark.parametrize("method", [Flow, MNF])
@pytest.mark.parametrize("options", [{"layers": 0}, {"hidden": 1.5}, {"scale": 0.0}, {"scale": math.nan}])
def test_sizes_that_cannot_be_are_refused(method, options):
    with pytest.raises(PatchbayesError, match=f"{method.__name__}\\({next(iter(options))}="):
        method(**options)
