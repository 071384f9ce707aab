"""Likelihoods: densities against SciPy, what is ignored, what a file holds of them, and one written outside the package."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import patchbayes as pb
from patchbayes.errors import PatchbayesError
from patchbayes.likelihoods import Likelihood, checked_likelihood, likelihood_from_config
from patchbayes.prediction import ClassPrediction, MeanPrediction


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class Poisson(Likelihood):
    """Counts: the output is the logarithm of the rate. A likelihood as a user writes it, outside the package."""

    offers = "MeanPrediction"

    def __init__(self, offset: float = 0.0) -> None:
        super().__init__()
        self.offset = offset

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        log_rate = outputs + self.offset
        return (targets * log_rate - log_rate.exp() - torch.lgamma(targets + 1)).sum(-1)

    def predictive(self, outputs: Tensor) -> dict[str, Tensor]:
        rate = (outputs + self.offset).exp()
        return {"mean": rate, "variance": rate}


# Densities


def test_categorical_ignores_labels_and_does_not_count_them():
    outputs = normal(3, 6, 4)
    targets = torch.tensor([0, -100, 3, 1, -100, 2])
    log_prob = pb.likelihoods.Categorical().log_prob(outputs, targets)
    table = scipy.special.log_softmax(outputs.numpy(), -1)
    expected = np.stack([table[:, b, y] if y >= 0 else np.zeros(3) for b, y in enumerate(targets.tolist())], 1)
    np.testing.assert_allclose(log_prob.numpy(), expected, rtol=1e-12)
    mean = pb.likelihoods.Categorical().expected_log_prob(outputs, targets)
    reference = torch.stack([F.cross_entropy(out, targets) for out in outputs]).mean()
    torch.testing.assert_close(mean, -reference, rtol=1e-12, atol=0)
    other = pb.likelihoods.Categorical(ignore_index=3)
    assert other.log_prob(outputs, targets.clamp_min(0))[:, 2].abs().max() == 0
    assert pb.likelihoods.Categorical().counted(targets).tolist() == [True, False, True, True, False, True]
    assert other.counted(targets.clamp_min(0)).tolist() == [True, True, False, True, True, True]


def test_ignored_labels_have_no_gradient_and_an_ignored_batch_none_at_all():
    outputs = normal(1, 3, 4).requires_grad_()
    pb.likelihoods.Categorical().expected_log_prob(outputs, torch.tensor([2, -100, 1])).backward()
    assert (outputs.grad[0, 1] == 0).all()
    assert (outputs.grad[0, 0] != 0).all()
    nothing = pb.likelihoods.Categorical().expected_log_prob(outputs, torch.full((3,), -100))
    assert float(nothing.detach()) == 0


def test_an_example_with_many_labels_counts_if_one_of_them_does():
    outputs, targets = normal(2, 3, 5, 4), torch.randint(5, (3, 4), generator=torch.Generator().manual_seed(1))
    targets[0] = -100
    targets[1, :3] = -100
    likelihood = pb.likelihoods.Categorical(class_dim=1)
    assert likelihood.counted(targets).tolist() == [False, True, True]
    table = scipy.special.log_softmax(outputs.numpy(), 2)
    total = sum(
        table[s, b, int(targets[b, i]), i] for s in range(2) for b in range(3) for i in range(4) if targets[b, i] >= 0
    )
    assert float(likelihood.expected_log_prob(outputs, targets)) == pytest.approx(total / (2 * 2), rel=1e-12)


@settings(max_examples=30, deadline=None)
@given(axis=st.integers(1, 3), seed=st.integers(0, 1000), negative=st.booleans())
def test_classes_on_any_axis_are_the_same_classes(axis, seed, negative):
    last = normal(2, 3, 4, 5, 6, seed=seed)  # (S, B, H, W, C)
    targets = torch.randint(6, (3, 4, 5), generator=torch.Generator().manual_seed(seed))
    moved = last.movedim(-1, axis + 1)
    likelihood = pb.likelihoods.Categorical(class_dim=axis - 4 if negative else axis)
    torch.testing.assert_close(
        likelihood.log_prob(moved, targets), pb.likelihoods.Categorical().log_prob(last, targets)
    )
    torch.testing.assert_close(likelihood.predictive(moved)["log_probs"], torch.log_softmax(last, -1))


def test_gaussian_with_one_precision_for_each_output():
    outputs, targets = normal(3, 5, 2), normal(5, 2, seed=1)
    tau = [4.0, 0.25]
    expected = scipy.stats.norm.logpdf(targets.numpy(), outputs.numpy(), np.asarray(tau) ** -0.5).sum(-1)
    likelihood = pb.likelihoods.Gaussian(precision=tau, learn=True)
    np.testing.assert_allclose(likelihood.log_prob(outputs, targets).detach().numpy(), expected, rtol=1e-12)
    assert likelihood.log_precision.shape == (2,)
    likelihood.expected_log_prob(outputs, targets).backward()
    gradient = 0.5 * (1 - np.asarray(tau) * ((outputs - targets).numpy() ** 2).mean((0, 1)))
    np.testing.assert_allclose(likelihood.log_precision.grad.numpy(), gradient, rtol=1e-10)
    found = likelihood.predictive(outputs)
    np.testing.assert_allclose(found["variance"].numpy(), np.broadcast_to([0.25, 4.0], (3, 5, 2)), rtol=1e-12)
    assert not found["variance"].requires_grad
    for wrong in (normal(3, 5, 3), normal(3, 5)):
        with pytest.raises(PatchbayesError, match=r"expected an output \(B, 2\)"):
            likelihood.log_prob(wrong, wrong[0])


def test_heteroscedastic_density_is_that_of_normals_with_their_own_variance():
    outputs, targets = normal(3, 5, 4), normal(5, 2, seed=1)
    mean, deviation = outputs[..., :2].numpy(), np.exp(outputs[..., 2:].numpy() / 2)
    expected = scipy.stats.norm.logpdf(targets.numpy(), mean, deviation).sum(-1)
    likelihood = pb.likelihoods.HeteroscedasticGaussian()
    np.testing.assert_allclose(likelihood.log_prob(outputs, targets).numpy(), expected, rtol=1e-12)
    swapped = torch.cat([outputs[..., 2:], outputs[..., :2]], -1)
    assert not np.allclose(likelihood.log_prob(swapped, targets).numpy(), expected)
    np.testing.assert_allclose(likelihood.predictive(outputs)["variance"].numpy(), deviation**2, rtol=1e-12)
    with pytest.raises(PatchbayesError, match="half as many"):
        likelihood.log_prob(outputs, targets[:, :1])
    with pytest.raises(PatchbayesError, match="expected an output"):
        likelihood.log_prob(normal(3, 5, 3), targets)


@pytest.mark.parametrize("shape", [(5, 3), (5, 1), (5,), (5, 2, 2)], ids=str)
def test_bernoulli_is_the_binary_cross_entropy_of_all_labels(shape):
    outputs = 3 * normal(2, *shape)
    targets = (normal(*shape, seed=1) > 0).long()
    each = scipy.stats.bernoulli.logpmf(targets.numpy(), scipy.special.expit(outputs.numpy()))
    expected = each.reshape(2, 5, -1).sum(-1)
    np.testing.assert_allclose(pb.likelihoods.Bernoulli().log_prob(outputs, targets).numpy(), expected, rtol=1e-9)
    far = pb.likelihoods.Bernoulli().log_prob(torch.full_like(outputs, 1e4), torch.zeros_like(targets))
    assert torch.isfinite(far).all()


def test_bernoulli_ignores_labels_that_nobody_looked_at():
    outputs = normal(2, 3, 2)
    targets = torch.tensor([[1, -100], [-100, -100], [0, 1]])
    log_p, log_q = (scipy.special.log_expit(sign * outputs.numpy()) for sign in (1, -1))
    expected = np.stack([log_p[:, 0, 0], np.zeros(2), log_q[:, 2, 0] + log_p[:, 2, 1]], 1)
    np.testing.assert_allclose(pb.likelihoods.Bernoulli().log_prob(outputs, targets).numpy(), expected, rtol=1e-12)
    assert float(pb.likelihoods.Bernoulli().expected_log_prob(outputs, targets)) == pytest.approx(
        expected.sum() / 4, rel=1e-12
    )
    other = pb.likelihoods.Bernoulli(ignore_index=-1)
    np.testing.assert_allclose(other.log_prob(outputs, targets.clamp_min(-1)).numpy(), expected, rtol=1e-12)
    with pytest.raises(PatchbayesError, match="between 0 and 1"):
        other.log_prob(outputs, targets)


def test_bernoulli_takes_shares_and_works_under_vmap():
    outputs, shares = normal(2, 4, 3), torch.rand(4, 3, dtype=torch.float64)
    expected = -F.binary_cross_entropy_with_logits(outputs, shares.expand(2, 4, 3), reduction="none").sum(-1)
    torch.testing.assert_close(pb.likelihoods.Bernoulli().log_prob(outputs, shares), expected)
    one = torch.func.vmap(
        lambda o, t: pb.likelihoods.Bernoulli().log_prob(o[None, None], t[None])[0, 0], in_dims=(0, 0)
    )
    torch.testing.assert_close(one(outputs[0], shares), expected[0])


@pytest.mark.parametrize("skewed", [True, False])
def test_weights_of_draws_enter_the_expectation(skewed):
    outputs, targets = normal(3, 5, 4), torch.randint(4, (5,), generator=torch.Generator().manual_seed(1))
    weights = torch.tensor([0.7, 0.2, 0.1] if skewed else [1 / 3] * 3, dtype=torch.float64)
    table = scipy.special.log_softmax(outputs.numpy(), -1)
    expected = sum(weights[s].item() * np.mean([table[s, b, targets[b]] for b in range(5)]) for s in range(3))
    found = pb.likelihoods.Categorical().expected_log_prob(outputs, targets, weights=weights)
    assert float(found) == pytest.approx(expected, rel=1e-12)
    plain = float(pb.likelihoods.Categorical().expected_log_prob(outputs, targets))
    assert (plain == pytest.approx(expected, rel=1e-12)) != skewed
    with pytest.raises(PatchbayesError, match="one weight for each of the 3 draws"):
        pb.likelihoods.Categorical().expected_log_prob(outputs, targets, weights[:2])


def test_training_is_not_tempered():
    outputs, targets = normal(2, 5, 4), torch.randint(4, (5,), generator=torch.Generator().manual_seed(1))
    likelihood = pb.likelihoods.Categorical()
    before = likelihood.log_prob(outputs, targets)
    likelihood.set_temperature_(3.0, mean_temperature=0.2)
    assert torch.equal(likelihood.log_prob(outputs, targets), before)


# What a file holds

ALL = {
    "Categorical": pb.likelihoods.Categorical(class_dim=1, ignore_index=-1),
    "Gaussian": pb.likelihoods.Gaussian(3.0),
    "Gaussian, several": pb.likelihoods.Gaussian([3.0, 0.5], learn=True),
    "HeteroscedasticGaussian": pb.likelihoods.HeteroscedasticGaussian(),
    "Bernoulli": pb.likelihoods.Bernoulli(ignore_index=-7),
    "Poisson": Poisson(offset=0.3),
}


@pytest.mark.parametrize("likelihood", ALL.values(), ids=ALL)
def test_description_and_tensors_make_the_same_likelihood_again(likelihood):
    likelihood.set_temperature_(1.7, mean_temperature=0.6)
    with torch.no_grad():
        for parameter in likelihood.parameters():
            parameter += 0.37  # as if it had been learned
    config = json.loads(json.dumps(likelihood.config()))
    assert config["likelihood"] == type(likelihood).__name__
    again = likelihood_from_config(config, {key: value.clone() for key, value in likelihood.state_dict().items()})
    assert type(again) is type(likelihood)
    assert again.config() == likelihood.config()
    assert {k: v.tolist() for k, v in again.state_dict().items()} == {
        k: v.tolist() for k, v in likelihood.state_dict().items()
    }
    assert [p.requires_grad for p in again.parameters()] == [p.requires_grad for p in likelihood.parameters()]
    assert "temperature=1.7" in repr(again)
    assert "mean_temperature=0.6" in repr(again)
    fresh = likelihood_from_config(config)
    assert float(fresh.temperature) == float(fresh.mean_temperature) == 1


def test_a_file_with_an_unknown_likelihood_says_what_to_import_and_imports_nothing(tmp_path):
    (tmp_path / "counts.py").write_text("raise SystemExit('imported')")
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from patchbayes.likelihoods import likelihood_from_config\n"
        "try:\n    likelihood_from_config({'likelihood': 'Count', 'module': 'counts', 'offset': 1.0})\n"
        "except ValueError as error:\n    print(error)\n"
        "print('counts' in sys.modules)"
    )
    found = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True
    ).stdout
    assert "the likelihood 'Count' is not known; known are Bernoulli, Categorical, Gaussian" in found
    assert "import the module counts" in found
    assert found.endswith("False\n")


def test_tensors_without_temperatures_are_those_of_version_0_1_0():
    likelihood = nn.ModuleDict({"likelihood": pb.likelihoods.Gaussian().set_temperature_(2.0, mean_temperature=3.0)})
    likelihood.load_state_dict({"likelihood.log_precision": torch.tensor(0.5)})
    found = likelihood["likelihood"]
    assert (float(found.log_precision), float(found.temperature), float(found.mean_temperature)) == (0.5, 1.0, 1.0)


def test_damaged_descriptions_are_refused():
    state = pb.likelihoods.Gaussian().state_dict()
    cases = [
        ({}, None, "None is not known"),
        ({"likelihood": ["Gaussian"]}, None, "not known"),
        ({"likelihood": "Gaussian", "precision": 1.0, "color": 3}, None, "color"),
        ({"likelihood": "Gaussian", "precision": -1.0, "learn": False}, None, "above 0"),
        ({"likelihood": "Gaussian", "precision": [1.0, 2.0], "learn": False}, state, "size mismatch"),
        ({"likelihood": "Gaussian", "precision": 1.0, "learn": False}, {}, "Missing key"),
        ({"likelihood": "Categorical"}, state, "Unexpected key"),
        (pb.likelihoods.Gaussian().config(), state | {"temperature": torch.tensor(0.0)}, "temperature above 0"),
        (
            pb.likelihoods.Gaussian().config(),
            state | {"mean_temperature": torch.tensor(math.nan)},
            "mean_temperature above 0",
        ),
    ]
    for config, tensors, message in cases:
        with pytest.raises(PatchbayesError, match=message):
            likelihood_from_config(config, tensors)


def test_what_cannot_be_described_says_why():
    class Forgetful(Poisson):
        def __init__(self, floor=0.0):
            super().__init__()

    class Unwritable(Poisson):
        def __init__(self, floor=nn.ReLU()):  # noqa: B008
            super().__init__()
            self.floor = floor

    with pytest.raises(PatchbayesError, match="takes floor, which it does not keep"):
        Forgetful().config()
    with pytest.raises(PatchbayesError, match="cannot be described in a file"):
        Unwritable().config()
    with pytest.raises(PatchbayesError, match="has a likelihood of that name"):
        type("Gaussian", (Poisson,), {})
    assert type(likelihood_from_config(pb.likelihoods.Gaussian().config())) is pb.likelihoods.Gaussian


def test_low_precision_networks_keep_the_precise_temperature():
    network = nn.Sequential(nn.Linear(2, 2))
    network.likelihood = pb.likelihoods.Gaussian(3.0).set_temperature_(1.2345678901234)
    network.to(torch.bfloat16)
    assert network[0].weight.dtype == torch.bfloat16
    assert float(network.likelihood.temperature) == 1.2345678901234
    assert network.likelihood.log_precision.dtype == torch.float64
    assert network.likelihood.to("meta").temperature.device.type == "meta"


# One written outside the package


def counting_network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 2)).double()
    pb.patch_(model, pb.EMP(3, jitter=0.6))
    return model


def test_a_likelihood_of_ones_own_predicts_and_trains():
    model, x = counting_network(), normal(5, 3)
    draws = pb.Draws.enumerate(model)
    prediction = pb.predict(model, x, draws, likelihood=Poisson(0.3), keep_draws=True)
    assert type(prediction) is MeanPrediction
    rates = []
    with torch.no_grad():
        for draw in draws:
            with pb.use_draw(model.eval(), draw):
                rates.append((model(x) + 0.3).exp().numpy())
    rates = np.stack(rates)
    np.testing.assert_allclose(prediction.mean.numpy(), rates.mean(0), rtol=1e-10)
    np.testing.assert_allclose(prediction.aleatoric_variance.numpy(), rates.mean(0), rtol=1e-10)
    np.testing.assert_allclose(prediction.epistemic_variance.numpy(), rates.var(0), rtol=1e-8)
    np.testing.assert_allclose(prediction.draw_means.numpy(), rates, rtol=1e-10)
    with pytest.raises(PatchbayesError, match="not the law of y"):
        prediction.sample()
    targets = torch.poisson(torch.tensor(rates.mean(0)), generator=torch.Generator().manual_seed(1))
    expected = scipy.stats.poisson.logpmf(targets.numpy(), rates).sum(-1).mean()
    outputs = torch.tensor(np.log(rates) - 0.3)
    loss = pb.objective.negative_elbo(outputs, targets, 0.0, num_data=1, likelihood=Poisson(0.3))
    assert float(loss) == pytest.approx(-expected, rel=1e-10)


def test_a_predictive_that_does_not_fit_what_is_offered_is_refused():
    class WrongName(Poisson):
        def predictive(self, outputs):
            return {"probs": outputs}

    class WrongShape(Poisson):
        def predictive(self, outputs):
            return {"mean": outputs.exp(), "variance": torch.ones(2)}

    class Unknown(Poisson):
        offers = "Oracle"

    model, x = counting_network(), normal(5, 3)
    for likelihood, message in ((WrongName(), "mean, variance"), (WrongShape(), r"\(2,\)"), (Unknown(), "'Oracle'")):
        with pytest.raises(PatchbayesError, match=message):
            pb.predict(model, x, 3, likelihood=likelihood)


class CumulativeLogit(Likelihood):
    """Ordered classes: one output, and thresholds that are learned."""

    offers = "ClassPrediction"

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.classes = classes
        self.thresholds = nn.Parameter(torch.linspace(-1, 1, classes - 1, dtype=torch.float64))

    def predictive(self, outputs: Tensor) -> dict[str, Tensor]:
        below = torch.sigmoid(self.thresholds.sort().values - outputs)
        ends = (torch.zeros_like(outputs), torch.ones_like(outputs))
        return {"log_probs": torch.cat([below, ends[1]], -1).sub(torch.cat([ends[0], below], -1)).log()}

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return pb.likelihoods.Categorical().log_prob(self.predictive(outputs)["log_probs"], targets)


def test_a_likelihood_with_parameters_of_its_own_offers_classes():
    model, x = counting_network(), normal(5, 3)
    likelihood = CumulativeLogit(4)
    prediction = pb.predict(model, x, 9, likelihood=likelihood, output=lambda y: y[:, :1])
    assert type(prediction) is ClassPrediction
    assert prediction.probs.shape == (5, 4)
    torch.testing.assert_close(prediction.probs.sum(-1), torch.ones(5, dtype=torch.float64))
    again = likelihood_from_config(likelihood.config(), likelihood.state_dict())
    assert torch.equal(again.thresholds, likelihood.thresholds)


# Bad input


def test_bad_input_is_one_sentence():
    outputs, targets = normal(2, 3, 4), torch.tensor([0, 1, 2])
    cases = [
        (lambda: pb.likelihoods.Categorical(class_dim=0), "axis 0 holds the examples"),
        (lambda: pb.likelihoods.Categorical(class_dim=1.5), "expected an integer"),
        (lambda: pb.likelihoods.Categorical(ignore_index=None), "expected an integer"),
        (
            lambda: pb.likelihoods.Categorical().log_prob(outputs, torch.tensor([0, 1, 4])),
            "classes 0 to 3 .* from 0 to 4",
        ),
        (
            lambda: pb.likelihoods.Categorical().log_prob(outputs, torch.tensor([0, -1, 2])),
            "classes 0 to 3 .* from -1 to 2",
        ),
        (lambda: pb.likelihoods.Categorical().log_prob(outputs, targets.double()), "class numbers as targets"),
        (lambda: pb.likelihoods.Categorical().log_prob(outputs, targets > 0), "class numbers as targets"),
        (lambda: pb.likelihoods.Categorical().log_prob(outputs[..., 0], targets), r"use Bernoulli\(\)"),
        (lambda: pb.likelihoods.Categorical(class_dim=3).log_prob(outputs, targets), "with that axis"),
        (lambda: pb.likelihoods.Gaussian(precision=0), "above 0"),
        (lambda: pb.likelihoods.Gaussian(precision="1"), "above 0"),
        (lambda: pb.likelihoods.Gaussian(precision=[1.0, math.inf]), "above 0"),
        (lambda: pb.likelihoods.Gaussian(precision=[]), "above 0"),
        (lambda: pb.likelihoods.Gaussian().log_prob(outputs, targets), "shape of one output"),
        (lambda: pb.likelihoods.Bernoulli(ignore_index=1), "other than 0 and 1"),
        (lambda: pb.likelihoods.Bernoulli().log_prob(outputs, targets), "shape of one output"),
        (lambda: pb.likelihoods.Bernoulli().log_prob(outputs[..., 0], targets), "got values from 0 to 2"),
        (lambda: pb.likelihoods.Categorical().set_temperature_(0.0), "above 0"),
        (lambda: pb.likelihoods.Categorical().set_temperature_(mean_temperature=math.inf), "above 0"),
        (lambda: checked_likelihood("gaussian"), "likelihood='gaussian': expected a likelihood"),
        (lambda: checked_likelihood(pb.likelihoods.Gaussian), r"make one: Gaussian\(\)"),
    ]
    for act, message in cases:
        with pytest.raises(PatchbayesError, match=message):
            act()
