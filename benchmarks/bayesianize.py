"""bayesianize_ on the public CIFAR-100 ResNets: NLL, ECE and accuracy against the original and temperature scaling.

Test images 0-4999 choose (the jitter and the spread by a random thousand of them; the reference temperature by all), images
5000-9999 are scored. One record for each network and seed, results/bayesianize_<network>_seed<seed>.json, with rows

    original                the network as its makers left it
    temperature             its logits divided by the temperature fitted on images 0-4999
    bayesianized S=...      the averaged prediction of S draws
    ... and temperature     the logarithm of that average divided by a temperature, fitted on images 0-999 at the same S

and every ECE with the floor that a perfectly calibrated model of the same confidences scores by chance. --corruptions adds
the rows (but the last) under corruption, on the first --corrupted of the scored images.

    python benchmarks/bayesianize.py [--networks cifar_resnet20 cifar_resnet56] [--seeds 0 1 2] [--draws 20 200]
                                     [--epochs 0.5] [--corruptions gaussian_noise ...] [--severity 3] [--corrupted 1000]
                                     [--data-dir FOLDER] [--results FOLDER]
"""

import argparse
import os
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from records import RESULTS, write_record
from safetensors.torch import load_file
from torch import Tensor, nn

import patchbayes as pb
from patchbayes import metrics, nets
from patchbayes.bayesianizing import bayesianize_
from patchbayes.data import CORRUPTIONS, ArraySplit, Dataset, Split, corrupt, read

BATCH = 128


class Batches:
    """Batches of a split that can be read again; with a seed shuffled and augmented, anew each time they are read."""

    def __init__(self, data: Dataset, split: Split, seed: int | None = None) -> None:
        self.data, self.split = data, split
        self.generator = None if seed is None else torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return -(-len(self.split) // BATCH)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = None if self.generator is None else torch.randperm(len(self.split), generator=self.generator)
        return self.data.batches(self.split, BATCH, order=order, augment=self.generator)


@torch.no_grad()
def logits_of(model: nn.Module, batches: Batches) -> Tensor:
    return torch.cat([model(inputs) for inputs, _ in batches])


def average(model: nn.Module, batches: Batches, draws: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    parts = pb.predict_batches(model, batches, draws, generator=generator)
    return torch.cat([part.log_probs for part in parts])


def row(log_probs: Tensor, targets: Tensor) -> dict[str, float]:
    probs = log_probs.exp().double()
    probs = probs / probs.sum(1, keepdim=True)
    return {
        "nll": metrics.nll(log_probs, targets),
        "ece": metrics.expected_calibration_error(probs, targets),
        "ece_floor": metrics.calibration_floor(probs).mean,
        "accuracy": metrics.accuracy(probs, targets),
    }


def measure(name: str, seed: int, data: Dataset, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    model = getattr(nets, name)()
    model.load_state_dict(load_file(folder / "pretrained" / f"{name.replace('cifar_', 'cifar100_')}.safetensors"))
    model.eval().to(memory_format=torch.channels_last)  # a fifth faster here
    choosing, scored = data.part("test[:5000]"), data.part("test[5000:]")
    reference = metrics.fit_temperature(logits_of(model, Batches(data, choosing)), choosing.targets)
    logits = logits_of(model, Batches(data, scored))
    corrupted = {c: corrupted_part(data, c, options) for c in options.corruptions}
    hard = {c: logits_of(model, Batches(data, split)) for c, split in corrupted.items()}
    rows = {
        "original": row(torch.log_softmax(logits, -1), scored.targets),
        "temperature": row(metrics.apply_temperature(logits, reference), scored.targets),
    }
    start = time.perf_counter()
    report = bayesianize_(
        model, Batches(data, data.train, seed), Batches(data, choosing), epochs=options.epochs, seed=seed
    )
    seconds = time.perf_counter() - start
    print(report, flush=True)
    first = data.part("test[:1000]")
    for draws in options.draws:
        log_probs = average(model, Batches(data, scored), draws, seed)
        rows[f"bayesianized S={draws}"] = row(log_probs, scored.targets)
        on_top = metrics.fit_temperature(average(model, Batches(data, first), draws, seed), first.targets)
        tempered = row(metrics.apply_temperature(log_probs, on_top), scored.targets)
        rows[f"bayesianized S={draws} and temperature"] = tempered | {"temperature": on_top}
    under = {}
    for c, split in corrupted.items():
        under[c] = {
            "original": row(torch.log_softmax(hard[c], -1), split.targets),
            "temperature": row(metrics.apply_temperature(hard[c], reference), split.targets),
            f"bayesianized S={options.draws[0]}": row(
                average(model, Batches(data, split), options.draws[0], seed), split.targets
            ),
        }
    path = options.results / f".{name}_{seed}.patch"
    try:
        pb.save(model, path)
        size = path.stat().st_size
    finally:
        path.unlink(missing_ok=True)
    return {
        "network": name,
        "seed": seed,
        "settings": {"method": "ECMP(5)", "sites": "norm+output", "epochs": options.epochs, "batch": BATCH},
        "selection": "test[:5000]",
        "scored": "test[5000:]",
        "temperature": reference,
        "rows": rows,
        "corruption": {"severity": options.severity, "images": options.corrupted, "rows": under},
        "chosen": {"jitter": report.jitter, "spread": report.spread, "kept": report.kept},
        "tried": [asdict(trial) for trial in report.tried],
        "training_loss": [report.first_loss, report.last_loss],
        "seconds": report.seconds | {"all": seconds},
        "patch_file_bytes": size,
        "model_bytes": report.model_bytes,
    }


def corrupted_part(data: Dataset, name: str, options: argparse.Namespace) -> Split:
    images, targets = data.part(f"test[5000:{5000 + options.corrupted}]").fetch(torch.arange(options.corrupted))
    return ArraySplit(corrupt(images, name, options.severity), targets)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=["cifar_resnet20", "cifar_resnet56"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--draws", nargs="+", type=int, default=[20])
    parser.add_argument("--epochs", type=float, default=0.5)
    parser.add_argument("--corruptions", nargs="*", default=[], choices=CORRUPTIONS)
    parser.add_argument("--severity", type=int, default=3)
    parser.add_argument("--corrupted", type=int, default=1000)
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("PATCHBAYES_DATA", "."))
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    torch.set_flush_denormal(True)
    folder = Path(options.data_dir)
    data = read("cifar100", folder, held_out=0.0)
    for seed in options.seeds:
        for name in options.networks:
            record = measure(name, seed, data, folder, options)
            print(f"{name}, seed {seed}: {record['seconds']['all']:.0f} s")
            for title, values in record["rows"].items():
                print(f"  {title:<36}" + "  ".join(f"{key} {value:.4f}" for key, value in values.items()), flush=True)
            for title, values in record["corruption"]["rows"].items():
                for which, scores in values.items():
                    print(
                        f"  {title:<18} {which:<20}" + "  ".join(f"{k} {v:.4f}" for k, v in scores.items()), flush=True
                    )
            write_record(f"bayesianize_{name}_seed{seed}", record, options.results)


if __name__ == "__main__":
    main()
