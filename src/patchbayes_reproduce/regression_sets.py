"""Tables 12 and 13: ten regression sets, five methods, the protocol of appendix D.

    python -m patchbayes_reproduce.regression_sets --scale small --data-dir DATA --out results/regression

Every (set, method) is a run with a record of its own, written as soon as it is done; a run whose record is there is skipped.
All splits of a set train together (`stacked_training.py`).
"""

import argparse
import contextlib
import hashlib
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from patchbayes.errors import PatchbayesError
from patchbayes.files import write_atomically
from patchbayes.provenance import provenance

from .experiment import Scale
from .regression_splits import SETS, StackedSplits, Standardized, is_there, read_splits, year_file
from .stacked_prediction import Score, drawn_outputs
from .stacked_training import Recipe, StackedNetworks, draw_steps, train_

#: What a method changes in the recipe of an unpatched network with batch norms.
METHODS: dict[str, dict[str, Any]] = {
    "ecmp": {"components": 5, "tie": "element"},
    "emp": {"components": 5, "tie": "site"},
    "dropout": {"norm": "none", "rate": 0.005},
    "ensemble": {"norm": "none"},
    "vanilla": {},
}
MEMBERS = 5  # of the explicit ensemble


@dataclass(frozen=True)
class Protocol:
    """How a set is read, trained on and scored; the defaults are the paper's (appendix D, as PAPER_MAP.md reads it).

    recipe        overrides of `Recipe`, before those of the method.
    splits        at most so many of the published splits; None: all.
    standardized  see `read_splits`.
    loss          "mse": the mean squared error in the network's units; "elbo": tau / 2 times that in the targets' own (Eq. 9).
    tau           output precision, in the targets' own units.
    draws         S, for ECMP and dropout.
    """

    recipe: dict[str, Any] = field(default_factory=dict)
    splits: int | None = None
    standardized: Standardized = "both"
    loss: Literal["mse", "elbo"] = "mse"
    tau: float = 0.1
    draws: int = 10_000
    seed: int = 0


PAPER = Protocol()
SMOKE = Protocol(recipe={"epochs": 3}, splits=2, draws=20)


#: Epochs at small scale of three runs that would take an hour of an idle core together.
FEWER_EPOCHS = {("naval", "ensemble"): 500, ("protein", "ensemble"): 200, ("protein", "vanilla"): 200}


def sets_of(scale: Scale) -> list[str]:
    """The sets of a scale: one for smoke, nine at small scale, and Year too at the paper's."""
    return ["yacht"] if scale == "smoke" else [name for name in SETS if scale == "paper" or name != "year"]


def protocol_of(scale: Scale, set_name: str, method: str) -> Protocol:
    """How a run of a scale is made. "small" is the paper's protocol but for `FEWER_EPOCHS`."""
    if scale == "smoke":
        return SMOKE
    fewer = FEWER_EPOCHS.get((set_name, method)) if scale == "small" else None
    return PAPER if fewer is None else replace(PAPER, recipe={"epochs": fewer})


def recipe_of(set_name: str, method: str, protocol: Protocol) -> Recipe:
    return Recipe(**{"hidden": SETS[set_name].hidden, **METHODS[method], **protocol.recipe})


def run(set_name: str, method: str, protocol: Protocol, data_dir: Path) -> dict[str, Any]:
    """Train and score one method on all splits of one set: the result part of a record."""
    recipe, config = recipe_of(set_name, method, protocol), config_of(set_name, method, protocol)
    numbers = range(min(SETS[set_name].splits, protocol.splits or SETS[set_name].splits))
    stacks = read_splits(set_name, data_dir, numbers, protocol.standardized)
    seeds = [_seed(protocol.seed, set_name, method, member) for member in range(config["members"])]
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    rows: list[dict[str, Any]] = []
    seconds = {"train": 0.0, "predict": 0.0}
    for data in stacks:
        began = time.perf_counter()
        members = [train_stack(recipe, data, protocol, generator) for generator in generators]
        trained = time.perf_counter()
        for place, number in enumerate(data.numbers):
            rows.append({"split": number, **_scored(members, place, data, protocol, generators)})
        seconds["train"] += trained - began
        seconds["predict"] += time.perf_counter() - trained
    rows.sort(key=lambda row: int(row["split"]))
    return {
        "set": set_name,
        "method": method,
        "config": config,
        "full_protocol": config == config_of(set_name, method, PAPER),
        "seeds": seeds,
        "num_train": stacks[0].train_inputs.shape[1],
        "num_test": stacks[0].test_inputs.shape[1],
        "seconds": {part: round(value, 2) for part, value in seconds.items()},
        "splits": rows,
        "summary": {metric: summary([row[metric] for row in rows]) for metric in ("rmse", "lpd")},
    }


def config_of(set_name: str, method: str, protocol: Protocol) -> dict[str, Any]:
    """Everything that decides the numbers of a run, as JSON."""
    settings = {key: value for key, value in asdict(protocol).items() if key != "recipe"}
    recipe = asdict(recipe_of(set_name, method, protocol))
    return {**settings, "recipe": recipe, "members": MEMBERS if method == "ensemble" else 1}


def train_stack(recipe: Recipe, data: StackedSplits, protocol: Protocol, generator: torch.Generator) -> StackedNetworks:
    """One network for each split, trained together."""
    splits, examples, inputs = data.train_inputs.shape
    networks = StackedNetworks(recipe, splits, inputs, data.train_targets.shape[-1], generator)
    weights = protocol.tau / 2 * data.unit.square() if protocol.loss == "elbo" else None
    train_(networks, data.train_inputs, data.train_targets, draw_steps(networks, examples, generator), weights)
    return networks


def summary(values: Sequence[float]) -> dict[str, float | None]:
    """Mean and standard error over splits, as the paper reports them (they treat overlapping splits as independent)."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    return {"mean": statistics.fmean(values), "standard_error": error}


def _scored(
    members: Sequence[StackedNetworks],
    place: int,
    data: StackedSplits,
    protocol: Protocol,
    generators: Sequence[torch.Generator],
) -> dict[str, Any]:
    """Both metrics of one split; for an ensemble also what a member reaches alone, on average."""

    def fresh() -> Score:
        return Score(data.test_targets[place], data.unit[place], protocol.tau)

    together, alone = fresh(), [fresh() for _ in members]
    for networks, generator, own in zip(members, generators, alone, strict=True):
        for outputs in drawn_outputs(networks, place, data.test_inputs[place], protocol.draws, generator):
            together.add(outputs)
            if len(members) > 1:
                own.add(outputs)
    numbers = _numbers(together)
    if len(members) > 1:
        for metric in ("rmse", "lpd"):
            numbers[f"member_{metric}"] = statistics.fmean(_numbers(own)[metric] for own in alone)
    return numbers


def _numbers(score: Score) -> dict[str, Any]:
    """Both metrics, averaged over targets."""
    rmse, lpd = score.rmse, score.lpd
    averages: dict[str, Any] = {"rmse": statistics.fmean(rmse), "lpd": statistics.fmean(lpd)}
    return averages if len(rmse) == 1 else {**averages, "rmse_of_targets": rmse, "lpd_of_targets": lpd}


def _seed(seed: int, set_name: str, method: str, member: int) -> int:
    text = f"regression/{set_name}/{method}/{member}/{seed}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")


def run_all(
    sets: Sequence[str],
    methods: Sequence[str],
    protocol: Protocol,
    data_dir: Path,
    folder: Path,
    say: Callable[[str], None] = lambda text: None,
    variant: str = "",
) -> list[Path]:
    """Run what has no record in `folder` yet, one record each; the paths of all records, old and new."""
    with small_arithmetic():
        origin = provenance() | {"source": _source_digest()}  # of the code that runs, whatever is committed meanwhile
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for set_name in sets:
        if not is_there(set_name, data_dir):
            say(f"{set_name}: not run, {year_file(data_dir)} is not there")
            continue
        for method in methods:
            path = folder / f"{set_name}-{method}.json"
            if path.exists():
                _check_same_config(path, config_of(set_name, method, protocol))
                say(f"{set_name} {method}: {path.name} is there")
            else:
                with small_arithmetic():
                    result = run(set_name, method, protocol, data_dir)
                name = {"variant": variant} if variant else {}
                record = {"experiment": "regression", **name, **origin, "date": provenance()["date"], **result}
                write_atomically(path, (json.dumps(record, indent=1) + "\n").encode())
                means = {metric: value["mean"] for metric, value in result["summary"].items()}
                say(
                    f"{set_name} {method}: RMSE {means['rmse']:.4g}, LPD {means['lpd']:.4g}, "
                    f"{result['seconds']['train']:.0f} + {result['seconds']['predict']:.0f} s"
                )
            paths.append(path)
    return paths


@contextlib.contextmanager
def small_arithmetic() -> Iterator[None]:
    """One thread, the fastest for networks of this size, and denormal numbers flushed: weight decay makes many of them."""
    threads, flushed = torch.get_num_threads(), bool(torch.tensor(1e-39) * 1 == 0)
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_flush_denormal(flushed)


def _check_same_config(path: Path, config: dict[str, Any]) -> None:
    try:
        found = json.loads(path.read_text())["config"]
    except (ValueError, KeyError, TypeError):
        raise PatchbayesError(f"{path} is not a record of this experiment; move it away.") from None
    if found != config:
        differing = sorted(key for key in config if found.get(key) != config[key])
        raise PatchbayesError(
            f"{path} was made with another configuration ({', '.join(differing)}); records are never overwritten.\n"
            "  do       choose another folder, or move the record away."
        )


def _source_digest() -> str:
    """A fingerprint of this experiment's source, for records made between commits."""
    digest = hashlib.sha256()
    for name in ("regression_sets", "regression_splits", "stacked_prediction", "stacked_training"):
        digest.update((Path(__file__).parent / f"{name}.py").read_bytes())
    return digest.hexdigest()[:16]


def main(words: Sequence[str] | None = None) -> None:
    """The command line of this file."""
    parser = argparse.ArgumentParser(description="Tables 12 and 13: ten regression sets.")
    parser.add_argument("--scale", choices=["smoke", "small", "paper"], default="small")
    parser.add_argument("--sets", nargs="+", choices=list(SETS), help="default: those of the scale")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--epochs", type=int, help="instead of the scale's; the records are marked")
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("PATCHBAYES_DATA"))
    parser.add_argument("--out", type=Path, default=Path("results/regression"))
    given = parser.parse_args(words)
    if given.data_dir is None:
        parser.error("give --data-dir, or set PATCHBAYES_DATA, to the folder that holds uci/")
    try:
        for name, method in itertools.product(given.sets or sets_of(given.scale), given.methods):
            protocol = protocol_of(given.scale, name, method)
            if given.epochs is not None:
                protocol = replace(protocol, recipe={**protocol.recipe, "epochs": given.epochs})
            run_all([name], [method], protocol, Path(given.data_dir), given.out, say_with_time)
    except PatchbayesError as error:
        parser.exit(2, f"regression_sets: {error}\n")


def say_with_time(text: str) -> None:
    print(time.strftime("%H:%M:%S"), text, flush=True)


if __name__ == "__main__":
    main()
