"""What an experiment of the paper is: a run at some scale, a record of it, and the paper's numbers beside ours."""

import csv
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from patchbayes.errors import PatchbayesError
from patchbayes.files import write_atomically
from patchbayes.provenance import provenance

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Scale = Literal["smoke", "small", "paper"]
SCALES: tuple[Scale, ...] = ("smoke", "small", "paper")
NumberVerdict = Literal["within", "outside", "not comparable"]


@dataclass(frozen=True)
class ComparedNumber:
    """One number of the paper beside ours.

    `verdict` is "within" where ours lies within `tolerance` of the paper's (as a difference), "outside" where it does not,
    and "not comparable" where `why` says what differs: scale, data, protocol.
    """

    what: str
    paper: float | None
    ours: float | None
    tolerance: float | None = None
    why: str = ""

    @property
    def verdict(self) -> NumberVerdict:
        if self.paper is None or self.ours is None or self.tolerance is None:
            return "not comparable"
        return "within" if abs(self.ours - self.paper) <= self.tolerance else "outside"


@dataclass(frozen=True)
class Experiment:
    """A table or figure of the paper as a command.

    run     (scale, Workspace) -> the result, as JSON can hold it.
    rows    result -> the paper's numbers beside ours.
    tables  result -> {title: (header, rows of text)}, more than the comparison.
    figures result -> {file name without ending: matplotlib figure}.
    note    what a reader must know of the records: what was left out, and how to make it.
    runs    result -> (date, seconds) of each run that the record is made of; none where the record was made in one go.
    grows   whether a record that is there can be completed (`Workspace.known`).
    """

    name: str
    title: str
    items: tuple[str, ...]
    duration: Mapping[Scale, str]
    run: "Callable[[Scale, Workspace], dict[str, Any]]"
    rows: Callable[[dict[str, Any]], list[ComparedNumber]]
    tables: "Callable[[dict[str, Any]], dict[str, TextTable]]" = lambda result: {}
    figures: "Callable[[dict[str, Any]], dict[str, Figure]]" = lambda result: {}
    runs: Callable[[dict[str, Any]], list[tuple[str, float]]] = lambda result: []
    note: str = ""
    grows: bool = False


TextTable = tuple[Sequence[str], Sequence[Sequence[str]]]


@dataclass(frozen=True)
class Workspace:
    """Where an experiment finds data and leaves parts of its work, so that it can go on after an interruption.

    finished: where an experiment is made of runs, take those that are finished and begin no other.
    known: the result of a record that is to be completed: its runs are kept.
    """

    data_dir: Path | None = None
    work_dir: Path | None = None
    say: Callable[[str], None] = field(default=lambda text: None)
    finished: bool = False
    known: Mapping[str, Any] | None = None


def reproduce(
    experiment: Experiment, scale: Scale, setting: Workspace, folder: Path, *, add: bool = False
) -> dict[str, Any]:
    """Run an experiment and write its record, folder/NAME-SCALE.json.

    add: keep the runs of the record that is there, and make those that it lacks.
    """
    if scale not in SCALES:
        raise PatchbayesError(f"reproduce: scale={scale!r}; give one of {', '.join(SCALES)}.")
    if add:
        setting = replace(setting, known=_to_complete(experiment, scale, folder))
    origin = provenance()
    began = time.perf_counter()
    result = experiment.run(scale, setting)
    record = {
        "experiment": experiment.name,
        "scale": scale,
        **origin,
        "seconds": round(time.perf_counter() - began, 2),
        "result": result,
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(record_path(folder, experiment.name, scale), (json.dumps(record, indent=1) + "\n").encode())
    return record


def _to_complete(experiment: Experiment, scale: Scale, folder: Path) -> dict[str, Any]:
    if not experiment.grows:
        raise PatchbayesError(f"reproduce: a record of {experiment.name} is made in one go; leave --add out.")
    record = read_record(folder, experiment.name, scale)
    if record is None:
        raise PatchbayesError(
            f"reproduce: {record_path(folder, experiment.name, scale)} is not there to be completed; leave --add out."
        )
    return dict(record["result"])


def record_path(folder: Path, name: str, scale: Scale) -> Path:
    return folder / f"{name}-{scale}.json"


def read_record(folder: Path, name: str, scale: Scale) -> dict[str, Any] | None:
    """The record of an experiment, or None where it has not been run."""
    path = record_path(folder, name, scale)
    if not path.exists():
        return None
    try:
        record = json.loads(path.read_text())
    except ValueError as error:
        raise PatchbayesError(f"{path} is not a record: {error}. Restore it, or run the experiment again.") from None
    if not isinstance(record, dict) or record.get("experiment") != name or "result" not in record:
        raise PatchbayesError(f"{path} is not a record of the experiment {name!r}.")
    return record


def largest_record(folder: Path, name: str) -> dict[str, Any] | None:
    """The record of the largest scale that was run; smoke runs are tests, not results."""
    records = (read_record(folder, name, scale) for scale in reversed(SCALES[1:]))
    return next((record for record in records if record is not None), None)


def paper_table(name: str) -> list[dict[str, str]]:
    """The rows of a table as published; an empty text where the paper gives no number."""
    text = (resources.files(__package__) / "paper" / f"{name}.csv").read_text()
    return list(csv.DictReader(text.splitlines()))


def as_text(value: float | None, digits: int = 4) -> str:
    """A number for a table; "-" where there is none."""
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:,.0f}" if float(value).is_integer() and abs(value) >= 100 else f"{value:.{digits}g}"
