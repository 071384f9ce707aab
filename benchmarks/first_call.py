"""What a first prediction costs, and the engine on a loaded machine.

First calls: `predict` with engine="auto" on a network that was never predicted with, against the loop on the same draws. What
capturing takes is told apart by the plan (`capture_seconds`, here in seconds of the processor); the rest, over the loop, is
"besides". A call that would not pay for a capture runs the loop. Another network is captured before, so that `torch.export` is
loaded.

Loaded machine: engine and loop in turns on the wall's clock, alone and beside two busy processes, with torch's two threads:
ResNet-18 of width 32 at 32 pixels. The plans must be the same.

    python benchmarks/first_call.py [--networks mlp ...] [--draws 2 20 200] [--rounds 3] [--parts first busy] [--results FOLDER]
"""

import argparse
import dataclasses
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from records import RESULTS, write_record
from timing import in_turn, quotients, summary
from torch import Tensor, nn

import patchbayes as pb
from patchbayes.nets import cifar_resnet20, mlp, resnet18, small_cnn
from patchbayes.prediction.engine import engine as engine_module

NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "MLP 2x50": (lambda: mlp(13, hidden=(50, 50), out_features=2), (8, 13)),
    "small CNN, 16 px": (lambda: small_cnn(size=16), (8, 1, 16, 16)),
    "ResNet-20, 32 px": (lambda: cifar_resnet20(100), (8, 3, 32, 32)),
}
LOADED = {"EMP, batch 1": (pb.EMP(5), 1), "ECMP, batch 16": (pb.ECMP(5), 16)}
_LOADED_DRAWS = 50


def first_calls(network: str, draws: int, rounds: int) -> dict[str, Any]:
    """Seconds of the processor: a first call of "auto", of it capturing, and the loop."""
    build, shape = NETWORKS[network]
    seconds: dict[str, list[float]] = {"first": [], "capture": [], "loop": []}
    how = ""
    for number in range(rounds):
        torch.manual_seed(number)
        model, x = build().eval(), torch.randn(*shape)
        pb.patch_(model, pb.ECMP(5), "norm+output")
        chosen = pb.Draws.sample(model, draws)
        pb.predict(model, x, chosen[:2], engine="loop")  # what torch does at the first pass of any network
        calls: dict[str, Callable[[], Any]] = {
            "first": partial(pb.predict, model, x, chosen),
            "loop": partial(pb.predict, model, x, chosen, engine="loop"),
        }
        with _Capturing() as capturing:
            for name in calls if number % 2 else reversed(calls):
                began = time.process_time()
                prediction = calls[name]()
                seconds[name].append(time.process_time() - began)
                how = prediction.plan.engine if name == "first" else how
        seconds["capture"].append(capturing.seconds)
    besides = [(f - c) / loop for f, c, loop in zip(*seconds.values(), strict=True)]
    row: dict[str, Any] = {"network": network, "draws": draws, "batch": shape[0], "engine": how}
    for name, values in seconds.items():
        row[name] = statistics.median(values)
    return row | summary("besides", besides)


class _Capturing:
    """The processor's seconds that go into captures."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> "_Capturing":
        self.theirs = engine_module.Engine._capture
        engine_module.Engine._capture = self._timed()  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        engine_module.Engine._capture = self.theirs  # type: ignore[method-assign]

    def _timed(self) -> Any:
        def capture(engine: Any, *rest: Any) -> Any:
            began = time.process_time()
            try:
                return self.theirs(engine, *rest)
            finally:
                self.seconds += time.process_time() - began

        return capture


def loaded(name: str, budget: float) -> dict[str, Any]:
    """Engine over loop, alone and beside two busy processes."""
    method, batch = LOADED[name]
    torch.manual_seed(0)
    model, x = resnet18(100, stem="cifar", width=32).eval(), torch.randn(batch, 3, 32, 32)
    pb.patch_(model, method, "norm+output")
    draws = pb.Draws.sample(model, _LOADED_DRAWS)
    row: dict[str, Any] = {"name": name, "draws": _LOADED_DRAWS, "threads": torch.get_num_threads()}
    plans = []
    for where, number in (("alone", 0), ("busy", 2)):
        beside = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
        try:
            plans.append(_plan(model, x, draws))
            calls: dict[str, Callable[[], Any]] = {
                way: partial(pb.predict, model, x, draws, engine=way) for way in ("loop", "graph")
            }
            seconds = in_turn(calls, budget)
        finally:
            for process in beside:
                process.kill()
                process.wait()
        row |= summary(where, quotients(seconds["graph"], seconds["loop"]))
    return row | {"same_plan": plans[0] == plans[1]}


def _plan(model: nn.Module, x: Tensor, draws: pb.Draws) -> Any:
    return dataclasses.replace(pb.predict(model, x, draws, engine="graph").plan, capture_seconds=None)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--draws", nargs="+", type=int, default=[2, 20, 200])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parts", nargs="+", choices=["first", "busy"], default=["first", "busy"])
    parser.add_argument("--budget", type=float, default=5, help="seconds for a timing on a loaded machine")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args(words)
    content: dict[str, Any] = {"rounds": arguments.rounds}
    if "first" in arguments.parts:
        torch.set_num_threads(1)
        warm = small_cnn(size=8).eval()
        pb.patch_(warm, pb.ECMP(3))
        pb.predict(warm, torch.rand(2, 1, 8, 8), 3, engine="graph")
        content["first"] = []
        for network in arguments.networks:
            for draws in arguments.draws:
                content["first"].append(first_calls(network, draws, arguments.rounds))
                print(content["first"][-1], flush=True)
    if "busy" in arguments.parts:
        torch.set_num_threads(2)
        content["busy"] = [loaded(name, arguments.budget) for name in LOADED]
        print(*content["busy"], sep="\n", flush=True)
    print("written:", write_record("first_call", content, arguments.results))


if __name__ == "__main__":
    main()
