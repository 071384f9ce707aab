"""Resident memory over many predictions of random batch sizes, beside that of the plain network on the same inputs.

Each contender in a process of its own: a small CNN (16 pixels), 1 to 200 images at a time. `start` is the memory after the
first call (torch.export is loaded by then), `end` that after the last.

    python benchmarks/resident.py [--predictions 2000] [--draws 10] [--results FOLDER]
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from records import RESULTS, write_record

import patchbayes as pb
from patchbayes.nets import small_cnn

CONTENDERS = ("plain", "graph")
_MOST = 200


def measure(contender: str, predictions: int, draws: int) -> dict[str, Any]:
    """In this process: bytes after the first and after the last call."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = small_cnn(size=16).eval()
    pb.patch_(model, pb.ECMP(5), "norm+output")
    sizes = torch.randint(1, _MOST, (predictions,), generator=torch.Generator().manual_seed(0)).tolist()
    found: dict[str, Any] = {}
    for size in sizes:
        x = torch.rand(size, 1, 16, 16)
        if contender == "plain":
            with torch.inference_mode():
                model(x)
        else:
            pb.predict(model, x, draws, engine="graph")
        found.setdefault("start", _resident())
    return found | {"end": _resident()}


def _resident() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--predictions", type=int, default=2000)
    parser.add_argument("--draws", type=int, default=10)
    parser.add_argument("--one", choices=CONTENDERS, help="measure this one, in this process")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args(words)
    if arguments.one is not None:
        print(json.dumps(measure(arguments.one, arguments.predictions, arguments.draws)))
        return
    rows = []
    for name in CONTENDERS:
        options = ["--predictions", str(arguments.predictions), "--draws", str(arguments.draws)]
        done = subprocess.run([sys.executable, __file__, "--one", name, *options], capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr)
        rows.append({"name": name} | json.loads(done.stdout.strip().splitlines()[-1]))
        print(rows[-1], flush=True)
    content = {"predictions": arguments.predictions, "draws": arguments.draws, "rows": rows}
    print("written:", write_record("resident", content, arguments.results))


if __name__ == "__main__":
    main()
