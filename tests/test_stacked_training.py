"""The stacked trainer equals separate training of ordinary patched modules on the same draws and data order."""

import pytest
import torch
from torch import nn

import patchbayes as pb
from patchbayes.errors import PatchbayesError
from patchbayes.experiments.stacked_training import (
    Recipe,
    StackedNetworks,
    Steps,
    draw_steps,
    dropped_positions,
    train_,
)
from patchbayes.layout import Drawn
from patchbayes.nets import mlp
from patchbayes.network import hold

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
    names = {n.replace("parametrizations.", "").removesuffix(".original"): p for n, p in model.named_parameters()}
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
        with hold(model.__dict__["_patchbayes"], Drawn(torch.tensor(0), picked)):
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
