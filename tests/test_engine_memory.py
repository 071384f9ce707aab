"""Prediction stays within its memory, whatever the number of draws, components and layers, and recovers where it cannot."""

import pytest
import torch
from torch import nn

import patchbayes as pb
from patchbayes.nets import small_cnn
from patchbayes.prediction import calibration
from patchbayes.prediction.calibration import Setting
from patchbayes.prediction.execution import Execution
from patchbayes.prediction.memory import LiveBytes

BATCH, WIDTH = 128, 32
VALUE = 4 * BATCH * WIDTH  # bytes of one activation


def chain(depth):
    layers = [layer for _ in range(depth) for layer in (nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.ReLU())]
    return nn.Sequential(nn.Linear(8, WIDTH), *layers, nn.Linear(WIDTH, 3))


class Towers(nn.Module):
    """Branches whose sites are independent of each other: in any order of the draws, values of some are needed far apart."""

    def __init__(self, number):
        super().__init__()
        self.towers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(number)
        )
        self.fc = nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.fc(sum(tower(x) for tower in self.towers))


NETWORKS = {"short": lambda: chain(2), "deep": lambda: chain(10), "towers": lambda: Towers(4)}


def peaks(model, draws, limit):
    """Bytes at the peak of a first prediction, which traces, checks and calibrates, and of a second one; and that one."""
    x = torch.randn(BATCH, 8, generator=torch.Generator().manual_seed(0))
    measured = []
    for _ in range(2):
        with LiveBytes() as memory:
            prediction = pb.predict(model, x, draws, memory_limit=limit)
        measured.append(memory.peak)
    return measured, prediction


@pytest.mark.parametrize("draws", [10, 100])
@pytest.mark.parametrize("components", [2, 7])
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("values", [16, 200])
def test_the_peak_stays_within_the_limit(network, components, draws, values):
    for method in (pb.EMP, pb.ECMP):
        model = NETWORKS[network]()
        pb.patch_(model, method(components), "norm+output")
        measured, prediction = peaks(model, pb.Draws.sample(model, draws), values * VALUE)
        assert max(measured) <= values * VALUE
        assert prediction.plan.engine == "stages"


def test_the_limit_decides_what_goes_together_and_what_is_computed_again(monkeypatch):
    monkeypatch.setattr(calibration, "_GAIN", float("inf"))  # the largest number of draws that fits
    model = chain(10)
    pb.patch_(model, pb.EMP(2), "norm+output")
    draws = pb.Draws.sample(model, 100)
    found = {}
    for values in (12, 300, 2000):
        _, found[values] = peaks(model, draws, values * VALUE)
        torch.testing.assert_close(found[values].probs, found[12].probs)
    plans = {values: prediction.plan for values, prediction in found.items()}
    assert 1 == plans[12].chunk < plans[300].chunk < plans[2000].chunk
    assert plans[12].work > plans[12].floor == plans[300].floor == plans[300].work


@pytest.mark.parametrize("broken", ["chunk", "kept"])
def test_the_peak_would_be_found_out_of_the_limit(monkeypatch, broken):
    """Negative control: an engine that computes too many draws together, or keeps too much, is caught by the measure above."""
    fitting = Setting.fitting

    def careless(self, schedule, limit, scale):
        size, carried = fitting(self, schedule, limit, scale)
        return (64, carried) if broken == "chunk" else (size, frozenset(range(len(schedule.graph.stages))))

    monkeypatch.setattr(Setting, "fitting", careless)
    model = NETWORKS["deep"]()
    pb.patch_(model, pb.EMP(2), "norm+output")
    (_, again), _ = peaks(model, pb.Draws.sample(model, 100), 12 * VALUE)
    assert again > 12 * VALUE


def test_live_bytes_counts_what_lives():
    with LiveBytes() as memory:
        a = torch.zeros(1000)
        assert memory.live == 4000
        b = a.view(10, 100)  # the same memory
        c = a + 1
        a += 1
        assert (memory.live, memory.peak) == (8000, 8000)
        del a, c
        assert memory.live == 4000  # held by the view
        del b
    assert (memory.live, memory.peak) == (0, 8000)


def test_memory_does_not_grow_with_the_draws(monkeypatch):
    monkeypatch.setattr(calibration, "_GAIN", 0.0)  # one draw at a time
    model = chain(4)
    pb.patch_(model, pb.EMP(3), "norm+output")
    few, many = (peaks(model, pb.Draws.sample(model, draws), 100 * VALUE)[0][1] for draws in (60, 400))
    assert many < 1.2 * few


def watch(monkeypatch, refuse_above=None):
    """The sizes of all chunks that are computed from now on, and those that were refused for want of memory."""
    sizes, refused, plain = [], [], Execution.chunk

    def watched(self, chunk):
        size = chunk.stop - chunk.start
        if refuse_above is not None and size > refuse_above:
            refused.append(size)
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        sizes.append(size)
        return plain(self, chunk)

    monkeypatch.setattr(Execution, "chunk", watched)
    return sizes, refused


def going_together(monkeypatch, method):
    """A network, a batch and 40 draws that calibration finds fastest all at once."""
    monkeypatch.setattr(calibration, "_WORTH_FOLDING", float("inf"))
    monkeypatch.setattr(calibration, "_GAIN", float("inf"))
    model = small_cnn(size=8)
    pb.patch_(model, method)
    return model, torch.rand(2, 1, 8, 8), pb.Draws.sample(model, 40)


def test_a_memory_limit_keeps_draws_apart(monkeypatch):
    model, x, draws = going_together(monkeypatch, pb.ECMP(3))
    sizes, _ = watch(monkeypatch)
    free = pb.predict(model, x, draws)
    assert max(sizes) == free.plan.chunk == 40
    sizes.clear()
    tight = pb.predict(model, x, draws, memory_limit=1)
    assert set(sizes) == {1}
    torch.testing.assert_close(free.probs, tight.probs)


def test_a_larger_limit_is_made_use_of(monkeypatch):
    model, x, draws = going_together(monkeypatch, pb.EMP(3))
    assert pb.predict(model, x, draws, memory_limit=1).plan.chunk == 1
    assert pb.predict(model, x, draws, memory_limit=2**30).plan.chunk > 1
    assert pb.predict(model, x, draws, memory_limit=1).plan.chunk == 1


def test_running_out_of_memory_halves_the_chunk(monkeypatch):
    model, x, draws = going_together(monkeypatch, pb.ECMP(3))
    reference = pb.predict(model, x, draws, engine="loop")
    assert pb.predict(model, x, draws).plan.chunk == 40
    sizes, refused = watch(monkeypatch, refuse_above=5)
    prediction = pb.predict(model, x, draws)
    assert refused == [40, 20, 10]
    assert sizes == [5] * 8
    assert prediction.plan.chunk == 5
    torch.testing.assert_close(prediction.probs, reference.probs)


def test_running_out_of_memory_in_the_calibration_keeps_to_what_went(monkeypatch):
    model, x, draws = going_together(monkeypatch, pb.ECMP(3))
    _, refused = watch(monkeypatch, refuse_above=20)
    assert pb.predict(model, x, draws).plan.chunk == 16
    assert refused == [40]


def test_an_error_that_is_not_about_memory_is_not_swallowed(monkeypatch):
    model = small_cnn(size=8)
    pb.patch_(model, pb.ECMP(3))
    x, draws = torch.rand(2, 1, 8, 8), pb.Draws.sample(model, 40)
    pb.predict(model, x, draws)

    def broken(self, chunk):
        raise RuntimeError("something else")

    monkeypatch.setattr(Execution, "chunk", broken)
    with pytest.raises(RuntimeError, match="something else"):
        pb.predict(model, x, draws)
