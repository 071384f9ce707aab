"""Tables of docs/integrations.md and docs/decisions.md, from the records of sklearn_sets.py and matrix.py."""

import statistics
from typing import Any

from capture import TIMM, TORCHVISION, TRANSFORMERS

_FAMILIES = {"timm": TIMM, "transformers": TRANSFORMERS, "torchvision": TORCHVISION}
_CONTESTANTS = {"patchbayes": "patchbayes", "mlp": "MLP", "forest": "random forest"}
_STEPS = {
    "patch": "patched",
    "train": "trained a step",
    "predict": "predicted",
    "captured": "captured",
    "save_and_load": "saved and loaded",
    "export": "exported",
    "unpatch": "unpatched",
}


def sklearn_sets(record: dict[str, Any]) -> str:
    """A row for each set, and for each contestant its score, NLL, coverage in regression, and seconds."""
    rows = record["rows"]
    lines = [
        f"| set, rows | score | {' | '.join(_CONTESTANTS.values())} |",
        f"|---|---|{'---|' * len(_CONTESTANTS)}",
    ]
    for name in dict.fromkeys(row["set"] for row in rows):
        own = [row for row in rows if row["set"] == name]
        numbers = "coverage" in own[0]
        cells = [_cell([row for row in own if row["contestant"] == c], numbers) for c in _CONTESTANTS]
        kind = "RMSE / deviation" if numbers else "accuracy"
        lines.append(f"| {_title(name)}, {own[0]['rows']:,} | {kind} | {' | '.join(cells)} |")
    text = (
        "Score; NLL (of a Gaussian with the predicted moments, targets in standard units, in regression); in regression the "
        "share of targets inside 90 % intervals and their width in standard deviations; seconds of the processor to fit, in "
        f"regression to predict too. {_seeds(rows)}, a split each. Rivals have no intervals of their own: theirs are constant, "
        f"from the residuals of 15 % of the rows. {_wins(rows)} Commit {record['commit']}. Command: `{record['command']}`."
    )
    return "\n".join([*lines, "", text])


def _title(name: str) -> str:
    return "red wine, quality" if name == "uci:wine" else name.removeprefix("uci:").replace("_", " ")


def _cell(rows: list[dict[str, Any]], numbers: bool) -> str:
    def mean(key: str) -> float:
        return statistics.fmean(row[key] for row in rows)

    if not rows:
        return ""
    score = f"{mean('score'):.3f}" if numbers else f"{100 * mean('score'):.1f} %"
    covered = f"; {100 * mean('coverage'):.0f} %, {mean('width'):.2f}" if numbers else ""
    return f"{score}; {mean('nll'):.3f}{covered}; {mean('seconds'):.1f} s"


def _seeds(rows: list[dict[str, Any]]) -> str:
    """How many seeds stand behind the means; sets may have different numbers while a record grows."""
    counts = {name: len({row["seed"] for row in rows if row["set"] == name}) for name in {row["set"] for row in rows}}
    low, high = min(counts.values()), max(counts.values())
    return f"Mean of {low if low == high else f'{low} or {high}'} seed{'s' if high > 1 else ''}"


def _wins(rows: list[dict[str, Any]]) -> str:
    """On how many sets ours has the best score, and the best NLL."""
    best = {"score": 0, "nll": 0}
    names = list(dict.fromkeys(row["set"] for row in rows))
    for name in names:
        own = [row for row in rows if row["set"] == name]
        for key in best:
            sign = -1 if key == "score" and "coverage" not in own[0] else 1
            means = {
                c: sign * statistics.fmean(row[key] for row in own if row["contestant"] == c)
                for c in dict.fromkeys(row["contestant"] for row in own)
            }
            best[key] += min(means, key=means.__getitem__) == "patchbayes"
    return f"The first has the best score on {best['score']} and the best NLL on {best['nll']} of {len(names)} sets."


def selective(record: dict[str, Any]) -> str:
    """Areas under the risk-coverage curve of our classifier by score."""
    rows = [row for row in record["rows"] if "aurc" in row]
    scores = list(rows[0]["aurc"])
    lines = [f"| set | {' | '.join(scores)} |", f"|---|{'---|' * len(scores)}"]
    for name in dict.fromkeys(row["set"] for row in rows):
        own = [row["aurc"] for row in rows if row["set"] == name]
        cells = [f"{100 * statistics.fmean(one[score] for one in own):.2f} %" for score in scores]
        lines.append(f"| {_title(name)} | {' | '.join(cells)} |")
    text = f"`PatchBayesClassifier`. {_seeds(rows)}. Commit {record['commit']}. Command: `{record['command']}`."
    return "\n".join([*lines, "", text])


def matrix(record: dict[str, Any]) -> str:
    """How many networks of each library pass each step, and what the others say."""
    lines = [f"| library | networks | {' | '.join(_STEPS.values())} |", f"|---|---|{'---|' * len(_STEPS)}"]
    rows, notes = record["rows"], []
    for library in dict.fromkeys(row["library"] for row in rows):
        own = [row for row in rows if row["library"] == library]
        cells = [str(sum(_passed(row, step) for row in own)) for step in _STEPS]
        lines.append(f"| {library} | {len(own)} | {' | '.join(cells)} |")
    for row in rows:
        for step, found in row["steps"].items():
            if not found["passed"] or found["note"].startswith("loop:"):
                notes.append(f"{row['network']}, {step.replace('_', ' ')}: {found['note'].rstrip('.')}")
    steps = [found["passed"] for row in rows for found in row["steps"].values()]
    names = ", ".join(row["network"] for row in rows)
    text = (
        f"{100 * sum(steps) / len(steps):.1f} % of {len(steps)} steps pass. {'. '.join(notes) + '. ' if notes else ''}"
        f"Networks: {names}. {_missing(rows)}torch {record['versions']['torch']}, commit {record['commit']}. "
        f"Command: `{record['command']}`."
    )
    return "\n".join([*lines, "", text])


def _missing(rows: list[dict[str, Any]]) -> str:
    """The networks that the record does not hold yet."""
    done = {(row["library"], row["network"]) for row in rows}
    missing = [
        f"{name} ({library})" for library, names in _FAMILIES.items() for name in names if (library, name) not in done
    ]
    return f"Not tried yet: {', '.join(missing)}. " if missing else ""


def _passed(row: dict[str, Any], step: str) -> bool:
    if step == "captured":
        return row["steps"].get("predict", {}).get("note") == "captured"
    return bool(row["steps"].get(step, {}).get("passed"))
