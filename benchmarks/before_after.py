"""Two checkouts of this project in one run: their engines against their loops, and against each other.

Each checkout runs in a process of its own, and the two take turns: in every round of a cell both run their loop and their
engine on the same draws. Every ratio is taken within a round, of seconds of the processor (one thread, so that other
processes on the machine count little). Untrained weights. A cell has as many rounds as fit the budget, two at least.

Where S passes take longer than the budget, as many as fit (two at least) are timed: the loops' times are scaled by draws, the
engines' by their counted arithmetic where that is more than the budget too ("scaled"). The record is written after every
network, method, set of sites and batch; --resume goes on with it.

    python benchmarks/before_after.py --before FOLDER [--networks mlp ...] [--sites last ...] [--methods emp ...]
                                      [--batch 8 ...] [--draws 5 20 200] [--budget 2] [--resume] [--results FOLDER]
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

_FEWEST_DRAWS = 2  # timed, whatever the budget
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
    """Answer questions: {"make": setting} prepares a network and gives the seconds of a pass, {"floor": S} gives the
    arithmetic of S draws in passes, {"draws": S, "engine": name} predicts and gives the seconds of it."""
    torch.set_num_threads(1)
    subject: Any = None
    for line in sys.stdin:
        question = json.loads(line)
        if "make" in question:
            subject = Subject.make(*question["make"])
            answer = subject.one_pass
        elif "floor" in question:
            from timing import arithmetic, plan_of  # not for the older code

            answer = arithmetic(plan_of(subject.model, subject.x, pb.Draws.sample(subject.model, question["floor"])))
        else:
            draws = pb.Draws.sample(subject.model, question["draws"])
            began = time.process_time()
            pb.predict(subject.model, subject.x, draws, engine=question["engine"])
            answer = time.process_time() - began
        print(json.dumps(answer), flush=True)


def measure(
    before: Checkout, after: Checkout, numbers: Sequence[int], one_pass: float, budget: float
) -> list[dict[str, Any]]:
    """The cells of one setting: seconds of loop and engine before and after, and their ratios round by round."""
    from timing import quotients, summary, times  # not for the older code

    passes = max(_FEWEST_DRAWS, int(budget / one_pass))
    timed: dict[tuple[int, int], dict[str, list[float]]] = {}
    cells = []
    for number in numbers:
        loop, floor = min(number, passes), after.ask(floor=number)
        engine = number if floor <= passes else loop
        if (loop, engine) not in timed:
            timed[loop, engine] = _rounds(before, after, loop, engine, budget)
        seconds = {
            name: times(number / loop if "loop" in name else floor / after.ask(floor=engine), some)
            for name, some in timed[loop, engine].items()
        }
        cell: dict[str, Any] = {
            "draws": number,
            "rounds": len(seconds["loop"]),
            "scaled": (loop, engine) != (number,) * 2,
        }
        for name, values in seconds.items():
            cell |= summary(name, values)
        cell |= summary("ratio", quotients(seconds["engine"], seconds["loop"]))
        cell |= summary("ratio_before", quotients(seconds["engine_before"], seconds["loop_before"]))
        cells.append(cell | summary("after_before", quotients(seconds["engine"], seconds["engine_before"])))
    return cells


def _rounds(before: Checkout, after: Checkout, loop: int, engine: int, budget: float) -> dict[str, list[float]]:
    calls = {
        "loop": (after, "loop", loop),
        "engine": (after, "graph", engine),
        "loop_before": (before, "loop", loop),
        "engine_before": (before, "auto", engine),
    }
    for name in ("engine", "engine_before", "engine_before"):  # the first calls capture, or calibrate
        checkout, how, number = calls[name]
        checkout.ask(draws=number, engine=how)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    began = time.perf_counter()
    for number in range(_MOST_ROUNDS):
        if number >= 2 and time.perf_counter() - began > budget:
            break
        for name, (checkout, how, draws) in list(calls.items())[:: 1 if number % 2 == 0 else -1]:
            seconds[name].append(checkout.ask(draws=draws, engine=how))
    return seconds


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
    parser.add_argument("--resume", action="store_true", help="go on with the record that is there")
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
    folder = arguments.results or RESULTS
    path = folder / "before_after.json"
    cells = json.loads(path.read_text())["cells"] if arguments.resume and path.exists() else []
    done = {tuple(cell[name] for name in ("network", "sites", "method", "batch")) for cell in cells}
    settings = (arguments.networks, arguments.sites, arguments.methods, arguments.batch)
    for network, sites, method, batch in itertools.product(*settings):
        if (network, sites, method, batch) in done:
            continue
        one_pass = max(checkout.ask(make=(network, sites, method, batch)) for checkout in (before, after))
        where = {"network": network, "sites": sites, "method": method, "batch": batch}
        for cell in measure(before, after, arguments.draws, one_pass, arguments.budget):
            cells.append(where | cell)
            shown = {name: cell[name] for name in ("ratio", "ratio_before", "after_before")}
            print(*where.values(), cell["draws"], *(f"{name} {v:.3f}" for name, v in shown.items()), flush=True)
        content = {"before": commit.stdout.strip(), "budget": arguments.budget, "cells": cells}
        print("written:", write_record("before_after", content, folder))  # a long run may be cut short
    for checkout in (before, after):
        checkout.process.stdin.close()  # type: ignore[union-attr]
        checkout.process.wait()


if __name__ == "__main__":
    main()
