"""Write the measured tables of README.md and docs from the records in results: python benchmarks/readme_tables.py [--check]"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import calibration_tables
import scaling_tables
from engine_tables import (
    NAMES,
    before_after,
    capture,
    circumstances,
    early_stopping,
    first_call,
    large,
    resident,
    serving,
)
from family_tables import family, gradient_variance, local_form, probabilities
from integration_tables import matrix, selective, sklearn_sets
from regime_tables import before_and_after, ensembles, front, regimes

ROOT = Path(__file__).resolve().parent.parent


def training_overhead(record: dict[str, Any]) -> str:
    lines = [
        "| batch | method | step, times unpatched (quartiles) | peak memory, times unpatched | parameters, times unpatched |",
        "|---|---|---|---|---|",
    ]
    for batch, rows in record["batches"].items():
        for name, row in rows.items():
            if name != "vanilla":
                low, high = row["ratio_quartiles"]
                lines.append(
                    f"| {batch} | {name if name == 'dropout' else name.upper()} "
                    f"| {row['ratio']:.3f} ({low:.3f}-{high:.3f}) "
                    f"| {row['memory_ratio']:.3f} | {row['parameter_ratio']:.3f} |"
                )
    machine = record["machine"]
    lines += [
        "",
        "A training step of a ResNet-18 (CIFAR stem, 100 classes, SGD with momentum), norm and output patched, K = 5; dropout "
        f"before every norm layer. Median of {record['rounds']} rounds on {machine['processor']}, "
        f"{machine['threads']} threads, torch {record['versions']['torch']}, commit {record['commit']}. "
        "Command: `python benchmarks/training_overhead.py`.",
    ]
    return "\n".join(lines)


def prediction(record: dict[str, Any]) -> str:
    lines = [
        "| network, batch 8, S = 200 | patched | method | S unpatched passes | plain loop | engine, same draws | engine / loop "
        "(quartiles) | engine / arithmetic floor | time to the loop's Monte-Carlo error |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for cell in record["cells"]:
        if cell["draws"] == 200 and cell["batch"] == 8:
            mark = "~" if cell["scaled"] else ""
            seconds = " | ".join(f"{mark}{cell[column]:.3g} s" for column in ("unpatched", "loop", "engine"))
            sites = "last block, output" if cell["sites"] == "last" else "norm, output"
            low, high = cell["ratio_quartiles"]
            lines.append(
                f"| {NAMES[cell['network']]} | {sites} | {cell['method'].upper()} | {seconds} "
                f"| {cell['ratio']:.3f} ({low:.3f}-{high:.3f}) | {cell['floor_ratio']:.2f} "
                f"| {cell['to_error']:.3f} of the loop's |"
            )
    worst = max(record["cells"], key=lambda cell: cell["ratio"])
    rounds = min(cell["rounds"] for cell in record["cells"])
    count = sum(cell["ratio"] > 1.05 for cell in record["cells"])
    lines += [
        "",
        f"One process, untrained weights, seed 0, median of at least {rounds} rounds, {circumstances(record)}; ~ marks times "
        "scaled up from at least 10 draws, the loop's by draws, the engine's by its counted arithmetic. The floor is that "
        f"arithmetic at the speed of the unpatched network. Of all {len(record['cells'])} cells (batch 1, 8, 64; S = 1, 20, "
        f"200) {count} are above 1.05 times the loop, the worst ({NAMES[worst['network']]}, {worst['method'].upper()}, batch "
        f"{worst['batch']}, S = {worst['draws']}) at {worst['ratio']:.2f}. {_uci(record)} Command: `{record['command']}`.",
    ]
    return "\n".join(lines)


def _uci(record: dict[str, Any]) -> str:
    row = record["uci"][-1]
    return (
        f"The regression network of the UCI sets, both norms patched with EMP, batch {row['batch']}: all {row['networks']} "
        f"networks take {1000 * row['exact']:.2g} ms, a loop of {row['loop_draws']} draws {1 / row['ratio']:.0f} times as "
        f"long, of the paper's {row['paper_draws']:,} (extrapolated) {1 / row['paper_ratio']:,.0f} times."
    )


def prediction_targets(record: dict[str, Any]) -> str:
    """What was aimed at, in how many cells it was reached, and the worst cell of each kind."""
    cells = record["cells"]
    many = [cell for cell in cells if cell["draws"] == 200]
    last = [cell for cell in many if cell["sites"] == "last"]
    lines = ["| aim | cells | reached | median | worst |", "|---|---|---|---|---|"]
    for aim, some, value, limit in (
        ("engine / loop <= 1.05, same draws", cells, lambda c: c["ratio"], 1.05),
        ("engine / arithmetic floor <= 1.05, S = 200", many, lambda c: c["floor_ratio"], 1.05),
        (
            "the same without the MLP",
            [cell for cell in many if cell["network"] != "mlp"],
            lambda c: c["floor_ratio"],
            1.05,
        ),
        ("time to the loop's error at S = 200 <= 1/5", many, lambda c: c["to_error"], 0.2),
        (
            "last block, S = 200: engine / S unpatched passes <= 0.35",
            last,
            lambda c: c["engine"] / c["unpatched"],
            0.35,
        ),
    ):
        values = [value(cell) for cell in some]
        worst = some[values.index(max(values))]
        lines.append(
            f"| {aim} | {len(some)} | {sum(v <= limit for v in values)} | {statistics.median(values):.3f} "
            f"| {max(values):.3f} ({_where(worst)}) |"
        )
    rates = [1 / row["ratio"] for row in record["uci"]]
    lines.append(
        f"| regression network: 100 times faster than a loop of 200 | {len(rates)} | {sum(rate >= 100 for rate in rates)} "
        f"| {statistics.median(rates):.0f} | {min(rates):.0f} |"
    )
    return "\n".join([*lines, "", f"Measured {circumstances(record)}. Command: `{record['command']}`."])


def _where(cell: dict[str, Any]) -> str:
    sites = "last block, output" if cell["sites"] == "last" else "norm, output"
    return f"{NAMES[cell['network']]}, {sites}, {cell['method'].upper()}, batch {cell['batch']}, S = {cell['draws']}"


def prediction_grid(record: dict[str, Any]) -> str:
    """All cells."""
    lines = [
        "| network | patched | method | batch | S | S unpatched passes, s | loop, s | engine, s | engine / loop (quartiles) "
        "| arithmetic | engine / floor | to the loop's error |",
        "|---" * 12 + "|",
    ]
    for cell in record["cells"]:
        mark = "~" if cell["scaled"] else ""
        seconds = " | ".join(f"{mark}{cell[column]:.3g}" for column in ("unpatched", "loop", "engine"))
        low, high = cell["ratio_quartiles"]
        sites = "last block, output" if cell["sites"] == "last" else "norm, output"
        lines.append(
            f"| {NAMES[cell['network']]} | {sites} | {cell['method'].upper()} | {cell['batch']} | {cell['draws']} | {seconds} "
            f"| {cell['ratio']:.3f} ({low:.3f}-{high:.3f}) | {cell['work']:.3f} | {cell['floor_ratio']:.2f} "
            f"| {format(cell['to_error'], '.3f') if 'to_error' in cell else ''} |"
        )
    return "\n".join(lines)


def prediction_profile(record: dict[str, Any]) -> str:
    """Where the time goes."""
    kinds = sorted(
        {kind for row in record["rows"] for name in ("engine", "floor") for kind in row[name]} - {"milliseconds"}
    )
    lines = [
        "| network, patched, method | | profiled ms | " + " | ".join(kinds) + " |",
        "|---" * (3 + len(kinds)) + "|",
    ]
    for row in record["rows"]:
        sites = "last block, output" if row["sites"] == "last" else "norm, output"
        where = f"{NAMES[row['network']]}, {sites}, {row['method'].upper()}"
        for name, title in (("engine", f"{row['draws']} draws"), ("floor", f"{row['floor_passes']} unpatched passes")):
            cells = [f"{100 * row[name].get(kind, 0):.0f} %" for kind in kinds]
            lines.append(f"| {where} | {title} | {row[name]['milliseconds']:.3g} | {' | '.join(cells)} |")
    return "\n".join(
        [*lines, "", f"Batch {record['rows'][0]['batch']}, {circumstances(record)}. Command: `{record['command']}`."]
    )


def rivals(record: dict[str, Any]) -> str:
    rows = record["rivals"]
    numbers = sorted({row["draws"] for row in rows})
    networks = list(dict.fromkeys(row["network"] for row in rows))
    lines = [
        "| S draws in units of S unpatched passes | " + " | ".join(NAMES[network] for network in networks) + " |",
        "|---" * (1 + len(networks)) + "|",
    ]
    for name in dict.fromkeys(row["name"] for row in rows):
        mine = {(row["network"], row["draws"]): row for row in rows if row["name"] == name}
        cells = [", ".join(_times(mine[network, number]) for number in numbers) for network in networks]
        version = next(iter(mine.values()))["version"] or "not installed"
        lines.append(f"| {name} ({version}) | {' | '.join(cells)} |")
    reasons = {row["name"]: row["unavailable"] for row in rows if "unavailable" in row}
    lines += [
        "",
        f"Batch {rows[0]['batch']}, S = {' and '.join(str(number) for number in numbers)}, same networks and run as above; ~ "
        "marks times scaled up from at least 10 draws. Times alone: the methods are uncertain about different weights. Of the "
        "last-layer Laplace approximation a patched output layer is the like."
        + "".join(f" {name}: {reason}." for name, reason in reasons.items()),
    ]
    return "\n".join(lines)


def _times(row: dict[str, Any]) -> str:
    if "unavailable" in row:
        return "none"
    return f"{'~' if row['scaled'] else ''}{row['times_unpatched']:.2g}"


def bayesianize(records: list[dict[str, Any]]) -> str:
    """Scores of the public CIFAR-100 networks: mean over seeds, and the largest distance from it."""
    lines = ["| network | | NLL | ECE (floor) | accuracy |", "|---|---|---|---|---|"]
    for network in dict.fromkeys(_network(record) for record in records):
        own = [record for record in records if _network(record) == network]
        shared = [title for title in own[0]["rows"] if all(title in record["rows"] for record in own)]
        for title in shared:
            rows = [record["rows"][title] for record in own]
            floor = statistics.fmean(row["ece_floor"] for row in rows)
            cells = [
                _mean_and_reach([row["nll"] for row in rows], 4, ""),
                f"{_mean_and_reach([100 * row['ece'] for row in rows], 2, ' %')} ({100 * floor:.2f} %)",
                _mean_and_reach([100 * row["accuracy"] for row in rows], 2, " %"),
            ]
            lines.append(f"| {network} | {title} | {' | '.join(cells)} |")
    seeds = ", ".join(str(seed) for seed in sorted({record["seed"] for record in records}))
    minutes = ", ".join(f"{record['seconds']['all'] / 60:.0f}" for record in records)
    passes = max(record["passes"]["learning"] for record in records)
    scoring = max(record["passes"]["scoring"] for record in records)
    sizes = {_network(record): record["patch_file_bytes"] / record["model_bytes"] for record in records}
    share = " and ".join(f"{100 * size:.1f} % ({name})" for name, size in sizes.items())
    lines += [
        "",
        "CIFAR-100, networks trained by others; of the test images 0-4999, 1,500 by chance choose spread and temperatures (the "
        "temperature of the original is fitted to all 5,000), 5000-9999 are "
        f"scored. Mean over the seeds {seeds}, ± the largest distance from it; the floor "
        "is what a perfectly calibrated network would score by chance. The patch file has the size of "
        f"{share} of the network. At most {passes:,} image-passes to choose and {scoring:,} for the last scores; one core, "
        f"shared with much other work, {minutes} minutes; {circumstances(records[0])}. "
        "Command: `python benchmarks/bayesianize.py`.",
    ]
    return "\n".join(lines)


def trained(records: list[dict[str, Any]]) -> str:
    """One sentence: NLL of the public CIFAR-100 networks, with a temperature alone and with draws."""
    parts = []
    for network in dict.fromkeys(_network(record) for record in records):
        rows = [record["rows"] for record in records if _network(record) == network]
        before, after = (
            statistics.fmean(row[title]["nll"] for row in rows) for title in ("temperature", "bayesianized S=20")
        )
        parts.append(f"{before:.3f} to {after:.3f} ({network.replace('resnet', 'ResNet-')})")
    seeds = len({record["seed"] for record in records})
    return f"NLL on CIFAR-100, from temperature scaling to this: {', '.join(parts)}; {seeds} seeds ([guide](docs/guide.md))."


def pairs(record: dict[str, Any]) -> str:
    """Small networks of many kinds: NLL on fresh data, mean over seeds, and the gain with its paired standard error."""
    lines = [
        "| network and data | best temperature | original | temperature scaling | `bayesianize_` | gain | chosen |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, rows in record["rows"].items():
        nll = [f"{statistics.fmean(row['nll'][kind] for row in rows):.4f}" for kind in rows[0]["nll"]]
        gain = statistics.fmean(row["gain"] for row in rows)
        error = statistics.fmean(row["gain_error"] ** 2 for row in rows) ** 0.5 / len(rows) ** 0.5
        temperature = statistics.fmean(row["temperature"] for row in rows)
        chosen = ", ".join(row["chosen"] for row in rows)
        lines.append(f"| {name} | {temperature:.2f} | {' | '.join(nll)} | {gain:.4f} ± {error:.4f} | {chosen} |")
    seeds = ", ".join(str(seed) for seed in sorted({row["seed"] for rows in record["rows"].values() for row in rows}))
    return "\n".join(
        [
            *lines,
            "",
            f"NLL on data that neither has seen, mean over the seeds {seeds} (of the training too), ± the standard error of "
            f"the paired gain. Measured {circumstances(record)}. Command: `{record['command']}`.",
        ]
    )


def from_scratch(records: list[dict[str, Any]]) -> str:
    """Variants of training at equal epochs: mean over seeds and the largest distance from it."""
    lines = [
        "| data, epochs, seeds | variant | accuracy | NLL | ECE | mutual information |",
        "|---|---|---|---|---|---|",
    ]
    for record in records:
        settings = record["settings"]
        where = f"{settings['data']}, {settings['epochs']}, {', '.join(map(str, settings['seeds']))}"
        for name, rows in record["rows"].items():
            cells = [
                _mean_and_reach([100 * row["accuracy"] for row in rows], 2, " %"),
                _mean_and_reach([row["nll"] for row in rows], 4, ""),
                _mean_and_reach([100 * row["ece"] for row in rows], 2, " %"),
                _mean_and_reach([row["mutual_information"] for row in rows], 4, ""),
            ]
            lines.append(f"| {where} | {name} | {' | '.join(cells)} |")
    commands = "; ".join(f"`{record['command']}` (commit {record['commit']})" for record in records)
    return "\n".join(
        [*lines, "", f"`small_cnn`, 20 draws, mean over seeds ± the largest distance from it. Commands: {commands}."]
    )


def _network(record: dict[str, Any]) -> str:
    """By the record's name."""
    return str(record["benchmark"].removeprefix("bayesianize_cifar_").partition("_seed")[0])


def _mean_and_reach(values: list[float], digits: int, unit: str) -> str:
    mean = statistics.fmean(values)
    reach = max(abs(value - mean) for value in values)
    return f"{mean:.{digits}f}{unit}" + (f" ± {reach:.{digits}f}" if reach else "")


#: Pages with tables, and the tables that they can hold with the record each is made from.
PAGES = (
    "README.md",
    "docs/calibration.md",
    "docs/costs.md",
    "docs/decisions.md",
    "docs/devices.md",
    "docs/guide.md",
    "docs/integrations.md",
    "docs/methods.md",
    "docs/prediction.md",
    "docs/training.md",
)
TABLES: dict[str, tuple[str, Callable[[Any], str]]] = {
    "bayesianize": ("bayesianize_*_seed?", bayesianize),
    "trained": ("bayesianize_*_seed?", trained),
    "pairs": ("pairs", pairs),
    "front": ("regime_fashion", front),
    "regimes": ("regime_*", regimes),
    "ensembles": ("ensemble_*", ensembles),
    "from_scratch": ("from_scratch_*", from_scratch),
    "training_overhead": ("training_overhead", training_overhead),
    "prediction": ("prediction", prediction),
    "prediction_targets": ("prediction", prediction_targets),
    "prediction_grid": ("prediction", prediction_grid),
    "prediction_profile": ("prediction_profile", prediction_profile),
    "rivals": ("prediction", rivals),
    "early_stopping": ("early_stopping", early_stopping),
    "serving": ("serving", serving),
    "capture": ("capture", capture),
    "before_after": ("before_after", before_after),
    "large": ("prediction_bert_head", large),
    "resident": ("resident", resident),
    **calibration_tables.TABLES,
    "family": ("family_[fu]*", family),
    "probabilities": ("family_probabilities", probabilities),
    "gradient_variance": ("gradient_variance", gradient_variance),
    "local_form": ("local_form", local_form),
    "scaling_steps": ("scaling", scaling_tables.steps),
    "scaling_time": ("scaling", scaling_tables.time_to_objective),
    "scaling_exchange": ("scaling", scaling_tables.exchange),
    "scaling_two": ("scaling", scaling_tables.two_processes),
    "scaling_ranks": ("scaling", scaling_tables.many_ranks),
    "sklearn_sets": ("sklearn_sets", sklearn_sets),
    "selective": ("sklearn_sets", selective),
    "matrix": ("matrix", matrix),
    "first_call": ("first_call", first_call),
}


#: Pictures, and the record that each is made from.
PICTURES: dict[str, tuple[str, Callable[[Any], str]]] = {
    "docs/figures/reliability.svg": ("regime_fashion", before_and_after)
}


def render(text: str, results: Path = ROOT / "results") -> str:
    """The text of a page with every table that it holds made anew from its record."""
    for name, (record, table) in TABLES.items():
        start, end = f"<!-- table: {name} -->\n", "<!-- end table -->"
        if start in text:
            found = [json.loads(path.read_text()) for path in sorted(results.glob(f"{record}.json"))]
            content = found if "*" in record else found[0]
            before, _, rest = text.partition(start)
            text = f"{before}{start}{table(content)}\n{end}{rest.partition(end)[2]}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only say whether README.md is up to date")
    check = parser.parse_args().check
    pages = {ROOT / page: render((ROOT / page).read_text()) for page in PAGES}
    for picture, (record, draw) in PICTURES.items():
        pages[ROOT / picture] = draw(json.loads((ROOT / "results" / f"{record}.json").read_text()))
    for path, after in pages.items():
        before = path.read_text() if path.exists() else ""
        if check and before != after:
            sys.exit(f"{path.name} differs from the records: run python benchmarks/readme_tables.py")
        if not check:
            path.write_text(after)


if __name__ == "__main__":
    main()
