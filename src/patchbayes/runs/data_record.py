"""The data set of a run, as its folder remembers it: how to read it again, and how its examples were prepared."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from ..data import Dataset, Preparation, Task, read
from ..data.columns import KINDS
from ..errors import PatchbayesError
from .config import TrainingConfig
from .entry import Entry

_LARGEST_INPUT = 2**31  # numbers; no network of this package takes larger ones
_READING = {"held_out", "seed", "target", "size", "split", "task", "columns"}
_CONTENT = ("task", "classes", "features", "input_shape", "num_outputs")


def training_data(config: TrainingConfig, trust_code: bool) -> Dataset:
    """The data set that a configuration names, with its augmentation."""
    dataset = read(config.data, config.data_dir, **config.reading, trust_code=trust_code)
    if config.augmentation is None:
        return dataset
    preparation = dataclasses.replace(dataset.preparation, augmentation=config.augmentation)
    return dataclasses.replace(dataset, preparation=preparation)


def check_record(record: Entry) -> None:
    """Refuse a data record that is not one: every value is used to build a network or to read files."""
    record["spec"].text()
    if record["data_dir"].present:
        record["data_dir"].text()
    if record["task"].value not in get_args(Task):
        record["task"].fail(" or ".join(get_args(Task)))
    classes = [item.text() for item in record["classes"].listed()]
    features = [item.text() for item in record["features"].listed()]
    shape = [item.count() for item in record["input_shape"].listed()]
    if len(shape) not in (1, 3) or not 0 < math.prod(shape) <= _LARGEST_INPUT:
        record["input_shape"].fail("the shape of one input, (features,) or (channels, height, width)")
    if features and len(features) != shape[0]:
        record["features"].fail(f"{shape[0]} names, one for each number of an input")
    if record["num_outputs"].count() != len(classes) or not classes:
        record["num_outputs"].fail(f"{len(classes)}, the number of `classes`, and at least 1")
    reading = {name: item.value for name, item in record["reading"].named()}
    if not reading.keys() <= _READING:
        record["reading"].fail(f"keywords among {', '.join(sorted(_READING))}")
    for name, item in record["reading"].named():
        if not _fits(name, item.value):
            item.fail(f"a value that `data.read` takes as {name}")
    if record["columns"].present:
        for _, item in record["columns"].named():
            if item.value not in KINDS:
                item.fail(f"one of {', '.join(KINDS)}")
    try:
        preparation = Preparation.from_config(record["preparation"].value)
    except PatchbayesError as error:
        record["preparation"].fail(f"a preparation ({error})")
    targets = len(classes) if record["task"].value == "regression" else 0
    if len(preparation.mean) != shape[0] or len(preparation.target_mean) != targets:
        record["preparation"].fail(f"means and deviations of {shape[0]} channels or features and {targets} targets")


def _fits(name: str, value: Any) -> bool:
    if name == "columns":
        return value is None or (isinstance(value, Mapping) and all(kind in KINDS for kind in value.values()))
    if name == "held_out":
        return isinstance(value, int | float) and not isinstance(value, bool)
    if name == "target":
        return value is None or isinstance(value, str | int)
    if name == "task":
        return value is None or value in get_args(Task)
    whole = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**62
    return whole or (name == "size" and value is None)


def data_record(dataset: Dataset, data_dir: Path | str | None = None, **reading: Any) -> dict[str, Any]:
    """What a run folder keeps of its data set, as JSON: `reading` are the keywords of `data.read` that gave it."""
    return {
        "spec": dataset.name,
        "data_dir": None if data_dir is None else str(data_dir),
        "reading": reading,
        "task": dataset.task,
        "classes": list(dataset.classes),
        "features": list(dataset.features),
        "columns": {column.name: column.kind for column in dataset.columns},
        "input_shape": list(dataset.input_shape),
        "num_outputs": dataset.num_outputs,
        "num_train": len(dataset.train),
        "num_held_out": 0 if dataset.held_out is None else len(dataset.held_out),
        "preparation": dataset.preparation.to_config(),
    }


def dataset_of(record: Mapping[str, Any], data_dir: Path | str | None = None, *, trust_code: bool = False) -> Dataset:
    """The data set of a record, read again, its examples prepared as the run prepared them; trust_code as in `read`."""
    reading = dict(record["reading"])
    if record.get("columns"):  # as they were taken then, whatever the cells of a file that has grown would say now
        reading |= {"columns": record["columns"], "task": record["task"]}
    dataset = read(record["spec"], data_dir or record.get("data_dir"), **reading, trust_code=trust_code)
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
        if key != "data_dir" and before.get(key) != now[key] and not (key == "columns" and key not in before)
    ]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
