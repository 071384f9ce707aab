"""Prediction: S passes of the unpatched network, the plain loop, and the engine, over a grid of networks, batches and draws.

Every cell is timed in one process, the three in turn, median of the rounds. "loop" is a forward pass for each independent draw.
"engine" computes the same draws (so the same numbers). "to error" is the time the engine's own choice of draws (stratified,
heads, enumeration) takes to the Monte-Carlo error that the loop reaches at S = 200, as a fraction of the loop's time; the
error is the root mean square of the reported standard errors. Passes that take long are timed on a few draws and scaled up
(marked ~).

    python benchmarks/prediction.py [--networks mlp resnet20 ...] [--batch 1 8 64] [--draws 1 20 200] [--budget 3]
"""

import argparse
import math
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from records import write_record
from torch import nn

import patchbayes as pb
from patchbayes.draws import network_of
from patchbayes.nets import cifar_resnet20, mlp, resnet18
from patchbayes.prediction.engine import Engine
from patchbayes.prediction.loop import undisturbed

NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "mlp": (lambda: mlp(13, hidden=(50, 50), out_features=2), (13,), "hidden2+norm2+output"),
    "resnet20": (lambda: cifar_resnet20(100), (3, 32, 32), "layer3.2.bn1+layer3.2.bn2+output"),
    "resnet18": (lambda: resnet18(100, stem="cifar"), (3, 32, 32), "layer4.1.bn1+layer4.1.bn2+output"),
    "resnet18_224": (lambda: resnet18(1000), (3, 224, 224), "layer4.1.bn1+layer4.1.bn2+output"),
}
METHODS = {"emp": pb.EMP(5), "ecmp": pb.ECMP(5)}


def seconds(function: Callable[[], Any], budget: float) -> float:
    """Median time of a call, as often as fits the budget, at least once."""
    times: list[float] = []
    while not times or (sum(times) < budget and len(times) < 7):
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def measure(network: str, last: bool, method: str, batch: int, num_draws: int, budget: float) -> dict[str, Any]:
    make, shape, last_sites = NETWORKS[network]
    torch.manual_seed(0)
    plain = make().eval()
    model = make().eval()
    x = torch.randn(batch, *shape)
    pb.patch_(model, METHODS[method], last_sites if last else "norm+output")
    draws = pb.Draws.sample(model, num_draws)
    with torch.inference_mode():
        plain(x)
        one_pass = seconds(lambda: plain(x), budget / 4)
    pb.predict(model, x, draws[: min(2, num_draws)])
    timed = max(1, min(num_draws, int(2 * budget / one_pass)))
    row: dict[str, Any] = {"scaled": timed < num_draws}
    if timed == num_draws:
        pb.predict(model, x, draws)  # calibrates
        loop, engine, unpatched = [], [], []
        for _ in range(3 if one_pass * num_draws < budget else 1):
            with torch.inference_mode():
                unpatched.append(num_draws * seconds(lambda: plain(x), 0))
            loop.append(seconds(lambda: pb.predict(model, x, draws, engine="loop"), budget / 4))
            engine.append(seconds(lambda: pb.predict(model, x, draws), budget / 4))
        row |= {"unpatched": statistics.median(unpatched), "loop": statistics.median(loop)}
        row |= {"engine": statistics.median(engine), "work": pb.predict(model, x, draws).plan.work}
    else:
        loop = seconds(lambda: pb.predict(model, x, draws[:timed], engine="loop"), budget / 4) * num_draws / timed
        row |= {"unpatched": one_pass * num_draws, "loop": loop, **_engine_scaled(model, x, draws, budget)}
    row["ratio"] = row["engine"] / row["loop"]
    if num_draws == 200:
        row["to_error"] = _time_to_error(model, x, row, timed, budget)
    return row


def _engine_scaled(model: nn.Module, x: torch.Tensor, draws: pb.Draws, budget: float) -> dict[str, float]:
    """The engine's walk as far as the budget goes, scaled up to all of its results where it did not get to the end."""
    network = network_of(model)
    done = 0
    with undisturbed(model, network), torch.inference_mode():
        machine = Engine(model, network, draws, compile=False, memory_limit=None, by_loop=False)
        for turn in range(2):  # the first calibrates
            began = time.perf_counter()
            done = 0
            for members, _ in machine.outputs(x, torch.arange(len(x)), lambda y: y):
                done += len(members)
                if time.perf_counter() - began > (2 * budget if turn else 0):
                    break
        took = time.perf_counter() - began
    return {"engine": took * machine.plan.networks / done, "work": machine.plan.work}


def _time_to_error(model: nn.Module, x: torch.Tensor, row: dict[str, Any], timed: int, budget: float) -> float:
    """The engine's time to the loop's error at S = 200, as a fraction of the loop's time."""
    few = min(60, max(20, timed))
    iid = pb.predict(model, x, pb.Draws.sample(model, few))
    target = _size(iid.standard_error) * math.sqrt(few / 200)
    mine = pb.predict(model, x, 200 if timed == 200 else few)
    if mine.standard_error_kind == "exact":
        return seconds(lambda: pb.predict(model, x, 200), budget / 4) / row["loop"]
    error = _size(mine.standard_error)
    trunks = len(mine.draws) // mine.plan.heads
    needed = max(5, 5 * math.ceil(trunks * (error / target) ** 2 / 5))
    tried = min(needed, max(5, timed))
    took = seconds(lambda: pb.predict(model, x, tried), budget / 4) * needed / tried
    return took / row["loop"]


def _size(standard_error: torch.Tensor) -> float:
    return float(standard_error.double().square().mean().sqrt())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--draws", type=int, nargs="+", default=[1, 20, 200])
    parser.add_argument("--budget", type=float, default=3.0, help="seconds for a timing")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    header = (
        "network",
        "sites",
        "method",
        "batch",
        "S",
        "unpatched s",
        "loop s",
        "engine s",
        "engine/loop",
        "work",
        "to error",
    )
    print(" ".join(f"{text:>12}" for text in header))
    rows = []
    for network in arguments.networks:
        for last in (False, True):
            for method in METHODS:
                for batch in arguments.batch:
                    for num_draws in arguments.draws:
                        cell = {"network": network, "sites": "last" if last else "norm+output", "method": method}
                        cell |= {"batch": batch, "draws": num_draws}
                        row = measure(network, last, method, batch, num_draws, arguments.budget)
                        rows.append(cell | row)
                        show(rows[-1])
    name = "prediction" if len(arguments.networks) == len(NETWORKS) else f"prediction_{'_'.join(arguments.networks)}"
    name += "" if len(arguments.batch) > 1 else f"_batch{arguments.batch[0]}"
    print("written:", write_record(name, {"cells": rows}))


def show(cell: dict[str, Any]) -> None:
    mark = "~" if cell["scaled"] else ""
    numbers = [f"{mark}{cell[name]:.4f}" for name in ("unpatched", "loop", "engine")]
    error = f"{cell['to_error']:.3f}" if "to_error" in cell else ""
    texts = [cell["network"], cell["sites"], cell["method"], str(cell["batch"]), str(cell["draws"]), *numbers]
    texts += [f"{cell['ratio']:.3f}", f"{cell['work']:.3f}", error]
    print(" ".join(f"{text:>12}" for text in texts), flush=True)


if __name__ == "__main__":
    main()
