"""Table 6, figure 5, tables 9-11 and figure 6: CIFAR-100, all methods, and how they depend on the number of draws.

Paper scale is PyramidNet (depth 110, alpha 270), 400 epochs, batch 256, Adam at its defaults, the simplified loss with
lambda = 0.001 / 256, K = 5 independent components, S = 200 independent draws. Small scale is PyramidNet (depth 20, alpha 24)
on twenty classes at 16 pixels, trained until it knows its training data by heart (`small_cifar`), with the same loss and
optimizer; every run is scored as it is and once more after `calibrate_` on the held-out part. Smoke takes scikit-learn's
digits.

Deviation at small scale: the learning rate falls to zero by a cosine, so that all networks come to rest; batches of 64.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from patchbayes.runs.record import RunScores

from .experiment import ComparedNumber, Experiment, Scale, TextTable, Workspace, paper_table
from .image_study import DrawsStudy, Study, run_study, scores_of
from .image_tables import (
    CURVE_SCORES,
    CURVE_TITLES,
    calibrated_table,
    calibration_figure,
    comparison_rows,
    runs_of,
    scheme_table,
    score_table,
    with_error,
)
from .seed_statistics import mean_of
from .small_cifar import HELD_OUT, write_twenty_classes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_METHODS = ("emp_bn_output", "ecmp_bn_output", "dropout", "vanilla")
_INDEPENDENT = {
    "emp_bn_output": {"method": "emp(5, init='independent')"},
    "ecmp_bn_output": {"method": "ecmp(5, init='independent')"},
}
#: Small scale: batches of 64, and a learning rate that falls to zero, so that every network comes to rest.
_SMALL_TRAINING = {
    "batch_size": 64, "objective": "simplified", "schedule": "cosine", "augmentation": "none", "held_out": HELD_OUT,
    "report_epochs": 1000, "threads": 1,
}  # fmt: skip


def small_study(model: str, epochs: int) -> Study:
    """The methods on twenty classes, trained until the network without patches knows its training data by heart."""
    return Study(
        "npz", f"patchbayes_reproduce.small_cifar:{model}", ("vanilla", "ecmp_bn_output", "emp_bn_output", "dropout"), 3,
        {**_SMALL_TRAINING, "epochs": epochs}, each=_INDEPENDENT, calibrate=True, rates=(0.02, 0.1),
        later=("mixed", "dropout_tuned", "ecmp_random"),
        note=f"{model} on 20 classes of CIFAR-100, 5,000 training images at 16 pixels, {epochs} epochs",
    )  # fmt: skip


_STUDIES: Mapping[Scale, Study] = {
    "smoke": Study(
        "digits", "small_cnn", _METHODS, 2, {"epochs": 2, "batch_size": 64, "objective": "simplified", "threads": 1},
        draws=20, curve=(1, 5, 20), draws_study=DrawsStudy(50, (1, 5, 20), "test[:50]"),
    ),
    "paper": Study(
        "cifar100", "pyramidnet110", _METHODS, 1,
        {"epochs": 400, "batch_size": 256, "objective": "simplified", "schedule": "constant", "held_out": 0.0},
        draws_study=DrawsStudy(1000, (1, 5, 20, 100, 200, 500), "test"),
        each=_INDEPENDENT,
    ),
    "small": small_study("pyramidnet20", 40),
}  # fmt: skip


def run(scale: Scale, setting: Workspace) -> dict[str, Any]:
    return run_small(_STUDIES[scale], setting, f"cifar100-{scale}") | {"scale": scale}


def run_small(study: Study, setting: Workspace, name: str) -> dict[str, Any]:
    """The study; where its data is the part of CIFAR-100, that is made first."""
    if study.data == "npz":
        assert setting.work_dir is not None
        file = write_twenty_classes(setting.work_dir / "cifar100-twenty-classes.npz", setting.data_dir)
        study = replace(study, data=f"npz:{file.resolve()}")
    return run_study(study, setting, name)


def rows(result: dict[str, Any]) -> list[ComparedNumber]:
    """Table 6 number by number, and tables 9-11 at the numbers of draws that both have."""
    same = result["scale"] == "paper"
    made = comparison_rows(result, paper_table("cifar100_pyramidnet"), same)
    why = "" if same else f"another scale: {result['note'] or result['data']}"
    found = scores_of(result)
    for line in paper_table("mc_draws"):
        label = line["method"] if line["method"] in found else f"{line['method']}_bn_output"
        for column, name in _CURVE_COLUMNS.items():
            ours = _at_draws(found.get(label, []), line["draws"], name)
            if ours is not None:
                what = f"{label}, S = {line['draws']}, {column.removeprefix('cifar100_')} %"
                made.append(ComparedNumber(what, float(line[column]), ours, 1.0 if same else None, why))
    return made


_CURVE_COLUMNS = {
    "cifar100_top5": "top5_accuracy",
    "cifar100_top1": "accuracy",
    "cifar100_ece": "ece",
    "cifar100_mce": "mce",
}


def _at_draws(records: list[RunScores], draws: str, name: str) -> float | None:
    curves = [record.draws_curve for record in records if record.draws_curve is not None]
    found = [curve.at(int(draws), name) for curve in curves] if draws else []
    return mean_of([100 * value for value in found if value is not None])


def tables(result: dict[str, Any]) -> dict[str, TextTable]:
    subject = result["note"] or f"{result['model']} on {result['data']}"
    seeds = f"{subject}, {result['num_examples']:,} test images, up to {result['seeds']} seeds"
    made = {
        f"{result['draws']} independent draws: {seeds}; mean and 95 % interval": score_table(result),
        "Independent draws in testing: mean over seeds, ± the Monte-Carlo standard error": _over_seeds(result),
    }
    if all("calibrated" in kept for kepts in result["methods"].values() for kept in kepts):
        made["The same networks, each calibrated by `calibrate_` on the same held-out images"] = calibrated_table(
            result
        )
    made |= scheme_table(result)
    return made


def _over_seeds(result: Mapping[str, Any]) -> TextTable:
    lines = []
    for label, records in scores_of(result).items():
        curves = [record.draws_curve for record in records if record.draws_curve is not None]
        for place, draws in enumerate(curves[0].draws if curves else []):
            cells = []
            for name, scale in CURVE_SCORES:
                value = mean_of([curve.at(draws, name) for curve in curves], scale)
                error = mean_of([curve.scores[name].standard_error[place] for curve in curves])
                cells.append(with_error(value, error, scale))
            lines.append([label, str(draws), *cells])
    return ["method", "S", *CURVE_TITLES], lines


def figures(result: dict[str, Any]) -> "dict[str, Figure]":
    """Figure 5, the calibration curves; figure 6, accuracy and ECE against the number of draws."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3), layout="constrained")
    for axes, (name, label) in zip(figure.subplots(1, 2), (("accuracy", "top-1 %"), ("ece", "ECE %")), strict=True):
        for method, records in scores_of(result).items():
            curves = [record.draws_curve for record in records if record.draws_curve is not None]
            if not curves:
                continue
            values = [mean_of([curve.at(draws, name) for curve in curves], 100) for draws in curves[0].draws]
            axes.plot(curves[0].draws, values, marker="o", markersize=3, label=method)
        axes.set(xscale="log", xlabel="draws S", ylabel=label)
        axes.legend(fontsize="small")
    return {"cifar100_calibration": calibration_figure(result), "cifar100_draws": figure}


EXPERIMENT = Experiment(
    name="cifar100",
    title="CIFAR-100 and the number of draws",
    items=("table 6", "figure 5", "tables 9-11", "figure 6"),
    duration={"smoke": "20 s", "small": "two hours of one idle core", "paper": "GPU-days"},
    run=run,
    rows=rows,
    tables=tables,
    figures=figures,
    runs=runs_of,
    grows=True,
)
