"""A loop of one's own, as README shows it: noise from the first step, noise that waits for `warm_up_`, and none.

The bundled clothes (2,000 images, 1,000 others held out), trained for few epochs, for some, and until they are fitted. All are
predicted in one pass, each with the temperature that fits it to the held-out images, and scored on 2,000 test images; once more
with the statistics of the batch norms estimated again, by the mean network, from the training images.

Each result is kept in --work as it comes, so that a stopped run goes on. Writes results/own_loop.json.

    python benchmarks/own_loop.py --seeds 0 1 2
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from records import write_record
from torch import nn

import patchbayes as pb
from patchbayes.cli.demo_study import Material, answers, fashion, held_out_batches, scores_of, tempered
from patchbayes.files import write_atomically
from patchbayes.patching.drawing import hold
from patchbayes.patching.frames import MEAN
from patchbayes.patching.network import network_of

EPOCHS = (4, 12, 40)
LOOPS = ("original", "noise from the first step", "noise after warm_up_")
_KEPT = ("accuracy", "nll", "ece", "temperature", "held_out_nll")


def trained(material: Material, loop: str, seed: int, epochs: int) -> tuple[nn.Module, list[float]]:
    """The network after README's loop, and the share of the steps that drew in each epoch."""
    model = material.network(seed)
    rate = material.learning_rate
    if loop == "original":
        optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    else:
        pb.patch_(model, pb.mixed(), generator=torch.Generator().manual_seed(seed))
        optimizer = torch.optim.Adam(pb.objective.parameter_groups(model, lr=rate, patch_lr=5 * rate))
    x, y = material.train
    order = torch.Generator().manual_seed(seed)
    model.train()
    shares = []
    for _ in range(epochs):
        if loop == "noise after warm_up_":
            shares.append(round(pb.warm_up_(model, held_out_batches(material)), 3))
        for rows in torch.randperm(len(x), generator=order).split(material.batch):
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
    return model.eval(), shares


def estimate_statistics_again_(model: nn.Module, material: Material) -> None:
    """Batch-norm statistics of the mean network over the training images: plain averages of batches."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
    model.train()
    with torch.no_grad():
        for part in material.train[0].split(material.batch):
            _mean_output(model, part)
    model.eval()


def _mean_output(model: nn.Module, x: torch.Tensor) -> None:
    if not pb.is_patched(model):
        model(x)
        return
    with hold(network_of(model), MEAN):
        model(x)


def result(material: Material, loop: str, seed: int, epochs: int) -> dict[str, Any]:
    """Scores in one pass with the statistics of training, and with those estimated again."""
    model, shares = trained(material, loop, seed, epochs)
    found: dict[str, Any] = {"as trained": _scored(material, model), "shares": shares}
    estimate_statistics_again_(model, material)
    return found | {"statistics again": _scored(material, model)}


def _scored(material: Material, model: nn.Module) -> dict[str, float]:
    scores = scores_of(material, *tempered(material, answers(material, model, "mean")))
    return {name: round(scores[name], 5) for name in _KEPT}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "own_loop")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    options.work.mkdir(parents=True, exist_ok=True)
    rows = []
    for seed in options.seeds:
        material = replace(fashion(seed, corrupted=1), corrupted={}, unfamiliar=None)
        for epochs in EPOCHS:
            for number, loop in enumerate(LOOPS):
                file = options.work / f"{seed}_{epochs}_{number}.json"
                found = _kept(file, lambda m=material, w=loop, s=seed, e=epochs: result(m, w, s, e))
                print(f"seed {seed}, {epochs} epochs, {loop}: {found['as trained']}", flush=True)
                rows.append({"seed": seed, "epochs": epochs, "loop": loop, **found})
    print(f"wrote {write_record('own_loop', {'seed_numbers': options.seeds, 'rows': rows})}")


def _kept(file: Path, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    if not file.exists():
        write_atomically(file, json.dumps(make()).encode())
    found: dict[str, Any] = json.loads(file.read_text())
    return found


if __name__ == "__main__":
    main()
