"""What is captured, when it is captured again, and what goes through the loop instead: right, or refused with a reason."""

import builtins
import dataclasses
import math

import pytest
import torch
from torch import nn

import patchbayes as pb
from patchbayes.errors import PatchbayesError
from patchbayes.prediction.engine.remembering import forms_of


class Body(nn.Module):
    """The layers of the networks below, and their forward by default."""

    def __init__(self):
        super().__init__()
        self.norm, self.hidden, self.again, self.fc = nn.LayerNorm(4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 3)
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.scale, self.options, self.table = 1.0, {"shift": 0.0}, [1.0, 2.0]
        self.plain = torch.tensor(0.5, dtype=torch.float64)

    def body(self, x):
        return self.fc(self.again(self.hidden(self.norm(x)).relu()))

    def forward(self, x):
        return self.body((x * self.scale + self.options["shift"] + self.table[0] * self.plain).sin())


def network(forward=None, method=None):
    torch.manual_seed(0)
    made = type("Net", (Body,), {} if forward is None else {"forward": forward})().double()
    pb.patch_(made, method or pb.ECMP(3, jitter=0.5))
    return made.eval()


def rows(seed=0, size=5):
    return torch.randn(size, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def same(model, inputs, number=6, **options):
    """The plan, where the engine gives what the loop gives."""
    draws = pb.Draws.sample(model, number)
    mine = pb.predict(model, inputs, draws, engine="graph", **options)
    loop = pb.predict(model, inputs, draws, engine="loop", **options)
    torch.testing.assert_close(mine.log_probs, loop.log_probs, rtol=0, atol=1e-10)
    return mine.plan


def captures(model):
    return sum(len(form.networks) for form in forms_of(model))


def test_batches_of_any_size_share_a_capture():
    model = network()
    for size in (1, 5, 2, 64):
        assert same(model, rows(size=size)).engine == "graph"
    assert captures(model) == 1


def branching(self, x):
    """Asks for the batch's size in several ways."""
    if x.shape[0] == 1:
        x = 2 * x
    if x.shape[0] > 6:
        x = x + 1
    return self.body(x) * max(x.shape[0] // 3, 1)


def test_a_forward_that_asks_for_sizes_is_captured_for_each_of_its_branches():
    model = network(branching)
    for size in (4, 5, 1, 3, 7, 8, 20, 1, 4):
        assert same(model, rows(size=size)).engine == "graph"
    assert 1 < captures(model) <= 4


def test_sizes_that_must_be_alike_are_found_to_be():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.fc = nn.LayerNorm(4), nn.Linear(4, 3)

        def forward(self, left, right):
            return self.fc(self.norm(left + right))

    model = Pair().double().eval()
    pb.patch_(model, pb.EMP(3, jitter=0.5))
    for sizes in ((5, 5), (3, 3), (2, 1), (1, 2), (1, 1)):
        assert same(model, tuple(rows(size=size) for size in sizes)).engine == "graph"


def test_capturing_leaves_the_builtins_alone():
    """torch.export would replace these for all threads, and two exports at a time would never take that back."""
    seen = []

    def forward(self, x):
        seen.append((max, min, math.pow))
        return self.body(x)

    before = builtins.max, builtins.min, math.pow
    model = network(forward)
    assert same(model, rows()).engine == "graph"
    assert set(seen) == {before}
    assert (builtins.max, builtins.min, math.pow) == before


def test_a_recurrent_layer_before_the_sites_is_shared():
    class Sentences(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.norm, self.fc = nn.LSTM(4, 4, batch_first=True), nn.LayerNorm(4), nn.Linear(4, 3)

        def forward(self, x):
            return self.fc(self.norm(self.lstm(x)[0][:, -1]))

    model = Sentences().double().eval()
    pb.patch_(model, pb.ECMP(3, jitter=0.5))
    x = torch.randn(3, 6, 4, dtype=torch.float64)
    plan = same(model, x)
    assert plan.engine == "graph"
    assert plan.stages[0].sites == ()
    assert plan.stages[0].flops > 0
    with torch.no_grad():
        model.lstm.weight_hh_l0.mul_(3)
    assert same(model, x).engine == "graph"


def test_sequences_of_any_length_share_a_capture():
    class Tokens(Body):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(11, 4)

        def forward(self, tokens, mask=None):
            x = self.embedding(tokens)
            if mask is not None:
                x = x * mask.unsqueeze(-1)
            return {"hidden": x, "logits": self.body(x.mean(1))}

    model = Tokens().double().eval()
    pb.patch_(model, pb.ECMP(3, jitter=0.5))
    tokens = torch.randint(11, (6, 9))
    for size, length in ((6, 9), (3, 4), (1, 7)):
        some = tokens[:size, :length]
        assert same(model, some).engine == "graph"
        assert same(model, {"tokens": some, "mask": some > 3}).engine == "graph"
    assert captures(model) == 2  # with and without the mask


def test_other_sizes_that_vary_are_opened_when_they_do():
    def forward(self, x):
        return self.body(x.mean(1))

    model = network(forward)
    for length in (3, 5, 8, 13):
        x = torch.randn(4, length, 4, dtype=torch.float64)
        assert same(model, x).engine == "graph"
    assert captures(model) == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m, "scale", 2.0),
        lambda m: m.options.update(shift=1.0),
        lambda m: m.table.__setitem__(0, 3.0),
        lambda m: setattr(m, "plain", torch.tensor(2.0, dtype=torch.float64)),
        lambda m: m.plain.fill_(7.0),
        lambda m: setattr(m, "hidden", nn.Identity()),
        lambda m: setattr(m.hidden, "forward", lambda x: x * 2),
    ],
    ids=["a number", "a dict", "a list", "a tensor", "its content", "a module", "a forward"],
)
def test_what_forward_reads_may_change_between_calls(change):
    model = network(method=pb.EMP(3, jitter=0.5))
    pb.unpatch_(model)
    pb.patch_(model, pb.EMP(3, jitter=0.5), "norm")
    before = pb.predict(model, rows(), pb.Draws.sample(model, 4), engine="graph").probs
    change(model)
    assert same(model, rows()).engine == "graph"
    draws = pb.Draws.sample(model, 4)
    assert not torch.allclose(before, pb.predict(model, rows(), draws, engine="graph").probs)
    assert captures(model) == 1  # the old one is forgotten


def test_a_training_step_is_seen_without_capturing_again():
    model = network().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    predictor = pb.Predictor(model, pb.Draws.sample(model, 6))
    answers = []
    for _ in range(3):
        answers.append(predictor(rows()))
        same(model, rows())
        optimizer.zero_grad()
        model(rows()).square().sum().backward()
        optimizer.step()
    assert not torch.allclose(answers[0], answers[1])
    assert captures(model) == 1


def test_dtype_and_memory_order_are_part_of_the_form():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)).eval()
    pb.patch_(model, pb.ECMP(3, jitter=0.5))
    x = torch.rand(5, 3, 8, 8)
    draws = pb.Draws.sample(model, 5)
    for form in (x, x.to(memory_format=torch.channels_last), x.permute(0, 1, 3, 2)):
        mine, loop = (pb.predict(model, form, draws, engine=engine) for engine in ("graph", "loop"))
        torch.testing.assert_close(mine.probs, loop.probs, rtol=1e-4, atol=1e-5)
        assert mine.plan.engine == "graph"
    model.to(memory_format=torch.channels_last)
    mine, loop = (pb.predict(model, x, draws, engine=engine) for engine in ("graph", "loop"))
    torch.testing.assert_close(mine.probs, loop.probs, rtol=1e-4, atol=1e-5)
    model.double()
    mine, loop = (pb.predict(model, x.double(), draws, engine=engine) for engine in ("graph", "loop"))
    torch.testing.assert_close(mine.probs, loop.probs, rtol=1e-10, atol=1e-10)


def test_bfloat16_gives_the_loops_numbers():
    model, x = network().to(torch.bfloat16), rows().to(torch.bfloat16)
    draws = pb.Draws.sample(model, 5)
    mine, loop = (pb.predict(model, x, draws, engine=engine) for engine in ("graph", "loop"))
    assert mine.plan.engine == "graph"
    torch.testing.assert_close(mine.probs, loop.probs, rtol=0, atol=0.02)


@pytest.mark.parametrize("shape", [(5, 4), (5, 4, 3), (5, 4, 2, 3)], ids=str)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_batch_norms_of_several_draws_at_once(shape, affine, dtype):
    """Before a patched linear layer, after one, and patched: for each number of axes."""
    norm = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[len(shape)]
    torch.manual_seed(0)
    model = nn.Sequential(norm(4), nn.ReLU(), norm(4, affine=affine), nn.Flatten(), nn.LazyLinear(3))
    model(torch.randn(shape))
    for module in (model[0], model[2]):
        module.running_mean.normal_()
        module.running_var.uniform_(0.5, 2)
    model.eval().to(dtype)
    pb.patch_(model, pb.ECMP(3, jitter=0.5), "0+output")
    x, draws = torch.randn(shape).to(dtype), pb.Draws.sample(model, 12)
    mine, loop = (pb.predict(model, x, draws, engine=engine) for engine in ("graph", "loop"))
    assert (mine.plan.engine, mine.plan.chunk) == ("graph", 12)
    torch.testing.assert_close(mine.probs, loop.probs, rtol=0, atol=1e-6 if dtype == torch.float64 else 0.02)


def test_a_network_in_training_mode_is_predicted_in_evaluation_mode_and_left_alone():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3)).double()
    pb.patch_(model, pb.ECMP(3, jitter=0.5))
    statistics = model[1].running_mean.clone()
    draws = pb.Draws.sample(model, 5)
    found = {}
    for mode in (True, False):
        model.train(mode)
        for engine in ("graph", "loop"):
            found[mode, engine] = pb.predict(model, rows(), draws, engine=engine).probs
        assert all(module.training is mode for module in model.modules())
    for probs in found.values():
        torch.testing.assert_close(probs, found[False, "loop"], rtol=1e-10, atol=1e-10)
    assert torch.equal(model[1].running_mean, statistics)


def data_dependent(self, x):
    return self.body(x if float(x.sum()) > 0 else -x)


def counts_in_a_buffer(self, x):
    self.count += 1
    return self.body(x)


def counts_in_an_attribute(self, x):
    self.scale += 1
    return self.body(x)


def draws_numbers(self, x):
    return self.body(x + 0 * torch.randn_like(x))


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (data_dependent, "cannot be captured"),
        (counts_in_a_buffer, 'changes "count"'),
        (counts_in_an_attribute, "changes attributes"),
        (draws_numbers, "draws random numbers"),
    ],
)
def test_what_a_graph_cannot_say_goes_through_the_loop_with_the_reason(forward, reason):
    model = network(forward)
    plan = same(model, rows())
    assert plan.engine == "loop"
    assert reason in plan.fallback
    assert reason in str(plan)
    with pytest.raises(PatchbayesError, match="cannot be captured as a graph"):
        pb.export(model, "never.pt2", 4, example_input=rows())


def test_hooks_see_every_pass():
    model, seen = network(), []
    handle = model.hidden.register_forward_hook(lambda *_: seen.append(1))
    plan = same(model, rows(), 6)
    assert '"hidden" has forward hooks' in plan.fallback
    assert len(seen) == 12
    handle.remove()
    assert same(model, rows()).engine == "graph"


def test_autocast_goes_through_the_loop():
    model, x = network().float(), rows().float()
    draws = pb.Draws.sample(model, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        prediction = pb.predict(model, x, draws, engine="graph")
        expected = pb.predict(model, x, draws, engine="loop")
    assert prediction.plan.fallback == "autocast is on"
    assert torch.equal(prediction.probs, expected.probs)


def add_in_place(self, x):
    h = self.norm(x)
    k = h.add_(self.again(x))
    return self.fc(self.hidden(h) + k.relu())


def write_into_a_view(self, x):
    h = self.norm(x)
    h[:, 0] = 0
    h += self.again(x)
    return self.fc(self.hidden(h))


def change_the_input(self, x):
    x = x.clone()
    y = x[:, :2]
    y.mul_(2)
    return self.body(x)


@pytest.mark.parametrize("forward", [add_in_place, write_into_a_view, change_the_input])
def test_changes_in_place_are_seen(forward):
    model = network(forward, pb.EMP(3, jitter=0.5))
    assert same(model, rows(), 20).engine == "graph"


def test_what_output_does_is_done_to_every_draw():
    def forward(self, x):
        return {"scores": self.body(x), "hidden": (self.norm(x), [self.fc(x)])}

    model = network(forward)
    assert same(model, rows(), output=lambda y: y["scores"]).engine == "graph"
    assert same(model, rows(), output=lambda y: y["hidden"][1][0].softmax(-1) + y["scores"]).engine == "graph"
    assert same(model, rows(), output=lambda y: y["scores"].sub_(1).clone()).engine == "graph"
    with pytest.raises(PatchbayesError, match="'scores', 'hidden'"):
        pb.predict(model, rows(), 4, engine="graph")


def test_logits_in_a_dict_are_found():
    model = network(lambda self, x: {"loss": x.sum(), "logits": self.body(x)})
    assert same(model, rows()).engine == "graph"


def test_arguments_that_are_no_tensors_are_part_of_the_form():
    model = network(lambda self, x, times, flag=False: self.body(x * times + (1 if flag else 0)))
    for arguments in ((rows(), 2), (rows(), 3), {"x": rows(), "times": 2, "flag": True}):
        assert same(model, arguments).engine == "graph"


def test_what_is_no_tensor_in_an_output_is_left_out():
    class States:
        def __init__(self, value):
            self.value = value

    def forward(self, x):
        return {"logits": self.body(x), "states": States(x)}

    model = network(forward)
    assert same(model, rows()).engine == "graph"
    plan = same(model, rows(), output=lambda made: made["logits"] + made["states"].value.sum())
    assert plan.engine == "loop"
    assert "does not run" in plan.fallback


def test_an_output_that_hides_its_tensors_goes_through_the_loop():
    @dataclasses.dataclass
    class Answer:
        logits: torch.Tensor

    model = network(lambda self, x: Answer(self.body(x)))
    for output in ({}, {"output": lambda made: made.logits}):
        plan = same(model, rows(), **output)
        assert plan.engine == "loop"
        assert "returns a Answer, whose tensors cannot be seen" in plan.fallback


def test_only_a_few_forms_are_remembered():
    model = network(lambda self, x, times: self.body(x * times))
    for times in range(18):
        pb.predict(model, (rows(), times), pb.Draws.sample(model, 3), engine="graph")
    assert len(forms_of(model)) == 16


def test_global_pooling_of_channels_last_says_nothing_for_many_draws(capfd):
    """torch's own pooling sets strides, which vmap does for each draw by itself, with a warning on standard error."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    )
    model.eval().to(memory_format=torch.channels_last)
    pb.patch_(model, pb.ECMP(3, jitter=0.5), "norm")
    x = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    draws = pb.Draws.sample(model, 20)
    found = pb.predict(model, x, draws, engine="graph")
    assert found.plan.engine == "graph"
    torch.testing.assert_close(found.probs, pb.predict(model, x, draws, engine="loop").probs)
    assert "BatchedFallback" not in capfd.readouterr().err
