"""The other way to a patched network on CIFAR-100: networks that others trained, made Bayesian by `bayesianize_`.

The paper trains from scratch; this is beside its table 6. The records are those of benchmarks/bayesianize.py, one for each
network and seed.
"""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from patchbayes.errors import PatchbayesError

from .experiment import TextTable
from .seed_statistics import interval_text

_NAMES = "bayesianize_*_seed?.json"


def route_tables(results: Path) -> dict[str, TextTable]:
    """Scores by network and row, mean over seeds; nothing where `results` holds no such record."""
    records = [_read(path) for path in sorted(results.glob(_NAMES))]
    if not records:
        return {}
    parts = " and ".join(sorted({record["scored"] for record in records}))
    title = (
        f"Networks trained by others, made Bayesian (`python benchmarks/bayesianize.py`), scored on {parts}: mean and 95 % "
        "interval over seeds"
    )
    header = ["network", "prediction", "S", "seeds", "NLL", "ECE %", "floor %", "top-1 %"]
    made: dict[str, TextTable] = {title: (header, _lines(records))}
    some = [record | {"rows": rows, "inputs": kind} for record in records for kind, rows in record["some"].items()]
    if some:
        lines = []
        for kind, number in dict.fromkeys((record["inputs"], record["images"]) for record in some):
            own = [record for record in some if (record["inputs"], record["images"]) == (kind, number)]
            lines += [[kind, str(number), *line] for line in _lines(own)]
        title = f"The same on the first of these images, clean and corrupted (severity {some[0]['severity']})"
        made[title] = (["images", "number", *header], lines)
    return made


def _lines(records: Sequence[dict[str, Any]]) -> list[list[str]]:
    """A line for each network and row."""
    lines = []
    for network in dict.fromkeys(record["network"] for record in records):
        own = [record for record in records if record["network"] == network]
        for title in dict.fromkeys(title for record in own for title in record["rows"]):
            rows = [record["rows"][title] for record in own if title in record["rows"]]
            lines.append([network, *_cells(title, rows)])
    return lines


def _cells(title: str, rows: Sequence[dict[str, float]]) -> list[str]:
    """ "bayesianized S=20 and temperature" is told apart into what was predicted and S; a network alone is one."""
    name, _, rest = title.partition(" S=")
    draws, _, more = rest.partition(" ")
    floor = statistics.fmean(100 * row["ece_floor"] for row in rows)
    return [
        f"{name} {more}".strip(),
        draws or "1",
        str(len(rows)),
        _interval([row["nll"] for row in rows], 4),
        _interval([100 * row["ece"] for row in rows], 3),
        f"{floor:.3g}",
        _interval([100 * row["accuracy"] for row in rows], 4),
    ]


def _interval(values: Sequence[float], digits: int) -> str:
    """Of the network as it was, which does not depend on the seed, the value alone."""
    return interval_text(values if len(set(values)) > 1 else values[:1], digits)


def _read(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text())
        found = {key: record[key] for key in ("seed", "scored", "rows")}
        found["network"] = path.stem.removeprefix("bayesianize_").partition("_seed")[0]
        more = record.get("some", {"rows": {}, "images": 0, "severity": 0})
        found |= {"some": more["rows"], "images": more["images"], "severity": more["severity"]}
        for row in found["rows"].values():
            for key in ("nll", "ece", "ece_floor", "accuracy"):
                float(row[key])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise PatchbayesError(f"{path} is not a record of benchmarks/bayesianize.py ({error!r}).") from None
    return found
