"""Appendix C.2: turns of shared and patched parameters (coordinate descent) speed training up, most where K is large.

Plain training and turns, with the same network, data, optimizer and settings, none of them tuned: how long does each take to
the objective (the negative ELBO of an epoch's own steps) that plain training has at half of its epochs? Where turns do not
get there, the time of the whole run stands for it, which is too short: the ratio is then a lower bound.

Seconds are the processor's, of one thread: wall times of the epochs, times the share of a processor that the run had.
"""

import itertools
import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from patchbayes.files import write_atomically
from patchbayes.runs import RunFolder, TrainingConfig, train

from .claim import Finding, all_of, of_test, untested
from .experiment import ComparedNumber, Experiment, Scale, TextTable, Workspace, as_text
from .regression_comparison import paired_test

_KINDS = ("plain", "turns")


@dataclass(frozen=True)
class TurnsPlan:
    """What is trained, and how long. turn: epochs of a turn."""

    data: str = "fashion"
    model: str = "small_resnet"
    components: tuple[int, ...] = (5, 20, 50)
    seeds: int = 5
    epochs: int = 16
    turn: float = 2.0
    batch_size: int = 100


_PLANS: Mapping[Scale, TurnsPlan] = {
    "smoke": TurnsPlan("digits", "small_cnn", (2, 3), seeds=2, epochs=4, turn=1.0, batch_size=400),
    "small": TurnsPlan(),
    "paper": TurnsPlan("cifar100", "resnet18_cifar", seeds=3, epochs=200, turn=5.0, batch_size=256),
}


def run(scale: Scale, setting: Workspace) -> dict[str, Any]:
    """Objective and seconds after every epoch, by K, kind and seed. A run that is finished is not trained again."""
    assert setting.work_dir is not None
    plan, work = _PLANS[scale], setting.work_dir / f"coordinate-descent-{scale}"
    work.mkdir(parents=True, exist_ok=True)
    rows = []
    for seed, components, kind in itertools.product(range(plan.seeds), plan.components, _KINDS):
        file = work / f"{kind}-{components}-{seed}.json"
        if not file.exists():
            if setting.finished:
                continue
            setting.say(f"coordinate descent: {kind}, K = {components}, seed {seed}")
            write_atomically(file, json.dumps(_trained(plan, setting, file, components, kind, seed)).encode())
        rows.append(json.loads(file.read_text()))
    return {"plan": json.loads(json.dumps(asdict(plan))), "rows": rows, "scale": scale}


def _trained(plan: TurnsPlan, setting: Workspace, file: Path, components: int, kind: str, seed: int) -> dict[str, Any]:
    config = TrainingConfig(
        data=plan.data, data_dir=None if setting.data_dir is None else str(setting.data_dir), model=plan.model,
        method=f"emp({components})", seed=seed, epochs=plan.epochs, batch_size=plan.batch_size, schedule="constant",
        augmentation="none", threads=1, alternate=plan.turn if kind == "turns" else 0.0,
    )  # fmt: skip
    folder = file.with_suffix("")
    began = time.process_time(), time.perf_counter()
    train(config, folder, resume=(folder / "config.json").exists(), quiet=True)
    share = (time.process_time() - began[0]) / (time.perf_counter() - began[1])
    history = RunFolder.open(folder).history()
    return {
        "components": components,
        "kind": kind,
        "seed": seed,
        "objective": [row["loss"] for row in history],
        "seconds": list(itertools.accumulate(share * row["train_seconds"] for row in history)),
    }


def _reached(row: Mapping[str, Any], target: float) -> int | None:
    """The first epoch whose objective is at most the target, counted from 1."""
    return next((epoch for epoch, value in enumerate(row["objective"], 1) if value <= target), None)


def _log_ratios(result: Mapping[str, Any], components: int) -> list[tuple[float, bool]]:
    """By seed: the logarithm of the time of turns over that of plain training, and whether turns got to the objective."""
    found = {(row["kind"], row["seed"]): row for row in result["rows"] if row["components"] == components}
    ratios = []
    for seed in sorted({seed for kind, seed in found if kind == "turns"}):
        plain, turns = found["plain", seed], found["turns", seed]
        half = len(plain["objective"]) // 2
        epoch = _reached(turns, plain["objective"][half - 1])
        seconds = turns["seconds"][-1 if epoch is None else epoch - 1]
        first = _reached(plain, plain["objective"][half - 1])
        assert first is not None
        ratios.append((math.log(seconds / plain["seconds"][first - 1]), epoch is not None))
    return ratios


def rows(result: dict[str, Any]) -> list[ComparedNumber]:
    """The paper names no number."""
    return []


def tables(result: dict[str, Any]) -> dict[str, TextTable]:
    plan, lines = result["plan"], []
    for components in plan["components"]:
        ratios = _log_ratios(result, components)
        last = {
            kind: statistics.fmean(
                row["objective"][-1] for row in result["rows"] if (row["kind"], row["components"]) == (kind, components)
            )
            for kind in _KINDS
        }
        lines.append(
            [
                str(components),
                f"{sum(there for _, there in ratios)} of {len(ratios)}",
                " ".join(f"{'' if there else '> '}{math.exp(value):.2f}" for value, there in ratios),
                as_text(last["plain"]),
                as_text(last["turns"]),
            ]
        )
    title = (
        f"{plan['model']} on {plan['data']}, EMP on norm and output, {plan['epochs']} epochs, turns of {plan['turn']:g}; the "
        f"objective of plain training after {plan['epochs'] // 2} epochs"
    )
    header = [
        "K",
        "seeds whose turns got there",
        "time of turns / of plain, by seed",
        "objective at the end, plain",
        "turns",
    ]
    return {title: (header, lines)}


def pays_where_k_is_large(result: Mapping[str, Any]) -> Finding:
    """Turns are sooner at the objective at the largest K, and gain more there than at the smallest."""
    least, most = min(result["plan"]["components"]), max(result["plan"]["components"])
    few, many = ([value for value, _ in _log_ratios(result, k)] for k in (least, most))
    both = min(len(few), len(many))
    if both < 2:
        return untested("fewer than two seeds")
    why = "paired over seeds, p < 0.01 asked for; logarithms of the time to the same objective, or a lower bound of it"
    return all_of(
        [
            of_test(f"{_times(many)} times plain training's time at K = {most}; log ratio", _against_zero(many), why),
            of_test(f"{_times(few)} times at K = {least}; difference", paired_test(many[:both], few[:both]), why),
        ]
    )


def _times(logs: Sequence[float]) -> str:
    return f"{math.exp(statistics.fmean(logs)):.2f}"


def _against_zero(values: Sequence[float]) -> Any:
    return paired_test(values, [0.0] * len(values))


EXPERIMENT = Experiment(
    name="coordinate-descent",
    title="Turns of shared and patched parameters",
    items=("appendix C.2",),
    duration={"smoke": "10 s", "small": "15 min of one idle core", "paper": "GPU-days"},
    run=run,
    rows=rows,
    tables=tables,
)
