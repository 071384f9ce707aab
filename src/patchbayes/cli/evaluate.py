"""patchbayes evaluate: scores of trained runs, written into their folders."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from .console import show, show_json, show_table, tell
from .options import MOST_DRAWS, TrustCode, need

if TYPE_CHECKING:
    from ..runs.record import EvaluationRecord, Metric

#: The scores that are printed; the record has all.
_COLUMNS = {
    "classification": ("accuracy", "nll", "ece"),
    "regression": ("rmse", "log_density", "crps", "coverage_95"),
}
_PERCENT = ("accuracy", "ece", "coverage_95")
#: A best temperature below this says that a network is under-fitted, and not by chance.
_UNSURE = 0.9
_MOST_COLUMNS = 100
_PATIENCE = 600  # seconds that processes wait for one another


def evaluate(
    runs: Annotated[list[Path], typer.Argument(help="Run folders.")],
    split: Annotated[str, typer.Option(help="Part of the data, such as test or test[5000:].")] = "test",
    draws: Annotated[int, typer.Option(min=1, max=MOST_DRAWS, help="Draws to average; fewer are faster.")] = 200,
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
    trust_code: TrustCode = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the records as JSON.")] = False,
) -> None:
    """Score trained runs on test data.

    A record, evaluation.json, is written into each folder: accuracy, likelihood, Brier score and calibration with bootstrap
    intervals; the floor that a perfectly calibrated network would score by chance; temperature scaling as a reference; scores
    against the number of draws; accuracy against coverage; diversity of the draws; inputs of another kind; corruption.
    Regression: RMSE, log density, CRPS, intervals. Inputs and draws are divided over several processes, where there are:
    torchrun --nproc-per-node 2 -m patchbayes evaluate ...

    \b
    patchbayes evaluate runs/vanilla runs/ecmp
    patchbayes evaluate runs/* --draws 20 --corruptions --ood fashion-mnist
    patchbayes evaluate runs/bayes --split "test[5000:]" --temperature-on "test[:5000]"
    """
    from ..ranks import is_first, process_group
    from ..runs import EvaluationOptions, RunFolder, write_evaluation
    from ..runs import evaluate as evaluate_runs

    of_corruptions: dict[str, Any] = {
        "corruption_examples": corruption_examples,
        "corruption_draws": corruption_draws,
        "severities": None if severities is None else _severities(severities),
    }
    asked = {name: value for name, value in of_corruptions.items() if value is not None}
    if asked and not (corruptions or corruption_folder):
        names = " and ".join(f"--{name.replace('_', '-')}" for name in asked)
        raise typer.BadParameter(f"{names}: give --corruptions or --corruption-folder too.")
    options = EvaluationOptions(
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
    if corruptions and corruption_folder is None:
        need("evaluate --corruptions", {"imagecorruptions": "corruptions"})
    folders = [RunFolder.open(path, trust_code=trust_code) for path in runs]
    with process_group(_PATIENCE):
        records = evaluate_runs(folders, options, tell, write_evaluation)
    if not is_first():
        return
    if as_json:
        show_json([record.to_json() for record in records])
        return
    for task in _COLUMNS:
        show_scores([record for record in records if record.task == task], task)
    show(f"\nnext: patchbayes report {shlex.join(map(str, runs))}")


def show_scores(records: "list[EvaluationRecord]", task: str) -> None:
    """The main scores with their 95 % intervals; the calibration error with its floor."""
    if not records:
        return
    names = [name for name in _COLUMNS[task] if name in records[0].metrics]
    heads = [_HEADS.get(name, name.replace("_", " ")) for name in names]
    scored = [[_score(r.metrics[name], name) for name in names] for r in records]
    if "ece" in names:
        heads.append("by chance")
        scored = [[*cells, _floor(r.metrics["ece"])] for r, cells in zip(records, scored, strict=True)]
    taken = sum(2 + max(len(line[i]) for line in (heads, *scored)) for i in range(len(heads)))
    name, method = _fitting([r.name for r in records], [r.method for r in records], _MOST_COLUMNS - taken)
    show_table(
        ["run", "method", *heads], [list(row) for row in zip(name, method, *zip(*scored, strict=True), strict=True)]
    )
    show("brackets: 95 % bootstrap interval. All scores: evaluation.json in the folder of the run")
    if task == "classification":
        show("by chance: the ECE that a perfectly calibrated network with the same confidences would get")
    else:
        show("in the units of the target; coverage: of 95 % intervals")
    for record in records:
        scaled, found = record.temperature, record.corruptions
        if scaled:
            scores = scaled.metrics
            show(
                f"{record.name} with temperature {_shown(scaled.temperature, '.3f')} (fitted on {scaled.fitted_on}): "
                f"NLL {_shown(scores['nll'].value, '.4f')}, ECE {_shown(scores['ece'].value, '.2f', 100)} %"
            )
            if scaled.temperature is not None and scaled.temperature < _UNSURE:
                do = (
                    "The temperature makes up for that."
                    if record.patch_report is None
                    else "Try more epochs, or less noise."
                )
                show(f"    below 1: it is less sure than it could be. {do}")
        if found:
            against = "" if found.mce is None else f", mCE {found.mce:.1f} against {found.reference}"
            show(f"{record.name} under corruption: error {_shown(found.mean('error'), '.1f', 100)} %{against}")
        for row in record.ood:
            show(
                f"{record.name} against {row.data} by {row.score}: AUROC {_shown(row.auroc, '.3f')}, "
                f"FPR95 {_shown(row.fpr95, '.3f')}"
            )


_HEADS = {"accuracy": "accuracy %", "nll": "NLL", "ece": "ECE %", "coverage_95": "coverage %"}


def _score(metric: "Metric", name: str) -> str:
    form, scale = (".1f", 100) if name in _PERCENT else (".3f" if name == "nll" else ".3g", 1)
    value, low, high = (_shown(number, form, scale) for number in (metric.value, metric.low, metric.high))
    return f"{value} [{low}, {high}]"


def _floor(metric: "Metric") -> str:
    return _shown(metric.floor, ".1f", 100)


def _fitting(names: list[str], methods: list[str], room: int) -> tuple[list[str], list[str]]:
    """Names and methods, shortened in the middle where a line would be longer than it may be."""

    def cut(texts: list[str], width: int) -> list[str]:
        keep = max(width - 2, 2)
        return [t if len(t) <= width else f"{t[: (keep + 1) // 2]}..{t[len(t) - keep // 2 :]}" for t in texts]

    widest = max(map(len, ["run", *names]))
    methods = cut(methods, max(room - 2 - widest, 12))
    return cut(names, max(room - 2 - max(map(len, ["method", *methods])), 8)), methods


def _shown(number: float | None, form: str, scale: float = 1) -> str:
    return "-" if number is None else format(scale * number, form)


def _severities(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip() in ("1", "2", "3", "4", "5") for part in parts):
        raise typer.BadParameter(f"--severities {text}: give numbers from 1 to 5, such as 1,3,5.")
    return tuple(int(part) for part in parts)
