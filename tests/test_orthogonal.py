"""Orthogonal draws: every pair of components equally often, unbiased, and exact for sums of functions of two sites."""

import itertools

import pytest
import torch
from torch import nn

import patchbayes as pb
from patchbayes.errors import PatchbayesError


def network(num_norms, components=3, width=4, **options):
    layers = [nn.Linear(3, width)]
    for _ in range(num_norms):
        layers += [nn.LayerNorm(width), nn.Tanh()]
    model = nn.Sequential(*layers, nn.Linear(width, 3)).double()
    pb.patch_(model, pb.EMP(components, jitter=0.5, **options), "norm")
    return model


@pytest.mark.parametrize(
    ("components", "sites", "length"), [(3, 2, 9), (3, 4, 9), (3, 5, 27), (2, 3, 4), (5, 6, 25), (7, 3, 49)]
)
@pytest.mark.parametrize("seed", [0, 1])
def test_every_pair_of_components_comes_equally_often_in_every_pair_of_sites(components, sites, length, seed):
    draws = pb.Draws.orthogonal(network(sites, components), 3 * length, torch.Generator().manual_seed(seed))
    assert draws.block_length == length
    rows = draws.assignments()
    for block in rows.split(length):
        for first, second in itertools.combinations(range(sites), 2):
            pairs = torch.bincount(block[:, first] * components + block[:, second], minlength=components**2)
            assert (pairs == length // components**2).all()
    blocks = [block.tolist() for block in rows.split(length)]
    assert blocks[0] != blocks[1]


def test_a_block_over_two_sites_is_the_exact_predictive():
    model, x = network(2), torch.randn(5, 3, dtype=torch.float64)
    block = pb.predict(model, x, pb.Draws.orthogonal(model, 9))
    torch.testing.assert_close(block.probs, pb.predict(model, x, "exact").probs, rtol=1e-12, atol=1e-14)


def test_every_draw_of_a_block_is_uniform_over_seeds():
    """The first draws of 4,000 blocks: each site's component, and each pair of sites, with a chi-square at 1e-6."""
    model = network(4)
    rows = torch.cat(
        [pb.Draws.orthogonal(model, 2, torch.Generator().manual_seed(s)).assignments() for s in range(4000)]
    )
    for position in (0, 1):
        chosen = rows[position::2]
        for site in range(4):
            assert chi_square(torch.bincount(chosen[:, site], minlength=3)) < 27.6  # 2 degrees of freedom
        pair = chosen[:, 0] * 3 + chosen[:, 1]
        assert chi_square(torch.bincount(pair, minlength=9)) < 42.7  # 8 degrees of freedom
    assert chi_square(torch.bincount(rows[0::2, 0].clamp(max=1), minlength=3)) > 42.7  # a broken sampler is found


def chi_square(counts):
    expected = counts.sum() / len(counts)
    return float(((counts - expected) ** 2 / expected).sum())


def test_pairs_lower_the_error_of_the_predictive():
    model, x = network(4, components=3), torch.randn(6, 3, dtype=torch.float64)
    exact = pb.predict(model, x, "exact").probs

    def error(make):
        seeds = (torch.Generator().manual_seed(seed) for seed in range(30))
        return sum(float((pb.predict(model, x, make(model, 9, g)).probs - exact).square().mean()) for g in seeds)

    iid, stratified, orthogonal = error(pb.Draws.sample), error(pb.Draws.stratified), error(pb.Draws.orthogonal)
    assert orthogonal < stratified < iid


def test_balanced_sampling_takes_orthogonal_blocks_where_two_fit():
    model, x = network(4), torch.randn(2, 3, dtype=torch.float64)  # 81 networks, blocks of 9
    assert pb.predict(model, x, 18).draws.schemes == {"orthogonal"}
    assert pb.predict(model, x, 18).standard_error_kind == "upper estimate"  # two blocks do not tell their spread
    assert pb.predict(model, x, 27).standard_error_kind == "independent blocks"
    assert pb.predict(model, x, 17).draws.schemes == {"stratified"}
    assert pb.predict(model, x, 12, sampling="orthogonal").draws.schemes == {"orthogonal"}
    assert pb.predict(model, x, 18, sampling="stratified").draws.schemes == {"stratified"}


def test_heads_slices_and_files_keep_orthogonal_draws(tmp_path):
    model = network(3)
    draws = pb.Draws.orthogonal(model, 27).with_heads("1", 3)
    draws.save(tmp_path / "draws.json")
    loaded = pb.Draws.load(tmp_path / "draws.json", model)
    assert torch.equal(loaded.assignments(), draws.assignments())
    assert torch.equal(draws[5:20].assignments(), draws.assignments()[5:20])
    assert torch.equal(draws.assignments(1, 3), draws.assignments()[:, 1:3])


@pytest.mark.parametrize(
    "model",
    [
        network(2, 4),
        network(2, 3, probabilities=(0.5, 0.3, 0.2)),
        network(2, 3, sigma=0.1),
        network(2, 3, zero=True),
    ],
    ids=["K not prime", "unequal p", "noise", "four outcomes"],
)
def test_where_there_is_no_array_it_says_so_and_balanced_draws_are_stratified(model):
    with pytest.raises(PatchbayesError, match=r"Draws\.stratified"):
        pb.Draws.orthogonal(model, 20)
    assert pb.predict(model, torch.randn(2, 3, dtype=torch.float64), 8).draws.schemes <= {"stratified", "enumerated"}
