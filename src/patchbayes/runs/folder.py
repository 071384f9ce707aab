"""RunFolder: what a run leaves behind, and how a network comes back out of it."""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from torch import nn

from ..data import Dataset
from ..data.preparation import Preparation
from ..errors import CheckpointMismatch, PatchbayesError, UntrustedCode
from ..files import open_regular, parse_json, read_json, write_atomically
from ..likelihoods import Categorical, Gaussian, Likelihood
from ..nets.named import build_net
from ..patching.checkpoint import load_
from ..patching.network import network_of
from ..patching.patch import is_patched
from ..views import Views, matching, named
from .config import MOST_THREADS, TrainingConfig
from .data_record import check_record, dataset_of
from .entry import Entry
from .network import patched_net
from .ordinary_checkpoint import load_ordinary_, sha256_of
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
    calibration.json     what `train --calibrate` did to best.safetensors, and the views that it is to be asked with
    last.safetensors     the whole state of a training; best.safetensors the network that was best on the held-out part
    patch.safetensors    the patches of a bayesianizing
    """

    def __init__(self, path: str | Path, *, trust_code: bool = False) -> None:
        """Open a run that is there.

        trust_code: whether functions that the folder names as its network or data (package.module:function) may be run. A
        folder that somebody else made could name anything.
        """
        self.path = Path(path)
        self.trust_code = trust_code
        self.config = _read_config(self.path)

    @classmethod
    def open(cls, path: str | Path, *, trust_code: bool = False) -> "RunFolder":
        return cls(path, trust_code=trust_code)

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
            network = self._net(outputs, shape)
            load_ordinary_(network, self._base())
            file = self.path / "patch.safetensors"
            load_(network, file)
        else:
            file = self.path / f"{which}.safetensors"
            if not file.is_file():
                raise PatchbayesError(
                    f"{self.path} has no {file.name} yet: its training has not reached its first checkpoint."
                )
            if which == "best":
                network = self._net(outputs, shape)
                load_(network, file)
            else:
                with self._naming_code():
                    network, _ = patched_net(self.training, outputs, shape, trust_code=self.trust_code)
                tensors, _ = read_state(file)
                own = {key.removeprefix(NETWORK): value for key, value in tensors.items() if key.startswith(NETWORK)}
                try:
                    network.load_state_dict(own)
                except RuntimeError as error:
                    raise CheckpointMismatch(f"{file} does not fit the network of this run: {error}") from None
        self._check_patched(network, file)
        if is_patched(network) and self.kind == "train":
            owner, likelihood = network_of(network), self.likelihood(which)
            if which == "last" or type(owner.likelihood) is not type(likelihood):  # files of 0.1.0 keep none
                owner.likelihood = likelihood
        return network.eval()

    def dataset(self, data_dir: Path | str | None = None) -> Dataset:
        """The data set of the run, prepared as the run prepared it; `data_dir` where it has moved."""
        with self._naming_code():
            return dataset_of(self.config["data"], data_dir, trust_code=self.trust_code)

    def likelihood(self, which: Which = "best") -> Likelihood:
        """How the outputs of `model(which)` speak of the data; a Gaussian's precision is that of standardized targets."""
        if self.config["data"]["task"] == "classification":
            return Categorical()
        rows = [row for row in self.history() if "output_precision" in row and (which == "last" or row.get("best"))]
        if rows:
            return Gaussian(rows[-1]["output_precision"])
        precision = self.config.get("training", self.config).get("output_precision")
        return Gaussian(1.0 if precision is None else precision)

    @property
    def is_calibrated(self) -> bool:
        """Whether best.safetensors is what `train --calibrate` wrote."""
        best, mark = self.path / "best.safetensors", self.path / "calibration.json"
        return mark.is_file() and best.is_file() and read_json(mark).get("sha256") == sha256_of(best)

    def draws_agree(self, which: Which = "best") -> bool:
        """Whether `train --calibrate` found no gain in draws and made them all the mean network."""
        return (
            which == "best" and self.is_calibrated and read_json(self.path / "calibration.json").get("chosen") == "none"
        )

    def views(self, which: Which = "best") -> Views | None:
        """The views that the network was calibrated with, and predicts with; None for none."""
        if self.kind == "bayesianize":
            known = self.config.get("views")
            return None if known is None else named(known)
        if which != "best" or not self.is_calibrated:
            return None
        if read_json(self.path / "calibration.json").get("views") is None:
            return None
        return matching(Preparation.from_config(self.config["data"]["preparation"]).augmentation)

    def history(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl; a last line that is being written is left out."""
        path = self.path / "metrics.jsonl"
        if not path.exists():
            return []
        with open_regular(path) as file:
            lines = file.read().split(b"\n")[:-1]
        try:
            return [_row(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]
        except PatchbayesError as error:
            raise PatchbayesError(f"{path} is damaged: {error}") from None

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

    def _check_patched(self, network: nn.Module, file: Path) -> None:
        """Refuse a checkpoint of another kind in the place of the run's own: it would answer as another network."""
        expected = self.kind == "bayesianize" or bool(self.training.rules())
        if is_patched(network) != expected:
            kinds = {True: "a patched network", False: "an ordinary network"}
            raise CheckpointMismatch(
                f"{file} holds {kinds[not expected]}, and the run is of {kinds[expected]}; it is another run's file."
            )

    def _net(self, outputs: int, shape: tuple[int, ...]) -> nn.Module:
        with self._naming_code():
            return build_net(self.config["model"], outputs, shape, trust_code=self.trust_code)

    @contextlib.contextmanager
    def _naming_code(self) -> Iterator[None]:
        """Say of code that may not be run which folder names it."""
        try:
            yield
        except UntrustedCode as error:
            raise UntrustedCode(f"{self.path} names code of its own: {error}") from None

    def _base(self) -> Path:
        base = self.config["base"]
        path = self.path / base["path"]  # an absolute path stays what it is
        if not path.is_file():
            raise PatchbayesError(
                f"{self.path}: the checkpoint that was patched, {path}, is missing.\n"
                '  do       put it back, or correct "base" in config.json.'
            )
        if sha256_of(path) != base["sha256"]:
            raise PatchbayesError(f"{self.path}: {path} is not the checkpoint that was patched: its SHA-256 differs.")
        return path


def refuse_used(path: Path) -> None:
    """Refuse a folder that holds anything; what begins with a dot (a lock, the rest of a killed write) does not count."""
    names = sorted(entry.name for entry in path.iterdir() if not entry.name.startswith("."))
    if "config.json" in names:
        raise PatchbayesError(
            f"{path} already holds a run.\n  do       go on with it by resume=True (--resume), or choose another folder."
        )
    if names:
        raise PatchbayesError(
            f"{path} is not empty ({', '.join(names[:5])}{', ...' if len(names) > 5 else ''}); a run needs a folder of its "
            "own.\n  do       choose a new or empty folder."
        )


def _read_config(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    if not file.is_file():
        runs = sorted(str(one.parent) for one in path.glob("*/config.json"))
        hint = f"\n  do       name one of the runs in it: {', '.join(runs[:5])}." if runs else ""
        raise PatchbayesError(f"{path} is not a run folder: it has no config.json.{hint}")
    try:
        config = read_json(file)
        known = config["schema"] == SCHEMA and config["kind"] in ("train", "bayesianize")
        complete = isinstance(config["model"], str) and isinstance(config["data"], dict)
        own = config["training"] if config["kind"] == "train" else config["base"]
    except (KeyError, TypeError, PatchbayesError) as error:
        reasons = {KeyError: f"it has no {error}", TypeError: "it cannot be read as one"}
        why = reasons.get(type(error), str(error).removeprefix(f"{file}: ").rstrip("."))
        raise PatchbayesError(
            f"{file} is not the configuration of a run: {why}.\n  do       put the original back, or choose another folder."
        ) from None
    if not (known and complete and isinstance(own, dict)):
        raise PatchbayesError(f"{file} is of another version (schema {config['schema']!r}, kind {config['kind']!r}).")
    _check(Entry(config, str(file), remedy="put the original file back, or choose another folder."))
    return dict(config)


def _check(config: Entry) -> None:
    """Refuse values of a config.json that are not of their kind."""
    check_record(config["data"])
    for key in ("held_out", "command", "sites", "method"):
        if config[key].present:
            config[key].text()
    if config["seed"].present:
        config["seed"].integer()
    if config["output_precision"].present:
        config["output_precision"].number()
    if config["views"].value is not None:
        try:
            named(config["views"].text())
        except PatchbayesError:
            config["views"].fail("the name of views, such as shifts(1, True)")
    if config["kind"].value == "bayesianize":
        config["base"]["path"].text()
        config["base"]["sha256"].text()
    machine = config["machine"]
    if machine.present and machine["threads"].present and not 1 <= machine["threads"].count() <= MOST_THREADS:
        machine["threads"].fail(f"a number of threads, 1 to {MOST_THREADS}")


def _row(line: bytes, where: str) -> dict[str, Any]:
    """A row of metrics: names with numbers."""
    entry = Entry(parse_json(line, where), where, remedy="train in another folder, or take the line out.")
    for name, item in entry.named():
        if not isinstance(item.value, str | bool):
            item.number()
        if name in ("train_seconds", "output_precision") and item.number() is None:
            item.fail("a number")
        if name == "epoch":
            item.count()
    return dict(entry.value)


def _line(row: Mapping[str, Any]) -> bytes:
    return f"{json.dumps(dict(row), allow_nan=False)}\n".encode()
