"""Every method of the family against the rest: the same networks, data and epochs, calibrated on the same held-out part.

    fashion   2,000 images at 14 x 14, 40 epochs.
    uci       yacht, boston, concrete, energy: the first five published splits, one hidden layer of 50, 200 epochs. (--data-dir)

Each method has at most four values of one number, and the one with the lowest held-out NLL is scored on the test part; all
have the KL at full weight and `calibrate_`. Step and prediction times are in units of the plain network's in the same run.
Every run is kept in --work, so that a stopped one goes on. At the end results/family_<task>.json is written.

    python benchmarks/family.py fashion --seeds 0 1 2
    python benchmarks/family.py uci --data-dir DATA
"""

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from records import write_record
from torch import Tensor, nn

import patchbayes as pb
from patchbayes.cli.demo_study import fashion
from patchbayes.files import write_atomically
from patchbayes.likelihoods import Likelihood
from patchbayes.metrics.calibration import expected_calibration_error
from patchbayes.nets import mlp
from patchbayes.posteriors.text import parse_rules
from patchbayes_reproduce.regression_splits import read_splits

DRAWS, BATCH, LEARNING_RATE = 20, 128, 1e-3
EPOCHS = {"fashion": 40, "uci": 200}
UCI_SETS = ("yacht", "boston", "concrete", "energy")
#: name of a row -> its candidates, rules as text. One component without noise is the plain network.
METHODS = {
    "vanilla": ["norm: emp(1)"],
    "dropout": [f"linear+conv: dropout({rate}, tie='unit')" for rate in (0.01, 0.05, 0.1, 0.2)],
    "EMP": [f"norm+output: emp(5, jitter={jitter})" for jitter in (0.1, 0.3, 1.0)],
    "ECMP": [f"norm+output: ecmp(5, jitter={jitter})" for jitter in (0.1, 0.2, 0.5)],
    "EMP, learned p": [f"norm+output: emp(5, jitter={jitter}, learn_probabilities=True)" for jitter in (0.1, 0.3)],
    "ECMP, learned p": ["norm+output: ecmp(5, jitter=0.2, learn_probabilities=True)"],
    "learned sigma": [f"norm+output: gaussianmixture(5, scale={scale})" for scale in (0.03, 0.1, 0.3)],
    "mean field": [f"all: meanfield(scale={scale})" for scale in (0.03, 0.1)],
    "rank-one": [f"linear+conv: rankone(5, jitter={jitter})" for jitter in (0.1, 0.3)],
    "flow": [f"norm+output: flow(scale={scale})" for scale in (0.03, 0.1, 0.3)],
    "MNF": [f"linear+conv: mnf(scale={scale})" for scale in (0.03, 0.1)],
    "ensemble of five": ["all: ensemble(5)"],
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
    return Task(material.train, material.held_out, material.test, material.network(seed), pb.likelihoods.Categorical())


def uci_task(name: str, split: int, data_dir: Path) -> Task:
    """A tenth of the training part is held out."""
    (stack,) = read_splits(name, data_dir, [split])
    x, y = stack.train_inputs[0], stack.train_targets[0, :, :1]
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(split))
    few, rest = order[: len(x) // 10], order[len(x) // 10 :]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(split)
        network = mlp(x.shape[1], (50,), 1)
    test = (stack.test_inputs[0], stack.test_targets[0, :, :1])
    return Task(
        (x[rest], y[rest]),
        (x[few], y[few]),
        test,
        network,
        pb.likelihoods.Gaussian(10.0, learn=True),
        float(stack.unit[0, 0]),
    )


def run(task: Task, text: str, seed: int, epochs: int) -> dict[str, Any]:
    """Train, calibrate and score one candidate."""
    x, y = task.train
    model = task.network
    pb.patch_(
        model,
        parse_rules(text),
        example_input=x[:2],
        likelihood=task.likelihood,
        generator=torch.Generator().manual_seed(seed),
    )
    learned = [*model.parameters(), *(p for p in task.likelihood.parameters())]
    optimizer = torch.optim.Adam(learned, LEARNING_RATE)
    generator = torch.Generator().manual_seed(seed)
    draws: Any = 2 if "learn_probabilities" in text else pb.Draws.enumerate(model) if "ensemble" in text else 1
    began, steps = time.process_time(), 0
    for _ in range(epochs):
        model.train()
        for some in torch.randperm(len(x), generator=generator).split(BATCH):
            outputs = pb.forward_draws(model, x[some], draws)
            loss = pb.negative_elbo(outputs, y[some], pb.kl(model), num_data=len(x), likelihood=task.likelihood)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps += 1
    training = (time.process_time() - began) / steps
    model.eval()
    report = pb.calibrate_(model, [task.held_out], draws=DRAWS, seed=seed)
    began = time.process_time()
    result = {"test": scores(model, task, task.test), "held_out": scores(model, task, task.held_out)}
    return result | {
        "step_seconds": training,
        "prediction_seconds": time.process_time() - began,
        "parameters": sum(p.numel() for p in model.parameters()),
        "calibration": str(getattr(report, "chosen", "")),
        "probabilities": {
            name: site.posterior.probabilities()
            for name, site in pb.patched_sites(model).items()
            if site.posterior.learns_law and site.posterior.groups() is not None
        },
    }


def scores(model: nn.Module, task: Task, data: tuple[Tensor, Tensor]) -> dict[str, float]:
    """Accuracy or RMSE, NLL and ECE of the averaged prediction, in the targets' own units."""
    x, y = data
    prediction = pb.predict(model, x, DRAWS, keep_draws=isinstance(task.likelihood, pb.likelihoods.Gaussian))
    if isinstance(task.likelihood, pb.likelihoods.Gaussian):
        error = float((prediction.mean - y).square().mean().sqrt()) * task.unit
        nll = -float(prediction.log_prob(y).mean()) + torch.tensor(task.unit).log().item()
        return {"rmse": error, "nll": nll}
    log_probs = prediction.log_probs
    nll = -float(log_probs[torch.arange(len(y)), y].mean())
    accuracy = float((log_probs.argmax(-1) == y).double().mean())
    return {"accuracy": accuracy, "nll": nll, "ece": expected_calibration_error(log_probs.exp(), y)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=EPOCHS)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", type=int, nargs="+", default=None, help="seeds, or splits of a UCI set")
    parser.add_argument("--sets", nargs="+", default=list(UCI_SETS))
    parser.add_argument("--epochs", type=int, help="those of the task, if not given")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "family")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    options.work.mkdir(parents=True, exist_ok=True)
    epochs = options.epochs or EPOCHS[options.task]
    numbers = options.seeds or ([0, 1, 2] if options.task == "fashion" else [0, 1, 2, 3, 4])
    rows: dict[str, list[dict[str, Any]]] = {}
    for name in ["fashion"] if options.task == "fashion" else options.sets:
        for number in numbers:
            for method in options.methods:
                found = []
                for place, text in enumerate(METHODS[method]):
                    file = options.work / f"{name}_{epochs}_{number}_{method.replace(' ', '-')}_{place}.json"
                    if not file.exists():
                        task = image_task(number) if name == "fashion" else uci_task(name, number, options.data_dir)
                        write_atomically(file, json.dumps(run(task, text, number, epochs)).encode())
                    found.append(json.loads(file.read_text()) | {"rules": text})
                best = min(found, key=lambda one: one["held_out"]["nll"])
                rows.setdefault(f"{name}/{method}", []).append(best)
                print(name, number, method, best["rules"], best["test"], flush=True)
    write_record(f"family_{options.task}", {"epochs": epochs, "numbers": numbers, "rows": summary(rows), "runs": rows})


def summary(rows: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, float]]:
    """Means over seeds or splits; times in units of vanilla's."""
    result = {}
    for title, runs in rows.items():
        plain = rows.get(f"{title.partition('/')[0]}/vanilla", runs)
        result[title] = {key: statistics.fmean(one["test"][key] for one in runs) for key in runs[0]["test"]} | {
            "parameters": runs[0]["parameters"],
            "step_time": statistics.fmean(one["step_seconds"] for one in runs)
            / statistics.fmean(one["step_seconds"] for one in plain),
            "prediction_time": statistics.fmean(one["prediction_seconds"] for one in runs)
            / statistics.fmean(one["prediction_seconds"] for one in plain),
        }
    return result


if __name__ == "__main__":
    main()
