"""The engine against the loop where a network, its inputs or its surroundings change between calls, or itself in place."""

import pytest
import torch
from torch import nn

import patchbayes as pb


class Net(nn.Module):
    """The layers of the networks below."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.linear, self.output = (
            nn.BatchNorm1d(4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 3),
        )  # fmt: skip
        self.relu = nn.ReLU(inplace=True)
        self.wide, self.narrow = nn.Embedding(50, 4), nn.Embedding(3, 4)
        self.plain = torch.tensor(0.1, dtype=torch.float64)
        self._scale = 1.0
        self.factors = [1.0, 2.0]


def network(forward, arguments="x"):
    """A patched network; `forward(self, ...)` takes the arguments of that name."""
    names = {"x": lambda self, x: forward(self, x), "x, y": lambda self, x, y: forward(self, x, y)}
    torch.manual_seed(0)
    made = type("Net", (Net,), {"forward": names[arguments]})().double()
    pb.patch_(made, pb.ECMP(3, jitter=0.5), "norm+output")
    return made.eval()


def numbers(seed, size=20):
    return torch.randn(size, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def same(model, inputs, draws, **options):
    """The plan, where the engine gives what the loop gives."""
    copies = torch.utils._pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, inputs)
    mine = pb.predict(model, inputs, draws, **options)
    loop = pb.predict(model, copies, draws, engine="loop", **options)
    torch.testing.assert_close(mine.log_probs, loop.log_probs, rtol=0, atol=1e-10)
    return mine.plan


def add_up(self, x):
    total = torch.zeros(4, dtype=torch.float64)
    total += self.first(x).mean(0)
    return self.output(x + total)


def change_what_is_used(self, x):
    h = self.first(x)
    k = h.add_(self.second(x))
    return self.output(self.linear(h) + k.relu())


@pytest.mark.parametrize(
    "forward",
    [change_what_is_used, add_up, lambda self, x: self.output(self.first(self.relu(x.clone())) + x)],
    ids=["a value that is used again", "a constant", "a copy"],
)
def test_changes_in_place_are_seen(forward):
    model = network(forward)
    draws = pb.Draws.sample(model, 20)
    for _ in range(2):
        same(model, numbers(1), draws)


def test_a_sum_in_place_that_nobody_else_looks_at_is_computed_by_stages():
    def shortcut(self, x):
        h = self.first(x)
        h += self.second(x)
        return self.output(h)

    model = network(shortcut)
    assert same(model, numbers(1), pb.Draws.sample(model, 20)).engine == "stages"


def test_what_output_does_is_done_to_every_draw():
    model = network(lambda self, x: self.output(self.first(x)))
    draws = pb.Draws.sample(model, 20)
    same(model, numbers(1), draws, output=lambda y: y.div_(2))
    same(model, numbers(1, 3), draws, output=lambda y: y.T)


def test_inputs_that_mean_numbers_of_rows_are_not_mixed_up():
    model = network(lambda self, x: self.output(self.first(self.wide(x[:, 0]) + self.narrow(x[:, 1]))))
    x = torch.stack([torch.arange(3, 43), torch.arange(40) % 3], 1)
    draws = pb.Draws.sample(model, 20)
    for part in (x[:20], x[20:], x[:20], x[5:25]):
        same(model, part, draws)


def test_one_tensor_given_twice_becomes_two():
    model = network(lambda self, x, y: self.output(self.first(x - 2 * y.sin())), "x, y")
    draws, x = pb.Draws.sample(model, 20), numbers(0)
    for inputs in ((x, x), (x, x), (x, x), (numbers(1), numbers(2)), (numbers(3), numbers(4)), (x, x)):
        same(model, inputs, draws)


def test_a_number_and_an_optional_tensor_beside_the_input():
    def masked(self, batch):
        x = batch["x"] * batch["scale"]
        return self.output(self.first(x if batch.get("mask") is None else x * batch["mask"]))

    model = network(masked)
    draws = pb.Draws.sample(model, 20)
    for scale in (1.0, 1.0, 1.0, 5.0):
        same(model, ({"x": numbers(1), "scale": scale},), draws)
    same(model, ({"x": numbers(1), "scale": 1.0, "mask": numbers(2)},), draws)
    same(model, ({"x": numbers(1), "scale": 1.0},), draws)


def test_sizes_that_depend_on_the_values():
    class Counting(nn.Module):
        def forward(self, x):
            return x * x[x > 0].shape[0] / 10

    model = network(lambda self, x: self.output(self.first(self.counting(x))))
    model.counting = Counting()
    draws = pb.Draws.sample(model, 20)
    for x in (numbers(0), numbers(1), numbers(2), numbers(3) + 1, numbers(4) - 1):
        same(model, x, draws)


def scaled(self, x):
    return self.output(self.first(x * self._scale * self.plain.exp() * self.factors[0]))


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model, "_scale", 3.0),
        lambda model: model.plain.fill_(2.0),
        lambda model: model.factors.__setitem__(0, 4.0),
        lambda model: setattr(model, "_scale", True),
        lambda model: setattr(model.tanh, "__class__", nn.Sigmoid),
    ],
    ids=["private attribute", "plain tensor", "list", "kind of number", "class"],
)
@pytest.mark.parametrize("times", [1, 3])
def test_what_forward_reads_may_change_between_calls(change, times):
    model = network(lambda self, x: scaled(self, self.tanh(x)))
    model.tanh = nn.Tanh()
    draws = pb.Draws.sample(model, 20)
    for _ in range(times):
        same(model, numbers(1), draws)
    change(model)
    same(model, numbers(1), draws)


def test_an_object_as_argument_may_change_unseen():
    class Options:
        factor = 1.0

    model, options = network(lambda self, x, y: self.output(self.first(x * y.factor)), "x, y"), Options()
    draws = pb.Draws.sample(model, 20)
    assert "holds a Options" in same(model, (numbers(1), options), draws).fallback
    options.factor = 5.0
    same(model, (numbers(1), options), draws)


def test_hooks_of_the_network_run_with_tensors():
    model, seen = network(lambda self, x: self.output(self.first(x))), []
    handle = model.register_forward_pre_hook(lambda module, args: (args[0].clamp(-3, 3),))
    model.register_forward_hook(lambda module, args, output: seen.append(type(output)))
    draws = pb.Draws.sample(model, 20)
    same(model, 0.1 * numbers(1), draws)
    same(model, 9 * numbers(1), draws)
    assert set(seen) == {torch.Tensor}
    handle.remove()
    same(model, 9 * numbers(1), draws)


def test_sparse_inputs_again_and_again():
    model = network(lambda self, x: self.output(self.first(torch.sparse.mm(x, self.linear.weight))))
    draws = pb.Draws.sample(model, 20)
    for _ in range(3):
        same(model, numbers(1).to_sparse(), draws)


def test_only_a_few_forms_of_batches_are_remembered():
    model = network(lambda self, x: self.output(self.first(x)))
    draws = pb.Draws.sample(model, 20)
    for size in range(2, 32):
        for _ in range(2):
            pb.predict(model, numbers(1, size), draws)
    (form,) = vars(pb.draws.network_of(model))["_forms"].values()
    for itinerary in form._itineraries.values():
        assert len(itinerary.recordings._seen) <= 8
