"""The tables of docs/calibration.md, from results/calibration_curves.json and results/calibration_rivals.json."""

import statistics
from collections.abc import Callable
from typing import Any

_NETWORKS = {"fashion": "small_resnet, Fashion", "cifar_resnet20": "ResNet-20, CIFAR-100", "intents": "words, CLINC150"}


def _cells(record: dict[str, Any], curve: str) -> list[dict[str, Any]]:
    return [cell for cell in record["cells"] if cell["curve"] == curve]


def _gain(row: dict[str, Any]) -> str:
    return f"{row['gain']:+.4f} ± {row['gain_error']:.4f}" if "gain" in row else ""


def _measured(record: dict[str, Any], cells: list[dict[str, Any]]) -> str:
    scored = sorted({cell["scored"] for cell in cells})
    seeds = sorted({cell["seed"] for cell in cells})
    machine = record["machine"]
    return (
        f"{' or '.join(map(str, scored))} scored examples, seed {', '.join(map(str, seeds))}; ± the standard error of the "
        f"paired gain over them. On {machine['processor']}, {machine['threads']} thread, commit {record['commit']}. "
        "Command: `python benchmarks/calibration_curves.py`."
    )


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
                f"| {_NETWORKS[cell['network']]} | {row['held_out']:,} | {row['rival_nll']:.4f} | {row['nll']:.4f} "
                f"| {_gain(row)} | {row['chosen']} |"
            )
    return "\n".join([*lines, "", f"NLL, both fitted to the same examples. {_measured(record, cells)}"])


def budget(record: dict[str, Any]) -> str:
    """Quality against the budget."""
    cells = _cells(record, "budget")
    lines = ["| network | budget, passes | NLL | above ten times the default | CPU seconds |", "|---|---|---|---|---|"]
    for cell in cells:
        most = max(cell["found"], key=lambda row: row["budget"])
        for row in cell["found"]:
            lines.append(
                f"| {_NETWORKS[cell['network']]} | {row['budget']:,} | {row['nll']:.4f} | {row['nll'] - most['nll']:+.4f} "
                f"| {row['cpu_seconds']:.0f} |"
            )
    return "\n".join([*lines, "", _measured(record, cells)])


def cost(record: dict[str, Any]) -> str:
    """Quality against what all draws may cost."""
    cells = _cells(record, "cost")
    lines = [
        "| network | | passes allowed | NLL | gain on temperature scaling | chosen |",
        "|---|---|---|---|---|---|",
    ]
    for cell in cells:
        for row in cell["found"]:
            where = f"| {_NETWORKS[cell['network']]} | {row['title']} | {row['passes_allowed']:g} "
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
                f"| {_NETWORKS[cell['network']]} | {row['views']} | {row['rival_passes']}, {row['draws']} "
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
                f"| {_NETWORKS[cell['network']]} | {name} | {found['clean'][name]['nll']:.3f} "
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
                f"| {_NETWORKS[cell['network']]} | {name} | {row['ood_auroc']:.3f} | {row['error_auroc']:.3f} "
                f"| {row['aurc']:.4f} |"
            )
    return "\n".join([*lines, "", _measured(record, cells)])


def rivals(record: dict[str, Any]) -> str:
    """What else can be done to a trained network: mean over seeds, the paired gain on temperature scaling."""
    lines = [
        "| network | | NLL | gain on temperature scaling | ECE (floor) | accuracy | passes | training images | seeds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for network in dict.fromkeys(row["network"] for row in record["rows"]):
        own = [row for row in record["rows"] if row["network"] == network]
        for title in dict.fromkeys(row["title"] for row in own):
            rows = [row for row in own if row["title"] == title]
            mean = {key: statistics.fmean(row[key] for row in rows) for key in ("nll", "ece", "ece_floor", "accuracy")}
            gain = statistics.fmean(row["gain"] for row in rows)
            error = statistics.fmean(row["gain_error"] for row in rows)
            name = f"`{title}`" if title == "bayesianize_" else title
            lines.append(
                f"| {_NETWORKS[network]} | {name} | {mean['nll']:.4f} "
                f"| {'' if title == 'temperature scaling' else f'{gain:+.4f} ± {error:.4f}'} | {100 * mean['ece']:.1f} % "
                f"({100 * mean['ece_floor']:.1f} %) | {100 * mean['accuracy']:.1f} % | {rows[0]['passes']:g} "
                f"| {rows[0]['trained_on']:,} | {len(rows)} |"
            )
    shares = [row["patch_share"] for row in record["rows"] if "patch_share" in row]
    scored = sorted({row["scored"] for row in record["rows"]})
    machine = record["machine"]
    lines += [
        "",
        "1,500 held-out images choose and calibrate, "
        f"{' or '.join(map(str, scored))} others are scored; every rival has a temperature of its own. ± the standard error "
        "of the paired gain over the images (its mean over the seeds). Rivals that train see some training images once. The "
        f"patches of `bayesianize_` take {100 * min(shares):.0f} to {100 * max(shares):.0f} % of the network. "
        f"On {machine['processor']}, {machine['threads']} thread, commit {record['commit']}. "
        "Command: `python benchmarks/bayesianize.py --rivals`.",
    ]
    return "\n".join(lines)


#: By the name in a page: the record, and what makes the table of it.
TABLES: dict[str, tuple[str, Callable[[Any], str]]] = {
    "calibration_data": ("calibration_curves", data),
    "calibration_budget": ("calibration_curves", budget),
    "calibration_cost": ("calibration_curves", cost),
    "calibration_views": ("calibration_curves", views),
    "calibration_shift": ("calibration_curves", shift),
    "calibration_telling": ("calibration_curves", telling),
    "calibration_rivals": ("calibration_rivals", rivals),
}
