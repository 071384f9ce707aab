"""Section 1: "modern deep residual networks with hundreds of layers". PyramidNet with 110 layers, narrow, trains stably.

The data and optimizer are those of `cifar100` at small scale, alpha is 12; what is asked is whether the training loss falls
epoch by epoch with EMP and ECMP as it does without patches.
"""

from dataclasses import replace
from typing import Any

from patchbayes.runs import RunFolder

from .cifar100 import run_small, small_study
from .experiment import ComparedNumber, Experiment, Scale, TextTable, Workspace, as_text
from .image_tables import runs_of

_EPOCHS = {"smoke": 1, "small": 6, "paper": 40}
_METHODS = ("vanilla", "ecmp_bn_output", "emp_bn_output")


def run(scale: Scale, setting: Workspace) -> dict[str, Any]:
    """The training NLL of every epoch, and the seconds of training."""
    assert setting.work_dir is not None
    model = "pyramidnet110" if scale != "smoke" else "resnet8"
    study = small_study(model, _EPOCHS[scale])
    methods = _METHODS[:2] if scale == "smoke" else _METHODS
    training = {**study.training, "report_epochs": 1}
    name = f"hundred-layers-{scale}"
    study = replace(study, methods=methods, later=(), seeds=1, training=training, draws=20, curve=(1, 20))
    result = run_small(study, setting, name) | {"scale": scale}
    for label, kepts in result["methods"].items():
        rows = RunFolder.open(setting.work_dir / name / f"{label}-0").history()
        kepts[0]["epochs"] = [row["nll"] for row in rows]
    return result


def rows(result: dict[str, Any]) -> list[ComparedNumber]:
    """The paper names no number."""
    return []


def tables(result: dict[str, Any]) -> dict[str, TextTable]:
    lines = []
    for label, (kept,) in result["methods"].items():
        lines.append([label, ", ".join(as_text(value, 3) for value in kept["epochs"])])
    title = f"Mean training NLL, epoch by epoch: {result['note']}"
    return {title: (["method", "NLL of each epoch"], lines)}


EXPERIMENT = Experiment(
    name="hundred-layers",
    title="A network of more than a hundred layers",
    items=("section 1",),
    duration={"smoke": "20 s", "small": "20 min of one idle core", "paper": "two hours of one idle core"},
    run=run,
    rows=rows,
    tables=tables,
    runs=runs_of,
)
