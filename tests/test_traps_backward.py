"""The backward pass of a patched network: several forwards before it, and activations that are computed again."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import patchbayes as pb
from patchbayes.errors import PatchbayesError
from patchbayes.patching.network import network_of
from trap_network import METHODS, Net, X, assert_close, gradients, patched

# ---- two forwards before one backward, and activation checkpointing


def reference_gradients(model: Net, weights: list[Tensor]) -> dict[str, Tensor]:
    """Gradients of sum_i (output_i * weights_i), a backward after every forward."""
    clone = copy.deepcopy(model)
    clone.recompute = None
    for weight in weights:
        (clone(X) * weight).sum().backward()
    return gradients(clone)


WEIGHTS = [torch.randn(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i in range(3)]


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.label)
def test_two_forwards_before_one_backward_give_each_its_own_component(method):
    model = patched(method)
    expected = reference_gradients(model, WEIGHTS)
    outputs = [model(X) for _ in WEIGHTS]
    assert len({output[0, 0].item() for output in outputs}) > 1
    sum((output * weight).sum() for output, weight in zip(outputs, WEIGHTS, strict=True)).backward()
    assert_close(gradients(model), expected)


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.label)
def test_activation_checkpointing_recomputes_with_the_draw_of_the_forward(method, reentrant):
    model = patched(method)
    expected = reference_gradients(model, WEIGHTS)
    model.recompute = reentrant
    outputs = [model(X) for _ in WEIGHTS]
    for output, weight in reversed(list(zip(outputs, WEIGHTS, strict=True))[1:]):
        (output * weight).sum().backward()
    (outputs[0] * WEIGHTS[0]).sum().backward()
    assert_close(gradients(model), expected)


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_activation_checkpointing_of_several_forwards_in_one_backward(reentrant):
    model = patched()
    expected = reference_gradients(model, WEIGHTS)
    model.recompute = reentrant
    outputs = [model(X) for _ in WEIGHTS]
    sum((output * weight).sum() for output, weight in zip(outputs, WEIGHTS, strict=True)).backward()
    assert_close(gradients(model), expected)


def test_activation_checkpointing_with_several_draws_of_forward_draws():
    model = patched()
    draws = pb.Draws.enumerate(model)
    pb.forward_draws(model, X, draws).square().sum().backward()
    expected = gradients(model)
    model.zero_grad()
    model.recompute = False
    pb.forward_draws(model, X, draws).square().sum().backward()
    assert_close(gradients(model), expected)


def test_checkpointing_the_whole_patched_network_recomputes_the_same_draw():
    model = patched()
    expected = reference_gradients(model, WEIGHTS)
    outputs = [checkpoint(model, X, use_reentrant=False) for _ in WEIGHTS]
    sum((output * weight).sum() for output, weight in zip(outputs, WEIGHTS, strict=True)).backward()
    assert_close(gradients(model), expected)
    assert network_of(model).generator[1] == len(WEIGHTS)


def test_reentrant_checkpointing_of_the_whole_network_is_refused_outside_drawn():
    model = patched()
    x = X.clone().requires_grad_()
    outputs = checkpoint(model, x, use_reentrant=True), checkpoint(model, x, use_reentrant=True)
    with pytest.raises(PatchbayesError, match=r"use_reentrant=False(.|\n)*patchbayes.use_draw\(model\)"):
        (outputs[0] + outputs[1]).sum().backward()
    model.zero_grad()
    draws = pb.Draws.sample(model, 1)
    with pb.use_draw(model, draws):
        checkpoint(model, x, use_reentrant=True).square().sum().backward()
    found = gradients(model)
    model.zero_grad()
    with pb.use_draw(model, draws):
        model(x).square().sum().backward()
    assert_close(found, gradients(model))


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_checkpointing_a_bypass_needs_backward_inside_drawn(reentrant):
    model = patched()
    model.recompute = reentrant
    one, two = pb.Draws.sample(model, 2)
    with pb.use_draw(model, one):
        features = model.features(X)
    with pytest.raises(PatchbayesError, match=r"(?s)the draw of its forward is not known.*use_draw\(model\)"):
        features.sum().backward()
    model.zero_grad()
    with pb.use_draw(model, two):
        model.features(X).square().sum().backward()
    found = gradients(model)
    model.zero_grad()
    model.recompute = None
    with pb.use_draw(model, two):
        features = model.features(X)
    features.square().sum().backward()
    assert_close(found, gradients(model))


def test_a_backward_inside_a_drawn_block_does_not_change_the_held_draw():
    model = patched(pb.EMP(50))
    earlier = model(X)
    draws = pb.Draws.sample(model, 1)
    with pb.use_draw(model, draws):
        expected = model.features(X)
        earlier.sum().backward()
        assert torch.equal(model.features(X), expected)


def test_checkpointing_works_when_the_output_is_no_tensor():
    class Output:
        def __init__(self, logits: Tensor) -> None:
            self.logits = logits

    class Wrapped(Net):
        def forward(self, x: Tensor) -> Any:
            return Output(super().forward(x))

    model = Wrapped().double()
    pb.patch_(model, pb.EMP(4, jitter=1.0), "norm")
    clone = copy.deepcopy(model)
    for weight in WEIGHTS:
        (clone(X).logits * weight).sum().backward()
    model.recompute = False
    outputs = [model(X).logits for _ in WEIGHTS]
    sum((output * weight).sum() for output, weight in zip(outputs, WEIGHTS, strict=True)).backward()
    assert_close(gradients(model), gradients(clone))


@pytest.mark.parametrize(
    "method", [pb.EMP(3), pb.ECMP(3), pb.posteriors.MeanField(), pb.mixed()], ids=["emp", "ecmp", "meanfield", "mixed"]
)
def test_patching_between_two_steps_while_the_last_loss_is_alive(method):
    """A loop leaves its last loss behind: torch then keeps gradient nodes of the old shape, unless they are made again."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, 6), nn.Linear(6, 3))
    x, kept = torch.randn(8, 4), []

    def step():
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        loss = model.train()(x).square().mean()
        loss.backward()
        optimizer.step()
        kept.append(loss)

    step()
    pb.patch_(model, method, **({} if isinstance(method, dict) else {"sites": "norm+output"}))
    step()
    pb.unpatch_(model, keep="mean")
    before = model[1].weight.clone()
    step()
    assert not torch.equal(model[1].weight, before)
