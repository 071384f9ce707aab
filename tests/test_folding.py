"""unpatch_(keep="mean", example_input=...): an ordinary network whose own softmax is the calibrated prediction in one pass."""

import pytest
import torch
from torch import nn

import patchbayes as pb
from patchbayes.errors import PatchbayesError


class Named(nn.Module):
    """A classifier that returns its logits in a mapping, and takes two inputs."""

    def __init__(self):
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x, shift):
        return {"logits": self.head(self.norm(self.body(x + shift)))}


class Tied(nn.Module):
    """Its output layer's weight is used once more, before."""

    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.LayerNorm(3), nn.Linear(3, 3, bias=False)

    def forward(self, x):
        return self.head(self.norm(x @ self.head.weight + x))


def plain():
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3))


def dense():
    return nn.Sequential(nn.Conv2d(2, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, 3, 1))


def tempered(model, x, likelihood=None, mean_temperature=1.7):
    likelihood = (likelihood or pb.likelihoods.Categorical()).set_temperature_(0.8, mean_temperature=mean_temperature)
    pb.patch_(model.double().eval(), pb.ECMP(3, jitter=0.5), example_input=x, likelihood=likelihood)
    return model


CASES = {
    "vectors": (plain, lambda: torch.randn(5, 4).double(), None),
    "maps": (dense, lambda: torch.randn(2, 2, 6, 6).double(), lambda: pb.likelihoods.Categorical(class_dim=1)),
    "a mapping": (Named, lambda: (torch.randn(5, 4).double(), torch.randn(4).double()), None),
}


@pytest.mark.parametrize("case", CASES)
def test_the_softmax_is_the_calibrated_prediction_in_one_pass(case):
    torch.manual_seed(0)
    make, inputs, likelihood = CASES[case]
    x = inputs()
    model = tempered(make(), x, likelihood and likelihood())
    expected = pb.predict(model, x, draws="mean").log_probs
    pb.unpatch_(model, keep="mean", example_input=x)
    assert not pb.patching.patch.is_patched(model)
    found = model(*x) if isinstance(x, tuple) else model(x)
    logits = found["logits"] if isinstance(found, dict) else found
    axis = 1 if case == "maps" else -1
    assert torch.allclose(torch.log_softmax(logits, axis), expected.movedim(-1, axis), atol=1e-10)


def test_a_temperature_without_patches_is_folded_too():
    torch.manual_seed(0)
    model, x = plain().eval(), torch.randn(200, 4)
    y = model(3 * x).argmax(1)
    pb.calibrate_(model, [(x, y)])
    expected = pb.predict(model, x, draws="mean").probs
    pb.unpatch_(model, keep="mean", example_input=x[:2])
    assert torch.allclose(model(x).softmax(-1), expected, atol=1e-6)


def test_labels_have_logits_too():
    torch.manual_seed(0)
    x = torch.randn(5, 4).double()
    model = tempered(plain(), x, pb.likelihoods.Bernoulli())
    expected = pb.predict(model, x, draws="mean").probs
    pb.unpatch_(model, keep="mean", example_input=x)
    assert torch.allclose(model(x).sigmoid(), expected, atol=1e-10)


def refused(model, x, text, **options):
    before = pb.predict(model, x, draws="mean")
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(PatchbayesError, match=text):
        pb.unpatch_(model, **{"keep": "mean", "example_input": x, **options})
    after = model.state_dict()
    assert state.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in state.items())
    assert repr(pb.predict(model, x, draws="mean")) == repr(before)


def test_where_the_last_layer_does_not_give_the_logits_nothing_changes():
    torch.manual_seed(0)
    x = torch.randn(5, 4).double()
    refused(tempered(nn.Sequential(*plain(), nn.LogSoftmax(-1)), x), x, "divide the logits by 1.7 yourself")
    y = torch.randn(5, 3).double()
    tied = Tied().double().eval()
    pb.patch_(tied, pb.ECMP(3), "norm", likelihood=pb.likelihoods.Categorical().set_temperature_(mean_temperature=2.0))
    refused(tied, y, "weights are used elsewhere")


def test_other_networks_and_other_likelihoods_are_refused():
    torch.manual_seed(0)
    x = torch.randn(5, 4).double()
    refused(tempered(plain(), x), x, 'keep="mean"', keep=0)
    gaussian = pb.likelihoods.Gaussian().set_temperature_(mean_temperature=2.0)
    refused(tempered(plain(), x, gaussian), x, "factor on its variance")
