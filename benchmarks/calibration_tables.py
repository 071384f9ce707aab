"""The curves of docs/calibration.md, from results/calibration_curves.json."""

import statistics
from collections.abc import Callable
from typing import Any

NETWORKS = {
    "fashion": "small_resnet, Fashion",
    "cifar_resnet20": "ResNet-20, CIFAR-100",
    "cifar_resnet56": "ResNet-56, CIFAR-100",
    "intents": "words, CLINC150",
    "requests": "MiniLM, CLINC150",
}


def _cells(record: dict[str, Any], curve: str) -> list[dict[str, Any]]:
    return [cell for cell in record["cells"] if cell["curve"] == curve]


def _gain(row: dict[str, Any]) -> str:
    return f"{row['gain']:+.4f} ± {row['gain_error']:.4f}" if "gain" in row else ""


def _measured(record: dict[str, Any], cells: list[dict[str, Any]], errors: bool = True) -> str:
    scored = sorted({cell["scored"] for cell in cells})
    seeds = sorted({cell["seed"] for cell in cells})
    machine = record["machine"]
    gains = "; ± the standard error of the paired gain over them" if errors else ""
    return (
        f"{' or '.join(map(str, scored))} scored examples, seed {', '.join(map(str, seeds))}{gains}. "
        f"On {machine['processor']}, {machine['threads']} thread, {commits(cells)}. "
        "Command: `python benchmarks/calibration_curves.py`."
    )


def commits(measured: list[dict[str, Any]]) -> str:
    """From which commits; parts that do not name theirs are from 0.2.0 before 2026-11-17."""
    found = list(dict.fromkeys(one.get("commit", "of 0.2.0 before 9497ebb") for one in measured))
    return f"commit{'s' if len(found) > 1 else ''} {', '.join(found)}"


def data(record: dict[str, Any]) -> str:
    """Quality against the number of held-out examples."""
    cells = _cells(record, "data")
    lines = [
        "| network | held-out examples | temperature scaling | `bayesianize_` | gain | chosen |",
        "|---|---|---|---|---|---|",
    ]
    for cell in cells:
        for row in cell["found"]:
            lines.append(
                f"| {NETWORKS[cell['network']]} | {row['held_out']:,} | {row['rival_nll']:.4f} | {row['nll']:.4f} "
                f"| {_gain(row)} | {row['chosen']} |"
            )
    return "\n".join([*lines, "", f"NLL, both fitted to the same examples. {_measured(record, cells)}"])


def budget(record: dict[str, Any]) -> str:
    """Quality against the budget, mean over the seeds."""
    cells = _cells(record, "budget")
    lines = [
        "| network | seeds | budget, passes | temperature scaling | `bayesianize_` | above ten times as much | CPU seconds |",
        "|---" * 7 + "|",
    ]
    for network in dict.fromkeys(cell["network"] for cell in cells):
        own = [cell["found"] for cell in cells if cell["network"] == network]
        rows = list(zip(*own, strict=True))  # a row for each budget, in it one for each seed
        nll, rival, seconds = (
            [statistics.fmean(row[key] for row in some) for some in rows] for key in ("nll", "rival_nll", "cpu_seconds")
        )
        for number, some in enumerate(rows):
            lines.append(
                f"| {NETWORKS[network]} | {len(own)} | {some[0]['budget']:,} | {rival[number]:.4f} | {nll[number]:.4f} "
                f"| {nll[number] - nll[-1]:+.4f} | {seconds[number]:.0f} |"
            )
    return "\n".join([*lines, "", f"NLL, both fitted to the same 1,200 examples. {_measured(record, cells, False)}"])


def cost(record: dict[str, Any]) -> str:
    """Quality against what all draws may cost."""
    cells = _cells(record, "cost")
    lines = [
        "| network | | passes allowed | NLL | gain on temperature scaling | chosen |",
        "|---|---|---|---|---|---|",
    ]
    for cell in cells:
        for row in cell["found"]:
            where = f"| {NETWORKS[cell['network']]} | {row['title']} | {row['passes_allowed']:g} "
            if "refused" in row:
                lines.append(f"{where}| refused: the last layer alone costs more | | |")
                continue
            lines.append(f"{where}| {row['nll']:.4f} | {_gain(row)} | {row.get('chosen', '')} |")
    return "\n".join([*lines, "", _measured(record, cells)])


def views(record: dict[str, Any]) -> str:
    """Draws on views against the plain network on the same views."""
    cells = _cells(record, "views")
    lines = [
        "| network | views | passes: plain, draws | plain + views + temperature | draws on views | gain | chosen |",
        "|---|---|---|---|---|---|---|",
    ]
    for cell in cells:
        for row in cell["found"]:
            lines.append(
                f"| {NETWORKS[cell['network']]} | {row['views']} | {row['rival_passes']}, {row['draws']} "
                f"| {row['rival_nll']:.4f} | {row['nll']:.4f} | {_gain(row)} | {row['chosen']} |"
            )
    return "\n".join([*lines, "", _measured(record, cells)])


def shift(record: dict[str, Any]) -> str:
    """NLL under corruption, by kind."""
    cells = _cells(record, "shift")
    kinds = list(cells[0]["found"]["corrupted"]["original"])
    lines = [
        f"| network | | clean | {' | '.join(kinds)} | mean of all | gain on temperature scaling |",
        "|---" * (5 + len(kinds)) + "|",
    ]
    for cell in cells:
        found = cell["found"]
        for name, scores in found["corrupted"].items():
            means = [statistics.fmean(scores[kind]) for kind in kinds]
            gain = _gain(found["gains"][name]) if name != "temperature scaling" else ""
            lines.append(
                f"| {NETWORKS[cell['network']]} | {name} | {found['clean'][name]['nll']:.3f} "
                f"| {' | '.join(f'{mean:.3f}' for mean in means)} | {statistics.fmean(means):.3f} | {gain} |"
            )
    return "\n".join([*lines, "", f"NLL, means over the severities 1 to 3. {_measured(record, cells)}"])


def telling(record: dict[str, Any]) -> str:
    """What is told by which score."""
    cells = _cells(record, "shift")
    lines = ["| network | score | unfamiliar, AUROC | errors, AUROC | risk-coverage, area |", "|---|---|---|---|---|"]
    for cell in cells:
        for name, row in cell["found"]["telling"].items():
            lines.append(
                f"| {NETWORKS[cell['network']]} | {name} | {row['ood_auroc']:.3f} | {row['error_auroc']:.3f} "
                f"| {row['aurc']:.4f} |"
            )
    return "\n".join([*lines, "", _measured(record, cells)])


#: By the name in a page: the record, and what makes the table of it.
TABLES: dict[str, tuple[str, Callable[[Any], str]]] = {
    "calibration_data": ("calibration_curves", data),
    "calibration_budget": ("calibration_curves", budget),
    "calibration_cost": ("calibration_curves", cost),
    "calibration_views": ("calibration_curves", views),
    "calibration_shift": ("calibration_curves", shift),
    "calibration_telling": ("calibration_curves", telling),
}
