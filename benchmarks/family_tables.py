"""Tables of the methods' page, from the records of benchmarks/family.py, gradient_variance.py and local_form.py."""

from typing import Any

_TITLES = {"yacht": "Yacht", "boston": "Boston", "concrete": "Concrete", "energy": "Energy"}


def family(records: list[dict[str, Any]]) -> str:
    """Images, then the regression sets, a row for each method."""
    by_name = {record["benchmark"]: record for record in records}
    parts = []
    if "family_fashion" in by_name:
        parts.append(_images(by_name["family_fashion"]))
    if "family_uci" in by_name:
        parts.append(_regression(by_name["family_uci"]))
    return "\n\n".join(parts)


def _images(record: dict[str, Any]) -> str:
    lines = [
        "| Fashion-MNIST, 2,000 images | accuracy | NLL | ECE | parameters | training step | prediction |",
        "|---" * 7 + "|",
    ]
    for title, row in record["rows"].items():
        lines.append(
            f"| {title.partition('/')[2]} | {100 * row['accuracy']:.1f} % | {_with_error(row)} | {100 * row['ece']:.1f} % "
            f"| {row['parameters']:,} | {_times(row)} |"
        )
    epochs = record["steps"] * record["batch"] / 2000
    return "\n".join(
        [
            *lines,
            "",
            f"Two hidden layers of 100 units with batch norm, about {epochs:.0f} epochs; {_seeds(record, 'seed')}; 1,000 "
            f"held-out images choose the number (with the first seed) and calibrate, 2,000 others score. {_command(record)}",
        ]
    )


def _regression(record: dict[str, Any]) -> str:
    rows = record["rows"]
    sets = [name for name in _TITLES if any(title.startswith(f"{name}/") for title in rows)]
    methods = list(dict.fromkeys(title.partition("/")[2] for title in rows))
    header = ["NLL (RMSE)", *(_TITLES[name] for name in sets), "90 % intervals hold", "training step", "prediction"]
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    for method in methods:
        found = [rows[f"{name}/{method}"] for name in sets]
        cells = [f"{_with_error(row, 2)} ({row['rmse']:.2f})" for row in found]
        mean = {
            key: sum(row[key] for row in found) / len(found) for key in ("coverage", "step_time", "prediction_time")
        }
        lines.append(f"| {method} | {' | '.join(cells)} | {100 * mean['coverage']:.0f} % | {_times(mean)} |")
    return "\n".join(
        [
            *lines,
            "",
            f"One hidden layer of 50 units with batch norm, {record['steps']} steps of {record['batch']} rows; "
            f"{_seeds(record, 'published split')}, a tenth of whose training part chooses the number and calibrates. "
            f"{_command(record)}",
        ]
    )


def probabilities(record: dict[str, Any]) -> str:
    """What learned p came to: the largest of each layer's five, of every split."""
    lines = ["| | layer | largest of five learned p (uniform: 0.20) | NLL |", "|---|---|---|---|"]
    for title, runs in record["runs"].items():
        name, _, method = title.partition("/")
        sites = runs[0]["probabilities"]
        for site in sites or ["-"]:
            largest = [max(run["probabilities"][site]) for run in runs] if sites else []
            text = ", ".join(f"{p:.3f}" for p in largest) or "-"
            nll = sum(run["test"]["nll"] for run in runs) / len(runs)
            lines.append(f"| {method}, {_TITLES[name]} | {site} | {text} | {nll:.2f} |")
    return "\n".join(
        [*lines, "", f"{_seeds(record, 'split').capitalize()}, {record['steps']} steps. {_command(record)}"]
    )


def gradient_variance(record: dict[str, Any]) -> str:
    lines = [
        "| estimate of the gradient of p | passes | variance, times that of single draws without a baseline |",
        "|---|---|---|",
    ]
    lines += [f"| {row['title']} | {row['passes']} | {row['relative']:.3g} |" for row in record["rows"]]
    return "\n".join([*lines, "", f"{record['repeats']:,} repeats, variance times passes. {_command(record)}"])


def _with_error(row: dict[str, Any], digits: int = 3) -> str:
    spread = f" ± {row['nll_error']:.{digits}f}" if row["nll_error"] else ""  # one seed has none
    return f"{row['nll']:.{digits}f}{spread}"


def _times(row: dict[str, Any]) -> str:
    return f"x {row['step_time']:.1f} | x {row['prediction_time']:.0f}"


def _seeds(record: dict[str, Any], what: str) -> str:
    number = len(record["numbers"])
    return f"mean of {number} {what}s ± standard error" if number > 1 else f"one {what}"


def _command(record: dict[str, Any]) -> str:
    return f"Command: `{record['command']}`, commit {record['commit']}."


def local_form(record: dict[str, Any]) -> str:
    """Drawn weights and drawn outputs, NLL and time."""
    lines = [
        "| network, layers | NLL, drawn weights | NLL, local form | gain | time, drawn weights | time, local form |",
        "|---" * 6 + "|",
    ]
    names = {"digits, smoothed": "digits", "head": "1,280 features to 1,000 classes"}
    for row in record["rows"]:
        both = [row[form] for form in ("weights", "local")]
        scores = [f"{one['nll']:.4f}" if "nll" in one else "" for one in both]
        gain = f"{row['gain']:+.4f} ± {row['gain_error']:.4f}" if "gain" in row else ""
        times = [f"{1000 * one['seconds']:.1f} ms" for one in both]
        seed = f", seed {row['seed']}" if "seed" in row else ""
        title = f"{names.get(row['network'], row['network'])}, {row['sites']}{seed}"
        lines.append(f"| {' | '.join([title, *scores, gain, *times])} |")
    machine = record["machine"]
    return "\n".join(
        [
            *lines,
            "",
            f"`Spread(5, {record['size']:g})`, temperatures fitted to held-out examples, 1,000 or half of them; NLL on others. "
            f"{record['draws']} draws, processor time of {record['batch']} inputs on {machine['processor']}, 1 thread; ± the "
            f"standard error of the paired gain. Commit {record['commit']}. Command: `{record['command']}`.",
        ]
    )
