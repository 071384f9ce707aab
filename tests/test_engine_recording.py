"""A repeated prediction is recorded, and what was recorded is used only as long as it is true."""

import numpy as np
import pytest
import torch
from torch import nn

import patchbayes as pb
from patchbayes.draws import network_of
from patchbayes.nets import mlp
from patchbayes.prediction import calibration


@pytest.fixture(autouse=True)
def _eager(monkeypatch):
    """All draws together wherever that can be done."""
    monkeypatch.setattr(calibration, "_WORTH_FOLDING", float("inf"))
    monkeypatch.setattr(calibration, "_GAIN", float("inf"))


def small(*layers):
    model = nn.Sequential(nn.Linear(4, 6), *layers, nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).double()
    pb.patch_(model, pb.EMP(3, jitter=0.5))
    return model


def recordings(model):
    """What is remembered: None (seen once), True (recorded) or False (refused) for each form of batch."""
    (form,) = vars(network_of(model))["_forms"].values()
    found = [seen for way in form._itineraries.values() for seen in way.recordings._seen.values()]
    return [None if seen is None else seen.run is not None for seen in found]


def inputs(number=0, batch=5):
    return torch.randn(batch, 4, generator=torch.Generator().manual_seed(number)).double()


def check(model, draws, x):
    fast, slow = pb.predict(model, x, draws), pb.predict(model, x, draws, engine="loop")
    torch.testing.assert_close(fast.log_probs, slow.log_probs, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(fast.standard_error, slow.standard_error, rtol=1e-8, atol=1e-12)
    return fast


@pytest.mark.parametrize("method", [pb.EMP(3, jitter=0.5), pb.ECMP(3, jitter=0.5), pb.Mixture(3, tie="unit")])
@pytest.mark.parametrize("layers", ["none", "in place", "norm"])
def test_recorded_and_loop_agree_on_other_inputs(method, layers):
    between = {"none": [], "in place": [nn.LeakyReLU(0.1, inplace=True)], "norm": [nn.LayerNorm(6), nn.GELU()]}[layers]
    model = nn.Sequential(nn.Linear(4, 6), *between, nn.BatchNorm1d(6), nn.ReLU(inplace=True), nn.Linear(6, 3)).double()
    pb.patch_(model, method)
    draws = pb.Draws.sample(model, 20)
    seen = []
    for number in range(4):
        plan = check(model, draws, inputs(number)).plan
        assert plan.engine == "stages"
        assert plan.chunk == plan.networks
        assert plan.work == plan.floor
        seen.append(recordings(model))
    assert seen == [[None], [True], [True], [True]]


def test_a_recording_is_what_is_run(monkeypatch):
    model = small()
    draws = pb.Draws.sample(model, 20)
    for number in range(2):
        check(model, draws, inputs(number))
    calls = []
    monkeypatch.setattr(nn.BatchNorm1d, "_check_input_dim", lambda self, x: calls.append(1))
    pb.predict(model, inputs(3), draws)
    assert not calls
    pb.predict(model, inputs(3), draws, engine="loop")
    assert len(calls) == 20


def test_each_form_of_batch_and_each_set_of_draws_has_its_own():
    model = small()
    for draws in (pb.Draws.sample(model, 20), pb.Draws.stratify(model, 12)):
        for number in range(3):
            for batch in (5, 2):
                check(model, draws, inputs(number, batch))
    assert recordings(model) == [True] * 4


def in_place(model):
    with torch.no_grad():
        model[0].weight.mul_(2.0)
        pb.patched_sites(model)["1"].components("weight").add_(0.3)
        model[1].running_mean.add_(0.5)


def new_parameter(model):
    model[0].weight = nn.Parameter(torch.randn_like(model[0].weight))


def new_buffer(model):
    model[1].running_var = torch.rand_like(model[1].running_var) + 0.5


def new_data(model):
    model[0].bias.data = torch.randn_like(model[0].bias)


def attribute(model):
    model[1].eps = 0.5


def new_module(model):
    model[2] = nn.Tanh()


def new_forward(model):
    model[2].forward = lambda x: 2 * x


def hook(model):
    model[2].register_forward_hook(lambda module, args, output: output + 1)


def precision(model):
    model.float()


CHANGES = [in_place, new_parameter, new_buffer, new_data, attribute, new_module, new_forward, hook]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_changes_between_predictions_is_followed(change):
    model = small()
    draws = pb.Draws.sample(model, 20)
    for _ in range(3):
        before = check(model, draws, inputs())
    change(model)
    for number in range(3):
        after = check(model, draws, inputs())
        check(model, draws, inputs(number))
    assert not torch.allclose(before.probs, after.probs)


def test_a_change_of_precision_is_followed():
    model = small()
    draws = pb.Draws.sample(model, 20)
    for number in range(3):
        check(model, draws, inputs(number))
    model.float()
    for number in range(3):
        x = inputs(number).float()
        fast, slow = pb.predict(model, x, draws), pb.predict(model, x, draws, engine="loop")
        torch.testing.assert_close(fast.probs, slow.probs)
        assert fast.probs.dtype == torch.float32


class Branching(nn.Module):
    """Looks at its input, which no draw has touched yet."""

    def forward(self, x):
        return x if x.sum() > 0 else -2 * x


class ByNumpy(nn.Module):
    def forward(self, x):
        return torch.from_numpy(np.cos(x.numpy()))


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x


class Watched(nn.Module):
    """Counts in a place that no one else can see."""

    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def forward(self, x):
        self.seen.append(x.shape)
        return x


class Filling(nn.Module):
    """Writes into a tensor that it makes."""

    def forward(self, x):
        made = torch.zeros_like(x)
        made[:, 1:] = x[:, :-1]
        return made


@pytest.mark.parametrize("part", [Branching, ByNumpy, Filling], ids=lambda part: part.__name__)
def test_what_cannot_be_recorded_goes_on_as_before(part):
    model = small(part())
    draws = pb.Draws.sample(model, 20)
    for sign in (1, 1, 1, -1, 1):
        check(model, draws, sign * inputs().abs())
    if part is not Filling:
        assert recordings(model) == [False]


def test_a_part_that_changes_with_every_call_is_never_recorded():
    counting = Counting()
    model = small(counting)
    draws = pb.Draws.sample(model, 20)
    for number in range(4):
        before = counting.calls
        pb.predict(model, inputs(number), draws)
        assert counting.calls > before
    assert recordings(model) == [None]


def test_hooks_are_called_every_time():
    seen = []
    model = small()
    model[2].register_forward_hook(lambda module, args, output: seen.append(1))
    draws = pb.Draws.sample(model, 20)
    for number in range(4):
        seen.clear()
        check(model, draws, inputs(number))
        assert seen
    assert recordings(model) == []


def test_noise_and_masks_belong_to_their_batch():
    """Masks depend on the number of an example in the stream of batches, so nothing of them is repeated."""
    model = mlp(4, (6,), 3).double()
    pb.patch_(model, {"norm": pb.EMP(2), "output": pb.Dropout(0.5)})
    batches = [inputs(number) for number in range(4)]
    draws = pb.Draws.sample(model, 6)
    fast, slow = pb.predict(model, batches, draws), pb.predict(model, batches, draws, engine="loop")
    torch.testing.assert_close(fast.probs, slow.probs, rtol=1e-10, atol=1e-12)


def test_autocast_is_not_mixed_up():
    model = mlp(4, (6,), 3)
    pb.patch_(model, pb.EMP(3, jitter=0.5))
    draws = pb.Draws.sample(model, 20)
    x = inputs().float()
    plain = [pb.predict(model, x, draws).probs for _ in range(3)]
    with torch.autocast("cpu", torch.bfloat16):
        rough = pb.predict(model, x, draws).probs
        slow = pb.predict(model, x, draws, engine="loop").probs
    assert not torch.equal(rough, plain[-1])
    torch.testing.assert_close(rough, slow, rtol=2e-2, atol=2e-2)


def test_a_tight_memory_does_without(monkeypatch):
    model = small()
    draws = pb.Draws.sample(model, 20)
    for number in range(3):
        pb.predict(model, inputs(number), draws, memory_limit=50_000)
    assert recordings(model) == []
