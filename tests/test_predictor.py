"""Predictor: the posterior predictive as a module, for pipelines that call a model and expect an answer."""

import copy
import warnings

import pytest
import torch
from torch import nn

import patchbayes as pb
from patchbayes.errors import NotPatched, PatchbayesError, WrongDraws
from patchbayes.posteriors.components import MixturePosterior


def network(outputs=3, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, outputs)).double()


def patched(method=None, outputs=3):
    model = network(outputs)
    pb.patch_(model, method or pb.ECMP(3, jitter=0.5))
    return model


@pytest.fixture
def x():
    return torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_it_gives_the_log_probabilities_of_predict(x):
    model = patched()
    torch.testing.assert_close(pb.Predictor(model)(x), pb.predict(model, x).log_probs)
    torch.testing.assert_close(pb.Predictor(model, draws=7)(x), pb.predict(model, x, 7).log_probs)
    iid = pb.predict(model, x, pb.Draws.sample(model, 7)).log_probs
    torch.testing.assert_close(pb.Predictor(model, draws=7, sampling="iid")(x), iid)
    assert not torch.equal(pb.Predictor(model, draws=7)(x), pb.Predictor(model, draws=8)(x))
    draws = pb.Draws.stratified(model, 6)
    torch.testing.assert_close(pb.Predictor(model, draws)(x), pb.predict(model, x, draws).log_probs)


def test_it_gives_mean_and_variance_for_a_gaussian_likelihood(x):
    model = patched(outputs=2)
    mean, variance = pb.Predictor(model, 6, likelihood=pb.likelihoods.Gaussian(precision=5.0))(x)
    prediction = pb.predict(model, x, 6, likelihood=pb.likelihoods.Gaussian(precision=5.0))
    assert torch.equal(mean, prediction.mean)
    assert torch.equal(variance, prediction.variance)
    assert (variance > 0.2).all()


def test_the_same_input_always_gives_the_same_answer(x):
    model = patched(pb.Dropout(0.3))
    predictor = pb.Predictor(model, 5)
    first = predictor(x)
    model.train()
    model[1].eval()
    model(x)  # the network's own generator moves on
    torch.rand(3)
    assert torch.equal(predictor(x), first)
    one, other = (pb.Predictor(model, 5, generator=torch.Generator().manual_seed(s)) for s in (1, 2))
    assert not torch.equal(one(x), other(x))
    assert torch.equal(one(x), pb.predict(model, x, 5, generator=torch.Generator().manual_seed(1)).log_probs)


def test_modes_change_nothing_and_are_kept(x):
    predictor = pb.Predictor(patched(), 4)
    answers = []
    for prepare in (predictor.train, predictor.eval):
        prepare()
        mode = predictor.training
        answers.append(predictor(x))
        assert {module.training for module in predictor.modules()} == {mode}
    assert torch.equal(*answers)


def test_no_gradients_and_no_warning(x):
    predictor = pb.Predictor(patched(), 4).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not predictor(x.requires_grad_()).requires_grad
    assert torch.is_grad_enabled()


def test_it_is_a_layer_among_others(x):
    predictor = pb.Predictor(patched(), 4)
    pipeline = nn.Sequential(nn.Identity(), predictor, nn.Flatten())
    assert torch.equal(pipeline(x), predictor(x))
    assert pb.is_patched(pipeline)
    state = {key: value.clone() for key, value in pipeline.state_dict().items()}
    other = nn.Sequential(nn.Identity(), pb.Predictor(patched(pb.ECMP(3, jitter=0.9)), 4), nn.Flatten())
    assert not torch.equal(other(x), pipeline(x))
    other.load_state_dict(state)
    assert torch.equal(other(x), pipeline(x))
    clone = copy.deepcopy(pipeline)
    assert torch.equal(clone(x), pipeline(x))
    with torch.no_grad():
        clone[1].model[0].weight.zero_()
    assert not torch.equal(clone(x), pipeline(x))


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, a, b):
        return {"logits": self.fc(self.norm(a - b * b))}


def test_several_inputs_by_position_or_by_keyword_and_options_of_predict(x):
    torch.manual_seed(0)
    model = TwoInputs().double()
    pb.patch_(model, pb.EMP(3, jitter=0.5))
    predictor = pb.Predictor(model, 4, output=lambda y: y["logits"])
    expected = pb.predict(model, (x, x.sin()), 4, output=lambda y: y["logits"]).log_probs
    torch.testing.assert_close(predictor(x, x.sin()), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(predictor(b=x.sin(), a=x), expected, rtol=0, atol=1e-12)
    assert (predictor(x.sin(), x) - expected).abs().max() > 0.01
    pairs = pb.Predictor(model, 4, select=lambda pair: (pair[0], pair[1].sin()), output=lambda y: y["logits"])
    torch.testing.assert_close(pairs(x, x), expected, rtol=0, atol=1e-12)
    with pytest.raises(PatchbayesError, match="by position or all by keyword"):
        predictor(x, b=x)


def test_it_follows_the_weights(x):
    model = patched()
    predictor = pb.Predictor(model, 4)
    before = predictor(x)
    with torch.no_grad():
        pb.patched_sites(model)["3"].components("bias")[:, 0] += 1
    assert (predictor(x)[:, 0] > before[:, 0]).all()


def test_bad_input_is_refused_when_it_is_made(x):
    model = patched()
    with pytest.raises(NotPatched):
        pb.Predictor(network())
    with pytest.raises(WrongDraws):
        pb.Predictor(model, pb.Draws.sample(patched(pb.EMP(2)), 3))
    with pytest.raises(PatchbayesError, match="at least 1"):
        pb.Predictor(model, 0)
    with pytest.raises(PatchbayesError, match="likelihood="):
        pb.Predictor(model, likelihood="gaussian")
    with pytest.raises(PatchbayesError, match="made already"):
        pb.Predictor(model, pb.Draws.sample(model, 3), generator=torch.Generator())
    with pytest.raises(TypeError, match="keep_draws"):  # would cost memory and change nothing
        pb.Predictor(model, 3, keep_draws=True)


def test_a_network_that_was_unpatched_since_is_refused(x):
    model = patched()
    predictor = pb.Predictor(model, 4)
    pb.unpatch_(model)
    with pytest.raises(NotPatched):
        predictor(x)
    pb.patch_(model, pb.EMP(2))
    with pytest.raises(WrongDraws):
        predictor(x)


def realized(monkeypatch):
    """The list that grows with every draw of a site whose weights are made."""
    made = []
    one = MixturePosterior.realize
    monkeypatch.setattr(MixturePosterior, "realize", lambda self, drawn: made.append(1) or one(self, drawn))
    return made


def test_weights_are_kept_within_the_memory_limit(x, monkeypatch):
    model = patched()
    kept, anew = pb.Predictor(model, 6), pb.Predictor(model, 6, memory_limit=1)
    first = kept(x), anew(x)
    made = realized(monkeypatch)
    again = kept(x)
    assert not made
    torch.testing.assert_close((again, anew(x)), (first[0], first[1]))
    assert made
    torch.testing.assert_close(*first)


def test_the_engine_can_be_the_loop(x):
    calls = []

    class Counted(nn.Sequential):
        def forward(self, value):
            calls.append(1)
            return super().forward(value)

    torch.manual_seed(0)
    model = Counted(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3)).double()
    pb.patch_(model, pb.ECMP(3, jitter=0.5))
    loop, graph = pb.Predictor(model, 4, engine="loop"), pb.Predictor(model, 4)
    answers = [loop(x), graph(x)]
    torch.testing.assert_close(*answers)
    calls.clear()
    graph(x)
    assert not calls
    loop(x)
    assert len(calls) == 4
    with pytest.raises(PatchbayesError, match="engine='tape'"):
        pb.Predictor(model, 4, engine="tape")
