"""Files of patched networks: what is in them, and what comes back."""

import copy

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import patchbayes as pb
from patchbayes.errors import CheckpointMismatch, NotPatched
from patchbayes.patching.network import network_of
from saved_networks import METHODS, X, description_of, network, refused, trained
from zoo import TiedLanguageModel, assert_same, snapshot

# ---- round trips


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("whole", [False, True], ids=["patch only", "whole"])
def test_a_file_brings_back_the_network_bit_for_bit(name, whole, tmp_path):
    model = trained(METHODS[name])
    pb.save(model, tmp_path / "file", whole=whole)
    target = network(seed=5 if whole else 0)
    pb.load_(target, tmp_path / "file")
    one, other = model.state_dict(), target.state_dict()
    assert list(one) == list(other)
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert [s.method for s in pb.patched_sites(model).values()] == [s.method for s in pb.patched_sites(target).values()]
    for _ in range(3):  # training goes on with the same draws
        assert torch.equal(model(X), target(X))
    draws = pb.Draws.sample(model, 4)
    assert torch.equal(pb.predict(model, X, draws).probs, pb.predict(target, X, draws).probs)


def test_a_file_loads_into_a_network_that_is_patched_alike_and_trained_otherwise(tmp_path):
    model, target = trained(), trained(pb.EMP(3, jitter=0.5))
    target.train()(X)
    pb.save(model, tmp_path / "file")
    pb.load_(target, tmp_path / "file")
    assert torch.equal(model(X), target(X))


def test_a_file_is_saved_from_and_loaded_through_a_wrapper(tmp_path):
    model, target = trained(), network()
    pb.save(nn.Sequential(model), tmp_path / "file")
    pb.load_(target, tmp_path / "file")
    pb.load_(nn.Sequential(target), tmp_path / "file")
    assert torch.equal(model(X), target(X))


def test_an_unpatched_network_is_not_saved(tmp_path):
    with pytest.raises(NotPatched):
        pb.save(network(), tmp_path / "file")
    assert not list(tmp_path.iterdir())


# ---- what is in a file


def test_a_patch_only_file_holds_the_sites_and_the_generator_alone(tmp_path):
    model = trained(pb.EMP(3, statistics="per_component"))
    pb.save(model, tmp_path / "patch")
    pb.save(model, tmp_path / "whole", whole=True)
    patch, whole = load_file(tmp_path / "patch"), load_file(tmp_path / "whole")
    likelihood = {f"patchbayes_likelihood.{key}" for key in network_of(model).likelihood.state_dict()}
    assert set(whole) == set(model.state_dict()) | likelihood
    assert set(patch) == {key for key in whole if not key.startswith("0.")}
    assert patch["3.patchbayes.components.weight"].shape == (3, 2, 4)
    assert patch["1.patchbayes.running_mean"].shape == (3, 4)


def test_the_description_says_method_sites_prior_version_and_hashes(tmp_path):
    model = trained(pb.EMP(3), prior=pb.prior.Prior(tau={"3": 2.0, "*": 1.0}, rho=4.0))
    pb.save(model, tmp_path / "file")
    description = description_of(tmp_path / "file")
    assert description["format"] == "patchbayes-2"
    assert description["kind"] == "patch"
    assert [(site["name"], site["module"]) for site in description["sites"]] == [("1", "BatchNorm1d"), ("3", "Linear")]
    assert description["sites"][0]["method"]["components"] == 3
    assert description["prior"] == {"tau": {"3": 2.0, "*": 1.0}, "rho": 4.0}
    assert set(description["shared"]) == {"0.weight", "0.bias"}
    assert description["likelihood"] == network_of(model).likelihood.config()
    target = network()
    pb.load_(target, tmp_path / "file")
    assert torch.equal(pb.kl(target, frozen=True), pb.kl(model, frozen=True))


def test_the_hash_of_a_shared_tensor_sees_values_shape_and_type(tmp_path):
    hashes = set()
    for change in (lambda p: p, lambda p: p + 1e-7, lambda p: -p, lambda p: p.double()):
        model = trained()
        with torch.no_grad():
            model[0].bias = nn.Parameter(change(model[0].bias.detach()), requires_grad=False)
        pb.save(model, tmp_path / "file")
        hashes.add(description_of(tmp_path / "file")["shared"]["0.bias"])
    assert len(hashes) == 4


def test_a_learned_prior_is_saved(tmp_path):
    model = network()
    pb.patch_(model, pb.EMP(3), prior=pb.prior.LearnedPrior(model, tau=2.0))
    pb.objective.maximize_prior_(model)
    pb.save(model, tmp_path / "file")
    target = network()
    pb.load_(target, tmp_path / "file")
    prior = network_of(target).prior
    assert isinstance(prior, pb.prior.LearnedPrior)
    assert torch.equal(prior.log_tau, network_of(model).prior.log_tau)
    assert torch.equal(prior.log_rho, network_of(model).prior.log_rho)
    assert torch.equal(pb.kl(target), pb.kl(model))


def test_a_learned_prior_of_other_layers_is_refused(tmp_path):
    model = network()
    pb.patch_(model, pb.EMP(3), prior=pb.prior.LearnedPrior(model))
    pb.save(model, tmp_path / "file")
    longer = nn.Sequential(*network(), nn.Linear(2, 2))
    refused(longer, tmp_path / "file", "other layers: 4", check_shared=False)


@pytest.mark.parametrize("whole", [False, True], ids=["patch only", "whole"])
@pytest.mark.parametrize("tied", ["together", "separate"])
@pytest.mark.parametrize("sites", ["output", "embedding", "all"])
def test_tied_weights_are_saved_once_and_come_back_tied(sites, tied, whole, tmp_path):
    model = TiedLanguageModel()
    target = copy.deepcopy(model)
    pb.patch_(model, pb.ECMP(3), sites, tied=tied)
    with torch.no_grad():
        for site in pb.patched_sites(model).values():
            for parameter in site.posterior.parameters():
                parameter.mul_(1.5)
    pb.save(model, tmp_path / "file", whole=whole)
    assert sum(value.shape == (3, 11, 6) for value in load_file(tmp_path / "file").values()) == (
        2 if tied == "separate" and sites == "all" else 1
    )
    pb.load_(target, tmp_path / "file")
    assert all(torch.equal(value, target.state_dict()[key]) for key, value in model.state_dict().items())
    assert torch.equal(target.embedding.weight, target.decoder.weight) is (tied == "together")
    assert len(list(target.parameters())) == len(list(model.parameters()))
    tokens = torch.tensor([[1, 2, 3]])
    assert torch.equal(model(tokens), target(tokens))


def test_a_module_called_prior_does_not_get_in_the_way(tmp_path):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.prior, self.fc = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x):
            return self.fc(self.prior(x))

    model = Net()
    target = copy.deepcopy(model)
    pb.patch_(model, pb.EMP(2), "all", prior=pb.prior.LearnedPrior(model))
    pb.save(model, tmp_path / "file")
    pb.load_(target, tmp_path / "file")
    assert torch.equal(model(X), target(X))


# ---- ordinary files


@pytest.mark.parametrize("name", METHODS)
def test_an_ordinary_file_starts_the_components_of_a_patched_network(name, tmp_path):
    source, model = network(seed=3), trained(METHODS[name])
    source(X)
    save_file(source.state_dict(), tmp_path / "file")
    pb.load_(model, tmp_path / "file")
    pb.unpatch_(model)
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in source.state_dict().items())


def test_an_ordinary_file_loads_into_an_ordinary_network(tmp_path):
    source, model = network(seed=3), network()
    save_file(source.state_dict(), tmp_path / "file")
    pb.load_(model, tmp_path / "file")
    assert torch.equal(model(X), source(X))


@pytest.mark.parametrize("kept", ["embedding.weight", "decoder.weight"])
def test_an_ordinary_file_may_hold_tied_weights_once(kept, tmp_path):
    source, model = TiedLanguageModel(), TiedLanguageModel()
    state = source.state_dict()
    dropped = {"embedding.weight", "decoder.weight"} - {kept}
    save_file({key: value for key, value in state.items() if key not in dropped}, tmp_path / "file")
    pb.patch_(model, pb.ECMP(3, jitter=0))
    pb.load_(model, tmp_path / "file")
    tokens = torch.tensor([[1, 2, 3]])
    assert torch.equal(model(tokens), source(tokens))


def test_an_ordinary_file_of_another_network_is_refused_with_a_list(tmp_path):
    other = network(width=5).state_dict()
    del other["3.bias"]
    save_file({**other, "extra": torch.zeros(1)}, tmp_path / "file")
    for model in (network(), trained()):
        before = snapshot(model)
        with pytest.raises(CheckpointMismatch) as error:
            pb.load_(model, tmp_path / "file")
        for line in (
            "missing in the file: 3.bias",
            "not in the network: extra",
            "0.weight: (5, 3) in the file, (4, 3)",
        ):
            assert line in str(error.value)
        assert_same(before, model)
