"""What a search has tried, kept in a file: one that was killed goes on from there, to the same result."""

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..errors import PatchbayesError
from ..files import read_json, write_atomically
from .held_out import HeldOut


@dataclasses.dataclass(frozen=True)
class Tried:
    """A spread that was tried: the logarithm of its level and its slope, and the NLL at the temperatures that fit it best.

    layers   the set of layers that it was tried on, where there were several to choose from.
    """

    level: float
    slope: float
    nll: float
    draw_temperature: float
    log_temperature: float
    examples: int
    layers: str = ""


class Tries:
    """The places that were tried, in a file if there is one, each with a digest of all that its score depends on.

    digest   of the network, the held-out examples and the options: what another call has left is not used.
    """

    def __init__(self, path: Path | None, digest: str) -> None:
        self.path, self.digest = path, digest
        self._known: dict[tuple[str, float, float, int], Tried] = {}
        if path is not None and path.exists():
            for asked, tried in _read(path, digest):
                self._known[tried.layers, tried.level, tried.slope, asked] = tried

    def get(self, layers: str, level: float, slope: float, examples: int) -> Tried | None:
        """What was found at this place with so many examples asked for."""
        return self._known.get((layers, level, slope, examples))

    def add(self, tried: Tried, examples: int) -> None:
        self._known[tried.layers, tried.level, tried.slope, examples] = tried
        if self.path is None:
            return
        rows = [{"asked": key[-1], **dataclasses.asdict(one)} for key, one in self._known.items()]
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, json.dumps({"digest": self.digest, "tries": rows}).encode())
        except OSError as error:
            raise PatchbayesError(f"{self.path} cannot be written ({error.strerror or error}).") from error


def _read(path: Path, digest: str) -> Iterable[tuple[int, Tried]]:
    content = read_json(path)
    try:
        if content["digest"] != digest:
            return []
        fields = {field.name: field.type for field in dataclasses.fields(Tried)}
        return [
            (int(row["asked"]), Tried(**{name: _value(kind, row[name]) for name, kind in fields.items()}))
            for row in content["tries"]
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise PatchbayesError(
            f"{path}: is not what a search keeps of its tries ({error}).\n  do       remove it, and begin anew."
        ) from None


def _value(kind: Any, value: Any) -> Any:
    return {"float": float, "int": int, "str": str, float: float, int: int, str: str}[kind](value)


def digest_of(model: nn.Module, held_out: HeldOut, *options: object) -> str:
    """Of the values of a network, of the held-out examples, and of options by what they print."""
    found = hashlib.sha256(repr(options).encode())
    for name, tensor in model.state_dict().items():
        _add(found, name, tensor)
    for inputs, targets in held_out.batches:
        for leaf in [*tree_leaves(inputs), targets]:
            _add(found, "", leaf) if isinstance(leaf, Tensor) else found.update(repr(leaf).encode())
    return found.hexdigest()


def _add(found: Any, name: str, tensor: Any) -> None:
    if isinstance(tensor, Tensor):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
