"""bayesianize_ along one option at a time: held-out examples, budget, views, cost of prediction; and under shift.

    data    NLL with 50, 100, 300, 1,000 and 3,000 held-out examples, against temperature scaling on the same
    budget  a quarter of the default budget, the default, and ten times as much
    cost    draws that may cost 1.05, 1.2, 1.5, 3 and 20 passes; the rivals are the plain network on the image and its mirror
            image (2 passes), and on ten views (10 passes), each with a temperature
    views   draws on ten views against the plain network on the same views, as many passes, each with a temperature
    shift   six corruptions made for small images at three severities; unfamiliar images; what is told by which score

on two image classifiers,

    fashion         small_resnet, trained here on 2,000 images of 14 x 14 pixels until it fits them: overconfident
    cifar_resnet20  trained by others on CIFAR-100 (so was cifar_resnet56)

and for the costs also on two text classifiers (`intents` and `requests` of pairs.py). Held-out examples and scored ones are
parts of the test data that do not overlap. One record, results/calibration_curves.json; what it holds is not measured again.

    python benchmarks/calibration_curves.py [--networks fashion ...] [--curves data ...] [--seeds 0 1 2] [--scored 1000]
                                            [--data-dir FOLDER] [--results FOLDER] [--anew]
"""

import argparse
import copy
import functools
import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bundle_fashion import halved
from pairs import PAIRS, trained_once
from records import RESULTS, commit, write_record
from safetensors.torch import load_file
from scoring import paired, row
from torch import Tensor, nn

import patchbayes as pb
from patchbayes import metrics, nets, views
from patchbayes.bayesianizing.score import Average, raised_temperature
from patchbayes.cli import demo_study
from patchbayes.data import read
from patchbayes.data.small_images import SMALL_CORRUPTIONS, SMALL_SEVERITIES, corrupt_small
from patchbayes.runs.robustness import fitted

BATCH, DRAWS, POOL, TRAINING = 64, 20, 5000, 5000
#: Held-out examples that are used at most; and those of the defaults.
HELD_OUT, DEFAULT = 1500, 1200
#: The trained small_resnet is kept here between runs.
KEPT = RESULTS.parent / "build" / "calibration_fashion.safetensors"
DATA = (50, 100, 300, 1000, 3000)
TOLERANCE = 0.01
BUDGETS = (10_000, 40_000, 400_000)
COSTS = (1.05, 1.2, 1.5, 3.0, 20.0)


@dataclass
class Subject:
    """A trained network, raw test examples with their classes, how they become inputs; some of what it was trained on."""

    network: nn.Module
    raw: Tensor
    targets: Tensor
    inputs: Callable[[Tensor], Tensor]
    unfamiliar: Tensor | None = None
    training: tuple[Tensor, Tensor] | None = None

    def held_out(self, number: int) -> list[tuple[Tensor, Tensor]]:
        """The first examples of the pool that is never scored, so many, or all."""
        number = min(number, self.pool)
        x, y = self.inputs(self.raw[:number]), self.targets[:number]
        return list(zip(x.split(BATCH), y.split(BATCH), strict=True))

    def scored(self, number: int) -> tuple[Tensor, Tensor]:
        return self.raw[self.pool : self.pool + number], self.targets[self.pool : self.pool + number]

    @property
    def pool(self) -> int:
        return min(POOL, len(self.targets) // 2)


def fashion(folder: Path) -> Subject:
    material = demo_study.fashion(0)
    network = trained_once(material, 40, KEPT)
    split = read("fashion-mnist", folder, held_out=0.0).test
    raw, classes = split.fetch(torch.arange(len(split)))
    inputs = read("fashion").preparation.inputs
    return Subject(network, halved(raw), classes, inputs, material.unfamiliar, material.train)


def cifar(depth: int, folder: Path) -> Subject:
    network: nn.Module = getattr(nets, f"cifar_resnet{depth}")()
    network.load_state_dict(load_file(folder / "pretrained" / f"cifar100_resnet{depth}.safetensors"))
    network.eval().to(memory_format=torch.channels_last)
    data = read("cifar100", folder, held_out=0.0)
    raw, classes = data.test.fetch(torch.arange(len(data.test)))
    foreign = read("fashion-mnist", folder, held_out=0.0).test.fetch(torch.arange(1000))[0]
    inputs = data.preparation.inputs
    some, of = data.train.fetch(torch.arange(TRAINING))
    return Subject(network, raw, classes, inputs, inputs(fitted(foreign, data.input_shape)), (inputs(some), of))


def text(pair: str, folder: Path) -> Subject:
    torch.manual_seed(0)
    made = PAIRS[pair](folder)
    order = torch.randperm(len(made.targets), generator=torch.Generator().manual_seed(0))
    return Subject(made.network, made.inputs[order], made.targets[order], lambda tokens: tokens)


SUBJECTS: dict[str, Callable[[Path], Subject]] = {
    "fashion": fashion,
    "cifar_resnet20": functools.partial(cifar, 20),
    "cifar_resnet56": functools.partial(cifar, 56),
    "intents": functools.partial(text, "intents"),
    "requests": functools.partial(text, "requests"),
}
#: Text has no views and no corruptions here: only its costs are measured.
TEXT = ("intents", "requests")


def log_probs(model: nn.Module, x: Tensor, draws: Any, seen: Any = None) -> Tensor:
    return torch.cat([pb.predict(model, part, draws, views=seen).log_probs for part in x.split(BATCH)])


def scaled(subject: Subject, number: int, seen: Any = None) -> nn.Module:
    """The rival: a copy without patches, with the temperature that fits so many held-out examples."""
    model = copy.deepcopy(subject.network)
    pb.calibrate_(model, subject.held_out(number), examples=number, views=seen)
    return model


def made(subject: Subject, number: int, seed: int, **options: Any) -> tuple[nn.Module, dict[str, Any]]:
    model = copy.deepcopy(subject.network)
    worked = time.process_time()
    report = pb.bayesianize_(
        model, subject.held_out(number), seed=seed, **{"draws": DRAWS, "examples": HELD_OUT, **options}
    )
    print(report, flush=True)
    return model, {
        "cpu_seconds": time.process_time() - worked,
        "chosen": report.chosen,
        "sites": len(report.spread),
        "passes": report.passes,
        "scoring_passes": report.scoring_passes,
        "patch_share": report.patch_bytes / report.model_bytes,
    }


def compared(found: Tensor, rival: Tensor, targets: Tensor) -> dict[str, Any]:
    return row(found, targets) | paired(found, rival, targets) | {"rival_nll": metrics.nll(rival, targets)}


def data_curve(subject: Subject, seed: int, scored: int) -> list[dict[str, Any]]:
    raw, targets = subject.scored(scored)
    x, rows = subject.inputs(raw), []
    for number in DATA:
        rival = log_probs(scaled(subject, number), x, "mean")
        model, how = made(subject, number, seed)
        rows.append({"held_out": number, **compared(log_probs(model, x, DRAWS), rival, targets), **how})
    return rows


def budget_curve(subject: Subject, seed: int, scored: int) -> list[dict[str, Any]]:
    raw, targets = subject.scored(scored)
    x, rows = subject.inputs(raw), []
    rival = log_probs(scaled(subject, DEFAULT), x, "mean")
    for budget in BUDGETS:
        model, how = made(subject, DEFAULT, seed, budget=budget)
        rows.append(
            {"budget": budget, "held_out": DEFAULT, **compared(log_probs(model, x, DRAWS), rival, targets), **how}
        )
    return rows


def cost_curve(subject: Subject, seed: int, scored: int) -> list[dict[str, Any]]:
    raw, targets = subject.scored(scored)
    x = subject.inputs(raw)
    plain = log_probs(scaled(subject, HELD_OUT), x, "mean")
    rows: list[dict[str, Any]] = [{"title": "temperature scaling", "passes_allowed": 1.0, **row(plain, targets)}]
    for cost in COSTS:
        some = {"predict_cost": cost} if cost < DRAWS else {}
        try:
            model, how = made(subject, HELD_OUT, seed, **some)
        except pb.errors.PatchbayesError as error:  # the last layer alone costs more
            rows.append({"title": f"{DRAWS} draws", "passes_allowed": cost, "refused": str(error).splitlines()[0]})
            continue
        plan = pb.predict(model, x[:BATCH], DRAWS, engine="graph").plan  # what many predictions come to
        found = compared(log_probs(model, x, DRAWS), plain, targets) | {"passes_counted": plan.num_draws * plan.work}
        rows.append({"title": f"{DRAWS} draws", "passes_allowed": cost, **found, **how})
    for seen, passes in ((views.mirror, 2), (views.shifts(), 10)) if x.dim() == 4 else ():
        found = log_probs(scaled(subject, HELD_OUT, seen), x, "mean", seen)
        title = f"plain, {seen.name.partition('(')[0]}"
        rows.append({"title": title, "passes_allowed": float(passes), **compared(found, plain, targets)})
    return rows


def views_curve(subject: Subject, seed: int, scored: int) -> list[dict[str, Any]]:
    raw, targets = subject.scored(scored)
    x, rows = subject.inputs(raw), []
    for seen, draws in ((views.mirror, 2), (views.shifts(), 10), (views.shifts(), 20)):
        rival = log_probs(scaled(subject, HELD_OUT, seen), x, "mean", seen)
        model, how = made(subject, HELD_OUT, seed, draws=draws, views=seen)
        found = compared(log_probs(model, x, draws, seen), rival, targets)
        rows.append({"views": seen.name, "draws": draws, "rival_passes": len(seen), **found, **how})
    return rows


def shift_curve(subject: Subject, seed: int, scored: int) -> dict[str, Any]:
    """NLL under corruption; how well scores tell unfamiliar images from familiar ones, and errors from right answers."""
    raw, targets = subject.scored(scored)
    plain, (model, how) = scaled(subject, HELD_OUT), made(subject, HELD_OUT, seed)
    own = copy.deepcopy(subject.network)
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "original": lambda x: log_probs(own, x, "mean"),
        "temperature scaling": lambda x: log_probs(plain, x, "mean"),
        "bayesianize_": lambda x: log_probs(model, x, DRAWS),
    }
    cautious = {name: _raised(subject, ways[name]) for name in ("temperature scaling", "bayesianize_")}

    def answers(x: Tensor) -> dict[str, Tensor]:
        found = {name: way(x) for name, way in ways.items()}
        more = {_within(name): metrics.apply_temperature(found[name], factor) for name, factor in cautious.items()}
        return found | more

    clean = {name: row(values, targets) for name, values in answers(subject.inputs(raw)).items()}
    corrupted: dict[str, dict[str, list[float]]] = {name: {} for name in clean}
    gains: dict[str, list[Tensor]] = {name: [] for name in clean}
    for kind in SMALL_CORRUPTIONS:
        for severity in SMALL_SEVERITIES:
            found = answers(subject.inputs(corrupt_small(raw, kind, severity)))
            right = {name: values[torch.arange(len(targets)), targets].double() for name, values in found.items()}
            for name, values in found.items():
                corrupted[name].setdefault(kind, []).append(metrics.nll(values, targets))
                gains[name].append(right[name] - right["temperature scaling"])
    each = {name: torch.stack(some).mean(0) for name, some in gains.items()}  # of every image, over its corruptions
    return {
        "clean": clean,
        "corrupted": corrupted,
        "gains": {
            name: {"gain": float(gain.mean()), "gain_error": float(gain.std() / math.sqrt(len(gain)))}
            for name, gain in each.items()
        },
        "telling": _telling(subject, plain, model, raw, targets),
        **how,
    }


def _within(name: str) -> str:
    return f"{name}, tolerance {TOLERANCE:g}"


def _raised(subject: Subject, way: Callable[[Tensor], Tensor]) -> float:
    """By what a temperature is multiplied with a tolerance, as `calibrate_` does it, on the same held-out examples."""
    held_out = subject.held_out(HELD_OUT)
    averages = [Average("classes", (way(x),), None) for x, _ in held_out]
    return raised_temperature(averages, [y for _, y in held_out], 1.0, TOLERANCE)


def _telling(subject: Subject, plain: nn.Module, model: nn.Module, raw: Tensor, targets: Tensor) -> dict[str, Any]:
    assert subject.unfamiliar is not None
    x, foreign = subject.inputs(raw), subject.unfamiliar[: len(raw)]
    rows = {}
    for name, network, draws in (("temperature scaling", plain, "mean"), ("bayesianize_", model, DRAWS)):
        known, unknown = ([pb.predict(network, part, draws) for part in some.split(BATCH)] for some in (x, foreign))
        correct = torch.cat([p.probs for p in known]).argmax(1) == targets
        scores = {
            "entropy": lambda p: p.entropy,
            "largest probability": lambda p: 1 - p.probs.amax(1),
            "mutual information": lambda p: p.mutual_information,
        }
        for title, score in scores.items() if draws != "mean" else list(scores.items())[:2]:
            familiar, other = (torch.cat([score(p) for p in some]) for some in (known, unknown))
            rows[f"{name}, {title}"] = {
                "ood_auroc": metrics.auroc(familiar, other),
                "error_auroc": metrics.auroc(familiar[correct], familiar[~correct]),
                "aurc": metrics.aurc(-familiar, correct),
            }
    return rows


CURVES: dict[str, Callable[[Subject, int, int], Any]] = {
    "data": data_curve,
    "cost": cost_curve,
    "views": views_curve,
    "shift": shift_curve,
    "budget": budget_curve,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=["fashion", "cifar_resnet20", "intents"], choices=SUBJECTS)
    parser.add_argument("--curves", nargs="+", default=list(CURVES), choices=CURVES)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--scored", type=int, default=1000)
    parser.add_argument("--anew", action="store_true", help="measure again what the record holds")
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("PATCHBAYES_DATA", "."))
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    torch.set_flush_denormal(True)
    path = options.results / "calibration_curves.json"
    cells = json.loads(path.read_text())["cells"] if path.exists() else []
    subject = functools.cache(lambda name: SUBJECTS[name](Path(options.data_dir)))
    for curve in options.curves:
        for name in options.networks:
            if name in TEXT and curve != "cost":
                continue
            for seed in options.seeds:
                cell = {"curve": curve, "network": name, "seed": seed}
                known = [one for one in cells if cell.items() <= one.items()]
                if known and not options.anew:
                    continue
                found = CURVES[curve](subject(name), seed, options.scored)
                cells = [one for one in cells if one not in known]
                cells.append(cell | {"scored": options.scored, "commit": commit(), "found": found})
                write_record("calibration_curves", {"cells": cells}, options.results)
                print(json.dumps(cells[-1]), flush=True)


if __name__ == "__main__":
    main()
