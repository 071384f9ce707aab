"""PBP's published test errors beside ours: the check that the baseline of table 1 is the method that was published."""

import json
import math
import os
from pathlib import Path
from typing import Any

import torch

from patchbayes.errors import PatchbayesError
from patchbayes.files import write_atomically

from .experiment import ComparedNumber, Experiment, Scale, TextTable, Workspace
from .pbp import EPOCHS, rmse_on_test
from .regression_splits import SETS, read_splits

#: Test RMSE as published, with its standard error over the splits (Hernandez-Lobato and Adams, 2015, table 1).
PUBLISHED = {
    "yacht": (1.02, 0.05),
    "boston": (3.01, 0.18),
    "energy": (1.80, 0.05),
    "concrete": (5.67, 0.09),
    "winered": (0.64, 0.01),
    "power": (4.12, 0.03),
    "protein": (4.73, 0.01),
}
#: sets, epochs and the most splits of a scale
_PLANS: dict[Scale, tuple[tuple[str, ...], int, int]] = {
    "smoke": (("yacht",), 1, 2),
    "small": (("yacht", "boston", "energy", "concrete", "winered", "power"), EPOCHS, 20),
    "paper": (tuple(PUBLISHED), EPOCHS, 20),
}


def run(scale: Scale, setting: Workspace) -> dict[str, Any]:
    """The error of every split; sets with a result in setting.work_dir/pbp are taken from there."""
    data_dir = setting.data_dir or os.environ.get("PATCHBAYES_DATA")
    if data_dir is None or setting.work_dir is None:
        raise PatchbayesError(
            "pbp: needs a data folder that holds uci/ (--data-dir or $PATCHBAYES_DATA) and a work folder."
        )
    names, epochs, most = _PLANS[scale]
    folder = setting.work_dir / "pbp"
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for name in names:
        splits = min(most, SETS[name].splits)
        path = folder / f"{name}-{epochs}-{splits}.json"
        if not path.exists():
            setting.say(f"{name}: {splits} splits, {epochs} epochs")
            stacks = read_splits(name, Path(data_dir), range(splits))
            errors = torch.cat([rmse_on_test(stack, SETS[name].hidden, epochs) for stack in stacks])
            write_atomically(path, json.dumps(errors.tolist()).encode())
        found[name] = {"rmse": json.loads(path.read_text()), "hidden": SETS[name].hidden}
    return {"epochs": epochs, "sets": found}


def rows(result: dict[str, Any]) -> list[ComparedNumber]:
    """Within two standard errors of the difference, or not."""
    made = []
    for name, (published, published_error) in PUBLISHED.items():
        what, found = f"test RMSE of {name}, PBP", result["sets"].get(name)
        if found is None:
            made.append(ComparedNumber(what, published, None, why="not run"))
            continue
        mean, error = _mean_and_error(found["rmse"])
        tolerance = 2 * math.hypot(error, published_error) if result["epochs"] == EPOCHS else None
        made.append(ComparedNumber(what, published, mean, tolerance, "" if tolerance else f"{result['epochs']} epochs"))
    return made


def tables(result: dict[str, Any]) -> dict[str, TextTable]:
    cells = []
    for name, found in result["sets"].items():
        mean, error = _mean_and_error(found["rmse"])
        published, published_error = PUBLISHED[name]
        far = abs(mean - published) / math.hypot(error, published_error)
        cells.append(
            [
                name,
                f"{mean:.3f} ± {error:.3f}",
                f"{published:.2f} ± {published_error:.2f}",
                f"{far:.1f}",
                f"{len(found['rmse'])} splits, {found['hidden']} hidden units",
            ]
        )
    return {
        f"PBP, test RMSE after {result['epochs']} epochs, mean and standard error over splits": (
            ["", "ours", "published", "standard errors of the difference", ""],
            cells,
        )
    }


def _mean_and_error(errors: list[float]) -> tuple[float, float]:
    values = torch.tensor(errors, dtype=torch.float64)
    return float(values.mean()), float(values.std()) / math.sqrt(len(errors))


EXPERIMENT = Experiment(
    name="pbp",
    title="Probabilistic backpropagation against its own paper",
    items=("table 1",),
    duration={"smoke": "1 s", "small": "15 min", "paper": "40 min"},
    run=run,
    rows=rows,
    tables=tables,
)
