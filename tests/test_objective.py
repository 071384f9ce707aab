"""Negative ELBO, the simplified loss and shared gradients: the formulas of the paper in NumPy, and the scales."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

import patchbayes as pb
from objective_network import Tied, network
from patchbayes.errors import PatchbayesError
from reference.mlp import log_softmax
from stored import stored_values

# Negative ELBO


@pytest.mark.parametrize("draws", [1, 4])
def test_negative_elbo_of_classification_is_the_formula(draws):
    torch.manual_seed(0)
    logits = torch.randn(draws, 5, 3, dtype=torch.float64)
    targets = torch.tensor([0, 2, 1, 1, 0])
    log_probs = log_softmax(logits.numpy())
    likelihood = sum(log_probs[s, b, targets[b]] for s in range(draws) for b in range(5)) / (draws * 5)
    ours = pb.objective.negative_elbo(logits, targets, torch.tensor(12.0, dtype=torch.float64), num_data=600)
    assert ours.item() == pytest.approx(-likelihood + 12.0 / 600, rel=1e-12)


@pytest.mark.parametrize("shape", [(5,), (5, 1), (5, 2)])
@pytest.mark.parametrize("draws", [1, 4])
def test_negative_elbo_of_regression_is_the_formula(draws, shape):
    torch.manual_seed(0)
    means, y = torch.randn(draws, *shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)
    precision, dimensions = 2.5, shape[1] if len(shape) > 1 else 1
    squares = ((means - y) ** 2).numpy().reshape(draws, 5, -1).sum(-1)
    log_density = 0.5 * dimensions * np.log(precision / (2 * np.pi)) - 0.5 * precision * squares
    ours = pb.objective.negative_elbo(means, y, 3.0, num_data=40, likelihood=pb.likelihoods.Gaussian(precision))
    assert ours.item() == pytest.approx(-log_density.mean() + 3.0 / 40, rel=1e-12)


def test_negative_elbo_from_the_network_equals_the_usual_training_loss_for_one_draw():
    model = network().train()
    pb.patch_(model, pb.EMP(3), "norm+output")
    x, y = torch.randn(6, 3, dtype=torch.float64), torch.tensor([0, 1, 1, 0, 1, 0])
    one = pb.Draws.sample(model, 1)
    loss = nn.functional.cross_entropy(pb.forward_draws(model, x, one)[0], y) + pb.kl(model) / 100
    ours = pb.objective.negative_elbo(pb.forward_draws(model, x, one), y, pb.kl(model), num_data=100)
    torch.testing.assert_close(ours, loss, rtol=1e-13, atol=0)


def test_draws_are_averaged_outside_the_logarithm():
    """So the value is never below the loss of the averaged prediction."""
    torch.manual_seed(0)
    logits, targets = 3 * torch.randn(8, 20, 4, dtype=torch.float64), torch.randint(4, (20,))
    averaged = logits.softmax(-1).mean(0).log()
    assert (
        pb.objective.negative_elbo(logits, targets, 0.0, num_data=1) > nn.functional.nll_loss(averaged, targets) + 0.1
    )


def test_the_class_axis_can_be_moved():
    torch.manual_seed(0)
    logits, targets = torch.randn(2, 5, 3, 4, dtype=torch.float64), torch.randint(3, (5, 4))
    moved = pb.objective.negative_elbo(
        logits, targets, 0.0, num_data=1, likelihood=pb.likelihoods.Categorical(class_dim=1)
    )
    last = pb.objective.negative_elbo(logits.movedim(2, -1), targets, 0.0, num_data=1)
    torch.testing.assert_close(moved, last)


def test_an_example_with_many_labels_counts_as_one_example():
    """-(1 / S B) sum_s sum_b log p(y_b): the labels of an image or a sentence are summed, as targets of a regression are."""
    torch.manual_seed(0)
    logits, targets = torch.randn(2, 5, 7, 3, dtype=torch.float64), torch.randint(3, (5, 7))
    by_hand = nn.functional.cross_entropy(
        logits.movedim(-1, 1).reshape(2, 3, 5, 7), targets.expand(2, 5, 7), reduction="sum"
    )
    ours = pb.objective.negative_elbo(logits, targets, 4.0, num_data=50)
    torch.testing.assert_close(ours, by_hand / (2 * 5) + 4.0 / 50)


def test_a_learned_output_precision_maximizes_the_elbo_at_the_inverse_mean_square():
    torch.manual_seed(0)
    means, y = torch.randn(3, 20, 2, dtype=torch.float64), torch.randn(20, 2, dtype=torch.float64)
    best = 1 / (means - y).square().mean().item()
    likelihood = pb.likelihoods.Gaussian(best, learn=True)
    pb.objective.negative_elbo(means, y, 0.0, num_data=20, likelihood=likelihood).backward()
    assert likelihood.log_precision.grad.item() == pytest.approx(0, abs=1e-12)
    likelihood = pb.likelihoods.Gaussian(2.0, learn=True)
    pb.objective.negative_elbo(means, y, 0.0, num_data=20, likelihood=likelihood).backward()
    assert likelihood.log_precision.grad.item() == pytest.approx(0.5 * 2 * (2.0 / best - 1), rel=1e-10)


def test_a_fixed_output_precision_is_not_learned():
    assert not pb.likelihoods.Gaussian(2.0).log_precision.requires_grad
    assert pb.likelihoods.Gaussian(2.0, learn=True).log_precision.requires_grad
    assert pb.likelihoods.Gaussian(2.0).precision.item() == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("outputs", "targets", "options", "complaint"),
    [
        (torch.zeros(2, 5, 3), torch.zeros(5).long(), {"num_data": 0}, "at least 1"),
        (torch.zeros(2, 5, 3), torch.zeros(5).long(), {"num_data": 0.5}, "number of training examples"),
        (torch.zeros(5, 3), torch.zeros(5).long(), {"num_data": 1}, r"model\(x\)\[None\]"),
        (torch.zeros(2, 5, 3), torch.zeros(5), {"num_data": 1}, "class numbers"),
        (
            torch.zeros(2, 5, 1),
            torch.zeros(5),
            {"num_data": 1, "likelihood": pb.likelihoods.Gaussian()},
            "shape of one output",
        ),
        (torch.zeros(2, 5, 3), torch.zeros(5).long(), {"num_data": 1, "likelihood": "gaussian"}, "Gaussian"),
    ],
)
def test_negative_elbo_refuses_what_does_not_fit(outputs, targets, options, complaint):
    with pytest.raises(PatchbayesError, match=complaint):
        pb.objective.negative_elbo(outputs, targets, 0.0, **options)


@pytest.mark.parametrize("precision", [0.0, -1.0, math.inf, math.nan])
def test_an_output_precision_is_a_finite_number_above_zero(precision):
    with pytest.raises(PatchbayesError, match="above 0"):
        pb.likelihoods.Gaussian(precision)


# The simplified loss of appendix C.1


GROUPS = ("patched_weights", "patched_biases", "shared_weights", "shared_biases")
LAMBDAS = pb.objective.Lambdas(0.1, 0.02, 0.003, 0.4)


def squares(model: nn.Module) -> dict[str, float]:
    sums = dict.fromkeys(GROUPS, 0.0)
    for site in ("0", "1", "3"):
        for name, kind in (("weight", "weights"), ("bias", "biases")):
            owner = "shared" if site == "0" else "patched"
            sums[f"{owner}_{kind}"] += float((stored_values(model, site, name) ** 2).sum())
    return sums


@pytest.mark.parametrize("method", [pb.EMP(3), pb.ECMP(2), pb.posteriors.DropConnect(0.2), pb.Dropout(0.1)])
def test_the_penalty_is_four_sums_of_squares(method):
    model = network()
    pb.patch_(model, method, "norm+output")
    for group in GROUPS:
        alone = pb.objective.l2_penalty(model, pb.objective.Lambdas(**{group: 0.7}))
        assert alone.item() == pytest.approx(0.7 * squares(model)[group], rel=1e-12)
    expected = sum(getattr(LAMBDAS, group) * total for group, total in squares(model).items())
    assert pb.objective.l2_penalty(model, LAMBDAS).item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    "make", [lambda groups: torch.optim.SGD(groups, lr=0.1), lambda groups: torch.optim.Adam(groups, lr=0.1, eps=1e-3)]
)
@pytest.mark.parametrize("method", [pb.EMP(3), pb.ECMP(2), pb.posteriors.DropConnect(0.2), pb.Dropout(0.1)])
def test_the_penalty_as_a_loss_and_as_weight_decay_make_the_same_step(make, method):
    x, y = torch.randn(6, 3, dtype=torch.float64), torch.tensor([0, 1, 1, 0, 1, 0])
    by_loss = network()
    pb.patch_(by_loss, method, "norm+output")
    by_decay = copy.deepcopy(by_loss)
    one = pb.Draws.sample(by_loss, 1)

    optimizer = make(pb.objective.parameter_groups(by_loss))
    loss = nn.functional.cross_entropy(pb.forward_draws(by_loss, x, one)[0], y)
    (loss + pb.objective.l2_penalty(by_loss, LAMBDAS)).backward()
    optimizer.step()

    optimizer = make(pb.objective.parameter_groups(by_decay, LAMBDAS))
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
    groups = {group["name"]: group for group in pb.objective.parameter_groups(model, LAMBDAS, lr=0.3)}
    assert tuple(groups) == GROUPS
    for name, group in groups.items():
        assert group["weight_decay"] == 2 * getattr(LAMBDAS, name)
        assert group["lr"] == 0.3
    listed = [id(p) for group in groups.values() for p in group["params"]]
    assert sorted(listed) == sorted(id(p) for p in model.parameters())
    held = pb.patched_sites(model)["1"].posterior.components
    assert [id(p) for p in groups["patched_biases"]["params"]] == [id(held["bias"])]
    assert len(groups["shared_weights"]["params"]) == 2


def test_what_the_patches_brought_can_have_a_rate_of_its_own_and_weights_below_dropout_do_not():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    pb.patch_(model, pb.mixed())
    groups = pb.objective.parameter_groups(model, LAMBDAS, lr=0.1, patch_lr=0.5)
    by_parameter = {id(p): group for group in groups for p in group["params"]}
    assert len(by_parameter) == len(list(model.parameters()))
    for name, parameter in model.named_parameters():
        assert by_parameter[id(parameter)]["lr"] == (0.5 if ".components." in name else 0.1), name
    kept = by_parameter[id(model[2].weight)]
    assert (kept["name"], kept["weight_decay"]) == ("patched_weights_kept", 2 * LAMBDAS.patched_weights)
    dropped = network()
    pb.patch_(dropped, pb.Dropout(0.1), "norm")
    with pytest.raises(PatchbayesError, match="patch_lr"):
        pb.objective.parameter_groups(dropped, lr=0.1, patch_lr=0.5)


def test_frozen_parameters_and_empty_groups_are_left_out():
    model = network()
    model[0].requires_grad_(False)
    model[3].requires_grad_(False)
    pb.patch_(model, pb.EMP(2), "norm")
    assert [group["name"] for group in pb.objective.parameter_groups(model)] == ["patched_weights", "patched_biases"]


def test_tied_parameters_are_penalized_once():
    model = Tied().double()
    weight, bias = model.decoder.weight.detach().clone(), model.decoder.bias.detach().clone()
    pb.patch_(model, pb.EMP(3, jitter=0), "decoder", tied="together")
    expected = 0.5 * 3 * (weight.square().sum() + bias.square().sum())
    torch.testing.assert_close(pb.objective.l2_penalty(model, pb.objective.Lambdas.equal(0.5)), expected)
    listed = [id(p) for group in pb.objective.parameter_groups(model) for p in group["params"]]
    assert len(listed) == len(set(listed)) == 2


def test_equal_lambdas_are_all_four_and_mean_a_precision_k_times_larger_on_patches():
    assert pb.objective.Lambdas.equal(0.25) == pb.objective.Lambdas(0.25, 0.25, 0.25, 0.25)
    model = network()
    pb.patch_(model, pb.EMP(3), "norm+output")
    precision = {"0": 2 * 0.25, "*": 3 * 2 * 0.25}
    same = pb.kl(model, pb.prior.Prior(tau=precision, rho=precision))
    torch.testing.assert_close(
        pb.objective.l2_penalty(model, pb.objective.Lambdas.equal(0.25)), same, rtol=1e-12, atol=0
    )


@pytest.mark.parametrize("value", [-0.1, math.nan])
def test_a_negative_penalty_is_refused(value):
    with pytest.raises(PatchbayesError, match=r"patched_biases.*at least 0"):
        pb.objective.Lambdas(patched_biases=value)


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
    weight = pb.patched_sites(model)["3"].posterior.components["weight"]
    own = weight.grad.clone()
    assert (own == 0).any()
    components = len(own)
    for share in (0, 0.25, 1):
        weight.grad.copy_(own)
        pb.objective.share_gradients_(model, share=share)
        mixed = (1 - share) * own + share * own.sum(0)
        torch.testing.assert_close(weight.grad, mixed * components / (1 + share * (components - 1)))
        torch.testing.assert_close(weight.grad.mean(0), own.sum(0))
    weight.grad = None  # of a frozen layer
    pb.objective.share_gradients_(model)
    assert weight.grad is None


@pytest.mark.parametrize(
    ("method", "sites", "mixed"),
    [
        (pb.ECMP(3, mix_bias=False), "output", ["3.patchbayes.components.weight"]),
        (pb.posteriors.MeanField(), "output", []),
        (pb.Dropout(0.5), "norm", []),
        (pb.Ensemble(2), "all", []),
    ],
)
def test_what_is_not_drawn_among_components_keeps_its_gradient(method, sites, mixed):
    model = with_gradients(method, sites)
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    pb.objective.share_gradients_(model)
    changed = [name for name, p in model.named_parameters() if not torch.equal(p.grad, before[name])]
    assert changed == mixed


@pytest.mark.parametrize("share", [-0.1, 1.1, math.nan, "half", None])
def test_a_share_outside_0_and_1_is_refused(share):
    model = with_gradients(pb.EMP(3))
    with pytest.raises(PatchbayesError, match=r"share_gradients_\(share=.*a number from 0 to 1"):
        pb.objective.share_gradients_(model, share)
