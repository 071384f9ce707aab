"""Digests of tensors: what is damaged in a file is found when the file is read.

They show damage, not who wrote a file: whoever can change a tensor can change its digest too.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from .errors import CheckpointMismatch
from .files import parse_json

_DESCRIPTION, _DIGESTS = "patchbayes", "digests"
_SEAL = re.compile(r', "sha256": "([0-9a-f]{64})"}$')
_ORDINARY = "patchbayes_digests"
_ROW = 64  # words of 8 bytes


def digest(tensor: Tensor) -> str:
    """16 hexadecimal digits of a tensor's type, shape and bytes.

    Of a large tensor the SHA-256 is taken of the sums of its 8-byte words, 64 at a time: whatever happens to a single word
    changes a sum, blocks that moved change their order, and it takes a tenth of the time of SHA-256 itself. What goes
    unseen is an exchange of words within 512 bytes, which no failing disk or network makes.
    """
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    found = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
    whole = len(content) - len(content) % (8 * _ROW)
    if whole:
        body = content[:whole]
        aligned = body if body.data_ptr() % 8 == 0 and body.storage_offset() % 8 == 0 else body.clone()
        words = aligned.view(torch.int64).view(-1, _ROW)
        found.update(words.sum(1).numpy().tobytes())  # of integers, without rounding: the same on every machine
    found.update(content[whole:].numpy().tobytes())
    return found.hexdigest()[:16]


def sealed(description: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """The metadata of a safetensors file: the description with a digest of every tensor, and at its end one of itself.

    It is a single entry: safetensors writes several in any order, and equal content shall make equal files.
    """
    text = json.dumps({**description, _DIGESTS: {key: digest(value) for key, value in tensors.items()}})
    return {_DESCRIPTION: f'{text[:-1]}, "sha256": "{_sha256(text)}"}}'}


def digests_alone(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """The metadata of an ordinary checkpoint, which has no description: anybody else can read it as well."""
    return {_ORDINARY: json.dumps({key: digest(value) for key, value in tensors.items()})}


def refuse_damaged(metadata: Mapping[str, str], tensors: Mapping[str, Tensor], where: str) -> None:
    """Refuse an ordinary checkpoint that has digests, and tensors that do not have them."""
    if _ORDINARY in metadata:
        problems = damaged({_DIGESTS: parse_json(metadata[_ORDINARY], where)}, tensors)
        if problems:
            raise CheckpointMismatch(f"{where} is not as it was written:\n" + _listed(problems))


def described(metadata: Mapping[str, str], where: str) -> Any:
    """The description in the metadata of a file; refused where it is damaged."""
    text = metadata[_DESCRIPTION]
    seal = _SEAL.search(text)
    if seal is not None:
        text = text[: seal.start()] + "}"
        if _sha256(text) != seal[1]:
            raise CheckpointMismatch(
                f"{where}: the description is damaged (its SHA-256 is another); copy or save it again."
            )
    return parse_json(text, where)


def damaged(description: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[str]:
    """What is wrong with the tensors of a file, in words; nothing is said of a file of 0.1.0, which has no digests."""
    if _DIGESTS not in description:
        return []
    recorded = description[_DIGESTS]
    if not isinstance(recorded, Mapping):
        return ["the digests are no mapping from names to texts"]
    problems = [f"{key} has no digest" for key in sorted(tensors.keys() - recorded.keys())]
    problems += [f"{key} is missing" for key in sorted(recorded.keys() - tensors.keys())]
    both = sorted(tensors.keys() & recorded.keys())
    return problems + [
        f"{key} is damaged (its checksum does not match)" for key in both if digest(tensors[key]) != recorded[key]
    ]


def verify(path: str | Path) -> int:
    """Check every tensor of a file of ours against its digest; the number of tensors, all as they were written.

    For patches and whole networks (`save`), and for the checkpoints of runs. A damaged file is refused with what is damaged,
    and so is one without digests: a checkpoint of somebody else, or a file of 0.1.0.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointMismatch(f"verify: there is no file {path}.")
    try:
        with safetensors.safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise CheckpointMismatch(f"verify: {path} is not a whole safetensors file ({error}).") from None
    if _ORDINARY in metadata:
        refuse_damaged(metadata, tensors, f"verify: {path}")
        return len(tensors)
    description = described(metadata, f"verify: {path}") if _DESCRIPTION in metadata else {}
    if not isinstance(description, Mapping) or _DIGESTS not in description:
        raise CheckpointMismatch(
            f"verify: {path} has no digests; it is an ordinary checkpoint, or of version 0.1.0.\n"
            "  do       load it and save it again, if you trust that it is whole."
        )
    problems = damaged(description, tensors)
    if problems:
        raise CheckpointMismatch(f"verify: {path} is not as it was written:\n" + _listed(problems))
    return len(tensors)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _listed(problems: list[str], most: int = 12) -> str:
    more = [f"  - ... and {len(problems) - most} more"] if len(problems) > most else []
    return "\n".join([*(f"  - {problem}" for problem in problems[:most]), *more])
