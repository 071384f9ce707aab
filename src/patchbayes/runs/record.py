"""The record of an evaluation: what `patchbayes evaluate` writes into a run folder, and everybody else reads through it.

On disk it is JSON under the names of the fields. Sections that a record does not have are null or missing; a section that is
there must be whole. NaN and infinities are written as null.
"""

import base64
import json
import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Self

from ..errors import PatchbayesError
from ..files import read_json, write_atomically
from .entry import Answer, Count, Entry, Picture, Scalar, read_value

SCHEMA = 1
FILE = "evaluation.json"

Task = Literal["classification", "regression"]
Floats = tuple[float | None, ...]


@dataclass(frozen=True)
class Metric:
    """A value with its interval over resampled test examples; `floor` is what perfect calibration would score."""

    value: float | None
    low: float | None = None
    high: float | None = None
    floor: float | None = None

    def to_json(self) -> dict[str, Any]:
        return {name: number for name, number in vars(self).items() if name != "floor" or number is not None}


@dataclass(frozen=True)
class Parameters:
    """What patching cost: numbers of parameters and of sites, and log10 of how many networks can be drawn."""

    unpatched: int | None = None
    patched: int | None = None
    patched_sites: int | None = None
    log10_ensemble_size: float | None = None


@dataclass(frozen=True)
class Temperature:
    """The same predictions after temperature scaling, fitted on other examples."""

    temperature: float | None
    fitted_on: str
    metrics: dict[str, Metric]


@dataclass(frozen=True)
class CurveScores:
    """A score for every number of draws, with its standard error (None where there is a single repeat)."""

    value: Floats
    standard_error: Floats


@dataclass(frozen=True)
class DrawsCurve:
    """Scores against the number of draws S. On disk the scores stand beside "draws", by name."""

    draws: tuple[Count, ...]
    scores: dict[str, CurveScores]

    @classmethod
    def read(cls, entry: Entry) -> "DrawsCurve":
        draws = tuple(item.count() for item in entry["draws"].listed())
        if list(draws) != sorted({*draws}) or 0 in draws:
            entry["draws"].fail("a rising list of numbers of draws, from 1 on")
        scores = {}
        for name, item in entry.named():
            if name != "draws" and item.present:
                spread = item["standard_error"]
                errors = spread.numbers(len(draws)) if spread.present else (None,) * len(draws)
                scores[name] = CurveScores(item["value"].numbers(len(draws)), errors)
        return cls(draws, scores)

    def at(self, draws: int, score: str) -> float | None:
        """A score at a number of draws; None where the curve does not have it."""
        known = score in self.scores and draws in self.draws
        return self.scores[score].value[self.draws.index(draws)] if known else None

    def to_json(self) -> dict[str, Any]:
        return {"draws": self.draws, **self.scores}


@dataclass(frozen=True)
class Reliability:
    """Examples, mean confidence and accuracy of each bin of confidence."""

    count: tuple[Count, ...]
    confidence: Floats
    accuracy: Floats

    def check(self, entry: Entry) -> None:
        for name in ("confidence", "accuracy"):
            entry[name].numbers(len(self.count))
        bins = zip(self.count, self.confidence, self.accuracy, strict=True)
        if any(number and (c is None or a is None) for number, c, a in bins):
            entry.fail("a confidence and an accuracy for every bin that has examples")


@dataclass(frozen=True)
class Histogram:
    """How many correct and wrong answers have a confidence between two edges."""

    edges: tuple[float, ...]
    correct: tuple[Count, ...]
    wrong: tuple[Count, ...]

    def check(self, entry: Entry) -> None:
        if len(self.correct) != len(self.wrong):
            entry["wrong"].fail(f"a list of {len(self.correct)} counts, as many as in `correct`")
        entry["edges"].rising(len(self.correct) + 1)


@dataclass(frozen=True)
class CoveragePoints:
    """Accuracy on the most certain share of the examples."""

    coverage: tuple[float, ...]
    accuracy: Floats

    def check(self, entry: Entry) -> None:
        entry["accuracy"].numbers(len(entry["coverage"].rising()))


@dataclass(frozen=True)
class QuantilePoints:
    """Share of targets below the predicted quantile of each level."""

    level: tuple[float, ...]
    observed: Floats

    def check(self, entry: Entry) -> None:
        entry["observed"].numbers(len(entry["level"].rising()))


@dataclass(frozen=True)
class SiteDistance:
    """How far apart the components of a site are: rms difference, relative to the rms of their mean."""

    site: str
    distance: float | None


@dataclass(frozen=True)
class Diversity:
    """How different the draws' answers are, and the components of each site."""

    disagreement: float | None = None
    mutual_information: float | None = None
    components: tuple[SiteDistance, ...] = ()

    @property
    def distances(self) -> list[tuple[str, float]]:
        return [(item.site, item.distance) for item in self.components if item.distance is not None]


@dataclass(frozen=True)
class OutOfDistribution:
    """How well a score of uncertainty tells inputs of another kind from the network's own."""

    data: str
    score: str = ""
    auroc: float | None = None
    fpr95: float | None = None


@dataclass(frozen=True)
class Corruptions:
    """Scores by corruption (rows) and severity (columns); mCE relative to the reference run, which is 100."""

    names: tuple[str, ...]
    severities: tuple[Count, ...]
    error: tuple[Floats, ...] | None = None
    nll: tuple[Floats, ...] | None = None
    ece: tuple[Floats, ...] | None = None
    mce: float | None = None
    relative_mce: float | None = None
    reference: str | None = None
    clean_error: float | None = None
    num_examples: Count | None = None
    draws: Count | None = None

    @property
    def tables(self) -> dict[str, tuple[Floats, ...]]:
        found = {"error": self.error, "nll": self.nll, "ece": self.ece}
        return {name: table for name, table in found.items() if table is not None}

    def mean(self, name: str, corruption: str | None = None) -> float | None:
        """The mean over severities, and over all corruptions unless one is named; None where there is none."""
        rows = zip(self.names, self.tables.get(name, ()), strict=False)
        values = [v for label, row in rows if corruption in (None, label) for v in row if v is not None]
        return math.fsum(values) / len(values) if values else None

    def check(self, entry: Entry) -> None:
        for name, table in self.tables.items():
            if len(table) != len(self.names):
                entry[name].fail(f"a list of {len(self.names)} rows, one for each of `names`")
            for row in entry[name].listed():
                row.numbers(len(self.severities))


@dataclass(frozen=True)
class Example:
    """An input with its answer; `png` is its picture, where it is one."""

    index: Count
    true: Answer
    predicted: Answer
    confidence: float | None = None
    mutual_information: float | None = None
    png: Picture | None = None


@dataclass(frozen=True)
class Examples:
    """The inputs of which the network is most and least certain."""

    most_certain: tuple[Example, ...] = ()
    least_certain: tuple[Example, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RunScores:
    """What tables are made of: a method with its seed, what it cost, and how it scored."""

    method: str = ""
    seed: int | None = None
    parameters: Parameters = Parameters()
    training_seconds: float | None = None
    metrics: dict[str, Metric]
    temperature: Temperature | None = None
    draws_curve: DrawsCurve | None = None
    reliability: Reliability | None = None
    corruptions: Corruptions | None = None

    @classmethod
    def from_json(cls, content: object, source: str) -> Self:
        """The checked record of that content; `source` names it where something is wrong."""
        return read_value(cls, Entry(content, source))

    def to_json(self) -> dict[str, Any]:
        """The record as plain JSON values."""
        return {one.name: as_json(getattr(self, one.name)) for one in fields(self)}

    def value(self, metric: str) -> float | None:
        """A metric's value; None where it was not measured."""
        found = self.metrics.get(metric)
        return None if found is None else found.value


@dataclass(frozen=True, kw_only=True)
class EvaluationRecord(RunScores):
    """One evaluated run. draws: as asked for; num_draws: networks that were averaged; exact: these are all there are; views:
    those that the draws saw, by name."""

    name: str
    folder: str = ""
    task: Task
    method: str = field()
    model: str = ""
    sites: str | None = None
    data: str
    split: str = ""
    num_examples: Count | None = None
    classes: tuple[str, ...] = ()
    draws: int | None = None
    num_draws: int | None = None
    exact: bool = False
    views: str | None = None
    command: str | None = None
    train_command: str | None = None
    date: str | None = None
    commit: str | None = None
    machine: dict[str, Scalar] = field(default_factory=dict)
    versions: dict[str, Scalar] = field(default_factory=dict)
    patch_report: str | None = None
    histogram: Histogram | None = None
    coverage: CoveragePoints | None = None
    quantiles: QuantilePoints | None = None
    diversity: Diversity | None = None
    ood: tuple[OutOfDistribution, ...] = ()
    examples: Examples | None = None

    @classmethod
    def from_json(cls, content: object, source: str) -> Self:
        schema = Entry(content, source)["schema"]
        if isinstance(schema.value, int) and schema.value > SCHEMA:
            schema.fail(f"{SCHEMA} or less (a newer version of patchbayes wrote this record)")
        if schema.value != SCHEMA or isinstance(schema.value, bool):
            schema.fail(f"{SCHEMA}")
        return super().from_json(content, source)

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **super().to_json()}


def write_evaluation(folder: Path, record: EvaluationRecord) -> Path:
    """Put the record into the run folder."""
    path = folder / FILE
    content = json.dumps(record.to_json(), indent=1, ensure_ascii=False, allow_nan=False)
    write_atomically(path, f"{content}\n".encode())
    return path


def read_evaluation(folder: Path) -> EvaluationRecord:
    """The record of a run folder."""
    path = folder / FILE
    if not path.exists():
        raise PatchbayesError(f"{folder} has not been evaluated; run: patchbayes evaluate {shlex.quote(str(folder))}")
    try:
        content = read_json(path)
    except PatchbayesError as error:
        raise PatchbayesError(f"{error}\n  do       evaluate the run again.") from None
    return EvaluationRecord.from_json(content, str(path))


def as_json(value: Any) -> Any:
    """A value of a record, or a part of it, as JSON has it: null in place of NaN and infinities."""
    if hasattr(value, "to_json"):
        return as_json(value.to_json())
    if hasattr(value, "__dataclass_fields__"):
        return {name: as_json(item) for name, item in vars(value).items()}
    if isinstance(value, Mapping):
        return {name: as_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return None if isinstance(value, float) and not math.isfinite(value) else value
