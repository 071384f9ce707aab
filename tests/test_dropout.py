"""Dropout of activations, and the member of the family that is the same thing in weight space."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import patchbayes as pb
from statistics_helper import assert_frequencies
from stored import patched, seeded

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
    model = patched(copy.deepcopy(plain), pb.posteriors.Mixture(components=1, tie="unit", zero=True))
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
    model = patched(copy.deepcopy(plain), pb.posteriors.Mixture(components=1, tie="unit", zero=True)).eval()
    draws = pb.Draws.enumerate(model)
    assert len(draws) == 2 ** plain.weight.numel()
    scaled = plain(x) - plain.bias
    for z, output in zip(draws.assignments(), pb.forward_draws(model, x, draws), strict=True):
        keep = (z == 0).double().reshape(plain.weight.shape)
        torch.testing.assert_close(output, scaled * keep + plain.bias, rtol=1e-12, atol=1e-12)


def masks_seen(model: nn.Module, module: nn.Module, x: torch.Tensor, draws, monkeypatch) -> torch.Tensor:
    """What reaches the module's own forward under each draw, (S, *x.shape)."""
    seen: list[torch.Tensor] = []
    plain = nn.Linear if isinstance(module, nn.Linear) else nn.Conv2d
    forward = plain.forward

    def spy(self, activations):
        seen.append(activations.detach().clone())
        return forward(self, activations)

    with monkeypatch.context() as context:
        context.setattr(plain, "forward", spy)
        pb.forward_draws(model, x, draws)
    return torch.stack(seen)


def test_dropout_of_activations_is_dropout_of_columns_on_the_same_mask(monkeypatch):
    """Every row of the batch equals the weight-space member under that row's mask, up to the inverted scaling."""
    torch.manual_seed(1)
    rate, plain = 0.4, nn.Linear(3, 2).double()
    x = torch.randn(6, 3, dtype=torch.float64)
    activations = patched(copy.deepcopy(plain), pb.Dropout(rate))
    columns = patched(
        copy.deepcopy(plain), pb.posteriors.Mixture(components=1, tie="unit", zero=True, probabilities=(1 - rate, rate))
    )
    draws = pb.Draws.sample(activations, 10, seeded(2))
    masks = masks_seen(activations, activations[0], torch.ones_like(x), draws, monkeypatch) * (1 - rate)
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
def test_dropout_masks_are_fresh_for_every_example_and_unit_with_the_given_rate(rate, own_draws, monkeypatch):
    model = patched(nn.Linear(40, 1), pb.Dropout(rate))
    x = torch.ones(1000, 40, dtype=torch.float64)
    draws = 1 if own_draws else pb.Draws.sample(model, 1, seeded(3))
    mask = masks_seen(model, model[0], x, draws, monkeypatch)[0]
    scale = 1 / (1 - rate)
    assert ((mask == 0) | ((mask - scale).abs() < 1e-12)).all()
    dropped = (mask == 0).int()
    assert_frequencies([int(dropped.sum()), 40_000 - int(dropped.sum())], [rate, 1 - rate], detects=0.03)
    if rate > 0.1:
        for first, second in [(dropped[:-1], dropped[1:]), (dropped[:, :-1], dropped[:, 1:])]:
            table = torch.bincount((2 * first + second).flatten(), minlength=4)
            p = [(1 - rate) ** 2, rate * (1 - rate), rate * (1 - rate), rate**2]
            assert_frequencies(table, p, detects=0.03)


def test_dropout_masks_single_activations_before_a_convolution(monkeypatch):
    model = patched(nn.Conv2d(2, 2, 1), pb.Dropout(0.5))
    seen = masks_seen(
        model, model[0], torch.ones(2, 2, 8, 8, dtype=torch.float64), pb.Draws.sample(model, 1), monkeypatch
    )
    assert seen.flatten(3).unique(dim=-1).shape[-1] > 1


def test_dropout_of_rate_zero_changes_nothing():
    plain = nn.Linear(3, 2).double()
    x = torch.randn(4, 3, dtype=torch.float64)
    expected = plain(x)
    assert torch.equal(patched(plain, pb.Dropout(0.0))(x), expected)


def test_dropout_stays_on_in_evaluation_and_differs_between_draws(monkeypatch):
    model = patched(nn.Linear(30, 1), pb.Dropout(0.5)).eval()
    seen = masks_seen(model, model[0], torch.ones(1, 30, dtype=torch.float64), pb.Draws.sample(model, 5), monkeypatch)
    assert seen.flatten(1).unique(dim=0).shape[0] == 5


def test_a_hook_before_a_dropout_layer_sees_the_activations_whole():
    """Masks belong to the layer: what the network hands to it, and hooks see, is not yet dropped."""
    model = patched(nn.Linear(30, 1), pb.Dropout(0.5))
    x, seen = torch.ones(2, 30, dtype=torch.float64), []
    model[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(x)
    assert torch.equal(seen[0], x)


def test_dropout_is_off_in_eval_mode_outside_of_a_draw():
    torch.manual_seed(0)
    plain = nn.Linear(30, 2).double()
    x = torch.randn(4, 30, dtype=torch.float64)
    model = patched(copy.deepcopy(plain), pb.Dropout(0.5))
    assert torch.equal(model.eval()(x), plain(x))
    assert not torch.equal(model.train()(x), plain(x))
