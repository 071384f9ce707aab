"""The stacked trainer equals separate training of ordinary patched modules on the same draws and data order."""

import dataclasses

import pytest
import torch
from torch import nn

import patchbayes as pb
from patchbayes.draws.layout import NetworkDraw
from patchbayes.errors import PatchbayesError
from patchbayes.nets import mlp
from patchbayes.patching.drawing import hold
from patchbayes_reproduce.stacked_training import (
    BLOCK,
    Recipe,
    StackedNetworks,
    draw_steps,
    dropped_positions,
    train_,
)

NETWORKS, EXAMPLES, INPUTS, TARGETS, HIDDEN = 3, 23, 4, 2, 7
SMALL = {"hidden": HIDDEN, "epochs": 4, "batch_size": 10, "lr": 0.01}
RECIPES = {
    "vanilla": Recipe(**SMALL),
    "emp": Recipe(**SMALL, components=3, tie="site"),
    "ecmp": Recipe(**SMALL, components=3, tie="element"),
    "dropout": Recipe(**SMALL, norm="none", rate=0.2),
    "ensemble": Recipe(**SMALL, norm="none"),
    "norm before ReLU": Recipe(**SMALL, norm="before"),
    "ecmp, norm before ReLU": Recipe(**SMALL, norm="before", components=3, tie="element"),
    "dropout with norm": Recipe(**SMALL, rate=0.2),
    "emp, decoupled decay": Recipe(**SMALL, components=3, weight_decay=0.3, decay="decoupled"),
}


@pytest.fixture
def data(generator):
    inputs = torch.randn(NETWORKS, EXAMPLES, INPUTS, generator=generator, dtype=torch.float64)
    targets = torch.randn(NETWORKS, EXAMPLES, TARGETS, generator=generator, dtype=torch.float64)
    return inputs, targets


def stack(recipe, generator, dtype=torch.float64):
    return StackedNetworks(recipe, NETWORKS, INPUTS, TARGETS, generator, dtype)


def module_of(networks, r):
    """Network r as an ordinary module, patched by `patch_`, with the same parameters."""
    recipe = networks.recipe
    model = mlp(INPUTS, (HIDDEN,), TARGETS, norm=None if recipe.norm == "none" else "batch").double()
    if recipe.norm == "before":
        layers = dict(model.named_children())
        order = ["norm0", "hidden1", "norm1", "relu1", "output"]
        model = nn.Sequential()
        for name in order:
            model.add_module(name, layers[name])
    if recipe.components > 1:
        method = pb.EMP if recipe.tie == "site" else pb.ECMP
        pb.patch_(model, method(recipe.components, init="independent", norm_scale=recipe.gamma), "norm")
    elif recipe.rate:
        pb.patch_(model, pb.Dropout(recipe.rate), "linear" if recipe.norm == "none" else "norm")
    with torch.no_grad():
        for name, parameter in named_parameters(model).items():
            parameter.copy_(parameters_of(networks, r)[name].reshape(parameter.shape))
    return model


def named_parameters(model):
    names = {n.replace("patchbayes.components.", ""): p for n, p in model.named_parameters()}
    return {n: p for n, p in names.items() if p.numel()}


def parameters_of(networks, r):
    values = {name: value[r] for name, value in networks.parameters.items()}
    parts = dict(zip(["norm0.weight", "norm0.bias", "norm1.weight", "norm1.bias"],
                     values["patches"].split(networks.sizes, -1), strict=True))  # fmt: skip
    linear = {
        "hidden1.weight": values["hidden_weight"],
        "hidden1.bias": values["hidden_bias"],
        "output.weight": values["output_weight"],
        "output.bias": values["output_bias"],
    }
    return linear | (parts if networks.recipe.norm != "none" else {})


def train_module(model, networks, r, inputs, targets, blocks, weights, monkeypatch):
    """The usual loop: autograd, torch.optim, one network."""
    recipe = networks.recipe
    kind = torch.optim.Adam if recipe.decay == "coupled" else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=recipe.lr, weight_decay=recipe.weight_decay)
    model.train()
    for block in blocks:
        for t, rows in enumerate(block.rows[:, r]):
            prediction = forward(model, networks, r, inputs[r, rows], block, t, monkeypatch)
            loss = (weights[r] * (prediction - targets[r, rows]).square()).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def forward(model, networks, r, x, block, t, monkeypatch):
    recipe = networks.recipe
    if recipe.components > 1:
        picked = block.components[t, r]
        if recipe.tie == "site":
            picked = picked[[0, 2 * INPUTS]]
        with hold(model.__dict__["_patchbayes"], NetworkDraw(torch.tensor(0), picked)):
            return model(x)
    if recipe.rate:
        steps, stacked, batch = block.rows.shape
        flat = torch.ones(steps * stacked * INPUTS * batch, dtype=torch.float64)
        flat[block.dropped_inputs] = 0
        hidden = torch.ones(stacked * HIDDEN * batch, dtype=torch.float64)
        hidden[block.dropped_hidden[t]] = 0
        masks = iter([flat.view(steps, stacked, INPUTS, batch)[t, r].T, hidden.view(stacked, HIDDEN, batch)[r].T])
        with monkeypatch.context() as patch:
            patch.setattr("patchbayes.posteriors.dropout.bernoulli_like", lambda like, key, keep: next(masks).clone())
            output = model(x)
        assert next(masks, None) is None  # both masks were asked for
        return output
    return model(x)


@pytest.mark.parametrize("name", RECIPES)
def test_a_stack_equals_its_networks_trained_alone(name, data, generator, monkeypatch):
    inputs, targets = data
    weights = torch.rand(NETWORKS, TARGETS, generator=generator, dtype=torch.float64) + 0.5
    networks = stack(RECIPES[name], generator)
    # Components apart, and no shift at zero: Adam blows up rounding errors where gradient and decay both vanish.
    patches = networks.parameters["patches"]
    patches += 0.1 * torch.randn(patches.shape, generator=generator, dtype=torch.float64)
    modules = [module_of(networks, r) for r in range(NETWORKS)]
    start = networks.flat.clone()
    blocks = list(draw_steps(networks, EXAMPLES, generator))
    train_(networks, inputs, targets, blocks, weights)
    assert (networks.flat - start).abs().max() > 0.05  # training did something
    for r, model in enumerate(modules):
        train_module(model, networks, r, inputs, targets, blocks, weights, monkeypatch)
        for layer, parameter in named_parameters(model).items():
            expected = parameters_of(networks, r)[layer].reshape(parameter.shape)
            torch.testing.assert_close(parameter.detach(), expected, rtol=0, atol=1e-7, msg=f"{layer} of network {r}")
        if networks.recipe.norm != "none":
            for kind in ("mean", "var"):
                buffers = torch.cat([getattr(model.norm0, f"running_{kind}"), getattr(model.norm1, f"running_{kind}")])
                torch.testing.assert_close(getattr(networks, f"running_{kind}")[r], buffers, rtol=0, atol=1e-7)


def test_every_setting_of_the_recipe_changes_the_training(data, generator):
    inputs, targets = data
    base = Recipe(**SMALL, components=3)
    changes = [
        {"norm": "before"},
        {"norm": "none", "components": 1},
        {"components": 1},
        {"tie": "element"},
        {"gamma": 1.0},
        {"epochs": 5},
        {"batch_size": 8},
        {"lr": 0.02},
        {"weight_decay": 0.0},
        {"decay": "decoupled"},
        {"rate": 0.3, "components": 1},
    ]
    seen = []
    for change in [{}, *changes]:
        same = torch.Generator().manual_seed(0)
        networks = stack(dataclasses.replace(base, **change), same)
        train_(networks, inputs, targets, draw_steps(networks, EXAMPLES, same))
        seen.append(networks.parameters["hidden_weight"])
        assert all(not torch.equal(seen[-1], other) for other in seen[:-1]), change
    assert StackedNetworks(dataclasses.replace(base, hidden=9), 1, 2, 1, generator).parameters["hidden_bias"].shape == (
        1,
        9,
    )


def test_an_epoch_shows_every_network_every_example_once(generator):
    networks = stack(Recipe(hidden=HIDDEN, epochs=3, batch_size=10), generator)
    steps = list(draw_steps(networks, EXAMPLES, generator))
    assert [tuple(block.rows.shape) for block in steps] == [(2, NETWORKS, 10), (1, NETWORKS, 3)] * 3
    orders = []
    for first, second in zip(steps[::2], steps[1::2], strict=True):
        for r in range(NETWORKS):
            order = torch.cat([first.rows[:, r].flatten(), second.rows[:, r].flatten()])
            assert order.sort().values.tolist() == list(range(EXAMPLES))
            orders.append(tuple(order.tolist()))
    assert len(set(orders)) == 9  # an order of its own for each network and epoch


def test_long_epochs_come_in_blocks(generator):
    networks = stack(Recipe(hidden=HIDDEN, epochs=1, batch_size=2, components=2, tie="site"), generator)
    sizes = [len(block.rows) for block in draw_steps(networks, 2 * (BLOCK + 3), generator)]
    assert sizes == [BLOCK, 3]


def test_draws_of_components_follow_the_tie(generator):
    emp = stack(Recipe(hidden=HIDDEN, epochs=40, batch_size=23, components=3), generator)
    ecmp = stack(Recipe(hidden=HIDDEN, epochs=40, batch_size=23, components=3, tie="element"), generator)
    for networks, distinct in ((emp, 2), (ecmp, 2 * (INPUTS + HIDDEN))):
        drawn = torch.cat([block.components for block in draw_steps(networks, EXAMPLES, generator)])
        assert drawn.shape == (40, NETWORKS, 2 * (INPUTS + HIDDEN))
        columns = drawn.flatten(0, 1).T
        assert len(columns.unique(dim=0)) == distinct
        check_frequencies(columns.unique(dim=0).flatten(), torch.full((3,), 1 / 3))


def check_frequencies(values, probabilities):
    """Counts within 5.2 standard deviations: a false alarm in 1e-6 for three outcomes."""
    counts = torch.bincount(values, minlength=len(probabilities)).double()
    expected = len(values) * probabilities.double()
    deviation = (expected * (1 - probabilities.double())).sqrt()
    assert ((counts - expected).abs() <= 5.2 * deviation).all()


@pytest.mark.parametrize("rate", [0.005, 0.3])
def test_dropped_positions_are_those_of_independent_draws(rate, generator):
    length = 400_000
    positions = dropped_positions(length, rate, generator)
    mask = torch.zeros(length, dtype=torch.int64)
    mask[positions] = 1
    assert len(positions) == mask.sum()  # all different
    check_frequencies(mask, torch.tensor([1 - rate, rate]))
    pairs = mask[0::2] + 2 * mask[1::2]  # neighbors are independent
    check_frequencies(pairs, torch.tensor([(1 - rate) ** 2, rate * (1 - rate), rate * (1 - rate), rate**2]))
    with pytest.raises(AssertionError):  # the check sees a wrong rate
        check_frequencies(mask, torch.tensor([1 - 1.2 * rate, 1.2 * rate]))


def test_short_masks_are_complete(generator):
    total = sum(len(dropped_positions(10, 0.4, generator)) for _ in range(2000))
    assert abs(total - 8000) < 5 * (20_000 * 0.24) ** 0.5
    ends = {int(p) for _ in range(300) for p in dropped_positions(10, 0.4, generator)}
    assert ends == set(range(10))  # the first and the last too


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"norm": "layer"}, "norm='layer'"),
        ({"tie": "unit"}, "tie='unit'"),
        ({"decay": "none"}, "decay='none'"),
        ({"components": 2, "norm": "none"}, "components belong to batch norms"),
        ({"components": 0}, "at least 1"),
        ({"rate": 1.0}, "dropout rate"),
        ({"rate": 0.1, "norm": "before"}, 'not with norm="before"'),
        ({"epochs": 0}, "at least 1"),
    ],
)
def test_recipes_that_cannot_be(settings, message):
    with pytest.raises(PatchbayesError, match=message):
        Recipe(**settings)


def test_batches_of_one_and_wrong_shapes_are_refused(data, generator):
    inputs, targets = data
    networks = stack(Recipe(hidden=HIDDEN, batch_size=11, epochs=1), generator)
    with pytest.raises(PatchbayesError, match="leave a batch of one"):
        next(draw_steps(networks, EXAMPLES, generator))
    plain = stack(Recipe(hidden=HIDDEN, batch_size=11, epochs=1, norm="none"), generator)
    assert [len(block.rows[0, 0]) for block in draw_steps(plain, EXAMPLES, generator)] == [11, 1]
    with pytest.raises(PatchbayesError, match=r"\(3, 23, 3\)"):
        train_(networks, inputs[..., :3], targets, [])
    with pytest.raises(PatchbayesError, match=r"\(3, 22, 2\)"):
        train_(networks, inputs, targets[:, 1:], [])
