"""Tables 4, 5, 7 and 8, figures 4 and 7: ImageNet with ResNet-18, and ImageNet-C.

Paper scale reads `images:imagenet` (train and val by class folder) and `imagenet-c` below the data directory: 100 epochs,
batch 256, Adam at its defaults, the simplified loss, S = 200 (100 under corruption). Where there is no `imagenet-c`, the
corruptions are made from the validation images. Small scale is the same on `images:imagenet-small`, any tree of that layout,
with 10 epochs at 64 pixels; smoke trains on a tree of pieces of two photographs, which it makes itself.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from patchbayes.data import read
from patchbayes.data.extras import optional

from .experiment import ComparedNumber, Experiment, Scale, TextTable, Workspace, as_text, paper_table
from .image_study import METHODS, Study, run_study, scores_of
from .image_tables import calibration_figure, comparison_rows, score_table
from .seed_statistics import mean_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TRAINING = {"batch_size": 256, "objective": "simplified", "schedule": "constant", "held_out": 0.0}
_INDEPENDENT = {
    label: {"method": f"{label.partition('_')[0]}(5, init='independent')"} for label in METHODS if "_bn" in label
}
_STUDIES: Mapping[Scale, Study] = {
    "smoke": Study(
        "images:smoke", "small_cnn", ("emp_bn_output", "vanilla"), 1,
        {"epochs": 1, "batch_size": 32, "objective": "simplified", "size": 32, "threads": 1, "held_out": 0.0},
        draws=5, curve=(1, 5), corruptions=True, corruption_examples=10, corruption_draws=2,
    ),
    "small": Study(
        "images:imagenet-small", "resnet18", tuple(METHODS), 1, {**_TRAINING, "epochs": 10, "size": 64},
        draws=20, curve=(1, 20), corruptions=True, corruption_examples=30, corruption_draws=10,
        note="another set of images, 64 pixels, 10 epochs, 30 images of each corruption",
    ),
    "paper": Study(
        "images:imagenet", "resnet18", tuple(METHODS), 1, {**_TRAINING, "epochs": 100, "size": 224},
        corruptions=True, corruption_examples=50_000, each=_INDEPENDENT,
    ),
}  # fmt: skip


def run(scale: Scale, setting: Workspace) -> dict[str, Any]:
    study = _STUDIES[scale]
    if scale == "smoke":
        assert setting.work_dir is not None
        tree = _make_tree(setting.work_dir / "imagenet-smoke-images")
        study = replace(study, data=f"images:{tree}")
    corrupted = (setting.data_dir or Path()) / "imagenet-c"
    if scale == "paper" and corrupted.is_dir():
        study = replace(study, corruptions=corrupted)
    return run_study(study, setting, f"imagenet-{scale}") | {"scale": scale}


def _make_tree(folder: Path) -> Path:
    """A tree of image files, train/CLASS and val/CLASS, of the pieces of two photographs."""
    pillow = optional("PIL.Image", "data", "writing images")
    dataset = read("photos", held_out=0)
    for part, split in (("train", dataset.train), ("val", dataset.test)):
        raw, targets = split.fetch(torch.arange(40))
        for number, (pixels, target) in enumerate(zip(raw, targets, strict=True)):
            file = folder / part / dataset.classes[int(target)] / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            pillow.fromarray(pixels.permute(1, 2, 0).numpy()).save(file)
    return folder.resolve()


def rows(result: dict[str, Any]) -> list[ComparedNumber]:
    """Table 4, and the means of tables 5, 7 and 8."""
    same = result["scale"] == "paper"
    made = comparison_rows(result, paper_table("imagenet_resnet18"), same)
    why = "" if same else "another scale"
    for table, column, key in (("imagenet_c_mce", "mce", "mce"), ("imagenet_c_rmce", "rmce", "relative_mce")):
        for line in paper_table(table):
            records = scores_of(result).get(line["method"])
            if records:
                ours = mean_of([getattr(one.corruptions, key) for one in records if one.corruptions is not None])
                made.append(
                    ComparedNumber(f"{line['method']}, {column}", float(line[column]), ours, 1.0 if same else None, why)
                )
    return made


def tables(result: dict[str, Any]) -> dict[str, TextTable]:
    found = {f"{result['model']} on {result['data']}": score_table(result)}
    by_method = scores_of(result)
    first = next(iter(by_method.values()))[0].corruptions
    if first is not None:
        lines = []
        for label, records in by_method.items():
            scores = [one.corruptions for one in records if one.corruptions is not None]
            errors = [mean_of([s.mean("error", name) for s in scores], 100) for name in first.names]
            lines.append([label, as_text(mean_of([s.mce for s in scores]), 3), *(as_text(e, 3) for e in errors)])
        names = [name.replace("_", " ") for name in first.names]
        found["Error in % under each corruption, mean over severities; mCE against vanilla"] = (
            ["method", "mCE", *names],
            lines,
        )
    return found


def figures(result: dict[str, Any]) -> "dict[str, Figure]":
    return {"imagenet_calibration": calibration_figure(result)}


EXPERIMENT = Experiment(
    name="imagenet",
    title="ImageNet and ImageNet-C",
    items=("table 4", "table 5", "tables 7-8", "figure 4", "figure 7"),
    duration={"smoke": "1 min", "small": "hours, depending on the images", "paper": "GPU-weeks"},
    run=run,
    rows=rows,
    tables=tables,
    figures=figures,
)
