"""A run folder from an ordinary checkpoint: read it, bayesianize it, keep the patches beside a pointer to it."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint import save
from ..data import Dataset, Split, read
from ..errors import PatchbayesError
from ..nets.named import build_net
from ..patching import patched_sites
from ..provenance import provenance
from ..training import RunFolder, load_ordinary_
from ..training.data_order import EpochBatches
from ..training.data_record import data_record
from ..training.ordinary_checkpoint import sha256_of
from .recipe import bayesianize_
from .report import BayesianizeReport


def bayesianize_checkpoint(
    checkpoint: Path,
    folder: Path,
    *,
    data: str,
    model: str,
    held_out: str | None,
    data_dir: Path | None = None,
    batch_size: int = 128,
    seed: int = 0,
    command: str | None = None,
    **options: Any,
) -> tuple[RunFolder, BayesianizeReport]:
    """Bayesianize the network of a checkpoint file, and write config.json and patch.safetensors into a new folder.

    data, model   as `data.read` and `nets.named.build_net` take them.
    held_out      a part of the data that the checkpoint was not trained on, such as "test[:5000]"; None: none.
    options       as in `bayesianize_`. Nothing is written before all is done.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise PatchbayesError(f"bayesianize: {folder} is there already and not an empty folder; name a new one.")
    if not checkpoint.is_file():
        raise PatchbayesError(f"there is no file {checkpoint}.")
    reading: dict[str, Any] = {"held_out": 0.0}
    dataset = read(data, data_dir, **reading)
    if dataset.task != "classification":
        raise PatchbayesError(f"bayesianize: {data} is a regression; classification is required.")
    if held_out is not None and held_out.strip().startswith(("train", "held_out")):
        raise PatchbayesError(
            f"bayesianize: held_out={held_out!r} is of what the network was trained on, and it fits that too well to choose "
            'anything by it; give a part of the test data, such as "test[:5000]".'
        )
    kept = None if held_out is None else dataset.part(held_out)
    network = build_net(model, dataset.num_outputs, dataset.input_shape)
    load_ordinary_(network, checkpoint)
    report = bayesianize_(
        network,
        None if options.get("epochs") == 0 else TrainingBatches(dataset, batch_size, seed),
        None if kept is None else PartBatches(dataset, kept, batch_size),
        seed=seed,
        example_input=torch.zeros(2, *dataset.input_shape),
        **options,
    )
    methods = dict.fromkeys(site.method.label for site in patched_sites(network).values())
    run = RunFolder.create(
        folder,
        {
            "kind": "bayesianize",
            "model": model,
            "data": data_record(dataset, None if data_dir is None else str(data_dir), **reading),
            "base": {"path": str(checkpoint.resolve()), "sha256": sha256_of(checkpoint)},
            "sites": options.get("sites", "norm+output"),
            "method": ", ".join(methods),
            "seed": seed,
            "held_out": held_out,
            "command": command,
            "report": str(report),
            "jitter": report.jitter,
            "spread": report.spread,
            "seconds": report.seconds,
            **provenance(),
        },
    )
    save(network, folder / "patch.safetensors")
    run.append(_row(report))
    return run, report


def _row(report: BayesianizeReport) -> dict[str, Any]:
    scores = {} if report.after is None else dataclasses.asdict(report.after)
    row = {f"held_out_{name}": value for name, value in scores.items()}
    return {"epoch": 1, "loss": report.last_loss, "train_seconds": sum(report.seconds.values()), **row}


class TrainingBatches:
    """The training part in augmented batches; each pass over it is another epoch, with another order."""

    def __init__(self, dataset: Dataset, batch_size: int, seed: int) -> None:
        self.dataset, self.batch_size, self.seed = dataset, batch_size, seed
        self._passes = 0

    def __len__(self) -> int:
        return len(EpochBatches(self.dataset, self.batch_size, self.seed, 0))

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        batches = EpochBatches(self.dataset, self.batch_size, self.seed, self._passes)
        self._passes += 1
        for step in range(len(batches)):
            inputs, targets, _ = batches[step]
            yield inputs, targets


class PartBatches:
    """A part of the data in batches, the same in every pass."""

    def __init__(self, dataset: Dataset, split: Split, batch_size: int) -> None:
        self.dataset, self.split, self.batch_size = dataset, split, batch_size

    def __len__(self) -> int:
        return -(-len(self.split) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.dataset.batches(self.split, self.batch_size)
