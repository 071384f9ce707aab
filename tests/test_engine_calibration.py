"""How many draws go together is measured once for each form of batch, and the measurement decides."""

import pytest
import torch
from torch import nn

import patchbayes as pb
from patchbayes.draws import network_of
from patchbayes.nets import small_cnn
from patchbayes.prediction import calibration
from patchbayes.prediction.calibration import Stopwatch, close
from patchbayes.prediction.execution import Execution


@pytest.fixture
def speed(monkeypatch):
    """A clock that goes by the draws computed: `costs` has the seconds for one draw of a chunk of each size."""
    costs, sizes, plain = {}, [], Execution.chunk
    passed = [0.0]

    def watched(self, chunk):
        size = chunk.stop - chunk.start
        sizes.append(size)
        passed[0] += size * costs.get(size, 1.0)
        return plain(self, chunk)

    monkeypatch.setattr(Execution, "chunk", watched)
    monkeypatch.setattr(calibration.time, "perf_counter", lambda: passed[0])
    monkeypatch.setattr(calibration.time, "process_time", lambda: passed[0])
    return costs, sizes


def network():
    model = small_cnn(size=8)
    pb.patch_(model, pb.ECMP(3))
    return model, torch.rand(2, 1, 8, 8), pb.Draws.sample(model, 300)


@pytest.mark.parametrize(
    ("costs", "fastest"),
    [
        ({1: 100, 16: 20, 64: 30, 256: 10}, 16),
        ({1: 100, 16: 20, 64: 10, 256: 8}, 256),
        ({1: 100, 16: 99, 64: 1}, 1),  # 1 % is not worth the memory
        ({1: 1e6, 16: 1, 64: 1}, 1),  # arithmetic dominates: not tried
    ],
)
def test_the_fastest_number_of_draws_is_taken_and_a_repeated_prediction_is_the_same_to_the_bit(speed, costs, fastest):
    seconds, sizes = speed
    seconds |= {size: cost * 1e-6 for size, cost in costs.items()}
    model, x, draws = network()
    first = pb.predict(model, x, draws)
    assert first.plan.chunk == fastest
    sizes.clear()
    second = pb.predict(model, x, draws)
    assert set(sizes[:-1]) == {fastest}
    assert sum(sizes) == 300
    assert torch.equal(first.probs, second.probs)


def test_each_form_of_batch_is_measured_for_itself(speed):
    seconds, sizes = speed
    seconds |= {1: 100e-6, 16: 20e-6, 64: 30e-6}
    model, x, draws = network()
    pb.predict(model, x, draws)
    sizes.clear()
    pb.predict(model, x[:, :, :4, :4].repeat(1, 1, 2, 2), draws)
    assert sizes.count(16) == 300 // 16
    sizes.clear()
    seconds |= {16: 200e-6}
    for batch in (torch.cat([x, x, x, x]), x):
        pb.predict(model, batch, draws)
    assert 16 in sizes  # the smaller batch as measured before
    assert sizes.count(1) > 300  # the larger one by the new measure


def test_two_draws_are_not_worth_a_measurement(speed):
    _, sizes = speed
    model, x, draws = network()
    assert pb.predict(model, x, draws[:3]).plan.chunk == 1
    assert set(sizes) == {1}


def test_a_part_that_vmap_cannot_do_keeps_the_others_together(monkeypatch):
    class Sorting(nn.Module):
        """Needs the numbers themselves."""

        def forward(self, x):
            return x[:, sorted(range(x.shape[1]), key=lambda column: float(x[0, column]))]

    monkeypatch.setattr(calibration, "_GAIN", float("inf"))
    model = nn.Sequential(
        nn.Linear(3, 6), nn.LayerNorm(6), nn.Tanh(), nn.LayerNorm(6), Sorting(), nn.LayerNorm(6), nn.Linear(6, 2)
    ).double()
    pb.patch_(model, pb.EMP(3, jitter=0.5))
    x, draws = torch.randn(4, 3).double(), pb.Draws.sample(model, 60)
    fast, slow = pb.predict(model, x, draws), pb.predict(model, x, draws, engine="loop")
    torch.testing.assert_close(fast.log_probs, slow.log_probs, rtol=1e-10, atol=1e-12)
    assert fast.plan.chunk > 1
    (form,) = vars(network_of(model))["_forms"].values()
    (way,) = form._itineraries.values()
    apart = [stage.apart for stage in way.graph.stages]
    assert any(apart)
    assert not all(apart)


def test_a_stopwatch_does_not_count_what_others_hold_up(monkeypatch):
    clock, processor = iter([0.0, 5.0]), iter([0.0, 2.0])
    monkeypatch.setattr(calibration.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(calibration.time, "process_time", lambda: next(processor))
    assert Stopwatch().seconds() == 2.0


def test_close_means_equal_up_to_rounding():
    a = torch.tensor([1.0, 1000.0, -torch.inf], dtype=torch.float64)
    assert close(a, a)
    assert close(a + torch.tensor([1e-7, 0, 0]), a)  # beside the largest
    assert not close(a + torch.tensor([1e-5, 0, 0]), a)
    assert not close(a.float(), a)
    assert not close(a[:2], a)
    assert not close(torch.tensor([1.0, 1000.0, 0.0], dtype=torch.float64), a)
    assert not close(torch.tensor([1, 2]), torch.tensor([1, 3]))
    assert close(torch.zeros(0), torch.zeros(0))
