"""Posteriors of one site: the family of Eq. (1) member by member, against NumPy, and what they refuse."""

import copy
import json
import math

import numpy as np
import pytest
import torch
from torch import nn

import patchbayes as pb
from patchbayes.errors import PatchbayesError
from patchbayes.patching.network import network_of
from patchbayes.posteriors import method_from_config
from reference import family
from stored import patched, posterior, seeded, stored_values


def key_of(arrays) -> bytes:
    return b"".join((np.asarray(a) + 0.0).tobytes() for a in arrays)


def law(model: nn.Module, names: list[tuple[nn.Module, str]]) -> dict[bytes, float]:
    """What the parameters are under every draw, with the probability, as a forward pass would read them."""
    found: dict[bytes, float] = {}
    draws = pb.Draws.enumerate(model)
    for one, weight in zip(draws, draws.weights.tolist(), strict=True):
        with torch.no_grad(), pb.use_draw(model, one):
            key = key_of(getattr(module, name).numpy() for module, name in names)
        found[key] = found.get(key, 0.0) + weight
    return found


def reference_law(parameters: list[family.Parameter], probabilities: list[tuple[float, ...]]) -> dict[bytes, float]:
    found: dict[bytes, float] = {}
    for z, probability in family.assignments(probabilities):
        key = key_of(parameter.realize(z) for parameter in parameters)
        found[key] = found.get(key, 0.0) + probability
    return found


def assert_same_law(ours: dict[bytes, float], reference: dict[bytes, float]) -> None:
    assert ours.keys() == reference.keys()
    for key, probability in reference.items():
        assert ours[key] == pytest.approx(probability, abs=1e-12)


LAYERS = {
    "Linear": (lambda: nn.Linear(2, 2), {"weight": family.linear_units(2, 2), "bias": family.constant_unit(2)}),
    "Conv2d": (
        lambda: nn.Conv2d(2, 2, (1, 2)),
        {"weight": family.conv_units(2, 2, (1, 2)), "bias": family.constant_unit(2)},
    ),
    "Conv2d in groups": (
        lambda: nn.Conv2d(4, 2, 1, groups=2),
        {"weight": family.conv_units(2, 4, (1, 1), groups=2), "bias": family.constant_unit(2)},
    ),
    "depthwise Conv1d": (
        lambda: nn.Conv1d(2, 4, 1, groups=2),
        {"weight": family.conv_units(4, 2, (1,), groups=2), "bias": family.constant_unit(4)},
    ),
    "ConvTranspose2d": (
        lambda: nn.ConvTranspose2d(2, 2, (1, 2)),
        {"weight": family.transposed_conv_units(2, 2, (1, 2)), "bias": family.constant_unit(2)},
    ),
    "Embedding": (lambda: nn.Embedding(3, 2), {"weight": family.row_units(3, 2)}),
    "BatchNorm2d": (
        lambda: nn.BatchNorm2d(3),
        {"weight": family.elementwise_units(3), "bias": family.constant_unit(3)},
    ),
    "LayerNorm": (lambda: nn.LayerNorm(3), {"weight": family.elementwise_units(3), "bias": family.constant_unit(3)}),
    "LayerNorm of two axes": (
        lambda: nn.LayerNorm((2, 2)),
        {"weight": family.elementwise_units(2, 2), "bias": family.constant_unit(2, 2)},
    ),
    "GroupNorm": (
        lambda: nn.GroupNorm(1, 3),
        {"weight": family.elementwise_units(3), "bias": family.constant_unit(3)},
    ),
    "InstanceNorm1d": (
        lambda: nn.InstanceNorm1d(3, affine=True),
        {"weight": family.elementwise_units(3), "bias": family.constant_unit(3)},
    ),
    "RMSNorm": (lambda: nn.RMSNorm(3), {"weight": family.elementwise_units(3)}),
}

# Table 2 and Eqs. (4), (5): the law of the realized parameters


@pytest.mark.parametrize("tie", ["network", "site", "unit", "element"])
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("zero", [False, True])
def test_every_tie_on_every_layer_gives_the_law_of_the_family(layer, tie, zero):
    make, units = LAYERS[layer]
    p = (0.25, 0.75)
    method = pb.posteriors.Mixture(components=1 if zero else 2, tie=tie, zero=zero, probabilities=p)
    model = patched(make(), method)
    mixed = {name: unit for name, unit in units.items() if not (zero and name == "bias")}
    groups, number = family.number_groups(mixed, tie, 0)
    parameters = [family.Parameter(stored_values(model, "0", name), groups.get(name)) for name in units]
    ours = law(model, [(model[0], name) for name in units])
    assert_same_law(ours, reference_law(parameters, [p] * number))
    assert pb.Draws.enumerate(model).layout.num_groups == number


def two_layers(method) -> tuple[nn.Sequential, list]:
    model = nn.Sequential(nn.Linear(1, 2), nn.Tanh(), nn.Linear(2, 1)).double()
    pb.patch_(model, method, "linear")
    return model, [(model[0], "weight"), (model[0], "bias"), (model[2], "weight"), (model[2], "bias")]


def reference_of_two_layers(model, tie: str, *, mix_bias: bool) -> tuple[list[family.Parameter], int]:
    parameters, number = [], 0
    for site, shape in (("0", (2, 1)), ("2", (1, 2))):
        units = {"weight": family.linear_units(*shape)}
        if mix_bias:
            units["bias"] = family.constant_unit(shape[0])
        groups, following = family.number_groups(units, tie, 0 if tie == "network" else number)
        number = max(number, following)
        for name in ("weight", "bias"):
            parameters.append(family.Parameter(stored_values(model, site, name), groups.get(name)))
    return parameters, number


@pytest.mark.parametrize(
    ("method", "tie", "mix_bias", "p"),
    [
        (pb.EMP(3), "site", True, (1 / 3, 1 / 3, 1 / 3)),
        (pb.ECMP(2), "element", True, (1 / 2, 1 / 2)),
        (pb.posteriors.DropConnect(0.3), "element", False, (0.7, 0.3)),
        (
            pb.posteriors.Mixture(components=1, tie="unit", zero=True, probabilities=(0.8, 0.2)),
            "unit",
            False,
            (0.8, 0.2),
        ),
        (pb.Ensemble(3), "network", True, (1 / 3, 1 / 3, 1 / 3)),
        (pb.EMP(2, probabilities=(0.9, 0.1)), "site", True, (0.9, 0.1)),
        (pb.Ensemble(2, probabilities=(0.9, 0.1)), "network", True, (0.9, 0.1)),
    ],
)
def test_members_of_table_2_give_the_joint_law_of_two_layers(method, tie, mix_bias, p):
    model, names = two_layers(method)
    parameters, number = reference_of_two_layers(model, tie, mix_bias=mix_bias)
    assert_same_law(law(model, names), reference_law(parameters, [p] * number))


def test_members_that_differ_have_different_laws():
    """The check above can tell them apart: EMP's law is not that of a reference with ECMP's groups."""
    model, names = two_layers(pb.EMP(2))
    parameters, number = reference_of_two_layers(model, "element", mix_bias=True)
    with pytest.raises(AssertionError):
        assert_same_law(law(model, names), reference_law(parameters, [(0.5, 0.5)] * number))


@pytest.mark.parametrize(
    ("named", "general"),
    [
        (pb.EMP(4), pb.posteriors.Mixture(components=4, tie="site")),
        (pb.ECMP(4), pb.posteriors.Mixture(components=4, tie="element")),
        (pb.ECMP(2, zero=True), pb.posteriors.Mixture(components=2, tie="element", zero=True)),
        (
            pb.Ensemble(2, sigma=0.1, norm_scale=0.2, statistics="shared"),
            pb.posteriors.Mixture(2, tie="network", init="independent", sigma=0.1, norm_scale=0.2),
        ),
        (
            pb.posteriors.DropConnect(0.25),
            pb.posteriors.Mixture(components=1, tie="element", zero=True, probabilities=(0.75, 0.25)),
        ),
        (
            pb.Ensemble(4),
            pb.posteriors.Mixture(components=4, tie="network", init="independent", statistics="per_component"),
        ),
        (pb.posteriors.GaussianNoise(0.1), pb.posteriors.Mixture(components=1, sigma=0.1)),
        (pb.EMP(2, sigma=0.1, jitter=0.3), pb.posteriors.Mixture(components=2, sigma=0.1, jitter=0.3)),
        (pb.Ensemble(4, statistics="shared"), pb.posteriors.Mixture(components=4, tie="network", init="independent")),
    ],
)
def test_named_members_are_settings_of_the_mixture(named, general):
    assert named == general


def test_zero_component_of_a_site_removes_the_layer_but_not_its_bias():
    model = patched(
        nn.Linear(2, 2), pb.posteriors.Mixture(components=2, tie="site", zero=True, probabilities=(0.2, 0.3, 0.5))
    )
    x = torch.ones(1, 2, dtype=torch.float64)
    draws = pb.Draws.enumerate(model)
    outputs = pb.forward_draws(model, x, draws)
    off = draws.assignments()[:, 0] == 2
    assert off.sum() == 1
    assert torch.equal(outputs[off][0, 0], model[0].bias)
    assert draws.weights[off].item() == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("method", "random", "fixed"),
    [
        (pb.EMP(2), ("weight", "bias"), ()),
        (pb.EMP(2, mix_bias=False), ("weight",), ("bias",)),
        (pb.posteriors.DropConnect(0.1), ("weight",), ("bias",)),
        (pb.posteriors.DropConnect(0.1, mix_bias=True), ("weight", "bias"), ()),
        (pb.posteriors.DropConnect(0.1, sigma=0.1), ("weight", "bias"), ()),
    ],
)
def test_mix_bias_says_whether_the_bias_is_drawn(method, random, fixed):
    model = patched(nn.Linear(2, 2), method)
    assert posterior(model).names == random
    assert tuple(name for name in model[0]._parameters if name not in posterior(model).components) == fixed
    before = model[0].bias.detach().clone()
    values = []
    for one in pb.Draws.sample(model, 40, seeded(1)):
        with pb.use_draw(model, one):
            values.append(model[0].bias.detach())
    moved = torch.stack(values).unique(dim=0).shape[0] > 1
    assert moved == ("bias" in random)
    if not moved:
        assert torch.equal(values[0], before)


def test_an_unmixed_bias_under_noise_has_one_component():
    model = patched(nn.Linear(2, 3), pb.posteriors.DropConnect(0.5, sigma=0.1))
    site = pb.patched_sites(model)["0"]
    assert site.components("weight").shape == (1, 3, 2)
    assert site.components("bias").shape == (1, 3)
    assert pb.Draws.sample(model, 1).layout.num_groups == 6


# Numbers of outcomes


@pytest.mark.parametrize(
    ("method", "outcomes"),
    [
        (pb.EMP(5), 5),
        (pb.ECMP(5), 5 ** (3 * 4 + 4)),
        (pb.ECMP(5, mix_bias=False), 5 ** (3 * 4)),
        (pb.posteriors.Mixture(components=5, tie="unit"), 5 ** (3 + 1)),
        (pb.posteriors.Mixture(components=1, tie="unit", zero=True), 2**3),
        (pb.posteriors.DropConnect(0.1), 2 ** (3 * 4)),
        (pb.posteriors.Mixture(components=2, zero=True), 3),
        (pb.Ensemble(5), 5),
        (pb.EMP(1), 1),
        (pb.EMP(5, sigma=0.1), math.inf),
        (pb.posteriors.MeanField(), math.inf),
    ],
)
def test_number_of_outcomes_of_a_site(method, outcomes):
    model = patched(nn.Linear(3, 4), method)
    assert network_of(model).layout.num_outcomes == outcomes
    assert posterior(model).log10_outcomes == pytest.approx(math.log10(outcomes) if outcomes < math.inf else math.inf)


def test_dropout_has_two_to_the_units_outcomes_for_each_example_which_is_uncountable():
    model = patched(nn.Linear(3, 4), pb.Dropout(0.1))
    assert network_of(model).layout.num_outcomes == math.inf
    assert posterior(model).log10_outcomes == pytest.approx(3 * math.log10(2))


# Moments and components


@pytest.mark.parametrize("tie", ["network", "site", "unit", "element"])
def test_the_mean_of_a_posterior_is_the_average_over_all_draws(tie):
    method = pb.posteriors.Mixture(
        components=2, tie=tie, zero=True, probabilities=(0.5, 0.2, 0.3), mix_bias=tie != "site"
    )
    model = patched(nn.Linear(2, 1), method)
    draws = pb.Draws.enumerate(model)
    realized = pb.patched_sites(model)["0"].realize(draws)
    means = posterior(model).mean()
    assert means.keys() == realized.keys()
    for name, values in realized.items():
        average = torch.tensordot(draws.weights, values, dims=1)
        torch.testing.assert_close(means[name], average, rtol=1e-12, atol=1e-14)


def test_components_are_numbered_and_the_last_may_be_zero():
    q = posterior(patched(nn.Linear(2, 2), pb.posteriors.Mixture(components=2, zero=True)))
    stored = q.stored("weight")
    assert torch.equal(q.component(1)["weight"], stored[1])
    assert torch.equal(q.component(2)["weight"], torch.zeros(2, 2, dtype=torch.float64))
    for number in (3, -1):
        with pytest.raises(PatchbayesError, match="components 0 to 2"):
            q.component(number)


# Bad input


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"components": 0}, "at least 1"),
        ({"components": 2.5}, "integer"),
        ({"components": True}, "integer"),
        ({"tie": "layer"}, '"network", "site", "unit" or "element"'),
        ({"sigma": -0.1}, "at least 0"),
        ({"sigma": math.nan}, "finite"),
        ({"jitter": -1.0}, "at least 0"),
        ({"jitter": math.inf}, "finite"),
        ({"init": "zeros"}, '"copies" or "independent"'),
        ({"norm_scale": math.nan}, "finite"),
        ({"statistics": "none"}, '"shared" or "per_component"'),
        ({"components": 2, "probabilities": (0.5, 0.6)}, "sum to 1"),
        ({"components": 2, "probabilities": (1.5, -0.5)}, "at least 0"),
        ({"components": 2, "probabilities": (0.5, math.nan)}, "at least 0"),
        ({"components": 2, "probabilities": (1.0,)}, "1 probabilities were given for 2 components"),
        ({"components": 1, "zero": True, "probabilities": (1.0,)}, "and the zero component"),
        ({"tie": "network", "per_example": True}, "per_example"),
        ({"statistics": "per_component", "per_example": True}, "per_example"),
    ],
)
def test_a_mixture_that_cannot_be_is_refused_in_the_users_words(options, complaint):
    with pytest.raises(PatchbayesError, match=complaint):
        pb.posteriors.Mixture(**options)


@pytest.mark.parametrize("rate", [-0.1, 1.0, math.nan])
def test_rates_outside_zero_and_one_are_refused(rate):
    for method in (pb.Dropout, pb.posteriors.DropConnect):
        with pytest.raises(PatchbayesError, match="probability to drop"):
            method(rate)


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf])
def test_a_mean_field_scale_must_be_positive(scale):
    with pytest.raises(PatchbayesError, match="above 0"):
        pb.posteriors.MeanField(scale=scale)


@pytest.mark.parametrize(
    ("module", "method", "complaint"),
    [
        (nn.Linear(2, 2), pb.EMP(2, per_example=True), "norm layers can take a draw"),
        (
            nn.BatchNorm1d(2),
            pb.posteriors.Mixture(2, tie="element", statistics="per_component"),
            "one component a layer",
        ),
    ],
)
def test_a_method_that_does_not_fit_a_layer_is_refused_and_the_network_is_untouched(module, method, complaint):
    model = nn.Sequential(module)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(PatchbayesError, match=f'(?s)"0".*{complaint}'):
        pb.patch_(model, method, "0")
    assert not pb.is_patched(model)
    assert model.state_dict().keys() == before.keys()


DESCRIBED = {
    "EMP": pb.EMP(3),
    "ECMP": pb.ECMP(3),
    "unit": pb.posteriors.Mixture(components=2, tie="unit", zero=True),
    "DropConnect": pb.posteriors.DropConnect(0.4),
    "Ensemble": pb.Ensemble(3),
    "EMP with sigma": pb.EMP(3, sigma=0.2),
    "DropConnect with sigma": pb.posteriors.DropConnect(0.4, sigma=0.2),
    "Shared": pb.posteriors.GaussianNoise(0.2),
    "MeanField": pb.posteriors.MeanField(),
    "unequal": pb.ECMP(2, probabilities=(0.9, 0.1)),
}


@pytest.mark.parametrize("method", [*DESCRIBED.values(), pb.Dropout(0.1), pb.EMP(2, per_example=True, norm_scale=0.2)])
def test_methods_survive_json(method):
    assert method_from_config(json.loads(json.dumps(method.config()))) == method
