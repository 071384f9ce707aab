"""Corruption errors against a reference network, and how much draws differ from each other."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from patchbayes.errors import PatchbayesError
from patchbayes.metrics import corruption_errors, disagreement, mutual_information, relative_corruption_errors

# Corruption

MINE = torch.tensor([[0.30, 0.40], [0.20, 0.60]], dtype=torch.float64)
REFERENCE = torch.tensor([[0.40, 0.60], [0.30, 0.50]], dtype=torch.float64)


def test_corruption_error_is_a_ratio_of_sums_over_severities():
    found = corruption_errors(MINE, REFERENCE)
    assert found.by_corruption.tolist() == pytest.approx([70.0, 100.0])
    assert found.mean == pytest.approx(85.0)
    assert corruption_errors(REFERENCE, REFERENCE).mean == pytest.approx(100)


def test_relative_error_is_what_corruption_adds():
    found = relative_corruption_errors(MINE, 0.1, REFERENCE, 0.2)
    # (0.7 - 2 * 0.1) / (1.0 - 2 * 0.2), (0.8 - 0.2) / (0.8 - 0.4)
    assert found.by_corruption.tolist() == pytest.approx([100 * 5 / 6, 150.0])
    assert found.mean == pytest.approx((100 * 5 / 6 + 150) / 2)
    assert relative_corruption_errors(REFERENCE, 0.2, REFERENCE, 0.2).mean == pytest.approx(100)


def test_the_papers_literal_formula_takes_the_methods_own_clean_error_off_both():
    found = relative_corruption_errors(MINE, 0.1, REFERENCE, None, definition="paper")
    # (0.7 - 0.2) / (1.0 - 0.2), (0.8 - 0.2) / (0.8 - 0.2)
    assert found.by_corruption.tolist() == pytest.approx([100 * 5 / 8, 100.0])
    standard = relative_corruption_errors(MINE, 0.1, REFERENCE, 0.2, definition="standard")
    assert standard.mean != pytest.approx(found.mean)
    # Both agree where the clean errors do.
    same = relative_corruption_errors(MINE, 0.1, REFERENCE, 0.1)
    assert same.mean == pytest.approx(found.mean)


def test_bad_corruption_errors_are_refused():
    wrong = {
        "shapes": lambda: corruption_errors(MINE, REFERENCE[:1]),
        "one corruption without axis": lambda: corruption_errors(MINE[0], REFERENCE[0]),
        "percent": lambda: corruption_errors(100 * MINE, 100 * REFERENCE),
        "not a number": lambda: corruption_errors(MINE * math.nan, REFERENCE),
        "nothing": lambda: corruption_errors(MINE[:0], REFERENCE[:0]),
        "perfect reference": lambda: corruption_errors(MINE, 0 * REFERENCE),
        "reference unharmed": lambda: relative_corruption_errors(MINE, 0.1, 0 * REFERENCE + 0.2, 0.2),
        "clean error in percent": lambda: relative_corruption_errors(MINE, 10, REFERENCE, 0.2),
        "reference's clean error": lambda: relative_corruption_errors(MINE, 0.1, REFERENCE, -0.2),
        "missing clean error": lambda: relative_corruption_errors(MINE, 0.1, REFERENCE, None),
        "unused clean error": lambda: relative_corruption_errors(MINE, 0.1, REFERENCE, 0.2, definition="paper"),
        "definition": lambda: relative_corruption_errors(MINE, 0.1, REFERENCE, 0.2, definition="other"),
    }
    for what, call in wrong.items():
        with pytest.raises(PatchbayesError):
            pytest.fail(f"{what} was accepted: {call()}")


# Diversity


def draws_of(seed, draws=5, size=6, classes=3):
    generator = torch.Generator().manual_seed(seed)
    probs = (2 * torch.randn(draws, size, classes, generator=generator, dtype=torch.float64)).softmax(-1)
    weights = torch.rand(draws, generator=generator, dtype=torch.float64) + 0.1
    return probs, weights / weights.sum()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 7), st.integers(1, 5), st.integers(2, 4))
def test_disagreement_is_counted_over_pairs(seed, draws, size, classes):
    probs, weights = draws_of(seed, draws, size, classes)
    named = probs.argmax(-1)
    pairs = list(itertools.combinations(range(draws), 2))
    differing = [float((named[s] != named[t]).double().mean()) for s, t in pairs]
    assert disagreement(probs) == pytest.approx(sum(differing) / len(pairs), abs=1e-12)
    of_pair = [float(weights[s] * weights[t]) for s, t in pairs]
    expected = sum(d * w for d, w in zip(differing, of_pair, strict=True)) / sum(of_pair)
    assert disagreement(probs, weights) == pytest.approx(expected, abs=1e-12)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 7))
def test_mutual_information_is_the_mean_distance_of_draws_to_their_average(seed, draws):
    """In the sense of Kullback and Leibler, which is the same and is computed differently."""
    probs, weights = draws_of(seed, draws)
    for given_weights, w in ((None, torch.full((draws,), 1 / draws, dtype=torch.float64)), (weights, weights)):
        w = w.view(-1, 1, 1)
        average = (w * probs).sum(0)
        divergence = (w * probs * (probs / average).log()).sum((0, 2)).mean()
        assert mutual_information(probs, given_weights) == pytest.approx(float(divergence), abs=1e-12)


def test_one_model_has_no_diversity_and_opposites_have_all():
    one = draws_of(1, draws=1)[0].expand(4, -1, -1)
    assert disagreement(one) == 0
    assert mutual_information(one) == pytest.approx(0, abs=1e-12)
    opposites = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
    assert disagreement(opposites) == 1
    assert mutual_information(opposites) == pytest.approx(math.log(2))


def test_bad_draws_are_refused():
    probs, weights = draws_of(2)
    wrong = {
        "one draw": lambda: disagreement(probs[:1]),
        "shape": lambda: disagreement(probs[0]),
        "nothing": lambda: mutual_information(probs[:, :0]),
        "logits": lambda: mutual_information(probs.log()),
        "not a number": lambda: mutual_information(probs * math.nan),
        "weights, number": lambda: disagreement(probs, weights[:-1]),
        "weights, sum": lambda: mutual_information(probs, 2 * weights),
        "one weight has all": lambda: disagreement(probs, torch.tensor([1.0, 0, 0, 0, 0])),
    }
    for what, call in wrong.items():
        with pytest.raises(PatchbayesError):
            pytest.fail(f"{what} was accepted: {call()}")
