"""What the demo compares: one network trained in several ways, each calibrated on the same held-out images, and scored.

A contestant is trained, calibrated and scored on its own, so that two can run at a time. Its rows are plain numbers.
"""

import copy
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DRAWS = 20
BATCH = 128
LEARNING_RATE = 1e-3
_SCORED_AT_ONCE = 500

LogProbs = Callable[[Tensor], Tensor]


def _whole(inputs: Tensor) -> Tensor:
    return inputs


@dataclass(frozen=True)
class FreshLayer:
    """The output layer on a pretrained network, which starts from nothing: its name, its learning rate."""

    name: str
    learning_rate: float


@dataclass(frozen=True)
class Material:
    """Prepared inputs and classes: to train on, to calibrate on, to score. network: a fresh one, by seed."""

    train: tuple[Tensor, Tensor]
    held_out: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    network: Callable[[int], nn.Module]
    corrupted: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    unfamiliar: Tensor | None = None
    learning_rate: float = LEARNING_RATE
    batch: int = BATCH
    budget: int = 40_000  # passes of calibration
    decay: bool = False  # of the learning rate, linearly to 0
    fresh: FreshLayer | None = None  # all else is pretrained
    scheme: Callable[[float], Any] | None = None  # noise -> rules of "mixed:NOISE", in place of `mixed`
    trim: Callable[[Tensor], Tensor] = _whole  # a batch of inputs, without what pads all of them


def fashion(seed: int, train: int = 2000, corrupted: int = 100) -> Material:
    """The bundled clothes: 2,000 images to train on, 1,000 held out, by seed; 2,000 to test; digits as unfamiliar inputs."""
    from ..data import read
    from ..data.small_images import SMALL_CORRUPTIONS, SMALL_SEVERITIES, corrupt_small
    from ..nets import small_resnet
    from ..runs.robustness import fitted

    data = read("fashion", held_out=1 / 3, seed=seed)
    assert data.held_out is not None
    parts = [split.fetch(torch.arange(len(split))) for split in (data.train, data.held_out, data.test)]
    ready = [(data.preparation.inputs(raw), classes) for raw, classes in parts]
    raw, classes = (part[:corrupted] for part in parts[2])
    changed = {
        f"{name} {severity}": (data.preparation.inputs(corrupt_small(raw, name, severity)), classes)
        for name in SMALL_CORRUPTIONS
        for severity in SMALL_SEVERITIES
    }
    digits = read("digits").test
    foreign = fitted(digits.fetch(torch.arange(len(digits)))[0], data.input_shape)
    x, y = ready[0]
    return Material(
        (x[:train], y[:train]),
        ready[1],
        ready[2],
        lambda number: _seeded(number, lambda: small_resnet(1, data.num_outputs)),
        changed,
        data.preparation.inputs(foreign),
    )


def contest(material: Material, contestant: str, seed: int, epochs: int) -> dict[str, Any]:
    """Train, calibrate and score one contestant: "plain", "dropout:RATE", "mixed:NOISE" or "ensemble:MEMBERS".

    "mixed:0" is not patched: what is left where the held-out part chooses no noise.
    Gives its rows by title, the accuracy on the training images, and the processor seconds that training and the rest took.
    """
    from ..bayesianizing import calibrate_

    kind, _, number = contestant.partition(":")
    began = time.process_time()
    if kind == "ensemble":
        models = [material.network(1000 * seed + member) for member in range(int(number))]
        for member, one in enumerate(models):
            fit(one, material, epochs, 1000 * seed + member)
        return {"rows": _ensemble_rows(material, models), "training_seconds": time.process_time() - began}
    model = patched(material, contestant, seed)
    fit(model, material, epochs, seed, optimizer_of(model, contestant, material.learning_rate, material.fresh))
    trained = time.process_time()
    result: dict[str, Any] = {"training_seconds": trained - began, "train_accuracy": _train_accuracy(model, material)}
    if kind == "plain":
        result["rows"] = _plain_rows(material, model, seed)
    elif kind == "dropout":
        rows = {
            "draws": tempered(material, answers(material, model, DRAWS)),
            "one pass": tempered(material, answers(material, model, "mean")),
        }
        result["rows"] = {f"dropout {number}, {name}": scores_of(material, *row) for name, row in rows.items()}
    else:
        report = calibrate_(model, held_out_batches(material), draws=DRAWS, budget=material.budget, seed=seed)
        rows = {
            "draws": (answers(material, model, DRAWS, report.draw_temperature), report.temperature),
            "one pass": (answers(material, model, "mean"), report.mean_temperature),
        }
        result["rows"] = {f"mixed {number}, {name}": scores_of(material, *row) for name, row in rows.items()}
        result["spread"] = report.chosen
    return result | {"other_seconds": time.process_time() - trained}


def patched(material: Material, contestant: str, seed: int) -> nn.Module:
    """A contestant's fresh network."""
    from ..patching.patch import patch_
    from ..posteriors import Dropout, mixed

    kind, _, number = contestant.partition(":")
    model = material.network(seed)
    if kind == "dropout":
        patch_(model, Dropout(float(number)), sites="norm")
    elif kind == "mixed" and float(number):
        rules = (material.scheme or mixed)(float(number))
        patch_(model, rules, generator=torch.Generator().manual_seed(seed))
    return model


def optimizer_of(
    model: nn.Module, contestant: str, learning_rate: float, fresh: FreshLayer | None = None
) -> torch.optim.Optimizer:
    """Adam; the components of "mixed:NOISE" have a rate of their own (`adam_rate`), and so has a fresh output layer."""
    from ..objective import parameter_groups
    from ..posteriors.mixed import adam_rate

    if fresh is not None:
        groups: dict[float, list[nn.Parameter]] = {fresh.learning_rate: [], learning_rate: []}
        for name, parameter in model.named_parameters():
            groups[fresh.learning_rate if name.startswith(f"{fresh.name}.") else learning_rate].append(parameter)
        return torch.optim.Adam([{"params": own, "lr": lr} for lr, own in groups.items()])
    kind, _, number = contestant.partition(":")
    if kind != "mixed" or not float(number):
        return torch.optim.Adam(model.parameters(), learning_rate)
    return torch.optim.Adam(parameter_groups(model, lr=learning_rate, patch_lr=adam_rate(learning_rate)))


def fit(
    model: nn.Module, material: Material, epochs: int, seed: int, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """The loop that everybody writes: Adam, no augmentation; the learning rate stays, or falls to 0 with every step."""
    x, y = material.train
    generator = torch.Generator().manual_seed(seed)
    optimizer = optimizer or torch.optim.Adam(model.parameters(), material.learning_rate)
    last = 0.0 if material.decay else 1.0
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, last, epochs * math.ceil(len(x) / material.batch))
    model.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(x), generator=generator).split(material.batch):
            if len(rows) == 1:
                continue  # batch norms need two
            optimizer.zero_grad()
            F.cross_entropy(model(material.trim(x[rows])), y[rows]).backward()
            optimizer.step()
            schedule.step()
    model.eval()


def answers(material: Material, model: nn.Module, draws: Any, draw_temperature: float = 1.0) -> LogProbs:
    """Log-probabilities (B, C) of the averaged prediction, before its temperature; inputs asked for again are remembered."""
    from ..likelihoods import Categorical
    from ..prediction import predict_batches

    likelihood = Categorical().set_temperature_(draw_temperature=draw_temperature)
    known: list[tuple[Tensor, Tensor]] = []  # inputs and their answers: temperatures and scores ask for the same ones

    def log_probs(x: Tensor) -> Tensor:
        for inputs, found in known:
            if inputs is x:
                return found
        batches = [material.trim(part) for part in x.split(_SCORED_AT_ONCE)]
        parts: Any = predict_batches(model, batches, draws=draws, likelihood=likelihood)
        known.append((x, torch.cat([part.log_probs for part in parts])))
        return known[-1][1]

    return log_probs


def held_out_batches(material: Material) -> list[tuple[Tensor, Tensor]]:
    x, y = material.held_out
    return [(material.trim(some), labels) for some, labels in zip(x.split(BATCH), y.split(BATCH), strict=True)]


def _plain_rows(material: Material, model: nn.Module, seed: int) -> dict[str, Any]:
    from ..bayesianizing import bayesianize_

    plain, temperature = tempered(material, answers(material, model, "mean"))
    rows = {"original": scores_of(material, plain, 1.0), "temperature scaling": scores_of(material, plain, temperature)}
    model = copy.deepcopy(model)
    report = bayesianize_(model, held_out_batches(material), draws=DRAWS, budget=material.budget, seed=seed)
    drawn = report.calibration.chosen != "none"
    bayesianized = answers(material, model, DRAWS, report.calibration.draw_temperature) if drawn else plain
    return rows | {"bayesianize_": scores_of(material, bayesianized, report.calibration.temperature)}


def _ensemble_rows(material: Material, models: list[nn.Module]) -> dict[str, Any]:
    def averaged(x: Tensor) -> Tensor:
        each = torch.stack([answers(material, model, "mean")(x) for model in models])
        return each.logsumexp(0) - torch.tensor(float(len(models))).log()

    return {f"ensemble of {len(models)}": scores_of(material, *tempered(material, averaged))}


def tempered(material: Material, log_probs: LogProbs) -> tuple[LogProbs, float]:
    """The answers, with the temperature that fits them to the held-out images."""
    from ..metrics import fit_temperature

    x, y = material.held_out
    return log_probs, fit_temperature(log_probs(x), y)


def scores_of(material: Material, log_probs: LogProbs, temperature: float) -> dict[str, Any]:
    """Accuracy, NLL and ECE on clean and corrupted test images, AUROC of unfamiliar inputs, NLL on the held-out ones."""
    from ..metrics import auroc, calibration_bins, nll

    def sharpened(x: Tensor) -> Tensor:
        return torch.log_softmax(log_probs(x).double() / temperature, -1)

    clean = sharpened(material.test[0])
    bins = calibration_bins(clean.exp(), material.test[1])
    scores: dict[str, Any] = {"temperature": temperature, **_quality(clean, material.test[1])}
    scores["held_out_nll"] = nll(sharpened(material.held_out[0]), material.held_out[1])
    scores["confidence"] = float(clean.exp().amax(1).mean())
    scores["reliability"] = [
        [int(n), round(float(c), 4), round(float(a), 4)]
        for n, c, a in zip(bins.count, bins.confidence, bins.accuracy, strict=True)
        if n
    ]
    if material.corrupted:
        x = torch.cat([part for part, _ in material.corrupted.values()])
        sizes = [len(targets) for _, targets in material.corrupted.values()]
        parts = sharpened(x).split(sizes)
        cells = [_quality(part, y) for part, (_, y) in zip(parts, material.corrupted.values(), strict=True)]
        scores["corrupted"] = {name: sum(cell[name] for cell in cells) / len(cells) for name in cells[0]}
    if material.unfamiliar is not None:
        foreign = sharpened(material.unfamiliar)
        scores["unfamiliar_auroc"] = auroc(_entropy(clean), _entropy(foreign))
    return scores


def _quality(log_probs: Tensor, targets: Tensor) -> dict[str, float]:
    from ..metrics import accuracy, expected_calibration_error, nll

    probs = log_probs.exp()
    return {
        "accuracy": accuracy(probs, targets),
        "nll": nll(log_probs, targets),
        "ece": expected_calibration_error(probs, targets),
    }


def _entropy(log_probs: Tensor) -> Tensor:
    return -(log_probs.exp() * log_probs).nan_to_num().sum(-1)


def _train_accuracy(model: nn.Module, material: Material) -> float:
    x, y = material.train
    with torch.no_grad():
        found = torch.cat([model(material.trim(part)) for part in x.split(_SCORED_AT_ONCE)]).argmax(1)
    return float((found == y).double().mean())


def _seeded(seed: int, make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()
