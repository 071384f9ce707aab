"""Posteriors of one site: the family of Eq. (1) member by member, against NumPy; noise, starts, and the Gaussian rival."""

import copy
import itertools
import json
import math

import numpy as np
import pytest
import torch
from torch import nn

import patchbayes as pb
from patchbayes.errors import PatchbayesError
from patchbayes.posteriors import method_from_config
from reference import family
from statistics_helper import assert_frequencies, assert_standard_normal, assert_uncorrelated


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def patched(module: nn.Module, method, sites="0", **options) -> nn.Sequential:
    """The module in double precision as the only layer of a patched network."""
    model = nn.Sequential(module).double()
    pb.patch_(model, method, sites, **options)
    return model


def posterior(model: nn.Module, site: str = "0"):
    return pb.patched_sites(model)[site].posterior


def key_of(arrays) -> bytes:
    return b"".join((np.asarray(a) + 0.0).tobytes() for a in arrays)


def law(model: nn.Module, names: list[tuple[nn.Module, str]]) -> dict[bytes, float]:
    """What the parameters are under every draw, with the probability, as a forward pass would read them."""
    found: dict[bytes, float] = {}
    draws = pb.Draws.enumerate(model)
    for one, weight in zip(draws, draws.weights.tolist(), strict=True):
        with torch.no_grad(), pb.drawn(model, one):
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
    method = pb.Mixture(components=1 if zero else 2, tie=tie, zero=zero, probabilities=p)
    model = patched(make(), method)
    mixed = {name: unit for name, unit in units.items() if not (zero and name == "bias")}
    groups, number = family.number_groups(mixed, tie, 0)
    parameters = [
        family.Parameter(stored if name in groups else stored[None], groups.get(name))
        for name in units
        for stored in [pb.patched_sites(model)["0"].components(name).detach().numpy()]
    ]
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
            stored = pb.patched_sites(model)[site].components(name).detach().numpy()
            parameters.append(family.Parameter(stored if name in groups else stored[None], groups.get(name)))
    return parameters, number


@pytest.mark.parametrize(
    ("method", "tie", "mix_bias", "p"),
    [
        (pb.EMP(3), "site", True, (1 / 3, 1 / 3, 1 / 3)),
        (pb.ECMP(2), "element", True, (1 / 2, 1 / 2)),
        (pb.DropConnect(0.3), "element", False, (0.7, 0.3)),
        (pb.Mixture(components=1, tie="unit", zero=True, probabilities=(0.8, 0.2)), "unit", False, (0.8, 0.2)),
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
        (pb.EMP(4), pb.Mixture(components=4, tie="site")),
        (pb.ECMP(4), pb.Mixture(components=4, tie="element")),
        (pb.DropConnect(0.25), pb.Mixture(components=1, tie="element", zero=True, probabilities=(0.75, 0.25))),
        (
            pb.Ensemble(4),
            pb.Mixture(components=4, tie="network", init="independent", statistics="per_component"),
        ),
        (pb.Shared(0.1), pb.Mixture(components=1, sigma=0.1)),
        (pb.EMP(2, sigma=0.1, jitter=0.3), pb.Mixture(components=2, sigma=0.1, jitter=0.3)),
        (pb.Ensemble(4, statistics="shared"), pb.Mixture(components=4, tie="network", init="independent")),
    ],
)
def test_named_members_are_settings_of_the_mixture(named, general):
    assert named == general


def test_zero_component_of_a_site_removes_the_layer_but_not_its_bias():
    model = patched(nn.Linear(2, 2), pb.Mixture(components=2, tie="site", zero=True, probabilities=(0.2, 0.3, 0.5)))
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
        (pb.DropConnect(0.1), ("weight",), ("bias",)),
        (pb.DropConnect(0.1, mix_bias=True), ("weight", "bias"), ()),
        (pb.DropConnect(0.1, sigma=0.1), ("weight", "bias"), ()),
    ],
)
def test_mix_bias_says_whether_the_bias_is_drawn(method, random, fixed):
    model = patched(nn.Linear(2, 2), method)
    assert posterior(model).names == random
    assert posterior(model).fixed_names == fixed
    before = model[0].bias.detach().clone()
    values = []
    for one in pb.Draws.sample(model, 40, seeded(1)):
        with pb.drawn(model, one):
            values.append(model[0].bias.detach())
    moved = torch.stack(values).unique(dim=0).shape[0] > 1
    assert moved == ("bias" in random)
    if not moved:
        assert torch.equal(values[0], before)


def test_an_unmixed_bias_under_noise_has_one_component():
    model = patched(nn.Linear(2, 3), pb.DropConnect(0.5, sigma=0.1))
    site = pb.patched_sites(model)["0"]
    assert site.components("weight").shape == (1, 3, 2)
    assert site.components("bias").shape == (1, 3)
    assert pb.Draws.sample(model, 1).layout.num_groups == 6


# Dropout: dropping an input unit is dropping a column


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.Linear(3, 2), (5, 3)),
        (lambda: nn.Conv2d(3, 2, 2), (2, 3, 4, 4)),
        (lambda: nn.Conv2d(4, 6, 2, groups=2), (2, 4, 4, 4)),
        (lambda: nn.Conv1d(3, 6, 2, groups=3), (2, 3, 5)),
        (lambda: nn.ConvTranspose2d(3, 2, 2), (2, 3, 4, 4)),
        (lambda: nn.ConvTranspose2d(4, 6, 2, groups=2), (2, 4, 4, 4)),
    ],
)
def test_a_dropped_unit_in_weight_space_is_a_dropped_input_channel(make, shape):
    torch.manual_seed(3)
    plain = make().double()
    x = torch.randn(shape, dtype=torch.float64)
    model = patched(copy.deepcopy(plain), pb.Mixture(components=1, tie="unit", zero=True))
    draws = pb.Draws.enumerate(model)
    assert len(draws) == 2 ** shape[1]
    outputs = pb.forward_draws(model, x, draws)
    for z, output in zip(draws.assignments(), outputs, strict=True):
        keep = (z == 0).double().reshape(1, -1, *[1] * (len(shape) - 2))
        torch.testing.assert_close(output, plain(x * keep), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("make", [lambda: nn.LayerNorm((2, 3)), lambda: nn.LayerNorm(4), lambda: nn.BatchNorm1d(4)])
def test_a_dropped_unit_of_a_norm_layer_is_a_dropped_normalized_input(make):
    plain = make().double().eval()
    nn.init.normal_(plain.weight)
    nn.init.normal_(plain.bias)
    x = torch.randn(5, *plain.weight.shape, dtype=torch.float64)
    model = patched(copy.deepcopy(plain), pb.Mixture(components=1, tie="unit", zero=True)).eval()
    draws = pb.Draws.enumerate(model)
    assert len(draws) == 2 ** plain.weight.numel()
    scaled = plain(x) - plain.bias
    for z, output in zip(draws.assignments(), pb.forward_draws(model, x, draws), strict=True):
        keep = (z == 0).double().reshape(plain.weight.shape)
        torch.testing.assert_close(output, scaled * keep + plain.bias, rtol=1e-12, atol=1e-12)


def masks_seen(model: nn.Module, module: nn.Module, x: torch.Tensor, draws) -> torch.Tensor:
    """What reaches the module under each draw, (S, *x.shape)."""
    seen: list[torch.Tensor] = []
    handle = module.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach().clone()))
    pb.forward_draws(model, x, draws)
    handle.remove()
    return torch.stack(seen)


def test_dropout_of_activations_is_dropout_of_columns_on_the_same_mask():
    """Every row of the batch equals the weight-space member under that row's mask, up to the inverted scaling."""
    torch.manual_seed(1)
    rate, plain = 0.4, nn.Linear(3, 2).double()
    x = torch.randn(6, 3, dtype=torch.float64)
    activations = patched(copy.deepcopy(plain), pb.Dropout(rate))
    columns = patched(
        copy.deepcopy(plain), pb.Mixture(components=1, tie="unit", zero=True, probabilities=(1 - rate, rate))
    )
    draws = pb.Draws.sample(activations, 10, seeded(2))
    masks = masks_seen(activations, activations[0], torch.ones_like(x), draws) * (1 - rate)
    outputs = pb.forward_draws(activations, x, draws)
    networks = pb.Draws.enumerate(columns)
    by_mask = {tuple(z): number for number, z in enumerate(networks.assignments().tolist())}
    weight, bias = plain.weight.detach().numpy(), plain.bias.detach().numpy()
    used = set()
    for s in range(10):
        for b in range(6):
            mask = masks[s, b].round()
            torch.testing.assert_close(masks[s, b], mask)
            number = by_mask[tuple((1 - mask).int().tolist())]
            used.add(number)
            in_weights = pb.forward_draws(columns, x[b : b + 1], networks[number])[0, 0]
            scaled = (in_weights - plain.bias) / (1 - rate) + plain.bias
            torch.testing.assert_close(outputs[s, b], scaled, rtol=1e-12, atol=1e-12)
            by_hand = (x[b].numpy() * mask.numpy() / (1 - rate)) @ weight.T + bias
            np.testing.assert_allclose(outputs[s, b].detach(), by_hand, rtol=1e-12)
    assert len(used) == 8


@pytest.mark.parametrize("rate", [0.005, 0.3])
@pytest.mark.parametrize("own_draws", [True, False])
def test_dropout_masks_are_fresh_for_every_example_and_unit_with_the_given_rate(rate, own_draws):
    model = patched(nn.Linear(40, 1), pb.Dropout(rate))
    x = torch.ones(1000, 40, dtype=torch.float64)
    draws = 1 if own_draws else pb.Draws.sample(model, 1, seeded(3))
    mask = masks_seen(model, model[0], x, draws)[0]
    scale = 1 / (1 - rate)
    assert ((mask == 0) | ((mask - scale).abs() < 1e-12)).all()
    dropped = (mask == 0).int()
    assert_frequencies([int(dropped.sum()), 40_000 - int(dropped.sum())], [rate, 1 - rate], detects=0.03)
    if rate > 0.1:
        for first, second in [(dropped[:-1], dropped[1:]), (dropped[:, :-1], dropped[:, 1:])]:
            table = torch.bincount((2 * first + second).flatten(), minlength=4)
            p = [(1 - rate) ** 2, rate * (1 - rate), rate * (1 - rate), rate**2]
            assert_frequencies(table, p, detects=0.03)


def test_dropout_masks_single_activations_before_a_convolution():
    model = patched(nn.Conv2d(2, 2, 1), pb.Dropout(0.5))
    seen = masks_seen(model, model[0], torch.ones(2, 2, 8, 8, dtype=torch.float64), pb.Draws.sample(model, 1))
    assert seen.flatten(3).unique(dim=-1).shape[-1] > 1


def test_dropout_of_rate_zero_changes_nothing():
    plain = nn.Linear(3, 2).double()
    x = torch.randn(4, 3, dtype=torch.float64)
    expected = plain(x)
    assert torch.equal(patched(plain, pb.Dropout(0.0))(x), expected)


def test_dropout_stays_on_in_evaluation_and_differs_between_draws():
    model = patched(nn.Linear(30, 1), pb.Dropout(0.5)).eval()
    seen = masks_seen(model, model[0], torch.ones(1, 30, dtype=torch.float64), pb.Draws.sample(model, 5))
    assert seen.flatten(1).unique(dim=0).shape[0] == 5


# A draw, realized, is what the forward pass computes with


METHODS = {
    "EMP": pb.EMP(3),
    "ECMP": pb.ECMP(3),
    "unit": pb.Mixture(components=2, tie="unit", zero=True),
    "DropConnect": pb.DropConnect(0.4),
    "Ensemble": pb.Ensemble(3),
    "EMP with sigma": pb.EMP(3, sigma=0.2),
    "DropConnect with sigma": pb.DropConnect(0.4, sigma=0.2),
    "Shared": pb.Shared(0.2),
    "MeanField": pb.MeanField(),
    "unequal": pb.ECMP(2, probabilities=(0.9, 0.1)),
}


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_realized_draws_are_what_a_forward_pass_reads(method):
    torch.manual_seed(2)
    plain = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).double().eval()
    x = torch.randn(5, 3, dtype=torch.float64)
    model = copy.deepcopy(plain)
    pb.patch_(model, method, "all")
    draws = pb.Draws.sample(model, 4, seeded(4))
    realized = {}
    for name, site in pb.patched_sites(model).items():
        values = site.posterior.realize(site.posterior.draw(draws))
        for parameter, value in values.items():
            assert value.shape == (4, *getattr(plain.get_submodule(name), parameter).shape)
            realized[f"{name}.{parameter}"] = value.detach()
    outputs = pb.forward_draws(model, x, draws)
    for number in range(4):
        state = plain.state_dict() | {name: value[number] for name, value in realized.items()}
        same = copy.deepcopy(plain)
        same.load_state_dict(state)
        assert torch.equal(outputs[number], same(x))
    assert outputs.unique(dim=0).shape[0] > 1


def test_one_draw_serves_all_uses_of_a_layer_in_a_pass():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x):
            return self.layer(x) - self.layer(x)

    model = Twice()
    pb.patch_(model, pb.ECMP(4, sigma=0.1), "layer")
    for _ in range(5):
        assert torch.equal(model(torch.ones(2, 3)), torch.zeros(2, 3))


def test_equal_components_make_the_draw_irrelevant():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    x = torch.randn(5, 3)
    expected = plain(x)
    for tie in ("network", "site", "unit", "element"):
        model = copy.deepcopy(plain)
        pb.patch_(model, pb.Mixture(components=4, tie=tie, jitter=0), "all")
        for output in pb.forward_draws(model, x, pb.Draws.sample(model, 5)):
            assert torch.equal(output, expected)


@pytest.mark.parametrize("tie", ["network", "site", "unit", "element"])
def test_one_component_is_the_unpatched_network_bit_for_bit(tie):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2))
    x, y = torch.randn(6, 1, 4, 4), torch.tensor([0, 1, 1, 0, 1, 0])
    model = copy.deepcopy(plain)
    pb.patch_(model, pb.Mixture(components=1, tie=tie), "all")
    for network in (plain, model):
        nn.functional.cross_entropy(network(x), y).backward()
    assert torch.equal(plain(x), model(x))
    for name, site in pb.patched_sites(model).items():
        for parameter in site.posterior.names:
            expected = getattr(plain.get_submodule(name), parameter).grad
            assert torch.equal(site.components(parameter).grad[0], expected)
    for name, buffer in plain.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer)


def test_gradients_reach_the_drawn_components_only():
    model = patched(nn.Linear(2, 2), pb.EMP(3))
    draws = pb.Draws.enumerate(model)
    for one in draws:
        model.zero_grad()
        pb.forward_draws(model, torch.ones(1, 2, dtype=torch.float64), one).sum().backward()
        k = int(one.assignments()[0, 0])
        for parameter in ("weight", "bias"):
            gradient = pb.patched_sites(model)["0"].components(parameter).grad
            assert torch.equal(gradient[k], torch.ones_like(gradient[k]))
            assert gradient.abs().sum() == gradient[k].abs().sum()


# Noise


def noise_of(model: nn.Module, draws) -> dict[str, torch.Tensor]:
    """What noise adds to every parameter: the model's components must all be equal."""
    noise = {}
    for name, site in pb.patched_sites(model).items():
        values = site.posterior.realize(site.posterior.draw(draws))
        for parameter, value in values.items():
            noise[f"{name}.{parameter}"] = (value - site.components(parameter)[0]).detach()
    return noise


@pytest.mark.parametrize("method", [pb.EMP(3, sigma=0.3, jitter=0), pb.ECMP(2, sigma=0.3, jitter=0), pb.Shared(0.3)])
def test_noise_is_gaussian_with_deviation_sigma_and_independent_everywhere(method):
    model = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 100)).double()
    pb.patch_(model, method, "linear")
    noise = {name: value / 0.3 for name, value in noise_of(model, pb.Draws.sample(model, 2, seeded(1))).items()}
    first, other_draw = noise["0.weight"]
    assert_standard_normal(first, detects=0.06)
    assert_uncorrelated(first, other_draw, detects=0.1)
    assert_uncorrelated(first, noise["1.weight"][0], detects=0.1)
    assert_uncorrelated(first[:, :-1], first[:, 1:], detects=0.1)
    many = noise_of(model, pb.Draws.sample(model, 100, seeded(2)))
    assert_standard_normal(many["0.bias"] / 0.3, detects=0.06)
    assert_uncorrelated(many["0.bias"], many["1.bias"], detects=0.1)


def test_noise_on_weight_and_bias_of_a_layer_is_independent():
    for method in (pb.EMP(2, sigma=0.3, jitter=0), pb.MeanField()):
        model = patched(nn.LayerNorm(4000), method)
        noise = noise_of(model, pb.Draws.sample(model, 1))
        assert_uncorrelated(noise["0.weight"], noise["0.bias"], detects=0.15)


def test_sigma_scales_the_noise_exactly():
    def noise(sigma):
        torch.manual_seed(0)
        model = patched(nn.Linear(5, 5), pb.EMP(2, sigma=sigma, jitter=0))
        return noise_of(model, pb.Draws.sample(model, 3))["0.weight"]

    torch.testing.assert_close(noise(0.5), 5 * noise(0.1), rtol=1e-12, atol=1e-12)


def test_noise_lies_on_the_zero_component_too():
    """Eq. (1): the component that is pinned at zero is M = 0, not W = 0."""
    model = patched(nn.Linear(3, 3), pb.DropConnect(0.5, sigma=0.1))
    weights = posterior(model).realize(posterior(model).draw(pb.Draws.sample(model, 20)))["weight"]
    assert (weights != 0).all()
    assert (weights.abs() < 0.05).any()


def test_noise_streams_of_a_layer_with_many_parameters_do_not_run_into_the_next_layer():
    """A deep bidirectional LSTM has 24 parameters. Streams that overlap would give other parameters the same noise."""
    model = nn.ModuleDict({"lstm": nn.LSTM(5, 5, num_layers=3, bidirectional=True), "fc": nn.Linear(5, 20)})
    pb.patch_(model, pb.MeanField(), "lstm+fc")
    draws = pb.Draws.sample(model, 1)
    seen = {}
    for site, module in pb.patched_sites(model).items():
        q = module.posterior
        for name, value in q.realize(q.draw(draws)).items():
            mean, before_softplus = q.stored(name)
            noise = ((value[0] - mean) / nn.functional.softplus(before_softplus)).detach()
            seen[f"{site}.{name}"] = noise.flatten()[:16]
    for (one, first), (other, second) in itertools.combinations(seen.items(), 2):
        assert not torch.allclose(first, second, atol=1e-3), (one, other)


# Numbers of outcomes


@pytest.mark.parametrize(
    ("method", "outcomes"),
    [
        (pb.EMP(5), 5),
        (pb.ECMP(5), 5 ** (3 * 4 + 4)),
        (pb.ECMP(5, mix_bias=False), 5 ** (3 * 4)),
        (pb.Mixture(components=5, tie="unit"), 5 ** (3 + 1)),
        (pb.Mixture(components=1, tie="unit", zero=True), 2**3),
        (pb.DropConnect(0.1), 2 ** (3 * 4)),
        (pb.Mixture(components=2, zero=True), 3),
        (pb.Ensemble(5), 5),
        (pb.EMP(1), 1),
        (pb.EMP(5, sigma=0.1), math.inf),
        (pb.MeanField(), math.inf),
    ],
)
def test_number_of_outcomes_of_a_site(method, outcomes):
    q = posterior(patched(nn.Linear(3, 4), method))
    assert q.num_outcomes == outcomes
    assert q.log10_outcomes == pytest.approx(math.log10(outcomes) if outcomes < math.inf else math.inf)


def test_dropout_has_two_to_the_units_outcomes_for_each_example_which_is_uncountable():
    q = posterior(patched(nn.Linear(3, 4), pb.Dropout(0.1)))
    assert q.num_outcomes == math.inf
    assert q.log10_outcomes == pytest.approx(3 * math.log10(2))


# Moments and components


@pytest.mark.parametrize("tie", ["network", "site", "unit", "element"])
def test_the_mean_of_a_posterior_is_the_average_over_all_draws(tie):
    method = pb.Mixture(components=2, tie=tie, zero=True, probabilities=(0.5, 0.2, 0.3), mix_bias=tie != "site")
    model = patched(nn.Linear(2, 1), method)
    q = posterior(model)
    draws = pb.Draws.enumerate(model)
    for name, values in q.realize(q.draw(draws)).items():
        average = torch.tensordot(draws.weights, values, dims=1)
        torch.testing.assert_close(q.mean(name, q.stored(name)), average, rtol=1e-12, atol=1e-14)


def test_components_are_numbered_and_the_last_may_be_zero():
    q = posterior(patched(nn.Linear(2, 2), pb.Mixture(components=2, zero=True)))
    stored = q.stored("weight")
    assert torch.equal(q.component("weight", stored, 1), stored[1])
    assert torch.equal(q.component("weight", stored, 2), torch.zeros(2, 2, dtype=torch.float64))
    for number in (3, -1):
        with pytest.raises(PatchbayesError, match="components 0 to 2"):
            q.component("weight", stored, number)


# Starts


def components(model: nn.Module, name: str = "weight", site: str = "0") -> torch.Tensor:
    return pb.patched_sites(model)[site].components(name).detach()


def test_copies_keep_component_zero_exactly_and_move_the_others_by_the_root_mean_square():
    plain = nn.Linear(200, 100, bias=False).double()
    size = plain.weight.detach().square().mean().sqrt()
    start = plain.weight.detach().clone()
    stored = components(patched(plain, pb.EMP(4)))
    assert torch.equal(stored[0], start)
    steps = (stored[1:] - start) / (0.1 * size)
    for step in steps:
        assert_standard_normal(step, detects=0.05)
    assert_uncorrelated(steps[0], steps[1], detects=0.1)


def test_jitter_is_a_multiple_of_the_root_mean_square():
    def steps(jitter):
        torch.manual_seed(0)
        stored = components(patched(nn.Linear(4, 4), pb.EMP(3, jitter=jitter)))
        return stored - stored[0]

    torch.testing.assert_close(steps(0.4), 4 * steps(0.1), rtol=1e-12, atol=1e-15)
    assert not steps(0).any()


def test_a_bias_of_zeros_moves_by_the_size_of_the_weight():
    plain = nn.Linear(50, 5000).double()
    nn.init.zeros_(plain.bias)
    size = plain.weight.detach().square().mean().sqrt()
    stored = components(patched(plain, pb.EMP(4)), "bias")
    assert_standard_normal(stored[1:] / (0.1 * size), detects=0.06)


def test_the_generator_given_to_patch_decides_the_start():
    def start(seed, method):
        torch.manual_seed(0)
        return components(patched(nn.Linear(3, 3), method, generator=seeded(seed)))

    for method in (pb.EMP(3), pb.EMP(3, init="independent")):
        assert torch.equal(start(1, method), start(1, method))
        assert not torch.equal(start(1, method), start(2, method))


def test_independent_components_come_from_the_modules_own_initializer():
    plain = nn.Linear(100, 200)
    start = plain.weight.detach().clone()
    before = torch.get_rng_state()
    stored = components(patched(plain, pb.EMP(3, init="independent")))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(stored[0], start.double())
    bound = 1 / math.sqrt(100)
    for k in (1, 2):
        cells = ((stored[k] / bound + 1) * 5).floor().long().flatten()
        assert_frequencies(torch.bincount(cells, minlength=10), [0.1] * 10, detects=0.02)
        assert_uncorrelated(stored[k], stored[0], detects=0.1)
    assert_uncorrelated(stored[1], stored[2], detects=0.1)


def test_jitter_does_not_touch_independent_components():
    def start(jitter):
        torch.manual_seed(0)
        return components(patched(nn.Linear(3, 3), pb.EMP(3, init="independent", jitter=jitter)))

    assert torch.equal(start(0.1), start(5.0))


@pytest.mark.parametrize("init", ["copies", "independent"])
def test_norm_scale_starts_norm_weights_only(init):
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.LayerNorm(3))
    linear = model[0].weight.detach().clone()
    pb.patch_(model, pb.EMP(3, init=init, norm_scale=0.2, jitter=0), "all")
    for site in ("1", "2"):
        assert torch.equal(components(model, "weight", site), torch.full((3, 3), 0.2))
        assert torch.equal(components(model, "bias", site), torch.zeros(3, 3))
    assert torch.equal(components(model, "weight", "0")[0], linear)


def test_norm_scale_sets_the_size_of_the_jitter():
    def step(norm_scale):
        stored = components(patched(nn.LayerNorm(6), pb.EMP(2, norm_scale=norm_scale)))
        return stored[1] - stored[0]

    torch.testing.assert_close(step(0.2), 0.2 * step(None), rtol=1e-6, atol=0)


def test_independent_start_needs_an_initializer():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x):
            return x * self.weight

    with pytest.raises(PatchbayesError, match=r'(?s)"0".*reset_parameters.*init="copies"'):
        patched(Scale(), pb.EMP(2, init="independent"))
    assert components(patched(Scale(), pb.EMP(2))).shape == (2, 2)


# One draw for each example, statistics for each component


NORMS = {
    "BatchNorm1d": (lambda: nn.BatchNorm1d(3), (3,)),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(3), (3, 2, 2)),
    "LayerNorm": (lambda: nn.LayerNorm(3), (3,)),
    "LayerNorm of a sequence": (lambda: nn.LayerNorm(3), (4, 3)),
    "GroupNorm": (lambda: nn.GroupNorm(1, 3), (3, 2)),
    "InstanceNorm1d": (lambda: nn.InstanceNorm1d(3, affine=True), (3, 4)),
    "RMSNorm": (lambda: nn.RMSNorm(3), (3,)),
}


@pytest.mark.parametrize("norm", NORMS)
def test_a_draw_for_each_example_applies_one_component_to_each_row(norm):
    make, shape = NORMS[norm]
    torch.manual_seed(0)
    plain = make().double()
    x = torch.randn(60, *shape, dtype=torch.float64)
    model = patched(copy.deepcopy(plain), pb.EMP(3, per_example=True, jitter=1.0))
    output = model(x)
    candidates = []
    for k in range(3):
        member = copy.deepcopy(plain)
        with torch.no_grad():
            for name, parameter in member.named_parameters():
                parameter.copy_(components(model, name)[k])
        candidates.append(member(x))
    distances = torch.stack([(output - c).abs().flatten(1).amax(1) for c in candidates])
    assert distances.min(0).values.max() < 1e-12
    assert len(distances.argmin(0).unique()) == 3


def test_without_per_example_all_rows_share_the_draw():
    model = patched(nn.LayerNorm(3), pb.EMP(3, jitter=1.0))
    x = torch.randn(1, 3, dtype=torch.float64).expand(20, 3)
    assert model(x).unique(dim=0).shape[0] == 1
    model = patched(nn.LayerNorm(3), pb.EMP(3, jitter=1.0, per_example=True))
    assert model(x).unique(dim=0).shape[0] == 3


def test_per_component_statistics_move_only_for_the_drawn_component():
    model = patched(nn.BatchNorm1d(2), pb.EMP(3, statistics="per_component")).train()
    x = torch.randn(8, 2, dtype=torch.float64) + 5
    draws = pb.Draws.enumerate(model)
    pb.forward_draws(model, x, draws[1])
    means = model[0].component_running_mean
    k = int(draws[1].assignments()[0, 0])
    torch.testing.assert_close(means[k], 0.1 * x.mean(0))
    assert not means[[i for i in range(3) if i != k]].any()


# The mean-field Gaussian


@pytest.mark.parametrize("scale", [0.1, 0.5])
def test_mean_field_starts_at_the_modules_value_with_a_deviation_relative_to_its_size(scale):
    plain = nn.Linear(4, 3).double()
    start = {name: p.detach().clone() for name, p in plain.named_parameters()}
    model = patched(plain, pb.MeanField(scale=scale))
    for name, value in start.items():
        mean, before_softplus = components(model, name)
        assert torch.equal(mean, value)
        deviation = np.log1p(np.exp(before_softplus.numpy()))
        np.testing.assert_allclose(deviation, scale * np.sqrt((value.numpy() ** 2).mean()), rtol=1e-10)


def test_mean_field_draws_are_mean_plus_deviation_times_standard_normal_noise():
    model = patched(nn.Linear(100, 100), pb.MeanField(scale=0.5))
    q = posterior(model)
    mean, before_softplus = components(model, "weight")
    values = q.realize(q.draw(pb.Draws.sample(model, 2, seeded(1))))["weight"].detach()
    noise = (values - mean) / nn.functional.softplus(before_softplus)
    assert_standard_normal(noise[0], detects=0.06)
    assert_uncorrelated(noise[0], noise[1], detects=0.1)


def test_mean_field_gradients_are_the_reparametrized_ones():
    """w = m + softplus(s) eps: dL/dm = dL/dw and dL/ds = dL/dw eps sigmoid(s)."""
    torch.manual_seed(0)
    model = patched(nn.Linear(3, 2), pb.MeanField(scale=0.5))
    x, target = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)
    q = posterior(model)
    one = pb.Draws.sample(model, 1, seeded(5))
    (pb.forward_draws(model, x, one)[0] - target).square().sum().backward()
    drawn = {name: value[0].detach().numpy() for name, value in q.realize(q.draw(one)).items()}
    residual = x.numpy() @ drawn["weight"].T + drawn["bias"] - target.numpy()
    outer = {"weight": 2 * residual.T @ x.numpy(), "bias": 2 * residual.sum(0)}
    for name, gradient in outer.items():
        mean, s = components(model, name).numpy()
        noise = (drawn[name] - mean) / np.log1p(np.exp(s))
        ours = pb.patched_sites(model)["0"].components(name).grad.numpy()
        np.testing.assert_allclose(ours[0], gradient, rtol=1e-10)
        np.testing.assert_allclose(ours[1], gradient * noise / (1 + np.exp(-s)), rtol=1e-9, atol=1e-12)


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
        pb.Mixture(**options)


@pytest.mark.parametrize("rate", [-0.1, 1.0, math.nan])
def test_rates_outside_zero_and_one_are_refused(rate):
    for method in (pb.Dropout, pb.DropConnect):
        with pytest.raises(PatchbayesError, match="probability to drop"):
            method(rate)


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf])
def test_a_mean_field_scale_must_be_positive(scale):
    with pytest.raises(PatchbayesError, match="above 0"):
        pb.MeanField(scale=scale)


@pytest.mark.parametrize(
    ("module", "method", "complaint"),
    [
        (nn.Linear(2, 2), pb.EMP(2, per_example=True), "norm layers can take a draw"),
        (nn.BatchNorm1d(2), pb.ECMP(2, statistics="per_component"), "one component a layer"),
    ],
)
def test_a_method_that_does_not_fit_a_layer_is_refused_and_the_network_is_untouched(module, method, complaint):
    model = nn.Sequential(module)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(PatchbayesError, match=f'(?s)"0".*{complaint}'):
        pb.patch_(model, method, "0")
    assert not pb.is_patched(model)
    assert model.state_dict().keys() == before.keys()


@pytest.mark.parametrize("method", [*METHODS.values(), pb.Dropout(0.1), pb.EMP(2, per_example=True, norm_scale=0.2)])
def test_methods_survive_json(method):
    assert method_from_config(json.loads(json.dumps(method.config()))) == method
