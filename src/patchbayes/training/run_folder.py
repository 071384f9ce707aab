"""RunFolder: what a run leaves behind, and how a network comes back out of it."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from torch import nn

from ..checkpoint import load_
from ..data import Dataset
from ..errors import PatchbayesError
from ..files import write_atomically
from ..likelihoods import Categorical, Gaussian, Likelihood
from ..nets.named import build_net
from .config import TrainingConfig
from .data_record import dataset_of
from .ordinary_checkpoint import load_ordinary_, sha256_of
from .patched_net import patched_net
from .state import NETWORK, read_state
from .writing import writing

SCHEMA = 1
Which = Literal["best", "last"]


class RunFolder:
    """A folder with one run: a training ("train"), or patches trained for an ordinary checkpoint ("bayesianize").

    config.json          {"schema": 1, "kind": ..., "model": ..., "data": a data record, ...}; "training" holds the
                         TrainingConfig of a training, "base" path and sha256 of the checkpoint of a bayesianizing
    metrics.jsonl        a row of numbers for each epoch
    log.txt              what happened when
    last.safetensors     the whole state of a training; best.safetensors the network that was best on the held-out part
    patch.safetensors    the patches of a bayesianizing
    """

    def __init__(self, path: str | Path) -> None:
        """Open a run that is there."""
        self.path = Path(path)
        self.config = _read_config(self.path)

    @classmethod
    def open(cls, path: str | Path) -> "RunFolder":
        return cls(path)

    @classmethod
    def create(cls, path: str | Path, config: Mapping[str, Any]) -> "RunFolder":
        """Begin a run in a new or empty folder; "schema" is added to the config."""
        path = Path(path)
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
            refuse_used(path)
            content = json.dumps({"schema": SCHEMA, **config}, indent=1, ensure_ascii=False, allow_nan=False)
            write_atomically(path / "config.json", f"{content}\n".encode())
        return cls(path)

    @property
    def kind(self) -> str:
        return str(self.config["kind"])

    @property
    def training(self) -> TrainingConfig:
        """The configuration of a training."""
        try:
            return TrainingConfig.from_json(self.config["training"])
        except PatchbayesError as error:
            raise PatchbayesError(f"{self.path / 'config.json'}: {error}") from None

    def model(self, which: Which = "best") -> nn.Module:
        """The network of the run, in evaluation mode: patched and loaded. A bayesianizing has only one."""
        if which not in ("best", "last"):
            raise PatchbayesError(f'RunFolder.model({which!r}): give "best" or "last".')
        if which == "last" and self.kind == "bayesianize":
            raise PatchbayesError(f'{self.path} was not trained but bayesianized: it has no "last" network, only one.')
        data = self.config["data"]
        outputs, shape = data["num_outputs"], tuple(data["input_shape"])
        if self.kind == "bayesianize":
            network = build_net(self.config["model"], outputs, shape)
            load_ordinary_(network, self._base())
            load_(network, self.path / "patch.safetensors")
        else:
            file = self.path / f"{which}.safetensors"
            if not file.is_file():
                raise PatchbayesError(
                    f"{self.path} has no {file.name} yet: its training has not come to a first checkpoint."
                )
            if which == "best":
                network = build_net(self.config["model"], outputs, shape)
                load_(network, file)
            else:
                network, _ = patched_net(self.training, outputs, shape)
                tensors, _ = read_state(file)
                network.load_state_dict(
                    {key.removeprefix(NETWORK): value for key, value in tensors.items() if key.startswith(NETWORK)}
                )
        return network.eval()

    def dataset(self, data_dir: Path | str | None = None) -> Dataset:
        """The data set of the run, prepared as the run prepared it; `data_dir` where it has moved."""
        return dataset_of(self.config["data"], data_dir)

    def likelihood(self, which: Which = "best") -> Likelihood:
        """How the outputs of `model(which)` speak of the data; a Gaussian's precision is that of standardized targets."""
        if self.config["data"]["task"] == "classification":
            return Categorical()
        rows = [row for row in self.history() if "output_precision" in row and (which == "last" or row.get("best"))]
        if rows:
            return Gaussian(rows[-1]["output_precision"])
        precision = self.config.get("training", self.config).get("output_precision")
        return Gaussian(1.0 if precision is None else precision)

    def history(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl; a last line that is being written is left out."""
        path = self.path / "metrics.jsonl"
        if not path.exists():
            return []
        lines = path.read_text(encoding="utf-8").split("\n")
        try:
            return [json.loads(line) for line in lines[:-1]]
        except ValueError as error:
            raise PatchbayesError(f"{path} is damaged: {error}.") from None

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a row to metrics.jsonl, flushed to disk."""
        path = self.path / "metrics.jsonl"
        with writing(path), path.open("ab") as file:
            file.write(_line(row))
            file.flush()
            os.fsync(file.fileno())

    def rewrite_history(self, rows: list[dict[str, Any]]) -> None:
        """Put these rows into metrics.jsonl and no others."""
        path = self.path / "metrics.jsonl"
        with writing(path):
            write_atomically(path, b"".join(_line(row) for row in rows))

    def _base(self) -> Path:
        base = self.config["base"]
        path = self.path / base["path"]  # an absolute path stays what it is
        if not path.is_file():
            raise PatchbayesError(
                f"{self.path}: the checkpoint that was patched, {path}, is not there.\n"
                '  do       put it back, or correct "base" in config.json.'
            )
        if sha256_of(path) != base["sha256"]:
            raise PatchbayesError(
                f"{self.path}: {path} is not the checkpoint that was patched (its SHA-256 is another); it was changed since."
            )
        return path


def refuse_used(path: Path) -> None:
    """Refuse a folder that holds anything; what begins with a dot (a lock, the rest of a killed write) does not count."""
    names = sorted(entry.name for entry in path.iterdir() if not entry.name.startswith("."))
    if "config.json" in names:
        raise PatchbayesError(
            f"{path} holds a run already.\n  do       go on with it by resume=True (--resume), or choose another folder."
        )
    if names:
        raise PatchbayesError(
            f"{path} is not empty ({', '.join(names[:5])}{', ...' if len(names) > 5 else ''}); a run needs a folder of its "
            "own.\n  do       choose a new or empty folder."
        )


def _read_config(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    if not file.is_file():
        raise PatchbayesError(f"{path} is not a run folder: it has no config.json.")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        known = config["schema"] == SCHEMA and config["kind"] in ("train", "bayesianize")
        complete = isinstance(config["model"], str) and isinstance(config["data"], dict)
        own = config["training"] if config["kind"] == "train" else config["base"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else "it cannot be read as one"
        raise PatchbayesError(
            f"{file} is not the configuration of a run: {why}.\n  do       put the original back, or choose another folder."
        ) from None
    if not (known and complete and isinstance(own, dict)):
        raise PatchbayesError(f"{file} is of another version (schema {config['schema']!r}, kind {config['kind']!r}).")
    return dict(config)


def _line(row: Mapping[str, Any]) -> bytes:
    return f"{json.dumps(dict(row), allow_nan=False)}\n".encode()
