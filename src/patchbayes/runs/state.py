"""The state of a training run in one safetensors file: tensors, and where the run stands as JSON in the header."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from ..digests import damaged, described, sealed
from ..errors import CheckpointMismatch, PatchbayesError
from ..files import replacing
from ..patching.network import site_of
from ..patching.patch import is_patched
from ..posteriors.posterior import CHILD, is_bias
from .entry import Entry
from .loss import TrainingLoss
from .writing import writing

FORMAT = "patchbayes-training-2"
_OLD_FORMAT = "patchbayes-training-1"  # of 0.1.0, which stored posteriors otherwise
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
        safetensors.torch.save_file(copies, temporary, metadata=sealed(description, copies))


def load_state_(path: Path, loss: TrainingLoss, optimizer: torch.optim.Optimizer) -> Progress:
    """Put a saved state into a loss with its network and into an optimizer, in place; the progress is returned."""
    tensors, description = read_state(path)
    state: dict[int, dict[str, Any]] = {}
    saved = {key: tensors.pop(key) for key in list(tensors) if key.startswith(_OPTIMIZER)}
    for key, value in {**saved, **description["optimizer"]}.items():
        index, _, name = key.removeprefix(_OPTIMIZER).partition(".")
        state.setdefault(int(index), {})[name] = value
    if description["format"] == _OLD_FORMAT:
        kept = {key: value for key, value in loss.state_dict().items() if "temperature" in key}  # there were none
        tensors = kept | tensors
        state = _upgraded(state, loss, optimizer) if is_patched(loss.network) else state
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
        description = described(metadata, "its description")
        if description["format"] not in (FORMAT, _OLD_FORMAT):
            raise ValueError(f"the format is {description['format']!r}, this version reads {FORMAT!r}")
        _check_progress(Entry(description["progress"], str(path), remedy="train in another folder."))
        for key, value in dict(description["optimizer"]).items():
            number = key.removeprefix(_OPTIMIZER).partition(".")[0]
            if not number.isdecimal() or not isinstance(value, int | float | None):
                raise ValueError(f"{key}: {value!r}")
        problems = damaged(description, tensors)
        if problems:
            raise ValueError("; ".join(problems[:3]))
    except (safetensors.SafetensorError, OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        why = str(error) if isinstance(error, PatchbayesError) else repr(error)
        raise CheckpointMismatch(
            f"{path} is not a whole state of a training run ({why}).\n"
            "  do       copy it again if it was copied, or train into a new folder."
        ) from None
    return tensors, description


def _check_progress(entry: Entry) -> None:
    """Refuse a progress that a run cannot go on from."""
    known = [field.name for field in dataclasses.fields(Progress)]
    if sorted(name for name, _ in entry.named()) != sorted(known):
        entry.fail(f"the values {', '.join(known)}")
    for name in ("epoch", "step", "steps"):
        entry[name].count()
    for name in ("nll", "kl", "seconds"):
        if not isinstance(entry[name].value, int | float):
            entry[name].fail("a number")
        entry[name].number()
    for row in entry["rows"].listed():
        row["epoch"].count()
        for _, item in row.named():
            if not isinstance(item.value, str | bool):
                item.number()


def _upgraded(
    state: dict[int, dict[str, Any]], loss: TrainingLoss, optimizer: torch.optim.Optimizer
) -> dict[int, dict[str, Any]]:
    """What the optimizer of a run of 0.1.0 knew of each parameter, for the parameters that posteriors have now.

    Parameters have numbers, group by group. 0.1.0 had one for each random parameter of a layer, with components or mean and
    deviation in its leading axis: `Posterior.upgrade` says what they are today, of moments as of values.
    """
    numbers = {
        id(parameter): number
        for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"])
    }
    found: dict[int, dict[str, Any]] = {}
    by_name = dict(loss.network.named_parameters(remove_duplicate=False))
    for number, (prefix, layer, name) in enumerate(_order_of_0_1_0(loss.network)):
        site = site_of(layer)
        for quantity, value in state.get(number, {}).items():
            if site is None or name not in site.posterior.names:
                parts = {name: value}
            elif isinstance(value, Tensor) and value.dim():
                parts = site.posterior.upgrade({name: value})
            else:  # a number of steps
                parts = dict.fromkeys(site.posterior.upgrade({name: torch.zeros(2, 1)}), value)
            for key, part in parts.items():
                found.setdefault(numbers[id(by_name[prefix + key])], {})[quantity] = part
    others = len([p for group in optimizer.param_groups for p in group["params"]]) - 1
    if "output_precision" in {group["name"] for group in optimizer.param_groups} and state:
        found[others] = state[max(state)]
    return found


def _order_of_0_1_0(network: nn.Module) -> list[tuple[str, nn.Module, str]]:
    """(prefix, layer, name) of every parameter as 0.1.0 numbered them: patched ones first, weights before biases."""
    found: list[tuple[str, nn.Module, str]] = []
    seen: set[int] = set()

    def visit(layer: nn.Module, prefix: str) -> None:
        if id(layer) in seen:
            return
        seen.add(id(layer))
        site = site_of(layer)
        random = site.posterior.names if site else ()
        found.extend(
            (prefix, layer, name) for name, p in layer._parameters.items() if p is not None and name not in random
        )
        for child, module in layer._modules.items():
            if child != CHILD and module is not None:
                visit(module, f"{prefix}{child}.")
        found.extend((prefix, layer, name) for name in random)

    visit(network, "")
    return sorted(found, key=lambda item: (site_of(item[1]) is None, is_bias(item[2])))
