"""Write the measured tables of README.md and docs from the records in results: python benchmarks/readme_tables.py [--check]"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import calibration_tables
import scaling_tables
import trained_tables
from engine_tables import (
    NAMES,
    before_after,
    before_after_cells,
    capture,
    circumstances,
    early_stopping,
    export_time,
    first_call,
    large,
    resident,
    serving,
)
from family_tables import family, gradient_variance, local_form, probabilities
from integration_tables import matrix, selective, sklearn_sets
from regime_tables import before_and_after, ensembles, front, own_loop, regimes

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
    lines += [
        "",
        "A training step of a ResNet-18 (CIFAR stem, 100 classes, SGD with momentum), norm and output patched, K = 5; dropout "
        f"before every norm layer. Median of {record['rounds']} rounds, {circumstances(record)}. "
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
        f"arithmetic at the speed of the unpatched network. Of all {len(record['cells'])} cells (batch "
        f"{_numbers(record, 'batch')}; S = {_numbers(record, 'draws')}) {count} are above 1.05 times the loop, the worst "
        f"({NAMES[worst['network']]}, {worst['method'].upper()}, batch "
        f"{worst['batch']}, S = {worst['draws']}) at {worst['ratio']:.2f}. {_uci(record)} Command: `{record['command']}`.",
    ]
    return "\n".join(lines)


def _numbers(record: dict[str, Any], name: str) -> str:
    return ", ".join(str(number) for number in sorted({cell[name] for cell in record["cells"]}))


def _uci(record: dict[str, Any]) -> str:
    row = record["uci"][-1]
    return (
        f"The regression network of the UCI sets, both norms patched with EMP, batch {row['batch']}: all {row['networks']} "
        f"networks take {1000 * row['exact']:.2g} ms, a loop of {row['loop_draws']} draws {1 / row['ratio']:.0f} times as "
        f"long, of the paper's {row['paper_draws']:,} (extrapolated) {1 / row['paper_ratio']:,.0f} times."
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


#: The record of `prediction.py` that pages show: not the complete run, which takes hours.
PREDICTION = "prediction_mlp_resnet20_8_20_200_grid_uci_rivals"
#: Pages with tables, and the tables that they can hold with the record each is made from.
PAGES = (
    "README.md",
    "docs/calibration.md",
    "docs/costs.md",
    "docs/decisions.md",
    "docs/devices.md",
    "docs/export.md",
    "docs/guide.md",
    "docs/integrations.md",
    "docs/methods.md",
    "docs/prediction.md",
    "docs/training.md",
)
TABLES: dict[str, tuple[str, Callable[[Any], str]]] = {
    "front": ("regime_fashion", front),
    "regimes": ("regime_*", regimes),
    "ensembles": ("ensemble_*", ensembles),
    "own_loop": ("own_loop", own_loop),
    "training_overhead": ("training_overhead", training_overhead),
    "prediction": (PREDICTION, prediction),
    "rivals": (PREDICTION, rivals),
    "early_stopping": ("early_stopping", early_stopping),
    "serving": ("serving", serving),
    "capture": ("capture", capture),
    "before_after": ("before_after", before_after),
    "before_after_cells": ("before_after", before_after_cells),
    "large": ("prediction_bert_head", large),
    "resident": ("resident", resident),
    **calibration_tables.TABLES,
    **trained_tables.TABLES,
    "family": ("family_[fu]*", family),
    "probabilities": ("family_probabilities", probabilities),
    "gradient_variance": ("gradient_variance", gradient_variance),
    "local_form": ("local_form", local_form),
    "scaling_steps": ("scaling", scaling_tables.steps),
    "scaling_time": ("scaling", scaling_tables.time_to_objective),
    "scaling_real": ("scaling", scaling_tables.real_runs),
    "scaling_exchange": ("scaling", scaling_tables.exchange),
    "scaling_two": ("scaling", scaling_tables.two_processes),
    "scaling_ranks": ("scaling", scaling_tables.many_ranks),
    "sklearn_sets": ("sklearn_sets", sklearn_sets),
    "selective": ("sklearn_sets", selective),
    "matrix": ("matrix", matrix),
    "first_call": ("first_call", first_call),
    "export_time": ("export_time", export_time),
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
            made = table(found if "*" in record else found[0]) if found else f"No record `results/{record}.json` yet."
            before, _, rest = text.partition(start)
            text = f"{before}{start}{made}\n{end}{rest.partition(end)[2]}"
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
