"""Every method of the family against the rest: the same networks, data and steps, calibrated on the same held-out part.

    fashion   2,000 images at 14 x 14, 1,000 held out, 2,000 to test, two hidden layers of 100 units with batch norm, 30 epochs;
              the number is chosen with the first seed.
    uci       yacht, boston, concrete, energy: the first five published splits, a tenth held out, one hidden layer of 50 units;
              the number is chosen for every split anew, since one split's held-out rows are another's test. (--data-dir)

Each method has at most four values of one number, and the one with the lowest held-out NLL is scored on the test part; all
have the KL at full weight and `calibrate_`, of an ensemble the temperature alone. A training step and a prediction are
processor time in units of the plain network's in the same run. Every method's result is kept in --work, so that a stopped run
goes on, and results/family_<task>.json is written after every seed or split.

    python benchmarks/family.py fashion --seeds 0 1 2
    python benchmarks/family.py uci --data-dir DATA
    python benchmarks/family.py uci --methods vanilla "EMP, learned p" "ECMP, learned p" --record family_probabilities
"""

import argparse
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from records import write_record
from torch import Tensor, nn

import patchbayes as pb
from patchbayes.cli.demo_study import fashion
from patchbayes.files import write_atomically
from patchbayes.likelihoods import Likelihood
from patchbayes.metrics import expected_calibration_error, interval_coverage
from patchbayes.nets import mlp
from patchbayes.posteriors.text import parse_rules
from patchbayes_reproduce.regression_splits import read_splits

DRAWS, BATCH = 20, 128
#: Steps of BATCH examples, and the learning rate of Adam.
STEPS = {"fashion": 480, "uci": 200}
LEARNING_RATES = {"fashion": 1e-3, "uci": 1e-2}
#: What calibration may take: inputs through the network, and held-out examples.
BUDGET, EXAMPLES = 10_000, 500
UCI_SETS = ("yacht", "boston", "concrete", "energy")
#: name of a row -> its candidates, rules as text. One component without noise is the plain network.
METHODS = {
    "vanilla": ["norm: emp(1)"],
    "dropout": [f"norm: dropout({rate})" for rate in (0.02, 0.1)],
    "EMP": [f"norm+output: emp(5, jitter={jitter})" for jitter in (0.1, 0.3)],
    "ECMP": [f"norm+output: ecmp(5, jitter={jitter})" for jitter in (0.1, 0.3)],
    "learned sigma": [f"norm+output: gaussianmixture(5, scale={scale})" for scale in (0.03, 0.1)],
    "rank-one": [f"linear+conv: rankone(5, jitter={jitter})" for jitter in (0.1, 0.3)],
    "flow": [f"norm+output: flow(scale={scale})" for scale in (0.03, 0.1)],
    "MNF": [f"linear+conv: mnf(scale={scale})" for scale in (0.03, 0.1)],
    "ensemble of five": ["all: ensemble(5)"],
    "EMP on norms, dropout on linear": ["norm: emp(5, jitter=0.1); linear: dropout(0.1)"],
    "EMP on norms, ECMP on linear": ["norm: emp(5, jitter=0.1); linear: ecmp(5, jitter=0.1)"],
}
LEARNED = {
    "EMP, learned p": ["norm+output: emp(5, jitter=0.1, learn_probabilities=True)"],
    "ECMP, learned p": ["norm+output: ecmp(5, jitter=0.1, learn_probabilities=True)"],
}


@dataclass(frozen=True)
class Task:
    """Data of one seed or split, a fresh network, and what its output says."""

    train: tuple[Tensor, Tensor]
    held_out: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    network: nn.Module
    likelihood: Likelihood
    unit: float = 1.0  # of the targets' standardized unit


def image_task(seed: int) -> Task:
    material = fashion(seed, corrupted=1)
    parts = [(x.flatten(1), y) for x, y in (material.train, material.held_out, material.test)]
    network = _seeded_mlp(seed, parts[0][0].shape[1], (100, 100), 10)
    return Task(parts[0], parts[1], parts[2], network, pb.likelihoods.Categorical())


def uci_task(name: str, split: int, data_dir: Path) -> Task:
    """A tenth of the training part is held out."""
    (stack,) = read_splits(name, data_dir, [split])
    x, y = stack.train_inputs[0], stack.train_targets[0, :, :1]
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(split))
    few, rest = order[: len(x) // 10], order[len(x) // 10 :]
    network = _seeded_mlp(split, x.shape[1], (50,), 1)
    test = (stack.test_inputs[0], stack.test_targets[0, :, :1])
    likelihood = pb.likelihoods.Gaussian(10.0, learn=True)
    return Task((x[rest], y[rest]), (x[few], y[few]), test, network, likelihood, float(stack.unit[0, 0]))


def _seeded_mlp(seed: int, inputs: int, hidden: tuple[int, ...], outputs: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return mlp(inputs, hidden, outputs, gamma=1.0)


def best_of(candidates: list[str], make: Callable[[], Task], seed: int, steps: int, rate: float) -> dict[str, Any]:
    """Train and calibrate every candidate; the one with the lowest held-out NLL is scored on the test part."""
    tried: dict[str, float] = {}
    best: tuple[nn.Module, Task, dict[str, Any]] | None = None
    for text in candidates:
        task = make()
        trained = fit(task, text, seed, steps, rate)
        tried[text] = scores(task.network, task, task.held_out)["nll"]
        if best is None or tried[text] < min(nll for other, nll in tried.items() if other != text):
            best = task.network, task, trained | {"rules": text}
    assert best is not None
    model, task, result = best
    began = time.process_time()
    result["test"] = scores(model, task, task.test)
    return result | {"prediction_seconds": time.process_time() - began, "held_out_nll": tried}


def fit(task: Task, text: str, seed: int, steps: int, rate: float) -> dict[str, Any]:
    """Patch, train and calibrate the task's network."""
    x, y = task.train
    model = task.network
    generator = torch.Generator().manual_seed(seed)
    pb.patch_(model, parse_rules(text), example_input=x[:2], likelihood=task.likelihood, generator=generator)
    optimizer = torch.optim.Adam([*model.parameters(), *task.likelihood.parameters()], rate)
    draws: Any = 2 if "learn_probabilities" in text else pb.Draws.enumerate(model) if "ensemble" in text else 1
    seconds: list[float] = []
    model.train()
    while len(seconds) < steps:
        for some in torch.randperm(len(x), generator=generator).split(BATCH)[: steps - len(seconds)]:
            began = time.process_time()
            outputs = pb.forward_draws(model, x[some], draws)
            loss = pb.objective.negative_elbo(
                outputs, y[some], pb.kl(model), num_data=len(x), likelihood=task.likelihood
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seconds.append(time.process_time() - began)
    model.eval()
    spread: Any = (
        "keep" if "ensemble" in text else "learn"
    )  # members far from each other have no mean to be scaled around
    report = pb.calibrate_(
        model, [task.held_out], draws=DRAWS, spread=spread, budget=BUDGET, examples=EXAMPLES, seed=seed
    )
    return {
        "step_seconds": statistics.median(seconds),
        "parameters": sum(p.numel() for p in model.parameters()),
        "spread": report.chosen,
        "temperature": report.temperature,
        "probabilities": {
            name: site.posterior.probabilities()
            for name, site in pb.patched_sites(model).items()
            if site.posterior.learns_law
        },
    }


def scores(model: nn.Module, task: Task, data: tuple[Tensor, Tensor]) -> dict[str, float]:
    """Accuracy or RMSE, NLL and calibration error of the averaged prediction, in the targets' own units."""
    x, y = data
    if isinstance(task.likelihood, pb.likelihoods.Gaussian):
        prediction: Any = pb.predict(model, x, DRAWS, keep_draws=True)
        error = float((prediction.mean - y).square().mean().sqrt()) * task.unit
        nll = -float(prediction.log_prob(y).mean()) + math.log(task.unit)
        low, high = prediction.interval(0.9)
        return {"rmse": error, "nll": nll, "coverage": interval_coverage(low, high, y)}
    parts: Any = pb.prediction.predict_batches(model, list(x.split(500)), draws=DRAWS)
    log_probs = torch.cat([part.log_probs for part in parts])
    nll = -float(log_probs[torch.arange(len(y)), y].mean())
    accuracy = float((log_probs.argmax(-1) == y).double().mean())
    return {"accuracy": accuracy, "nll": nll, "ece": expected_calibration_error(log_probs.exp(), y)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=STEPS)
    parser.add_argument("--methods", nargs="+", choices=[*METHODS, *LEARNED], default=list(METHODS))
    parser.add_argument("--seeds", type=int, nargs="+", help="seeds, or splits of a UCI set")
    parser.add_argument("--sets", nargs="+", choices=UCI_SETS, default=list(UCI_SETS))
    parser.add_argument("--steps", type=int, help="those of the task, if not given")
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("PATCHBAYES_DATA"))
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "family")
    parser.add_argument("--record", help="the record's name, family_<task> if not given")
    options = parser.parse_args()
    images = options.task == "fashion"
    if not images and options.data_dir is None:
        parser.error("uci: expected --data-dir, the folder with the sets")
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    options.work.mkdir(parents=True, exist_ok=True)
    steps = options.steps or STEPS[options.task]
    rate = LEARNING_RATES[options.task]
    numbers = options.seeds or ([0, 1, 2] if images else [0, 1, 2, 3, 4])
    rows: dict[str, list[dict[str, Any]]] = {}
    for done, number in enumerate(numbers, start=1):
        for name in ["fashion"] if images else options.sets:
            for method in options.methods:
                earlier = rows.setdefault(f"{name}/{method}", [])
                candidates = [earlier[0]["rules"]] if images and earlier else (METHODS | LEARNED)[method]
                file = options.work / f"{name}_{steps}_{number}_{method.replace(' ', '-')}.json"
                if not file.exists():
                    make = partial(image_task, number) if images else partial(uci_task, name, number, options.data_dir)
                    found = best_of(candidates, make, number, steps, rate)
                    write_atomically(file, json.dumps(found).encode())
                earlier.append(json.loads(file.read_text()))
                print(name, number, method, earlier[-1]["rules"], earlier[-1]["test"], flush=True)
        content = {"steps": steps, "batch": BATCH, "learning_rate": rate, "draws": DRAWS, "numbers": numbers[:done]}
        name = options.record or f"family_{options.task}"
        write_record(name, content | {"rows": summary(rows), "runs": rows})


def summary(rows: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, float]]:
    """Means over seeds or splits, with the NLL's standard error; times in units of vanilla's."""
    result = {}
    for title, runs in rows.items():
        plain = rows.get(f"{title.partition('/')[0]}/vanilla", runs)
        nlls = [one["test"]["nll"] for one in runs]
        result[title] = {key: statistics.fmean(one["test"][key] for one in runs) for key in runs[0]["test"]} | {
            "nll_error": statistics.stdev(nlls) / math.sqrt(len(nlls)) if len(nlls) > 1 else 0.0,
            "parameters": runs[0]["parameters"],
            "step_time": _ratio(runs, plain, "step_seconds"),
            "prediction_time": _ratio(runs, plain, "prediction_seconds"),
        }
    return result


def _ratio(runs: list[dict[str, Any]], plain: list[dict[str, Any]], key: str) -> float:
    return statistics.median(one[key] / other[key] for one, other in zip(runs, plain, strict=True))


if __name__ == "__main__":
    main()
