"""Draws as a value: slice, concatenate, save, hold; the same numbers however they are asked for."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import patchbayes as pb
from draw_networks import MIXED, network, seeded
from patchbayes.errors import PatchbayesError, WrongDraws

PROPERTY = settings(derandomize=True, database=None, deadline=None, max_examples=40)


@pytest.fixture(scope="module")
def mixed_model():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return network(*MIXED)


# Slices, sums, iteration


def test_an_enumeration_is_exact_only_as_a_whole():
    draws = pb.Draws.enumerate(network(pb.EMP(3)))
    assert draws.is_exact
    assert draws[[2, 0, 1]].is_exact
    assert not draws[:2].is_exact
    assert not draws[[0, 0, 1, 2]].is_exact
    assert not (draws + draws[:1]).is_exact
    assert not pb.Draws.sample(network(pb.EMP(3)), 3).is_exact


@pytest.mark.parametrize(
    "which", [0, -1, 5, slice(2, 9), slice(None, None, -3), slice(4, 4), [3, 3, 0, -2], range(1, 8, 2)]
)
def test_indexing_picks_what_indexing_the_assignments_picks(mixed_model, which):
    draws = pb.Draws.sample(mixed_model, 10, seeded(1)) + pb.Draws.stratified(mixed_model, 10, seeded(2))
    rows = [which] if isinstance(which, int) else list(range(20)[which] if isinstance(which, slice) else which)
    chosen = draws[which]
    assert torch.equal(chosen.assignments(), draws.assignments()[rows])
    assert torch.equal(chosen.keys(), draws.keys()[rows])
    assert len(chosen) == len(draws.keys()[rows])


def test_a_draw_that_is_not_there_is_an_index_error(mixed_model):
    draws = pb.Draws.sample(mixed_model, 4)
    for which in (4, -5, [0, 4]):
        with pytest.raises(IndexError):
            draws[which]


def test_iteration_gives_every_draw_once(mixed_model):
    draws = pb.Draws.sample(mixed_model, 5, seeded(1))
    one_by_one = [one.assignments() for one in draws]
    assert [len(one) for one in draws] == [1] * 5
    assert torch.equal(torch.cat(one_by_one), draws.assignments())


@PROPERTY
@given(data=st.data(), scheme=st.sampled_from(["sample", "stratified", "enumerate"]))
def test_slicing_twice_is_slicing_once(mixed_model, data, scheme):
    draws = pb.Draws.enumerate(mixed_model) if scheme == "enumerate" else getattr(pb.Draws, scheme)(mixed_model, 40)
    first = data.draw(st.slices(len(draws)))
    part = draws[first]
    second = data.draw(st.slices(len(part)))
    assert torch.equal(part[second].assignments(), draws.assignments()[list(range(len(draws))[first][second])])


@PROPERTY
@given(
    start=st.integers(0, 10), length=st.integers(0, 10), scheme=st.sampled_from(["sample", "stratified", "enumerate"])
)
def test_assignments_of_some_groups_equal_that_part_of_all(mixed_model, start, length, scheme):
    draws = pb.Draws.enumerate(mixed_model) if scheme == "enumerate" else getattr(pb.Draws, scheme)(mixed_model, 40)
    stop = min(start + length, draws.layout.num_groups)
    assert torch.equal(draws.assignments(start, stop), draws.assignments()[:, start:stop])


@PROPERTY
@given(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=5))
def test_concatenated_draws_average_by_size(mixed_model, sizes):
    parts = [pb.Draws.sample(mixed_model, size, seeded(number)) for number, size in enumerate(sizes)]
    together = pb.Draws.concatenate(parts)
    assert torch.equal(together.assignments(), torch.cat([part.assignments() for part in parts]))
    values = together.assignments().double().sum(1)
    averages = [(part.weights * part.assignments().double().sum(1)).sum() for part in parts]
    expected = sum(size * average for size, average in zip(sizes, averages, strict=True)) / sum(sizes)
    torch.testing.assert_close((together.weights * values).sum(), expected, rtol=1e-13, atol=1e-13)


def test_an_enumeration_joined_with_draws_counts_by_its_size_and_keeps_its_probabilities():
    model = network(pb.EMP(2, probabilities=(0.9, 0.1)))
    joined = pb.Draws.enumerate(model) + pb.Draws.sample(model, 6, seeded(1))
    np.testing.assert_allclose(joined.weights, [0.9 * 2 / 8, 0.1 * 2 / 8, *[1 / 8] * 6], rtol=1e-14)


def test_the_halves_of_an_enumeration_joined_weigh_like_the_whole():
    draws = pb.Draws.enumerate(network(pb.EMP(3, probabilities=(0.5, 0.2, 0.3))))
    np.testing.assert_allclose((draws[:1] + draws[1:]).weights, draws.weights, rtol=1e-14)


def test_part_of_an_enumeration_is_weighted_in_proportion():
    draws = pb.Draws.enumerate(network(pb.EMP(3, probabilities=(0.5, 0.2, 0.3))))
    np.testing.assert_allclose(draws[1:].weights, [0.4, 0.6], rtol=1e-14)


@PROPERTY
@given(order=st.permutations(range(3)), p=st.sampled_from([None, (0.5, 0.2, 0.3), (0.25, 0.25, 0.5)]))
def test_relabelling_components_changes_no_average(order, p):
    """Components and their probabilities in another order: the same mixture, so the same marginal and the same KL."""
    torch.manual_seed(0)
    x = torch.randn(4, 2, dtype=torch.float64)
    original = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)).double()
    pb.patch_(original, pb.EMP(3, probabilities=p), "linear")
    relabelled = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)).double()
    permuted = None if p is None else tuple(p[k] for k in order)
    pb.patch_(relabelled, pb.EMP(3, probabilities=permuted), "linear")
    with torch.no_grad():
        for name, site in pb.patched_sites(original).items():
            for parameter in ("weight", "bias"):
                components = site.components(parameter)
                pb.patched_sites(relabelled)[name].components(parameter).copy_(components[list(order)])
        averages = []
        for model in (original, relabelled):
            draws = pb.Draws.enumerate(model)
            probs = pb.forward_draws(model, x, draws).softmax(-1)
            averages.append(torch.tensordot(draws.weights, probs, dims=1))
        torch.testing.assert_close(*averages, rtol=1e-13, atol=1e-14)
        torch.testing.assert_close(pb.kl(original), pb.kl(relabelled), rtol=1e-13, atol=0)


# Draws belong to a kind of network


@pytest.mark.parametrize(
    "methods",
    [
        (pb.EMP(3),),
        (pb.EMP(3), pb.EMP(3)),
        (pb.EMP(2), pb.EMP(3)),
        (pb.EMP(3), pb.ECMP(2)),
        (pb.EMP(3), pb.EMP(2, sigma=0.1)),
    ],
)
def test_draws_of_another_network_are_refused(methods, tmp_path):
    ours, other = network(pb.EMP(3), pb.EMP(2)), network(*methods)
    draws = pb.Draws.sample(other, 3)
    with pytest.raises(WrongDraws, match="another network"):
        pb.forward_draws(ours, torch.zeros(1, 2), draws)
    with pytest.raises(WrongDraws, match="another network"), pb.use_draw(ours, draws[0]):
        pass
    with pytest.raises(WrongDraws, match="different sites"):
        draws + pb.Draws.sample(ours, 3)
    draws.save(tmp_path / "draws.json")
    with pytest.raises(WrongDraws, match="other sites"):
        pb.Draws.load(tmp_path / "draws.json", ours)


def test_draws_fit_a_network_of_the_same_sites_whatever_its_weights():
    first, second = network(pb.EMP(3), pb.ECMP(2)), network(pb.EMP(3), pb.ECMP(2))
    draws = pb.Draws.sample(first, 3, seeded(1))
    assert pb.forward_draws(second, torch.zeros(1, 2), draws).shape == (3, 1, 2)


@pytest.mark.parametrize("scheme", ["sample", "stratified", "enumerate"])
def test_draws_keep_the_probabilities_that_they_were_made_with(scheme, tmp_path):
    """They fit a network whose probabilities are others, with the components and weights of their own."""

    def make(model):
        return pb.Draws.enumerate(model) if scheme == "enumerate" else getattr(pb.Draws, scheme)(model, 40, seeded(1))

    unequal, equal = network(pb.ECMP(2, probabilities=(0.75, 0.25))), network(pb.ECMP(2))
    draws, others = make(unequal), make(equal)
    assert draws.law.probabilities == ((0.75, 0.25),)
    assert others.law.probabilities == (None,)
    draws.save(tmp_path / "draws.json")
    for loaded in (pb.Draws.load(tmp_path / "draws.json", unequal), pb.Draws.load(tmp_path / "draws.json", equal)):
        assert torch.equal(loaded.assignments(), draws.assignments())
        assert torch.equal(loaded.weights, draws.weights)
        assert loaded.law.probabilities == draws.law.probabilities
        assert loaded.block_length == draws.block_length
    assert pb.forward_draws(equal, torch.zeros(1, 2), draws).shape == (len(draws), 1, 2)
    what = "weights" if scheme == "enumerate" else "indices"
    ours, theirs = ({"weights": d.weights, "indices": d.assignments()}[what] for d in (draws, others))
    assert not torch.equal(ours, theirs)
    with pytest.raises(WrongDraws, match="different mixing probabilities"):
        draws + others


@pytest.mark.parametrize("probabilities", [[[0.5, 0.5, 0.0]], [None, None], [[1.5, -0.5]], "half", [["a", "b"]], []])
def test_probabilities_of_a_file_that_do_not_fit_are_refused(probabilities, tmp_path):
    model, path = network(pb.EMP(2)), tmp_path / "draws.json"
    pb.Draws.sample(model, 3).save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"probabilities": probabilities}))
    with pytest.raises(PatchbayesError, match="not a file of draws"):
        pb.Draws.load(path, model)


def test_nothing_to_concatenate_is_refused():
    with pytest.raises(PatchbayesError, match="at least one"):
        pb.Draws.concatenate([])


# Files


@pytest.mark.parametrize("which", ["sample", "stratify", "enumerate", "mixed"])
def test_saved_draws_come_back_as_they_were(mixed_model, tmp_path, which):
    draws = {
        "sample": lambda: pb.Draws.sample(mixed_model, 8, seeded(1)),
        "stratify": lambda: pb.Draws.stratified(mixed_model, 8, seeded(1))[1::2],
        "enumerate": lambda: pb.Draws.enumerate(mixed_model),
        "mixed": lambda: pb.Draws.sample(mixed_model, 4)[[3, 0, 2]] + pb.Draws.enumerate(mixed_model)[5:9],
    }[which]()
    draws.save(tmp_path / "draws.json")
    loaded = pb.Draws.load(tmp_path / "draws.json", mixed_model)
    assert torch.equal(loaded.assignments(), draws.assignments())
    assert torch.equal(loaded.keys(), draws.keys())
    assert torch.equal(loaded.weights, draws.weights)
    assert (loaded.is_exact, loaded.schemes, len(loaded)) == (draws.is_exact, draws.schemes, len(draws))


def test_the_file_stays_small(mixed_model, tmp_path):
    pb.Draws.sample(mixed_model, 10**8).save(tmp_path / "draws.json")
    assert (tmp_path / "draws.json").stat().st_size < 1000
    assert [path.name for path in tmp_path.iterdir()] == ["draws.json"]


def _truncated(text):
    return text[: len(text) // 2]


def _foreign_json(text):
    return json.dumps({"some": "thing"})


def _list(text):
    return "[1, 2, 3]"


def _later_format(text):
    return text.replace("patchbayes-draws-2", "patchbayes-draws-9")


def _unknown_scheme(text):
    return text.replace('"iid"', '"sobol"')


def _no_parts(text):
    return json.dumps({k: v for k, v in json.loads(text).items() if k != "parts"})


@pytest.mark.parametrize("damage", [_truncated, _foreign_json, _list, _later_format, _unknown_scheme, _no_parts])
def test_a_damaged_or_foreign_file_is_refused(mixed_model, tmp_path, damage):
    path = tmp_path / "draws.json"
    pb.Draws.sample(mixed_model, 3).save(path)
    path.write_text(damage(path.read_text()))
    with pytest.raises(PatchbayesError, match="not a file of draws"):
        pb.Draws.load(path, mixed_model)


def test_a_binary_file_is_refused(mixed_model, tmp_path):
    path = tmp_path / "draws.json"
    path.write_bytes(bytes(range(256)))
    with pytest.raises(PatchbayesError, match="not a file of draws"):
        pb.Draws.load(path, mixed_model)


# Holding a draw


def test_forward_draws_equal_holding_each_draw(mixed_model):
    x = torch.randn(3, 2, generator=seeded(0))
    draws = pb.Draws.sample(mixed_model, 6, seeded(1))
    one_by_one = []
    for one in draws:
        with pb.use_draw(mixed_model, one):
            one_by_one.append(mixed_model(x))
    assert torch.equal(pb.forward_draws(mixed_model, x, draws), torch.stack(one_by_one))


def test_the_same_draws_in_any_chunking_give_the_same_numbers(mixed_model):
    x = torch.randn(3, 2, generator=seeded(0))
    draws = pb.Draws.stratified(mixed_model, 12, seeded(1))
    chunks = [pb.forward_draws(mixed_model, x, part) for part in (draws[:5], draws[5:6], draws[6:])]
    assert torch.equal(torch.cat(chunks), pb.forward_draws(mixed_model, x, draws))


def test_only_one_draw_is_held_at_a_time(mixed_model):
    with (
        pytest.raises(PatchbayesError, match=r"got 2; pass draws\[i\]"),
        pb.use_draw(mixed_model, pb.Draws.sample(mixed_model, 2)),
    ):
        pass


@pytest.mark.parametrize("draws", [0, -1, True, 1.5])
def test_forward_draws_refuses_a_number_that_is_none(mixed_model, draws):
    with pytest.raises(PatchbayesError, match="at least 1"):
        pb.forward_draws(mixed_model, torch.zeros(1, 2), draws)


def test_forward_draws_with_a_number_makes_fresh_draws_from_the_networks_generator():
    def run():
        torch.manual_seed(0)
        model = network(pb.ECMP(3))
        return [pb.forward_draws(model, torch.ones(1, 2), 4) for _ in range(2)]

    (first, second), (again, _) = run(), run()
    assert first.unique(dim=0).shape[0] > 1
    assert not torch.equal(first, second)
    assert torch.equal(first, again)
