"""Ordinary checkpoints: weights that someone trained without this package, read into a built network."""

import hashlib
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from ..digests import refuse_damaged
from ..errors import CheckpointMismatch

_WRAPPERS = (
    "state_dict",
    "model_state_dict",
    "model",
    "net",
    "network",
)  # under which training scripts put the weights
_PREFIXES = ("module.", "_orig_mod.", "model.")  # what DDP, torch.compile and Lightning put before every name


def load_ordinary_(network: nn.Module, path: str | Path) -> None:
    """Put the weights of a file into a network, in place: safetensors, or a state dict as torch.save writes it.

    All names and shapes must be those of the network, floating-point numbers of any precision where it has such; counters of
    batches (`num_batches_tracked`) may be missing. Nothing is unpickled but tensors and plain containers. On a mismatch the
    network stays as it was, and the error lists what does not fit.
    """
    tensors = _without_prefixes(read_ordinary(path), set(network.state_dict()))
    own = network.state_dict()
    expected = {key: tuple(value.shape) for key, value in own.items()}
    problems = [
        f"missing in the file: {key}"
        for key in expected
        if key not in tensors and not key.endswith("num_batches_tracked")
    ]
    problems += [f"not in the network: {key}" for key in tensors if key not in expected]
    problems += [
        f"{key}: {tuple(tensors[key].shape)} in the file, {shape} in the network"
        for key, shape in expected.items()
        if key in tensors and tuple(tensors[key].shape) != shape
    ]
    problems += [
        f"{key}: {tensors[key].dtype} in the file, {value.dtype} in the network"
        for key, value in own.items()
        if key in tensors and _kind(tensors[key]) != _kind(value)
    ]
    if problems:
        more = f"\n  - ... and {len(problems) - 12} more" if len(problems) > 12 else ""
        listing = "".join(f"\n  - {problem}" for problem in problems[:12])
        raise CheckpointMismatch(f"{path} is not a checkpoint of this {type(network).__name__}:{listing}{more}")
    network.load_state_dict(tensors, strict=False)


def read_ordinary(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a file by name, on the CPU, out of the containers that training scripts put around them."""
    path = Path(path)
    if path.is_dir():
        raise CheckpointMismatch(
            f"{path} is a folder.\n  do       give the file of the weights, such as best.safetensors."
        )
    if not path.is_file():
        raise CheckpointMismatch(f"there is no file {path}.")
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    _refuse_compressed(path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointMismatch(
            f"{path} cannot be read as a checkpoint ({type(error).__name__}: {_first_line(error)}).\n"
            "  do       give a .safetensors file, or torch.save(model.state_dict(), ...): a file with whole objects in it is "
            "not opened, since that could run anything."
        ) from None
    return _unwrapped(content, path)


def sha256_of(path: str | Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        with safetensors.safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors: dict[str, Tensor] = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise CheckpointMismatch(f"{path} is not a whole safetensors file ({error}); copy or save it again.") from None
    if '"patchbayes-training' in metadata.get("patchbayes", ""):
        raise CheckpointMismatch(
            f"{path} is the state of a training.\n  do       give the weights alone, best.safetensors beside it."
        )
    if "patchbayes" in metadata:
        raise CheckpointMismatch(f"{path} holds a patched network; expected an ordinary checkpoint.")
    refuse_damaged(metadata, tensors, str(path))
    return tensors


def _refuse_compressed(path: Path) -> None:
    """torch.save compresses nothing: what unpacks to more than its size was made to fill the memory."""
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):  # no zip file: torch.load says what is wrong
        return
    unpacked = sum(member.file_size for member in members)
    if any(member.compress_type != zipfile.ZIP_STORED for member in members) or unpacked > path.stat().st_size:
        raise CheckpointMismatch(
            f"{path} is a compressed archive ({path.stat().st_size:,} bytes that unpack to {unpacked:,}), and torch.save "
            "compresses nothing.\n  do       unpack it if you trust it, and save its state dict anew."
        )


def _kind(value: Tensor) -> str:
    return "complex" if value.is_complex() else "floating" if value.is_floating_point() else "whole"


def _unwrapped(content: Any, path: Path) -> dict[str, Tensor]:
    while isinstance(content, Mapping):
        if content and all(isinstance(value, Tensor) for value in content.values()):
            odd = next((key for key, value in content.items() if not _ordinary(value)), None)
            if odd is not None:
                raise CheckpointMismatch(
                    f"{path}: the tensor {odd!r} is sparse, nested, quantized or without values; expected ordinary ones.\n"
                    "  do       convert it where it was made, and save the state dict anew."
                )
            return {str(key): value for key, value in content.items()}
        inner = next((content[key] for key in _WRAPPERS if isinstance(content.get(key), Mapping)), None)
        if inner is None:
            break
        content = inner
    raise CheckpointMismatch(
        f"{path} holds no state dict: expected a mapping from names to tensors, bare or under one of "
        f"{', '.join(_WRAPPERS)}, got {_outline(content)}."
    )


def _ordinary(value: Tensor) -> bool:
    strided = value.layout == torch.strided and not value.is_nested
    return strided and not value.is_quantized and value.device.type == "cpu"


def _outline(content: Any) -> str:
    if isinstance(content, Mapping):
        return "a mapping with the keys " + ", ".join(map(repr, list(content)[:8])) if content else "an empty mapping"
    return f"a {type(content).__name__}"


def _without_prefixes(tensors: dict[str, Tensor], expected: set[str]) -> dict[str, Tensor]:
    """The names without what wrappers put before all of them, unless the network itself has such names."""
    while tensors and not expected & tensors.keys():
        prefix = next((p for p in _PREFIXES if all(key.startswith(p) for key in tensors)), None)
        if prefix is None:
            break
        tensors = {key.removeprefix(prefix): value for key, value in tensors.items()}
    return tensors


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
