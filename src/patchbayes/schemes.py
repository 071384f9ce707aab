"""How draws are made from seeds and counters: independently, in strata, in orthogonal arrays, or all of them."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from .layout import Layout, Part, Span, strata_of
from .randomness import BITS, fold, integers


def assign(layout: Layout, key: Tensor, start: int, stop: int, device: torch.device | None = None) -> Tensor:
    """Independent component indices of the groups start..stop-1 for each key: (*key.shape, stop - start) int64."""
    pieces = [
        _inverse_cdf(integers(key, begin, end, device), outcomes, p)
        for begin, end, outcomes, p in _overlaps(layout, start, stop)
    ]
    if not pieces:
        return torch.zeros(*key.shape, 0, dtype=torch.int64, device=device)
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-1)


def assigned(layout: Layout, part: Part, start: int, stop: int, device: torch.device | None) -> Tensor:
    if part.heads > 1:
        return _assign_with_heads(layout, part, start, stop, device)
    if part.scheme == "iid":
        return assign(layout, keys_of(part), start, stop, device)
    counters = torch.tensor(list(part.counters), dtype=torch.int64)
    if part.scheme == "enumerated":
        return enumerated(layout, counters, start, stop).to(device)
    seed = torch.tensor(part.seed)
    if part.scheme == "orthogonal":
        return _orthogonal(layout, seed, counters, start, stop).to(device)
    pieces = []
    for begin, end, outcomes, p in _overlaps(layout, start, stop):
        strata = strata_of(outcomes, p)
        order = fold(fold(seed, 2), counters // strata)
        position = (counters % strata).to(device).unsqueeze(-1)
        stratum = _permuted(integers(order, begin, end, device), position, strata, order, begin, end)
        if p is None:
            pieces.append(stratum)
        else:
            within = integers(fold(fold(seed, 3), counters), begin, end, device)
            pieces.append(_inverse_cdf(((stratum << BITS) + within) // strata, outcomes, p))
    if not pieces:
        return torch.zeros(len(counters), 0, dtype=torch.int64, device=device)
    return torch.cat(pieces, dim=-1)


def _orthogonal(layout: Layout, seed: Tensor, counters: Tensor, start: int, stop: int) -> Tensor:
    assert layout.orthogonal_block is not None
    symbols, exponent = layout.orthogonal_block
    length = symbols**exponent
    block = fold(fold(seed, 5), counters // length)
    run = _shuffled(block, counters % length, length, 0)
    powers = symbols ** torch.arange(exponent)
    lines = [v for v in itertools.product(range(symbols), repeat=exponent) if next((c for c in v if c), 0) == 1]
    columns = _shuffled(block.unsqueeze(-1), torch.arange(start, stop), len(lines), 2)
    point = (run.unsqueeze(-1) // powers) % symbols  # (S, t): the run as a point of Z_K^t
    level = (point.unsqueeze(1) * torch.tensor(lines)[columns]).sum(-1) % symbols
    order = fold(block, 4)
    return _permuted(integers(order, start, stop), level, symbols, order, start, stop)


def _shuffled(key: Tensor, position: Tensor, length: int, stream: int) -> Tensor:
    """Where `position` goes in a random affine permutation of 0..length-1, one for each key."""
    factors = torch.tensor([a for a in range(1, length) if math.gcd(a, length) == 1] or [0])
    uniform = integers(fold(key, stream), 0, 2)
    factor, offset = factors[(uniform[..., 0] * len(factors)) >> BITS], (uniform[..., 1] * length) >> BITS
    return (factor * position + offset) % length


def _assign_with_heads(layout: Layout, part: Part, start: int, stop: int, device: torch.device | None) -> Tensor:
    counters = list(part.counters)
    trunk = replace(part, counters=tuple(c // part.heads for c in counters), heads=1)
    indices = assigned(layout, trunk, start, stop, device)
    first = layout.starts[part.head_span]
    span = layout.spans[part.head_span]
    low, high = max(first, start), min(first + span.length, stop)
    if low < high:
        if is_marginal(span, part.heads):
            head = (torch.tensor(counters, device=device) % part.heads).unsqueeze(-1)
        else:
            seed = int(fold(torch.tensor(part.seed), 4))
            head = assigned(layout, Part("stratified", seed, tuple(counters)), low, high, device)
        indices[:, low - start : high - start] = head
    return indices


def is_marginal(span: Span, heads: int) -> bool:
    """Whether the heads are all components of the span, once each."""
    return span.length == 1 and heads == span.outcomes


def _inverse_cdf(uniform: Tensor, outcomes: int, p: tuple[float, ...] | None) -> Tensor:
    if p is None:
        return uniform.mul_(outcomes).bitwise_right_shift_(BITS)
    thresholds = [round(c * 2**BITS) for c in itertools.accumulate(p)][:-1]
    return torch.bucketize(uniform, torch.tensor(thresholds, dtype=torch.int64, device=uniform.device), right=True)


def _permuted(uniform: Tensor, position: Tensor, length: int, key: Tensor, begin: int, end: int) -> Tensor:
    """Entry `position` (S, 1 or n) of a random permutation of 0..length-1, one for each element of `uniform` (S, n)."""
    if length <= 6:
        table = torch.tensor(list(itertools.permutations(range(length))), device=uniform.device)
        return table[(uniform * len(table)) >> BITS, position]
    factors = torch.tensor([a for a in range(length) if math.gcd(a, length) == 1], device=uniform.device)
    factor = factors[(uniform * len(factors)) >> BITS]
    offset = (integers(fold(key, 1), begin, end, uniform.device) * length) >> BITS
    return (factor * position + offset) % length


def enumerated(layout: Layout, counters: Tensor, start: int, stop: int) -> Tensor:
    digits, rest = [], counters.clone()
    for span in layout.spans:
        for _ in range(span.length):
            digits.append(rest % span.outcomes)
            rest = rest // span.outcomes
    if not digits:
        return torch.zeros(len(counters), 0, dtype=torch.int64)
    return torch.stack(digits, dim=-1)[:, start:stop]


def keys_of(part: Part) -> Tensor:
    return fold(fold(torch.tensor(part.seed), 1), torch.tensor(list(part.counters), dtype=torch.int64) // part.heads)


def _overlaps(layout: Layout, start: int, stop: int) -> Iterator[tuple[int, int, int, tuple[float, ...] | None]]:
    begin = 0
    for length, outcomes, p in layout.runs:
        low, high = max(begin, start), min(begin + length, stop)
        if low < high:
            yield low, high, outcomes, p
        begin += length
