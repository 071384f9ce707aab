"""Random numbers as a function of a key: no state, so chunking, order and device change nothing.

Two tools. `integers` hashes a counter with the SplitMix64 finalizer (Steele, Lea and Flood, 2014) in int64 tensor
arithmetic: any element of any draw can be computed alone, on any device, with the same result.
`normal_like` and `bernoulli_like` fill whole tensors from a `torch.Generator` seeded with the key: three to ten times
faster for the dense noise of Gaussian posteriors and dropout masks, and opaque to the compiler (a custom operator), which
cannot trace explicit generators.
"""

from collections.abc import Callable

import numpy
import torch
from torch import Tensor

from ..errors import PatchbayesError

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9 - 2**64
_MULTIPLIER_2 = 0x94D049BB133111EB - 2**64
BITS = 31
_BLOCK = 2**16


def fold(key: Tensor, value: Tensor | int) -> Tensor:
    """A new key from a key and a value: fold(fold(seed, draw), site) names one stream. int64, broadcasting."""
    if torch.compiler.is_compiling():
        return _fold_op(key, torch.as_tensor(value, dtype=torch.int64))
    if isinstance(value, int) and key.dim() == 0:
        return torch.tensor(fold_number(int(key), value))
    return _fold(key, torch.as_tensor(value, dtype=torch.int64))


def integers(key: Tensor, start: int, stop: int, device: torch.device | None = None) -> Tensor:
    """Uniform integers in [0, 2**31) numbered start..stop-1 of the stream `key`: (*key.shape, stop - start) int64."""
    device = device or key.device
    return (_integers_op if torch.compiler.is_compiling() else _integers)(key, start, stop, device)


def normal_like(like: Tensor, key: Tensor) -> Tensor:
    """Standard normal noise of the streams `key`, in the shape, dtype and device of `like`.

    key () gives one stream for the whole tensor; key (B,) one stream for each row of dimension 0.
    """
    return (_normal_op if torch.compiler.is_compiling() else _normal)(like.detach(), key)


def bernoulli_like(like: Tensor, key: Tensor, keep: float | Tensor) -> Tensor:
    """Ones with probability `keep`, else zeros, of the streams `key`, in the shape, dtype and device of `like`.

    key () gives one stream for the whole tensor; key (B,) one stream for each row of dimension 0, so that an example's
    mask does not depend on the batch it came in. A `keep` that is learned is a tensor (): compiled code reads it when it runs.
    """
    if isinstance(keep, Tensor):
        return (_bernoulli_of_op if torch.compiler.is_compiling() else _bernoulli_of)(like.detach(), key, keep.detach())
    return (_bernoulli_op if torch.compiler.is_compiling() else _bernoulli)(like.detach(), key, keep)


def coarse_bernoulli_like(like: Tensor, key: Tensor, keep: float) -> Tensor:
    """As `bernoulli_like`, with other bits, and `keep` rounded to a multiple of 2**-8 where that changes the rate, 1 - keep, by
    at most 2 %, else of 2**-16, and each one divided by that.

    On a CPU eight or four elements share a random number of 64 bits, of NumPy's SFC64: ten times faster than
    `torch.Tensor.bernoulli_`, which takes longer for the activations of a small convolution than the convolution does.
    """
    return (_coarse_op if torch.compiler.is_compiling() else _coarse)(like.detach(), key, keep)


def _fold(key: Tensor, value: Tensor) -> Tensor:
    return _mix_(key + (value + 1) * _GOLDEN)


def fold_number(key: int, value: int) -> int:
    """`_fold` of two numbers, in Python's integers: a dozen operations on tensors of one element cost 20 times more."""
    x = (key + (value + 1) * _GOLDEN) % 2**64
    x = (x ^ (x >> 30)) * _MULTIPLIER_1 % 2**64
    x = (x ^ (x >> 27)) * _MULTIPLIER_2 % 2**64
    x ^= x >> 31
    return x - 2**64 if x >= 2**63 else x


def _integers(key: Tensor, start: int, stop: int, device: torch.device) -> Tensor:
    key = key.to(device).unsqueeze(-1) if key.dim() else key
    if device.type == "cpu" and key.numel() * (stop - start) > 2 * _BLOCK:  # blocks that stay in the cache
        step = max(1, _BLOCK // key.numel())
        made = torch.empty(*(key.shape[:-1] if key.dim() else ()), stop - start, dtype=torch.int64)
        for low in range(start, stop, step):
            high = min(low + step, stop)
            made[..., low - start : high - start] = _hashed(key, low, high, device)
        return made
    return _hashed(key, start, stop, device)


def _hashed(key: Tensor, start: int, stop: int, device: torch.device) -> Tensor:
    counters = torch.arange(start + 1, stop + 1, dtype=torch.int64, device=device).mul_(_GOLDEN)
    return _mix_(key + counters).bitwise_right_shift_(64 - BITS).bitwise_and_(2**BITS - 1)


def _mix_(x: Tensor) -> Tensor:
    x ^= (x >> 30) & (2**34 - 1)
    x *= _MULTIPLIER_1
    x ^= (x >> 27) & (2**37 - 1)
    x *= _MULTIPLIER_2
    x ^= (x >> 31) & (2**33 - 1)
    return x


def _normal(like: Tensor, key: Tensor) -> Tensor:
    if key.dim() == 0:
        return torch.randn(like.shape, dtype=like.dtype, device=like.device, generator=_generator(key, like.device))
    return _by_row(_normal, like, key)


def _by_row(make: Callable[..., Tensor], like: Tensor, key: Tensor, *more: float) -> Tensor:
    """Noise whose rows each have a stream of their own."""
    made = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    for row, row_key in zip(made, key, strict=True):
        row.copy_(make(row, row_key, *more))
    return made


def _bernoulli(like: Tensor, key: Tensor, keep: float) -> Tensor:
    if key.dim():
        return _by_row(_bernoulli, like, key, keep)
    mask = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    return mask.bernoulli_(keep, generator=_generator(key, like.device))


def _coarse(like: Tensor, key: Tensor, keep: float) -> Tensor:
    if key.dim():
        return _by_row(_coarse, like, key, keep)
    bits, integer = (8, torch.int8) if abs(round(keep * 2**8) / 2**8 - keep) <= 0.02 * (1 - keep) else (16, torch.int16)
    level = max(1, round(keep * 2**bits))
    if like.device.type != "cpu":
        return _bernoulli(like, key, level / 2**bits).div_(level / 2**bits)
    if level == 2**bits:
        return torch.ones(like.shape, dtype=like.dtype)
    words = numpy.random.SFC64(int(key) % 2**64).random_raw(-(-like.numel() * bits // 64))
    kept = torch.from_numpy(words).view(integer)[: like.numel()].lt_(level - 2 ** (bits - 1))  # small while it can be
    wide = torch.float64 if like.dtype == torch.float64 else torch.float32
    return kept.view(like.shape).to(wide).mul_(2**bits / level).to(like.dtype)


def _bernoulli_of(like: Tensor, key: Tensor, keep: Tensor) -> Tensor:
    number = float(keep)
    if number != number:
        raise PatchbayesError(
            "dropout: its learned probability to keep is nan: training has diverged.\n"
            "  do       a smaller learning rate, or load the last good checkpoint."
        )
    return _bernoulli(like, key, number)


# The hash relies on int64 wrapping around. Compiled C++ may not: folded into a loop index, the overflow of `counters` made
# generated kernels run past their buffers (seen with torch 2.13 and gcc 12). So the compiler gets the hash as operators.
_fold_op = torch.library.custom_op("patchbayes::fold", _fold, mutates_args=())
_integers_op = torch.library.custom_op("patchbayes::integers", _integers, mutates_args=())


# An operator costs five times what it does to a mask of units; outside of compiled code the functions are called as they are.
_normal_op = torch.library.custom_op("patchbayes::normal", _normal, mutates_args=())
_bernoulli_op = torch.library.custom_op("patchbayes::bernoulli", _bernoulli, mutates_args=())
_coarse_op = torch.library.custom_op("patchbayes::coarse_bernoulli", _coarse, mutates_args=())
_bernoulli_of_op = torch.library.custom_op("patchbayes::bernoulli_of", _bernoulli_of, mutates_args=())


@_fold_op.register_fake
def _(key: Tensor, value: Tensor) -> Tensor:
    return key + value


@_integers_op.register_fake
def _(key: Tensor, start: int, stop: int, device: torch.device) -> Tensor:
    return torch.empty(*key.shape, stop - start, dtype=torch.int64, device=device)


@_normal_op.register_fake
def _(like: Tensor, key: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)


@_bernoulli_op.register_fake
def _(like: Tensor, key: Tensor, keep: float) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)


@_coarse_op.register_fake
def _(like: Tensor, key: Tensor, keep: float) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)


@_bernoulli_of_op.register_fake
def _(like: Tensor, key: Tensor, keep: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)


def _generator(key: Tensor, device: torch.device) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(int(key))
