"""What `calibrate_` says of things that look odd, and what it refuses since it can only be a mistake."""

import html

import pytest
import torch
from torch import nn

import patchbayes as pb
from calibrated_networks import batches, classifier, inputs, labels_from
from patchbayes.bayesianizing.report import Scores
from patchbayes.cli.bayesianize_page import bayesianize_page
from patchbayes.errors import PatchbayesError
from patchbayes.likelihoods import Categorical
from patchbayes.views import shifts


def test_probabilities_are_not_logits() -> None:
    net, x = classifier(), inputs(200)
    y = labels_from(torch.softmax(net(x), -1).detach())
    sure = nn.Sequential(net, nn.Softmax(-1)).eval()
    with pytest.raises(PatchbayesError, match=r"gives probabilities .*expected logits(.|\n)*probs\.log\(\)"):
        pb.calibrate_(sure, batches(x, y))
    assert not pb.is_patched(sure)
    with pytest.raises(PatchbayesError, match="expected logits"):
        pb.bayesianize_(sure, batches(x, y))
    assert not pb.is_patched(sure)
    logs = pb.calibrate_(sure, batches(x, y), output=lambda probs: probs.log())
    assert logs.mean_temperature == pytest.approx(pb.calibrate_(net, batches(x, y)).mean_temperature, rel=1e-3)


def test_a_network_that_is_always_right_was_perhaps_trained_on_these() -> None:
    net, x = classifier(), inputs(200)
    said = str(pb.calibrate_(net, batches(x, net(x).argmax(-1))))
    assert "was the network trained on these examples?" in said
    other = classifier()
    assert "was the network trained" not in str(
        pb.calibrate_(other, batches(x, labels_from(torch.softmax(other(x), -1).detach())))
    )


def test_the_page_has_the_remarks_too() -> None:
    net, x = classifier(), inputs(200)
    report = pb.bayesianize_(net, batches(x, net(x).argmax(-1)), budget=2000)
    page = bayesianize_page(report)
    assert report.calibration.remarks
    for text in report.calibration.remarks:
        assert html.escape(text) in page


def test_few_examples_have_no_calibration_error() -> None:
    few, many = (Scores(1.0, 0.05, 0.5, ((number, 0.5, 0.5),)) for number in (99, 100))
    assert "ECE" not in str(few)
    assert "ECE  5.0 %" in str(many)


def test_a_regression_is_not_told_that_it_is_less_sure_than_it_could_be() -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1)).eval(), inputs(200)
    y = net(x).detach() + 0.05 * torch.randn(200, 1)
    report = pb.calibrate_(net, batches(x, y), likelihood=pb.likelihoods.Gaussian(1.0))
    assert report.mean_temperature < 1
    assert report.warning == ""


def test_what_has_a_temperature_is_not_called_patched() -> None:
    net, x = classifier(), inputs(100)
    y = labels_from(torch.softmax(net(x), -1).detach())
    pb.calibrate_(net, batches(x, y))
    with pytest.raises(PatchbayesError, match="has a temperature of an earlier calibration already"):
        pb.bayesianize_(net, batches(x, y))
    pb.unpatch_(net)
    pb.patch_(net, pb.EMP(2), "output")
    with pytest.raises(PatchbayesError, match="is patched already"):
        pb.bayesianize_(net, batches(x, y))


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (torch.eye(3)[[0, 1]], r"targets\.argmax\(-1\)"),
        (torch.tensor([[0], [1]]), r"targets\.squeeze\(-1\)"),
        (torch.tensor([0.0, 1.0]), r"targets\.long\(\)"),
        (torch.tensor([0.5, 1.0]), r"Gaussian\(\)"),
        (torch.tensor([3, 4]), "number the classes from 0;"),
    ],
)
def test_wrong_labels_are_told_what_to_do(targets: torch.Tensor, said: str) -> None:
    with pytest.raises(PatchbayesError, match=said):
        Categorical().log_prob(torch.zeros(1, 2, 3), targets)


def test_a_shift_that_leaves_nothing_is_refused() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 2)).eval()
    x = torch.randn(2, 3, 8, 8)
    pb.predict(net, x, views=shifts(7))
    with pytest.raises(PatchbayesError, match=r"shifts\(8\): nothing is left of an image of 8 x 8"):
        pb.predict(net, x, views=shifts(8))


@pytest.mark.parametrize("draws", [0, -3])
def test_no_draws_are_refused_with_and_without_patches(draws: int) -> None:
    net, x = classifier(), inputs(4)
    with pytest.raises(PatchbayesError, match="at least 1"):
        pb.predict(net, x, draws=draws)
    pb.patch_(net, pb.EMP(2), "output")
    with pytest.raises(PatchbayesError, match="at least 1"):
        pb.predict(net, x, draws=draws)
