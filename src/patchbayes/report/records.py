"""An evaluated run as the report shows it: its evaluation record, and the curves of its training."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..runs.entry import Entry
from ..runs.record import EvaluationRecord

Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True, kw_only=True)
class EvaluatedRun(EvaluationRecord):
    """A record with its history: points (epoch, value) of everything that was measured in training, by name."""

    history: dict[str, Points] = field(default_factory=dict)

    @classmethod
    def of(cls, record: EvaluationRecord, rows: Sequence[Mapping[str, Any]]) -> "EvaluatedRun":
        """The record with the rows of its metrics.jsonl; they count as epochs 1, 2, ... if they name none."""
        return cls(
            **vars(record), history=_history(rows, f"{(record.folder or record.name).rstrip('/')}/metrics.jsonl")
        )

    @property
    def place(self) -> str:
        """Where the record is from, for messages."""
        return self.folder or self.name


def _history(rows: Sequence[Mapping[str, Any]], source: str) -> dict[str, Points]:
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
