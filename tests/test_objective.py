"""KL, negative ELBO and the simplified loss: the formulas of the paper in NumPy, the true KL by quadrature, the scales."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

import patchbayes as pb
from patchbayes.errors import PatchbayesError
from reference.divergence import categorical_entropy, kl_with_component_entropies, quadratic_kl, true_kl
from reference.mlp import log_softmax


def network() -> nn.Sequential:
    """In double precision, with no parameter at zero."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model


def stored(model: nn.Module, site: str, name: str) -> np.ndarray:
    """All values of a parameter with a leading component axis; one component for a parameter that is not mixed."""
    sites = pb.patched_sites(model)
    if site in sites and name in sites[site].posterior.names:
        return sites[site].components(name).detach().numpy()
    return model.get_submodule(site)._parameters[name].detach().numpy()[None]


def uniform(number: int) -> np.ndarray:
    return np.full(number, 1 / number)


def normal_prior(precision: float) -> torch.distributions.Normal:
    return torch.distributions.Normal(torch.zeros((), dtype=torch.float64), precision**-0.5)


ONE = np.ones(1)


# Eqs. (2) and (6)


@pytest.mark.parametrize(
    ("method", "p_weights", "p_biases"),
    [
        (pb.EMP(3), uniform(3), uniform(3)),
        (pb.ECMP(3), uniform(3), uniform(3)),
        (pb.Mixture(components=3, tie="unit"), uniform(3), uniform(3)),
        (pb.Ensemble(3), uniform(3), uniform(3)),
        (pb.EMP(2, probabilities=(0.9, 0.1)), (0.9, 0.1), (0.9, 0.1)),
        (pb.EMP(2, mix_bias=False), uniform(2), ONE),
        (pb.DropConnect(0.3), (0.7,), ONE),
        (pb.DropConnect(0.3, mix_bias=True), (0.7,), (0.7,)),
        (pb.Mixture(components=1, tie="unit", zero=True, probabilities=(0.6, 0.4)), (0.6,), ONE),
        (pb.Mixture(components=2, zero=True), uniform(3)[:2], ONE),
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
            expected += quadratic_kl(stored(model, site, name), ONE if site == "0" else np.asarray(p), 1.0)
    assert pb.kl(model).item() == pytest.approx(expected, rel=1e-12)


def gaussian_kl(values: np.ndarray, precision: float) -> float:
    """values are the mean and the deviation before softplus."""
    deviation = np.logaddexp(0, values[1])
    return 0.5 * (precision * (values[0] ** 2 + deviation**2) - 1 - np.log(precision * deviation**2)).sum()


@pytest.mark.parametrize(
    ("method", "term"),
    [
        (pb.EMP(3), lambda name, values, precision: quadratic_kl(values, uniform(3), precision)),
        (pb.MeanField(), lambda name, values, precision: gaussian_kl(values, precision)),
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
    prior = pb.Prior(tau={"3": 10.0, "1": 5.0, "*": 2.0}, rho={"[01]": 0.5, "*": 0.25})
    expected = 0.0
    for site, precisions in (("0", (2.0, 0.5)), ("1", (5.0, 0.5)), ("3", (10.0, 0.25))):
        for name, precision in zip(("weight", "bias"), precisions, strict=True):
            values = stored(model, site, name)
            expected += quadratic_kl(values, ONE, precision) if site == "0" else term(name, values, precision)
    assert pb.kl(model, prior).item() == pytest.approx(expected, rel=1e-12)


def test_the_first_pattern_that_matches_wins():
    model = network()
    pb.patch_(model, pb.EMP(2), "norm")
    catch_all_first = pb.kl(model, pb.Prior(tau={"*": 1.0, "1": 100.0}))
    assert catch_all_first == pb.kl(model)
    assert pb.kl(model, pb.Prior(tau={"1": 100.0, "*": 1.0})) > catch_all_first


def test_a_layer_without_a_precision_is_an_error():
    model = network()
    pb.patch_(model, pb.EMP(2), "norm")
    with pytest.raises(PatchbayesError, match=r'(?s)tau.*no pattern matches the layer "0".*"\*"'):
        pb.kl(model, pb.Prior(tau={"1": 1.0, "3": 1.0}))


def test_the_prior_given_to_patch_is_the_default():
    model = network()
    pb.patch_(model, pb.EMP(2), "norm", prior=pb.Prior(tau=3.0, rho=7.0))
    assert pb.kl(model) == pb.kl(model, pb.Prior(tau=3.0, rho=7.0))
    assert pb.kl(model) != pb.kl(model, pb.Prior())


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, {}, {"*": 0.0}, "1"])
def test_a_precision_is_a_finite_number_above_zero(value):
    for name in ("tau", "rho"):
        with pytest.raises(PatchbayesError, match=rf"(?s){name}=.*above 0"):
            pb.Prior(**{name: value})


def test_without_shared_only_patched_layers_count():
    model = network()
    pb.patch_(model, pb.EMP(3), "norm+output")
    shared = sum(quadratic_kl(stored(model, "0", name), ONE, 1.0) for name in ("weight", "bias"))
    assert (pb.kl(model) - pb.kl(model, shared=False)).item() == pytest.approx(shared, rel=1e-10)
    assert shared > 1


def test_the_gradient_of_kl_is_precision_times_probability_times_component():
    model = network()
    p = (0.5, 0.2, 0.3)
    pb.patch_(model, pb.ECMP(3, probabilities=p), "norm+output", prior=pb.Prior(tau=2.0, rho=3.0))
    pb.kl(model).backward()
    for site in ("1", "3"):
        for name, precision in (("weight", 2.0), ("bias", 3.0)):
            components = pb.patched_sites(model)[site].components(name)
            by_hand = (
                precision * torch.tensor(p, dtype=torch.float64).view(3, *[1] * (components.dim() - 1)) * components
            )
            torch.testing.assert_close(components.grad, by_hand, rtol=1e-12, atol=0)
    torch.testing.assert_close(model[0].weight.grad, 2.0 * model[0].weight, rtol=1e-12, atol=0)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.decoder = nn.Linear(3, 5)
        self.decoder.weight = self.embedding.weight

    def forward(self, tokens):
        return self.decoder(self.embedding(tokens))


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


def test_kl_of_a_module_that_holds_the_patched_network_counts_all_its_parameters():
    inner = network()
    pb.patch_(inner, pb.EMP(3), "norm", prior=pb.Prior(tau={"1": 7.0, "*": 1.0}))
    outer = nn.ModuleDict({"net": inner, "extra": nn.Linear(2, 2).double()})
    extra = 0.5 * (outer["extra"].weight.square().sum() + outer["extra"].bias.square().sum())
    torch.testing.assert_close(pb.kl(outer), pb.kl(inner) + extra, rtol=1e-12, atol=0)


# The entropy bounds and the truth


TAU, RHO, SIGMA = 1.7, 0.6, 0.3


def _site():
    """Weight and bias share a draw: one mixture in two dimensions."""
    model = nn.Sequential(nn.Linear(1, 1))
    return model, "site", lambda m: [(np.concatenate([_flat(m, "0", "weight"), _flat(m, "0", "bias")], 1), [TAU, RHO])]


def _element():
    model = nn.Sequential(nn.Linear(1, 1))
    return model, "element", lambda m: [(_flat(m, "0", "weight"), [TAU]), (_flat(m, "0", "bias"), [RHO])]


def _column():
    """Both outputs of one input unit: one mixture in two dimensions."""
    model = nn.Sequential(nn.Linear(1, 2, bias=False))
    return model, "unit", lambda m: [(_flat(m, "0", "weight"), [TAU, TAU])]


def _columns():
    model = nn.Sequential(nn.Linear(2, 1, bias=False))
    return model, "unit", lambda m: [(_flat(m, "0", "weight")[:, [i]], [TAU]) for i in range(2)]


def _network():
    """Two layers, one draw."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    joined = lambda m: np.concatenate([_flat(m, "0", "weight"), _flat(m, "1", "weight")], 1)  # noqa: E731
    return model, "network", lambda m: [(joined(m), [TAU, TAU])]


def _flat(model, site, name):
    values = stored(model, site, name)
    return values.reshape(len(values), -1)


SPREADS = {"separated": 20.0, "overlapping": 1.5, "coinciding": 0.0}


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("p", [None, (0.6, 0.3, 0.1)])
@pytest.mark.parametrize("case", [_site, _element, _column, _columns, _network])
def test_the_two_entropy_bounds_enclose_the_true_kl(case, p, spread):
    model, tie, blocks = case()
    model = model.double()
    pb.patch_(model, pb.Mixture(components=3, tie=tie, sigma=SIGMA, probabilities=p), "linear")
    with torch.no_grad():
        for parameter in model.parameters():
            steps = torch.tensor([0.0, 1.0, -1.0], dtype=torch.float64).view(3, *[1] * (parameter.dim() - 1))
            parameter.copy_(0.2 + SPREADS[spread] * SIGMA * steps.expand_as(parameter))
    prior = pb.Prior(tau=TAU, rho=RHO)
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
    pb.patch_(model, pb.Mixture(components=2, zero=True, sigma=SIGMA, probabilities=tuple(p)), "linear")
    with torch.no_grad():
        pb.patched_sites(model)["0"].components("weight").copy_(torch.tensor([[[0.4]], [[-0.5]]]))
    prior = pb.Prior(tau=TAU, rho=RHO)
    weight = np.concatenate([_flat(model, "0", "weight"), [[0.0]]])
    truth = true_kl(weight, p, SIGMA, [TAU]) + true_kl(_flat(model, "0", "bias"), ONE, SIGMA, [RHO])
    above, below = (pb.kl(model, prior, entropy=e).item() for e in ("lower", "upper"))
    assert below < truth < above
    assert above - below == pytest.approx(categorical_entropy(p), rel=1e-12)


def test_a_single_component_has_its_exact_kl_from_both_bounds():
    """Eq. (3): noise on shared layers. torch.distributions is the reference."""
    model = network()
    pb.patch_(model, pb.Shared(0.3), "all")
    expected = 0.0
    for site in ("0", "1", "3"):
        for name, precision in (("weight", TAU), ("bias", RHO)):
            mean = torch.from_numpy(stored(model, site, name))
            q = torch.distributions.Normal(mean, 0.3)
            expected += torch.distributions.kl_divergence(q, normal_prior(precision)).sum()
    for entropy in ("lower", "upper"):
        torch.testing.assert_close(pb.kl(model, pb.Prior(TAU, RHO), entropy=entropy), expected, rtol=1e-12, atol=0)


def test_patches_with_noise_on_the_shared_layers_have_a_full_kl():
    model = network()
    pb.patch_(model, {"norm+output": pb.EMP(2, sigma=0.1), "*": pb.Shared(0.4)})
    expected = 0.0
    for site, p, sigma in (("0", ONE, 0.4), ("1", uniform(2), 0.1), ("3", uniform(2), 0.1)):
        for name, precision in (("weight", TAU), ("bias", RHO)):
            means = _flat(model, site, name)
            expected += kl_with_component_entropies(means, p, sigma, np.full(means.shape[1], precision))
    prior = pb.Prior(TAU, RHO)
    assert pb.kl(model, prior, entropy="lower").item() == pytest.approx(expected, rel=1e-12)
    assert pb.kl(model, prior, entropy="upper").item() == pytest.approx(expected - 2 * math.log(2), rel=1e-12)


def test_the_bounds_differ_by_the_entropy_of_every_independent_draw():
    p = (0.9, 0.1)
    draws = {"site": 2, "element": 2 * 4 + 4 * 2 + 2, "unit": (4 + 1) + (4 + 1), "network": 1}
    for tie, number in draws.items():
        model = network()
        pb.patch_(model, pb.Mixture(components=2, tie=tie, sigma=0.1, probabilities=p), "norm+output")
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
    pb.patch_(model, pb.MeanField(scale=0.4), "all")
    expected = torch.zeros((), dtype=torch.float64)
    for site in ("0", "1", "3"):
        for name, precision in (("weight", TAU), ("bias", RHO)):
            mean, s = torch.from_numpy(stored(model, site, name))
            q = torch.distributions.Normal(mean, nn.functional.softplus(s))
            expected += torch.distributions.kl_divergence(q, normal_prior(precision)).sum()
    torch.testing.assert_close(pb.kl(model, pb.Prior(TAU, RHO), entropy=entropy), expected, rtol=1e-12, atol=0)


def test_mean_field_kl_is_the_integral():
    model = nn.Sequential(nn.Linear(1, 1)).double()
    pb.patch_(model, pb.MeanField(scale=0.8), "linear")
    truth = 0.0
    for name, precision in (("weight", TAU), ("bias", RHO)):
        mean, s = _flat(model, "0", name)
        truth += true_kl(mean[None], ONE, float(np.logaddexp(0, s[0])), [precision])
    assert pb.kl(model, pb.Prior(TAU, RHO)).item() == pytest.approx(truth, abs=1e-9)


# Learned precisions


def best_precisions(model: nn.Module, p: np.ndarray, sigma: float = 0.0) -> dict[tuple[str, str], float]:
    """tau = D / sum_k p_k (||M_k||^2 + D sigma^2), for patched ("1", "3") and shared ("0") layers."""
    best = {}
    for site in ("0", "1", "3"):
        for name in ("weight", "bias"):
            values = _flat(model, site, name)
            weights = p if site != "0" else ONE
            noise = sigma**2 if site != "0" else 0.0
            size = values.shape[1]
            best[site, name] = size / ((weights[: len(values), None] * values**2).sum() + size * noise)
    return best


def learned(prior: pb.LearnedPrior) -> dict[tuple[str, str], float]:
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
    prior = pb.LearnedPrior(model, tau=3.0, rho=0.1).double()
    pb.maximize_prior_(model, prior)
    expected = best_precisions(model, P, sigma)
    assert learned(prior) == pytest.approx(expected, rel=1e-9)
    assert len({round(value, 6) for value in expected.values()}) == 6


@pytest.mark.parametrize("method", [pb.MeanField(scale=0.5), pb.Dropout(0.25), pb.DropConnect(0.25), pb.ECMP(2)])
def test_the_best_precisions_leave_no_gradient_and_are_a_minimum(method):
    model = network()
    pb.patch_(model, method, "norm+output")
    prior = pb.LearnedPrior(model).double()
    pb.maximize_prior_(model, prior)
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
    prior = pb.LearnedPrior(model).double()
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
@pytest.mark.parametrize("method", [pb.EMP(2, jitter=0), pb.MeanField(scale=0.5)])
def test_the_best_precision_is_found_for_tiny_and_for_huge_parameters_in_single_precision(method, size):
    model = nn.Sequential(nn.Linear(64, 64))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_().mul_(size)
    pb.patch_(model, method, "linear")
    prior = pb.LearnedPrior(model)
    pb.maximize_prior_(model, prior)
    for name, precision in zip(("weight", "bias"), prior.precisions("0"), strict=True):
        values = stored(model, "0", name).astype(float)
        if isinstance(method, pb.MeanField):
            values = np.stack([values[0], np.logaddexp(0, values[1])])
            square = (values**2).sum()
        else:
            square = (values**2).sum() / 2
        assert precision.item() == pytest.approx(values[0].size / square, rel=1e-4)


def test_the_best_precision_of_tied_parameters_counts_them_once():
    model = Tied().double()
    pb.patch_(model, pb.EMP(3), "decoder", tied="together")
    prior = pb.LearnedPrior(model).double()
    pb.maximize_prior_(model, prior)
    values = pb.patched_sites(model)["decoder"].components("weight").detach()
    assert prior.precisions("decoder")[0].item() == pytest.approx(15 / (values.square().sum().item() / 3), rel=1e-9)


def test_a_layer_of_zeros_keeps_its_precision():
    model = nn.Sequential(nn.Linear(2, 2)).double()
    nn.init.zeros_(model[0].bias)
    pb.patch_(model, pb.EMP(2, jitter=0), "linear")
    prior = pb.LearnedPrior(model, rho=7.0).double()
    pb.maximize_prior_(model, prior)
    assert prior.precisions("0")[1].item() == pytest.approx(7.0, rel=1e-6)


def test_maximizing_uses_the_prior_of_the_network_and_refuses_a_fixed_one():
    model = network()
    pb.patch_(model, pb.EMP(2), "norm", prior=pb.LearnedPrior(model).double())
    pb.maximize_prior_(model)
    expected = best_precisions(model, uniform(2))
    tau, rho = model.__dict__["_patchbayes"].prior.precisions("1")
    assert (tau.item(), rho.item()) == pytest.approx((expected["1", "weight"], expected["1", "bias"]), rel=1e-9)
    fixed = network()
    pb.patch_(fixed, pb.EMP(2), "norm")
    with pytest.raises(PatchbayesError, match="LearnedPrior"):
        pb.maximize_prior_(fixed)


def test_learned_precisions_start_where_they_are_told_and_keep_the_logarithm_in_the_kl():
    model = network()
    pb.patch_(model, pb.EMP(2), "norm+output")
    prior = pb.LearnedPrior(model, tau={"3": 4.0, "*": 2.0}, rho=0.5).double()
    fixed = pb.Prior(tau={"3": 4.0, "*": 2.0}, rho=0.5)
    logarithms = 0.5 * (12 * math.log(2) + 4 * math.log(2) + 8 * math.log(4) + (4 + 4 + 2) * math.log(0.5))
    assert pb.kl(model, prior).item() == pytest.approx(pb.kl(model, fixed).item() - logarithms, rel=1e-6)


def test_a_learned_prior_of_another_network_is_refused():
    model = network()
    pb.patch_(model, pb.EMP(2), "norm")
    with pytest.raises(PatchbayesError, match='layer "1" was not in the network'):
        pb.kl(model, pb.LearnedPrior(nn.ModuleDict({"other": nn.Linear(2, 2)})))


# Negative ELBO


@pytest.mark.parametrize("draws", [1, 4])
def test_negative_elbo_of_classification_is_the_formula(draws):
    torch.manual_seed(0)
    logits = torch.randn(draws, 5, 3, dtype=torch.float64)
    targets = torch.tensor([0, 2, 1, 1, 0])
    log_probs = log_softmax(logits.numpy())
    likelihood = sum(log_probs[s, b, targets[b]] for s in range(draws) for b in range(5)) / (draws * 5)
    ours = pb.negative_elbo(logits, targets, torch.tensor(12.0, dtype=torch.float64), num_data=600)
    assert ours.item() == pytest.approx(-likelihood + 12.0 / 600, rel=1e-12)


@pytest.mark.parametrize("shape", [(5,), (5, 1), (5, 2)])
@pytest.mark.parametrize("draws", [1, 4])
def test_negative_elbo_of_regression_is_the_formula(draws, shape):
    torch.manual_seed(0)
    means, y = torch.randn(draws, *shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)
    precision, dimensions = 2.5, shape[1] if len(shape) > 1 else 1
    squares = ((means - y) ** 2).numpy().reshape(draws, 5, -1).sum(-1)
    log_density = 0.5 * dimensions * np.log(precision / (2 * np.pi)) - 0.5 * precision * squares
    ours = pb.negative_elbo(means, y, 3.0, num_data=40, likelihood=pb.Gaussian(precision))
    assert ours.item() == pytest.approx(-log_density.mean() + 3.0 / 40, rel=1e-12)


def test_negative_elbo_from_the_network_equals_the_usual_training_loss_for_one_draw():
    model = network().train()
    pb.patch_(model, pb.EMP(3), "norm+output")
    x, y = torch.randn(6, 3, dtype=torch.float64), torch.tensor([0, 1, 1, 0, 1, 0])
    one = pb.Draws.sample(model, 1)
    loss = nn.functional.cross_entropy(pb.forward_draws(model, x, one)[0], y) + pb.kl(model) / 100
    ours = pb.negative_elbo(pb.forward_draws(model, x, one), y, pb.kl(model), num_data=100)
    torch.testing.assert_close(ours, loss, rtol=1e-13, atol=0)


def test_draws_are_averaged_outside_the_logarithm():
    """So the value is never below the loss of the averaged prediction."""
    torch.manual_seed(0)
    logits, targets = 3 * torch.randn(8, 20, 4, dtype=torch.float64), torch.randint(4, (20,))
    averaged = logits.softmax(-1).mean(0).log()
    assert pb.negative_elbo(logits, targets, 0.0, num_data=1) > nn.functional.nll_loss(averaged, targets) + 0.1


def test_the_class_axis_can_be_moved():
    torch.manual_seed(0)
    logits, targets = torch.randn(2, 5, 3, 4, dtype=torch.float64), torch.randint(3, (5, 4))
    moved = pb.negative_elbo(logits, targets, 0.0, num_data=1, likelihood=pb.Categorical(class_dim=1))
    last = pb.negative_elbo(logits.movedim(2, -1), targets, 0.0, num_data=1)
    torch.testing.assert_close(moved, last)


def test_an_example_with_many_labels_counts_as_one_example():
    """-(1 / S B) sum_s sum_b log p(y_b): the labels of an image or a sentence are summed, as targets of a regression are."""
    torch.manual_seed(0)
    logits, targets = torch.randn(2, 5, 7, 3, dtype=torch.float64), torch.randint(3, (5, 7))
    by_hand = nn.functional.cross_entropy(
        logits.movedim(-1, 1).reshape(2, 3, 5, 7), targets.expand(2, 5, 7), reduction="sum"
    )
    ours = pb.negative_elbo(logits, targets, 4.0, num_data=50)
    torch.testing.assert_close(ours, by_hand / (2 * 5) + 4.0 / 50)


def test_a_learned_output_precision_maximizes_the_elbo_at_the_inverse_mean_square():
    torch.manual_seed(0)
    means, y = torch.randn(3, 20, 2, dtype=torch.float64), torch.randn(20, 2, dtype=torch.float64)
    best = 1 / (means - y).square().mean().item()
    likelihood = pb.Gaussian(best, learn=True)
    pb.negative_elbo(means, y, 0.0, num_data=20, likelihood=likelihood).backward()
    assert likelihood.log_precision.grad.item() == pytest.approx(0, abs=1e-12)
    likelihood = pb.Gaussian(2.0, learn=True)
    pb.negative_elbo(means, y, 0.0, num_data=20, likelihood=likelihood).backward()
    assert likelihood.log_precision.grad.item() == pytest.approx(0.5 * 2 * (2.0 / best - 1), rel=1e-10)


def test_a_fixed_output_precision_is_not_learned():
    assert not pb.Gaussian(2.0).log_precision.requires_grad
    assert pb.Gaussian(2.0, learn=True).log_precision.requires_grad
    assert pb.Gaussian(2.0).precision.item() == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("outputs", "targets", "options", "complaint"),
    [
        (torch.zeros(2, 5, 3), torch.zeros(5).long(), {"num_data": 0}, "at least 1"),
        (torch.zeros(2, 5, 3), torch.zeros(5).long(), {"num_data": 0.5}, "number of training examples"),
        (torch.zeros(5, 3), torch.zeros(5).long(), {"num_data": 1}, r"model\(x\)\[None\]"),
        (torch.zeros(2, 5, 3), torch.zeros(5), {"num_data": 1}, "class numbers"),
        (torch.zeros(2, 5, 1), torch.zeros(5), {"num_data": 1, "likelihood": pb.Gaussian()}, "shape of one output"),
        (torch.zeros(2, 5, 3), torch.zeros(5).long(), {"num_data": 1, "likelihood": "gaussian"}, "Gaussian"),
    ],
)
def test_negative_elbo_refuses_what_does_not_fit(outputs, targets, options, complaint):
    with pytest.raises(PatchbayesError, match=complaint):
        pb.negative_elbo(outputs, targets, 0.0, **options)


@pytest.mark.parametrize("precision", [0.0, -1.0, math.inf, math.nan])
def test_an_output_precision_is_a_finite_number_above_zero(precision):
    with pytest.raises(PatchbayesError, match="above 0"):
        pb.Gaussian(precision)


# The simplified loss of appendix C.1


GROUPS = ("patched_weights", "patched_biases", "shared_weights", "shared_biases")
LAMBDAS = pb.Lambdas(0.1, 0.02, 0.003, 0.4)


def squares(model: nn.Module) -> dict[str, float]:
    sums = dict.fromkeys(GROUPS, 0.0)
    for site in ("0", "1", "3"):
        for name, kind in (("weight", "weights"), ("bias", "biases")):
            owner = "shared" if site == "0" else "patched"
            sums[f"{owner}_{kind}"] += float((stored(model, site, name) ** 2).sum())
    return sums


@pytest.mark.parametrize("method", [pb.EMP(3), pb.ECMP(2), pb.DropConnect(0.2), pb.Dropout(0.1)])
def test_the_penalty_is_four_sums_of_squares(method):
    model = network()
    pb.patch_(model, method, "norm+output")
    for group in GROUPS:
        alone = pb.l2_penalty(model, pb.Lambdas(**{group: 0.7}))
        assert alone.item() == pytest.approx(0.7 * squares(model)[group], rel=1e-12)
    expected = sum(getattr(LAMBDAS, group) * total for group, total in squares(model).items())
    assert pb.l2_penalty(model, LAMBDAS).item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    "make", [lambda groups: torch.optim.SGD(groups, lr=0.1), lambda groups: torch.optim.Adam(groups, lr=0.1, eps=1e-3)]
)
@pytest.mark.parametrize("method", [pb.EMP(3), pb.ECMP(2), pb.DropConnect(0.2), pb.Dropout(0.1)])
def test_the_penalty_as_a_loss_and_as_weight_decay_make_the_same_step(make, method):
    x, y = torch.randn(6, 3, dtype=torch.float64), torch.tensor([0, 1, 1, 0, 1, 0])
    by_loss = network()
    pb.patch_(by_loss, method, "norm+output")
    by_decay = copy.deepcopy(by_loss)
    one = pb.Draws.sample(by_loss, 1)

    optimizer = make(pb.parameter_groups(by_loss))
    loss = nn.functional.cross_entropy(pb.forward_draws(by_loss, x, one)[0], y)
    (loss + pb.l2_penalty(by_loss, LAMBDAS)).backward()
    optimizer.step()

    optimizer = make(pb.parameter_groups(by_decay, LAMBDAS))
    nn.functional.cross_entropy(pb.forward_draws(by_decay, x, one)[0], y).backward()
    decayed = {id(p): p.grad + g["weight_decay"] * p.detach() for g in optimizer.param_groups for p in g["params"]}
    gradients = [decayed[id(p)] for p in by_decay.parameters()]
    optimizer.step()

    for ours, other, gradient in zip(by_loss.parameters(), by_decay.parameters(), gradients, strict=True):
        torch.testing.assert_close(ours.grad, gradient, rtol=1e-13, atol=1e-15)
        torch.testing.assert_close(ours, other, rtol=1e-13, atol=1e-13)


def test_the_groups_hold_every_parameter_once_under_its_name():
    model = network()
    pb.patch_(model, pb.EMP(2), "norm")
    groups = {group["name"]: group for group in pb.parameter_groups(model, LAMBDAS, lr=0.3)}
    assert tuple(groups) == GROUPS
    for name, group in groups.items():
        assert group["weight_decay"] == 2 * getattr(LAMBDAS, name)
        assert group["lr"] == 0.3
    listed = [id(p) for group in groups.values() for p in group["params"]]
    assert sorted(listed) == sorted(id(p) for p in model.parameters())
    site = pb.patched_sites(model)["1"]
    assert [id(p) for p in groups["patched_biases"]["params"]] == [id(site.components("bias"))]
    assert len(groups["shared_weights"]["params"]) == 2


def test_frozen_parameters_and_empty_groups_are_left_out():
    model = network()
    model[0].requires_grad_(False)
    model[3].requires_grad_(False)
    pb.patch_(model, pb.EMP(2), "norm")
    assert [group["name"] for group in pb.parameter_groups(model)] == ["patched_weights", "patched_biases"]


def test_tied_parameters_are_penalized_once():
    model = Tied().double()
    weight, bias = model.decoder.weight.detach().clone(), model.decoder.bias.detach().clone()
    pb.patch_(model, pb.EMP(3, jitter=0), "decoder", tied="together")
    expected = 0.5 * 3 * (weight.square().sum() + bias.square().sum())
    torch.testing.assert_close(pb.l2_penalty(model, pb.Lambdas.equal(0.5)), expected)
    listed = [id(p) for group in pb.parameter_groups(model) for p in group["params"]]
    assert len(listed) == len(set(listed)) == 2


def test_equal_lambdas_are_all_four_and_mean_a_precision_k_times_larger_on_patches():
    assert pb.Lambdas.equal(0.25) == pb.Lambdas(0.25, 0.25, 0.25, 0.25)
    model = network()
    pb.patch_(model, pb.EMP(3), "norm+output")
    precision = {"0": 2 * 0.25, "*": 3 * 2 * 0.25}
    same = pb.kl(model, pb.Prior(tau=precision, rho=precision))
    torch.testing.assert_close(pb.l2_penalty(model, pb.Lambdas.equal(0.25)), same, rtol=1e-12, atol=0)


@pytest.mark.parametrize("value", [-0.1, math.nan])
def test_a_negative_penalty_is_refused(value):
    with pytest.raises(PatchbayesError, match=r"patched_biases.*at least 0"):
        pb.Lambdas(patched_biases=value)


# ---- gradients


def with_gradients(method, sites="output"):
    model = network()
    pb.patch_(model, method, sites)
    x = torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    model(x).square().sum().backward()
    return model


@pytest.mark.parametrize("method", [pb.EMP(3), pb.ECMP(3), pb.EMP(2, zero=True)])
def test_components_that_were_not_drawn_learn_from_those_that_were(method):
    model = with_gradients(method)
    weight = pb.patched_sites(model)["3"].components("weight")
    own = weight.grad.clone()
    assert (own == 0).any()
    components = len(own)
    for share in (0, 0.25, 1):
        weight.grad.copy_(own)
        pb.share_gradients_(model, share=share)
        mixed = (1 - share) * own + share * own.sum(0)
        torch.testing.assert_close(weight.grad, mixed * components / (1 + share * (components - 1)))
        torch.testing.assert_close(weight.grad.mean(0), own.sum(0))
    weight.grad = None  # of a frozen layer
    pb.share_gradients_(model)
    assert weight.grad is None


@pytest.mark.parametrize(
    ("method", "sites", "mixed"),
    [
        (pb.ECMP(3, mix_bias=False), "output", ["3.parametrizations.weight.original"]),
        (pb.MeanField(), "output", []),
        (pb.Dropout(0.5), "norm", []),
        (pb.Ensemble(2), "all", []),
    ],
)
def test_what_is_not_drawn_among_components_keeps_its_gradient(method, sites, mixed):
    model = with_gradients(method, sites)
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    pb.share_gradients_(model)
    changed = [name for name, p in model.named_parameters() if not torch.equal(p.grad, before[name])]
    assert changed == mixed


@pytest.mark.parametrize("share", [-0.1, 1.1, math.nan, "half", None])
def test_a_share_outside_0_and_1_is_refused(share):
    model = with_gradients(pb.EMP(3))
    with pytest.raises(PatchbayesError, match=r"share_gradients_\(share=.*a number from 0 to 1"):
        pb.share_gradients_(model, share)
