"""The engine gives the loop's numbers on the same draws, whatever the network, the chunks and the limits."""

import gc
import subprocess
import sys
import weakref

import pytest
import torch
from torch import nn

import patchbayes as pb
from patchbayes.errors import PatchbayesError
from patchbayes.nets import mlp, small_cnn
from patchbayes.prediction.engine import execution
from patchbayes.prediction.engine.remembering import forms_of
from zoo import ZOO

METHODS = {
    "emp": pb.EMP(3, jitter=0.5),
    "dropout": pb.Dropout(0.3),
    "ecmp": pb.ECMP(3, jitter=0.5),
    "noise": pb.EMP(2, sigma=0.1),
    "dropconnect": pb.posteriors.DropConnect(0.2),
    "unit": pb.posteriors.Mixture(1, tie="unit", zero=True, probabilities=(0.7, 0.3)),
    "ensemble": pb.Ensemble(3),
    "mean_field": pb.posteriors.MeanField(0.3),
}
QUICK = ("emp", "dropout")


def assert_same(fast, slow, tolerance):
    for name in ("probs", "log_probs", "standard_error", "expected_entropy"):
        mine, reference = getattr(fast, name), getattr(slow, name)
        assert mine.shape == reference.shape
        torch.testing.assert_close(mine, reference, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in METHODS]
)
@pytest.mark.parametrize("network", ZOO)
def test_engine_and_loop_agree_on_the_zoo(network, method):
    entry = ZOO[network]
    model = entry.build().double()
    inputs = torch.utils._pytree.tree_map(lambda t: t.double() if t.is_floating_point() else t, entry.inputs())
    try:
        pb.patch_(model, METHODS[method], "all" if method == "ensemble" else entry.sites)
    except PatchbayesError:
        pytest.skip("the method does not fit this network")
    if method == "dropout" and any(isinstance(site.module, nn.Embedding) for site in pb.patched_sites(model).values()):
        pytest.skip("dropout masks no integers")
    for name, buffer in model.named_buffers():  # statistics of components differ
        if name.endswith("running_mean"):
            buffer.normal_(generator=torch.Generator().manual_seed(0))
    for draws in (pb.Draws.sample(model, 7), pb.Draws.stratified(model, 12)):
        fast = entry.predict(model, inputs, draws, engine="graph")
        slow = entry.predict(model, inputs, draws, engine="loop")
        assert_same(fast, slow, 1e-10)
        assert (fast.plan.engine, slow.plan.engine) == ("graph", "loop")
    one = torch.utils._pytree.tree_map(lambda t: t[:1], inputs)  # captured again only where a layer asks for that size
    assert_same(
        entry.predict(model, one, draws, engine="graph"), entry.predict(model, one, draws, engine="loop"), 1e-10
    )
    assert [len(form.networks) for form in forms_of(model)] == [2 if network in ("transformer", "lstm") else 1]


def test_the_plan_counts_distinct_prefixes():
    """Three EMP sites in a row: after l sites there are at most K^l values, and the prefix is computed once."""
    model = small_cnn(size=8)
    pb.patch_(model, pb.EMP(3, jitter=0.3))
    draws = pb.Draws.sample(model, 200)
    x = torch.rand(200, 1, 8, 8)  # of a few inputs, stages would cost more than they save
    plan = pb.predict(model, x, draws, engine="graph").plan
    assert plan.engine == "graph"
    rows = draws.assignments()
    expected = [1] + [len({tuple(row[:depth].tolist()) for row in rows}) for depth in (1, 2, 3)]
    assert [stage.distinct for stage in plan.stages] == plan.evaluated == expected == [1, 3, 9, 27]
    assert plan.networks == 27
    assert plan.work == plan.floor < 0.1
    flops = [stage.flops for stage in plan.stages]
    by_hand = sum(cost * times for cost, times in zip(flops, [1, 3, 9, 27], strict=True)) / (200 * sum(flops))
    assert plan.floor == pytest.approx(by_hand)
    assert pb.predict(model, x, draws, engine="loop").plan.floor == 1.0
    text = str(plan)
    assert "200 draws (iid), 27 distinct networks" in text
    assert "no site" in text
    assert "captured in" in text
    assert "captured in" not in str(pb.predict(model, x, draws, engine="graph").plan)


def test_stages_that_cost_more_than_they_save_are_one():
    """Few inputs: what the draws share is run again for each result, together with the rest. The numbers are the same."""
    model = small_cnn(size=8).double()
    pb.patch_(model, pb.EMP(3, jitter=0.3))
    draws = pb.Draws.sample(model, 200)
    x = torch.rand(200, 1, 8, 8, dtype=torch.float64)
    few, many = (pb.predict(model, some, draws, engine="graph") for some in (x[:2], x))
    assert [stage.distinct for stage in few.plan.stages] == [1, 3, 9, 27]
    assert few.plan.evaluated == [3, 3, 27, 27]
    assert few.plan.floor == many.plan.floor == many.plan.work < few.plan.work < 1
    assert_same(few, pb.predict(model, x[:2], draws, engine="loop"), 1e-10)
    assert_same(many, pb.predict(model, x, draws, engine="loop"), 1e-10)


def test_flops_are_counted_by_hand():
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(48, 5))
    pb.patch_(model, pb.EMP(2))
    plan = pb.predict(model, torch.rand(7, 2, 4, 4), pb.Draws.sample(model, 4), engine="graph").plan
    convolution, linear = 2 * 7 * 3 * 16 * 2 * 9, 2 * 7 * 5 * 48
    assert [stage.flops for stage in plan.stages] == [convolution, 0, linear]


@pytest.mark.parametrize("method", ["emp", "ecmp", "dropout"])
@pytest.mark.parametrize("limit", [1, 1_000_000, None])
def test_any_memory_limit_gives_the_same_numbers(method, limit):
    model = small_cnn(size=8).double()
    pb.patch_(model, METHODS[method], "norm+output" if method != "dropout" else "linear")
    x = torch.rand(5, 1, 8, 8, dtype=torch.float64)
    draws = pb.Draws.sample(model, 23)
    prediction = pb.predict(model, x, draws, engine="graph", memory_limit=limit, keep_draws=True)
    assert_same(prediction, pb.predict(model, x, draws, engine="loop"), 1e-10)
    assert (prediction.plan.chunk == 1) == (limit == 1)
    loop = pb.predict(model, x, draws, engine="loop", keep_draws=True)
    torch.testing.assert_close(prediction.draw_probs, loop.draw_probs, rtol=1e-10, atol=1e-10)


def test_draws_that_only_join_later_are_computed_apart():
    """Two towers with a site each: every component of each tower once, whatever the number of draws."""

    class Towers(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right, self.fc = nn.LayerNorm(4), nn.LayerNorm(4), nn.Linear(4, 3)

        def forward(self, x):
            return self.fc(self.left(x) + self.right(x * 2).relu())

    model = Towers().double()
    pb.patch_(model, pb.EMP(3, jitter=0.5), "norm")
    x, draws = torch.randn(6, 4, dtype=torch.float64), pb.Draws.sample(model, 40)
    prediction = pb.predict(model, x, draws, engine="graph")
    counts = {stage.sites: stage.distinct for stage in prediction.plan.stages}
    assert counts == {(): 1, ("left",): 3, ("right",): 3, ("left", "right"): 9}
    assert_same(prediction, pb.predict(model, x, draws, engine="loop"), 1e-10)


def test_small_operations_go_together_and_large_ones_one_by_one():
    model = small_cnn(size=8)
    pb.patch_(model, METHODS["ecmp"])
    draws = pb.Draws.sample(model, 27)
    assert pb.predict(model, torch.rand(1, 1, 8, 8), draws, engine="graph").plan.chunk >= 16
    large = pb.predict(model, torch.rand(2000, 1, 8, 8), draws, engine="graph")
    assert large.plan.chunk == 1


def test_what_vmap_cannot_do_is_done_one_by_one(monkeypatch):
    model = small_cnn(size=8).double()
    pb.patch_(model, METHODS["ecmp"])
    x, draws = torch.rand(3, 1, 8, 8, dtype=torch.float64), pb.Draws.sample(model, 9)
    expected = pb.predict(model, x, draws, engine="loop")

    asked = []

    def refuse(stage, inputs, number):
        asked.append(number)
        raise NotImplementedError("no rule")

    pb.predict(model, x, draws, engine="graph")
    monkeypatch.setattr(execution, "_together", refuse)
    prediction = pb.predict(model, x, draws, engine="graph")
    assert asked == [9]
    assert_same(prediction, expected, 1e-10)
    assert prediction.plan.engine == "graph"


def test_weights_are_made_once_for_all_batches(monkeypatch):
    model = mlp(4, (8,), 3)
    pb.patch_(model, pb.ECMP(3))
    made = []
    posterior = type(next(iter(pb.patched_sites(model).values())).posterior)
    realize = posterior.realize
    monkeypatch.setattr(posterior, "realize", lambda self, d: (made.append(1), realize(self, d))[1])
    x = torch.randn(40, 4)
    once = list(pb.prediction.predict_batches(model, x[:4], pb.Draws.sample(model, 6), engine="graph"))
    number = len(made)
    made.clear()
    several = list(pb.prediction.predict_batches(model, list(x.split(4)), pb.Draws.sample(model, 6), engine="graph"))
    assert len(made) <= number
    assert len(several) == 10
    torch.testing.assert_close(several[0].probs, once[0].probs)
    made.clear()
    list(
        pb.prediction.predict_batches(
            model, list(x.split(4)), pb.Draws.sample(model, 6), engine="graph", memory_limit=1
        )
    )
    assert len(made) > number


def test_what_is_remembered_goes_with_the_network():
    model = small_cnn(size=8)
    pb.patch_(model, pb.EMP(3))
    pb.predict(model, torch.rand(2, 1, 8, 8), 5, engine="graph")
    assert forms_of(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_the_machine_does_not_decide_the_plan():
    """The same calls give the same plans on an idle machine and beside two busy processes: sizes follow from counts."""

    def plans():
        model, found = small_cnn(size=8), []
        pb.patch_(model, pb.ECMP(3))
        draws = pb.Draws.sample(model, 50)
        for size, engine in ((3, "auto"), (3, "graph"), (40, "graph"), (3, "auto"), (40, "auto")):
            found.append(pb.predict(model, torch.rand(size, 1, 8, 8), draws, engine=engine).plan)
            found[-1].capture_seconds = None
        return found

    idle = plans()
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        loaded = plans()
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert idle == loaded
    assert {plan.engine for plan in idle} == {"loop", "graph"}


def test_the_pass_that_is_counted_is_not_run_again():
    passes = []

    class Watched(nn.Sequential):
        def forward(self, x):
            passes.append(1)
            return super().forward(x)

    model = Watched(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 3)).eval()
    pb.patch_(model, pb.ECMP(3, jitter=0.5))
    x, draws = torch.randn(3, 4), pb.Draws.sample(model, 70)
    mine = pb.predict(model, x, draws)
    assert mine.plan.engine == "loop"
    assert len(passes) == 70
    assert forms_of(model)[0].work is not None
    torch.testing.assert_close(mine.log_probs, pb.predict(model, x, draws, engine="loop").log_probs)


def test_calls_that_do_not_pay_go_through_the_loop_until_they_do():
    model = small_cnn(size=8)
    pb.patch_(model, pb.ECMP(3))
    x, draws = torch.rand(3, 1, 8, 8), pb.Draws.sample(model, 20)
    engines = [pb.predict(model, x, draws).plan.engine for _ in range(100)]
    assert engines[0] == "loop"
    assert engines[-1] == "graph"
    assert engines == sorted(engines, reverse=True)  # once captured, always
    assert "would not pay" in pb.predict(small(), x, 20).plan.fallback
    many = pb.predict(small(), [x] * 2000, 20)
    assert many.plan.engine == "graph"


def test_few_passes_of_a_small_network_are_not_even_counted():
    model, x = small(), torch.rand(3, 1, 8, 8)
    for calls in range(1, 4):
        assert pb.predict(model, x, pb.Draws.sample(model, 20)).plan.engine == "loop"
        (form,) = forms_of(model)
        assert form.passes == 20 * calls
        assert (form.work is None) == (form.passes < 60)
    assert form.spent > 0


def small():
    model = small_cnn(size=8)
    pb.patch_(model, pb.ECMP(3))
    return model
