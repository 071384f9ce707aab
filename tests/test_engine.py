"""The engine gives the loop's numbers on the same draws, whatever the network, the chunks and the limits."""

import copy
import gc
import math
import weakref

import pytest
import torch
from torch import nn

import patchbayes as pb
from patchbayes.draws import network_of
from patchbayes.errors import PatchbayesError, TooManyOutcomes
from patchbayes.nets import cifar_resnet20, mlp, small_cnn
from patchbayes.prediction import forms
from patchbayes.prediction.execution import Execution
from zoo import ZOO

METHODS = {
    "emp": pb.EMP(3, jitter=0.5),
    "ecmp": pb.ECMP(3, jitter=0.5),
    "noise": pb.EMP(2, sigma=0.1),
    "unit": pb.Mixture(1, tie="unit", zero=True, probabilities=(0.7, 0.3)),
    "ensemble": pb.Ensemble(3),
    "mean_field": pb.MeanField(0.3),
    "dropout": pb.Dropout(0.3),
}


def forms_of(model):
    """What is remembered about a network."""
    return list(vars(network_of(model)).get("_forms", {}).values())


def both(entry, model, inputs, draws, **options):
    fast = entry.predict(model, inputs, draws, **options)
    slow = entry.predict(model, inputs, draws, engine="loop")
    return fast, slow


def assert_same(fast, slow, tolerance):
    for name in ("probs", "log_probs", "standard_error", "expected_entropy"):
        mine, reference = getattr(fast, name), getattr(slow, name)
        assert mine.shape == reference.shape
        torch.testing.assert_close(mine, reference, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("method", METHODS)
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
    for draws in (pb.Draws.sample(model, 7), pb.Draws.stratify(model, 12)):
        fast, slow = both(entry, model, inputs, draws)
        assert_same(fast, slow, 1e-10)
        assert slow.plan.engine == "loop"


def test_the_plan_counts_distinct_prefixes():
    """Three EMP sites in a row: after l sites there are at most K^l values, and the prefix is computed once."""
    model = small_cnn(size=8)
    pb.patch_(model, pb.EMP(3, jitter=0.3))
    draws = pb.Draws.sample(model, 200)
    x = torch.rand(2, 1, 8, 8)
    plan = pb.predict(model, x, draws).plan
    assert plan.engine == "stages"
    rows = draws.assignments()
    expected = [1] + [len({tuple(row[:depth].tolist()) for row in rows}) for depth in (1, 2, 3)]
    assert [stage.distinct for stage in plan.stages] == expected == [1, 3, 9, 27]
    assert plan.networks == 27
    assert plan.work == plan.floor < 0.1
    flops = [stage.flops for stage in plan.stages]
    by_hand = sum(cost * times for cost, times in zip(flops, [1, 3, 9, 27], strict=True)) / (200 * sum(flops))
    assert plan.floor == pytest.approx(by_hand)
    assert pb.predict(model, x, draws, engine="loop").plan.floor == 1.0
    text = str(plan)
    assert "200 draws (iid), 27 distinct networks" in text
    assert "no site" in text


class Counting(nn.Module):
    """Counts how often it runs."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x


def test_nothing_is_computed_twice():
    counters = [Counting() for _ in range(3)]
    model = nn.Sequential(
        nn.Linear(3, 4), counters[0], nn.LayerNorm(4), counters[1], nn.Linear(4, 4), nn.LayerNorm(4), counters[2]
    )
    pb.patch_(model, pb.EMP(3, jitter=0.3), "norm")
    x = torch.rand(5, 3)
    draws = pb.Draws.sample(model, 50)
    pb.predict(model, x, draws)  # traces, checks and calibrates
    for setting in forms_of(model)[0].settings.values():
        setting.size = 1
    for counter in counters:
        counter.calls = 0
    pb.predict(model, x, draws)
    assert [counter.calls for counter in counters] == [1, 3, 9]


@pytest.mark.parametrize("method", ["emp", "ecmp"])
@pytest.mark.parametrize("chunk", [1, 2, 5, 64])
def test_any_chunk_gives_the_same_numbers(method, chunk):
    model = small_cnn(size=8).double().eval()
    pb.patch_(model, METHODS[method])
    network = network_of(model)
    draws = pb.Draws.sample(model, 23)
    x = torch.rand(3, 1, 8, 8, dtype=torch.float64)
    with torch.no_grad():
        form, arguments = forms.look_up(model, network, x, compile=False)
        way = form.itinerary(draws, 2**20)
        execution = Execution(way.graph, network, way.assignments, arguments, torch.arange(3))
        found = {}
        for part in way.schedule.chunks(chunk, frozenset(range(len(way.graph.stages)))):
            results = execution.chunk(part)
            assert len(results) == len(part.members) <= chunk
            found |= {draw: results.one(n) for n, members in enumerate(part.members) for draw in members}
        assert not any(stage.apart for stage in way.graph.stages)
        assert not execution.blocks
        for draw in range(23):
            with pb.drawn(model, draws[draw]):
                torch.testing.assert_close(found[draw], model(x), rtol=1e-10, atol=1e-12)


def test_one_path_of_the_tree_is_kept_at_a_time():
    model = cifar_resnet20(7).eval()
    pb.patch_(model, pb.EMP(3))
    network = network_of(model)
    draws = pb.Draws.sample(model, 60)
    with torch.no_grad():
        form, arguments = forms.look_up(model, network, torch.rand(2, 3, 8, 8), compile=False)
        way = form.itinerary(draws, 2**20)
        execution = Execution(way.graph, network, way.assignments, arguments, torch.arange(2))
        everything = frozenset(range(len(way.graph.stages)))
        held = []
        for part in way.schedule.chunks(1, everything):
            execution.chunk(part)
            held.append(len(execution.blocks))
        assert max(held) == max(way.schedule.alive) * (len(everything) - 1) == len(everything) - 1
        assert held[-1] == 0


def test_stages_that_tell_the_same_draws_apart_are_joined():
    """ECMP draws differ from the first site on: after the prefix, one stage is left, and the plan still lists all."""
    model = cifar_resnet20(7)
    pb.patch_(model, pb.ECMP(3))
    plan = pb.predict(model, torch.rand(2, 3, 8, 8), pb.Draws.sample(model, 6)).plan
    (form,) = forms_of(model)
    (way,) = form._itineraries.values()
    assert [len(stage.keys) for stage in way.graph.stages] == [1, len(plan.stages) - 1]
    assert {stage.distinct for stage in plan.stages[1:]} == {6}
    assert len(plan.stages) > 20


def test_stages_that_change_their_inputs_in_place_are_found():
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm, self.relu, self.last = (
                nn.Linear(3, 4),
                nn.LayerNorm(4),
                nn.ReLU(inplace=True),
                nn.Linear(4, 2),
            )

        def forward(self, x):
            x = self.first(x)
            y = self.norm(x)
            x += y
            return self.last(self.relu(x))

    model = InPlace().double()
    pb.patch_(model, pb.EMP(3, jitter=1.0))
    x = torch.randn(6, 3, dtype=torch.float64)
    draws = pb.Draws.sample(model, 9)
    fast, slow = pb.predict(model, x, draws), pb.predict(model, x, draws, engine="loop")
    assert_same(fast, slow, 1e-12)
    assert fast.plan.engine == "stages"


def test_a_part_that_cannot_be_traced_is_run_whole():
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(4)

        def forward(self, x):
            return self.norm(x) if x.sum() > -1e9 else x

    model = nn.Sequential(nn.Linear(3, 4), Branching(), nn.Linear(4, 2))
    pb.patch_(model, pb.EMP(3, jitter=0.5))
    x = torch.randn(4, 3)
    draws = pb.Draws.sample(model, 20)
    fast = pb.predict(model, x, draws)
    assert fast.plan.engine == "stages"
    assert fast.plan.opaque == ["1"]
    assert_same(fast, pb.predict(model, x, draws, engine="loop"), 1e-6)


def test_a_forward_with_side_effects_is_found_out():
    class Remembering(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.fc, self.seen = nn.LayerNorm(3), nn.Linear(3, 2), []

        def forward(self, x):
            self.seen.append(1)
            return self.fc(self.norm(x)) * len(self.seen)

    model = Remembering()
    pb.patch_(model, pb.EMP(3, jitter=0.5))
    plan = pb.predict(model, torch.randn(4, 3), pb.Draws.sample(model, 5)).plan
    assert plan.engine == "loop"
    assert "does not agree" in plan.fallback


def test_a_drawn_weight_read_by_another_module_is_not_frozen_into_the_graph():
    class Reading(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.fc = nn.LayerNorm(3), nn.Linear(3, 2)

        def forward(self, x):
            return nn.functional.linear(self.norm(x), self.fc.weight)

    model = Reading()
    pb.patch_(model, pb.EMP(3, jitter=1.0), "fc")
    draws = pb.Draws.sample(model, 9)
    x = torch.randn(4, 3)
    assert_same(pb.predict(model, x, draws), pb.predict(model, x, draws, engine="loop"), 1e-6)


def test_a_network_changed_after_the_first_prediction_is_traced_again():
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    pb.patch_(model, pb.EMP(3, jitter=0.5), "norm")
    x = torch.randn(4, 3)
    draws = pb.Draws.sample(model, 9)
    pb.predict(model, x, draws)
    model[2] = nn.Linear(4, 5)
    assert_same(pb.predict(model, x, draws), pb.predict(model, x, draws, engine="loop"), 1e-6)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[0].weight[0].add_(1.0)
    assert not torch.allclose(pb.predict(other, x, draws).probs, pb.predict(model, x, draws).probs)


def test_optional_arguments_are_part_of_the_traced_form():
    class Optional(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.fc = nn.LayerNorm(3), nn.Linear(3, 2)

        def forward(self, x, shift=None, double=False):
            y = self.norm(x)
            if shift is not None:
                y = y + shift
            return self.fc(y) * (2 if double else 1)

    model = Optional()
    pb.patch_(model, pb.EMP(3, jitter=0.5))
    x = torch.randn(4, 3)
    draws = pb.Draws.sample(model, 9)
    for inputs in (x, (x, torch.ones(3)), {"x": x, "double": True}, {"x": x, "shift": torch.ones(3), "double": True}):
        fast, slow = pb.predict(model, inputs, draws), pb.predict(model, inputs, draws, engine="loop")
        assert_same(fast, slow, 1e-6)
        assert fast.plan.engine == "stages"


def test_the_network_comes_back_after_an_error_in_the_stages():
    model = small_cnn(size=8)
    pb.patch_(model, pb.EMP(3))
    x = torch.rand(4, 1, 8, 8)
    pb.predict(model, x, 6)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = torch.get_rng_state()
    with pytest.raises(PatchbayesError, match="not finite"):
        pb.predict(model, [x, torch.full_like(x, math.inf)], 6)
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_attributes_that_the_forward_reads_are_part_of_the_traced_form():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.fc, self.scale = nn.LayerNorm(3), nn.Linear(3, 2), 1.0

        def forward(self, x):
            return self.fc(self.norm(x)) * self.scale

    model = Scaled()
    pb.patch_(model, pb.EMP(3, jitter=0.5))
    x = torch.randn(4, 3)
    draws = pb.Draws.sample(model, 9)
    pb.predict(model, x, draws)
    model.scale = 5.0
    assert_same(pb.predict(model, x, draws), pb.predict(model, x, draws, engine="loop"), 1e-6)


class OwnParameter(nn.Module):
    """The root holds a parameter and a buffer of its own, beside modules."""

    def __init__(self):
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(3), nn.Linear(3, 2)
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("shift", torch.zeros(()))
        self.table = [1.0]

    def forward(self, x):
        return self.fc(self.norm(x)) * self.scale * self.table[0] + self.shift * torch.arange(2)


def replace_parameter(model):
    model.scale = nn.Parameter(torch.tensor(5.0))


def replace_buffer(model):
    model.shift = torch.tensor(5.0)


def assign_state(model):
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state | {"scale": torch.tensor(5.0)}, assign=True)


def replace_list(model):
    model.table = [5.0]


def change_in_place(model):
    with torch.no_grad():
        model.shift += 5.0


def hook_the_root(model):
    model.register_forward_hook(lambda module, args, output: 5 * output)


def hook_a_part(model):
    model.fc.register_forward_pre_hook(lambda module, args: (5 * args[0],))


CHANGES = [
    replace_parameter,
    replace_buffer,
    assign_state,
    replace_list,
    change_in_place,
    hook_the_root,
    hook_a_part,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_is_replaced_after_the_first_prediction_is_followed(change):
    model = OwnParameter()
    pb.patch_(model, pb.EMP(3, jitter=0.5))
    x = torch.randn(4, 3)
    draws = pb.Draws.sample(model, 9)
    before = pb.predict(model, x, draws)
    assert before.plan.engine == "stages"
    change(model)
    after = pb.predict(model, x, draws)
    assert_same(after, pb.predict(model, x, draws, engine="loop"), 1e-6)
    assert not torch.allclose(after.probs, before.probs)


def test_what_is_remembered_goes_with_the_network():
    def predicted():
        model = small_cnn(size=8)
        pb.patch_(model, pb.EMP(3))
        pb.predict(model, torch.rand(2, 1, 8, 8), 6)
        return len(forms_of(model)), len(forms_of(copy.deepcopy(model))), weakref.ref(network_of(model))

    own, copied, network = predicted()
    assert (own, copied) == (1, 0)  # a copy has modules of its own
    gc.collect()
    assert network() is None


def test_attributes_that_change_with_every_call_do_not_fill_the_memory():
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    pb.patch_(model, pb.EMP(3))
    for number in range(2 * forms._FORMS):
        model.calls = number
        pb.predict(model, torch.randn(2, 3), pb.Draws.sample(model, 4))
    assert len(forms_of(model)) == forms._FORMS


# ---- exact when it can be


def test_few_outcomes_are_enumerated_instead_of_sampled():
    model = mlp(4).double()
    pb.patch_(model, pb.EMP(5, jitter=0.5), "norm")
    x = torch.randn(6, 4, dtype=torch.float64)
    prediction = pb.predict(model, x, 10_000, likelihood=pb.Gaussian(0.1))
    assert prediction.num_draws == 25
    assert prediction.standard_error_kind == "exact"
    assert prediction.plan.exact
    assert not prediction.standard_error.any()
    exact = pb.predict(model, x, "exact", likelihood=pb.Gaussian(0.1), engine="loop")
    torch.testing.assert_close(prediction.mean, exact.mean, rtol=1e-12, atol=0)
    assert pb.predict(model, x, 24, likelihood=pb.Gaussian(0.1)).standard_error_kind != "exact"


def test_exact_is_refused_with_the_count_where_there_are_too_many():
    model = cifar_resnet20(7)
    pb.patch_(model, pb.EMP(5))
    with pytest.raises(TooManyOutcomes, match=r"10\^15"):
        pb.predict(model, torch.rand(1, 3, 8, 8), "exact")


# ---- heads


def test_heads_average_over_the_output_layer_exactly():
    """Every drawn trunk with all components of the head, weighted with p: by hand and by the loop on the same draws."""
    model = small_cnn(size=8).double()
    pb.patch_(model, {"norm": pb.EMP(4, jitter=0.5), "output": pb.EMP(3, jitter=0.5, probabilities=(0.5, 0.3, 0.2))})
    x = torch.rand(3, 1, 8, 8, dtype=torch.float64)
    trunk = pb.Draws.stratify(model, 8)
    crossed = trunk.with_heads("fc", 3)
    assert len(crossed) == 24
    assert crossed.heads == 3
    groups = trunk.layout.num_groups
    head = crossed.head_groups.start
    assert len(crossed.head_groups) == 1
    rows = crossed.assignments()
    assert rows[:, head].tolist() == [0, 1, 2] * 8
    rest = [g for g in range(groups) if g != head]
    assert torch.equal(rows[:, rest], trunk.assignments()[:, rest].repeat_interleave(3, 0))
    torch.testing.assert_close(crossed.weights, torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).repeat(8) / 8)
    assert_same(pb.predict(model, x, crossed), pb.predict(model, x, crossed, engine="loop"), 1e-10)


def test_heads_are_unbiased_by_enumeration():
    """Averaged over all trunks, draws with heads give the exact predictive."""
    model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 2)).double()
    pb.patch_(model, pb.EMP(3, jitter=1.0))
    x = torch.randn(4, 2, dtype=torch.float64)
    exact = pb.predict(model, x, "exact").probs
    block = pb.predict(model, x, pb.Draws.stratify(model, 3).with_heads("2", 3))
    torch.testing.assert_close(block.probs, exact, rtol=1e-12, atol=1e-14)


def test_a_cheap_head_is_marginalized_by_itself_and_counted():
    model = cifar_resnet20(7)
    pb.patch_(model, pb.EMP(5))
    prediction = pb.predict(model, torch.rand(2, 3, 16, 16), 10)
    assert prediction.plan.heads == 5
    assert prediction.num_draws == len(prediction.draws) == 50
    assert "10 stratified, each with 5 heads" in str(prediction.plan)
    assert prediction.standard_error_kind == "independent blocks"
    loop = pb.predict(model, torch.rand(2, 3, 16, 16), 10, engine="loop")
    assert loop.num_draws == 10


def test_a_head_of_many_elements_is_marginalized_only_beside_much_work():
    model = cifar_resnet20(7)
    pb.patch_(model, pb.ECMP(5))
    assert pb.predict(model, torch.rand(1, 3, 8, 8), 10).plan.heads == 1
    assert pb.predict(model, torch.rand(8, 3, 32, 32), 10).plan.heads > 1


def test_element_wise_heads_share_their_trunk():
    model = small_cnn(size=8)
    pb.patch_(model, pb.ECMP(3, jitter=0.5))
    draws = pb.Draws.stratify(model, 6).with_heads("fc", 4)
    rows, groups = draws.assignments(), draws.head_groups
    trunk = [g for g in range(draws.layout.num_groups) if g not in groups]
    assert torch.equal(rows[0::4][:, trunk], rows[3::4][:, trunk])
    assert not torch.equal(rows[0::4][:, list(groups)], rows[3::4][:, list(groups)])
    x = torch.rand(2, 1, 8, 8)
    assert_same(pb.predict(model, x, draws), pb.predict(model, x, draws, engine="loop"), 1e-5)
    with pytest.raises(PatchbayesError, match="once"):
        draws.with_heads("fc", 2)


def test_heads_survive_slicing_and_saving(tmp_path):
    model = small_cnn(size=8)
    pb.patch_(model, pb.EMP(3))
    draws = pb.Draws.stratify(model, 6).with_heads("fc", 3)
    draws.save(tmp_path / "draws.json")
    loaded = pb.Draws.load(tmp_path / "draws.json", model)
    assert torch.equal(loaded.assignments(), draws.assignments())
    assert torch.equal(loaded.weights, draws.weights)
    assert torch.equal(draws[4:11].assignments(), draws.assignments()[4:11])


# ---- stop when sure


def test_inputs_that_are_sure_stop_early_and_the_error_is_within_the_tolerance():
    model = small_cnn(size=8).double()
    pb.patch_(model, pb.EMP(5, jitter=0.7))
    x = torch.cat([torch.rand(6, 1, 8, 8), 1e-3 * torch.rand(6, 1, 8, 8)]).double()
    exact = pb.predict(model, x, "exact").probs
    top = exact.argmax(1, keepdim=True)
    errors, used = [], []
    tolerance = 0.006
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        prediction = pb.predict(model, x, 100, tolerance=tolerance, sampling="iid", generator=generator)
        errors.append((prediction.probs - exact).gather(1, top).squeeze(1))
        used.append(prediction.draws_used)
        sure = prediction.draws_used < prediction.num_draws
        se = prediction.standard_error.gather(1, prediction.probs.argmax(1, keepdim=True)).squeeze(1)
        assert (se[sure] <= tolerance).all()
    used = torch.stack(used)
    assert used.min() < used.max()
    reached = (used < prediction.num_draws).double()
    squares = torch.stack(errors).square()
    assert float(((squares * reached).sum() / reached.sum()).sqrt()) < 1.25 * tolerance


def test_tolerance_changes_the_work_and_fits_regression_too():
    model = mlp(3, hidden=(8, 8)).double()
    pb.patch_(model, pb.ECMP(5, jitter=0.5), "norm")
    x = torch.randn(5, 3, dtype=torch.float64)
    options = {"likelihood": pb.Gaussian(4.0), "sampling": "iid"}
    loose = pb.predict(model, x, 2000, tolerance=0.2, **options)
    tight = pb.predict(model, x, 2000, tolerance=0.02, **options)
    assert loose.draws_used.max() < tight.draws_used.max()
    assert (loose.standard_error <= 0.2 * loose.variance.sqrt()).all()
    full = pb.predict(model, x, pb.Draws.sample(model, int(tight.draws_used[0])), likelihood=pb.Gaussian(4.0))
    torch.testing.assert_close(tight.mean[0], full.mean[0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(tight.epistemic_covariance[0], full.epistemic_covariance[0], rtol=1e-7, atol=1e-9)
    with pytest.raises(PatchbayesError, match="tolerance"):
        pb.predict(model, x, 20, tolerance=0.0, **options)
    with pytest.raises(PatchbayesError, match="keep_draws"):
        pb.predict(model, x, 20, tolerance=0.1, keep_draws=True, **options)


# ---- streaming, sampling, limits


def test_batches_stream_one_by_one_and_leave_the_network_usable_between_them():
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    pb.patch_(model, pb.EMP(3))
    x = torch.rand(10, 1, 8, 8)
    taken = []

    def loader():
        for batch in x.split(4):
            taken.append(len(batch))
            yield batch

    stream = pb.predict_batches(model, loader(), 6, likelihood=pb.Categorical())
    assert taken == []
    first = next(stream)
    assert taken == [4]
    assert model.training
    model(x).sum().backward()
    rest = list(stream)
    assert [len(part) for part in (first, *rest)] == [4, 4, 2]
    joined = type(first).concatenate([first, *rest])
    torch.testing.assert_close(joined.probs, pb.predict(model, loader(), 6).probs)
    assert not joined.probs.is_inference()


def test_stratified_draws_are_the_default_and_iid_is_the_papers():
    model = small_cnn(size=8)
    pb.patch_(model, pb.ECMP(3))
    x = torch.rand(2, 1, 8, 8)
    assert pb.predict(model, x, 6).draws.schemes == {"stratified"}
    iid = pb.predict(model, x, 6, sampling="iid", engine="loop")
    torch.testing.assert_close(iid.probs, pb.predict(model, x, pb.Draws.sample(model, 6), engine="loop").probs)
    with pytest.raises(PatchbayesError, match="sampling"):
        pb.predict(model, x, 6, sampling="sobol")
    with pytest.raises(PatchbayesError, match="engine"):
        pb.predict(model, x, 6, engine="warp")


def test_thread_counts_do_not_matter():
    model = small_cnn(size=8).double()
    pb.patch_(model, pb.ECMP(3))
    x = torch.rand(3, 1, 8, 8, dtype=torch.float64)
    draws = pb.Draws.stratify(model, 9)
    one = pb.predict(model, x, draws)
    torch.set_num_threads(2)
    try:
        assert_same(pb.predict(model, x, draws), one, 1e-10)
    finally:
        torch.set_num_threads(1)
