"""Tables of what can be done to a trained network: `bayesianize_`, views, rivals, pairs of network and data, a large head."""

import statistics
from collections.abc import Callable
from typing import Any

from calibration_tables import NETWORKS, commits
from engine_tables import circumstances

#: A gain that is nothing but rounding has an error below this.
_ROUNDING = 1e-6


def bayesianize(records: list[dict[str, Any]]) -> str:
    """Scores of the public CIFAR-100 networks: mean over seeds, and the largest distance from it."""
    lines = ["| network | | NLL | ECE (floor) | accuracy |", "|---|---|---|---|---|"]
    times = []
    for network in dict.fromkeys(record["network"] for record in records):
        own = [record for record in records if record["network"] == network]
        shared = [title for title in own[0]["rows"] if all(title in record["rows"] for record in own)]
        for title in shared:
            rows = [record["rows"][title] for record in own]
            floor = statistics.fmean(row["ece_floor"] for row in rows)
            cells = [
                mean_and_reach([row["nll"] for row in rows], 4, ""),
                f"{mean_and_reach([100 * row['ece'] for row in rows], 2, ' %')} ({100 * floor:.2f} %)",
                mean_and_reach([100 * row["accuracy"] for row in rows], 2, " %"),
            ]
            lines.append(f"| {NETWORKS[network]} | {title} | {' | '.join(cells)} |")
        seconds = [record["rows"][_drawn(record)]["cpu_seconds"] for record in own]
        ratios = [value / record["epoch_cpu_seconds"] for value, record in zip(seconds, own, strict=True)]
        times.append(
            f"{statistics.fmean(seconds):.0f} s, {min(ratios):.2f} to {max(ratios):.2f} of an epoch of ordinary training, "
            f"and a patch file of {100 * own[0]['patch_file_bytes'] / own[0]['model_bytes']:.1f} % of the network "
            f"({NETWORKS[network].partition(',')[0]})"
        )
    seeds = ", ".join(str(seed) for seed in sorted({record["seed"] for record in records}))
    lines += [
        "",
        "`bayesianize_` as it is by default: no training, no views. Of the test images 0-4999, "
        f"{records[0]['settings']['examples']:,} at random choose spread "
        "and temperatures (the rival's temperature is fitted to all 5,000); 5000-9999 are scored. Mean over the seeds "
        f"{seeds}, ± the largest distance from it; the floor is what a perfectly calibrated network scores by chance. It "
        f"takes, in time of the processor, {'; '.join(times)}. Measured {_where(records)}. Command: "
        "`python benchmarks/bayesianize.py`.",
    ]
    return "\n".join(lines)


def _drawn(record: dict[str, Any]) -> str:
    return next(title for title in record["rows"] if title.startswith("bayesianized"))


def _where(records: list[dict[str, Any]]) -> str:
    machine = records[0]["machine"]
    return f"on {machine['processor']}, {machine['threads']} thread, {commits(records)}"


def trained(records: list[dict[str, Any]]) -> str:
    """One sentence: NLL of the public CIFAR-100 networks, with a temperature alone and with draws."""
    parts = []
    for network in dict.fromkeys(record["network"] for record in records):
        rows = [record["rows"] for record in records if record["network"] == network]
        before, after = (
            statistics.fmean(row[title]["nll"] for row in rows) for title in ("temperature", "bayesianized S=20")
        )
        parts.append(f"{before:.3f} to {after:.3f} ({NETWORKS[network].partition(',')[0]})")
    seeds = len({record["seed"] for record in records})
    found = f"{', '.join(parts)}; {seeds} seeds ([guide](docs/guide.md))"
    return f"NLL on CIFAR-100, temperature scaling → `bayesianize_`: {found}."


def on_views(record: dict[str, Any]) -> str:
    """Draws on ten views against the plain network on the same views, for each network and seed."""
    lines = [
        "| network | seed | plain, ten views, + temperature | `bayesianize_`, a draw on each view | gain | ECE (floor) "
        "| accuracy: plain, draws |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in record["rows"]:
        plain, drawn = one["plain"], one["bayesianized"]
        lines.append(
            f"| {NETWORKS[one['network']]} | {one['seed']} | {plain['nll']:.4f} | {drawn['nll']:.4f} | {_gain([drawn])} "
            f"| {100 * drawn['ece']:.1f} % ({100 * drawn['ece_floor']:.1f} %) "
            f"| {100 * plain['accuracy']:.2f} %, {100 * drawn['accuracy']:.2f} % |"
        )
    images = {one["network"]: one["images"] for one in record["rows"]}
    scored = ", ".join(
        f"{number:,} scored images ({NETWORKS[name].partition(',')[0]})" for name, number in images.items()
    )
    return "\n".join(
        [
            *lines,
            "",
            f"NLL at ten passes each, {scored}; both fitted to the same {record['rows'][0]['held_out']:,} held-out images. "
            f"± the standard error of the paired gain. Measured {circumstances(record)}. Command: "
            "`python benchmarks/bayesianize.py --views`.",
        ]
    )


def pairs(record: dict[str, Any]) -> str:
    """Small networks of many kinds: NLL on fresh data, mean over seeds, and the gain with its paired standard error."""
    lines = [
        "| network and data | seeds | best temperature | original | temperature scaling | `bayesianize_` | gain | chosen |",
        "|---|---|---|---|---|---|---|---|",
    ]
    means: list[list[float]] = []
    errors: dict[str, float] = {}
    for name, rows in record["rows"].items():
        means.append([statistics.fmean(row["nll"][kind] for row in rows) for kind in rows[0]["nll"]])
        temperature = statistics.fmean(row["temperature"] for row in rows)
        chosen = ", ".join(row["chosen"] for row in rows)
        nll = " | ".join(f"{value:.4f}" for value in means[-1])
        lines.append(f"| {name} | {len(rows)} | {temperature:.2f} | {nll} | {_gain(rows)} | {chosen} |")
        for row in rows:
            errors[f"{name}, seed {row['seed']}"] = row["gain"] / max(row["gain_error"], _ROUNDING)
    nll = [statistics.fmean(column) for column in zip(*means, strict=True)]
    lines.append(f"| mean of all | | | {' | '.join(f'{value:.4f}' for value in nll)} | {nll[1] - nll[2]:+.4f} | |")
    worst = min(errors, key=lambda one: errors[one])
    behind = [one for one, value in errors.items() if value < -2]
    number = sum(len(rows) for rows in record["rows"].values())
    measured = [row for rows in record["rows"].values() for row in rows]
    machine = record["machine"]
    lines += [
        "",
        "NLL on data that neither has seen, mean over the seeds (of the training too), ± the standard error of the paired "
        f"gain of one seed. Of {number} runs, {len(behind)} are behind temperature scaling by more than two standard "
        f"errors; the worst is at {errors[worst]:+.1f} ({worst}). Measured on {machine['processor']}, {machine['threads']} "
        f"thread, {commits(measured)}. Command: `python benchmarks/pairs.py`.",
    ]
    return "\n".join(lines)


def rivals(record: dict[str, Any]) -> str:
    """What else can be done to a trained network: mean over seeds, the paired gain on temperature scaling; best first."""
    lines = [
        "| network | | NLL | gain on temperature scaling | ECE (floor) | accuracy | passes | training images | seeds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    counts = []
    for network in dict.fromkeys(row["network"] for row in record["rows"]):
        own = [row for row in record["rows"] if row["network"] == network]
        counts.append(f"{own[0]['scored']:,} ({NETWORKS[network].partition(',')[0]})")
        found: list[tuple[float, str]] = []
        for title in dict.fromkeys(row["title"] for row in own):
            rows = [row for row in own if row["title"] == title]
            mean = {key: statistics.fmean(row[key] for row in rows) for key in ("nll", "ece", "ece_floor", "accuracy")}
            line = (
                f"| {NETWORKS[network]} | {title.replace('bayesianize_', '`bayesianize_`')} | {mean['nll']:.4f} "
                f"| {'' if title == 'temperature scaling' else _gain(rows)} | {100 * mean['ece']:.1f} % "
                f"({100 * mean['ece_floor']:.1f} %) | {100 * mean['accuracy']:.1f} % | {rows[0]['passes']:g} "
                f"| {rows[0]['trained_on']:,} | {len(rows)} |"
            )
            found.append((mean["nll"], line))
        lines += [line for _, line in sorted(found, key=lambda one: one[0])]
    shares = [row["patch_share"] for row in record["rows"] if "patch_share" in row]
    machine = record["machine"]
    lines += [
        "",
        f"1,500 held-out images choose and calibrate; others are scored: {', '.join(counts)}. Every rival has a temperature of "
        "its own. ± the standard error of the paired gain over the images. Rivals that train see some training images once. "
        f"The patches of `bayesianize_` take {100 * min(shares):.0f} to {100 * max(shares):.0f} % of the network. "
        f"On {machine['processor']}, {machine['threads']} thread, {commits(record['rows'])}. "
        "Command: `python benchmarks/bayesianize.py --rivals`.",
    ]
    return "\n".join(lines)


def large_head(record: dict[str, Any]) -> str:
    """NLL and size of patches of a head of 1,000 classes."""
    lines = [
        "| the patch | NLL | gain on temperature scaling | ECE (floor) | size, of the network | chosen |",
        "|---|---|---|---|---|---|",
    ]
    for title in dict.fromkeys(row["title"] for row in record["rows"]):
        rows = [row for row in record["rows"] if row["title"] == title]
        mean = {key: statistics.fmean(row[key] for row in rows) for key in ("nll", "ece", "ece_floor")}
        size = f"{100 * rows[0]['patch_bytes'] / rows[0]['model_bytes']:,.0f} %" if "patch_bytes" in rows[0] else ""
        lines.append(
            f"| {title} | {mean['nll']:.4f} | {_gain(rows) if 'gain' in rows[0] else ''} | {100 * mean['ece']:.1f} % "
            f"({100 * mean['ece_floor']:.1f} %) | {size} | {', '.join(row['chosen'] for row in rows if 'chosen' in row)} |"
        )
    seeds = len({row["seed"] for row in record["rows"]})
    return "\n".join(
        [
            *lines,
            "",
            f"{record['held_out']:,} held-out images, {record['scored']:,} scored, {record['draws']} draws, mean of {seeds} "
            f"seeds, ± the standard error of the paired gain. Measured {circumstances(record)}. "
            f"Command: `{record['command']}`.",
        ]
    )


def _gain(rows: list[dict[str, Any]]) -> str:
    """The mean paired gain of several seeds on the same images, and its error over these: not smaller for more seeds."""
    error = statistics.fmean(row["gain_error"] for row in rows)
    return f"{statistics.fmean(row['gain'] for row in rows):+.4f} ± {error:.4f}"


def mean_and_reach(values: list[float], digits: int, unit: str) -> str:
    mean = statistics.fmean(values)
    reach = max(abs(value - mean) for value in values)
    return f"{mean:.{digits}f}{unit}" + (f" ± {reach:.{digits}f}" if reach else "")


#: By the name in a page: the record or records, and what makes the table of them.
TABLES: dict[str, tuple[str, Callable[[Any], str]]] = {
    "bayesianize": ("bayesianize_*_seed?", bayesianize),
    "trained": ("bayesianize_*_seed?", trained),
    "bayesianize_views": ("bayesianize_views", on_views),
    "pairs": ("pairs", pairs),
    "calibration_rivals": ("calibration_rivals", rivals),
    "large_head": ("large_head", large_head),
}
