"""Averages alone: what predict keeps of outputs too large for every statistic."""

import pytest
import torch
from torch import nn

import patchbayes as pb
from patchbayes.errors import PatchbayesError
from patchbayes.likelihoods import Categorical
from patchbayes.prediction import running


class Tagger(nn.Module):
    """Classes for each of T positions."""

    def __init__(self, classes=7):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, classes))
        self.mask = torch.zeros(classes)

    def forward(self, x):
        return self.layers(x) + self.mask


@pytest.fixture
def model():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tagger = Tagger()
    pb.patch_(tagger, pb.ECMP(3, jitter=0.8))
    return tagger


X = torch.randn(5, 4, 3, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("engine", ["loop", "graph"])
@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_they_are_those_of_all_statistics(model, engine, temperature):
    likelihood = Categorical()
    likelihood.set_temperature_(temperature, draw_temperature=1.3)
    whole, lean = (
        pb.predict(model, X, 6, engine=engine, likelihood=likelihood, statistics=kind) for kind in ("all", "averages")
    )
    for name in ("probs", "log_probs", "entropy", "expected_entropy", "mutual_information", "averaged_log_probs"):
        torch.testing.assert_close(getattr(lean, name), getattr(whole, name), atol=1e-5, rtol=1e-4)
    assert torch.equal(lean.predicted_class, whole.predicted_class)
    assert lean.probs.dtype == torch.float32
    assert lean.standard_error.isnan().all()
    assert lean.standard_error_kind == "unknown"
    assert lean.probs.shape == lean.standard_error.shape == (5, 4, 7)
    assert lean.mutual_information.max() > 1e-3


def test_positions_are_worked_off_in_any_portions(model, monkeypatch):
    expected = pb.predict(model, X, 6, statistics="averages", engine="loop")
    monkeypatch.setattr(running, "_AT_ONCE", 3 * 7)
    found = pb.predict(model, X, 6, statistics="averages", engine="loop")
    torch.testing.assert_close(found.probs, expected.probs)
    torch.testing.assert_close(found.expected_entropy, expected.expected_entropy)


def test_enumerated_draws_are_weighed(model):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tagger = Tagger()
    pb.patch_(tagger, pb.posteriors.Mixture(components=2, tie="site", probabilities=(0.9, 0.1), jitter=0.8), "output")
    whole, lean = (pb.predict(tagger, X, "exact", statistics=kind) for kind in ("all", "averages"))
    torch.testing.assert_close(lean.probs, whole.probs)


def test_classes_that_cannot_be(model):
    model.mask[2] = -torch.inf
    whole, lean = (pb.predict(model, X, 4, engine="loop", statistics=kind) for kind in ("all", "averages"))
    torch.testing.assert_close(lean.expected_entropy, whole.expected_entropy)
    assert not lean.probs[..., 2].any()


def test_large_outputs_at_several_positions_get_them_unasked(model, monkeypatch):
    assert pb.predict(model, X, 4, engine="loop").standard_error_kind != "unknown"
    monkeypatch.setattr(running, "MANY", 100)
    assert pb.predict(model, X, 4, engine="loop").standard_error_kind == "unknown"
    assert pb.predict(model, X, 4, engine="loop", statistics="all").standard_error_kind != "unknown"
    assert pb.predict(model, X, 4, engine="loop", keep_draws=True).standard_error_kind != "unknown"
    flat = X.reshape(20, 3).repeat(2, 1)
    assert pb.predict(model, flat, 4, engine="loop").standard_error_kind != "unknown"  # one position for each input


def test_no_tensor_as_large_as_the_outputs_is_kept_twice(model):
    lean = pb.predict(model, X, 4, engine="loop", statistics="averages")
    assert lean.kept_log_probs is None
    assert lean.standard_error.untyped_storage().nbytes() <= 8


def test_what_needs_more_is_refused(model):
    with pytest.raises(PatchbayesError, match='expected "all" or "averages"'):
        pb.predict(model, X, statistics="few")
    with pytest.raises(PatchbayesError, match="keep_draws=True"):
        pb.predict(model, X, statistics="averages", keep_draws=True)
    with pytest.raises(PatchbayesError, match='draws="auto"'):
        pb.predict(model, X, "auto", statistics="averages")
    lean = pb.predict(model, X, 4, statistics="averages")
    with pytest.raises(PatchbayesError, match="is unknown"):
        lean.monte_carlo_interval()
