"""Norm layers as sites: running statistics of one kind or the other, and a draw for each example."""

import copy

import pytest
import torch
from torch import Tensor, nn

import patchbayes as pb
from patchbayes.draws.layout import NetworkDraw, example_keys
from patchbayes.draws.schemes import assign
from patchbayes.errors import PatchbayesError
from patchbayes.patching.drawing import hold
from patchbayes.patching.frames import last_draw
from patchbayes.patching.network import network_of
from stored import components
from zoo import assert_same, snapshot

X = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))


def batches(number: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(8, 3, generator=generator) + i for i in range(number)]


# ---- batch-norm statistics


@pytest.mark.parametrize("momentum", [0.1, None])
def test_shared_statistics_are_those_of_one_batch_norm(momentum):
    model = nn.Sequential(nn.BatchNorm1d(3, momentum=momentum))
    plain = copy.deepcopy(model)
    pb.patch_(model, pb.EMP(3), "norm")
    for x in batches(6):
        model(x), plain(x)
    assert torch.equal(model[0].running_mean, plain[0].running_mean)
    assert torch.equal(model[0].running_var, plain[0].running_var)
    assert model[0].num_batches_tracked == 6
    assert not [key for key in model.state_dict() if "patchbayes.running" in key]


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("method", [pb.EMP, pb.Ensemble], ids=["EMP", "Ensemble"])
def test_statistics_per_component_are_those_of_one_batch_norm_each(method, momentum):
    model = nn.Sequential(nn.BatchNorm1d(3, momentum=momentum))
    pb.patch_(model, method(3, statistics="per_component", init="copies"), "norm")
    site = pb.patched_sites(model)["0"]
    plain = []
    for k in range(3):
        norm = nn.BatchNorm1d(3, momentum=momentum)
        norm.load_state_dict({name: site.components(name)[k] for name in ("weight", "bias")}, strict=False)
        plain.append(norm)
    draws = pb.Draws.stratified(model, 12)
    used = draws.assignments()[:, 0].tolist()
    assert set(used) == {0, 1, 2}
    for number, x in enumerate(batches(12)):
        with pb.use_draw(model, draws[number]):
            assert torch.equal(model(x), plain[used[number]](x))
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        expected = torch.stack([getattr(norm, name) for norm in plain])
        assert torch.equal(model[0].patchbayes.get_buffer(name), expected)
    model.eval()
    before = snapshot(model)["state"]
    for number, x in enumerate(batches(12)):
        with pb.use_draw(model, draws[number]):
            assert torch.equal(model(x), plain[used[number]].eval()(x))
    for key, value in before:
        if "patchbayes." in key:
            assert torch.equal(model.state_dict()[key], value)


@pytest.mark.parametrize(
    "method",
    [
        pb.EMP(1, statistics="per_component"),
        pb.Ensemble(1),
        pb.EMP(1, sigma=0.1, statistics="per_component"),
        pb.posteriors.Mixture(components=2, zero=True, statistics="per_component"),
    ],
    ids=["EMP(1)", "Ensemble(1)", "sigma", "zero"],
)
def test_statistics_per_component_with_one_component_or_a_zero_one(method):
    model = nn.Sequential(nn.BatchNorm1d(3), nn.LayerNorm(3))
    pb.patch_(model, {"0": method, "1": pb.EMP(4)})
    for x in batches(40):
        model(x)
    counted = model[0].patchbayes.num_batches_tracked
    assert counted.sum() == 40
    assert (counted > 0).all()
    pb.unpatch_(model, pb.Draws.sample(model, 1))
    assert not [key for key in model.state_dict() if "patchbayes" in key]


def test_norms_without_running_statistics_are_left_alone():
    model = nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False), nn.LayerNorm(3))
    pb.patch_(model, pb.EMP(3, statistics="per_component"), "norm")
    model(X)
    assert not [key for key in model.state_dict() if "running" in key or "num_batches" in key]


# ---- a draw for each example

NORMS = {
    "BatchNorm1d": (nn.BatchNorm1d(4), (6, 4)),
    "BatchNorm1d over time": (nn.BatchNorm1d(4), (6, 4, 3)),
    "BatchNorm2d": (nn.BatchNorm2d(4), (6, 4, 3, 2)),
    "BatchNorm3d": (nn.BatchNorm3d(4), (6, 4, 2, 2, 2)),
    "LayerNorm": (nn.LayerNorm(4), (6, 4)),
    "LayerNorm over time": (nn.LayerNorm(4), (6, 5, 4)),
    "LayerNorm of two axes": (nn.LayerNorm((3, 4)), (6, 2, 3, 4)),
    "LayerNorm without bias": (nn.LayerNorm(4, bias=False), (6, 4)),
    "GroupNorm": (nn.GroupNorm(2, 4), (6, 4, 3, 3)),
    "InstanceNorm1d": (nn.InstanceNorm1d(4, affine=True), (6, 4, 5)),
    "InstanceNorm2d": (nn.InstanceNorm2d(4, affine=True), (6, 4, 3, 3)),
    "InstanceNorm3d": (nn.InstanceNorm3d(4, affine=True), (6, 4, 2, 2, 2)),
    "RMSNorm": (nn.RMSNorm(4), (6, 5, 4)),
}


@pytest.mark.parametrize("method", [pb.EMP, pb.ECMP], ids=["EMP", "ECMP"])
@pytest.mark.parametrize("norm", NORMS)
def test_a_draw_for_each_example_equals_a_loop_over_examples(norm, method, generator):
    module, shape = NORMS[norm]
    model = nn.Sequential(copy.deepcopy(module)).double()
    pb.patch_(model, method(3, per_example=True, jitter=0.5), "norm")
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    weights = torch.randn(shape, generator=generator, dtype=torch.float64)
    output = model(x)
    gradients = torch.autograd.grad((output * weights).sum(), list(model.parameters()))

    network = network_of(model)
    key = last_draw(network).key
    indices = assign(network.law(), example_keys(key, len(x)), 0, network.layout.num_groups)
    assert len({tuple(row) for row in indices.tolist()}) > 1
    rows = []
    for example in range(len(x)):
        with hold(network, NetworkDraw(key, indices[example], explicit=True)):
            rows.append(model(x)[example])
    expected = torch.stack(rows)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    again = torch.autograd.grad((expected * weights).sum(), list(model.parameters()))
    torch.testing.assert_close(gradients, again, rtol=1e-10, atol=1e-10)


def test_a_draw_for_each_example_gives_examples_different_components():
    model = nn.Sequential(nn.LayerNorm(4))
    pb.patch_(model, pb.EMP(3, per_example=True, jitter=0.5), "norm")
    row = torch.randn(1, 4, generator=torch.Generator().manual_seed(0))
    output = model(row.expand(64, 4))
    per_component = [
        torch.nn.functional.layer_norm(row, (4,), w, b)[0]
        for w, b in zip(components(model, "0"), components(model, "0", "bias"), strict=True)
    ]
    which = torch.stack([(output - value).abs().amax(-1) < 1e-6 for value in per_component])
    assert (which.sum(0) == 1).all()
    assert which.any(1).all()
    with pb.use_draw(model, pb.Draws.sample(model, 1)):
        assert len({tuple(line) for line in model(row.expand(64, 4)).tolist()}) == 1


class FusedActivation(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


class ChannelsFirst(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


@pytest.mark.parametrize(
    "module", [FusedActivation(3), ChannelsFirst(3), nn.Linear(3, 3)], ids=lambda m: type(m).__name__
)
def test_a_draw_for_each_example_is_refused_where_the_affine_is_not_the_last_step(module):
    model = nn.Sequential(module)
    before = snapshot(model)
    with pytest.raises(PatchbayesError, match=r'"0"(.|\n)*per_example=True(.|\n)*per_example=False'):
        pb.patch_(model, pb.EMP(2, per_example=True), "all")
    assert_same(before, model)
