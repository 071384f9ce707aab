"""Write the measured tables of README.md from the records in results/: python benchmarks/readme_tables.py [--check]"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
    names = {"mlp": "MLP 2x50", "resnet20": "ResNet-20, 32 px", "resnet18": "ResNet-18, 32 px"}
    lines = [
        "| network, batch 8, S = 200 | patched | method | S unpatched passes | plain loop | engine, same draws | engine / loop "
        "| time to the loop's Monte-Carlo error |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for cell in record["cells"]:
        if cell["draws"] == 200 and cell["batch"] == 8:
            mark = "~" if cell["scaled"] else ""
            times = " | ".join(f"{mark}{cell[column]:.3g} s" for column in ("unpatched", "loop", "engine"))
            sites = "last block, output" if cell["sites"] == "last" else "norm, output"
            lines.append(
                f"| {names[cell['network']]} | {sites} | {cell['method'].upper()} | {times} | {cell['ratio']:.3f} "
                f"| {cell['to_error']:.3f} of the loop's |"
            )
    machine = record["machine"]
    worst = max(cell["ratio"] for cell in record["cells"])
    count = sum(cell["ratio"] > 1.05 for cell in record["cells"])
    lines += [
        "",
        f"One process, untrained weights, seed 0, on {machine['processor']}, {machine['threads']} threads, commit "
        f"{record['commit']}; ~ marks times scaled up from fewer draws. Of all {len(record['cells'])} cells (batch 1, 8, 64; "
        f"S = 1, 20, 200) {count} are above 1.05 times the loop, the worst at {worst:.2f}. Command: "
        "`python benchmarks/prediction.py --networks mlp resnet20 resnet18 --budget 0.8`.",
    ]
    return "\n".join(lines)


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "training_overhead": training_overhead,
    "prediction_mlp_resnet20_resnet18": prediction,
}


def render(text: str) -> str:
    """The text of README.md with every table made anew from its record."""
    for name, table in TABLES.items():
        record = json.loads((ROOT / "results" / f"{name}.json").read_text())
        start, end = f"<!-- table: {name} -->\n", "<!-- end table -->"
        before, _, rest = text.partition(start)
        text = f"{before}{start}{table(record)}\n{end}{rest.partition(end)[2]}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only say whether README.md is up to date")
    path = ROOT / "README.md"
    before = path.read_text()
    after = render(before)
    if parser.parse_args().check:
        sys.exit(0 if before == after else "README.md differs from the records: run python benchmarks/readme_tables.py")
    path.write_text(after)


if __name__ == "__main__":
    main()
