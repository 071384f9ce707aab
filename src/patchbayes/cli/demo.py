"""patchbayes demo: four ways to train one small network on scikit-learn's digits, and how far to trust each."""

import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import typer

from .console import show, show_json, show_table, tell

_METHODS: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "dropout": {"rate": 0.1},
    "emp": {},
    "ecmp": {},
}
_COLUMNS: dict[str, Callable[[dict[str, Any]], float]] = {
    "accuracy %": lambda r: 100 * r["metrics"]["accuracy"]["value"],
    "NLL": lambda r: r["metrics"]["nll"]["value"],
    "ECE %": lambda r: 100 * r["metrics"]["ece"]["value"],
    "MCE %": lambda r: 100 * r["metrics"]["mce"]["value"],
    "Brier": lambda r: r["metrics"]["brier"]["value"],
    "corrupted error %": lambda r: 100 * _mean_of(r["corruptions"]["error"]),
    "corrupted NLL": lambda r: _mean_of(r["corruptions"]["nll"]),
    "photo AUROC": lambda r: next(row["auroc"] for row in r["ood"] if row["score"] == "entropy"),
    "training s": lambda r: r["training_seconds"],
}


def demo(
    folder: Annotated[Path, typer.Argument(help="Where the runs and the report go.")] = Path("patchbayes-demo"),
    seeds: Annotated[int, typer.Option(min=1, help="Networks trained for each method.")] = 5,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the 809 training images.")] = 30,
    corruption_examples: Annotated[int, typer.Option(min=1, help="Test images of each corruption and severity.")] = 60,
    as_json: Annotated[bool, typer.Option("--json", help="Print the evaluations as JSON.")] = False,
) -> None:
    """The whole path in two minutes, offline: train, evaluate, compare, report.

    A small convolutional network is trained on scikit-learn's digits without patching, with dropout, with EMP and with ECMP,
    several seeds each, and evaluated on unseen digits, under image corruption and on pieces of photographs. A method that
    is not better there is shown as it is. A started demo goes on where it was.

    \b
    patchbayes demo
    patchbayes demo /tmp/demo --seeds 3
    """
    import torch

    from ..evaluation import Evaluating, evaluate, write_evaluation
    from ..report import write_report
    from ..training import RunFolder

    torch.set_num_threads(1)  # the networks are small
    began = time.perf_counter()
    folders = {(name, seed): folder / f"{name}-{seed}" for name in _METHODS for seed in range(seeds)}
    _train_all(folders, epochs)
    tell("evaluating ...")
    runs = [RunFolder.open(path) for path in folders.values()]
    options = Evaluating(
        draws=50,
        curve=(1, 5, 20, 50),
        ood=("photos",),
        corruptions=True,
        corruption_examples=corruption_examples,
        severities=(1, 3, 5),
        replicates=300,
        command=shlex.join(["patchbayes", *sys.argv[1:]]),
    )
    records = evaluate(runs, options, tell, write_evaluation)
    report = write_report(records, [run.history() for run in runs], folder / "report.html", title="Digits, four ways")
    if as_json:
        show_json(records)
        return
    by_method = {name: [r for (n, _), r in zip(folders, records, strict=True) if n == name] for name in _METHODS}
    _show(by_method, seeds, records[0]["num_examples"])
    show(f"\nreport: {report[0].resolve()}")
    show(f"took {time.perf_counter() - began:.0f} s; the runs are in {folder}/")


def _train_all(folders: dict[tuple[str, int], Path], epochs: int) -> None:
    """Train what is not trained yet, two networks at a time, each with one thread."""
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        waiting = {
            key: pool.submit(_train_one, path, key[0], key[1], epochs, _METHODS[key[0]])
            for key, path in folders.items()
        }
        for done, ((name, seed), future) in enumerate(waiting.items(), start=1):
            future.result()
            tell(f"trained {name}, seed {seed} ({done} of {len(waiting)})")


def _train_one(path: Path, method: str, seed: int, epochs: int, settings: dict[str, Any]) -> None:
    from ..training import TrainingConfig, train

    config = TrainingConfig(
        data="digits",
        model="small_cnn",
        method=method,  # type: ignore[arg-type]
        epochs=epochs,
        batch_size=64,
        lr=0.003,
        objective="simplified",
        seed=seed,
        threads=1,
        report_epochs=min(5, epochs),
        **settings,
    )
    train(config, path, resume=path.exists(), quiet=True)


def _show(by_method: dict[str, list[dict[str, Any]]], seeds: int, examples: int) -> None:
    show(f"digits, {examples} test images, 50 draws; mean and 95 % interval (t) over {seeds} seeds")
    rows = []
    for records in by_method.values():
        cells = [_interval([column(r) for r in records]) for column in _COLUMNS.values()]
        rows.append([records[0]["method"], *cells, f"{records[0]['parameters']['patched']:,}"])
    show_table(["method", *_COLUMNS, "parameters"], rows)
    show("")
    for name, records in by_method.items():
        if name != "vanilla":
            show(f"{records[0]['method']} against vanilla, seed by seed: " + _verdicts(records, by_method["vanilla"]))


def _verdicts(records: list[dict[str, Any]], plain: list[dict[str, Any]]) -> str:
    """For the likelihoods, whether the paired difference is beyond its 95 % interval."""
    said = []
    for column in ("NLL", "corrupted NLL"):
        value = _COLUMNS[column]
        differences = [value(a) - value(b) for a, b in zip(records, plain, strict=True)]
        mean, reach = statistics.fmean(differences), _reach(differences)
        word = "not told apart" if abs(mean) <= reach else "better" if mean < 0 else "worse"
        said.append(f"{column} {mean:+.3f} ({word})")
    return ", ".join(said)


def _interval(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.3g}" + (f" ± {_reach(values):.2g}" if len(values) > 1 else "")


def _reach(values: Sequence[float]) -> float:
    """Half the width of the 95 % interval of the mean."""
    from ..metrics.student import student_t

    if len(values) < 2:
        return float("inf")
    return student_t(len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5


def _mean_of(lines: Sequence[Sequence[float]]) -> float:
    return statistics.fmean(value for line in lines for value in line)
