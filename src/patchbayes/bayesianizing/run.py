"""A run folder from an ordinary checkpoint, bayesianized; and the calibration of a folder that was trained."""

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from ..data import Dataset, Split, read
from ..errors import PatchbayesError
from ..files import making_folder, probe_writing, write_atomically
from ..nets.named import build_net
from ..patching.checkpoint import save
from ..patching.patch import is_patched
from ..provenance import provenance
from ..runs.config import TrainingConfig
from ..runs.data_record import data_record, training_data
from ..runs.folder import RunFolder
from ..runs.network import method_label
from ..runs.ordinary_checkpoint import load_ordinary_, sha256_of
from ..runs.writing import writing
from ..views import matching, named
from .calibrate import calibrate_
from .recipe import bayesianize_
from .report import BayesianizeReport, CalibrationReport


def bayesianize_checkpoint(
    checkpoint: Path,
    folder: Path,
    *,
    data: str,
    model: str,
    held_out: str,
    data_dir: Path | None = None,
    batch_size: int = 128,
    seed: int = 0,
    command: str | None = None,
    resume: bool = False,
    views: str | None = None,
    page: Callable[[BayesianizeReport], str] | None = None,
    **options: Any,
) -> tuple[RunFolder, BayesianizeReport]:
    """Bayesianize the network of a checkpoint file, and write config.json and patch.safetensors into a new folder.

    data, model   as `data.read` and `nets.named.build_net` take them; a function that they name is run.
    held_out      a part of the data that the checkpoint was not trained on, such as "test[:5000]".
    resume        go on with what the same call tried before it was killed: it lies beside the folder, in a file that goes when
                  all is done.
    views         the name of ready views (`views.named`), which the run is then evaluated and asked with.
    page          makes the text of bayesianize.html.
    options       as in `bayesianize_`. Whether the folder can be written is tried at the start; it is there when all is
                  done, and whole.
    """
    seen = None if views is None else named(views)
    if batch_size < 1:
        raise PatchbayesError(f"bayesianize: batch_size={batch_size}; expected at least 1.")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        done = resume and (folder / "config.json").exists()
        raise PatchbayesError(
            f"bayesianize: {folder} is done: there is nothing to resume.\n  do       patchbayes evaluate {folder}"
            if done
            else f"bayesianize: {folder} already exists and is not an empty folder; name a new one."
        )
    probe_writing(folder / "config.json")
    tried = folder.absolute().with_name(f"{folder.absolute().name}.tried.json")
    if not resume:
        tried.unlink(missing_ok=True)
    if not checkpoint.is_file():
        raise PatchbayesError(f"there is no file {checkpoint}.")
    reading: dict[str, Any] = {"held_out": 0.0}
    dataset = read(data, data_dir, **reading, trust_code=True)
    if dataset.task != "classification":
        raise PatchbayesError(f"bayesianize: expected data with classes; {data} is a regression.")
    if held_out.strip().startswith(("train", "held_out")):
        raise PatchbayesError(
            f"bayesianize: held_out={held_out!r} is part of what the network was trained on, which it fits too well to choose "
            'anything by; give a part of the test data, such as "test[:5000]".'
        )
    kept = dataset.part(held_out)
    network = build_net(model, dataset.num_outputs, dataset.input_shape, trust_code=True)
    load_ordinary_(network, checkpoint)
    report = bayesianize_(
        network, PartBatches(dataset, kept, batch_size), seed=seed, keep_tries=tried, views=seen, **options
    )
    load = f'patchbayes.load_(network, "{folder / "patch.safetensors"}")'
    report = dataclasses.replace(report, call=f"{load}  # network: {model} with the weights of {checkpoint}")
    description = {
        "kind": "bayesianize",
        "model": model,
        "data": data_record(dataset, None if data_dir is None else str(data_dir), **reading),
        "base": {"path": str(checkpoint.resolve()), "sha256": sha256_of(checkpoint)},
        "sites": options.get("sites", "auto"),
        "method": method_label(network),
        "seed": seed,
        "held_out": held_out,
        "command": command,
        "report": str(report),
        "spread": report.calibration.spread,
        "temperature": report.calibration.temperature,
        "views": None if seen is None else seen.name,
        "seconds": report.calibration.seconds,
        **provenance(),
    }
    with writing(folder), making_folder(folder) as temporary:
        run = RunFolder.create(temporary, description)
        save(network, temporary / "patch.safetensors")
        run.append(_row(report))
        if page is not None:
            (temporary / "bayesianize.html").write_text(page(report), encoding="utf-8")
    tried.unlink(missing_ok=True)
    return RunFolder.open(folder, trust_code=True), report


def check_calibrating(config: TrainingConfig) -> None:
    """Refuse a training whose network `calibrate_run` would refuse: before it begins."""
    _check_calibrated(training_data(config, trust_code=True), config.method, bool(config.rules()))


def _check_calibrated(dataset: Dataset, method: str, patched: bool) -> None:
    if dataset.task != "classification" or not patched or dataset.held_out is None:
        raise PatchbayesError(
            f"train --calibrate: expected a patched network of classes and a held-out part, got a {dataset.task} with "
            f"{method}, held-out examples: {len(dataset.held_out or ())}.\n"
            "  do       leave --calibrate out; `evaluate` fits a temperature to any network of classes."
        )


def calibrate_run(run: RunFolder, *, draws: int = 20, with_views: bool = False) -> CalibrationReport | None:
    """Fit spread and temperatures of a trained run's best network to its held-out part (`calibrate_`), in its file.

    with_views   each draw sees a view that the augmentation of the training has made the network know (`views.matching`), here
                 and whenever the run evaluates or predicts.

    calibration.json says what was done, and to which file: what is calibrated already is left alone, and None returned.
    """
    best, mark = run.path / "best.safetensors", run.path / "calibration.json"
    dataset, network = run.dataset(), run.model()
    views = matching(dataset.preparation.augmentation) if with_views else None
    if run.is_calibrated:
        known = run.views()
        if (known and known.name) != (views and views.name):
            raise PatchbayesError(
                f"train --calibrate: {run.path} is calibrated already, with {known.name if known else 'no'} views.\n"
                "  do       train again in another folder."
            )
        return None
    _check_calibrated(dataset, method_label(network), is_patched(network))
    assert dataset.held_out is not None
    report = calibrate_(
        network,
        PartBatches(dataset, dataset.held_out, 128),
        draws=draws,
        likelihood=run.likelihood(),
        seed=run.training.seed,
        views=views,
    )
    with writing(best):
        save(network, best, whole=True)
        content = {"sha256": sha256_of(best), "draws": draws, "views": views.name if views is not None else None}
        content |= {"chosen": report.chosen, "report": str(report)}
        write_atomically(mark, (json.dumps(content, indent=1) + "\n").encode())
    return report


def _row(report: BayesianizeReport) -> dict[str, Any]:
    found = report.calibration
    row = {f"held_out_{name}": getattr(found.after, name) for name in ("nll", "ece", "accuracy")}
    return {"epoch": 1, "loss": found.after.nll, "train_seconds": sum(found.seconds.values()), **row}


class PartBatches:
    """A part of the data in batches, the same in every pass."""

    def __init__(self, dataset: Dataset, split: Split, batch_size: int) -> None:
        self.dataset, self.split, self.batch_size = dataset, split, batch_size

    def __len__(self) -> int:
        return -(-len(self.split) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.dataset.batches(self.split, self.batch_size)
