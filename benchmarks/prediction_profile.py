"""Where the time of a prediction goes, beside as many passes of the unpatched network as it has arithmetic.

For each network, patched at norm and output or at the last block: the engine's time by kind of operation and outside of
operations (Python, draws, averaging), from torch's profiler, and the same for the unpatched passes of the arithmetic floor.
The profiler itself adds to every operation, so shares are of the profiled time; the benchmark's times are without it.

    python benchmarks/prediction_profile.py [--networks mlp ...] [--batch 8] [--draws 20] [--results FOLDER]
"""

import argparse
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from records import RESULTS, write_record
from subjects import METHODS, NETWORKS, Subject
from torch.profiler import ProfilerActivity, profile

import patchbayes as pb

#: What an operator's name holds -> its kind; the first that fits.
KINDS = {
    "convolution": ("conv",),
    "matrix product": ("addmm", "bmm", "matmul", "linear", "::mm", "baddbmm"),
    "norm": ("norm", "rsqrt", "addcmul"),
    "copy": ("copy", "stack", "cat", "index", "clone", "contiguous", "gather", "select"),
}
ROUNDS = 5


def shares(call: Callable[[], Any]) -> dict[str, float]:
    """Milliseconds of a call, and the share of each kind of operation in it; the least of several rounds."""
    call()
    found = []
    for _ in range(ROUNDS):
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            began = time.perf_counter()
            call()
            seconds = time.perf_counter() - began
        by_kind: Counter[str] = Counter()
        for event in recorded.key_averages():
            if event.key.startswith(("aten::", "mkldnn::", "onednn::")):
                by_kind[_kind(event.key)] += event.self_cpu_time_total / 1e6
        by_kind["outside of operations"] = max(0.0, seconds - sum(by_kind.values()))
        found.append((seconds, by_kind))
    seconds, by_kind = min(found, key=lambda pair: pair[0])
    return {"milliseconds": 1000 * seconds} | {kind: value / seconds for kind, value in by_kind.most_common()}


def _kind(name: str) -> str:
    return next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "other operations")


def measure(network: str, sites: str, method: str, batch: int, draws: int) -> dict[str, Any]:
    subject = Subject.make(network, sites, method, batch)
    chosen = pb.Draws.sample(subject.model, draws)
    plan = pb.predict(subject.model, subject.x, chosen, engine="graph").plan
    passes = max(1, math.ceil(plan.floor * draws))
    return {
        "network": network,
        "sites": sites,
        "method": method,
        "batch": batch,
        "draws": draws,
        "chunk": plan.chunk,
        "engine": shares(partial(pb.predict, subject.model, subject.x, chosen, engine="graph")),
        "floor_passes": passes,
        "floor": shares(partial(subject.passes, passes)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=["mlp", "resnet20", "resnet18"])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows = []
    for network, sites, method in itertools.product(options.networks, ("norm+output", "last"), METHODS):
        rows.append(measure(network, sites, method, options.batch, options.draws))
        print(f"{network} {sites} {method}, batch {options.batch}, {options.draws} draws")
        for name in ("engine", "floor"):
            parts = {kind: value for kind, value in rows[-1][name].items() if kind != "milliseconds"}
            text = ", ".join(f"{kind} {100 * value:.0f} %" for kind, value in parts.items())
            print(f"  {name:<6} {rows[-1][name]['milliseconds']:8.2f} ms: {text}", flush=True)
    print("written:", write_record("prediction_profile", {"rows": rows}, options.results))


if __name__ == "__main__":
    main()
