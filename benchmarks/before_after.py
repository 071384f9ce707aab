"""Two checkouts of this project in one run: their engines against their loops, and against each other.

Each checkout runs in a process of its own, and the two take turns: in every round of a cell both run their loop and their
engine on the same draws. Every ratio is taken within a round, of seconds of the processor (one thread, so that other
processes on the machine count little). Untrained weights. A cell has as many rounds as fit the budget, two at least.

    python benchmarks/before_after.py --before FOLDER [--networks mlp ...] [--sites last ...] [--methods emp ...]
                                      [--batch 8 ...] [--draws 5 20 200] [--budget 2] [--results FOLDER]
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from subjects import METHODS, NETWORKS, Subject

import patchbayes as pb

_MOST_SECONDS = 8  # of S passes; cells of more draws are left out beyond it
_MOST_ROUNDS = 7


class Checkout:
    """A process that measures the code of one checkout, asked line by line."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(folder / "src")},
        )

    def ask(self, **question: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


def work() -> None:
    """Answer questions: {"make": setting} prepares a network, {"draws": S, "engine": name} predicts; both give seconds."""
    torch.set_num_threads(1)
    subject: Any = None
    for line in sys.stdin:
        question = json.loads(line)
        if "make" in question:
            subject = Subject.make(*question["make"])
            print(json.dumps(subject.one_pass), flush=True)
            continue
        draws = pb.Draws.sample(subject.model, question["draws"])
        began = time.process_time()
        pb.predict(subject.model, subject.x, draws, engine=question["engine"])
        print(json.dumps(time.process_time() - began), flush=True)


def measure(before: Checkout, after: Checkout, draws: int, budget: float) -> dict[str, Any]:
    """One cell: seconds of loop and engine before and after, and their ratios round by round."""
    from timing import quotients, summary  # not for the older code

    calls = {
        "loop": (after, "loop"),
        "engine": (after, "graph"),
        "loop_before": (before, "loop"),
        "engine_before": (before, "auto"),
    }
    for _ in range(2):  # the first calls capture, or calibrate
        for name in ("engine", "engine_before"):
            calls[name][0].ask(draws=draws, engine=calls[name][1])
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    began = time.perf_counter()
    for number in range(_MOST_ROUNDS):
        if number >= 2 and time.perf_counter() - began > budget:
            break
        for name, (checkout, engine) in list(calls.items())[:: 1 if number % 2 == 0 else -1]:
            seconds[name].append(checkout.ask(draws=draws, engine=engine))
    cell: dict[str, Any] = {"draws": draws, "rounds": len(seconds["loop"])}
    for name, values in seconds.items():
        cell |= summary(name, values)
    cell |= summary("ratio", quotients(seconds["engine"], seconds["loop"]))
    cell |= summary("ratio_before", quotients(seconds["engine_before"], seconds["loop_before"]))
    return cell | summary("after_before", quotients(seconds["engine"], seconds["engine_before"]))


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, help="the older checkout")
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--sites", nargs="+", default=["norm+output", "last"])
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--draws", nargs="+", type=int, default=[5, 20, 200])
    parser.add_argument(
        "--budget", type=float, default=2, help="seconds for a cell, beyond which two rounds are enough"
    )
    parser.add_argument("--results", type=Path, help="folder for the record")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    if arguments.worker:
        work()
        return
    if arguments.before is None:
        parser.error("--before names the folder of the older checkout")
    from records import RESULTS, write_record

    before, after = Checkout(arguments.before), Checkout(Path(__file__).resolve().parent.parent)
    git = ["git", "-C", str(arguments.before), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True)
    cells: list[dict[str, Any]] = []
    settings = (arguments.networks, arguments.sites, arguments.methods, arguments.batch)
    for network, sites, method, batch in itertools.product(*settings):
        one_pass = max(checkout.ask(make=(network, sites, method, batch)) for checkout in (before, after))
        for draws in arguments.draws:
            if draws * one_pass > _MOST_SECONDS and draws > min(arguments.draws):
                continue
            cell = {"network": network, "sites": sites, "method": method, "batch": batch}
            cells.append(cell | measure(before, after, draws, arguments.budget))
            shown = {name: cells[-1][name] for name in ("ratio", "ratio_before", "after_before")}
            print(*cell.values(), draws, *(f"{name} {value:.3f}" for name, value in shown.items()), flush=True)
        content = {"before": commit.stdout.strip(), "budget": arguments.budget, "cells": cells}
        written = write_record("before_after", content, arguments.results or RESULTS)  # a long run may be cut short
    print("written:", written)
    for checkout in (before, after):
        checkout.process.stdin.close()  # type: ignore[union-attr]
        checkout.process.wait()


if __name__ == "__main__":
    main()
