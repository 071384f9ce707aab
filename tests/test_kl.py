"""KL: the formulas of the paper in NumPy, and the true KL by quadrature between its bounds."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

import patchbayes as pb
from objective_network import ONE, RHO, SIGMA, TAU, Tied, flat, network, normal_prior, stored_gaussian, uniform
from patchbayes.errors import PatchbayesError
from reference.divergence import categorical_entropy, kl_with_component_entropies, quadratic_kl, true_kl
from stored import components, gradient, mean_field, stored_values

# Eqs. (2) and (6)


@pytest.mark.parametrize(
    ("method", "p_weights", "p_biases"),
    [
        (pb.EMP(3), uniform(3), uniform(3)),
        (pb.ECMP(3), uniform(3), uniform(3)),
        (pb.posteriors.Mixture(components=3, tie="unit"), uniform(3), uniform(3)),
        (pb.Ensemble(3), uniform(3), uniform(3)),
        (pb.EMP(2, probabilities=(0.9, 0.1)), (0.9, 0.1), (0.9, 0.1)),
        (pb.EMP(2, mix_bias=False), uniform(2), ONE),
        (pb.posteriors.DropConnect(0.3), (0.7,), ONE),
        (pb.posteriors.DropConnect(0.3, mix_bias=True), (0.7,), (0.7,)),
        (pb.posteriors.Mixture(components=1, tie="unit", zero=True, probabilities=(0.6, 0.4)), (0.6,), ONE),
        (pb.posteriors.Mixture(components=2, zero=True), uniform(3)[:2], ONE),
        (pb.Dropout(0.25), (0.75,), ONE),
        (pb.EMP(3, sigma=0.2), uniform(3), uniform(3)),
        (pb.EMP(1), ONE, ONE),
    ],
)
def test_kl_is_the_formula_of_eqs_2_and_6(method, p_weights, p_biases):
    model = network()
    pb.patch_(model, method, "norm+output")
    expected = 0.0
    for site in ("0", "1", "3"):
        for name, p in (("weight", p_weights), ("bias", p_biases)):
            expected += quadratic_kl(stored_values(model, site, name), ONE if site == "0" else np.asarray(p), 1.0)
    assert pb.kl(model).item() == pytest.approx(expected, rel=1e-12)


def gaussian_kl(values: np.ndarray, precision: float) -> float:
    """values are the mean and the deviation before softplus."""
    deviation = np.logaddexp(0, values[1])
    return 0.5 * (precision * (values[0] ** 2 + deviation**2) - 1 - np.log(precision * deviation**2)).sum()


@pytest.mark.parametrize(
    ("method", "term"),
    [
        (pb.EMP(3), lambda name, values, precision: quadratic_kl(values, uniform(3), precision)),
        (pb.posteriors.MeanField(), lambda name, values, precision: gaussian_kl(values, precision)),
        (
            pb.Dropout(0.1),
            lambda name, values, precision: quadratic_kl(values, (1 if name == "bias" else 0.9,), precision),
        ),
    ],
)
def test_precisions_act_by_layer_and_kind(method, term):
    """tau on weights, rho on biases, in each layer as many as the first matching pattern says."""
    model = network()
    pb.patch_(model, method, "norm+output")
    prior = pb.prior.Prior(tau={"3": 10.0, "1": 5.0, "*": 2.0}, rho={"[01]": 0.5, "*": 0.25})
    expected = 0.0
    for site, precisions in (("0", (2.0, 0.5)), ("1", (5.0, 0.5)), ("3", (10.0, 0.25))):
        for name, precision in zip(("weight", "bias"), precisions, strict=True):
            gaussian = isinstance(method, pb.posteriors.MeanField) and site != "0"
            values = stored_gaussian(model, site, name) if gaussian else stored_values(model, site, name)
            expected += quadratic_kl(values, ONE, precision) if site == "0" else term(name, values, precision)
    assert pb.kl(model, prior).item() == pytest.approx(expected, rel=1e-12)


def test_the_first_pattern_that_matches_wins():
    model = network()
    pb.patch_(model, pb.EMP(2), "norm")
    catch_all_first = pb.kl(model, pb.prior.Prior(tau={"*": 1.0, "1": 100.0}))
    assert catch_all_first == pb.kl(model)
    assert pb.kl(model, pb.prior.Prior(tau={"1": 100.0, "*": 1.0})) > catch_all_first


def test_a_layer_without_a_precision_is_an_error():
    model = network()
    pb.patch_(model, pb.EMP(2), "norm")
    with pytest.raises(PatchbayesError, match=r'(?s)tau.*no pattern matches the layer "0".*"\*"'):
        pb.kl(model, pb.prior.Prior(tau={"1": 1.0, "3": 1.0}))


def test_the_prior_given_to_patch_is_the_default():
    model = network()
    pb.patch_(model, pb.EMP(2), "norm", prior=pb.prior.Prior(tau=3.0, rho=7.0))
    assert pb.kl(model) == pb.kl(model, pb.prior.Prior(tau=3.0, rho=7.0))
    assert pb.kl(model) != pb.kl(model, pb.prior.Prior())


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, {}, {"*": 0.0}, "1"])
def test_a_precision_is_a_finite_number_above_zero(value):
    for name in ("tau", "rho"):
        with pytest.raises(PatchbayesError, match=rf"(?s){name}=.*above 0"):
            pb.prior.Prior(**{name: value})


def test_without_shared_only_patched_layers_count():
    model = network()
    pb.patch_(model, pb.EMP(3), "norm+output")
    shared = sum(quadratic_kl(stored_values(model, "0", name), ONE, 1.0) for name in ("weight", "bias"))
    assert (pb.kl(model) - pb.kl(model, shared=False)).item() == pytest.approx(shared, rel=1e-10)
    assert shared > 1


def test_the_gradient_of_kl_is_precision_times_probability_times_component():
    model = network()
    p = (0.5, 0.2, 0.3)
    pb.patch_(model, pb.ECMP(3, probabilities=p), "norm+output", prior=pb.prior.Prior(tau=2.0, rho=3.0))
    pb.kl(model).backward()
    for site in ("1", "3"):
        for name, precision in (("weight", 2.0), ("bias", 3.0)):
            values = components(model, site, name)
            by_hand = precision * torch.tensor(p, dtype=torch.float64).view(3, *[1] * (values.dim() - 1)) * values
            torch.testing.assert_close(gradient(model, site, name), by_hand, rtol=1e-12, atol=0)
    torch.testing.assert_close(model[0].weight.grad, 2.0 * model[0].weight, rtol=1e-12, atol=0)


def test_a_tied_parameter_is_counted_once():
    torch.manual_seed(0)
    plain = Tied().double()
    weight, bias = plain.decoder.weight.detach().clone(), plain.decoder.bias.detach().clone()
    w, b = 0.5 * weight.square().sum(), 0.5 * bias.square().sum()

    together = copy.deepcopy(plain)
    pb.patch_(together, pb.EMP(3, jitter=0), "decoder", tied="together")
    torch.testing.assert_close(pb.kl(together), w + b)

    separate = copy.deepcopy(plain)
    pb.patch_(separate, pb.EMP(3, jitter=0), "decoder", tied="separate")
    torch.testing.assert_close(pb.kl(separate), 2 * w + b)

    elsewhere = copy.deepcopy(plain)
    elsewhere.head = nn.LayerNorm(5).double()
    pb.patch_(elsewhere, pb.EMP(3, jitter=0), "head")
    torch.testing.assert_close(pb.kl(elsewhere), w + b + 0.5 * 5)


def test_kl_of_a_module_that_holds_the_patched_network_is_that_of_the_network():
    """Layers outside have no prior: the prior was given for the names that layers have in the patched network."""
    inner = network()
    pb.patch_(inner, pb.EMP(3), "norm", prior=pb.prior.Prior(tau={"1": 7.0, "[03]": 1.0}))
    outer = nn.ModuleDict({"net": inner, "1": nn.Linear(2, 2).double()})
    assert torch.equal(pb.kl(outer), pb.kl(inner))
    assert torch.equal(pb.kl(nn.Sequential(outer)), pb.kl(inner))


@pytest.mark.parametrize(
    "method", [pb.EMP(3), pb.posteriors.MeanField(), pb.Dropout(0.2), pb.posteriors.DropConnect(0.3)]
)
def test_frozen_parameters_do_not_count_unless_asked_for(method):
    """They add a constant: the KL of what is trained, and its gradient, are the same without them."""
    model = network()
    pb.patch_(model, method, "norm+output")
    whole = pb.kl(model)
    assert torch.equal(pb.kl(model, frozen=True), whole)
    shared = sum(quadratic_kl(stored_values(model, "0", name), ONE, 1.0) for name in ("weight", "bias"))
    model[0].requires_grad_(False)
    assert pb.kl(model).item() == pytest.approx(whole.item() - shared, rel=1e-12)
    torch.testing.assert_close(pb.kl(model, frozen=True), whole, rtol=1e-14, atol=0)
    alone = copy.deepcopy(model)
    model[1].requires_grad_(False)
    norm = pb.kl(alone) - pb.kl(model)
    alone[3].requires_grad_(False)
    torch.testing.assert_close(pb.kl(alone), norm, rtol=1e-12, atol=0)
    assert norm > 0.1
    torch.testing.assert_close(pb.kl(model, frozen=True), whole, rtol=1e-14, atol=0)
    model.requires_grad_(False)
    assert pb.kl(model) == 0
    torch.testing.assert_close(pb.kl(model, frozen=True), whole, rtol=1e-14, atol=0)


# The entropy bounds and the truth


def _site():
    """Weight and bias share a draw: one mixture in two dimensions."""
    model = nn.Sequential(nn.Linear(1, 1))
    return model, "site", lambda m: [(np.concatenate([flat(m, "0", "weight"), flat(m, "0", "bias")], 1), [TAU, RHO])]


def _element():
    model = nn.Sequential(nn.Linear(1, 1))
    return model, "element", lambda m: [(flat(m, "0", "weight"), [TAU]), (flat(m, "0", "bias"), [RHO])]


def _column():
    """Both outputs of one input unit: one mixture in two dimensions."""
    model = nn.Sequential(nn.Linear(1, 2, bias=False))
    return model, "unit", lambda m: [(flat(m, "0", "weight"), [TAU, TAU])]


def _columns():
    model = nn.Sequential(nn.Linear(2, 1, bias=False))
    return model, "unit", lambda m: [(flat(m, "0", "weight")[:, [i]], [TAU]) for i in range(2)]


def _network():
    """Two layers, one draw."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    joined = lambda m: np.concatenate([flat(m, "0", "weight"), flat(m, "1", "weight")], 1)  # noqa: E731
    return model, "network", lambda m: [(joined(m), [TAU, TAU])]


SPREADS = {"separated": 20.0, "overlapping": 1.5, "coinciding": 0.0}


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("p", [None, (0.6, 0.3, 0.1)])
@pytest.mark.parametrize("case", [_site, _element, _column, _columns, _network])
def test_the_two_entropy_bounds_enclose_the_true_kl(case, p, spread):
    model, tie, blocks = case()
    model = model.double()
    pb.patch_(model, pb.posteriors.Mixture(components=3, tie=tie, sigma=SIGMA, probabilities=p), "linear")
    with torch.no_grad():
        for parameter in model.parameters():
            steps = torch.tensor([0.0, 1.0, -1.0], dtype=torch.float64).view(3, *[1] * (parameter.dim() - 1))
            parameter.copy_(0.2 + SPREADS[spread] * SIGMA * steps.expand_as(parameter))
    prior = pb.prior.Prior(tau=TAU, rho=RHO)
    weights = np.array(p or uniform(3))
    described = [(means, np.array(precision)) for means, precision in blocks(model)]
    truth = sum(true_kl(means, weights, SIGMA, precision) for means, precision in described)
    with_components = sum(kl_with_component_entropies(m, weights, SIGMA, precision) for m, precision in described)
    choice = len(described) * categorical_entropy(weights)

    above = pb.kl(model, prior, entropy="lower").item()
    below = pb.kl(model, prior, entropy="upper").item()
    assert above == pytest.approx(with_components, rel=1e-12, abs=1e-12)
    assert below == pytest.approx(with_components - choice, rel=1e-12, abs=1e-12)
    assert below - 1e-8 <= truth <= above + 1e-8
    if spread == "separated":
        assert truth == pytest.approx(below, abs=1e-7)
    if spread == "overlapping":
        assert below + 0.05 < truth < above - 0.05
    if spread == "coinciding":
        assert truth == pytest.approx(above, abs=1e-7)


def test_the_bounds_enclose_the_true_kl_with_a_component_at_zero_and_an_unmixed_bias():
    model = nn.Sequential(nn.Linear(1, 1)).double()
    p = np.array([0.3, 0.5, 0.2])
    pb.patch_(model, pb.posteriors.Mixture(components=2, zero=True, sigma=SIGMA, probabilities=tuple(p)), "linear")
    with torch.no_grad():
        pb.patched_sites(model)["0"].components("weight").copy_(torch.tensor([[[0.4]], [[-0.5]]]))
    prior = pb.prior.Prior(tau=TAU, rho=RHO)
    weight = np.concatenate([flat(model, "0", "weight"), [[0.0]]])
    truth = true_kl(weight, p, SIGMA, [TAU]) + true_kl(flat(model, "0", "bias"), ONE, SIGMA, [RHO])
    above, below = (pb.kl(model, prior, entropy=e).item() for e in ("lower", "upper"))
    assert below < truth < above
    assert above - below == pytest.approx(categorical_entropy(p), rel=1e-12)


def test_a_single_component_has_its_exact_kl_from_both_bounds():
    """Eq. (3): noise on shared layers. torch.distributions is the reference."""
    model = network()
    pb.patch_(model, pb.posteriors.GaussianNoise(0.3), "all")
    expected = 0.0
    for site in ("0", "1", "3"):
        for name, precision in (("weight", TAU), ("bias", RHO)):
            mean = torch.from_numpy(stored_values(model, site, name))
            q = torch.distributions.Normal(mean, 0.3)
            expected += torch.distributions.kl_divergence(q, normal_prior(precision)).sum()
    for entropy in ("lower", "upper"):
        torch.testing.assert_close(
            pb.kl(model, pb.prior.Prior(TAU, RHO), entropy=entropy), expected, rtol=1e-12, atol=0
        )


def test_patches_with_noise_on_the_shared_layers_have_a_full_kl():
    model = network()
    pb.patch_(model, {"norm+output": pb.EMP(2, sigma=0.1), "*": pb.posteriors.GaussianNoise(0.4)})
    expected = 0.0
    for site, p, sigma in (("0", ONE, 0.4), ("1", uniform(2), 0.1), ("3", uniform(2), 0.1)):
        for name, precision in (("weight", TAU), ("bias", RHO)):
            means = flat(model, site, name)
            expected += kl_with_component_entropies(means, p, sigma, np.full(means.shape[1], precision))
    prior = pb.prior.Prior(TAU, RHO)
    assert pb.kl(model, prior, entropy="lower").item() == pytest.approx(expected, rel=1e-12)
    assert pb.kl(model, prior, entropy="upper").item() == pytest.approx(expected - 2 * math.log(2), rel=1e-12)


def test_the_bounds_differ_by_the_entropy_of_every_independent_draw():
    p = (0.9, 0.1)
    draws = {"site": 2, "element": 2 * 4 + 4 * 2 + 2, "unit": (4 + 1) + (4 + 1), "network": 1}
    for tie, number in draws.items():
        model = network()
        pb.patch_(model, pb.posteriors.Mixture(components=2, tie=tie, sigma=0.1, probabilities=p), "norm+output")
        above, below = (pb.kl(model, entropy=e, shared=False).item() for e in ("lower", "upper"))
        assert above - below == pytest.approx(number * categorical_entropy(p), rel=1e-9)


def test_the_full_kl_and_the_short_one_have_the_same_gradient():
    gradients = []
    for entropy in (None, "lower", "upper"):
        torch.manual_seed(0)
        model = network()
        pb.patch_(model, pb.EMP(3, sigma=0.1), "all")
        pb.kl(model, entropy=entropy).backward()
        gradients.append([p.grad for p in model.parameters()])
    for short, lower, upper in zip(*gradients, strict=True):
        torch.testing.assert_close(short, lower)
        torch.testing.assert_close(short, upper)


@pytest.mark.parametrize(
    ("method", "sites", "complaint"),
    [
        (pb.EMP(2), "all", "sigma is 0"),
        (pb.Dropout(0.1), "all", "no sigma"),
        (pb.EMP(2, sigma=0.1), "norm", r'shared parameter "0.weight" has no sigma'),
    ],
)
def test_the_entropy_of_a_point_is_an_error_with_the_remedy(method, sites, complaint):
    model = network()
    pb.patch_(model, method, sites)
    for entropy in ("lower", "upper"):
        with pytest.raises(PatchbayesError, match=rf"(?s)entropy=.{entropy}.*{complaint}"):
            pb.kl(model, entropy=entropy)


def test_an_unknown_entropy_is_refused():
    model = network()
    pb.patch_(model, pb.EMP(2, sigma=0.1), "all")
    with pytest.raises(PatchbayesError, match='None, "lower" or "upper"'):
        pb.kl(model, entropy="exact")


@pytest.mark.parametrize("entropy", [None, "lower", "upper"])
def test_mean_field_kl_is_exact(entropy):
    model = network()
    pb.patch_(model, pb.posteriors.MeanField(scale=0.4), "all")
    expected = torch.zeros((), dtype=torch.float64)
    for site in ("0", "1", "3"):
        for name, precision in (("weight", TAU), ("bias", RHO)):
            mean, s = mean_field(model, site, name)
            q = torch.distributions.Normal(mean, nn.functional.softplus(s))
            expected += torch.distributions.kl_divergence(q, normal_prior(precision)).sum()
    torch.testing.assert_close(pb.kl(model, pb.prior.Prior(TAU, RHO), entropy=entropy), expected, rtol=1e-12, atol=0)


def test_mean_field_kl_is_the_integral():
    model = nn.Sequential(nn.Linear(1, 1)).double()
    pb.patch_(model, pb.posteriors.MeanField(scale=0.8), "linear")
    truth = 0.0
    for name, precision in (("weight", TAU), ("bias", RHO)):
        mean, s = stored_gaussian(model, "0", name).reshape(2, -1)
        truth += true_kl(mean[None], ONE, float(np.logaddexp(0, s[0])), [precision])
    assert pb.kl(model, pb.prior.Prior(TAU, RHO)).item() == pytest.approx(truth, abs=1e-9)
