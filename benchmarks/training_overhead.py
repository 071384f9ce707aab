"""A training step of a patched ResNet-18 (CIFAR stem) against the same network unpatched: time and peak memory.

All variants run in one process, step by step in turn, so that the machine's noise hits all alike; the ratio of a round is
taken within the round. Peak memory is measured in a fresh process for each variant (the resident high-water mark above what
the process held before its first step, as torch's CPU allocator reports no peak).

    python benchmarks/training_overhead.py [--rounds 7] [--batch 32 128]
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from records import write_record

import patchbayes as pb
from patchbayes.nets import resnet18
from patchbayes_reproduce.training_cost import in_turn, ratio_quartiles

METHODS = {"vanilla": None, "emp": pb.EMP(5), "ecmp": pb.ECMP(5), "dropout": pb.Dropout(0.005)}
NUM_DATA = 50_000


class Trainer:
    def __init__(self, method: str, batch: int) -> None:
        torch.manual_seed(0)
        self.model = resnet18(num_classes=100, stem="cifar")
        if METHODS[method] is not None:
            pb.patch_(self.model, METHODS[method], "norm" if method == "dropout" else "norm+output")
        # The usual recipe: coupled weight decay, which is the simplified loss of appendix C.
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
        self.images, self.labels = torch.randn(batch, 3, 32, 32), torch.randint(100, (batch,))

    def step(self) -> None:
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(self.images), self.labels).backward()
        self.optimizer.step()


def time_steps(batch: int, rounds: int) -> dict[str, dict[str, float]]:
    trainers = {name: Trainer(name, batch) for name in METHODS}
    for trainer in trainers.values():
        trainer.step()
    seconds = in_turn({name: trainer.step for name, trainer in trainers.items()}, rounds)
    rows = {}
    for name in METHODS:
        low, middle, high = ratio_quartiles(seconds[name], seconds["vanilla"])
        rows[name] = {
            "seconds": statistics.median(seconds[name]),
            "ratio": middle,
            "ratio_quartiles": [low, high],
            "parameters": sum(p.numel() for p in trainers[name].model.parameters()),
        }
    return rows


def peak_memory(method: str, batch: int) -> int:
    """Peak resident bytes that building the network and three steps add to a process that has imported everything."""
    command = [sys.executable, __file__, "--measure-memory", method, "--batch", str(batch)]
    return int(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


def measure_memory(method: str, batch: int) -> None:
    torch.nn.functional.relu(torch.zeros(1))
    before = _high_water_mark()
    trainer = Trainer(method, batch)
    for _ in range(3):
        trainer.step()
    print(_high_water_mark() - before)


def _high_water_mark() -> int:
    """Peak resident bytes of this process (getrusage would also count the process that started it)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise SystemExit("peak memory is read from /proc/self/status, which this system does not have")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--batch", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--measure-memory", choices=list(METHODS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure_memory:
        measure_memory(arguments.measure_memory, arguments.batch[0])
        return
    torch.set_flush_denormal(True)
    print(f"{'batch':>5} {'method':<8} {'step s':>8} {'ratio':>6} {'(quartiles)':>15} {'memory':>7} {'parameters':>10}")
    results = {}
    for batch in arguments.batch:
        rows = time_steps(batch, arguments.rounds)
        memory = {name: statistics.median(peak_memory(name, batch) for _ in range(3)) for name in METHODS}
        for name, row in rows.items():
            row["peak_memory_bytes"] = memory[name]
            row["memory_ratio"] = memory[name] / memory["vanilla"]
            row["parameter_ratio"] = row["parameters"] / rows["vanilla"]["parameters"]
            low, high = row["ratio_quartiles"]
            print(
                f"{batch:>5} {name:<8} {row['seconds']:>8.3f} {row['ratio']:>6.3f} {f'({low:.3f}-{high:.3f})':>15} "
                f"{row['memory_ratio']:>7.3f} {row['parameter_ratio']:>10.3f}"
            )
        results[str(batch)] = rows
    print("written:", write_record("training_overhead", {"rounds": arguments.rounds, "batches": results}))


if __name__ == "__main__":
    main()
