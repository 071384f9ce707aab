"""How posteriors start from the layer's own values; draws for each example and statistics for each component."""

import copy
import math

import pytest
import torch
from torch import nn

import patchbayes as pb
from patchbayes.errors import PatchbayesError
from statistics_helper import assert_frequencies, assert_standard_normal, assert_uncorrelated
from stored import components, patched, seeded

# Starts


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
    stored = components(patched(plain, pb.EMP(4)), "0", "bias")
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
        assert torch.equal(components(model, site), torch.full((3, 3), 0.2))
        assert torch.equal(components(model, site, "bias"), torch.zeros(3, 3))
    assert torch.equal(components(model)[0], linear)


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
                parameter.copy_(components(model, "0", name)[k])
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
    means = model[0].patchbayes.running_mean
    k = int(draws[1].assignments()[0, 0])
    torch.testing.assert_close(means[k], 0.1 * x.mean(0))
    assert not means[[i for i in range(3) if i != k]].any()
