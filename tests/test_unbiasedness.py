"""Theorem of appendix B.4 as an equality: averaged over all assignments, Algorithm 1 gives the exact expectation.

Value and gradient of the log-likelihood, from our draws with autograd, against sums over all assignments in NumPy with a
hand-written chain rule.
"""

import ast
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import patchbayes as pb
from reference import family, mlp
from statistics_helper import assert_frequencies
from stored import stored_values

LAYERS = ("0", "1", "3")
UNITS = {
    "0": {"weight": family.linear_units(2, 3), "bias": family.constant_unit(2)},
    "1": {"weight": family.elementwise_units(2), "bias": family.constant_unit(2)},
    "3": {"weight": family.linear_units(2, 2), "bias": family.constant_unit(2)},
}


@dataclass
class Scheme:
    """What is passed to patch_, and what the reference has to know: layer -> (tie, probabilities, bias mixed)."""

    rules: dict
    sites: dict[str, tuple[str, tuple[float, ...], bool]]


THIRDS, HALVES = (1 / 3, 1 / 3, 1 / 3), (1 / 2, 1 / 2)

SCHEMES = {
    "EMP": Scheme({"all": pb.EMP(3)}, dict.fromkeys(LAYERS, ("site", THIRDS, True))),
    "EMP, unequal p": Scheme(
        {"1+3": pb.EMP(3, probabilities=(0.5, 0.2, 0.3))},
        dict.fromkeys(("1", "3"), ("site", (0.5, 0.2, 0.3), True)),
    ),
    "ECMP": Scheme({"norm+output": pb.ECMP(2)}, dict.fromkeys(("1", "3"), ("element", HALVES, True))),
    "ECMP, unequal p": Scheme(
        {"1": pb.ECMP(3, probabilities=(0.7, 0.1, 0.2))}, {"1": ("element", (0.7, 0.1, 0.2), True)}
    ),
    "DropConnect": Scheme({"3": pb.posteriors.DropConnect(0.3)}, {"3": ("element", (0.7, 0.3), False)}),
    "dropout of columns": Scheme(
        {"linear": pb.posteriors.Mixture(components=1, tie="unit", zero=True, probabilities=(0.8, 0.2))},
        dict.fromkeys(("0", "3"), ("unit", (0.8, 0.2), False)),
    ),
    "columns of two components": Scheme(
        {"linear": pb.posteriors.Mixture(components=2, tie="unit")}, dict.fromkeys(("0", "3"), ("unit", HALVES, True))
    ),
    "Ensemble": Scheme({"all": pb.Ensemble(3)}, dict.fromkeys(LAYERS, ("network", THIRDS, True))),
    "Ensemble, unequal p": Scheme(
        {"all": pb.Ensemble(2, probabilities=(0.9, 0.1))}, dict.fromkeys(LAYERS, ("network", (0.9, 0.1), True))
    ),
    "schemes mixed": Scheme(
        {
            "norm": pb.EMP(3),
            "output": pb.posteriors.DropConnect(0.4),
            "0": pb.posteriors.Mixture(components=1, tie="unit", zero=True, probabilities=(0.9, 0.1)),
        },
        {"1": ("site", THIRDS, True), "3": ("element", (0.6, 0.4), False), "0": ("unit", (0.9, 0.1), False)},
    ),
}


def make_network(*, train: bool = True) -> nn.Sequential:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Tanh(), nn.Linear(2, 2)).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    model[1].running_mean.normal_()
    model[1].running_var.uniform_(0.5, 2.0)
    return model.train(train)


def norm_settings(model: nn.Sequential) -> dict:
    statistics = (model[1].running_mean.numpy().copy(), model[1].running_var.numpy().copy())
    return {"eps": model[1].eps, "statistics": None if model.training else statistics}


class Reference:
    """The family over the same network, read from the stored components; everything after that is NumPy."""

    def __init__(self, model: nn.Sequential, scheme: Scheme, settings: dict) -> None:
        self.settings = settings
        self.parameters: dict[str, dict[str, family.Parameter]] = {}
        self.probabilities: list[tuple[float, ...]] = []
        for layer in LAYERS:
            mixed = {}
            if layer in scheme.sites:
                tie, p, mix_bias = scheme.sites[layer]
                units = {n: u for n, u in UNITS[layer].items() if mix_bias or n != "bias"}
                first = 0 if tie == "network" else len(self.probabilities)
                mixed, following = family.number_groups(units, tie, first)
                self.probabilities += [p] * (following - len(self.probabilities))
            self.parameters[layer] = {}
            for name in ("weight", "bias"):
                values = stored_values(model, layer, name)
                self.parameters[layer][name] = family.Parameter(values, mixed.get(name))

    def network(self, z: np.ndarray) -> list[mlp.Layer]:
        layers = {
            layer: {name: parameter.realize(z) for name, parameter in named.items()}
            for layer, named in self.parameters.items()
        }
        return [
            ("linear", layers["0"], {}),
            ("batch norm", layers["1"], self.settings),
            ("tanh", {}, {}),
            ("linear", layers["3"], {}),
        ]

    def expectation(self, x: np.ndarray, log_likelihood) -> tuple[float, dict[tuple[str, str], np.ndarray]]:
        """E_z of the log-likelihood, and the gradient with respect to every component."""
        value = 0.0
        gradients = {
            (layer, name): np.zeros_like(parameter.components)
            for layer, named in self.parameters.items()
            for name, parameter in named.items()
        }
        for z, probability in family.assignments(self.probabilities):
            layers = self.network(z)
            output, caches = mlp.forward(layers, x)
            log_prob, gradient = log_likelihood(output)
            value += probability * log_prob
            for layer, own in zip(("0", "1", None, "3"), mlp.backward(layers, caches, gradient), strict=True):
                for name, outer in own.items():
                    scattered = self.parameters[layer][name].scatter(z, outer)
                    gradients[layer, name] += probability * scattered
        return value, gradients


X = np.random.default_rng(1).normal(size=(5, 3))
CLASSES = np.array([0, 1, 1, 0, 1])
Y = np.random.default_rng(2).normal(size=(5, 2))


def classification(output):
    return mlp.categorical_log_likelihood(output, CLASSES)


def regression(output):
    return mlp.gaussian_log_likelihood(output, Y, 1.7)


def classification_in_torch(outputs: torch.Tensor) -> torch.Tensor:
    """(S,) log-likelihoods of outputs (S, B, C)."""
    return pb.likelihoods.Categorical().log_prob(outputs, torch.tensor(CLASSES)).mean(1)


def regression_in_torch(outputs: torch.Tensor) -> torch.Tensor:
    return pb.likelihoods.Gaussian(1.7).log_prob(outputs, torch.from_numpy(Y)).mean(1)


LIKELIHOODS = {
    "classification": (classification, classification_in_torch),
    "regression": (regression, regression_in_torch),
}


def parameters_of(model: nn.Sequential) -> dict[tuple[str, str], nn.Parameter]:
    """What is stored for each parameter, in whatever shape."""
    found = {}
    for layer in LAYERS:
        own = pb.patched_sites(model)[layer].parameters() if layer in pb.patched_sites(model) else {}
        own = own or dict(model[int(layer)].named_parameters())
        found |= {(layer, name.rpartition(".")[2]): parameter for name, parameter in own.items()}
    assert len(found) == 2 * len(LAYERS)
    return found


def assert_gradients(model: nn.Sequential, expected: dict[tuple[str, str], np.ndarray]) -> None:
    for key, tensor in parameters_of(model).items():
        np.testing.assert_allclose(tensor.grad, expected[key].reshape(tensor.shape), rtol=1e-10, atol=1e-10)
    assert sum(np.abs(gradient).max() > 1e-4 for gradient in expected.values()) >= 5  # all but a bias before batch norm


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_value_and_gradient_of_single_draws_average_to_the_exact_expectation(scheme, likelihood):
    """S = 1, as in training: a forward and a backward pass for each draw, batch norm with the statistics of the batch."""
    by_numpy, by_torch = LIKELIHOODS[likelihood]
    model = make_network()
    settings = norm_settings(model)
    pb.patch_(model, SCHEMES[scheme].rules)
    draws = pb.Draws.enumerate(model)
    x, value = torch.from_numpy(X), 0.0
    for one, weight in zip(draws, draws.weights, strict=True):
        with pb.use_draw(model, one):
            log_likelihood = by_torch(model(x)[None])[0]
        (weight * log_likelihood).backward()
        value += (weight * log_likelihood).item()
    expected, gradients = Reference(model, SCHEMES[scheme], settings).expectation(X, by_numpy)
    assert value == pytest.approx(expected, rel=1e-10, abs=1e-10)
    assert_gradients(model, gradients)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_all_draws_at_once_are_the_exact_marginalization(scheme):
    """S = all outcomes: forward_draws, and the predictive of `predict`, in evaluation mode with running statistics."""
    model = make_network(train=False)
    settings = norm_settings(model)
    pb.patch_(model, SCHEMES[scheme].rules)
    draws = pb.Draws.enumerate(model)
    outputs = pb.forward_draws(model, torch.from_numpy(X), draws)
    value = (draws.weights * classification_in_torch(outputs)).sum()
    value.backward()
    reference = Reference(model, SCHEMES[scheme], settings)
    expected, gradients = reference.expectation(X, classification)
    assert value.item() == pytest.approx(expected, rel=1e-10, abs=1e-10)
    assert_gradients(model, gradients)

    probs = sum(
        probability * np.exp(mlp.log_softmax(mlp.forward(reference.network(z), X)[0]))
        for z, probability in family.assignments(reference.probabilities)
    )
    ours = torch.tensordot(draws.weights, outputs.softmax(-1), dims=1)
    np.testing.assert_allclose(ours.detach(), probs, rtol=1e-10)
    prediction = pb.predict(model, torch.from_numpy(X), draws)
    np.testing.assert_allclose(prediction.probs, probs, rtol=1e-10)
    assert not prediction.standard_error.any()


def test_the_negative_elbo_of_all_draws_is_the_exact_one():
    model = make_network()
    settings = norm_settings(model)
    pb.patch_(model, SCHEMES["EMP"].rules)
    outputs = pb.forward_draws(model, torch.from_numpy(X), pb.Draws.enumerate(model))
    ours = pb.objective.negative_elbo(outputs, torch.tensor(CLASSES), pb.kl(model), num_data=70)
    expected, _ = Reference(model, SCHEMES["EMP"], settings).expectation(X, classification)
    squares = sum(float((t.detach() ** 2).sum()) for t in parameters_of(model).values())
    assert ours.item() == pytest.approx(-expected + 0.5 * squares / 3 / 70, rel=1e-10)


def test_an_average_that_forgets_the_probabilities_is_not_the_expectation():
    model = make_network()
    settings = norm_settings(model)
    pb.patch_(model, SCHEMES["EMP, unequal p"].rules)
    values = classification_in_torch(pb.forward_draws(model, torch.from_numpy(X), pb.Draws.enumerate(model)))
    expected, _ = Reference(model, SCHEMES["EMP, unequal p"], settings).expectation(X, classification)
    assert abs(values.mean().item() - expected) > 1e-3


def test_the_reference_imports_nothing_of_ours():
    for path in Path(family.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = (
                [a.name for a in node.names] if isinstance(node, ast.Import) else [getattr(node, "module", None) or ""]
            )
            assert not {name.split(".")[0] for name in names} & {"patchbayes", "torch"}, path


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_the_reference_gradients_are_those_of_finite_differences(train, likelihood):
    model = make_network(train=train)
    settings = norm_settings(model)
    pb.patch_(model, SCHEMES["EMP"].rules)
    reference = Reference(model, SCHEMES["EMP"], settings)
    by_numpy = LIKELIHOODS[likelihood][0]
    _, gradients = reference.expectation(X, by_numpy)
    step = 1e-5
    for (layer, name), gradient in gradients.items():
        components = reference.parameters[layer][name].components = reference.parameters[layer][name].components.copy()
        for place in ((0, *[0] * (components.ndim - 1)), (2, *[1] * (components.ndim - 1))):
            values = []
            for sign in (1, -1):
                components[place] += sign * step
                values.append(reference.expectation(X, by_numpy)[0])
                components[place] -= sign * step
            assert (values[0] - values[1]) / (2 * step) == pytest.approx(gradient[place], rel=1e-5, abs=1e-8)


# The network's own draws follow the same law


def outcome_counts(outputs: torch.Tensor, candidates: torch.Tensor) -> list[int]:
    """How often each candidate output came."""
    distances = (outputs[:, None] - candidates[None]).abs().flatten(2).amax(-1)
    assert distances.min(1).values.max() < 1e-12
    return torch.bincount(distances.argmin(1), minlength=len(candidates)).tolist()


def own_draws(scheme: str, number: int) -> tuple[list[int], torch.Tensor]:
    model = make_network()
    pb.patch_(model, SCHEMES[scheme].rules)
    x = torch.from_numpy(X)
    draws = pb.Draws.enumerate(model)
    with torch.no_grad():
        candidates = pb.forward_draws(model, x, draws)
        outputs = torch.stack([model(x) for _ in range(number)])
    return outcome_counts(outputs, candidates), draws.weights


@pytest.mark.parametrize("scheme", ["EMP, unequal p", "Ensemble", "Ensemble, unequal p"])
def test_training_draws_come_with_the_probabilities_of_the_enumeration(scheme):
    counts, weights = own_draws(scheme, 3000)
    assert_frequencies(counts, weights, detects=0.08)


def test_training_draws_of_wrong_probabilities_are_found():
    counts, _ = own_draws("Ensemble, unequal p", 3000)
    with pytest.raises(AssertionError):
        assert_frequencies(counts, [0.8, 0.2], detects=0.08)
