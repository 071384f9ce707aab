"""How draws are made from seeds and counters: independently, in strata, in orthogonal arrays, or all of them."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .layout import Law, Layout, Probabilities, Series, Span, probabilities_of, strata_of
from .randomness import BITS, fold, integers

_SHORT = 6  # all permutations of so many are a small table


def assign(law: Law, key: Tensor, start: int, stop: int, device: torch.device | None = None) -> Tensor:
    """Independent component indices of the groups start..stop-1 for each key: (*key.shape, stop - start) int64."""
    pieces = [
        assign_with(key, begin, end - begin, outcomes, p, device)
        for begin, end, outcomes, p in _overlaps(law, start, stop)
    ]
    if not pieces:
        return torch.zeros(*key.shape, 0, dtype=torch.int64, device=device)
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-1)


def assign_live(
    layout: Layout, laws: Sequence[Tensor | None], key: Tensor, device: torch.device | None = None
) -> Tensor:
    """`assign` of all groups in compiled code, which takes numbers for constants: there the laws stay tensors.

    laws   for each span log p, (outcomes,), or None where it is uniform.
    """
    pieces = [
        assign_with(key, start, span.length, span.outcomes, log_p, device)
        for start, span, log_p in zip(layout.starts, layout.spans, laws, strict=True)
    ]
    return torch.cat(pieces, dim=-1)


def assign_with(
    key: Tensor,
    start: int,
    length: int,
    outcomes: int,
    law: Probabilities | Tensor,
    device: torch.device | None = None,
) -> Tensor:
    """Independent indices of consecutive groups of one law, the first of which is group `start` of the network.

    law   the probabilities, or log p, (outcomes,), which compiled code then reads whenever it runs.
    """
    uniform = integers(key, start, start + length, device)
    return _choose(uniform, law.detach()) if isinstance(law, Tensor) else _inverse_cdf(uniform, outcomes, law)


def assigned(law: Law, part: Series, start: int, stop: int, device: torch.device | None) -> Tensor:
    if part.heads > 1:
        return _assign_with_heads(law, part, start, stop, device)
    if part.scheme == "iid":
        return assign(law, keys_of(part), start, stop, device)
    counters = torch.tensor(list(part.counters), dtype=torch.int64)
    if part.scheme == "enumerated":
        return enumerated(law, counters, start, stop).to(device)
    seed = torch.tensor(part.seed)
    if part.scheme == "orthogonal":
        return _orthogonal(law, seed, counters, start, stop).to(device)
    pieces = []
    for begin, end, outcomes, p in _overlaps(law, start, stop):
        strata = strata_of(outcomes, p)
        stratum = _stratum(seed, counters, strata, begin, end, device)
        if p is None:
            pieces.append(stratum)
        else:
            within = integers(fold(fold(seed, 3), counters), begin, end, device)
            pieces.append(_inverse_cdf(((stratum << BITS) + within) // strata, outcomes, p))
    if not pieces:
        return torch.zeros(len(counters), 0, dtype=torch.int64, device=device)
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-1)


def _stratum(seed: Tensor, counters: Tensor, strata: int, begin: int, end: int, device: torch.device | None) -> Tensor:
    """Which of its strata every draw gives to the groups begin..end-1, (S, n): consecutive draws go through a permutation.

    The permutation of a block is made once for all its draws."""
    blocks, block = torch.unique(counters // strata, return_inverse=True)
    order, position = fold(fold(seed, 2), blocks), counters % strata
    uniform = integers(order, begin, end, device)
    if strata > _SHORT:
        both = block.to(device)
        return _permuted(uniform[both], position.to(device).unsqueeze(-1), strata, order[block], begin, end)
    table = _permutations(strata, uniform.device)
    which = uniform.mul_(len(table)).bitwise_right_shift_(BITS)
    made = torch.empty(len(counters), end - begin, dtype=torch.int64, device=uniform.device)
    for draw, (row, place) in enumerate(zip(block.tolist(), position.tolist(), strict=True)):
        torch.gather(table[:, place], 0, which[row], out=made[draw])
    return made


def _permutations(length: int, device: torch.device) -> Tensor:
    return torch.tensor(list(itertools.permutations(range(length))), device=device)


def _orthogonal(law: Law, seed: Tensor, counters: Tensor, start: int, stop: int) -> Tensor:
    assert law.orthogonal_block is not None
    symbols, exponent = law.orthogonal_block
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


def _assign_with_heads(law: Law, part: Series, start: int, stop: int, device: torch.device | None) -> Tensor:
    counters = list(part.counters)
    trunk = replace(part, counters=tuple(c // part.heads for c in counters), heads=1)
    indices = assigned(law, trunk, start, stop, device)
    first = law.layout.starts[part.head_span]
    span = law.layout.spans[part.head_span]
    low, high = max(first, start), min(first + span.length, stop)
    if low < high:
        if is_marginal(span, part.heads):
            head = (torch.tensor(counters, device=device) % part.heads).unsqueeze(-1)
        else:
            seed = int(fold(torch.tensor(part.seed), 4))
            head = assigned(law, Series("stratified", seed, tuple(counters)), low, high, device)
        indices[:, low - start : high - start] = head
    return indices


def is_marginal(span: Span, heads: int) -> bool:
    """Whether the heads are all components of the span, once each."""
    return span.length == 1 and heads == span.outcomes


def _inverse_cdf(uniform: Tensor, outcomes: int, p: Probabilities) -> Tensor:
    if p is None:
        return uniform.mul_(outcomes).bitwise_right_shift_(BITS)
    thresholds = [round(c * 2**BITS) for c in itertools.accumulate(p)][:-1]
    return torch.bucketize(uniform, torch.tensor(thresholds, dtype=torch.int64, device=uniform.device), right=True)


@torch.library.custom_op("patchbayes::choose", mutates_args=())
def _choose(uniform: Tensor, log_p: Tensor) -> Tensor:
    """The same indices as `_inverse_cdf` with the probabilities as they are when compiled code runs."""
    return _inverse_cdf(uniform, len(log_p), probabilities_of(log_p, "torch.compile"))


@_choose.register_fake
def _(uniform: Tensor, log_p: Tensor) -> Tensor:
    return torch.empty_like(uniform)


def _permuted(uniform: Tensor, position: Tensor, length: int, key: Tensor, begin: int, end: int) -> Tensor:
    """Entry `position` (S, 1 or n) of a random permutation of 0..length-1, one for each element of `uniform` (S, n)."""
    if length <= _SHORT:
        table = _permutations(length, uniform.device)
        return table[(uniform * len(table)) >> BITS, position]
    factors = torch.tensor([a for a in range(length) if math.gcd(a, length) == 1], device=uniform.device)
    factor = factors[(uniform * len(factors)) >> BITS]
    offset = (integers(fold(key, 1), begin, end, uniform.device) * length) >> BITS
    return (factor * position + offset) % length


def enumerated(law: Law, counters: Tensor, start: int, stop: int) -> Tensor:
    digits, rest = [], counters.clone()
    for span in law.layout.spans:
        for _ in range(span.length):
            digits.append(rest % span.outcomes)
            rest = rest // span.outcomes
    if not digits:
        return torch.zeros(len(counters), 0, dtype=torch.int64)
    return torch.stack(digits, dim=-1)[:, start:stop]


def keys_of(part: Series) -> Tensor:
    return fold(fold(torch.tensor(part.seed), 1), torch.tensor(list(part.counters), dtype=torch.int64) // part.heads)


def _overlaps(law: Law, start: int, stop: int) -> Iterator[tuple[int, int, int, Probabilities]]:
    begin = 0
    for length, outcomes, p in law.runs:
        low, high = max(begin, start), min(begin + length, stop)
        if low < high:
            yield low, high, outcomes, p
        begin += length
