"""Random numbers as a function of a key: exactly SplitMix64, the same in any chunking, uniform and independent."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from patchbayes.draws.randomness import BITS, bernoulli_like, coarse_bernoulli_like, fold, integers, normal_like
from reference.splitmix import splitmix64
from statistics_helper import assert_frequencies, assert_standard_normal, assert_uncorrelated

PROPERTY = settings(derandomize=True, database=None, deadline=None, max_examples=60)
seeds = st.integers(-(2**63), 2**63 - 1)


def signed(x: int) -> int:
    return x - 2**64 if x >= 2**63 else x


def test_reference_generator_gives_the_published_sequence():
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert splitmix64(1234567, 4) == published


@PROPERTY
@given(seed=seeds)
def test_integers_are_the_top_bits_of_splitmix64(seed):
    ours = integers(torch.tensor(seed), 0, 20)
    assert ours.tolist() == [z >> (64 - BITS) for z in splitmix64(seed % 2**64, 20)]


@PROPERTY
@given(seed=seeds, value=st.integers(0, 1000))
def test_fold_is_one_output_of_splitmix64(seed, value):
    assert int(fold(torch.tensor(seed), value)) == signed(splitmix64(seed % 2**64, value + 1)[value])


@PROPERTY
@given(seed=seeds, value=st.integers(0, 2**40))
def test_fold_is_the_same_for_numbers_and_tensors(seed, value):
    key = torch.tensor(seed)
    assert torch.equal(fold(key, value), fold(key, torch.tensor(value)))
    assert torch.equal(fold(key, value), fold(key.expand(2), value)[1])


@pytest.mark.parametrize(("keys", "length"), [(1, 300_001), (7, 50_000), (70_000, 3)])
def test_long_and_wide_streams_are_the_same_as_their_parts(keys, length):
    """Long streams are made in blocks; what is asked for across a border must not show it."""
    key = fold(torch.tensor(9), torch.arange(keys))
    together = integers(key, 5, 5 + length)
    assert together.shape == (keys, length)
    for start in range(0, length, 9_001):
        stop = min(start + 10, length)
        assert torch.equal(
            together[:: max(keys // 3, 1), start:stop], integers(key[:: max(keys // 3, 1)], 5 + start, 5 + stop)
        )


@PROPERTY
@given(seed=seeds, start=st.integers(0, 300), length=st.integers(0, 50))
def test_integers_of_a_part_equal_the_part_of_all(seed, start, length):
    key = torch.tensor(seed)
    part = integers(key, start, start + length)
    assert torch.equal(part, integers(key, 0, 400)[start : start + length])


@PROPERTY
@given(cuts=st.lists(st.integers(0, 200), max_size=6))
def test_integers_in_any_chunking_are_the_same(cuts):
    keys = fold(torch.tensor(3), torch.arange(4))
    edges = [0, *sorted(cuts), 200]
    chunks = [integers(keys, a, b) for a, b in itertools.pairwise(edges)]
    assert torch.equal(torch.cat(chunks, dim=-1), integers(keys, 0, 200))


def test_many_keys_at_once_equal_one_key_at_a_time():
    keys = fold(torch.tensor(5), torch.arange(6)).reshape(2, 3)
    together = integers(keys, 10, 30)
    assert together.shape == (2, 3, 20)
    for i in range(2):
        for j in range(3):
            assert torch.equal(together[i, j], integers(keys[i, j], 10, 30))


def test_fold_broadcasts_and_leaves_its_arguments_alone():
    key, values = torch.tensor([1, 2]), torch.tensor([[0], [7], [9]])
    folded = fold(key, values)
    assert folded.shape == (3, 2)
    assert int(folded[1, 1]) == int(fold(torch.tensor(2), 7))
    assert key.tolist() == [1, 2]
    assert values.flatten().tolist() == [0, 7, 9]


def test_keys_of_draws_sites_and_examples_do_not_collide():
    draws = fold(torch.tensor(0), torch.arange(1000)).unsqueeze(1)
    keys = fold(draws, torch.arange(1000))
    assert keys.unique().numel() == 1_000_000


def test_the_global_random_state_is_neither_read_nor_moved():
    def everything():
        key, like = torch.tensor(11), torch.zeros(5)
        masks = bernoulli_like(like, key, 0.5), coarse_bernoulli_like(like, key, 0.5)
        return torch.cat([integers(key, 0, 5), normal_like(like, key), *masks])

    torch.manual_seed(1)
    first = everything()
    after = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(after, torch.rand(1))
    assert torch.equal(first, everything())


def test_the_compiler_gets_the_same_numbers():
    def compute(key, like):
        keys = fold(key, torch.arange(3))
        masks = bernoulli_like(like, keys, 0.5), coarse_bernoulli_like(like, keys, 0.5)
        return integers(keys, 2, 9), normal_like(like, fold(key, 4)), *masks

    key, like = torch.tensor(123), torch.zeros(3, 4)
    compiled = torch.compile(compute, backend="aot_eager", fullgraph=True)
    for ours, eager in zip(compiled(key, like), compute(key, like), strict=True):
        assert torch.equal(ours, eager)


def test_noise_has_the_shape_and_dtype_of_its_like_and_no_gradient():
    like = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
    key = torch.tensor(1)
    for made in (normal_like(like, key), bernoulli_like(like, key, 0.5), coarse_bernoulli_like(like, key, 0.5)):
        assert made.shape == (2, 3)
        assert made.dtype == torch.float64
        assert not made.requires_grad


@pytest.mark.parametrize("make", [bernoulli_like, coarse_bernoulli_like])
def test_a_row_of_a_mask_does_not_depend_on_the_other_rows(make):
    keys = fold(torch.tensor(8), torch.arange(5))
    mask = make(torch.zeros(5, 50), keys, 0.5)
    for rows in ([3], [1, 4], [4, 0, 2]):
        assert torch.equal(make(torch.zeros(len(rows), 50), keys[rows], 0.5), mask[rows])
    assert mask.unique(dim=0).shape[0] == 5


# Statistical claims. Every sampler below is a function (keys, count) -> outcomes; broken ones must be found by the same check.


def check_uniform(sample):
    """7 equal cells: detects a cell that is off by 0.01."""
    values = sample(torch.tensor(42), 200_000)
    assert_frequencies(np.bincount(values * 7 >> BITS, minlength=7), [1 / 7] * 7, detects=0.01)


def check_low_bits_uniform(sample):
    values = sample(torch.tensor(42), 200_000)
    assert_frequencies(np.bincount(values & 7, minlength=8), [1 / 8] * 8, detects=0.01)


def check_neighbors_independent(sample):
    """Pairs of consecutive elements of a stream, in a 4 x 4 table."""
    values = sample(torch.tensor(43), 400_000) >> (BITS - 2)
    pairs = values[0::2] * 4 + values[1::2]
    assert_frequencies(np.bincount(pairs, minlength=16), [1 / 16] * 16, detects=0.01)


def check_streams_independent(sample):
    """The same element of two streams with consecutive draw numbers, in a 4 x 4 table."""
    first, second = (sample(fold(torch.tensor(44), draw), 200_000) >> (BITS - 2) for draw in (0, 1))
    assert_frequencies(np.bincount(first * 4 + second, minlength=16), [1 / 16] * 16, detects=0.01)


def check_draws_independent(sample):
    """Element 5 of 24,000 consecutive draws: consecutive pairs in a 3 x 3 table."""
    values = sample(fold(torch.tensor(45), torch.arange(24_000)), 6)[:, 5] * 3 >> BITS
    pairs = values[0::2] * 3 + values[1::2]
    assert_frequencies(np.bincount(pairs, minlength=9), [1 / 9] * 9, detects=0.03)


def ours(key, count):
    return integers(key, 0, count).numpy()


def unmixed_counter(key, count):
    return ((int(key) + np.arange(count) * 0x1234567) & (2**BITS - 1)).astype(np.int64)


def too_many_small(key, count):
    values = integers(key, 0, count).numpy()
    return np.where(values % 16 == 0, values // 8, values)


def key_ignored(key, count):
    return integers(torch.zeros_like(key), 0, count).numpy()


def repeated(key, count):
    return np.repeat(integers(key, 0, (count + 1) // 2).numpy(), 2)[:count]


def low_bits_stuck(key, count):
    return integers(key, 0, count).numpy() & ~1


CHECKS = [
    check_uniform,
    check_low_bits_uniform,
    check_neighbors_independent,
    check_streams_independent,
    check_draws_independent,
]


@pytest.mark.parametrize("check", CHECKS)
def test_integers_are_uniform_and_independent(check):
    check(ours)


@pytest.mark.parametrize(
    ("check", "broken"),
    [
        (check_uniform, too_many_small),
        (check_low_bits_uniform, low_bits_stuck),
        (check_neighbors_independent, repeated),
        (check_neighbors_independent, unmixed_counter),
        (check_streams_independent, key_ignored),
        (check_draws_independent, key_ignored),
    ],
)
def test_the_checks_find_broken_samplers(check, broken):
    with pytest.raises(AssertionError):
        check(broken)


def test_normal_noise_is_standard_normal_and_streams_are_independent():
    like = torch.zeros(40_000, dtype=torch.float64)
    first, second = (normal_like(like, fold(torch.tensor(46), stream)) for stream in (0, 1))
    assert_standard_normal(first, detects=0.03)
    assert_uncorrelated(first, second, detects=0.05)
    assert_uncorrelated(first[:-1], first[1:], detects=0.05)


def test_the_checks_find_noise_of_a_wrong_scale_and_repeated_noise():
    noise = normal_like(torch.zeros(40_000, dtype=torch.float64), torch.tensor(47))
    with pytest.raises(AssertionError):
        assert_standard_normal(noise * 1.15, detects=0.03)
    with pytest.raises(AssertionError):
        assert_uncorrelated(noise, 0.1 * noise + normal_like(noise, torch.tensor(48)), detects=0.05)


@pytest.mark.parametrize("keep", [0.995, 0.8, 0.5])
def test_masks_keep_with_the_given_probability_in_every_row(keep):
    keys = fold(torch.tensor(49), torch.arange(4))
    mask = bernoulli_like(torch.zeros(4, 40_000), keys, keep).numpy()
    assert set(np.unique(mask)) == {0.0, 1.0}
    for row in mask:
        assert_frequencies([(row == 0).sum(), (row == 1).sum()], [1 - keep, keep], detects=0.03)


@pytest.mark.parametrize("keep", [0.995, 0.8, 0.5])
def test_coarse_masks_keep_with_the_given_probability_and_are_divided_by_it(keep):
    bits = 16 if keep > 0.99 else 8  # a rate of 0.005 is no multiple of 2**-8
    level = round(keep * 2**bits) / 2**bits
    mask = coarse_bernoulli_like(torch.zeros(200, 203), torch.tensor(52), keep)
    assert mask.unique().tolist() == [0.0, pytest.approx(1 / level)]
    assert_frequencies([int((mask == 0).sum()), int((mask > 0).sum())], [1 - level, level], detects=0.03)
    together = 64 // bits
    neighbors = (mask > 0).flatten()[:40_000].long().view(-1, together)  # those of one random number are independent
    for first, second in itertools.combinations(range(together), 2):
        pairs = np.bincount((2 * neighbors[:, first] + neighbors[:, second]).numpy(), minlength=4)
        if keep < 0.9:
            drop = 1 - level
            assert_frequencies(pairs, [drop**2, drop * level, drop * level, level**2], detects=0.06)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_coarse_masks_are_the_same_in_every_dtype(dtype):
    key, shape = torch.tensor(5), (3, 7, 11)
    expected = coarse_bernoulli_like(torch.zeros(shape), key, 0.7)
    found = coarse_bernoulli_like(torch.zeros(shape, dtype=dtype), key, 0.7)
    assert found.dtype == dtype
    assert torch.equal(found, expected.double().mul(0.7).round().mul(2**8 / round(0.7 * 2**8)).to(dtype))


@pytest.mark.parametrize("keep", [1.0, 1 - 2**-18])
def test_a_coarse_mask_that_keeps_all_is_ones(keep):
    assert torch.equal(coarse_bernoulli_like(torch.zeros(1000), torch.tensor(0), keep), torch.ones(1000))
    assert coarse_bernoulli_like(torch.zeros(0, 3), torch.tensor(0), keep).shape == (0, 3)


@pytest.mark.parametrize("make", [bernoulli_like, coarse_bernoulli_like])
def test_masks_of_different_rows_are_independent(make):
    keys = fold(torch.tensor(50), torch.arange(2))
    first, second = (make(torch.zeros(2, 40_000), keys, 0.5).numpy() > 0).astype(int)
    assert_frequencies(np.bincount(2 * first + second, minlength=4), [0.25] * 4, detects=0.03)


def test_mask_of_a_wrong_rate_is_found():
    mask = bernoulli_like(torch.zeros(40_000), torch.tensor(51), 0.76).numpy()
    with pytest.raises(AssertionError):
        assert_frequencies([(mask == 0).sum(), (mask == 1).sum()], [0.2, 0.8], detects=0.03)


def test_a_sample_too_small_for_the_claim_is_refused():
    with pytest.raises(ValueError, match="too few"):
        assert_frequencies([100, 100], [0.5, 0.5], detects=0.01)
    with pytest.raises(ValueError, match="too few"):
        assert_standard_normal(np.zeros(100), detects=0.01)
    with pytest.raises(ValueError, match="too few"):
        assert_uncorrelated(np.zeros(100), np.zeros(100), detects=0.01)
