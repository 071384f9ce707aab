"""Whether the shared weights of a network are those that a patch was trained on: digests, and sketches for other dtypes.

A digest is of the bytes and says yes or no. Where the network was loaded in another precision than the patch was trained in
(a bfloat16 base), bytes differ though the network is the same; a sketch, eight signed sums of all values, then tells: rounding
moves each by little of the tensor's norm, other weights by as much as they are other.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_COLUMNS, _SUMS = 4096, 8
_DEVIATIONS = 5.0  # of a sum of rounding errors, that still count as rounding


def fingerprints(shared: Mapping[str, Tensor]) -> dict[str, Any]:
    """What a file says of the shared tensors: their digests, and sketches of those in floating point."""
    floating = {key: value for key, value in shared.items() if value.is_floating_point()}
    return {
        "shared": {key: digest_of(value) for key, value in shared.items()},
        "sketches": {key: [str(value.dtype), *_sketch(value)] for key, value in floating.items()},
    }


def other_tensors(shared: Mapping[str, Tensor], description: Mapping[str, Any]) -> list[str]:
    """The shared tensors that are not the ones described, in words."""
    digests, sketches = description["shared"], description.get("sketches")
    sketches = sketches if isinstance(sketches, Mapping) else {}  # files of before have none
    apart = [f"the network has no {key}" for key in sorted(digests.keys() - shared.keys())]
    apart += [
        f"{key} is not in the network that the file was made for" for key in sorted(shared.keys() - digests.keys())
    ]
    return apart or [
        f"shared tensor {key} is not the one that the patch was trained on"
        for key in sorted(shared)
        if not _is_same(shared[key], digests[key], sketches.get(key))
    ]


def _is_same(tensor: Tensor, digest: Any, sketch: Any) -> bool:
    if digest == digest_of(tensor):
        return True
    if not (isinstance(sketch, list) and len(sketch) == _SUMS + 2 and tensor.is_floating_point()):
        return False
    name, norm, *sums = sketch
    dtype = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype) or dtype == tensor.dtype or not dtype.is_floating_point:
        return False
    own_norm, *own_sums = _sketch(tensor)
    rounding = max(torch.finfo(tensor.dtype).eps, torch.finfo(dtype).eps) / 2 / 3**0.5
    allowed = _DEVIATIONS * rounding * float(norm)
    return all(abs(a - float(b)) <= allowed for a, b in zip([own_norm, *own_sums], [norm, *sums], strict=True))


def digest_of(tensor: Tensor) -> str:
    """Of a tensor's bytes, dtype and shape."""
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    header = f"{tensor.dtype}{tuple(tensor.shape)}".encode()
    return hashlib.sha256(header + content.tobytes()).hexdigest()[:16]


def _sketch(tensor: Tensor) -> list[float]:
    """The norm, and eight sums of all values with signs that look random and are always the same."""
    values = tensor.detach().reshape(-1).float().cpu()
    values = torch.nn.functional.pad(values, (0, -len(values) % _COLUMNS)).view(-1, _COLUMNS)
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(2, (_COLUMNS, _SUMS), generator=generator).mul_(2).sub_(1).float()
    of_rows = torch.randint(2, (len(values), 1), generator=generator).mul_(2).sub_(1)
    sums = ((values @ signs).double() * of_rows).sum(0)
    return [float(values.double().norm()), *sums.tolist()]
