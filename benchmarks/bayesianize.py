"""bayesianize_ on the public CIFAR-100 ResNets: NLL, ECE and accuracy against the original and temperature scaling.

Test images 0-3999 are the held-out data that choose jitter, spread and balance; the reference temperature is fitted on 0-4999;
images 5000-9999 are scored. One record for each network and seed, results/bayesianize_<network>_seed<seed>.json, with rows

    original                the network as its makers left it
    temperature             its logits divided by the temperature fitted on images 0-4999
    bayesianized S=...      the averaged prediction of S draws
    ... and temperature     the logarithm of that average divided by a temperature, fitted on images 4000-4999 at the same S

and every ECE with the floor that a perfectly calibrated model of the same confidences scores by chance. --more-draws adds the
rows of more draws on the first --images of the scored images, beside those of the others on the same images; --corruptions the
rows (but the last) under corruption, on as many. --statistics updating lets the batch norms' statistics follow the training
batches (the recipe freezes them); its record is called ..._updating.

    python benchmarks/bayesianize.py [--networks cifar_resnet20 cifar_resnet56] [--seeds 0 1 2] [--draws 20] [--epochs 0.5]
                                     [--more-draws 200] [--corruptions gaussian_noise ...] [--severity 1] [--images 1000]
                                     [--statistics updating] [--scored "test[5000:]"] [--data-dir FOLDER] [--results FOLDER]
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
    """Batches of a split that can be read again; with a seed shuffled and augmented, anew each time they are read.

    The batch norms of `updating` are in training mode while they are read.
    """

    def __init__(self, data: Dataset, split: Split, seed: int | None = None, updating: nn.Module | None = None) -> None:
        self.data, self.split = data, split
        self.norms = [] if updating is None else [m for m in updating.modules() if isinstance(m, nn.BatchNorm2d)]
        self.generator = None if seed is None else torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return -(-len(self.split) // BATCH)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = None if self.generator is None else torch.randperm(len(self.split), generator=self.generator)
        for norm in self.norms:
            norm.train()
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
    fitting, choosing, on_top = (data.part(part) for part in ("test[:5000]", "test[:4000]", "test[4000:5000]"))
    scored = data.part(options.scored)
    reference = metrics.fit_temperature(logits_of(model, Batches(data, fitting)), fitting.targets)
    few = {"clean": first_images(data, options)}
    few |= {c: corrupted(few["clean"], c, options.severity) for c in options.corruptions}
    few_logits = {kind: logits_of(model, Batches(data, split)) for kind, split in few.items()}
    rows = unpatched_rows(logits_of(model, Batches(data, scored)), scored.targets, reference)
    updating = model if options.statistics == "updating" else None
    start = time.perf_counter()
    report = bayesianize_(
        model, Batches(data, data.train, seed, updating), Batches(data, choosing), epochs=options.epochs, seed=seed
    )
    seconds = time.perf_counter() - start
    print(report, flush=True)

    def temperature(draws: int) -> float:
        return metrics.fit_temperature(average(model, Batches(data, on_top), draws, seed), on_top.targets)

    rows |= patched_rows(model, Batches(data, scored), options.draws, seed, temperature(options.draws))
    some = {kind: unpatched_rows(few_logits[kind], split.targets, reference) for kind, split in few.items()}
    for kind, split in few.items():
        some[kind] |= patched_rows(model, Batches(data, split), options.draws, seed)
    for draws in options.more_draws:
        some["clean"] |= patched_rows(model, Batches(data, few["clean"]), draws, seed, temperature(draws))
    path = options.results / f".{name}_{seed}.patch"
    try:
        pb.save(model, path)
        size = path.stat().st_size
    finally:
        path.unlink(missing_ok=True)
    return {
        "network": name,
        "seed": seed,
        "settings": {
            "method": "ECMP(5)",
            "sites": "norm+output",
            "epochs": options.epochs,
            "batch": BATCH,
            "statistics": options.statistics,
        },
        "selection": "test[:4000]",
        "scored": options.scored,
        "temperature": reference,
        "rows": rows,
        "some": {"severity": options.severity, "images": options.images, "rows": some},
        "chosen": {
            "jitter": report.jitter,
            "spread": report.spread,
            "balance": report.balance,
            "kept": report.kept,
        },
        "tried": [asdict(trial) for trial in report.tried],
        "training_loss": [report.first_loss, report.last_loss],
        "seconds": report.seconds | {"all": seconds},
        "patch_file_bytes": size,
        "model_bytes": report.model_bytes,
    }


def unpatched_rows(logits: Tensor, targets: Tensor, temperature: float) -> dict[str, dict[str, float]]:
    return {
        "original": row(torch.log_softmax(logits, -1), targets),
        "temperature": row(metrics.apply_temperature(logits, temperature), targets),
    }


def patched_rows(
    model: nn.Module, batches: Batches, draws: int, seed: int, temperature: float | None = None
) -> dict[str, dict[str, float]]:
    log_probs, targets = average(model, batches, draws, seed), batches.split.targets
    rows = {f"bayesianized S={draws}": row(log_probs, targets)}
    if temperature is not None:
        tempered = row(metrics.apply_temperature(log_probs, temperature), targets)
        rows[f"bayesianized S={draws} and temperature"] = tempered | {"temperature": temperature}
    return rows


def first_images(data: Dataset, options: argparse.Namespace) -> Split:
    return ArraySplit(*data.part(options.scored).fetch(torch.arange(options.images)))


def corrupted(split: Split, name: str, severity: int) -> Split:
    images, targets = split.fetch(torch.arange(len(split)))
    return ArraySplit(corrupt(images, name, severity), targets)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=["cifar_resnet20", "cifar_resnet56"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--more-draws", nargs="*", type=int, default=[])
    parser.add_argument("--epochs", type=float, default=0.5)
    parser.add_argument("--corruptions", nargs="*", default=[], choices=CORRUPTIONS)
    parser.add_argument("--severity", type=int, default=1)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--statistics", choices=("frozen", "updating"), default="frozen")
    parser.add_argument("--scored", default="test[5000:]")
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
            for title, values in record["some"]["rows"].items():
                for which, scores in values.items():
                    print(
                        f"  {title:<18} {which:<20}" + "  ".join(f"{k} {v:.4f}" for k, v in scores.items()), flush=True
                    )
            ending = "_updating" if options.statistics == "updating" else ""
            write_record(f"bayesianize_{name}_seed{seed}{ending}", record, options.results)


if __name__ == "__main__":
    main()
