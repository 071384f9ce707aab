"""patch_ and unpatch_: what is reported, what is stored, what a layer computes with, and that all can be undone."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn

import patchbayes as pb
from patchbayes.draws import network_of
from patchbayes.errors import NothingToPatch, NotPatched, PatchbayesError, WrongDraws
from patchbayes.layout import Drawn
from patchbayes.nets import mlp, pyramidnet, resnet18
from patchbayes.network import hold
from patchbayes.schemes import assign
from zoo import ZOO, TiedLanguageModel, UsesOneLayerTwice, assert_same, snapshot


def small_net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


X = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))


def components(model: nn.Module, site: str, name: str = "weight") -> Tensor:
    return pb.patched_sites(model)[site].components(name)


# ---- the report


def test_resnet18_costs_what_table_3_says():
    model = resnet18()
    report = pb.patch_(model, pb.ECMP(5))
    assert (report.parameters_before, report.parameters_after) == (11_689_512, 13_779_912)
    assert sum(p.numel() for p in model.parameters()) == 13_779_912
    assert f"{report.overhead_percent:.1f}" == "17.9"
    assert len(report.sites) == 21
    assert report.log10_outcomes == pytest.approx((9_600 + 513_000) * math.log10(5))
    assert report.ensemble_size == "10^365,281.7"


def test_resnet18_with_norms_only_costs_a_third_of_a_percent():
    report = pb.patch_(resnet18(), pb.EMP(5), "norm")
    assert f"{report.overhead_percent:.3f}" == "0.328"
    assert report.parameters_after - report.parameters_before == 38_400
    assert report.log10_outcomes == pytest.approx(20 * math.log10(5))


def test_pyramidnet_costs_what_table_3_says():
    report = pb.patch_(pyramidnet(), pb.EMP(5))
    assert report.parameters_after == 28_825_299
    assert f"{report.overhead_percent:.2f}" == "1.10"


def test_the_printed_table_of_a_small_network():
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3, bias=False),
        nn.BatchNorm2d(2),
        nn.BatchNorm2d(2, affine=False),
        nn.Flatten(),
        nn.Linear(8, 3),
    )
    model[1].requires_grad_(False)
    report = pb.patch_(model, pb.EMP(3))
    assert str(report) == (
        "patched 2 sites of Sequential: 49 -> 111 parameters (+127 %), effective ensemble size 9\n"
        "  BatchNorm2d x1  EMP(K=3) frozen   +8  1\n"
        "  Linear x1       EMP(K=3)         +54  4\n"
        '  note     output is "4" (last in order of registration; pass example_input to have the order of execution traced)\n'
        "  skipped  2: a norm layer without affine parameters"
    )
    assert [site.frozen for site in report.sites] == [True, False]


def test_the_printed_table_groups_equal_rows_and_shortens_names():
    report = pb.patch_(nn.Sequential(*(nn.LayerNorm(3) for _ in range(6))), pb.ECMP(10), "norm")
    assert str(report).splitlines()[1] == "  LayerNorm x6  ECMP(K=10)  +324  0, 1, 2, ... 5"


@pytest.mark.parametrize(
    ("method", "log10", "printed"),
    [
        (pb.EMP(5), 2 * math.log10(5), "25"),
        (pb.ECMP(2), (8 + 10) * math.log10(2), "262,144"),
        (pb.ECMP(7), 18 * math.log10(7), "10^15.2"),
        (pb.Ensemble(4, init="copies"), math.log10(4), "4"),
        (pb.DropConnect(0.1), (4 + 8) * math.log10(2), "4,096"),
        (pb.Dropout(0.1), (4 + 4) * math.log10(2), "256"),
        (pb.MeanField(), math.inf, "infinitely many"),
        (pb.EMP(5, sigma=0.1), math.inf, "infinitely many"),
        (pb.EMP(1), 0.0, "1"),
    ],
    ids=lambda value: getattr(value, "label", ""),
)
def test_effective_ensemble_size(method, log10, printed):
    report = pb.patch_(small_net(), method)
    assert report.log10_outcomes == pytest.approx(log10)
    assert report.ensemble_size == printed
    assert f"effective ensemble size {printed}" in str(report)


def test_parameters_added_count_what_the_method_stores():
    added = {
        method.label: sum(site.parameters_added for site in pb.patch_(small_net(), method).sites)
        for method in (pb.EMP(3), pb.MeanField(), pb.Dropout(0.1), pb.DropConnect(0.1))
    }
    assert added == {"EMP(K=3)": 36, "MeanField": 18, "Dropout(0.1)": 0, "DropConnect": 0}


# ---- what is stored


def test_stored_parameters_have_a_component_axis_and_keep_the_parameter_object():
    model = small_net()
    parameters = {id(p) for p in model.parameters()}
    value = model[3].weight.detach().clone()
    pb.patch_(model, pb.ECMP(3))
    assert {id(p) for p in model.parameters()} == parameters
    assert components(model, "3").shape == (3, 2, 4)
    assert isinstance(components(model, "3"), nn.Parameter)
    assert torch.equal(components(model, "3")[0], value)
    assert not torch.equal(components(model, "3")[1], value)
    assert model[3].weight.shape == value.shape
    assert isinstance(model[3], nn.Linear)


def test_the_generator_decides_jitter_and_draws():
    def patched(generator):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = small_net()
        pb.patch_(model, pb.ECMP(3), generator=generator)
        return model

    one, again = (patched(torch.Generator().manual_seed(1)) for _ in range(2))
    other, default = patched(torch.Generator().manual_seed(2)), patched(None)
    assert torch.equal(components(one, "3"), components(again, "3"))
    assert torch.equal(one(X), again(X))
    assert not torch.equal(components(one, "3"), components(other, "3"))
    assert not torch.equal(one.state_dict()["patchbayes_generator"], other.state_dict()["patchbayes_generator"])
    assert torch.equal(components(default, "3"), components(patched(None), "3"))


def test_patching_does_not_touch_the_global_random_state():
    state = torch.get_rng_state()
    model = small_net()
    torch.set_rng_state(state)
    pb.patch_(model, pb.ECMP(3, init="independent"))
    model(X)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_prior_given_to_patch_is_the_one_kl_uses():
    model, other = small_net(), small_net()
    other.load_state_dict(model.state_dict())
    pb.patch_(model, pb.EMP(2))
    pb.patch_(other, pb.EMP(2), prior=pb.Prior(tau=3.0, rho=3.0))
    assert torch.allclose(3 * pb.kl(model), pb.kl(other))


def test_frozen_parameters_stay_frozen_and_unmoved():
    entry = ZOO["frozen"]
    model = entry.build()
    pb.patch_(model, pb.EMP(3))
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    assert set(frozen) == {
        "trunk.0.weight",
        "trunk.0.bias",
        "trunk.1.parametrizations.weight.original",
        "trunk.1.parametrizations.bias.original",
    }
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(entry.inputs()).square().sum().backward()
        optimizer.step()
    assert all(torch.equal(value, model.get_parameter(name)) for name, value in frozen.items())
    assert all(model.get_parameter(name).grad is None for name in frozen)
    pb.unpatch_(model)
    assert [p.requires_grad for p in model.parameters()] == [False] * 4 + [True] * 4


def test_a_layer_used_twice_in_one_forward_sees_the_same_weights():
    model = UsesOneLayerTwice()
    pb.patch_(model, pb.ECMP(5, sigma=0.1), "again")
    seen = []
    model.again.register_forward_hook(lambda module, *_: seen.append(module.weight.detach().clone()))
    x = torch.zeros(2, 5)
    model(x), model(x)
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[2], seen[3])
    assert not torch.equal(seen[0], seen[2])


def test_a_network_that_is_itself_the_site():
    model = nn.Linear(3, 2)
    before = snapshot(model)
    report = pb.patch_(model, pb.EMP(4), "all")
    assert [site.name for site in report.sites] == ["(the network itself)"]
    stored = components(model, "")
    outputs = {tuple(model(X)[0].tolist()) for _ in range(40)}
    bias = components(model, "", "bias")
    expected = {tuple((X @ w.T + b)[0].tolist()) for w, b in zip(stored, bias, strict=True)}
    assert len(outputs) == 4
    for output in outputs:
        assert any(torch.allclose(torch.tensor(output), torch.tensor(e), atol=1e-6) for e in expected)
    pb.unpatch_(model)
    assert_same(before, model)


# ---- patching again


def test_patched_layers_are_not_patched_twice_and_a_second_call_adds_sites():
    model = small_net()
    pb.patch_(model, pb.EMP(3), "norm")
    draws = pb.Draws.sample(model, 1)
    norm = components(model, "1").detach().clone()
    report = pb.patch_(model, pb.ECMP(2))
    assert report.skipped == {"1": "already patched"}
    assert {site.name: site.method for site in report.sites} == {"3": "ECMP(K=2)"}
    assert list(pb.patched_sites(model)) == ["1", "3"]
    added = sum(site.parameters_added for site in report.sites)
    assert report.parameters_after == report.parameters_before + added == sum(p.numel() for p in model.parameters())
    assert torch.equal(components(model, "1"), norm)
    assert report.log10_outcomes == pytest.approx(math.log10(3) + 10 * math.log10(2))
    with pytest.raises(WrongDraws):
        pb.predict(model, X, draws)
    assert len({model(X)[0, 0].item() for _ in range(20)}) > 3


def test_the_order_of_two_calls_does_not_matter_to_the_layout():
    one, other = small_net(), small_net()
    pb.patch_(one, pb.EMP(3), "norm"), pb.patch_(one, pb.ECMP(2), "output")
    pb.patch_(other, pb.ECMP(2), "output"), pb.patch_(other, pb.EMP(3), "norm")
    assert list(pb.patched_sites(one)) == list(pb.patched_sites(other)) == ["1", "3"]
    assert network_of(one).layout.fingerprint == network_of(other).layout.fingerprint


def test_patching_the_same_sites_again_is_an_error_and_changes_nothing():
    model = small_net()
    pb.patch_(model, pb.EMP(3))
    before = snapshot(model)
    with pytest.raises(NothingToPatch, match=r'"1": already patched(.|\n)*unpatch_'):
        pb.patch_(model, pb.ECMP(2))
    assert_same(before, model)


def test_is_patched_and_patched_sites_look_through_wrappers():
    model = small_net()
    wrapper = nn.Sequential(model)
    assert not pb.is_patched(wrapper)
    assert pb.patched_sites(wrapper) == {}
    pb.patch_(model, pb.EMP(3))
    assert pb.is_patched(model)
    assert pb.is_patched(wrapper)
    assert list(pb.patched_sites(wrapper)) == ["1", "3"]


# ---- tied parameters

TOKENS = torch.randint(11, (6, 4), generator=torch.Generator().manual_seed(0))


def test_tied_parameters_are_patched_together_with_one_draw():
    model = TiedLanguageModel()
    report = pb.patch_(model, pb.ECMP(3), "output")
    assert '"decoder" shares a parameter with "embedding.weight": patched together, one draw for both' in report.notes
    assert report.parameters_after - report.parameters_before == 2 * (66 + 11)
    with pb.drawn(model):
        assert torch.equal(model.embedding.weight, model.decoder.weight)
    model(TOKENS)
    assert torch.equal(model.embedding.weight, model.decoder.weight)
    assert model.embedding.weight.shape == (11, 6)
    model(TOKENS).square().sum().backward()
    stored = components(model, "decoder")
    alone = copy.deepcopy(model)
    assert stored.grad is not None
    assert alone.embedding.parametrizations.weight.original is alone.decoder.parametrizations.weight.original


def test_tied_parameters_selected_twice_are_patched_once():
    report = pb.patch_(TiedLanguageModel(), pb.EMP(2), "all")
    assert [site.name for site in report.sites] == ["embedding", "norm"]
    assert report.skipped == {"decoder": 'shares its parameter with "embedding" and is patched together with it'}


def test_tied_separate_unties_the_site_and_leaves_the_other_alone():
    model = TiedLanguageModel()
    old = model.embedding.weight
    report = pb.patch_(model, pb.ECMP(3), "output", tied="separate")
    assert '"decoder" shares a parameter with "embedding.weight": untied, the others keep the old value' in report.notes
    assert model.embedding.weight is old
    assert old.shape == (11, 6)
    assert torch.equal(components(model, "decoder")[0], old)
    model(TOKENS).square().sum().backward()
    assert old.grad is not None
    assert components(model, "decoder").grad.shape == (3, 11, 6)


@pytest.mark.parametrize("sites", ["embedding", "output", "all"])
def test_tied_parameters_are_tied_again_after_unpatching(sites):
    model = TiedLanguageModel()
    before = snapshot(model)
    pb.patch_(model, pb.ECMP(3), sites)
    pb.unpatch_(model)
    assert_same(before, model)
    assert model.decoder.weight is model.embedding.weight


# ---- batch-norm statistics


def batches(number: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(8, 3, generator=generator) + i for i in range(number)]


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
    assert not hasattr(model[0], "component_running_mean")


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
    draws = pb.Draws.stratify(model, 12)
    used = draws.assignments()[:, 0].tolist()
    assert set(used) == {0, 1, 2}
    for number, x in enumerate(batches(12)):
        with pb.drawn(model, draws[number]):
            assert torch.equal(model(x), plain[used[number]](x))
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        expected = torch.stack([getattr(norm, name) for norm in plain])
        assert torch.equal(getattr(model[0], f"component_{name}"), expected)
    model.eval()
    before = snapshot(model)["state"]
    for number, x in enumerate(batches(12)):
        with pb.drawn(model, draws[number]):
            assert torch.equal(model(x), plain[used[number]].eval()(x))
    for key, value in before:
        if "component_" in key:
            assert torch.equal(model.state_dict()[key], value)


@pytest.mark.parametrize(
    "method",
    [
        pb.EMP(1, statistics="per_component"),
        pb.Ensemble(1),
        pb.EMP(1, sigma=0.1, statistics="per_component"),
        pb.Mixture(components=2, zero=True, statistics="per_component"),
    ],
    ids=["EMP(1)", "Ensemble(1)", "sigma", "zero"],
)
def test_statistics_per_component_with_one_component_or_a_zero_one(method):
    model = nn.Sequential(nn.BatchNorm1d(3), nn.LayerNorm(3))
    pb.patch_(model, {"0": method, "1": pb.EMP(4)})
    for x in batches(40):
        model(x)
    counted = model[0].component_num_batches_tracked
    assert counted.sum() == 40
    assert (counted > 0).all()
    pb.unpatch_(model, pb.Draws.sample(model, 1))
    assert "component_running_mean" not in model.state_dict()


def test_norms_without_running_statistics_are_left_alone():
    model = nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False), nn.LayerNorm(3))
    pb.patch_(model, pb.EMP(3, statistics="per_component"), "norm")
    model(X)
    assert not [key for key in model.state_dict() if "component_" in key]


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
    current = network.current
    indices = assign(network.layout, current.example_keys(len(x)), 0, network.layout.num_groups)
    assert len({tuple(row) for row in indices.tolist()}) > 1
    rows = []
    for example in range(len(x)):
        with hold(network, Drawn(current.key, indices[example], explicit=True)):
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
    with pb.drawn(model, pb.Draws.sample(model, 1)):
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


# ---- unpatching


@pytest.mark.parametrize(
    "method",
    [
        pb.EMP(3),
        pb.ECMP(3, init="independent"),
        pb.Dropout(0.2),
        pb.MeanField(),
        pb.DropConnect(0.3),
        pb.EMP(3, sigma=0.1),
        pb.Mixture(components=2, tie="unit", zero=True),
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
        "mean": model[1].component_running_mean[2].clone(),
        "count": model[1].component_num_batches_tracked[2].clone(),
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

    weight, running = mean(components(model, "3")), mean(model[1].component_running_mean)
    pb.unpatch_(model, keep="mean")
    torch.testing.assert_close(model[3].weight.detach(), weight)
    torch.testing.assert_close(model[1].running_mean, running)


def test_the_mean_counts_the_zero_component():
    model = nn.Sequential(nn.Linear(3, 2))
    weight, bias = model[0].weight.detach().clone(), model[0].bias.detach().clone()
    pb.patch_(model, pb.DropConnect(0.25), "all")
    pb.unpatch_(model, keep="mean")
    torch.testing.assert_close(model[0].weight.detach(), 0.75 * weight)
    assert torch.equal(model[0].bias, bias)


@pytest.mark.parametrize(
    "method",
    [pb.EMP(3, statistics="per_component"), pb.ECMP(3), pb.MeanField(), pb.ECMP(2, sigma=0.2)],
    ids=lambda m: m.label,
)
def test_a_draw_keeps_the_network_of_that_draw_bit_for_bit(method):
    model = small_net()
    pb.patch_(model, method)
    for x in batches(6):
        model(x)
    draws = pb.Draws.sample(model, 5)
    model.eval()
    with torch.no_grad(), pb.drawn(model, draws[3]):
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
    with pytest.raises(PatchbayesError, match=r"one draw can be kept, 2 were given; pass draws\[i\]"):
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


# ---- sharing one draw among sites


def test_tie_network_gives_all_sites_the_same_component():
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 3))
    pb.patch_(model, pb.Ensemble(3, init="copies", jitter=0.5), "all")
    for _ in range(10):
        model(X)
        chosen = {
            k
            for name in ("0", "1", "2")
            for k in range(3)
            if torch.equal(components(model, name)[k], model[int(name)].weight)
        }
        assert len(chosen) == 1


def test_sites_that_share_one_draw_must_agree_on_its_law():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    before = snapshot(model)
    with pytest.raises(PatchbayesError, match='tie="network"'):
        pb.patch_(model, {"0": pb.Ensemble(2), "1": pb.Ensemble(3)})
    assert_same(before, model)
