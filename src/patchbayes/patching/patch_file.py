"""Reading a safetensors file of a patched network: its description is checked before anything else is done with it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors
from torch import Tensor

from ..digests import described
from ..errors import CheckpointMismatch, PatchbayesError
from ..files import read_json
from ..likelihoods import Likelihood
from ..likelihoods.likelihood import likelihood_from_config
from ..posteriors.method import method_from_config
from ..prior import PRIOR_KEY, Prior

FORMAT = "patchbayes-2"
READABLE = ("patchbayes-1", FORMAT)
PATCH_FILE, CONFIG_FILE = "patch.safetensors", "patch_config.json"  # in a folder of `save_pretrained`
LIKELIHOOD_KEY = "patchbayes_likelihood"  # where a file keeps the likelihood's tensors

Shapes = dict[str, tuple[int, ...]]


class PatchFile:
    """A safetensors file: its shapes and its description are read at once, its tensors when they are asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise CheckpointMismatch(f"load_: there is no file {path}.")
        try:
            with safetensors.safe_open(path, "pt") as file:
                self.metadata: dict[str, str] = file.metadata() or {}
                self.shapes: Shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
        except (safetensors.SafetensorError, OSError, ValueError) as error:
            raise self._broken(error) from None
        self.description = self._described() if "patchbayes" in self.metadata else None

    def tensors(self) -> dict[str, Tensor]:
        try:
            with safetensors.safe_open(self.path, "pt") as file:
                return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        except (safetensors.SafetensorError, OSError, ValueError) as error:
            raise self._broken(error) from None

    def _broken(self, error: Exception) -> CheckpointMismatch:
        return CheckpointMismatch(
            f"load_: {self.path} is not a whole safetensors file ({error}); copy or save it again "
            "(files of torch.save are not read)."
        )

    def described_by(self, config: Path) -> dict[str, Any]:
        """The description of this file in another one, which holds nothing else."""
        return self._checked(lambda: read_json(config), config)

    def _described(self) -> dict[str, Any]:
        return self._checked(lambda: described(self.metadata, f"load_: {self.path}"), self.path)

    def _checked(self, read: Callable[[], Any], where: Path) -> dict[str, Any]:
        try:
            description: dict[str, Any] = read()
            if description["format"] not in READABLE:
                raise CheckpointMismatch(
                    f"load_: {where} has the format {description['format']!r}, this version reads "
                    f"{' and '.join(READABLE)}; update patchbayes."
                )
            if description["kind"] not in ("patch", "whole") or not isinstance(description.get("shared", {}), dict):
                raise ValueError("kind or shared")
            if where == self.path and "shared" not in description:
                raise KeyError("shared")
            if not _is_measured(description.get("calibration")):
                raise ValueError("calibration")
            names = [site["name"] for site in description["sites"]]
            if len(set(names)) < len(names):
                raise ValueError("sites")
            for site in description["sites"]:
                if not (isinstance(site["name"], str) and isinstance(site["tied"], list)):
                    raise ValueError("sites")
                method_of(site, self.path)
            if where == self.path:
                self._check_prior(description["prior"])
        except CheckpointMismatch:
            raise
        except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
            raise CheckpointMismatch(f"load_: the description in {where} is damaged ({error!r}).") from None
        return description

    def _check_prior(self, config: dict[str, Any]) -> None:
        if "learned_layers" not in config:
            Prior(config["tau"], config["rho"])
            return
        more = ("alpha_tau", "alpha_rho") if config.get("kind") == "gamma" else ()
        for name in ("log_tau", "log_rho", *more):
            if self.shapes[f"{PRIOR_KEY}.{name}"] != (len(config["learned_layers"]),):
                raise ValueError(f"prior {name}")


def _is_measured(calibration: Any) -> bool:
    """Whether a calibration is none, or numbers by name, and the name of the views."""
    if calibration is None:
        return True
    if not isinstance(calibration, dict) or len(calibration) > 100:
        return False
    numbers = all(isinstance(value, int | float) for name, value in calibration.items() if name != "views")
    views = calibration.get("views", "")
    return numbers and isinstance(views, str) and len(views) <= 100


def method_of(site: dict[str, Any], path: Path) -> Any:
    try:
        return method_from_config(site["method"])
    except PatchbayesError as error:
        raise CheckpointMismatch(f'load_: {path}, site "{site["name"]}": {error}') from None


def likelihood_of(file: PatchFile, tensors: dict[str, Tensor]) -> Likelihood | None:
    """The likelihood of a file, which version 0.1.0 did not keep; its tensors are taken out."""
    assert file.description is not None
    own = {k.removeprefix(f"{LIKELIHOOD_KEY}."): k for k in tensors if k.startswith(f"{LIKELIHOOD_KEY}.")}
    state = {name: tensors.pop(key) for name, key in own.items()}
    if "likelihood" not in file.description:
        return None
    try:
        return likelihood_from_config(file.description["likelihood"], state)
    except (PatchbayesError, AttributeError, TypeError) as error:
        raise CheckpointMismatch(f"load_: {file.path}: {error}") from None
