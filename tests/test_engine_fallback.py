"""Networks that cannot be traced: run whole, several draws at once where that can be done, else one by one; never wrong."""

import pytest
import torch
from torch import nn

import patchbayes as pb
from patchbayes.prediction import calibration


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)

    def compute(self, x):
        return self.last(self.norm(self.first(x)).relu())


class AnyArguments(Body):
    def forward(self, *inputs):
        return self.compute(inputs[0])


class Length(Body):
    def forward(self, x):
        return self.compute(x) / len(x)


class OverTheShape(Body):
    def forward(self, x):
        total = 0
        for row in range(x.shape[0]):
            total = total + x[row]
        return self.compute(x - total / x.shape[0])


class DictOutput(Body):
    def forward(self, x, **options):
        y = self.compute(x)
        return {"scores": y, "size": y.square().sum(-1)}


class SignOfTheInput(Body):
    """Control flow that depends on the input but not on the draw."""

    def forward(self, x):
        return self.compute(x) if x.sum() > 0 else self.compute(-x)


VMAPPABLE = {cls.__name__: cls for cls in (AnyArguments, Length, OverTheShape, DictOutput, SignOfTheInput)}


class SignOfTheActivations(Body):
    def forward(self, x):
        y = self.compute(x)
        return y if y[0, 0] > 0 else 2 * y


class CountingBuffer(Body):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, *inputs):
        self.calls += 1
        return self.compute(inputs[0]) * self.calls


class NewBuffer(CountingBuffer):
    def forward(self, *inputs):
        self.calls = self.calls + 1
        return self.compute(inputs[0]) * self.calls


class CountingAttribute(Body):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, *inputs):
        self.calls += 1
        return self.compute(inputs[0]) * self.calls


class CountingList(Body):
    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, *inputs):
        self.seen.append(1)
        return self.compute(inputs[0]) * len(self.seen)


class StoresFeatures(Body):
    def forward(self, *inputs):
        self.features = self.first(inputs[0])
        return self.compute(inputs[0])


class Random(Body):
    def forward(self, *inputs):
        return self.compute(nn.functional.dropout(inputs[0], 0.5, training=True))


_calls = [0]


class CountingGlobal(Body):
    def forward(self, *inputs):
        _calls[0] += 1
        return self.compute(inputs[0]) * _calls[0]


EFFECTS = {cls.__name__: cls for cls in (CountingBuffer, NewBuffer, CountingAttribute, CountingList, StoresFeatures)}


def scores(value):
    return value["scores"] if isinstance(value, dict) else value


def build(cls, method=None):
    model = cls().double()
    pb.patch_(model, method or pb.EMP(3, jitter=0.7))
    return model


def assert_same(fast, slow):
    for name in ("probs", "log_probs", "expected_entropy", "standard_error"):
        torch.testing.assert_close(getattr(fast, name), getattr(slow, name), rtol=1e-10, atol=1e-12, equal_nan=True)


@pytest.fixture
def eager(monkeypatch):
    """Take draws together wherever that can be done."""
    monkeypatch.setattr(calibration, "_WORTH_FOLDING", float("inf"))
    monkeypatch.setattr(calibration, "_GAIN", float("inf"))


@pytest.mark.parametrize("method", ["emp", "ecmp"])
@pytest.mark.parametrize("network", VMAPPABLE)
def test_an_untraceable_network_is_run_whole_with_several_draws_at_once(network, method, eager):
    model = build(VMAPPABLE[network], pb.EMP(3, jitter=0.7) if method == "emp" else pb.ECMP(3, jitter=0.7))
    draws = pb.Draws.sample(model, 30)
    for x in (torch.randn(5, 3).double(), torch.randn(4, 3).double()):
        fast = pb.predict(model, x, draws, output=scores)
        assert fast.plan.engine == "vmap"
        assert fast.plan.chunk > 1
        assert "cannot be traced" in str(fast.plan)
        assert_same(fast, pb.predict(model, x, draws, output=scores, engine="loop"))
    assert (fast.plan.networks == 9) == (method == "emp")
    assert fast.plan.work == fast.plan.floor == fast.plan.networks / 30


def test_the_network_runs_once_for_draws_that_are_alike(eager):
    runs = []

    class Watched(Length):
        def forward(self, x):
            runs.append(1)
            return super().forward(x)

    model = build(Watched)
    x, draws = torch.randn(5, 3).double(), pb.Draws.sample(model, 200)
    pb.predict(model, x, draws)
    runs.clear()
    assert pb.predict(model, x, draws).plan.engine == "vmap"
    assert len(runs) == 1  # all nine networks in one call


def test_vmap_is_taken_only_where_it_is_faster(monkeypatch):
    monkeypatch.setattr(calibration, "_GAIN", 0.0)  # nothing is faster
    model = build(Length)
    x, draws = torch.randn(5, 3).double(), pb.Draws.sample(model, 200)
    fast = pb.predict(model, x, draws)
    assert fast.plan.engine == "loop"
    assert "cannot be traced" in fast.plan.fallback
    assert_same(fast, pb.predict(model, x, draws, engine="loop"))


@pytest.mark.parametrize("signs", [(1, 1), (-1, -1), (1, -1)])
def test_control_flow_that_depends_on_the_draw_goes_through_the_loop_and_says_why(signs, eager):
    model = build(SignOfTheActivations)
    draws = pb.Draws.sample(model, 12)
    torch.manual_seed(3)
    x = torch.randn(4, 3).double()
    for sign in signs:
        fast = pb.predict(model, sign * x, draws)
        assert fast.plan.engine == "loop"
        assert "cannot be traced" in fast.plan.fallback
        assert fast.plan.fallback in str(fast.plan)
        assert_same(fast, pb.predict(model, sign * x, draws, engine="loop"))


@pytest.mark.parametrize("network", EFFECTS)
def test_side_effects_are_found_out(network, eager):
    """Every draw then has its own forward call, in order, from the state that the network was in."""
    model, twin = build(EFFECTS[network]), build(EFFECTS[network])
    twin.load_state_dict(model.state_dict())
    draws = pb.Draws.sample(model, 12)
    x = torch.randn(4, 3).double()
    fast = pb.predict(model, x, draws)
    assert fast.plan.engine == "loop"
    assert "changes attributes or buffers" in fast.plan.fallback
    assert fast.plan.networks == 12
    assert_same(fast, pb.predict(twin, x, pb.Draws.sample(twin, 12), engine="loop"))


@pytest.mark.parametrize("network", [Random, CountingGlobal])
def test_a_forward_that_is_never_the_same_is_found_out(network):
    model = build(network)
    plan = pb.predict(model, torch.randn(4, 3).double(), pb.Draws.sample(model, 12)).plan
    assert plan.engine == "loop"
    assert "something else each time" in plan.fallback


def test_a_wrong_answer_of_vmap_is_found_out(monkeypatch, eager):
    """Draws that go together are compared with the same draws one by one, before they are believed."""
    plain = torch.func.vmap
    wrong = []

    def broken(function, **options):
        def run(*args):
            wrong.append(1)
            return torch.utils._pytree.tree_map(lambda t: t + 1, plain(function, **options)(*args))

        return run

    monkeypatch.setattr(torch.func, "vmap", broken)
    for cls in (Length, nn.Sequential):
        if cls is Length:
            model = build(cls)
        else:
            model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).double()
            pb.patch_(model, pb.EMP(3, jitter=0.7))
        x, draws = torch.randn(5, 3).double(), pb.Draws.sample(model, 30)
        wrong.clear()
        fast = pb.predict(model, x, draws)
        assert wrong
        assert_same(fast, pb.predict(model, x, draws, engine="loop"))


def test_noise_is_drawn_for_one_draw_at_a_time(eager):
    model = build(Length, pb.EMP(2, sigma=0.3))
    x, draws = torch.randn(5, 3).double(), pb.Draws.sample(model, 9)
    fast = pb.predict(model, x, draws)
    assert fast.plan.engine == "loop"
    assert_same(fast, pb.predict(model, x, draws, engine="loop"))


def test_what_tracing_stores_on_the_network_is_taken_off_again():
    class Storing(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.fc, self.offset = nn.LayerNorm(3), nn.Linear(3, 2), [torch.ones(2)]

        def forward(self, x):
            self.features = self.norm(x)
            return self.fc(self.features) + self.offset[0]

    model = Storing()
    pb.patch_(model, pb.EMP(3, jitter=0.5))
    before = set(vars(model))
    x, draws = torch.randn(4, 3), pb.Draws.sample(model, 9)
    fast = pb.predict(model, x, draws)
    assert fast.plan.engine == "stages"
    assert set(vars(model)) == before
    torch.testing.assert_close(fast.probs, pb.predict(model, x, draws, engine="loop").probs)
