"""torch.compile: the whole graph, no frozen draw, and the numbers of eager mode on the same draws."""

import copy

import pytest
import torch
from torch import nn

import patchbayes as pb
from patchbayes.patching.network import network_of

X = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(3, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 2)
    )


METHODS = {
    "EMP": pb.EMP(5),
    "ECMP": pb.ECMP(5),
    "p": pb.ECMP(3, probabilities=(0.5, 0.25, 0.25)),
    "sigma": pb.EMP(3, sigma=0.1),
    "DropConnect": pb.posteriors.DropConnect(0.3),
    "units": pb.posteriors.Mixture(components=2, tie="unit", zero=True),
    "Ensemble": pb.Ensemble(3),
    "statistics": pb.EMP(3, statistics="per_component"),
    "Dropout": pb.Dropout(0.3),
    "MeanField": pb.posteriors.MeanField(),
    "per example": {"norm": pb.EMP(4, per_example=True)},
}


def pair(method) -> tuple[nn.Sequential, nn.Sequential]:
    """Two equal patched networks: one to compile, one to run eagerly."""
    model = network()
    pb.patch_(model, method)
    return model, copy.deepcopy(model)


def compare(
    compiled, model: nn.Module, eager: nn.Module, *, steps: int = 4, tolerance: float = 1e-5
) -> list[torch.Tensor]:
    """Train both: outputs, gradients, buffers and generators agree at every step."""
    outputs = []
    for _ in range(steps):
        one, other = compiled(X), eager(X)
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
        for result, owner in ((one, model), (other, eager)):
            owner.zero_grad()
            result.square().sum().backward()
        for (name, ours), theirs in zip(model.named_parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4, msg=name)
        for (name, ours), theirs in zip(model.named_buffers(), eager.buffers(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance, msg=name)
        assert torch.equal(network_of(model).generator, network_of(eager).generator)
        outputs.append(one.detach())
    assert any(not torch.equal(outputs[0], output) for output in outputs[1:])
    return outputs


@pytest.mark.parametrize("name", METHODS)
def test_a_compiled_network_draws_and_trains_as_in_eager_mode(name):
    model, eager = pair(METHODS[name])
    compare(torch.compile(model, fullgraph=True, backend="aot_eager"), model, eager)


@pytest.mark.parametrize("name", ["EMP", "ECMP", "Dropout", "MeanField"])
def test_compiling_forward_does_not_freeze_the_draw(name):
    model, eager = pair(METHODS[name])
    compare(torch.compile(model.forward, fullgraph=True, backend="aot_eager"), model, eager)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_generated_code_draws_and_trains_as_in_eager_mode(name):
    model, eager = pair(METHODS[name])
    compare(torch.compile(model, fullgraph=True), model, eager)


@pytest.mark.slow
def test_generated_code_of_forward_does_not_freeze_the_draw():
    model, eager = pair(pb.ECMP(5))
    compare(torch.compile(model.forward, fullgraph=True), model, eager)


def test_a_compiled_network_takes_a_held_draw_and_is_not_compiled_again_for_each():
    model, eager = pair(pb.ECMP(5))
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    draws = pb.Draws.sample(model, 6)
    for draw in draws:
        with pb.use_draw(model, draw), pb.use_draw(eager, draw):
            torch.testing.assert_close(compiled(X), eager(X), rtol=1e-5, atol=1e-5)
    assert counter.frame_count <= 2
    compiled(X), eager(X)
    assert torch.equal(network_of(model).generator, network_of(eager).generator)


def test_training_does_not_compile_again_for_each_draw():
    model, _ = pair(pb.ECMP(5))
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for _ in range(6):
        compiled(X).sum().backward()
    assert counter.frame_count <= 2


def test_prediction_through_a_compiled_network_equals_eager_prediction():
    model, eager = pair(pb.ECMP(5))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    draws = pb.Draws.sample(model, 5)
    prediction = pb.predict(compiled, X, draws)
    torch.testing.assert_close(prediction.probs, pb.predict(eager, X, draws).probs)
    assert prediction.plan.engine == "loop"
    assert prediction.plan.fallback == "the network is compiled"
    assert pb.is_patched(compiled)
    torch.testing.assert_close(pb.kl(compiled), pb.kl(eager))


@pytest.mark.parametrize(
    "method", [pb.EMP(3, jitter=1.0, learn_probabilities=True), pb.Ensemble(3, learn_probabilities=True)]
)
def test_compiled_draws_follow_probabilities_that_change(method):
    model, eager = pair(method)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    compare(compiled, model, eager)
    for network in (model, eager):
        for site in pb.patched_sites(network).values():
            site.posterior.set_probabilities_(torch.tensor([0.1, 0.8, 0.1]))
    compare(compiled, model, eager, steps=24)
    pb.unpatch_(eager, keep=1)
    model.zero_grad()
    with torch.no_grad():
        same = [torch.allclose(compiled(X), eager(X), atol=1e-5) for _ in range(20)]
    assert sum(same) > 5  # with the first probabilities one in 81


def test_compiled_draws_follow_fixed_probabilities_that_are_set_anew():
    model, _ = pair(pb.EMP(2, jitter=1.0, probabilities=(0.5, 0.5)))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    compiled(X)
    for site in pb.patched_sites(model).values():
        site.posterior.set_probabilities_(torch.tensor([0.0, 1.0]))
    second = copy.deepcopy(model)
    pb.unpatch_(second, keep=1)
    for _ in range(6):
        torch.testing.assert_close(compiled(X), second(X), rtol=1e-5, atol=1e-5)


def test_a_part_that_is_compiled_by_itself_takes_the_draw_of_the_network():
    model, eager = pair(pb.EMP(5, jitter=1.0))
    model[5].compile(backend="aot_eager")
    for _ in range(6):
        torch.testing.assert_close(model(X), eager(X), rtol=1e-5, atol=1e-5)
    draws = pb.Draws.sample(eager, 4)
    torch.testing.assert_close(
        pb.forward_draws(model, X, draws), pb.forward_draws(eager, X, draws), rtol=1e-5, atol=1e-5
    )


class Twice(nn.Module):
    def forward(self, x):
        return 2 * x.sin()


def test_a_layer_that_is_compiled_stays_compiled():
    model, eager = pair(pb.ECMP(5))
    model.append(Twice()), eager.append(Twice())
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    model[-1].compile(fullgraph=True, backend=counter)
    model.eval(), eager.eval()  # in training mode a copy in evaluation mode would answer, which torch does not compile
    draws = pb.Draws.sample(eager, 5)
    for _ in range(2):
        prediction = pb.predict(model, X, draws)
        torch.testing.assert_close(prediction.probs, pb.predict(eager, X, draws).probs)
        assert prediction.plan.fallback == f'"{len(model) - 1}" is compiled'
    assert counter.frame_count == 1


def test_what_is_drawn_does_not_come_from_the_global_generator():
    model, _ = pair(pb.ECMP(5))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    compiled(X)
    state = torch.get_rng_state()
    compiled(X)
    assert torch.equal(torch.get_rng_state(), state)
