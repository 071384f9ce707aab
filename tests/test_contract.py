"""check_patchable: holds on good networks, and every promise fails on a network that breaks it."""

import copy
from collections import OrderedDict

import pytest
import torch
from torch import nn

import patchbayes as pb

PROMISES = [
    "the network runs on the example, and twice alike in eval mode",
    "it can be patched",
    "copies without jitter keep the function bit for bit",
    "unpatching restores weights and outputs bit for bit",
    "different draws give different outputs",
    "a training step reaches every site",
    "state dicts go round",
    "a deepcopy draws for itself and alike",
    "eval mode is the mean network, deterministically",
    "a saved patch loads onto the ordinary network",
    "prediction does not depend on the batch an input came in",
    "prediction leaves modes and buffers alone",
]


class Net(nn.Module):
    """A good network, of which each broken one changes a single thing."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.fc = nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3)

    def features(self, x):
        return torch.tanh(self.norm(self.conv(x)))

    def forward(self, x):
        return self.fc(self.features(x))


class Noisy(Net):
    """Drops activations in eval mode too."""

    def forward(self, x):
        return nn.functional.dropout(super().forward(x), 0.5, training=True)


class Crashes(Net):
    def forward(self, x):
        raise RuntimeError("shapes do not fit")


class NoSites(nn.Module):
    def forward(self, x):
        return x.tanh()


class LooksAtParameters(Net):
    """Scales its output by how many parameters it owns, which patching changes."""

    def forward(self, x):
        return super().forward(x) * sum(p.numel() for p in self.parameters())


class CachingLinear(nn.Linear):
    """Keeps the weight it met at its first call, as fused kernels may."""

    cached = None

    def forward(self, x):
        if self.cached is None:
            self.cached = self.weight.detach().clone()
        return nn.functional.linear(x, self.cached)


class CachesWeights(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = CachingLinear(4, 3)

    def forward(self, x):
        return self.fc(x)


class LeakyLinear(nn.Linear):
    """Keeps the first drawn weight it met, and goes on with it once the patch is gone."""

    cached = None

    def forward(self, x):
        drawn = "patchbayes" in self._modules
        if drawn and self.cached is None:
            self.cached = self.weight.detach().clone()
        return nn.functional.linear(x, self.weight if drawn or self.cached is None else self.cached)


class LeaksDraws(Net):
    def __init__(self):
        super().__init__()
        self.fc = LeakyLinear(6, 3)


class Detaches(Net):
    def forward(self, x):
        return self.fc(self.features(x).detach())


class ForgetsKeys(Net):
    """Leaves the output layer out of its state dict."""

    def __init__(self):
        super().__init__()
        self.register_state_dict_post_hook(self.forget)

    @staticmethod
    def forget(module, state, prefix, metadata):
        for key in [key for key in state if key.startswith(f"{prefix}fc.")]:
            del state[key]


class CopiesByRebuilding(Net):
    """Copies itself through its constructor and its state dict, which only fits an unpatched network."""

    def __deepcopy__(self, memo):
        clone = CopiesByRebuilding()
        clone.load_state_dict(self.state_dict())
        return clone.train(self.training)


class CopiesDiffer(Net):
    """A copy starts from other shared weights."""

    def __deepcopy__(self, memo):
        clone = CopiesDiffer()
        clone.norm.load_state_dict(self.norm.state_dict())
        clone.fc.load_state_dict(self.fc.state_dict())
        return clone


class CentersTheBatch(Net):
    def forward(self, x):
        return super().forward(x - x.mean(0))


class CountsInAParameter(Net):
    """Counts its calls in a parameter, which no one expects to move in eval mode."""

    def __init__(self):
        super().__init__()
        self.calls = nn.Parameter(torch.zeros(()), requires_grad=False)

    def forward(self, x):
        self.calls.data += 1
        return super().forward(x)


class CountsInABuffer(Net):
    """The same in a buffer: allowed, since prediction gives buffers back."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


# The promise that must fail, and the network that breaks it.
BROKEN = [
    (0, Noisy),
    (0, Crashes),
    (1, NoSites),
    (2, LooksAtParameters),
    (3, LeaksDraws),
    (3, CopiesDiffer),
    (4, CachesWeights),
    (5, Detaches),
    (5, CachesWeights),
    (6, ForgetsKeys),
    (7, CopiesByRebuilding),
    (8, LooksAtParameters),
    (9, CopiesDiffer),
    (10, CentersTheBatch),
    (11, CountsInAParameter),
]


@pytest.fixture
def x():
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(1))


def snapshot(model):
    return (
        {key: value.clone() for key, value in model.state_dict().items()},
        [module.training for module in model.modules()],
        [(id(p), None if p.grad is None else p.grad.clone()) for p in model.parameters()],
        {name: set(vars(module)) for name, module in model.named_modules()},
    )


def assert_untouched(model, before):
    state, modes, parameters, attributes = snapshot(model)
    assert state.keys() == before[0].keys()
    assert all(torch.equal(state[key], before[0][key]) for key in state)
    assert modes == before[1]
    assert [i for i, _ in parameters] == [i for i, _ in before[2]]
    assert [g for _, g in parameters] == [g for _, g in before[2]]
    assert attributes == before[3]
    assert not pb.is_patched(model)


@pytest.mark.parametrize(("number", "broken"), BROKEN, ids=lambda value: getattr(value, "__name__", str(value)))
def test_a_broken_promise_is_found(number, broken, x):
    torch.manual_seed(0)
    model = broken()
    before, random_state = snapshot(model), torch.random.get_rng_state()
    contract = pb.check_patchable(model, x)
    failed = [check.promise for check in contract.checks if not check.holds]
    assert PROMISES[number] in failed
    assert not contract
    assert f"FAIL  {PROMISES[number]}" in str(contract)
    assert_untouched(model, before)
    assert torch.equal(torch.random.get_rng_state(), random_state)


def test_every_promise_has_a_network_that_breaks_it(x):
    assert [check.promise for check in pb.check_patchable(Net(), x).checks] == PROMISES
    assert {number for number, _ in BROKEN} == set(range(len(PROMISES)))


def conv_net():
    layers = [nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Dropout(0.3), nn.Linear(4, 3))


class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.norm, self.fc = nn.LSTM(3, 5, batch_first=True), nn.LayerNorm(5), nn.Linear(5, 2)

    def forward(self, x, *, scale=None):
        hidden = self.norm(self.lstm(x)[0][:, -1])
        return {"logits": self.fc(hidden if scale is None else hidden * scale), "hidden": hidden}


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.norm, self.fc = nn.Embedding(9, 5), nn.LayerNorm(5), nn.Linear(5, 9, bias=False)
        self.fc.weight = self.embedding.weight

    def forward(self, tokens):
        return self.fc(self.norm(self.embedding(tokens)))


def half_frozen():
    model = Net()
    model.norm.requires_grad_(False)
    return model


def transformer():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Linear(8, 2))


GOOD = {
    "plain": (Net, lambda: torch.randn(4, 4)),
    "counting buffer": (CountsInABuffer, lambda: torch.randn(4, 4)),
    "convolutions": (conv_net, lambda: torch.randn(4, 1, 8, 8)),
    "tuple": (Lstm, lambda: (torch.randn(4, 6, 3),)),
    "mapping": (Lstm, lambda: {"x": torch.randn(4, 6, 3), "scale": torch.rand(4, 1)}),
    "tied": (Tied, lambda: torch.randint(9, (4, 3))),
    "frozen": (half_frozen, lambda: torch.randn(3, 4)),
    "transformer": (transformer, lambda: torch.randn(4, 3, 8)),
    "half precision": (lambda: Net().bfloat16(), lambda: torch.randn(4, 4, dtype=torch.bfloat16)),
}


@pytest.mark.parametrize("kind", GOOD)
@pytest.mark.parametrize("training", [True, False])
def test_all_promises_hold_on_good_networks(kind, training):
    build, example = GOOD[kind]
    torch.manual_seed(0)
    model, inputs = build().train(training), example()
    before, random_state = snapshot(model), torch.random.get_rng_state()
    contract = pb.check_patchable(model, inputs)
    assert contract, str(contract)
    assert len(contract.checks) == len(PROMISES)
    assert_untouched(model, before)
    assert torch.equal(torch.random.get_rng_state(), random_state)


METHODS = {
    "EMP": pb.EMP(2),
    "no jitter": pb.EMP(3, jitter=0),
    "independent": pb.EMP(3, init="independent"),
    "one component": pb.EMP(1),
    "sigma": pb.ECMP(2, sigma=0.1),
    "own statistics": pb.EMP(3, statistics="per_component"),
    "norm scale": pb.EMP(3, norm_scale=0.2),
    "per example": pb.ECMP(3, per_example=True),
    "Dropout": pb.Dropout(0.05),
    "DropConnect": pb.posteriors.DropConnect(0.2),
    "MeanField": pb.posteriors.MeanField(),
}


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_all_promises_hold_for_every_method(method):
    contract = pb.check_patchable(conv_net(), torch.randn(4, 1, 8, 8), method, sites="norm")
    assert contract, str(contract)


@pytest.mark.parametrize("seed", range(8))
def test_two_components_at_one_site_do_not_look_like_one(seed, x):
    torch.manual_seed(seed)
    model = nn.Sequential(OrderedDict({f"layer{seed}": nn.Linear(4, 2)}))
    contract = pb.check_patchable(model, x, pb.EMP(2), sites="output")
    assert contract, str(contract)


def test_method_and_sites_are_the_ones_asked_for(x):
    def seen(**options):
        contract = pb.check_patchable(Net(), x, **options)
        return next(check.seen for check in contract.checks if check.promise == "it can be patched")

    assert seen().startswith("2 sites")
    assert seen(sites="norm").startswith("1 sites")
    assert seen(sites="norm", method=pb.EMP(2)) != seen(sites="norm", method=pb.EMP(3))
    assert not pb.check_patchable(Net(), x, sites="conv")


def test_what_could_not_be_tried_is_said():
    contract = pb.check_patchable(Net(), torch.randn(1, 4))
    check = next(c for c in contract.checks if c.promise.startswith("prediction does not depend"))
    assert check.holds
    assert "not tried" in check.seen


def test_the_report_is_a_table_with_the_reason_of_a_failure(x):
    text = str(pb.check_patchable(Net(), x))
    assert text.startswith("Net: 12 of 12 promises hold\n")
    assert text.count("\n  ok    ") == 12
    text = str(pb.check_patchable(Crashes(), x))
    assert text.startswith("Crashes: 0 of 1 promises hold\n")
    assert "RuntimeError: shapes do not fit" in text
    detached = str(pb.check_patchable(Detaches(), x))
    assert "no gradient at norm" in detached


def test_a_patched_copy_is_made_and_not_the_model_itself(x):
    model = Net()
    twin = copy.deepcopy(model)
    pb.check_patchable(model, x)
    assert torch.equal(model(x), twin(x))
    pb.patch_(model, pb.EMP(2))  # nothing is in the way
