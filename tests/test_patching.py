"""patch_: what is reported, what is stored, what a layer computes with, and which sites share a draw."""

import copy
import math

import pytest
import torch
from torch import nn

import patchbayes as pb
from patchbayes.errors import NothingToPatch, PatchbayesError, WrongDraws
from patchbayes.nets import pyramidnet, resnet18
from patchbayes.patching.network import network_of
from stored import components, gradient
from zoo import ZOO, TiedLanguageModel, UsesOneLayerTwice, assert_same, snapshot


def small_net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


X = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))


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
        (pb.posteriors.DropConnect(0.1), (4 + 8) * math.log10(2), "4,096"),
        (pb.Dropout(0.1), (4 + 4) * math.log10(2), "256"),
        (pb.posteriors.MeanField(), math.inf, "infinitely many"),
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
        for method in (pb.EMP(3), pb.posteriors.MeanField(), pb.Dropout(0.1), pb.posteriors.DropConnect(0.1))
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
    assert isinstance(model[3].patchbayes.components["weight"], nn.Parameter)
    assert model[1].patchbayes.components["weight"].shape == (3 * 4,)  # vectors lie flat
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
    pb.patch_(other, pb.EMP(2), prior=pb.prior.Prior(tau=3.0, rho=3.0))
    assert torch.allclose(3 * pb.kl(model), pb.kl(other))


def test_frozen_parameters_stay_frozen_and_unmoved():
    entry = ZOO["frozen"]
    model = entry.build()
    pb.patch_(model, pb.EMP(3))
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    assert set(frozen) == {
        "trunk.0.weight",
        "trunk.0.bias",
        "trunk.1.patchbayes.components.weight",
        "trunk.1.patchbayes.components.bias",
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
    with pb.use_draw(model):
        assert torch.equal(model.embedding.weight, model.decoder.weight)
    model(TOKENS)
    assert torch.equal(model.embedding.weight, model.decoder.weight)
    assert model.embedding.weight.shape == (11, 6)
    model(TOKENS).square().sum().backward()
    alone = copy.deepcopy(model)
    assert gradient(model, "decoder").shape == (3, 11, 6)
    assert "weight" not in model.embedding._parameters  # both read what the decoder's posterior holds
    with pb.use_draw(alone):
        assert torch.equal(alone.embedding.weight, alone.decoder.weight)
        assert not torch.equal(alone.embedding.weight, model.embedding.weight)
    with torch.no_grad():
        alone.decoder.patchbayes.components.weight.zero_()
    assert not alone.embedding.weight.any()
    assert model.embedding.weight.any()


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
    assert gradient(model, "decoder").shape == (3, 11, 6)


@pytest.mark.parametrize("sites", ["embedding", "output", "all"])
def test_tied_parameters_are_tied_again_after_unpatching(sites):
    model = TiedLanguageModel()
    before = snapshot(model)
    pb.patch_(model, pb.ECMP(3), sites)
    pb.unpatch_(model)
    assert_same(before, model)
    assert model.decoder.weight is model.embedding.weight


# ---- sharing one draw among sites


def test_tie_network_gives_all_sites_the_same_component():
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 3))
    pb.patch_(model, pb.Ensemble(3, init="copies", jitter=0.5), "all")
    seen = set()
    for _ in range(10):
        with pb.use_draw(model):
            model(X)
            chosen = {
                k
                for name in ("0", "1", "2")
                for k in range(3)
                if torch.equal(components(model, name)[k], model[int(name)].weight)
            }
        assert len(chosen) == 1
        seen |= chosen
    assert len(seen) == 3


def test_sites_that_share_one_draw_must_agree_on_its_law():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    before = snapshot(model)
    with pytest.raises(PatchbayesError, match='tie="network"'):
        pb.patch_(model, {"0": pb.Ensemble(2), "1": pb.Ensemble(3)})
    assert_same(before, model)


@pytest.mark.parametrize("training", [True, False])
def test_a_posterior_is_in_the_mode_of_its_layer(training):
    model = small_net().train(training)
    pb.patch_(model, pb.ECMP(3))
    assert all(module.training is training for module in model.modules())
