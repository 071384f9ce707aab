"""What predict takes: batches of every form, and outputs of every form."""

import warnings
from collections import OrderedDict
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import patchbayes as pb
from patchbayes.errors import PatchbayesError
from patchbayes.likelihoods import Gaussian
from prediction_networks import METHODS, classifier, patched, some_inputs

# Inputs


class Named(nn.Module):
    """Two inputs, of which the second may be left out."""

    def __init__(self):
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, a, b=None):
        return self.fc(self.norm(a if b is None else a * b.sin()))


def two_inputs():
    torch.manual_seed(0)
    model = Named().double()
    pb.patch_(model, pb.ECMP(3, jitter=0.5))
    return model, some_inputs(6, seed=1), some_inputs(6, seed=2)


def test_tuples_spread_over_arguments_and_mappings_over_keywords():
    model, a, b = two_inputs()
    draws = pb.Draws.sample(model, 4)
    with torch.no_grad(), pb.use_draw(model, draws[0]):
        expected = torch.softmax(model.eval()(a, b), -1)
    both = pb.predict(model, (a, b), draws[0]).probs
    torch.testing.assert_close(both, expected)
    assert not torch.allclose(both, pb.predict(model, a, draws[0]).probs)
    torch.testing.assert_close(both, pb.predict(model, {"b": b, "a": a}, draws[0]).probs)
    torch.testing.assert_close(pb.predict(model, (a,), draws).probs, pb.predict(model, a, draws).probs)


def iterables(x, y):
    pairs = [(x[:4], y[:4]), (x[4:], y[4:])]
    return {
        "tensors": [x[:4], x[4:]],
        "pairs": pairs,
        "lists": [list(pair) for pair in pairs],
        "mappings": [{"a": part} for part, _ in pairs],
        "generator": (part for part in (x[:4], x[4:])),
        "loader": DataLoader(TensorDataset(x, y), batch_size=4),
        "loader without labels": DataLoader(x, batch_size=3),
    }


@pytest.mark.parametrize("kind", iterables(torch.zeros(6, 4), torch.zeros(6)))
def test_iterables_of_batches_give_what_one_batch_gives(kind):
    model, x, _ = two_inputs()
    whole = pb.predict(model, x, 5, keep_draws=True)
    parts = pb.predict(model, iterables(x, torch.arange(6))[kind], 5, keep_draws=True)
    assert len(parts) == 6
    for name in ("probs", "log_probs", "expected_entropy", "standard_error", "draw_probs"):
        torch.testing.assert_close(getattr(parts, name), getattr(whole, name), rtol=1e-10, atol=1e-14)


def test_select_says_what_of_a_batch_is_the_input():
    model, a, b = two_inputs()
    labels = torch.arange(6)
    loader = DataLoader(TensorDataset(labels, a, b), batch_size=4)
    alone = pb.predict(model, loader, 4, select=lambda batch: batch[1])
    torch.testing.assert_close(alone.probs, pb.predict(model, a, 4).probs)
    both = pb.predict(model, loader, 4, select=lambda batch: (batch[1], batch[2]))
    torch.testing.assert_close(both.probs, pb.predict(model, (a, b), 4).probs)
    keywords = pb.predict(model, loader, 4, select=lambda batch: {"a": batch[1], "b": batch[2]})
    torch.testing.assert_close(keywords.probs, both.probs)


@pytest.mark.parametrize("make", [lambda a: (torch.arange(6), a), lambda a: {"labels": torch.arange(6), "a": a}])
def test_select_also_applies_to_a_single_batch(make):
    model, a, _ = two_inputs()
    batch = make(a)
    key = "a" if isinstance(batch, dict) else 1
    torch.testing.assert_close(
        pb.predict(model, batch, 4, select=lambda b: b[key]).probs, pb.predict(model, a, 4).probs
    )


class Wrapped(nn.Module):
    """Returns its logits inside something else."""

    def __init__(self, wrap):
        super().__init__()
        self.net, self.wrap = classifier(), wrap

    def forward(self, x):
        return self.wrap(self.net(x))


def test_output_picks_the_tensor_and_an_attribute_named_logits_is_found():
    x = some_inputs()
    plain = patched(pb.EMP(3))
    expected = pb.predict(plain, x, 4).probs
    wrapped = Wrapped(lambda y: {"scores": y, "other": -y})
    pb.patch_(wrapped, pb.EMP(3))
    torch.testing.assert_close(pb.predict(wrapped, x, 4, output=lambda y: y["scores"]).probs, expected)
    assert not torch.equal(pb.predict(wrapped, x, 4, output=lambda y: y["other"]).probs, expected)
    with pytest.raises(PatchbayesError, match="returns a dict"):
        pb.predict(wrapped, x, 4)
    wrapped.wrap = lambda y: SimpleNamespace(logits=y)
    torch.testing.assert_close(pb.predict(wrapped, x, 4).probs, expected)


def test_classes_may_stand_on_any_axis():
    torch.manual_seed(0)
    model = nn.Sequential(OrderedDict(conv=nn.Conv2d(2, 5, 3), norm=nn.BatchNorm2d(5), fc=nn.Conv2d(5, 3, 1))).double()
    pb.patch_(model, pb.EMP(3, jitter=0.5))
    x = torch.randn(2, 2, 6, 7, dtype=torch.float64)
    draws = pb.Draws.sample(model, 4)
    model.eval()
    logits = []
    with torch.no_grad():
        for draw in draws:
            with pb.use_draw(model, draw):
                logits.append(model(x).numpy())
    expected = scipy.special.softmax(np.stack(logits), axis=2).mean(0).transpose(0, 2, 3, 1)
    prediction = pb.predict(model, x, draws, likelihood=pb.likelihoods.Categorical(class_dim=1))
    assert prediction.probs.shape == (2, 4, 5, 3)
    assert prediction.entropy.shape == (2, 4, 5)
    np.testing.assert_allclose(prediction.probs.numpy(), expected, rtol=1e-10)
    assert pb.predict(model, x, draws, likelihood=pb.likelihoods.Categorical()).probs.shape == (2, 3, 4, 5)


def test_categorical_log_prob_is_the_log_softmax_at_the_target():
    outputs = torch.randn(2, 5, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    targets = torch.randint(3, (5, 4), generator=torch.Generator().manual_seed(2))
    expected = scipy.special.log_softmax(outputs.numpy(), axis=2)
    log_probs = pb.likelihoods.Categorical(class_dim=1).log_probs(
        outputs, lead=1
    )  # the draws stand before the output's own axes
    np.testing.assert_allclose(log_probs.numpy(), expected.transpose(0, 1, 3, 2), rtol=1e-12)
    chosen = np.take_along_axis(expected, targets.numpy()[None, :, None], axis=2)[:, :, 0]
    np.testing.assert_allclose(pb.likelihoods.Categorical(1).log_prob(outputs, targets).numpy(), chosen, rtol=1e-12)
    flat = pb.likelihoods.Categorical().log_probs(outputs[0])
    np.testing.assert_allclose(flat.numpy(), scipy.special.log_softmax(outputs[0].numpy(), axis=-1), rtol=1e-12)
    for wrong in (targets.double(), targets[:3], targets.T):
        with pytest.raises(PatchbayesError, match="class numbers"):
            pb.likelihoods.Categorical(1).log_prob(outputs, wrong)


@pytest.mark.parametrize("sizes", [[1] * 7, [3, 1, 3], [6, 1]])
@pytest.mark.parametrize(
    "rules",
    [
        pb.EMP(3),
        pb.ECMP(3),
        pb.Dropout(0.4),
        pb.posteriors.MeanField(),
        {"norm": pb.EMP(3, per_example=True), "fc": pb.Dropout(0.5)},
    ],
    ids=["EMP", "ECMP", "Dropout", "MeanField", "mixed"],
)
def test_prediction_does_not_depend_on_the_batches(rules, sizes):
    model, x = classifier(), some_inputs()
    pb.patch_(model, rules)
    whole = pb.predict(model, x, 6)
    parts = pb.predict(model, list(x.split(sizes)), 6)
    torch.testing.assert_close(parts.probs, whole.probs, rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(parts.standard_error, whole.standard_error, rtol=1e-6, atol=1e-12)


def test_dropout_masks_are_fresh_for_every_example_and_draw():
    model, x = patched(pb.Dropout(0.5), "output"), some_inputs(1).repeat(5, 1)
    probs = pb.predict(model, x, 3, keep_draws=True).draw_probs[..., 0]
    assert len(probs.flatten().unique()) > 10  # of 15; equal inputs under one mask would give 3, under one draw 5
    assert torch.equal(probs, pb.predict(model, x, 3, keep_draws=True).draw_probs[..., 0])


class Tokens(nn.Module):
    """Folds positions into the batch axis before the site, as token classifiers do."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        return self.fc(x.flatten(0, 1)).view(len(x), -1, 3).mean(1)


def test_dropout_masks_follow_the_example_where_rows_of_the_layer_are_positions():
    model = Tokens().double()
    pb.patch_(model, pb.Dropout(0.5), "output")
    x = torch.randn(4, 5, 4, dtype=torch.float64)
    whole = pb.predict(model, x, 4).probs
    torch.testing.assert_close(pb.predict(model, list(x.split(1)), 4).probs, whole, rtol=1e-10, atol=0)
    assert not torch.allclose(pb.predict(model, x.flip(0), 4).probs.flip(0), whole)


def test_a_network_that_contains_the_patched_one_predicts():
    inner, x = patched(METHODS["EMP"]), some_inputs()
    outer = nn.Sequential(nn.Identity(), inner)
    assert torch.equal(pb.predict(outer, x, 4).probs, pb.predict(inner, x, 4).probs)


def test_an_encoder_that_leaves_out_padding_is_predicted_and_calibrated():
    """torch's encoder turns a padded batch into a nested tensor in eval mode, and the network answers with a mapping."""

    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(20, 8)
            self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)
            self.output = nn.Linear(8, 3)

        def forward(self, input_ids, attention_mask):
            states = self.encoder(self.embedding(input_ids), src_key_padding_mask=attention_mask == 0)
            return {"logits": self.output(states[:, 0])}

    torch.manual_seed(0)
    model = Reader().eval()
    batch = {"input_ids": torch.randint(1, 20, (24, 5)), "attention_mask": torch.ones(24, 5, dtype=torch.int64)}
    batch["attention_mask"][:12, 3:] = 0
    labelled = [{**batch, "labels": torch.randint(3, (24,))}]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls nested tensors a prototype
        plain = model(**batch)["logits"].softmax(-1)
        pb.patch_(model, pb.ECMP(3, jitter=0.0))
        torch.testing.assert_close(pb.predict(model, batch, draws=2).probs, plain)
        report = pb.calibrate_(model, labelled, draws=2, budget=200)
    assert report.num_held_out == 24


def test_one_pass_of_a_regression_has_a_density_without_being_told_to_keep_it():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    x, y = torch.randn(5, 3), torch.randn(5, 1)
    found = pb.predict(model, x, draws="mean", likelihood=Gaussian(2.0))
    expected = torch.distributions.Normal(model(x), 2.0**-0.5).log_prob(y)[:, 0]
    torch.testing.assert_close(found.log_prob(y), expected)


@pytest.mark.parametrize("draws", [5, "mean", "auto"])
@pytest.mark.parametrize("class_dim", [-1, 1])
def test_probabilities_in_the_place_of_logits_are_warned_of(draws, class_dim):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3), nn.Softmax(-1)).double()
    pb.patch_(model, pb.ECMP(3, jitter=0.5), "norm")
    x, likelihood = some_inputs(6, seed=1), pb.likelihoods.Categorical(class_dim)
    with pytest.warns(UserWarning, match=r"gives probabilities .*probs\.log\(\)"):
        pb.predict(model, x, draws, likelihood=likelihood)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        logs = pb.predict(model, x, draws, likelihood=likelihood, output=lambda probs: probs.log())
        pb.predict(model, x[:1], draws, likelihood=likelihood)  # of one example nothing is concluded
    assert (logs.probs.sum(-1) - 1).abs().max() < 1e-9
