"""patchbayes evaluate: scores of trained runs, written into their folders."""

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from .console import show, show_json, show_table, tell

_COLUMNS = {
    "classification": ("accuracy", "top5_accuracy", "nll", "brier", "ece", "mce", "aurc"),
    "regression": ("rmse", "log_density", "crps", "coverage_95", "interval_width_95"),
}


def evaluate(
    runs: Annotated[list[Path], typer.Argument(help="Run folders.")],
    split: Annotated[str, typer.Option(help="Part of the data, such as test or test[5000:].")] = "test",
    draws: Annotated[int, typer.Option(help="Draws to average; fewer are faster.")] = 200,
    temperature_on: Annotated[
        str | None, typer.Option(help="Part of the data to fit a temperature on; by default the held-out part.")
    ] = None,
    ood: Annotated[
        list[str] | None,
        typer.Option(help="Data set of another kind, such as fashion-mnist; may be given several times."),
    ] = None,
    corruptions: Annotated[
        bool, typer.Option("--corruptions", help="Evaluate under the fifteen corruptions of ImageNet-C.")
    ] = False,
    corruption_folder: Annotated[
        Path | None, typer.Option(help="Corrupted images in the layout of CIFAR-C or ImageNet-C.")
    ] = None,
    corruption_examples: Annotated[
        int | None, typer.Option(help="Examples of each corruption and severity; 1000 if not given.")
    ] = None,
    corruption_draws: Annotated[int | None, typer.Option(help="Draws under corruption; 20 if not given.")] = None,
    severities: Annotated[
        str | None, typer.Option(help="Severities of the corruptions; 1,2,3,4,5 if not given.")
    ] = None,
    checkpoint: Annotated[Literal["best", "last"], typer.Option(help="Which checkpoint of a training.")] = "best",
    data_dir: Annotated[Path | None, typer.Option(help="Where data sets lie; else $PATCHBAYES_DATA.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the records as JSON.")] = False,
) -> None:
    """Score trained runs on test data.

    A record, evaluation.json, is written into each folder: accuracy, likelihood, Brier score and calibration with bootstrap
    intervals; the floor that a perfectly calibrated network would score by chance; temperature scaling as a reference; scores
    against the number of draws; accuracy against coverage; diversity of the draws; inputs of another kind; corruption.
    Regression: RMSE, log density, CRPS, intervals.

    \b
    patchbayes evaluate runs/vanilla runs/ecmp
    patchbayes evaluate runs/* --draws 20 --corruptions --ood fashion-mnist
    patchbayes evaluate runs/bayes --split "test[5000:]" --temperature-on "test[:5000]"
    """
    from ..evaluation import Evaluating, write_evaluation
    from ..evaluation import evaluate as evaluate_runs
    from ..training import RunFolder

    of_corruptions: dict[str, Any] = {
        "corruption_examples": corruption_examples,
        "corruption_draws": corruption_draws,
        "severities": None if severities is None else _severities(severities),
    }
    asked = {name: value for name, value in of_corruptions.items() if value is not None}
    if asked and not (corruptions or corruption_folder):
        names = " and ".join(f"--{name.replace('_', '-')}" for name in asked)
        raise typer.BadParameter(f"{names}: give --corruptions or --corruption-folder too.")
    options = Evaluating(
        split=split,
        draws=draws,
        temperature_on=temperature_on,
        ood=tuple(ood or ()),
        corruptions=corruption_folder or corruptions,
        which=checkpoint,
        data_dir=data_dir,
        command=shlex.join(["patchbayes", *sys.argv[1:]]),
        **asked,
    )
    folders = [RunFolder.open(path) for path in runs]
    records = evaluate_runs(folders, options, tell, write_evaluation)
    if as_json:
        show_json(records)
        return
    for task in _COLUMNS:
        show_scores([record for record in records if record["task"] == task], task)
    show(f"\nnext: patchbayes report {shlex.join(map(str, runs))}")


def show_scores(records: list[dict[str, Any]], task: str) -> None:
    """The main scores with their 95 % intervals; the calibration error with its floor."""
    if not records:
        return
    names = [name for name in _COLUMNS[task] if name in records[0]["metrics"]]
    rows = [[r["name"], r["method"], *(_score(r["metrics"][name], name) for name in names)] for r in records]
    show_table(["run", "method", *(name.replace("_", " ") for name in names)], rows)
    if task == "classification":
        show(
            "accuracies and calibration errors in %; brackets: 95 % bootstrap interval; floor: what a perfectly calibrated"
        )
        show("network with the same confidences would score by chance")
    else:
        show("in the units of the target, coverage of 95 % intervals in %; brackets: 95 % bootstrap interval")
    for record in records:
        scaled, found = record.get("temperature"), record.get("corruptions")
        if scaled:
            scores = scaled["metrics"]
            show(
                f"{record['name']} with temperature {scaled['temperature']:.3f} (fitted on {scaled['fitted_on']}): "
                f"NLL {scores['nll']['value']:.4f}, ECE {100 * scores['ece']['value']:.2f} %"
            )
        if found:
            mean = sum(map(sum, found["error"])) / sum(map(len, found["error"]))
            against = f", mCE {found['mce']:.1f} against {found['reference']}" if found["mce"] is not None else ""
            show(f"{record['name']} under corruption: error {100 * mean:.1f} %{against}")
        for row in record.get("ood") or []:
            show(
                f"{record['name']} against {row['data']} by {row['score']}: AUROC {row['auroc']:.3f}, FPR95 {row['fpr95']:.3f}"
            )


def _score(entry: dict[str, float], name: str) -> str:
    scale = 100 if name in ("accuracy", "top5_accuracy", "ece", "mce", "coverage_95") else 1
    value, low, high = (scale * entry[key] for key in ("value", "low", "high"))
    floor = f", floor {scale * entry['floor']:.3g}" if "floor" in entry else ""
    return f"{value:.4g} [{low:.4g}, {high:.4g}{floor}]"


def _severities(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip() in ("1", "2", "3", "4", "5") for part in parts):
        raise typer.BadParameter(f"--severities {text}: give numbers from 1 to 5, such as 1,3,5.")
    return tuple(int(part) for part in parts)
