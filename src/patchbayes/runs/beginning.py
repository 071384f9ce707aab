"""How a run begins in its folder, or goes on there: with the settings and the data that it was started with."""

from pathlib import Path

from ..data import Dataset
from ..errors import PatchbayesError
from ..files import remove_leftovers
from ..provenance import provenance
from .config import TrainingConfig
from .data_record import data_changes, data_record
from .folder import RunFolder


def begin(folder: Path, config: TrainingConfig, dataset: Dataset, resume: bool) -> None:
    """Write config.json, or compare with the one that is there."""
    remove_leftovers(folder)
    record = data_record(dataset, config.data_dir, **config.reading)
    if not (resume and (folder / "config.json").exists()):
        description = {"kind": "train", "model": config.model, "training": config.to_json(), "data": record}
        RunFolder.create(folder, {**description, **provenance()})
        return
    run = RunFolder.open(folder)
    if run.kind != "train":
        raise PatchbayesError(f'{folder} holds a run of the kind "{run.kind}", which cannot be resumed by training.')
    differing = [f"{key} was {then!r}, is {now!r}" for key, (then, now) in run.training.differences(config).items()]
    differing += [] if differing else data_changes(run.config["data"], record)
    if differing:
        raise PatchbayesError(
            f"{folder} cannot be resumed: it was started with different settings.\n  - "
            + "\n  - ".join(differing)
            + "\n"
            "  do       give the settings of its config.json, or train in another folder."
        )
