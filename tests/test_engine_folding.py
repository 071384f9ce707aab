"""A drawn batch norm folded into the layer before it gives the loop's numbers, where it pays, and only where it is allowed."""

import pytest
import torch
from torch import nn

import patchbayes as pb
from patchbayes.draws import network_of
from patchbayes.nets import cifar_resnet20
from patchbayes.prediction import calibration, folding

# EMP with so many components that draws differ from the first site on
METHODS = {
    "emp": pb.EMP(1000, jitter=0.5),
    "ecmp": pb.ECMP(3, jitter=0.5),
    "unit": pb.Mixture(3, tie="unit", jitter=0.5),
}


def statistics_(model):
    """Running statistics that are not the trivial ones."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean.normal_(0, 0.3)
            module.running_var.uniform_(0.5, 2.0)
    return model


class Convolutions(nn.Module):
    """Stride, groups, dilation, bias or none; a norm that takes a sum, which has no layer to fold into."""

    def __init__(self):
        super().__init__()
        self.enter, self.norm0 = nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv1, self.norm1 = nn.Conv2d(8, 8, 3, stride=2, groups=2, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 6, 2, dilation=2, padding=2), nn.BatchNorm2d(6, eps=0.1)
        self.conv3, self.norm3 = nn.Conv2d(8, 6, 1), nn.BatchNorm2d(6)
        self.linear, self.norm4 = nn.Linear(6, 5), nn.BatchNorm1d(5)
        self.fc = nn.Linear(5, 3)

    def forward(self, x):
        x = self.norm0(self.enter(x)).relu()
        x = self.norm1(self.conv1(x)).relu()
        a, b = self.conv2(x), self.conv3(x)
        x = self.norm2(a).mean((2, 3), keepdim=True) + self.norm3(a.mean() + b)
        return self.fc(self.norm4(self.linear(x.mean((2, 3)))))


@pytest.fixture
def always(monkeypatch):
    """Fold whatever can be folded, and take draws one at a time."""
    monkeypatch.setattr(folding, "_PER_WEIGHT", 0)
    monkeypatch.setattr(folding, "_PER_CALL", 0)
    monkeypatch.setattr(calibration, "_GAIN", 0.0)


def both(model, x, draws):
    fast, slow = pb.predict(model, x, draws), pb.predict(model, x, draws, engine="loop")
    assert fast.plan.engine == "stages"
    assert fast.plan.chunk == 1
    return fast, slow


@pytest.mark.parametrize("method", METHODS)
def test_folded_and_loop_agree(method, always):
    model = statistics_(Convolutions()).double()
    pb.patch_(model, METHODS[method])
    draws = pb.Draws.sample(model, 9)
    fast, slow = both(model, torch.randn(4, 2, 9, 9).double(), draws)
    torch.testing.assert_close(fast.log_probs, slow.log_probs, rtol=1e-10, atol=1e-10)
    # not: the first norm (its layer is computed once for all draws), norm2 (its layer has two users), norm3 (takes a sum)
    assert fast.plan.folded == 2
    assert "batch norms folded into the layer before them: 2" in str(fast.plan)


def test_single_precision_agrees_to_its_rounding(always):
    model = statistics_(cifar_resnet20(7))
    pb.patch_(model, pb.ECMP(3, jitter=0.3))
    fast, slow = both(model, torch.randn(4, 3, 32, 32), pb.Draws.sample(model, 6))
    assert fast.plan.folded == 20  # all but the first
    torch.testing.assert_close(fast.probs, slow.probs, rtol=1e-4, atol=1e-5)


def test_folding_pays_where_there_are_many_activations_for_each_weight():
    torch.set_num_threads(1)
    model = cifar_resnet20(7)
    pb.patch_(model, pb.ECMP(3))
    draws = pb.Draws.sample(model, 3)
    folded = [pb.predict(model, torch.rand(batch, 3, 32, 32), draws).plan.folded for batch in (1, 8, 32)]
    assert folded[0] == 0
    assert folded == sorted(folded)
    assert folded[-1] > folded[0]


def test_draws_that_share_the_convolution_are_not_folded(always):
    """One convolution for three draws of the norm after it: folding would run it three times."""
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 2))
    pb.patch_(model, pb.EMP(3))
    plan = pb.predict(model, torch.rand(2, 1, 8, 8), pb.Draws.sample(model, 20)).plan
    assert plan.folded == 0
    assert plan.work == plan.floor


def test_weights_that_change_between_predictions_are_followed(always):
    model = statistics_(Convolutions()).double()
    pb.patch_(model, pb.ECMP(3, jitter=0.5))
    x, draws = torch.randn(4, 2, 9, 9).double(), pb.Draws.sample(model, 5)
    both(model, x, draws)
    with torch.no_grad():
        model.conv1.weight.mul_(2.0)
        model.norm1.running_mean.add_(0.5)
        pb.patched_sites(model)["norm1"].components("weight").mul_(1.5)
    model.conv2.weight = nn.Parameter(torch.randn_like(model.conv2.weight))
    fast, slow = both(model, x, draws)
    torch.testing.assert_close(fast.log_probs, slow.log_probs, rtol=1e-10, atol=1e-10)


class Doubling(nn.Conv2d):
    def forward(self, x):
        return 2 * super().forward(x)


def hooked(layer):
    layer.register_forward_hook(lambda module, args, output: 2 * output)
    return layer


@pytest.mark.parametrize("layer", [lambda: Doubling(4, 4, 3), lambda: hooked(nn.Conv2d(4, 4, 3))])
def test_layers_that_do_more_than_theirs_are_left_alone(layer, always):
    model = statistics_(nn.Sequential(nn.BatchNorm2d(4), layer(), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 2)))
    pb.patch_(model.double(), pb.ECMP(3, jitter=0.5))
    fast, slow = both(model, torch.randn(3, 4, 8, 8).double(), pb.Draws.sample(model, 5))
    assert fast.plan.folded == 0
    torch.testing.assert_close(fast.log_probs, slow.log_probs, rtol=1e-10, atol=1e-10)


def test_a_hook_that_comes_later_is_heard(always):
    model = statistics_(Convolutions()).double()
    pb.patch_(model, pb.ECMP(3, jitter=0.5))
    x, draws = torch.randn(4, 2, 9, 9).double(), pb.Draws.sample(model, 5)
    assert both(model, x, draws)[0].plan.folded == 2
    hooked(model.norm1)
    fast, slow = both(model, x, draws)
    assert fast.plan.folded == 1
    torch.testing.assert_close(fast.log_probs, slow.log_probs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "method", [pb.Dropout(0.3), pb.Ensemble(3), pb.EMP(3, jitter=0.5, per_example=True), pb.MeanField(0.1)]
)
def test_norms_that_are_no_plain_affine_map_agree_too(method, always):
    model = statistics_(Convolutions()).double()
    sites = "all" if method == pb.Ensemble(3) else "norm"
    pb.patch_(model, method, sites)
    fast, slow = both(model, torch.randn(4, 2, 9, 9).double(), pb.Draws.sample(model, 5))
    torch.testing.assert_close(fast.log_probs, slow.log_probs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("method", METHODS)
def test_several_draws_at_once_take_the_norm_as_an_affine_map(method, monkeypatch):
    monkeypatch.setattr(calibration, "_GAIN", float("inf"))
    monkeypatch.setattr(calibration, "_WORTH_FOLDING", float("inf"))
    model = statistics_(Convolutions()).double()
    pb.patch_(model, METHODS[method])
    x, draws = torch.randn(4, 2, 9, 9).double(), pb.Draws.sample(model, 24)
    fast, slow = pb.predict(model, x, draws), pb.predict(model, x, draws, engine="loop")
    assert fast.plan.chunk > 1
    torch.testing.assert_close(fast.log_probs, slow.log_probs, rtol=1e-10, atol=1e-10)
    (form,) = vars(network_of(model))["_forms"].values()
    assert not any(stage.apart for way in form._itineraries.values() for stage in way.graph.stages)


def test_autocast_leaves_norms_to_themselves(always):
    model = statistics_(Convolutions())
    pb.patch_(model, pb.ECMP(3, jitter=0.5))
    x, draws = torch.randn(4, 2, 9, 9), pb.Draws.sample(model, 5)
    with torch.autocast("cpu", torch.bfloat16):
        fast, slow = both(model, x, draws)
    assert fast.plan.folded == 0
    torch.testing.assert_close(fast.probs, slow.probs, rtol=2e-2, atol=2e-2)
