"""After predict the network is as it was: modes, buffers, gradients, held draws, memory; after an error too."""

import gc

import pytest
import torch
from torch import nn

import patchbayes as pb
from patchbayes.errors import PatchbayesError, WrongDraws
from prediction_networks import METHODS, classifier, patched, some_inputs

# The network comes back as it was


class Restless(nn.Module):
    """Does in eval mode all that a well-behaved module would not: changes, replaces and makes buffers, draws numbers."""

    def __init__(self, fail_at=None):
        super().__init__()
        self.net, self.fail_at = classifier(), fail_at
        self.frozen = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5)).double()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("last", torch.zeros(2))
        self.register_buffer("cache", None)

    def forward(self, x):
        self.calls += 1
        self.last = x.detach().clone()
        self.cache = x.mean()
        if not hasattr(self, "late"):
            self.register_buffer("late", torch.ones(2), persistent=False)
        torch.rand(3)
        if self.fail_at is not None and self.calls >= self.fail_at:
            raise RuntimeError("in the middle")
        return self.net(self.frozen(x))


def restless(method=None, fail_at=None):
    torch.manual_seed(0)
    model = Restless(fail_at)
    pb.patch_(model, method or pb.ECMP(3, jitter=0.5))
    model.train()
    model.frozen.eval()
    model.net.relu.eval()
    return model


def state_of(model):
    """Everything that prediction must give back; tensors by value (bits) and by identity."""
    buffers = {
        f"{name}.{key}": (id(value), None if value is None else value.clone().numpy().tobytes())
        for name, module in model.named_modules()
        for key, value in module._buffers.items()
    }
    return {
        "modes": [(name, module.training) for name, module in model.named_modules()],
        "buffers": buffers,
        "parameters": [(n, id(p), p.detach().numpy().tobytes()) for n, p in model.named_parameters()],
        "gradients": [None if p.grad is None else p.grad.numpy().tobytes() for p in model.parameters()],
        "state dict": {key: value.numpy().tobytes() for key, value in model.state_dict().items()},
        "global random state": torch.random.get_rng_state().numpy().tobytes(),
        "current draw": [m.weight.detach().numpy().tobytes() for m in (model.net.norm, model.net.fc)],
        "gradient mode": torch.is_grad_enabled(),
    }


@pytest.mark.parametrize(
    "method",
    [pb.ECMP(3), pb.EMP(3, statistics="per_component"), pb.EMP(2, per_example=True), pb.posteriors.MeanField()],
)
def test_the_network_comes_back_exactly_as_it_was(method):
    rules, x = {"norm": method, "net.fc": pb.Dropout(0.2)}, some_inputs()
    model, twin = restless(rules), restless(rules)
    for m in (model, twin):
        m(x).sum().backward()
        del m._buffers["late"]
    before = state_of(model)
    prediction = pb.predict(model, [x, x[:2]], 3, keep_draws=True)
    assert prediction.probs.shape == (9, 3)
    after = state_of(model)
    for what, value in before.items():
        assert after[what] == value, what
    assert torch.equal(model(x), twin(x))  # and goes on as if nothing had been


@pytest.mark.parametrize("where", ["forward", "inputs", "output", "statistics"])
def test_the_network_comes_back_after_an_exception_in_the_middle(where):
    def broken_batches():
        yield some_inputs(3)
        raise RuntimeError("in the middle")

    outputs = []

    def broken_output(y):
        outputs.append(y)
        if len(outputs) == 3:
            raise RuntimeError("in the middle")
        return y

    def bad_output(y):
        outputs.append(y)
        return y / (0 if len(outputs) == 3 else 1)

    model = restless(fail_at=3 if where == "forward" else None)
    twin = restless()
    before = state_of(model)
    inputs = broken_batches() if where == "inputs" else some_inputs(3)
    pick = {"output": broken_output, "statistics": bad_output}.get(where)
    with pytest.raises((RuntimeError, PatchbayesError), match=r"in the middle|not finite"):
        pb.predict(model, inputs, 4, output=pick, engine="loop")
    after = state_of(model)
    for what, value in before.items():
        assert after[what] == value, what
    model.fail_at = None
    states = []
    for m in (model, twin):
        torch.manual_seed(0)
        states.append(m(some_inputs()))
    assert torch.equal(*states)


def test_a_held_draw_is_still_held_after_prediction():
    model, x = patched(METHODS["EMP"]).eval(), some_inputs()
    draws = pb.Draws.sample(model, 6, torch.Generator().manual_seed(3))
    with torch.no_grad(), pb.use_draw(model, draws[2]):
        before = model(x)
        pb.predict(model, x, 3)
        assert torch.equal(model(x), before)


def test_prediction_builds_no_autograd_graph():
    model, x = patched(METHODS["EMP"]), some_inputs().requires_grad_()
    seen = []
    prediction = pb.predict(model, x, 3, keep_draws=True, output=lambda y: seen.append(y) or y)
    tensors = [*seen, prediction.probs, prediction.log_probs, prediction.standard_error, prediction.draw_probs]
    assert not any(t.requires_grad for t in tensors)
    assert x.grad is None
    model(x).sum().backward()
    assert x.grad is not None


def test_prediction_under_inference_mode_leaves_a_network_that_trains():
    model, x = patched(pb.EMP(3, statistics="per_component")), some_inputs()
    expected = pb.predict(model, x, 4).probs
    with torch.inference_mode():
        frozen = x.clone()
        torch.testing.assert_close(pb.predict(model, frozen, 4).probs, expected)
    torch.testing.assert_close(pb.predict(model, frozen, 4).probs, expected)
    model.train()(x).sum().backward()
    assert model.hidden.weight.grad is not None


def live_values_at_the_end(model, x, num_draws, **options):
    counts = []

    def count(y):
        late = len(counts) >= num_draws - 2  # the walk over all objects is slow
        counts.append(sum(t.numel() for t in gc.get_objects() if type(t) is torch.Tensor) if late else 0)
        return y

    gc.collect()
    pb.predict(model, x, num_draws, output=count, engine="loop", **options)
    return max(counts)


def test_memory_does_not_grow_with_the_number_of_draws_unless_they_are_kept():
    model, x = patched(METHODS["ECMP"]), some_inputs()
    live_values_at_the_end(model, x, 2)  # whatever is made once
    few, many = live_values_at_the_end(model, x, 90), live_values_at_the_end(model, x, 180)
    assert many <= few + 180 * 4  # weights and keys, not outputs
    kept = live_values_at_the_end(model, x, 180, keep_draws=True)
    assert kept >= many + 180 * len(x) * 3


# Bad input


def test_bad_input_is_an_error_that_leaves_the_network_alone():
    model, x = restless(), some_inputs()
    foreign = pb.Draws.sample(patched(pb.EMP(2)), 3)
    nan = x.clone()
    nan[1, 2] = torch.nan
    before = state_of(model)
    cases = [
        (lambda: pb.predict(model, nan), PatchbayesError, "holds NaN, 1 of 28"),
        (lambda: pb.predict(model, {"x": nan}), PatchbayesError, "holds NaN"),
        (lambda: pb.predict(model, [x, (nan, 0)]), PatchbayesError, "holds NaN"),
        (lambda: pb.predict(model, x * torch.inf), PatchbayesError, "not finite"),
        (lambda: pb.predict(model, []), PatchbayesError, "no batch"),
        (lambda: pb.predict(model, iter(())), PatchbayesError, "no batch"),
        (lambda: pb.predict(model, 3), PatchbayesError, "got a int"),
        (lambda: pb.predict(model, ()), PatchbayesError, "no tensor"),
        (lambda: pb.predict(model, ["text"]), PatchbayesError, "no tensor"),
        (lambda: pb.predict(model, x, foreign), WrongDraws, "another network"),
        (lambda: pb.predict(model, x, 0), PatchbayesError, "at least 1"),
        (lambda: pb.predict(model, x, 2.5), PatchbayesError, "at least 1"),
        (lambda: pb.predict(model, x, True), PatchbayesError, "at least 1"),
        (lambda: pb.predict(model, x, pb.Draws.sample(model, 2)[:0]), PatchbayesError, "no draw"),
        (
            lambda: pb.predict(model, x, pb.Draws.sample(model, 2), generator=torch.Generator()),
            PatchbayesError,
            "made already",
        ),
        (lambda: pb.predict(model, x, likelihood="categorical"), PatchbayesError, "likelihood="),
        (lambda: pb.predict(classifier(), x, pb.Draws.sample(model, 2)), PatchbayesError, "not patched"),
        (lambda: pb.predict(model, x).sample(), PatchbayesError, "keep_draws=True"),
        (lambda: pb.predict(model, x).check(torch.zeros(7), torch.mean), PatchbayesError, "keep_draws=True"),
        (lambda: pb.predict(model, x, keep_draws=True).sample(0), PatchbayesError, "at least 1"),
        (
            lambda: pb.predict(model, x, keep_draws=True).check(torch.zeros(3), torch.mean),
            PatchbayesError,
            r"shape \(7,\), got shape \(3,\)",
        ),
    ]
    for act, kind, message in cases:
        with pytest.raises(kind, match=message):
            act()
        after = state_of(model)
        for what, value in before.items():
            assert after[what] == value, (message, what)


class Remembers(nn.Module):
    """Keeps what it computed from its parameters, as attention with cached biases does: deepcopy refuses such a tensor."""

    def __init__(self):
        super().__init__()
        self.net, self.bias, self.kept = classifier(), nn.Parameter(torch.ones(2).double()), {}

    def forward(self, x):
        if "bias" not in self.kept:
            self.kept["bias"] = self.bias * 2
        return self.net(x) + self.kept["bias"][0]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("engine", ["graph", "loop"])
def test_a_network_that_keeps_what_it_computed_is_predicted(engine, training):
    x, made = some_inputs(), []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(Remembers())
        pb.patch_(made[-1], pb.ECMP(3, jitter=0.5))
    model, fresh = made[0].eval(), made[1].eval()
    model(x)
    model.train(training)
    assert not model.kept["bias"].is_leaf
    prediction = pb.predict(model, x, pb.Draws.sample(model, 4), engine=engine)
    assert prediction.plan.engine == engine
    expected = pb.predict(fresh, x, pb.Draws.sample(fresh, 4), engine="loop")
    torch.testing.assert_close(prediction.probs, expected.probs)


def test_buffers_that_nothing_changed_are_left_alone_since_other_threads_read_them():
    class Watched(dict):
        cleared = 0

        def clear(self):
            Watched.cleared += 1
            super().clear()

    model, x = patched(METHODS["ECMP"]).eval(), some_inputs()
    model.norm._buffers = Watched(model.norm._buffers)
    before = dict(model.norm._buffers)
    pb.predict(model, x, 3, engine="loop")
    pb.predict(model, x, draws="mean")
    assert before
    assert Watched.cleared == 0
    assert all(model.norm._buffers[name] is buffer for name, buffer in before.items())
