"""The mixture of Gaussians with learned deviations: its KL against quadrature, the paper's bound, and mean field."""

import math

import numpy as np
import pytest
import torch
from scipy import integrate
from torch import nn

import patchbayes as pb
from patchbayes.errors import PatchbayesError
from patchbayes.posteriors import GaussianMixture
from patchbayes.posteriors.posterior import PriorTerms

TAU = 1.7


def site_of(inputs: int, method: GaussianMixture, means, deviations):
    """The posterior of a linear layer with `inputs` weights and no bias, with means (K, D) and deviations (K, D)."""
    model = nn.Sequential(nn.Linear(inputs, 1, bias=False)).double()
    pb.patch_(model, method, "0")
    posterior = pb.patched_sites(model)["0"].posterior
    posterior.components["weight"].data = torch.tensor(means, dtype=torch.float64).unsqueeze(1)
    s = torch.tensor(deviations, dtype=torch.float64)
    posterior.before_softplus["weight"].data = (s + (-torch.expm1(-s)).log()).reshape(
        posterior.before_softplus["weight"].shape
    )
    return model, posterior


def noise_grid(dimensions: int, nodes: int = 80):
    """Points (N, D) and weights (N,) that integrate over standard normal noise."""
    x, w = np.polynomial.hermite_e.hermegauss(nodes)
    w = w / w.sum()
    points = np.stack(np.meshgrid(*[x] * dimensions, indexing="ij"), -1).reshape(-1, dimensions)
    weights = np.prod(np.stack(np.meshgrid(*[w] * dimensions, indexing="ij"), -1).reshape(-1, dimensions), -1)
    return torch.tensor(points), torch.tensor(weights)


def expected_kl(posterior, dimensions: int, nodes: int = 80):
    """The expectation of the estimate over its noise."""
    points, weights = noise_grid(dimensions, nodes)
    z = torch.zeros(posterior.groups().length, dtype=torch.int64)
    one = lambda eps: posterior.kl(PriorTerms(TAU, 1.0), {"z": z, "noise.weight": eps.reshape(1, -1)}).value  # noqa: E731
    return weights @ torch.vmap(one)(points)


def log_q(w, p, means, deviations):
    """log of the density of the mixture at the points w (N, D)."""
    logs = -0.5 * ((w[:, None] - means) / deviations) ** 2 - np.log(deviations) - 0.5 * np.log(2 * np.pi)
    return np.logaddexp.reduce(np.log(p) + logs.sum(-1), axis=1)


def true_kl(p, means, deviations) -> float:
    """KL(q || N(0, 1/TAU)) by quadrature on a grid, D = 1 or 2."""
    means, deviations, dimensions = np.asarray(means), np.asarray(deviations), np.shape(means)[1]
    low, high = (means - 10 * deviations).min(), (means + 10 * deviations).max()
    axis = np.linspace(low, high, 200_001 if dimensions == 1 else 1601)
    w = np.stack(np.meshgrid(*[axis] * dimensions, indexing="ij"), -1).reshape(-1, dimensions)
    logs = log_q(w, p, means, deviations)
    prior = (0.5 * np.log(TAU / (2 * np.pi)) - 0.5 * TAU * w**2).sum(-1)
    values = (np.exp(logs) * (logs - prior)).reshape([len(axis)] * dimensions)
    for _ in range(dimensions):
        values = integrate.trapezoid(values, axis, axis=0)
    return float(values)


CASES = {
    "apart": ([[-3.0], [2.0]], [[0.2], [0.3]]),
    "overlapping": ([[-0.3], [0.4]], [[0.5], [0.8]]),
    "coinciding": ([[0.5], [0.5]], [[0.4], [0.4]]),
}


@pytest.mark.parametrize("case", CASES)
def test_the_estimate_is_unbiased_in_one_dimension(case):
    means, deviations = CASES[case]
    p = (0.7, 0.3)
    _, posterior = site_of(1, GaussianMixture(2, probabilities=p), means, deviations)
    truth = true_kl(p, means, deviations)
    assert expected_kl(posterior, 1, 150).item() == pytest.approx(truth, abs=2e-4)
    bound = posterior.kl(PriorTerms(TAU, 1.0, entropy="lower")).value.item()
    entropy = -sum(x * math.log(x) for x in p)
    assert bound - entropy - 1e-9 <= truth <= bound + 1e-9
    if case == "apart":
        assert truth == pytest.approx(bound - entropy, abs=1e-6)
    else:  # the bound is not the truth: an estimate without the overlap would fail above
        assert abs(truth - (bound - entropy)) > 0.05
    if case == "coinciding":
        assert truth == pytest.approx(bound, abs=1e-6)


def test_the_estimate_is_unbiased_in_two_dimensions_for_a_joint_draw():
    means, deviations = [[-0.5, 0.2], [0.6, -0.4]], [[0.4, 0.7], [0.5, 0.3]]
    _, posterior = site_of(2, GaussianMixture(2, per="element"), means, deviations)
    assert expected_kl(posterior, 2, 60).item() == pytest.approx(true_kl((0.5, 0.5), means, deviations), abs=1e-3)


@pytest.mark.parametrize("tie", ["element", "unit"])
def test_draws_of_their_own_add_up(tie):
    means, deviations = [[-0.5, 0.2], [0.6, -0.4]], [[0.4, 0.7], [0.5, 0.3]]
    _, posterior = site_of(2, GaussianMixture(2, tie=tie, per="element"), means, deviations)
    parts = [true_kl((0.5, 0.5), [[m[i]] for m in means], [[s[i]] for s in deviations]) for i in range(2)]
    assert expected_kl(posterior, 2, 60).item() == pytest.approx(sum(parts), abs=1e-3)
    joint = true_kl((0.5, 0.5), means, deviations)
    assert abs(joint - sum(parts)) > 0.02  # the two ties are told apart


@pytest.mark.parametrize("learned", ["means", "deviations", "probabilities"])
def test_the_gradient_of_the_estimate_is_unbiased(learned):
    means, deviations = [[-0.3], [0.4]], [[0.5], [0.8]]
    method = GaussianMixture(2, probabilities=(0.7, 0.3), learn_probabilities=True)
    _, posterior = site_of(1, method, means, deviations)
    expected_kl(posterior, 1, 150).backward()
    step = 1e-4
    if learned == "means":
        found = posterior.components["weight"].grad.flatten()
        moved = [(np.array(means), k) for k in range(2)]
        slope = [
            (true_kl((0.7, 0.3), m + step * unit(k), deviations) - true_kl((0.7, 0.3), m - step * unit(k), deviations))
            for m, k in moved
        ]
    elif learned == "deviations":
        s = np.array(deviations)
        found = posterior.before_softplus["weight"].grad / (1 - torch.exp(-torch.tensor(s.flatten())))
        slope = [
            true_kl((0.7, 0.3), means, s + step * unit(k)) - true_kl((0.7, 0.3), means, s - step * unit(k))
            for k in range(2)
        ]
    else:
        found = posterior.logits.grad
        moved_p = [softmax(np.log([0.7, 0.3]) + step * unit(k)[:, 0] * sign) for k in range(2) for sign in (1, -1)]
        values = [true_kl(p, means, deviations) for p in moved_p]
        slope = [values[0] - values[1], values[2] - values[3]]
    torch.testing.assert_close(found, torch.tensor(slope, dtype=torch.float64) / (2 * step), rtol=2e-3, atol=2e-3)


def unit(k: int) -> np.ndarray:
    return np.eye(2)[:, k : k + 1]


def softmax(x) -> np.ndarray:
    return np.exp(x) / np.exp(x).sum()


def test_one_component_with_a_deviation_for_each_element_is_mean_field():
    models = []
    for method in (GaussianMixture(1, per="element", scale=0.2), pb.posteriors.MeanField(scale=0.2)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4)).double()
        pb.patch_(model, method, "0")
        models.append(model)
    torch.testing.assert_close(*(pb.kl(model, pb.prior.Prior(2.0, 3.0)) for model in models), rtol=1e-12, atol=0)
    x = torch.randn(5, 3, dtype=torch.float64)
    outputs = []
    for model in models:
        with torch.no_grad(), pb.use_draw(model, pb.Draws.sample(model, 1)):
            outputs.append(model(x))
    torch.testing.assert_close(*outputs)


def test_draws_have_the_component_and_its_own_deviation():
    model, _ = site_of(1, GaussianMixture(2), [[-50.0], [50.0]], [[0.5], [3.0]])
    draws = pb.Draws.sample(model, 4000)
    values = pb.patched_sites(model)["0"].realize(draws)["weight"].detach().flatten()
    low, high = values[values < 0], values[values > 0]
    assert abs(len(low) / 4000 - 0.5) < 0.06
    assert float(low.std()) == pytest.approx(0.5, rel=0.1)
    assert float(high.std()) == pytest.approx(3.0, rel=0.1)


def test_kl_takes_fresh_noise_after_every_forward_pass_and_the_same_before_it():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)).double()
    pb.patch_(model, GaussianMixture(3), "all")
    first, again = pb.kl(model), pb.kl(model)
    assert torch.equal(first, again)
    model(torch.randn(2, 3, dtype=torch.float64))
    assert not torch.equal(first, pb.kl(model))
    with pb.use_draw(model, pb.Draws.sample(model, 2)[1]):
        model(torch.randn(2, 3, dtype=torch.float64))
    held = pb.kl(model)
    with pb.use_draw(model, pb.Draws.sample(model, 3)[2]):
        model(torch.randn(2, 3, dtype=torch.float64))
    assert not torch.equal(held, pb.kl(model))


def test_members_of_a_network_wide_mixture_have_the_bound():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    pb.patch_(model, GaussianMixture(2, tie="network"), "all")
    kinds = {site.posterior.kl(PriorTerms(1.0, 1.0)).kind for site in pb.patched_sites(model).values()}
    assert kinds == {"bound"}
    torch.testing.assert_close(pb.kl(model), pb.kl(model, entropy="lower"))


def test_spread_scales_components_and_deviations():
    _, posterior = site_of(2, GaussianMixture(2), [[-1.0, 2.0], [3.0, 4.0]], [[0.5], [0.7]])
    mean = posterior.mean()["weight"].detach().clone()
    posterior.scale_spread_(2.0)
    torch.testing.assert_close(posterior.mean()["weight"], mean)
    torch.testing.assert_close(posterior.deviation("weight")[:, 0, 0], torch.tensor([1.0, 1.4], dtype=torch.float64))
    torch.testing.assert_close(posterior.stored("weight")[0, 0], torch.tensor([-3.0, 1.0], dtype=torch.float64))


def test_deviations_are_laws_that_no_optimizer_decays():
    model = nn.Sequential(nn.Linear(3, 4))
    pb.patch_(model, GaussianMixture(2), "all")
    names = [name for name, role in pb.patched_sites(model)["0"].posterior.roles().items() if role == "law"]
    assert names == ["before_softplus.weight", "before_softplus.bias"]
    assert {f"0.patchbayes.{name}" for name in names} <= set(pb.no_decay_names(model))


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"scale": 0.0}, "scale=0.0"),
        ({"scale": math.nan}, "scale=nan"),
        ({"per": "layer"}, "per='layer'"),
        ({"sigma": 0.1}, "sigma=0.1"),
        ({"zero": True}, "zero=True"),
        ({"per_example": True}, "per_example=True"),
    ],
)
def test_what_cannot_be_is_refused(options, complaint):
    with pytest.raises(PatchbayesError, match=complaint):
        GaussianMixture(2, **options)
