"""bayesianize_ on the public CIFAR-100 ResNets: NLL, ECE and accuracy against the original and temperature scaling.

Test images 0-4999 are the held-out data, of which bayesianize_ takes at random what it needs and which fit the temperature of
the original too; images 5000-9999 are scored. One record for each network and seed,
results/bayesianize_<network>_seed<seed>.json, with rows

    original                 the network as its makers left it
    temperature              its logits divided by the temperature fitted on images 0-4999
    bayesianized S=...       the averaged prediction of S draws, with the temperature that bayesianize_ gave it
    mean network             the same network in one pass, with its own temperature

(cpu_seconds of making it beside epoch_cpu_seconds, an epoch of ordinary training, both in time of the processor),
and every ECE with the floor that a perfectly calibrated model of the same confidences scores by chance. Curves over its
options are in calibration_curves.py.

--views instead compares draws on ten views (shifts, mirrored) with the plain network on the same views and a temperature, at
ten passes each; one record, results/bayesianize_views.json, to which every run adds what it lacks.

--rivals instead compares it with what else can be done to a trained network (calibration_rivals.py), on the networks of
calibration_curves.py: 1,500 held-out images, --rivals-scored others; one record, results/calibration_rivals.json, likewise.

    python benchmarks/bayesianize.py [--networks cifar_resnet20 cifar_resnet56] [--seeds 0 1 2] [--draws 20] [--budget 40000]
                                     [--scored "test[5000:]"] [--data-dir FOLDER] [--results FOLDER]
    python benchmarks/bayesianize.py --views [--networks cifar_resnet20 ...] [--seeds 0 1 2] [--scored "test[5000:7500]"]
    python benchmarks/bayesianize.py --rivals [--networks fashion cifar_resnet20] [--seeds 0 1 2] [--rivals-scored 1000]
                                     [--only TITLE ...]
"""

import argparse
import copy
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from calibration_rivals import CONTESTANTS, contest
from records import RESULTS, write_record
from safetensors.torch import load_file
from scoring import paired, row
from torch import Tensor, nn

import patchbayes as pb
from patchbayes import metrics, nets, views
from patchbayes.data import Dataset, Split, read

BATCH = 128


class Batches:
    """Batches of a split that can be read again."""

    def __init__(self, data: Dataset, split: Split) -> None:
        self.data, self.split = data, split

    def __len__(self) -> int:
        return -(-len(self.split) // BATCH)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.data.batches(self.split, BATCH)

    @property
    def targets(self) -> Tensor:
        return self.split.targets


def average(model: nn.Module, batches: Batches, draws: Any, seen: Any = None) -> Tensor:
    """The averaged log-probabilities, with the temperature of the network's likelihood."""
    return torch.cat([part.log_probs for part in pb.prediction.predict_batches(model, batches, draws, views=seen)])


def pretrained(name: str, folder: Path) -> nn.Module:
    plain: nn.Module = getattr(nets, name)()
    plain.load_state_dict(load_file(folder / "pretrained" / f"{name.replace('cifar_', 'cifar100_')}.safetensors"))
    return plain.eval().to(memory_format=torch.channels_last)  # a fifth faster here


def epoch_seconds(plain: nn.Module, data: Dataset, batches: int = 12) -> float:
    """Processor seconds of an epoch of ordinary training on the 50,000 images, from a few batches of a copy, after two more."""
    model = copy.deepcopy(plain).train()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9, nesterov=True, weight_decay=5e-4)
    split = data.part("train")
    source = data.batches(split, BATCH, order=torch.arange((batches + 2) * BATCH))
    started, seen = 0.0, 0
    for number, (inputs, targets) in enumerate(source):
        if number == 2:
            started, seen = time.process_time(), 0
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs.to(memory_format=torch.channels_last)), targets).backward()
        optimizer.step()
        seen += len(targets)
    return (time.process_time() - started) * len(split) / seen


def measure(name: str, seed: int, data: Dataset, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    plain = pretrained(name, folder)
    held_out, scored = Batches(data, data.part("test[:5000]")), Batches(data, data.part(options.scored))
    targets = scored.targets
    reference = metrics.fit_temperature(average(plain, held_out, "mean"), held_out.targets)
    original = average(plain, scored, "mean")
    scaled = metrics.apply_temperature(original, reference)
    rows = {"original": row(original, targets), "temperature": row(scaled, targets)}

    model, title = copy.deepcopy(plain), f"bayesianized S={options.draws}"
    start, worked = time.perf_counter(), time.process_time()
    report = pb.bayesianize_(model, held_out, draws=options.draws, seed=seed, budget=options.budget)
    seconds, worked = time.perf_counter() - start, time.process_time() - worked
    print(report, flush=True)
    log_probs = average(model, scored, options.draws)
    rows[title] = row(log_probs, targets) | paired(log_probs, scaled, targets)
    rows[title] |= {"seconds": seconds, "cpu_seconds": worked}
    rows["mean network"] = row(average(model, scored, "mean"), targets)
    path = options.results / f".{name}_{seed}.patch"
    try:
        pb.save(model, path)
        size = path.stat().st_size
    finally:
        path.unlink(missing_ok=True)
    found = report.calibration
    return {
        "network": name,
        "seed": seed,
        "settings": {
            "method": "Spread(5)",
            "sites": list(found.spread),
            "budget": options.budget,
            "examples": found.num_held_out,
            "draws": options.draws,
        },
        "selection": "test[:5000]",
        "scored": options.scored,
        "temperature": reference,
        "rows": rows,
        "chosen": {
            "spread": found.spread,
            "temperature": found.temperature,
            "draw_temperature": found.draw_temperature,
            "mean_temperature": found.mean_temperature,
            "kept": found.chosen,
        },
        "passes": {"learning": found.passes, "scoring": found.scoring_passes},
        "seconds": found.seconds | {"all": sum(found.seconds.values())},
        "epoch_cpu_seconds": epoch_seconds(plain, data),
        "patch_file_bytes": size,
        "model_bytes": report.model_bytes,
    }


def measure_views(name: str, seed: int, data: Dataset, folder: Path, scored: str) -> dict[str, Any]:
    """Ten draws, each on a view of its own, against the plain network on the same ten views, on the same images."""
    seen = views.shifts()
    plain, model = (pretrained(name, folder) for _ in range(2))
    held_out, fresh = Batches(data, data.part("test[:5000]")), Batches(data, data.part(scored))
    pb.calibrate_(plain, held_out, seed=seed, views=seen)
    worked = time.process_time()
    report = pb.bayesianize_(model, held_out, draws=len(seen), seed=seed, views=seen)
    worked = time.process_time() - worked
    print(report, flush=True)
    rival, found = average(plain, fresh, "mean", seen), average(model, fresh, len(seen), seen)
    return {
        "network": name,
        "seed": seed,
        "scored": scored,
        "images": len(fresh.targets),
        "held_out": report.calibration.num_held_out,
        "views": seen.name,
        "passes": len(seen),
        "plain": row(rival, fresh.targets),
        "bayesianized": row(found, fresh.targets) | paired(found, rival, fresh.targets),
        "chosen": report.chosen,
        "cpu_seconds": worked,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--budget", type=int, default=40_000)
    parser.add_argument("--rivals", action="store_true", help="compare with what else can be done to a trained network")
    parser.add_argument("--rivals-scored", type=int, default=1000)
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, help="of the rivals, those with these titles")
    parser.add_argument(
        "--views", action="store_true", help="compare draws on views with the plain network on the same"
    )
    parser.add_argument("--scored", default="test[5000:]")
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("PATCHBAYES_DATA", "."))
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    torch.set_flush_denormal(True)
    folder = Path(options.data_dir)
    if options.rivals:
        networks = options.networks or ["fashion", "cifar_resnet20"]
        contest(networks, options.seeds, options.rivals_scored, folder, options.results, options.only or CONTESTANTS)
        return
    data = read("cifar100", folder, held_out=0.0)
    path = options.results / "bayesianize_views.json"
    rows = json.loads(path.read_text())["rows"] if options.views and path.exists() else []
    for seed in options.seeds:
        for name in options.networks or ["cifar_resnet20", "cifar_resnet56"]:
            if options.views:
                if not any((one["network"], one["seed"]) == (name, seed) for one in rows):
                    rows.append(measure_views(name, seed, data, folder, options.scored))
                    print(json.dumps(rows[-1]), flush=True)
                    write_record("bayesianize_views", {"rows": rows}, options.results)
                continue
            record = measure(name, seed, data, folder, options)
            print(f"{name}, seed {seed}: {record['seconds']['all']:.0f} s")
            for title, values in record["rows"].items():
                print(f"  {title:<36}" + "  ".join(f"{key} {value:.4f}" for key, value in values.items()), flush=True)
            write_record(f"bayesianize_{name}_seed{seed}", record, options.results)


if __name__ == "__main__":
    main()
