"""Four ways to train one small network on scikit-learn's digits, and how far to trust each: python examples/digits.py

The network is trained five times for each way, on half of the images; the table shows the other half, mean and standard
deviation over the seeds, also with the test images covered by noise. Takes about a minute on two cores.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import patchbayes as pb
from patchbayes.metrics import accuracy, calibration_bins, nll
from patchbayes.nets import small_cnn

METHODS: dict[str, tuple[pb.Mixture | pb.Dropout | None, str]] = {
    "vanilla": (None, ""),
    "dropout": (pb.Dropout(0.1), "norm"),
    "EMP": (pb.EMP(components=5), "norm+output"),
    "ECMP": (pb.ECMP(components=5), "norm+output"),
}


def train(method: pb.Mixture | pb.Dropout | None, sites: str, images: Tensor, labels: Tensor, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = small_cnn(size=8)
    if method is not None:
        pb.patch_(model, method, sites)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(30):
        for batch in torch.randperm(len(images)).split(64):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images[batch]), labels[batch])
            if method is not None:
                loss = loss + pb.kl(model) / len(images)
            else:
                loss = loss + sum(0.5 * p.square().sum() for p in model.parameters()) / len(images)
            loss.backward()
            optimizer.step()
    return model.eval()


def probabilities(model: nn.Module, images: Tensor) -> Tensor:
    if pb.is_patched(model):
        return pb.predict(model, images, draws=50).probs
    with torch.no_grad():
        return model(images).softmax(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    seeds = range(parser.parse_args().seeds)
    torch.set_num_threads(1)
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    images = (torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16)[order]
    labels = torch.tensor(data.target)[order]
    half = len(labels) // 2
    noise = torch.randn(images[half:].shape, generator=torch.Generator().manual_seed(1))
    tests = {"clean": images[half:], "noisy": images[half:] + 0.5 * noise}

    rows: dict[str, dict[str, list[float]]] = {}
    for name, (method, sites) in METHODS.items():
        rows[name] = {}
        for seed in seeds:
            if sys.stderr.isatty():
                print(f"\rtraining {name}, seed {seed} ...   ", end="", file=sys.stderr)
            began = time.perf_counter()
            model = train(method, sites, images[:half], labels[:half], seed)
            note(rows[name], "seconds", time.perf_counter() - began)
            note(rows[name], "parameters", sum(p.numel() for p in model.parameters()))
            for condition, inputs in tests.items():
                probs = probabilities(model, inputs)
                note(rows[name], f"{condition} accuracy %", 100 * accuracy(probs, labels[half:]))
                note(rows[name], f"{condition} NLL", nll(probs.log(), labels[half:]))
                note(rows[name], f"{condition} ECE %", 100 * calibration_bins(probs, labels[half:]).expected_error)
    if sys.stderr.isatty():
        print("\r" + 40 * " " + "\r", end="", file=sys.stderr)
    show(rows, len(seeds), len(labels) - half)


def note(row: dict[str, list[float]], column: str, value: float) -> None:
    row.setdefault(column, []).append(value)


def show(rows: dict[str, dict[str, list[float]]], num_seeds: int, num_images: int) -> None:
    columns = [c for c in next(iter(rows.values())) if c not in ("seconds", "parameters")]
    texts: dict[str, Callable[[list[float]], str]] = {c: lambda v: f"{mean(v):.2f} ± {spread(v):.2f}" for c in columns}
    texts |= {"parameters": lambda v: f"{v[0]:,.0f}", "seconds": lambda v: f"{mean(v):.1f}"}
    print(f"digits, {num_images} test images, mean ± deviation over {num_seeds} seeds, 50 draws")
    header = ["method", *texts]
    cells = [header] + [[name, *(text(row[c]) for c, text in texts.items())] for name, row in rows.items()]
    widths = [max(len(line[i]) for line in cells) for i in range(len(header))]
    for line in cells:
        print(
            "  ".join(
                text.ljust(w) if i == 0 else text.rjust(w) for i, (text, w) in enumerate(zip(line, widths, strict=True))
            )
        )
    print()
    for name in ("dropout", "EMP", "ECMP"):
        changes = [compare(rows, name, condition) for condition in ("clean", "noisy")]
        print(f"{name}, NLL against vanilla's, mean over seeds: {', '.join(changes)}")


def compare(rows: dict[str, dict[str, list[float]]], name: str, condition: str) -> str:
    mine, plain = (mean(rows[which][f"{condition} NLL"]) for which in (name, "vanilla"))
    return f"{abs(mine / plain - 1):.0%} {'lower' if mine < plain else 'higher'} on {condition} images"


def mean(values: list[float]) -> float:
    return statistics.fmean(values)


def spread(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


if __name__ == "__main__":
    main()
