"""What small patches cost on a head of 1,000 classes: NLL and size of ECMP's whole components, Spread, LowRank and RankOne.

The classes: each of CIFAR-100's is divided into ten by the looks of its images (k-means on 8 x 8 pixels, fitted to training
images). The network: the features of the public ResNet-20 (pooled after each of its three stages, 112 numbers, frozen), a layer
of 512 and a linear layer of 1,000, trained here on 20,000 images: overconfident. Only that last layer is made random,
by `bayesianize_(..., method=..., sites="output")` on 1,500 test images; the last row is `bayesianize_` at its defaults, which
gives both layers a small form. 2,000 other images are scored. The rival is temperature scaling. The sizes are those of all
that was tried, in a file, also where held-out data chose no draws. The features are kept in build between runs. One record,
results/large_head.json.

    python benchmarks/large_head.py [--seeds 0 1 2] [--data-dir FOLDER] [--results FOLDER]
"""

import argparse
import copy
import os
import time
from pathlib import Path
from typing import Any

import torch
from records import RESULTS, write_record
from safetensors.torch import load_file, save_file
from scoring import paired, row
from torch import Tensor, nn
from torch.nn import functional

import patchbayes as pb
from patchbayes import nets
from patchbayes.data import read

BATCH, DRAWS, TRAINED, HELD_OUT, SCORED, PARTS = 64, 20, 20_000, 1500, 2000, 10
KEPT = RESULTS.parent / "build" / "large_head.safetensors"
WAYS: dict[str, dict[str, Any]] = {
    "ECMP(5), whole components": {"method": pb.ECMP(5, jitter=0.05), "sites": "output"},
    "Spread(5)": {"method": pb.posteriors.Spread(5), "sites": "output"},
    "LowRank(4, 5)": {"method": pb.posteriors.LowRank(4, 5), "sites": "output"},
    "RankOne(5)": {"method": pb.posteriors.RankOne(5), "sites": "output"},
    "`bayesianize_`, the defaults": {},
}


def features(folder: Path) -> dict[str, Tensor]:
    """What ResNet-20 says of the training and the test images after each stage, their looks, their classes."""
    if KEPT.exists():
        return load_file(KEPT)
    network = nets.cifar_resnet20()
    network.load_state_dict(load_file(folder / "pretrained" / "cifar100_resnet20.safetensors"))
    network.eval().to(memory_format=torch.channels_last)
    stages: list[Tensor] = []
    for stage in (network.layer1, network.layer2, network.layer3):
        stage.register_forward_hook(lambda _m, _i, out: stages.append(out.mean((2, 3))))
    data = read("cifar100", folder, held_out=0.0)
    found: dict[str, Tensor] = {}
    for name, split, number in (("train", data.train, TRAINED), ("test", data.test, HELD_OUT + SCORED)):
        raw, classes = split.fetch(torch.arange(number))
        rows = []
        for part in data.preparation.inputs(raw).split(BATCH):
            stages.clear()
            with torch.no_grad():
                network(part)
            rows.append(torch.cat(stages, 1))
        found[name], found[f"{name}_classes"] = torch.cat(rows), classes
        found[f"{name}_looks"] = functional.avg_pool2d(data.preparation.inputs(raw), 4).flatten(1)
    KEPT.parent.mkdir(exist_ok=True)
    save_file(found, KEPT)
    return found


def divided(found: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Classes of the training and the test images: ten for each of CIFAR-100's, by the nearest of ten looks."""
    looks, classes = found["train_looks"], found["train_classes"]
    train, test = torch.zeros_like(classes), torch.zeros_like(found["test_classes"])
    generator = torch.Generator().manual_seed(0)
    for number in range(100):
        rows, others = classes == number, found["test_classes"] == number
        own = looks[rows]
        centers = own[torch.randperm(len(own), generator=generator)[:PARTS]].clone()
        for _ in range(20):
            nearest = torch.cdist(own, centers).argmin(1)
            for part in nearest.unique():
                centers[part] = own[nearest == part].mean(0)
        train[rows] = PARTS * number + torch.cdist(own, centers).argmin(1)
        test[others] = PARTS * number + torch.cdist(found["test_looks"][others], centers).argmin(1)
    return train, test


def trained(inputs: Tensor, classes: Tensor, seed: int, epochs: int = 12) -> nn.Sequential:
    torch.manual_seed(seed)
    network = nn.Sequential(
        nn.BatchNorm1d(inputs.shape[1], affine=False),
        nn.Linear(inputs.shape[1], 512),
        nn.ReLU(),
        nn.Linear(512, 100 * PARTS),
    )
    optimizer = torch.optim.Adam(network.parameters(), 1e-3)
    for _ in range(epochs):
        for rows in torch.randperm(len(inputs)).split(BATCH):
            optimizer.zero_grad()
            functional.cross_entropy(network(inputs[rows]), classes[rows]).backward()
            optimizer.step()
    return network.eval()


def measure(seed: int, found: dict[str, Tensor]) -> list[dict[str, Any]]:
    classes, test = divided(found)
    network = trained(found["train"], classes, seed)
    held_out = list(zip(found["test"][:HELD_OUT].split(BATCH), test[:HELD_OUT].split(BATCH), strict=True))
    inputs, targets = found["test"][HELD_OUT:], test[HELD_OUT:]

    def answers(model: nn.Module, draws: Any) -> Tensor:
        return torch.cat([pb.predict(model, part, draws).log_probs for part in inputs.split(BATCH)])

    scaled = copy.deepcopy(network)
    report = pb.calibrate_(scaled, held_out, seed=seed)
    rival = answers(scaled, "mean")
    with torch.no_grad():
        original = network(inputs).log_softmax(1)
    rows = [
        {"title": "original", "seed": seed, **row(original, targets)},
        {"title": "temperature scaling", "seed": seed, "temperature": report.mean_temperature, **row(rival, targets)},
    ]
    for title, options in WAYS.items():
        model, worked = copy.deepcopy(network), time.process_time()
        made = pb.bayesianize_(model, held_out, draws=DRAWS, seed=seed, **options)
        worked = time.process_time() - worked
        log_probs = answers(model, DRAWS)
        sizes = {"patch_bytes": made.tried_bytes, "model_bytes": made.model_bytes, "cpu_seconds": worked}
        scores = row(log_probs, targets) | paired(log_probs, rival, targets)
        rows.append({"title": title, "seed": seed, "chosen": made.chosen, **scores, **sizes})
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("PATCHBAYES_DATA", "."))
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    found, rows = features(Path(options.data_dir)), list[dict[str, Any]]()
    for seed in options.seeds:
        rows += measure(seed, found)
        write_record(
            "large_head", {"rows": rows, "held_out": HELD_OUT, "scored": SCORED, "draws": DRAWS}, options.results
        )


if __name__ == "__main__":
    main()
