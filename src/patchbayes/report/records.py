"""What `patchbayes evaluate` wrote, checked and typed: one `Run` for each evaluation.json and its metrics.jsonl.

Sections that a record does not have are None or empty; a section that is there must be whole.
"""

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .entry import Entry

SCHEMA = 1

Task = Literal["classification", "regression"]
Floats = tuple[float | None, ...]


@dataclass(frozen=True)
class Metric:
    """A value with its interval over resampled test examples; `floor` is what perfect calibration would score."""

    value: float | None
    low: float | None
    high: float | None
    floor: float | None


@dataclass(frozen=True)
class Temperature:
    """The same predictions after temperature scaling, fitted on other examples."""

    temperature: float | None
    fitted_on: str
    metrics: dict[str, Metric]


@dataclass(frozen=True)
class DrawsCurve:
    """Metrics against the number of draws S; each has a value and a standard error (or None) for every S."""

    draws: tuple[int, ...]
    values: dict[str, Floats]
    standard_errors: dict[str, Floats]


@dataclass(frozen=True)
class Reliability:
    count: tuple[int, ...]
    confidence: Floats
    accuracy: Floats


@dataclass(frozen=True)
class Histogram:
    edges: tuple[float, ...]
    correct: tuple[int, ...]
    wrong: tuple[int, ...]


@dataclass(frozen=True)
class Curve:
    """Points of accuracy against coverage, or of observed against wanted quantile level."""

    x: tuple[float, ...]
    y: Floats


@dataclass(frozen=True)
class Diversity:
    """How different the draws' answers are, and the components' weights: (site, rms distance relative to their mean)."""

    disagreement: float | None
    mutual_information: float | None
    components: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class OutOfDistribution:
    data: str
    score: str
    auroc: float | None
    fpr95: float | None


@dataclass(frozen=True)
class Corruptions:
    """Scores by corruption (rows) and severity (columns); mCE relative to the reference run, which is 100."""

    names: tuple[str, ...]
    severities: tuple[int, ...]
    tables: dict[str, tuple[Floats, ...]]
    mce: float | None
    relative_mce: float | None
    reference: str | None
    num_examples: int | None = None
    draws: int | None = None


@dataclass(frozen=True)
class Example:
    index: int
    true: str
    predicted: str
    confidence: float | None
    mutual_information: float | None
    png: bytes | None


@dataclass(frozen=True)
class Run:
    """One evaluated run. draws: as asked for; num_draws: networks that were averaged; exact: these are all there are."""

    source: str
    name: str
    folder: str
    task: Task
    method: str
    model: str
    sites: str
    data: str
    split: str
    num_examples: int | None
    draws: int | None
    num_draws: int | None
    exact: bool
    seed: int | None
    command: str
    train_command: str
    commit: str
    date: str
    machine: dict[str, str]
    versions: dict[str, str]
    parameters: dict[str, float | None]
    patch_report: str
    training_seconds: float | None
    metrics: dict[str, Metric]
    temperature: Temperature | None
    draws_curve: DrawsCurve | None
    reliability: Reliability | None
    histogram: Histogram | None
    coverage: Curve | None
    quantiles: Curve | None
    diversity: Diversity | None
    ood: tuple[OutOfDistribution, ...]
    corruptions: Corruptions | None
    most_certain: tuple[Example, ...]
    least_certain: tuple[Example, ...]
    history: dict[str, tuple[tuple[float, float], ...]]


def read_run(record: Mapping[str, Any], history: Sequence[Mapping[str, Any]], number: int) -> Run:
    """The checked record of one run; `number` counts the records from 1 and names one that does not say where it is from."""
    source = f"record {number}"
    folder = record.get("folder") if isinstance(record, Mapping) else None
    if isinstance(folder, str) and folder:
        source = Entry(f"{folder.rstrip('/')}/evaluation.json", source).text()
    top = Entry(record, source)
    if top["schema"].value != SCHEMA:
        top["schema"].fail(f"{SCHEMA} (what this version of patchbayes reads)")
    task = top["task"].text()
    if task not in ("classification", "regression"):
        top["task"].fail("'classification' or 'regression'")
    count = top["num_examples"]
    examples = top["examples"]
    return Run(
        source=source,
        name=top["name"].text(),
        folder=top["folder"].text(""),
        task="classification" if task == "classification" else "regression",
        method=top["method"].text(),
        model=top["model"].text(""),
        sites=top["sites"].text(""),
        data=top["data"].text(),
        split=top["split"].text(""),
        num_examples=count.count() if count.present else None,
        draws=top["draws"].integer(),
        num_draws=top["num_draws"].integer(),
        exact=top["exact"].value is True,
        seed=top["seed"].integer(),
        command=top["command"].text(""),
        train_command=top["train_command"].text(""),
        commit=top["commit"].text(""),
        date=top["date"].text(""),
        machine=_words(top["machine"]),
        versions=_words(top["versions"]),
        parameters=_parameters(top["parameters"]),
        patch_report=top["patch_report"].text(""),
        training_seconds=top["training_seconds"].number(),
        metrics=_metrics(top["metrics"]),
        temperature=_temperature(top["temperature"]),
        draws_curve=_draws_curve(top["draws_curve"]),
        reliability=_reliability(top["reliability"]),
        histogram=_histogram(top["histogram"]),
        coverage=_curve(top["coverage"], "coverage", "accuracy"),
        quantiles=_curve(top["quantiles"], "level", "observed"),
        diversity=_diversity(top["diversity"]),
        ood=_ood(top["ood"]),
        corruptions=_corruptions(top["corruptions"]),
        most_certain=_examples(examples["most_certain"]) if examples.present else (),
        least_certain=_examples(examples["least_certain"]) if examples.present else (),
        history=_history(history, source.replace("evaluation.json", "metrics.jsonl")),
    )


def _words(entry: Entry) -> dict[str, str]:
    """An object of plain values, as texts; nulls are left out."""
    if not entry.present:
        return {}
    return {
        name: item.text() if isinstance(item.value, str) else Entry(_json(item), item.source).text()
        for name, item in entry.named()
        if item.present
    }


def _json(entry: Entry) -> str:
    try:
        return json.dumps(entry.value, sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        entry.fail("a JSON value")


def _parameters(entry: Entry) -> dict[str, float | None]:
    return {name: item.number() for name, item in entry.named()} if entry.present else {}


def _metrics(entry: Entry) -> dict[str, Metric]:
    return {
        name: Metric(item["value"].number(), item["low"].number(), item["high"].number(), item["floor"].number())
        for name, item in entry.named()
        if item.present
    }


def _temperature(entry: Entry) -> Temperature | None:
    if not entry.present:
        return None
    return Temperature(entry["temperature"].number(), entry["fitted_on"].text(""), _metrics(entry["metrics"]))


def _draws_curve(entry: Entry) -> DrawsCurve | None:
    if not entry.present:
        return None
    draws = tuple(item.count() for item in entry["draws"].listed())
    if list(draws) != sorted({*draws}) or 0 in draws:
        entry["draws"].fail("a rising list of numbers of draws, from 1 on")
    values, errors = {}, {}
    for name, item in entry.named():
        if name != "draws" and item.present:
            values[name] = item["value"].numbers(len(draws))
            spread = item["standard_error"]
            errors[name] = spread.numbers(len(draws)) if spread.present else (None,) * len(draws)
    return DrawsCurve(draws, values, errors)


def _reliability(entry: Entry) -> Reliability | None:
    if not entry.present:
        return None
    count = tuple(item.count() for item in entry["count"].listed())
    confidence, accuracy = (entry[name].numbers(len(count)) for name in ("confidence", "accuracy"))
    if any(n and (c is None or a is None) for n, c, a in zip(count, confidence, accuracy, strict=True)):
        entry.fail("a confidence and an accuracy for every bin that has examples")
    return Reliability(count, confidence, accuracy)


def _histogram(entry: Entry) -> Histogram | None:
    if not entry.present:
        return None
    correct, wrong = (tuple(item.count() for item in entry[name].listed()) for name in ("correct", "wrong"))
    if len(correct) != len(wrong):
        entry["wrong"].fail(f"a list of {len(correct)} counts, as many as in `correct`,")
    return Histogram(_rising(entry["edges"], len(correct) + 1), correct, wrong)


def _curve(entry: Entry, x: str, y: str) -> Curve | None:
    if not entry.present:
        return None
    places = _rising(entry[x])
    return Curve(places, entry[y].numbers(len(places)))


def _rising(entry: Entry, length: int | None = None) -> tuple[float, ...]:
    """Confidences, shares or levels."""
    numbers = entry.numbers(length)
    values = [value for value in numbers if value is not None]
    if len(values) != len(numbers) or values != sorted(values) or any(not 0 <= value <= 1 for value in values):
        entry.fail("a rising list of numbers between 0 and 1")
    return tuple(values)


def _diversity(entry: Entry) -> Diversity | None:
    if not entry.present:
        return None
    components = []
    for item in entry["components"].listed() if entry["components"].present else []:
        distance = item["distance"].number()
        if distance is not None:
            components.append((item["site"].text(), distance))
    return Diversity(entry["disagreement"].number(), entry["mutual_information"].number(), tuple(components))


def _ood(entry: Entry) -> tuple[OutOfDistribution, ...]:
    return tuple(
        OutOfDistribution(item["data"].text(), item["score"].text(""), item["auroc"].number(), item["fpr95"].number())
        for item in (entry.listed() if entry.present else [])
    )


def _corruptions(entry: Entry) -> Corruptions | None:
    if not entry.present:
        return None
    names = tuple(item.text() for item in entry["names"].listed())
    severities = tuple(item.count() for item in entry["severities"].listed())
    tables = {}
    for name in ("error", "nll", "ece"):
        if entry[name].present:
            rows = entry[name].listed()
            if len(rows) != len(names):
                entry[name].fail(f"a list of {len(names)} rows, one for each of `names`,")
            tables[name] = tuple(row.numbers(len(severities)) for row in rows)
    reference = entry["reference"]
    return Corruptions(
        names,
        severities,
        tables,
        entry["mce"].number(),
        entry["relative_mce"].number(),
        reference.text() if reference.present else None,
        *(entry[name].count() if entry[name].present else None for name in ("num_examples", "draws")),
    )


def _examples(entry: Entry) -> tuple[Example, ...]:
    return tuple(
        Example(
            item["index"].count(),
            _answer(item["true"]),
            _answer(item["predicted"]),
            item["confidence"].number(),
            item["mutual_information"].number(),
            _png(item["png"]),
        )
        for item in (entry.listed() if entry.present else [])
    )


def _answer(entry: Entry) -> str:
    """A class name, or a number as it is read."""
    number = entry.value if isinstance(entry.value, str) else entry.number()
    return f"{number:.4g}" if isinstance(number, float) else entry.text("?")


def _png(entry: Entry) -> bytes | None:
    if not entry.present:
        return None
    try:
        content = base64.b64decode(entry.text(), validate=True)
    except (binascii.Error, ValueError):
        entry.fail("a PNG picture in base64")
    if not content.startswith(b"\x89PNG\r\n\x1a\n"):
        entry.fail("a PNG picture in base64")
    return content


def _history(rows: Sequence[Mapping[str, Any]], source: str) -> dict[str, tuple[tuple[float, float], ...]]:
    """Points (epoch, value) of everything that was measured in training; rows count as epochs 1, 2, ... if they name none."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for number, row in enumerate(rows, 1):
        top = Entry(row, source, f"line {number}")
        epoch = top["epoch"].number()
        for name, item in top.named():
            numeric = isinstance(item.value, int | float) and not isinstance(item.value, bool)
            value = item.number() if numeric and name != "epoch" else None
            if value is not None:
                curves.setdefault(name, []).append((float(number) if epoch is None else epoch, value))
    return {name: tuple(points) for name, points in curves.items()}
