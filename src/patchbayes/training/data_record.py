"""The data set of a run, as its folder remembers it: how to read it again, and how its examples were prepared."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..data import Dataset, Preparation, read
from ..errors import PatchbayesError

_CONTENT = ("task", "classes", "features", "input_shape", "num_outputs")


def data_record(dataset: Dataset, data_dir: Path | str | None = None, **reading: Any) -> dict[str, Any]:
    """What a run folder keeps of its data set, as JSON: `reading` are the keywords of `data.read` that gave it."""
    return {
        "spec": dataset.name,
        "data_dir": None if data_dir is None else str(data_dir),
        "reading": reading,
        "task": dataset.task,
        "classes": list(dataset.classes),
        "features": list(dataset.features),
        "input_shape": list(dataset.input_shape),
        "num_outputs": dataset.num_outputs,
        "num_train": len(dataset.train),
        "num_held_out": 0 if dataset.held_out is None else len(dataset.held_out),
        "preparation": dataset.preparation.to_config(),
    }


def dataset_of(record: Mapping[str, Any], data_dir: Path | str | None = None) -> Dataset:
    """The data set of a record, read again, its examples prepared as the run prepared them."""
    dataset = read(record["spec"], data_dir or record["data_dir"], **record["reading"])
    now = data_record(dataset)
    changes = [change for change in data_changes(record, now) if change.split()[0] in _CONTENT]
    if changes:
        raise PatchbayesError(
            f"{record['spec']} is not the data set that the run was trained on: {'; '.join(changes)}."
        )
    return dataclasses.replace(dataset, preparation=Preparation.from_config(record["preparation"]))


def data_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """In what the data of a run differ from what they were, in words; where the files lie does not count."""
    return [
        f"{key} was {_short(before.get(key))}, and is now {_short(now[key])}"
        for key in now
        if key != "data_dir" and before.get(key) != now[key]
    ]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
