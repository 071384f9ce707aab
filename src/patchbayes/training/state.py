"""The state of a training run in one safetensors file: tensors, and where the run stands as JSON in the header."""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from ..errors import CheckpointMismatch
from ..files import replacing
from .loss import TrainingLoss
from .writing import writing

FORMAT = "patchbayes-training-1"
NETWORK = "network."  # what keys of the network's tensors begin with
_OPTIMIZER = "optimizer."


@dataclass
class Progress:
    """Where a run stands. Order of data, augmentation and schedule follow from `epoch` and `step`.

    epoch, step   finished epochs, and finished steps of the one that runs.
    nll, kl, steps, seconds   sums since the last row of metrics.
    rows          the rows of metrics so far.
    """

    epoch: int = 0
    step: int = 0
    nll: float = 0.0
    kl: float = 0.0
    steps: int = 0
    seconds: float = 0.0
    rows: list[dict[str, Any]] = field(default_factory=list)

    def forget_sums(self) -> None:
        self.nll = self.kl = self.seconds = 0.0
        self.steps = 0


def save_state(path: Path, loss: TrainingLoss, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
    """Write all that a run needs to go on to the same bits, atomically: the old file stays until the new one is whole."""
    tensors = {key: value.detach() for key, value in loss.state_dict().items()}
    numbers: dict[str, Any] = {}
    for index, values in optimizer.state_dict()["state"].items():
        for name, value in values.items():
            key = f"{_OPTIMIZER}{index}.{name}"
            (tensors if isinstance(value, Tensor) else numbers)[key] = value
    description = {"format": FORMAT, "optimizer": numbers, "progress": dataclasses.asdict(progress)}
    copies = {key: value.to("cpu", copy=True).contiguous() for key, value in tensors.items()}  # none share memory
    with writing(path), replacing(path) as temporary:
        safetensors.torch.save_file(copies, temporary, metadata={"patchbayes": json.dumps(description)})


def load_state_(path: Path, loss: TrainingLoss, optimizer: torch.optim.Optimizer) -> Progress:
    """Put a saved state into a loss with its network and into an optimizer, in place; the progress is returned."""
    tensors, description = read_state(path)
    state: dict[int, dict[str, Any]] = {}
    saved = {key: tensors.pop(key) for key in list(tensors) if key.startswith(_OPTIMIZER)}
    for key, value in {**saved, **description["optimizer"]}.items():
        index, _, name = key.removeprefix(_OPTIMIZER).partition(".")
        state.setdefault(int(index), {})[name] = value
    try:
        loss.load_state_dict(tensors)
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    except (RuntimeError, ValueError) as error:
        raise CheckpointMismatch(f"{path} does not fit the network of this run: {error}") from None
    return Progress(**description["progress"])


def read_state(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the description of a state file."""
    try:
        with safetensors.safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        description = json.loads(metadata["patchbayes"])
        if description["format"] != FORMAT:
            raise ValueError(f"the format is {description['format']!r}, this version reads {FORMAT!r}")
        Progress(**description["progress"])
        dict(description["optimizer"])
    except (safetensors.SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise CheckpointMismatch(f"{path} is not a whole state of a training run ({error!r}).") from None
    return tensors, description
