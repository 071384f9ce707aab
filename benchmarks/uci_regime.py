"""The regime "uci" of from_scratch.py: Concrete, a network that says mean and variance, trained until it fits."""

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import patchbayes as pb
from patchbayes.cli.demo_study import DRAWS, optimizer_of
from patchbayes.data import read
from patchbayes.likelihoods import HeteroscedasticGaussian
from patchbayes.nets import mlp

BATCH, LEARNING_RATE, HIDDEN = 32, 3e-3, (100, 100)


@dataclass(frozen=True)
class Table:
    """Standardized inputs and targets of one published split; unit: what a target was divided by."""

    train: tuple[Tensor, Tensor]
    held_out: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    unit: float


def concrete(seed: int, data_dir: str | None) -> Table:
    """Split number `seed`, a fifth of its training part held out."""
    data = read("uci:concrete", data_dir, held_out=0.2, seed=seed, split=seed)
    assert data.held_out is not None
    raw = [split.fetch(torch.arange(len(split))) for split in (data.train, data.held_out, data.test)]
    (low, unit), (center, scale) = ((part.mean(0), part.std(0)) for part in (raw[0][1], raw[0][0]))
    train, held_out, test = (((x - center) / scale, (y - low) / unit) for x, y in raw)
    return Table(train, held_out, test, float(unit))


def network(contestant: str, seed: int, features: int) -> nn.Module:
    """A contestant's fresh network."""
    kind, _, number = contestant.partition(":")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = mlp(features, HIDDEN, out_features=2, gamma=1.0)
    likelihood = HeteroscedasticGaussian()
    if kind == "dropout":
        pb.patch_(model, pb.Dropout(float(number)), "norm", likelihood=likelihood)
    elif kind == "mixed" and float(number):  # 0: not patched
        generator = torch.Generator().manual_seed(seed)
        pb.patch_(model, pb.mixed(float(number)), likelihood=likelihood, generator=generator)
    return model


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """What the loop of everybody minimizes: the Gaussian NLL."""
    mean, log_variance = outputs.chunk(2, -1)
    return nn.functional.gaussian_nll_loss(mean, targets, log_variance.exp())


def contest(table: Table, contestant: str, seed: int, epochs: int) -> dict[str, Any]:
    """Train, calibrate and score one contestant."""
    kind, _, number = contestant.partition(":")
    x, y = table.train
    model = network(contestant, seed, x.shape[1]).train()
    optimizer = optimizer_of(model, contestant, LEARNING_RATE)
    generator = torch.Generator().manual_seed(seed)
    began = time.process_time()
    for _ in range(epochs):
        for rows in torch.randperm(len(x), generator=generator).split(BATCH):
            optimizer.zero_grad()
            loss(model(x[rows]), y[rows]).backward()
            optimizer.step()
    model.eval()
    result: dict[str, Any] = {"training_seconds": time.process_time() - began}
    if kind == "plain":
        mine = copy.deepcopy(model)
        report = pb.bayesianize_(mine, [table.held_out], draws=DRAWS, likelihood=HeteroscedasticGaussian(), seed=seed)
        scaled = report.calibration.mean_temperature
        draws = DRAWS if report.calibration.chosen != "none" else "mean"
        result["rows"] = {
            "original": scores(table, model, "mean", 1.0),
            "temperature scaling": scores(table, model, "mean", scaled),
            "bayesianize_": scores(table, mine, draws, report.calibration.temperature),
        }
    elif kind == "dropout":
        result["rows"] = {
            f"dropout {number}, {name}": scores(table, model, draws, None)
            for name, draws in (("draws", DRAWS), ("one pass", "mean"))
        }
    else:
        report = pb.calibrate_(model, [table.held_out], draws=DRAWS, likelihood=HeteroscedasticGaussian(), seed=seed)
        result["rows"] = {
            f"mixed {number}, draws": scores(table, model, DRAWS, report.temperature),
            f"mixed {number}, one pass": scores(table, model, "mean", report.mean_temperature),
        }
        result["spread"] = report.chosen
    return result


def scores(table: Table, model: nn.Module, draws: Any, temperature: float | None) -> dict[str, float]:
    """NLL and RMSE on the test part in the target's own unit, with the temperature given or fitted to the held-out part."""
    found = {}
    for part, (x, y) in (("held_out", table.held_out), ("test", table.test)):
        likelihood = HeteroscedasticGaussian()
        prediction: Any = pb.predict(model, x, draws=draws, likelihood=likelihood, keep_draws=True)
        if temperature is None:
            temperature = prediction.fit_temperature(y)
        likelihood.set_temperature_(temperature, mean_temperature=temperature)
        prediction = pb.predict(model, x, draws=draws, likelihood=likelihood, keep_draws=True)
        found[part] = -float(prediction.log_prob(y).double().mean()) + math.log(table.unit)
        error = float((prediction.mean - y).square().mean().sqrt()) * table.unit
    assert temperature is not None
    return {"nll": found["test"], "held_out_nll": found["held_out"], "rmse": error, "temperature": temperature}


def step(table: Table, contestant: str) -> Callable[[], None]:
    """A training step of a contestant."""
    x, y = (part[:BATCH] for part in table.train)
    model = network(contestant, 0, x.shape[1]).train()
    optimizer = optimizer_of(model, contestant, LEARNING_RATE)

    def run() -> None:
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()

    return run
