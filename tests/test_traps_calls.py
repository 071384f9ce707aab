"""Calls of a patched network: copies, calls that bypass its forward, blocks that hold a draw, eval mode."""

import copy

import pytest
import torch
from torch import Tensor, nn

import patchbayes as pb
from patchbayes.errors import PatchbayesError
from patchbayes.patching.network import network_of
from trap_network import METHODS, X, patched
from zoo import TiedLanguageModel, assert_same, snapshot

# ---- a hook that closes over site objects: a deepcopy never redraws


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.label)
def test_deepcopy_redraws_and_does_so_independently(method):
    model = patched(method)
    model(X)
    clone = copy.deepcopy(model)
    ours, theirs = [model(X) for _ in range(4)], [clone(X) for _ in range(4)]
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert any(not torch.equal(theirs[0], other) for other in theirs[1:])
    fifth = clone(X)
    assert torch.equal(model(X), fifth)


def test_deepcopy_shares_nothing():
    model = patched()
    clone = copy.deepcopy(model)
    before = snapshot(model)
    for parameter in clone.parameters():
        parameter.data.add_(1.0)
    clone(X), clone(X)
    assert_same(before, model)
    sites = pb.patched_sites(clone)
    assert all(site.module is clone.get_submodule(name) for name, site in sites.items())
    assert all(site.network is network_of(clone) for site in sites.values())
    assert network_of(clone) is not network_of(model)


def test_unpatching_a_deepcopy_leaves_the_original_patched_and_whole():
    for model, x in ((patched(sites="all"), X), (TiedLanguageModel(), torch.tensor([[1, 2]]))):
        if not pb.is_patched(model):
            pb.patch_(model, pb.ECMP(3), "all")
        clone, before = copy.deepcopy(model), snapshot(model)
        pb.unpatch_(clone)
        assert_same(before, model)
        model(x).sum().backward()
        pb.unpatch_(model)
        assert torch.equal(clone(x), model(x))


# ---- calls that bypass the root's forward


def test_a_call_that_bypasses_forward_raises_in_training_and_says_what_to_do():
    model = patched()
    with pytest.raises(PatchbayesError, match=r'"blocks.0.0"(.|\n)*patchbayes.use_draw\(model\)'):
        model.features(X)
    with pytest.raises(PatchbayesError, match="outside a forward call"):
        model.blocks[0](model.enter(X))
    model(X)
    with pytest.raises(PatchbayesError, match="outside a forward call"):
        model.features(X)


def test_a_call_that_bypasses_forward_works_under_drawn():
    model = patched()
    draws = pb.Draws.sample(model, 5)
    for number in range(5):
        with pb.use_draw(model, draws[number]):
            assert torch.equal(model.head(model.features(X)), model(X))


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.label)
def test_a_call_that_bypasses_forward_is_the_mean_network_in_eval_mode(method, recwarn):
    model = patched(method).eval()
    mean = copy.deepcopy(model)
    pb.unpatch_(mean, keep="mean")
    assert torch.equal(model.features(X), mean.features(X))
    assert torch.equal(model.blocks[0](model.enter(X)), mean.blocks[0](mean.enter(X)))
    assert not recwarn.list
    for mode in ("draw", "error"):
        pb.set_eval_(model, mode)
        with pytest.raises(PatchbayesError, match="outside a forward call"):
            model.features(X)


def test_an_instance_forward_that_hides_the_networks_own_is_noticed():
    model = patched()
    model.forward = lambda x: model.head(model.features(x))
    with pytest.raises(PatchbayesError, match="outside a forward call"):
        model(X)


def test_a_generating_loop_holds_one_draw_under_drawn_and_not_otherwise():
    model = patched(pb.EMP(50))
    seen: list[Tensor] = []
    model.blocks[0][0].register_forward_hook(lambda module, *_: seen.append(module.weight.detach().clone()))
    model.generate(X)
    assert len({tuple(w.tolist()) for w in seen}) > 1
    seen.clear()
    with pb.use_draw(model):
        model.generate(X)
    assert len(seen) == 4
    assert len({tuple(w.tolist()) for w in seen}) == 1
    with pb.use_draw(model):
        model.generate(X)
    assert len({tuple(w.tolist()) for w in seen}) == 2


def test_drawn_blocks_nest_and_end_also_after_an_error():
    model = patched(pb.EMP(50))
    one, two = pb.Draws.sample(model, 2)
    with pb.use_draw(model, one):
        first = model(X)
        with pb.use_draw(model, two):
            assert not torch.equal(model(X), first)
        assert torch.equal(model(X), first)
        with pytest.raises(RuntimeError), pb.use_draw(model, two):
            raise RuntimeError
        assert torch.equal(model(X), first)
    with pytest.raises(PatchbayesError, match="outside a forward call"):
        model.features(X)


def test_drawn_without_draws_advances_the_networks_own_generator():
    model = patched()
    clone = copy.deepcopy(model)
    with pb.use_draw(model):
        inside = model(X), model(X)
    assert torch.equal(inside[0], inside[1])
    assert torch.equal(inside[0], clone(X))
    assert torch.equal(model(X), clone(X))


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.label)
def test_an_old_evaluation_loop_gets_the_mean_network(method, recwarn):
    model = patched(method)
    mean = copy.deepcopy(model)
    pb.unpatch_(mean, keep="mean")
    model.eval(), mean.eval()
    count = network_of(model).generator.clone()
    assert torch.equal(model(X), mean(X))
    assert torch.equal(model.forward(X), mean(X))
    assert torch.equal(network_of(model).generator, count)  # nothing was drawn
    assert not recwarn.list
    model.train()
    assert not torch.equal(model(X), mean(X)) or not torch.equal(model(X), mean(X))


def test_set_eval_chooses_what_a_call_in_eval_mode_does():
    model = patched(pb.EMP(50))
    mean = copy.deepcopy(model)
    pb.unpatch_(mean, keep="mean")
    expected = mean.eval()(X)
    model.eval()
    pb.set_eval_(model, "draw")
    outputs = [model(X) for _ in range(4)]
    assert len({tuple(output.flatten().tolist()) for output in outputs}) > 1
    pb.set_eval_(nn.Sequential(model), "error")  # also through what holds the network
    with pytest.raises(PatchbayesError, match=r"(?s)eval mode.*patchbayes.predict.*use_draw"):
        model(X)
    draws = pb.Draws.sample(model, 1)
    with pb.use_draw(model, draws):
        inside = model(X)
    assert torch.equal(pb.forward_draws(model, X, draws)[0], inside)
    assert pb.predict(model, X, draws).num_draws == 1
    assert copy.deepcopy(network_of(model)).eval == "error"
    model.train()(X)  # training always draws
    pb.set_eval_(model.eval(), "mean")
    assert torch.equal(model(X), expected)
    with pytest.raises(PatchbayesError, match=r"mode='off'.*error"):
        pb.set_eval_(model, "off")


def test_training_and_prediction_do_not_warn(recwarn):
    model = patched()
    model(X)
    pb.predict(model, X, 3)
    model.eval()
    pb.predict(model, X, 3)
    with pb.use_draw(model):
        model(X)
    assert not recwarn.list


# ---- a slice of a patched Sequential has the patched class, without its record


def test_a_slice_of_a_patched_sequential_is_a_part_like_any_other():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 3))
    pb.patch_(model, pb.ECMP(3, jitter=0.5))
    x = torch.randn(6, 5)
    features = model[:2]
    mean = copy.deepcopy(model).eval()
    pb.unpatch_(mean, keep="mean")
    assert torch.equal(features.eval()(x), mean[:2](x))
    with pytest.raises(PatchbayesError, match=r"ran outside a forward call(.|\n)*use_draw"):
        features.train()(x)
    draw = pb.Draws.sample(model, 1)
    with torch.no_grad(), pb.use_draw(model, draw):
        assert torch.equal(model[2](features(x)), model(x))
    assert set(features.state_dict()) < set(model.state_dict())
    assert not pb.is_patched(features)
