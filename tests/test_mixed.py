"""The mixed scheme: its rules, dropout of units, masks in training alone, and sites between the first and the last layer."""

import copy

import pytest
import torch
from torch import nn

import patchbayes as pb
from calibrated_networks import batches, classifier, inputs, labels_from
from patchbayes.errors import NothingToPatch, PatchbayesError
from patchbayes.nets import small_cnn


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def test_the_rules_follow_the_one_dial():
    once, twice = pb.mixed(), pb.mixed(noise=2)
    assert list(once) == ["norm+output", "hidden"]
    assert (once["norm+output"].jitter, once["hidden"].rate) == (0.2, 0.1)
    assert (twice["norm+output"].jitter, twice["hidden"].rate) == (0.4, 0.2)
    assert (once["hidden"].tie, twice["hidden"].tie) == ("unit", "activation")
    assert not (once["hidden"].predict)
    assert not (twice["hidden"].predict)
    assert pb.mixed(components=3)["norm+output"].components == 3


@pytest.mark.parametrize("noise", [-0.1, 10, float("nan"), "high", True])
def test_noise_out_of_range_is_refused(noise):
    with pytest.raises(PatchbayesError, match=r"mixed\(noise="):
        pb.mixed(noise=noise)


def test_hidden_is_neither_the_first_nor_the_last_layer():
    report = pb.patch_(network(), pb.Dropout(0.1), sites="hidden")
    assert [site.name for site in report.sites] == ["3"]


def test_without_a_hidden_layer_the_other_rules_hold_and_the_report_says_so():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    report = pb.patch_(model, pb.mixed())
    assert set(pb.patched_sites(model)) == {"1", "2"}
    assert 'sites="hidden" found no layer' in str(report)
    with pytest.raises(NothingToPatch):
        pb.patch_(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), pb.Dropout(0.1), sites="hidden")


def test_masks_are_on_in_training_and_off_in_prediction():
    model, x = network(), torch.randn(64, 6)
    pb.patch_(model, pb.Dropout(0.5, predict=False), sites="hidden")
    model.train()
    assert not torch.equal(model(x), model(x))
    plain = model.eval()(x)
    for engine in ("auto", "loop"):
        prediction = pb.predict(model, x, draws=3, keep_draws=True, engine=engine)
        torch.testing.assert_close(prediction.probs, plain.softmax(-1))
        assert float(prediction.mutual_information.max()) < 1e-6
    masked = network()
    pb.patch_(masked, pb.Dropout(0.5), sites="hidden")
    assert float(pb.predict(masked, x, draws=3).mutual_information.max()) > 1e-3


@pytest.mark.parametrize(
    ("layer", "shape", "constant"),
    [
        (nn.Conv2d(5, 5, 1), (7, 5, 3, 3), (2, 3)),
        (nn.Conv1d(5, 5, 1), (5, 9), (1,)),
        (nn.BatchNorm2d(5), (7, 5, 3, 3), (2, 3)),
        (nn.Linear(5, 5), (7, 4, 5), (1,)),
        (nn.LayerNorm(5), (7, 4, 5), (1,)),
    ],
)
def test_a_unit_is_dropped_at_all_its_positions_with_the_right_expectation(layer, shape, constant):
    model = nn.Sequential(layer)
    pb.patch_(model, pb.Dropout(0.3, tie="unit"), sites="0")
    posterior = pb.patched_sites(model)["0"].posterior
    ones = torch.ones(shape)
    keys = torch.arange(400)
    masks = torch.stack([posterior.mask(ones, posterior.draw(torch.zeros(0, dtype=torch.int64), key)) for key in keys])
    assert set(masks.unique().tolist()) <= {0.0, float(torch.tensor(1.0) / 0.7)} | {masks.max().item()}
    for axis in constant:
        first = masks.select(axis + 1, 0).unsqueeze(axis + 1)
        assert torch.equal(masks, first.expand_as(masks))
    assert abs(float(masks.mean()) - 1) < 0.05
    if len(shape) > 2:  # examples have masks of their own
        assert not torch.equal(masks[:, 0], masks[:, 1])


def test_bad_fields_are_refused():
    with pytest.raises(PatchbayesError, match="tie='channel'"):
        pb.Dropout(0.1, tie="channel")
    with pytest.raises(PatchbayesError, match="predict=1"):
        pb.Dropout(0.1, predict=1)


def test_saved_and_loaded(tmp_path):
    model = small_cnn()
    other = copy.deepcopy(model)
    pb.patch_(model, pb.mixed(noise=0.5))
    pb.save(model, tmp_path / "patch.safetensors")
    pb.load_(other, tmp_path / "patch.safetensors")
    assert pb.patched_sites(other)["conv2"].posterior.method == pb.Dropout(0.05, tie="unit", predict=False)


def test_the_spread_is_scaled_where_there_is_one():
    model, x = network(), torch.randn(16, 6)
    pb.patch_(model, pb.mixed())
    before = pb.predict(model, x, draws=20).mutual_information.mean()
    for site in pb.patched_sites(model).values():
        site.posterior.scale_spread_(0.5)
    assert float(pb.predict(model, x, draws=20).mutual_information.mean()) < 0.5 * float(before)


@pytest.mark.parametrize(
    ("certainty", "patched", "expected"),
    [(0.3, True, "more epochs, less noise"), (0.3, False, "Patches would gain little"), (3.0, True, "")],
)
def test_the_report_says_when_a_network_is_less_sure_than_it_could_be_and_what_to_do(certainty, patched, expected):
    """Labels drawn from the network itself; then its output layer is shrunk, as of too much noise, or grown."""
    model, x = classifier(), inputs(400)
    y = labels_from(torch.softmax(model(x), -1))
    with torch.no_grad():
        for parameter in model[-1].parameters():
            parameter.mul_(certainty)
    if patched:
        pb.patch_(model, pb.mixed(0.1))
    report = pb.calibrate_(model, batches(x, y), budget=2000, draws=4)
    assert (report.mean_temperature < 1) == (certainty < 1)
    assert expected in report.warning
    assert bool(report.warning) == bool(expected)
    assert report.warning in str(report)
