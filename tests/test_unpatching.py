"""unpatch_: which network is left, and that nothing else is."""

import copy

import pytest
import torch
from torch import Tensor, nn

import patchbayes as pb
from patchbayes.errors import NotPatched, PatchbayesError, WrongDraws
from patchbayes.nets import mlp
from stored import components
from zoo import ZOO, assert_same, snapshot


def small_net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


X = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))


def batches(number: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(8, 3, generator=generator) + i for i in range(number)]


# ---- unpatching


@pytest.mark.parametrize(
    "method",
    [
        pb.EMP(3),
        pb.ECMP(3, init="independent"),
        pb.Dropout(0.2),
        pb.posteriors.MeanField(),
        pb.posteriors.DropConnect(0.3),
        pb.EMP(3, sigma=0.1),
        pb.posteriors.Mixture(components=2, tie="unit", zero=True),
        pb.Ensemble(2),
    ],
    ids=lambda m: m.label,
)
@pytest.mark.parametrize("name", ZOO)
def test_patch_then_unpatch_is_bitwise_nothing(name, method):
    entry = ZOO[name]
    model = entry.build()
    before = snapshot(model)
    inputs = entry.inputs()
    with torch.no_grad():
        outputs = entry.logits(copy.deepcopy(model), inputs), entry.logits(copy.deepcopy(model).eval(), inputs)
    sites = "norm+output" if isinstance(method, pb.Dropout) and name == "lstm" else entry.sites
    pb.patch_(model, method, sites)
    pb.unpatch_(model)
    assert_same(before, model)
    with torch.no_grad():
        assert torch.equal(entry.logits(copy.deepcopy(model), inputs), outputs[0])
        assert torch.equal(entry.logits(model.eval(), inputs), outputs[1])


def test_patch_then_unpatch_keeps_the_users_own_hooks():
    model = small_net()
    calls = []
    model[1].register_forward_hook(lambda *_: calls.append("norm"))
    model.register_forward_pre_hook(lambda *_: calls.append("root"))
    before = snapshot(model)
    pb.patch_(model, pb.EMP(3))
    model(X)
    assert calls == ["root", "norm"]
    pb.unpatch_(model)
    assert_same({**before, "state": snapshot(model)["state"]}, model)
    model(X)
    assert calls == ["root", "norm"] * 2


def test_a_number_keeps_that_component():
    model = small_net()
    pb.patch_(model, pb.EMP(3, statistics="per_component"))
    for x in batches(9):
        model(x)
    wanted = {
        "weight": components(model, "3")[2].detach().clone(),
        "mean": model[1].patchbayes.running_mean[2].clone(),
        "count": model[1].patchbayes.num_batches_tracked[2].clone(),
    }
    pb.unpatch_(model, keep=2)
    assert torch.equal(model[3].weight, wanted["weight"])
    assert torch.equal(model[1].running_mean, wanted["mean"])
    assert torch.equal(model[1].num_batches_tracked, wanted["count"])
    assert isinstance(model[3].weight, nn.Parameter)


def test_the_mean_keeps_the_expectation_under_p():
    p = (0.5, 0.3, 0.2)
    model = small_net()
    pb.patch_(model, pb.EMP(3, probabilities=p, statistics="per_component"))
    for x in batches(9):
        model(x)

    def mean(stored: Tensor) -> Tensor:
        return sum(weight * part.detach().double() for weight, part in zip(p, stored, strict=True)).float()

    weight, running = mean(components(model, "3")), mean(model[1].patchbayes.running_mean)
    pb.unpatch_(model, keep="mean")
    torch.testing.assert_close(model[3].weight.detach(), weight)
    torch.testing.assert_close(model[1].running_mean, running)


def test_the_mean_counts_the_zero_component():
    model = nn.Sequential(nn.Linear(3, 2))
    weight, bias = model[0].weight.detach().clone(), model[0].bias.detach().clone()
    pb.patch_(model, pb.posteriors.DropConnect(0.25), "all")
    pb.unpatch_(model, keep="mean")
    torch.testing.assert_close(model[0].weight.detach(), 0.75 * weight)
    assert torch.equal(model[0].bias, bias)


@pytest.mark.parametrize(
    "method",
    [pb.EMP(3, statistics="per_component"), pb.ECMP(3), pb.posteriors.MeanField(), pb.ECMP(2, sigma=0.2)],
    ids=lambda m: m.label,
)
def test_a_draw_keeps_the_network_of_that_draw_bit_for_bit(method):
    model = small_net()
    pb.patch_(model, method)
    for x in batches(6):
        model(x)
    draws = pb.Draws.sample(model, 5)
    model.eval()
    with torch.no_grad(), pb.use_draw(model, draws[3]):
        expected = model(X)
    pb.unpatch_(model, keep=draws[3])
    assert torch.equal(model(X), expected)


@pytest.mark.parametrize("keep", [3, -1, True, 0.5, "median", None])
def test_what_cannot_be_kept_is_refused_and_the_network_stays(keep):
    model = small_net()
    pb.patch_(model, pb.EMP(3))
    before = snapshot(model)
    with pytest.raises(PatchbayesError, match="component"):
        pb.unpatch_(model, keep=keep)
    assert_same(before, model)


def test_several_draws_or_draws_of_another_network_cannot_be_kept():
    model, other = small_net(), mlp(3)
    pb.patch_(model, pb.EMP(3)), pb.patch_(other, pb.ECMP(2))
    before = snapshot(model)
    with pytest.raises(PatchbayesError, match=r"one draw can be kept, got 2; pass draws\[i\]"):
        pb.unpatch_(model, pb.Draws.sample(model, 2))
    with pytest.raises(WrongDraws, match="another network"):
        pb.unpatch_(model, pb.Draws.sample(other, 1))
    assert_same(before, model)


def test_unpatching_an_ordinary_network_or_a_wrapper_is_an_error():
    with pytest.raises(NotPatched, match="not a patched network"):
        pb.unpatch_(small_net())
    model = small_net()
    pb.patch_(model, pb.EMP(2))
    with pytest.raises(NotPatched, match="not on a module that holds it"):
        pb.unpatch_(nn.Sequential(model))


def test_a_network_can_be_patched_again_after_unpatching():
    model = small_net()
    pb.patch_(model, pb.EMP(3))
    pb.unpatch_(model)
    report = pb.patch_(model, pb.ECMP(2))
    assert [site.method for site in report.sites] == ["ECMP(K=2)"] * 2
