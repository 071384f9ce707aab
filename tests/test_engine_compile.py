"""compile=True runs the stages through torch.compile, and gives the loop's numbers."""

import pytest
import torch

import patchbayes as pb
from patchbayes.nets import small_cnn


def spy(monkeypatch, backend):
    """torch.compile with a backend that is quick, and the functions that it was given and that then ran."""
    plain, compiled, runs = torch.compile, [], []

    def watched(function, **options):
        compiled.append(function)
        inner = plain(function, backend=backend, **options)

        def run(*args):
            runs.append(function)
            return inner(*args)

        return run

    monkeypatch.setattr(torch, "compile", watched)
    return compiled, runs


@pytest.mark.parametrize("method", [pb.EMP(3, jitter=0.5), pb.ECMP(3, jitter=0.5)])
def test_stages_go_through_the_compiler(method, monkeypatch):
    compiled, runs = spy(monkeypatch, "aot_eager")
    model = small_cnn(size=8)
    pb.patch_(model, method)
    x, draws = torch.rand(2, 1, 8, 8), pb.Draws.sample(model, 6)
    pb.predict(model, x, draws)
    assert not compiled
    for shift in (0, 1):
        runs.clear()
        fast = pb.predict(model, x + shift, draws, compile=True)
        slow = pb.predict(model, x + shift, draws, engine="loop")
        torch.testing.assert_close(fast.probs, slow.probs)
        assert fast.plan.engine == "stages"
        assert fast.plan.compiled
        assert "compiled" in str(fast.plan)
        assert set(runs) <= set(compiled)
        assert len(runs) >= 6


@pytest.mark.slow
def test_compiled_stages_give_the_same_numbers_and_are_compiled_once():
    torch._dynamo.reset()
    model = small_cnn(size=8)
    pb.patch_(model, pb.EMP(3, jitter=0.5))
    x, draws = torch.rand(2, 1, 8, 8), pb.Draws.sample(model, 12)
    counts = torch._dynamo.utils.counters["stats"]
    before, seen = counts["unique_graphs"], []
    for shift in (0, 1, 2):
        fast = pb.predict(model, x + shift, draws, compile=True)
        torch.testing.assert_close(fast.probs, pb.predict(model, x + shift, draws, engine="loop").probs)
        seen.append(counts["unique_graphs"] - before)
    assert seen == [4, 4, 4]  # a stage for each number of sites, whichever draw runs
