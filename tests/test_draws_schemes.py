"""How draws are made: independent ones and their law, stratified ones and their balance, all of them."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn

import patchbayes as pb
from draw_networks import MIXED, counts, network, seeded
from patchbayes.errors import NotPatched, PatchbayesError, TooManyOutcomes
from statistics_helper import assert_frequencies


@pytest.fixture(scope="module")
def mixed_model():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return network(*MIXED)


# Making


def test_assignments_have_a_column_for_each_draw_group(mixed_model):
    draws = pb.Draws.sample(mixed_model, 50, seeded(1))
    groups = [3] + [2] * 6 + [7] + [2] * 2
    indices = draws.assignments()
    assert indices.shape == (50, len(groups))
    for column, outcomes in enumerate(groups):
        assert set(indices[:, column].tolist()) <= set(range(outcomes))
    assert len(set(indices[:, 7].tolist())) == 7


@pytest.mark.parametrize("make", [pb.Draws.sample, pb.Draws.stratified])
def test_the_generator_decides_and_none_means_seed_zero(mixed_model, make):
    def draw(generator=None):
        return make(mixed_model, 40, generator).assignments()

    assert torch.equal(draw(seeded(3)), draw(seeded(3)))
    assert not torch.equal(draw(seeded(3)), draw(seeded(4)))
    torch.manual_seed(5)
    first = draw()
    assert torch.equal(first, draw())


@pytest.mark.parametrize("make", [pb.Draws.sample, pb.Draws.stratified])
def test_one_generator_gives_fresh_draws_every_time(mixed_model, make):
    generator = seeded(3)
    first, second = make(mixed_model, 20, generator), make(mixed_model, 20, generator)
    assert not torch.equal(first.assignments(), second.assignments())
    assert not set(first.keys().tolist()) & set(second.keys().tolist())


@pytest.mark.parametrize("make", [pb.Draws.sample, pb.Draws.stratified])
def test_more_draws_of_one_seed_begin_with_fewer(mixed_model, make):
    assert torch.equal(
        make(mixed_model, 30, seeded(1)).assignments()[:11], make(mixed_model, 11, seeded(1)).assignments()
    )


@pytest.mark.parametrize("make", [pb.Draws.sample, pb.Draws.stratified])
@pytest.mark.parametrize("number", [0, -1, 2.0, True, "3"])
def test_a_number_of_draws_that_is_none_is_refused(mixed_model, make, number):
    with pytest.raises(PatchbayesError, match="at least 1"):
        make(mixed_model, number)


@pytest.mark.parametrize(
    "make", [lambda m: pb.Draws.sample(m, 2), lambda m: pb.Draws.stratified(m, 2), pb.Draws.enumerate]
)
def test_an_unpatched_network_has_no_draws(make):
    with pytest.raises(NotPatched, match=r"patch_\(model"):
        make(nn.Linear(2, 2))


def test_large_draws_cost_no_memory():
    model = nn.Sequential(nn.Linear(2000, 1000))
    pb.patch_(model, pb.ECMP(2), "linear")
    draws = pb.Draws.sample(model, 10**9)
    assert len(draws) == 10**9
    part = draws[123_456_789].assignments(1_000_000, 1_000_010)
    assert torch.equal(part, draws[123_456_780:123_456_790].assignments(999_990, 1_000_020)[9:, 10:20])


def test_the_schemes_are_told_apart(mixed_model):
    sampled, stratified = pb.Draws.sample(mixed_model, 2), pb.Draws.stratified(mixed_model, 2)
    assert sampled.schemes == {"iid"}
    assert stratified.schemes == {"stratified"}
    assert pb.Draws.enumerate(mixed_model).schemes == {"enumerated"}
    assert (sampled + stratified).schemes == {"iid", "stratified"}
    assert "2 iid + 2 stratified" in repr(sampled + stratified)


# The law of independent draws


@pytest.mark.parametrize("p", [None, (0.5, 0.25, 0.25), (0.07, 0.9, 0.03), (0.0, 0.4, 0.6)])
def test_independent_draws_follow_p_in_every_group(p):
    draws = pb.Draws.sample(network(pb.ECMP(3, probabilities=p)), 20_000, seeded(2))
    for column in draws.assignments().T:
        assert_frequencies(counts(column, 3), p or [1 / 3] * 3, detects=0.03)


def test_a_wrong_p_is_found():
    draws = pb.Draws.sample(network(pb.ECMP(3, probabilities=(0.5, 0.25, 0.25))), 20_000, seeded(2))
    with pytest.raises(AssertionError):
        assert_frequencies(counts(draws.assignments()[:, 0], 3), [0.46, 0.27, 0.27], detects=0.03)


def pairs_are_independent(indices: torch.Tensor, first: int, second: int) -> None:
    table = counts(indices[:, first] * 3 + indices[:, second], 9)
    assert_frequencies(table, [1 / 9] * 9, detects=0.03)


@pytest.mark.parametrize("make", [pb.Draws.sample, pb.Draws.stratified])
def test_groups_are_independent_of_each_other(make):
    """Elements of a site, weight and bias, and elements of two sites. (Of stratified draws, one from each block.)"""
    model = network(pb.ECMP(3), pb.ECMP(3))
    indices = make(model, 36_000, seeded(5)).assignments()[::3]
    for first, second in [(0, 1), (0, 4), (3, 5), (0, 6), (5, 11)]:
        pairs_are_independent(indices, first, second)


def test_groups_that_share_a_draw_are_found_to_depend():
    indices = pb.Draws.sample(network(pb.EMP(3)), 12_000, seeded(5)).assignments()
    with pytest.raises(AssertionError):
        pairs_are_independent(indices.expand(-1, 2), 0, 1)


# Stratified draws


@pytest.mark.parametrize("components", [2, 3, 5, 6, 7, 8, 9, 12])
@pytest.mark.parametrize("tie", ["site", "unit", "element", "network"])
def test_every_block_holds_every_component_once_in_every_group(components, tie):
    model = network(pb.posteriors.Mixture(components=components, tie=tie))
    indices = pb.Draws.stratified(model, 4 * components, seeded(1)).assignments()
    for block in indices.split(components):
        assert torch.equal(block.sort(dim=0).values, torch.arange(components).unsqueeze(1).expand_as(block))


@pytest.mark.parametrize(
    ("p", "block"),
    [
        ((0.5, 0.5), 2),
        ((0.25, 0.75), 4),
        ((0.5, 0.2, 0.3), 10),
        ((1 / 3, 2 / 3), 3),
        ((0.995, 0.005), 200),
        ((0.0, 1.0), 1),
        ((0.1, 0.2, 0.3, 0.15, 0.25), 20),
    ],
)
def test_every_block_holds_every_component_its_exact_share_of_times(p, block):
    model = network(pb.ECMP(len(p), probabilities=p))
    draws = pb.Draws.stratified(model, 3 * block, seeded(1))
    assert draws.law.block == block
    for part in draws.assignments().split(block):
        for column in part.T:
            assert counts(column, len(p)) == [round(q * block) for q in p]


def test_sites_with_different_numbers_of_components_each_keep_their_balance():
    methods = (pb.EMP(2), pb.EMP(3), pb.EMP(7), pb.EMP(2, probabilities=(0.25, 0.75)))
    draws = pb.Draws.stratified(network(*methods), 84, seeded(2))
    assert draws.law.block == 84
    indices = draws.assignments()
    for column, (length, outcomes) in enumerate([(2, 2), (3, 3), (7, 7)]):
        for block in indices[:, column].split(length):
            assert counts(block, outcomes) == [1] * outcomes
    for block in indices[:, 3].split(4):
        assert counts(block, 2) == [1, 3]


def test_a_partial_block_repeats_no_component():
    indices = pb.Draws.stratified(network(pb.ECMP(5)), 13, seeded(1)).assignments()
    for column in indices.T:
        assert len(set(column[10:].tolist())) == 3
        assert set(counts(column, 5)) <= {2, 3}


def test_probabilities_without_a_short_block_are_sliced_in_sixteen():
    """Each of 16 slices of [0, 1) is hit once: the count of a component is within one of its share at either end."""
    p = (1 / math.pi, 1 - 1 / math.pi)
    draws = pb.Draws.stratified(network(pb.ECMP(2, probabilities=p)), 160, seeded(1))
    assert draws.law.block == 16
    for part in draws.assignments().split(16):
        for column in part.T:
            assert counts(column, 2)[0] in (math.floor(16 * p[0]), math.ceil(16 * p[0]))


@pytest.mark.parametrize(("components", "blocks"), [(3, 12_000), (4, 20_000)])
def test_all_orders_of_a_block_are_equally_likely(components, blocks):
    """So any position in a block follows p exactly, and stratified averages are unbiased."""
    indices = pb.Draws.stratified(network(pb.EMP(components)), components * blocks, seeded(3)).assignments()
    code = (indices.reshape(blocks, components) * components ** torch.arange(components)).sum(1)
    orders = [
        sum(c * components**i for i, c in enumerate(order)) for order in itertools.permutations(range(components))
    ]
    frequencies = [int((code == order).sum()) for order in orders]
    assert sum(frequencies) == blocks
    assert_frequencies(frequencies, [1 / len(orders)] * len(orders), detects=0.03)


@pytest.mark.parametrize("components", [5, 7, 8, 12])
def test_every_position_of_a_block_follows_p(components):
    """Large K use affine maps i -> a i + b mod K; b makes every position uniform."""
    indices = pb.Draws.stratified(network(pb.EMP(components)), components * 20_000, seeded(4)).assignments()
    for position in (0, 1, components - 1):
        chosen = indices[position::components]
        assert_frequencies(counts(chosen, components), [1 / components] * components, detects=0.03)


@pytest.mark.parametrize("p", [(0.25, 0.75), (0.5, 0.2, 0.3), (1 / math.pi, 1 - 1 / math.pi), (0.995, 0.005)])
def test_every_position_of_a_block_follows_unequal_p(p):
    """One position of each block, from 12,000 sites' worth of elements, all independent."""
    model = nn.Sequential(nn.Linear(100, 120, bias=False))
    pb.patch_(model, pb.ECMP(len(p), probabilities=p), "linear")
    draws = pb.Draws.stratified(model, pb.Draws.stratified(model, 1).law.block, seeded(6))
    for position in (0, len(draws) // 2, len(draws) - 1):
        chosen = draws[position].assignments()
        assert_frequencies(counts(chosen, len(p)), p, detects=0.04)


def test_a_stratified_sampler_that_always_begins_with_component_zero_is_found():
    rolled = (torch.arange(60_000) % 3).reshape(-1, 3)
    with pytest.raises(AssertionError):
        assert_frequencies(counts(rolled[:, 0], 3), [1 / 3] * 3, detects=0.03)


def test_two_affine_orders_of_a_large_block_are_not_the_same_for_all_groups():
    indices = pb.Draws.stratified(network(pb.ECMP(7), features=4), 7, seeded(1)).assignments()
    assert len({tuple(column.tolist()) for column in indices.T}) > 10


def test_stratified_averages_vary_less_and_agree_with_the_exact_average():
    """A sum over sites of a function of the component: stratification makes its average exact."""
    model = network(pb.EMP(5), pb.EMP(5))
    value = torch.tensor([0.3, -1.0, 2.0, 0.7, 5.0], dtype=torch.float64)

    def averages(make):
        return torch.stack([value[make(model, 20, seeded(s)).assignments()].sum(1).mean() for s in range(50)])

    exact = 2 * value.mean()
    torch.testing.assert_close(averages(pb.Draws.stratified), exact.expand(50), rtol=1e-12, atol=0)
    assert (averages(pb.Draws.sample) - exact).abs().max() > 0.1


# Enumeration


@pytest.mark.parametrize(
    ("methods", "outcomes"),
    [
        ((pb.EMP(3),), 3),
        ((pb.EMP(3), pb.EMP(2)), 6),
        ((pb.ECMP(2),), 2**6),
        ((pb.posteriors.DropConnect(0.5),), 2**4),
        ((pb.posteriors.Mixture(components=1, tie="unit", zero=True),), 2**2),
        ((pb.posteriors.Mixture(components=2, tie="unit"),), 2**3),
        ((pb.posteriors.Mixture(components=2, tie="site", zero=True),), 3),
        ((pb.Ensemble(4), pb.Ensemble(4)), 4),
        ((pb.Ensemble(4), pb.EMP(2), pb.Ensemble(4)), 8),
        ((pb.EMP(1), pb.ECMP(1)), 1),
    ],
)
def test_enumeration_lists_every_network_once(methods, outcomes):
    model = network(*methods)
    draws = pb.Draws.enumerate(model)
    assert len(draws) == draws.layout.num_outcomes == outcomes
    assert draws.layout.log10_outcomes == pytest.approx(math.log10(outcomes))
    assert len({tuple(z) for z in draws.assignments().tolist()}) == outcomes
    assert draws.is_exact
    torch.testing.assert_close(draws.weights, torch.full((outcomes,), 1 / outcomes, dtype=torch.float64))


def test_enumeration_weighs_every_network_with_its_probability():
    p, q, rate = (0.5, 0.2, 0.3), (0.9, 0.1), 0.25
    model = network(pb.EMP(3, probabilities=p), pb.EMP(2, probabilities=q), pb.posteriors.DropConnect(rate))
    draws = pb.Draws.enumerate(model)
    expected = [p[z[0]] * q[z[1]] * math.prod((1 - rate, rate)[k] for k in z[2:]) for z in draws.assignments().tolist()]
    np.testing.assert_allclose(draws.weights, expected, rtol=1e-14)
    assert draws.weights.sum() == pytest.approx(1, abs=1e-14)


def test_too_many_outcomes_are_refused_with_their_number():
    model = network(pb.ECMP(3))
    with pytest.raises(TooManyOutcomes, match=r"729 outcomes, more than limit=700"):
        pb.Draws.enumerate(model, limit=700)
    assert len(pb.Draws.enumerate(model, limit=729)) == 729
    with pytest.raises(TooManyOutcomes, match=r"10\^20\.0 outcomes, more than limit=100,000"):
        pb.Draws.enumerate(network(pb.ECMP(3), features=6))


@pytest.mark.parametrize(
    ("method", "why"),
    [(pb.EMP(2, sigma=0.1), "sigma=0.1"), (pb.posteriors.MeanField(), "Gaussian"), (pb.Dropout(0.1), "mask")],
)
def test_uncountable_outcomes_are_refused_with_the_reason(method, why):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    pb.patch_(model, {"0": pb.EMP(2), "1": method})
    with pytest.raises(TooManyOutcomes, match=f"cannot be counted.*1: .*{why}"):
        pb.Draws.enumerate(model)
