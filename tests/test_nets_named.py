"""Networks by name: what each name builds, the seed, functions of the user, and errors."""

import importlib.util
import sys

import pytest
import torch
from torch import nn

from patchbayes.errors import PatchbayesError
from patchbayes.nets import cifar_resnet20, mlp, resnet18, small_cnn
from patchbayes.nets.named import NET_NAMES, build_net


def number_of_parameters(network):
    return sum(parameter.numel() for parameter in network.parameters())


@pytest.mark.parametrize(
    ("spec", "outputs", "shape", "same"),
    [
        ("small_cnn", 10, (1, 8, 8), lambda: small_cnn(1, 10, 8)),
        ("small_cnn", 7, (3, 28, 20), lambda: small_cnn(3, 7, 28)),
        ("mlp", 1, (13,), lambda: mlp(13)),
        ("mlp:100,20", 2, (5,), lambda: mlp(5, (100, 20), 2)),
        ("cifar_resnet20", 100, (3, 32, 32), cifar_resnet20),
        ("resnet18", 11, (3, 64, 64), lambda: resnet18(11)),
        ("resnet18_cifar", 11, (3, 16, 16), lambda: resnet18(11, stem="cifar")),
    ],
)
def test_a_name_builds_the_network_of_that_name(spec, outputs, shape, same):
    network = build_net(spec, outputs, shape, seed=3)
    torch.manual_seed(3)
    expected = same().state_dict()
    assert network.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[key]) for key, value in network.state_dict().items())
    assert network(torch.zeros(2, *shape)).shape == (2, outputs)
    assert network.training


def test_the_paper_s_pyramidnet_and_a_deeper_one():
    assert number_of_parameters(build_net("pyramidnet110", 100, (3, 32, 32))) == 28_511_307
    with torch.device("meta"):
        deeper = build_net("pyramidnet272", 100, (3, 32, 32))
    assert len(deeper.layer1) == 45
    assert deeper.fc.in_features == 216
    assert {"cifar_resnet56", "pyramidnet272"} <= set(NET_NAMES)


def test_images_are_flattened_for_an_mlp():
    network = build_net("mlp:9", 4, (2, 3, 5))
    assert network(torch.zeros(6, 2, 3, 5)).shape == (6, 4)
    assert network.hidden1.in_features == 30


def test_the_seed_decides_and_the_global_generator_is_left_alone():
    before = torch.get_rng_state()
    a, b, c = (build_net("small_cnn", 10, (1, 8, 8), seed).fc.weight for seed in (0, 0, 1))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    (tmp_path / "own_networks.py").write_text(
        "from torch import nn\n"
        "def good(num_outputs, input_shape): return nn.Sequential(nn.Dropout(), nn.Linear(input_shape[0], num_outputs))\n"
        "def narrow(num_outputs, input_shape): return nn.Linear(input_shape[0], num_outputs + 1)\n"
        "def lengthwise(num_outputs, input_shape): return nn.Linear(7, num_outputs)\n"
        "def bare(num_outputs): return nn.Linear(3, num_outputs)\n"
        "def fixed(): return nn.Linear(3, 4)\n"
        "def number(num_outputs, input_shape): return 5\n"
        "def pair(num_outputs, input_shape):\n"
        "    class Pair(nn.Linear):\n"
        "        def forward(self, x): return x, x\n"
        "    return Pair(3, 2)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "own_networks"
    sys.modules.pop("own_networks", None)


def test_a_function_of_the_user(own_module):
    network = build_net(f"{own_module}:good", 4, (3,), seed=1, trust_code=True)
    assert isinstance(network[1], nn.Linear)
    assert network[1].weight.shape == (4, 3)
    assert all(module.training for module in network.modules())  # as before it was tried
    assert build_net(f"{own_module}:fixed", 4, (3,), trust_code=True).weight.shape == (4, 3)


@pytest.mark.parametrize(
    ("spec", "shape", "message"),
    [
        ("{own}:absent", (3,), "has no attribute 'absent'"),
        ("no.such.module:f", (3,), "No module named"),
        ("{own}:bare", (3,), r"called as bare\(num_outputs, input_shape\)"),
        ("{own}:fixed", (5,), r"does not take inputs of the shape \(5,\)"),
        ("{own}:number", (3,), "must return a torch.nn.Module, not a int"),
        ("{own}:narrow", (3,), r"give \(2, 5\); required is a tensor \(2, 4\)"),
        ("{own}:pair", (3,), r"give tuple; required is a tensor"),
        ("{own}:lengthwise", (3,), r"does not take inputs of the shape \(3,\)"),
        ("resnet", (3, 8, 8), "'resnet' is not known.\n  known    mlp, small_cnn"),
        ("resnet18", (1, 28, 28), "takes images of 3 channels, these have 1"),
        ("resnet18", (13,), "takes images .*; the inputs have the shape"),
        ("mlp:", (3,), "hidden units are whole numbers"),
        ("mlp:5,x", (3,), "hidden units are whole numbers"),
        ("small_cnn", (2, 3), "the shape of one input"),
        ("small_cnn", (0, 3, 3), "the shape of one input"),
    ],
)
def test_bad_names_are_explained(own_module, spec, shape, message):
    with pytest.raises(PatchbayesError, match=message):
        build_net(spec.format(own=own_module), 4, shape, trust_code=True)


@pytest.mark.parametrize("outputs", [0, -1, True, 2.0])
def test_the_number_of_outputs_is_checked(outputs):
    with pytest.raises(PatchbayesError, match="num_outputs"):
        build_net("mlp", outputs, (3,))


@pytest.mark.parametrize("package", ["timm", "torchvision"])
def test_a_package_that_is_missing_is_named(package):
    if importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    with pytest.raises(PatchbayesError, match=f"{package} cannot be imported"):
        build_net(f"{package}:resnet18", 5, (3, 32, 32))


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["timm:resnet10t", "torchvision:resnet18"])
def test_networks_of_other_packages(spec):
    package = spec.partition(":")[0]
    try:
        importlib.import_module(package)
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"{package} cannot be imported: {error}")
    assert build_net(spec, 5, (3, 64, 64))(torch.zeros(2, 3, 64, 64)).shape == (2, 5)
    with pytest.raises(PatchbayesError, match="no_such_network"):
        build_net(f"{package}:no_such_network", 5, (3, 64, 64))
