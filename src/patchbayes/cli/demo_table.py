"""The demo's table: which rows, which columns, what is best in each, and the sentence that says what was found."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]
OWN = ("bayesianize_ (a)", "trained with patches (b)", "(b) in one pass")


@dataclass(frozen=True)
class Column:
    """A score: which images it is of, its heading, its value in a row, its decimals, and whether more of it is better."""

    images: str
    heading: str
    value: Callable[[Row], float]
    decimals: int
    more: bool = False

    @property
    def key(self) -> str:
        return f"{self.heading}, {self.images}"

    def text(self, row: Row) -> str:
        spread = row.get("spread_over_seeds", {}).get(self.key)
        return f"{self.value(row):.{self.decimals}f}" + ("" if spread is None else f"±{spread:.{self.decimals}f}")


#: What the headings mean.
LEGEND = (
    "right: accuracy. NLL: negative log-likelihood, lower is better.",
    "ECE: the gap between confidence and accuracy, lower is better.",
    "corrupted: six kinds of damage, three strengths each.",
    "unfamiliar: how well the entropy tells digits from clothes (AUROC), higher is better.",
    "All rows but the original are calibrated on the same 1,000 held-out images.",
)

COLUMNS = (
    Column("clean", "right %", lambda r: 100 * r["accuracy"], 1, more=True),
    Column("clean", "NLL", lambda r: r["nll"], 3),
    Column("clean", "ECE %", lambda r: 100 * r["ece"], 1),
    Column("corrupted", "NLL", lambda r: r["corrupted"]["nll"], 3),
    Column("corrupted", "ECE %", lambda r: 100 * r["corrupted"]["ece"], 1),
    Column("unfamiliar", "AUROC", lambda r: r["unfamiliar_auroc"], 3, more=True),
)


def titled(results: Sequence[Mapping[str, Mapping[str, Any]]], record: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The six rows, averaged over seeds, with the standard deviation over seeds where there are several.

    results: for each seed, contestant -> its result. Dropout has the form that `form_of_dropout` chooses.
    """
    form = form_of_dropout(results, record)
    each = [_rows(result, record, form) for result in results]
    return {title: _averaged([rows[title] for rows in each]) for title in each[0]}


def form_of_dropout(results: Sequence[Mapping[str, Mapping[str, Any]]], record: Mapping[str, Any]) -> str:
    """ "draws" or "one pass": in which dropout is better on held-out images, on average over the seeds."""
    rate = f"{record['dropout_rate']:g}"

    def held_out(form: str) -> float:
        return statistics.fmean(
            one[f"dropout:{rate}"]["rows"][f"dropout {rate}, {form}"]["held_out_nll"] for one in results
        )

    return min(("one pass", "draws"), key=held_out)


def _rows(result: Mapping[str, Mapping[str, Any]], record: Mapping[str, Any], form: str) -> dict[str, dict[str, Any]]:
    rate, noise, draws = record["dropout_rate"], record["noise"], record["draws"]
    plain = result["plain"]["rows"]
    rival = result[f"dropout:{rate:g}"]["rows"]
    ours = result[f"mixed:{noise:g}"]["rows"]
    return {
        "original": {**plain["original"], "passes": 1},
        "temperature scaling": {**plain["temperature scaling"], "passes": 1},
        f"dropout {rate:g}": {**rival[f"dropout {rate:g}, {form}"], "passes": draws if form == "draws" else 1},
        OWN[0]: {**plain["bayesianize_"], "passes": draws},
        OWN[1]: {**ours[f"mixed {noise:g}, draws"], "passes": draws},
        OWN[2]: {**ours[f"mixed {noise:g}, one pass"], "passes": 1},
    }


def _averaged(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    if len(rows) == 1:
        return rows[0]
    mean: dict[str, Any] = {}
    for name, value in rows[0].items():
        values = [row[name] for row in rows]
        if isinstance(value, dict):
            mean[name] = {inner: statistics.fmean(v[inner] for v in values) for inner in value}
        elif name == "reliability":
            mean[name] = merged(values)
        else:
            mean[name] = statistics.fmean(values)
    mean["spread_over_seeds"] = {c.key: statistics.stdev(c.value(row) for row in rows) for c in COLUMNS}
    return mean


def merged(bins: Iterable[Sequence[Sequence[float]]]) -> list[list[float]]:
    """Calibration bins of several seeds as one: counts added, confidences and accuracies averaged by count."""
    sums: dict[int, list[float]] = {}
    for some in bins:
        for count, confidence, accuracy in some:
            total = sums.setdefault(int(min(confidence, 0.999999) * 20), [0.0, 0.0, 0.0])
            for place, value in enumerate((count, count * confidence, count * accuracy)):
                total[place] += value
    return [[int(n), c / n, a / n] for _, (n, c, a) in sorted(sums.items())]


def best_of(rows: Mapping[str, Row], column: Column) -> set[str]:
    """The rows that are best as far as the column shows."""
    values = {title: round(column.value(row), column.decimals) for title, row in rows.items()}
    best = (max if column.more else min)(values.values())
    return {title for title, value in values.items() if value == best}


def lines_of_table(rows: Mapping[str, Row], *, color: bool) -> list[str]:
    """At most 100 columns wide; the best of a column has a star, in bold on a terminal."""
    best = {column.key: best_of(rows, column) for column in COLUMNS}
    groups = [
        column.images if i == 0 or COLUMNS[i - 1].images != column.images else "" for i, column in enumerate(COLUMNS)
    ]
    cells = [
        ["", *(f"{group} " for group in groups), ""],
        ["", *(f"{column.heading} " for column in COLUMNS), "passes"],
    ]
    for title, row in rows.items():
        texts = [column.text(row) + ("*" if title in best[column.key] else " ") for column in COLUMNS]
        cells.append([title, *texts, f"{row['passes']:.0f}"])
    widths = [max(len(line[place]) for line in cells) for place in range(len(cells[0]))]
    lines = []
    for line in cells:
        parts = [
            line[0].ljust(widths[0]),
            *(text.rjust(width) for text, width in zip(line[1:], widths[1:], strict=True)),
        ]
        lines.append(
            " ".join(f"\033[1m{part}\033[0m" if color and part.endswith("*") else part for part in parts).rstrip()
        )
    return [*lines, *remarks(rows)]


def remarks(rows: Mapping[str, Row]) -> list[str]:
    """What a reader would ask about the table: where a rival is best, and why two rows are the same."""
    found = [won_by_rivals(rows)]
    if all(rows[OWN[1]][name] == rows[OWN[2]][name] for name in ("nll", "ece", "accuracy")):
        found.append("Rows (b) are equal: held-out images chose no spread, so that draws say what one pass says.")
    return [line for line in found if line]


def won_by_rivals(rows: Mapping[str, Row]) -> str:
    """Which columns a rival wins, "" where none does."""
    lost = []
    for column in COLUMNS:
        best = best_of(rows, column)
        if not best & set(OWN):
            lost.append(f"{column.key} ({', '.join(title for title in rows if title in best)})")
    return f"A rival is best in: {'; '.join(lost)}." if lost else ""


def finding(rows: Mapping[str, Row], train_accuracy: float) -> str:
    """What was found, in one sentence."""
    original, ours = rows["original"], rows[OWN[2]]
    word = "too sure of itself" if original["confidence"] > original["accuracy"] else "not sure enough"
    return (
        f"An ordinary network that gets {100 * train_accuracy:.0f} % of its training images right is {word}: on new images it "
        f"claims {100 * original['confidence']:.0f} % and is right on {100 * original['accuracy']:.0f} %; trained with "
        f"patches, it claims {100 * ours['confidence']:.0f} % and is right on {100 * ours['accuracy']:.0f} %."
    )


def in_numbers(rows: Mapping[str, Row]) -> str:
    """The same as scores, in one pass, beside temperature scaling."""
    original, scaled, ours = rows["original"], rows["temperature scaling"], rows[OWN[2]]
    return (
        f"ECE {100 * original['ece']:.1f} % -> {100 * ours['ece']:.1f} % and NLL {original['nll']:.3f} -> {ours['nll']:.3f}, "
        f"in one pass; temperature scaling gets {100 * scaled['ece']:.1f} % and {scaled['nll']:.3f}."
    )


def number_of_seeds(record: Mapping[str, Any]) -> str:
    """ "one seed" or "5 seeds"."""
    number = len(record["seeds"])
    return "one seed" if number == 1 else f"{number} seeds"
