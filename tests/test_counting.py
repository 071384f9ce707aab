"""Every parameter count the paper prints (section 3.3, tables 1 and 3), to the last digit it prints."""

import copy
import math
from typing import get_args

import pytest
import torch
from torch import nn

from patchbayes import counting
from patchbayes.nets import mlp, pyramidnet, resnet18

RESNET18, PYRAMIDNET = 11_689_512, 28_511_307


@pytest.mark.parametrize(
    ("build", "plain", "patched", "ensemble"),
    [(resnet18, RESNET18, 13_779_912, 58_447_560), (pyramidnet, PYRAMIDNET, 28_825_299, 142_556_535)],
)
def test_table_3_networks_are_exact_module_counts(build, plain, patched, ensemble):
    with torch.device("meta"):
        model = build()
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert counting.patched_count(model, [], 5) == plain
    assert counting.patched_count(model, [*norms, model.fc], 5) == patched
    assert counting.patched_count(model, [*norms, model.fc], 1) == plain
    assert counting.patched_count(model, [model], 5) == ensemble
    by_formula = sum(counting.norm_overhead(norm.num_features, 5) for norm in norms)
    assert counting.patched_count(model, norms, 5) == plain + by_formula


@pytest.mark.parametrize(
    ("method", "count"),
    [
        ("emp", 1_129_100),
        ("ecmp", 1_129_100),
        ("dropout", 1_009_900),
        ("dropconnect", 1_009_900),
        ("ensemble", 5_049_500),
    ],
)
def test_table_3_mlp(method, count):
    assert counting.mlp_count(method, layers=100, hidden=100, components=5) == count


def test_mlp_formula_away_from_the_table():
    assert counting.mlp_count("dropout", layers=3, hidden=7, components=4) == 3 * 49 + 2 * 7
    assert counting.mlp_count("ecmp", layers=3, hidden=7, components=4) == 3 * 49 + 2 * 7 + 3 * (2 * 2 * 7 + 49)
    assert counting.mlp_count("ensemble", layers=3, hidden=7, components=4) == 4 * (3 * 49 + 2 * 7)


@pytest.mark.parametrize(
    ("method", "exact"),
    [
        ("emp", 3**4),
        ("ecmp", 3 ** (2**2 + 4 * 2)),
        ("dropout", 2 ** (4 * 2)),
        ("dropconnect", 2 ** (4 * 2**2)),
        ("ensemble", 3),
    ],
)
def test_table_3_ensemble_size(method, exact):
    log10 = counting.mlp_log10_ensemble_size(method, layers=4, hidden=2, components=3)
    assert log10 == pytest.approx(math.log10(exact), rel=1e-14)


def test_every_method_is_counted():
    for method in get_args(counting.CountedMethod):
        assert counting.mlp_count(method, 2, 3, 2) > 0
        assert counting.mlp_log10_ensemble_size(method, 2, 3, 2) > 0


def test_table_1_patching():
    assert (f"{13_779_912 / 1e6:.1f}", f"{28_825_299 / 1e6:.1f}") == ("13.8", "28.8")
    assert f"{counting.overhead_percent(13_779_912, RESNET18):.1f}" == "17.9"
    assert f"{counting.overhead_percent(28_825_299, PYRAMIDNET):.2f}" == "1.10"


def test_end_layer_formulas_equal_real_modules():
    first, last = nn.Linear(13, 50), nn.Linear(50, 2)
    model = nn.Sequential(first, nn.ReLU(), last)
    extra = counting.patched_count(model, [first, last], 4) - counting.patched_count(model, [], 4)
    assert counting.linear_ends_overhead((13, 50), (50, 2), 4) == extra == 3 * (14 * 50 + 51 * 2)

    begin, end = nn.Conv2d(3, 8, 5, bias=False), nn.Conv2d(8, 10, 1, bias=False)
    convolutional = nn.Sequential(begin, nn.ReLU(), end)
    extra = counting.patched_count(convolutional, [begin, end], 4) - counting.patched_count(convolutional, [], 4)
    assert counting.conv_ends_overhead((5, 3, 8), (1, 8, 10), 4) == extra == 3 * (25 * 24 + 80)


def test_a_parameter_reached_twice_counts_once():
    model = mlp(3, hidden=(4,))
    hidden = model.get_submodule("hidden1")
    assert counting.patched_count(model, [model, hidden], 5) == counting.patched_count(model, [model], 5)

    tied = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    tied[1].weight = tied[0].weight
    assert counting.patched_count(tied, list(tied), 3) == 3 * 16


def test_errors_name_what_was_given():
    model = mlp(3)
    with pytest.raises(ValueError, match="not in Sequential"):
        counting.patched_count(model, copy.deepcopy(model).children(), 5)
    with pytest.raises(ValueError, match="components=0"):
        counting.patched_count(model, [model], 0)
    with pytest.raises(ValueError, match=r"'lora' is unknown; use one of emp, ecmp"):
        counting.mlp_count("lora", 1, 1, 1)
