"""Prediction stays within its memory, whatever the number of draws, and recovers where it cannot."""

import subprocess
import sys
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import patchbayes as pb
from patchbayes.prediction.engine import execution

BATCH, WIDTH = 64, 32


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that operations in its context make, as long as these live."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self._sizes = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = {storage._cdata for storage in _storages((args, kwargs))}
        made = func(*args, **(kwargs or {}))
        for storage in _storages(made):
            if storage._cdata not in before and storage._cdata not in self._sizes:
                self._sizes[storage._cdata] = storage.nbytes()
                self.live += storage.nbytes()
                weakref.finalize(storage, self._gone, storage._cdata)
        self.peak = max(self.peak, self.live)
        return made

    def _gone(self, storage):
        self.live -= self._sizes.pop(storage)


def _storages(values):
    return [t.untyped_storage() for t in tree_leaves(values) if isinstance(t, torch.Tensor)]


def network(depth=4, method=None):
    torch.manual_seed(0)
    layers = [layer for _ in range(depth) for layer in (nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 3)).eval()
    pb.patch_(model, method or pb.ECMP(3, jitter=0.3), "norm")
    return model


def peak_of(model, draws, **options):
    x = torch.randn(BATCH, WIDTH)
    pb.predict(model, x, draws, engine="graph", **options)  # captures
    with LiveBytes() as bytes_:
        prediction = pb.predict(model, x, draws, engine="graph", **options)
    return bytes_.peak, prediction.plan


def test_the_limit_decides_how_many_go_together():
    model = network()
    draws = pb.Draws.sample(model, 200)
    large, open_plan = peak_of(model, draws)
    small, tight_plan = peak_of(model, draws, memory_limit=400_000)
    assert tight_plan.chunk < open_plan.chunk
    assert small < large
    assert small < 1_500_000


def test_memory_does_not_grow_with_the_draws():
    model = network()
    few, _ = peak_of(model, pb.Draws.sample(model, 100), memory_limit=400_000)
    many, _ = peak_of(model, pb.Draws.sample(model, 1000), memory_limit=400_000)
    assert many < 1.6 * few


@pytest.mark.parametrize("method", [pb.EMP(3, jitter=0.3), pb.ECMP(3, jitter=0.3)], ids=["emp", "ecmp"])
def test_running_out_of_memory_halves_the_chunk(monkeypatch, method):
    model = network(method=method)
    x, draws = torch.randn(3, WIDTH), pb.Draws.sample(model, 40)
    expected = pb.predict(model, x, draws, engine="graph")
    together, refused = execution._together, []

    def scarce(stage, inputs, number):
        if number > 10:
            refused.append(number)
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return together(stage, inputs, number)

    monkeypatch.setattr(execution, "_together", scarce)
    prediction = pb.predict(model, x, draws, engine="graph")
    assert refused
    assert prediction.plan.chunk <= 10
    torch.testing.assert_close(prediction.probs, expected.probs)


def test_running_out_of_memory_with_one_draw_is_told(monkeypatch):
    model = network()

    def scarce(*_, **__):
        raise RuntimeError("out of memory")

    x, draws = torch.randn(3, WIDTH), pb.Draws.sample(model, 8)
    pb.predict(model, x, draws, engine="graph")
    monkeypatch.setattr(execution.Execution, "_block", scarce)
    with pytest.raises(RuntimeError, match="out of memory"):
        pb.predict(model, x, draws, engine="graph")


RESIDENT = """
import resource, sys, torch, patchbayes as pb
from patchbayes.nets import small_cnn
torch.set_num_threads(1)
model = small_cnn(size=16).eval()
plain = sys.argv[1] == "plain"
pb.patch_(model, pb.ECMP(5), "norm+output")
generator = torch.Generator().manual_seed(0)
for _ in range(600):
    x = torch.rand(int(torch.randint(1, 200, (), generator=generator)), 1, 16, 16)
    if plain:
        with torch.no_grad():
            model(x)
    else:
        pb.predict(model, x, 10, engine="graph")
print(int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmRSS"))))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_resident_memory_stays_near_that_of_the_network():
    resident = {}
    for kind in ("plain", "ours"):
        done = subprocess.run([sys.executable, "-c", RESIDENT, kind], capture_output=True, text=True, check=True)
        resident[kind] = int(done.stdout) * 1024
    assert resident["ours"] - resident["plain"] < 400e6  # torch.export's modules alone take 150 MB
