"""Files that version 0.1.0 wrote still load, and predict what they predicted then."""

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import patchbayes as pb
from patchbayes.errors import CheckpointMismatch
from patchbayes.patching.network import network_of
from saved_networks import description_of
from zoo import assert_same, snapshot

sys.path.insert(0, str(Path(__file__).parent / "gate"))

from recording import methods, networks

PATCHES = Path(__file__).parent / "written_by_0_1_0" / "patches"
EXPECTED = load_file(PATCHES / "expected.safetensors")
WITH_DRAWS = sorted(path.name.removesuffix(".draws.json") for path in PATCHES.glob("*.draws.json"))


def parts(name: str) -> tuple[nn.Module, Tensor, pb.posteriors.Method, str]:
    """The ordinary network of a file, its input, and the method and sites that it was patched with."""
    network, _, label = name.partition("-")
    model, x = networks()[network]
    return model, x, *methods()[label]


def assert_predicts_as_then(name: str, model: nn.Module, x: Tensor) -> None:
    draws = pb.Draws.load(PATCHES / f"{name}.draws.json", model)
    assert len(draws) == 4
    probs = pb.predict(model, x, draws, engine="loop").probs
    torch.testing.assert_close(probs, EXPECTED[name], rtol=2e-6, atol=2e-7)


def test_every_file_is_tried():
    files = {path.stem for path in PATCHES.glob("*.safetensors")} - {"expected"}
    assert files == {*WITH_DRAWS, "mlp-learned_prior"}
    assert len(WITH_DRAWS) == 10
    assert {name.partition("-")[2] for name in WITH_DRAWS} == set(methods()) - {"per_example"}
    assert EXPECTED.keys() == {*WITH_DRAWS, "mlp-learned_prior.kl"}


@pytest.mark.parametrize("name", WITH_DRAWS)
def test_an_old_file_patches_an_ordinary_network(name):
    model, x, method, _ = parts(name)
    pb.load_(model, PATCHES / f"{name}.safetensors")
    assert {site.method for site in pb.patched_sites(model).values()} == {method}
    assert_predicts_as_then(name, model, x)


@pytest.mark.parametrize("name", WITH_DRAWS)
def test_an_old_file_fills_a_network_that_is_patched_alike(name):
    model, x, method, sites = parts(name)
    pb.patch_(model, method, sites, generator=torch.Generator().manual_seed(99))
    optimizer = torch.optim.SGD(model.parameters(), 0.0)  # one made before still holds all parameters
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    pb.load_(model, PATCHES / f"{name}.safetensors")
    assert held == {id(p) for p in model.parameters()}
    assert_predicts_as_then(name, model, x)


@pytest.mark.parametrize("name", WITH_DRAWS)
def test_an_old_state_dict_loads_strictly(name):
    """What a training loop of one's own saved with 0.1.0: keys of parametrizations, and of statistics for each component."""
    model, x, method, sites = parts(name)
    pb.patch_(model, method, sites)
    tensors = load_file(PATCHES / f"{name}.safetensors")
    whole = description_of(PATCHES / f"{name}.safetensors")["kind"] == "whole"
    result = model.load_state_dict(dict(tensors), strict=whole)
    assert not result.unexpected_keys
    assert_predicts_as_then(name, model, x)


@pytest.mark.parametrize("name", WITH_DRAWS)
def test_an_old_file_that_is_saved_again_stays_the_same_network(name, tmp_path):
    model, x, _, _ = parts(name)
    pb.load_(model, PATCHES / f"{name}.safetensors")
    pb.save(model, tmp_path / "file", whole=True)
    again, _, _, _ = parts(name)
    pb.load_(again, tmp_path / "file")
    state = model.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in again.state_dict().items())
    assert_predicts_as_then(name, again, x)
    for _ in range(2):  # and its own draws go on from where the old network was
        torch.testing.assert_close(model(x), again(x), rtol=0, atol=0)


def test_an_old_learned_prior_has_its_kl():
    model, _ = networks()["mlp"]
    pb.load_(model, PATCHES / "mlp-learned_prior.safetensors")
    assert isinstance(network_of(model).prior, pb.prior.LearnedPrior)
    torch.testing.assert_close(pb.kl(model).detach(), EXPECTED["mlp-learned_prior.kl"], rtol=2e-6, atol=0)


@pytest.mark.parametrize(
    "name", [name for name in WITH_DRAWS if name.partition("-")[2] in ("ecmp", "unit", "meanfield")]
)
def test_an_old_patch_still_knows_the_shared_weights_it_was_trained_on(name):
    model, _, _, sites = parts(name)
    names = [n for n, _ in model.named_parameters()]
    pb.load_(model, PATCHES / f"{name}.safetensors")
    patched = tuple(f"{site}." for site in pb.patched_sites(model))
    shared = [n for n in names if not n.startswith(patched)]
    if not shared:
        assert sites == "all"
        return
    other, _, _, _ = parts(name)
    with torch.no_grad():
        other.get_parameter(shared[0]).add_(1e-3)
    before = snapshot(other)
    with pytest.raises(CheckpointMismatch, match=f"shared tensor {shared[0]}"):
        pb.load_(other, PATCHES / f"{name}.safetensors")
    assert_same(before, other)


@pytest.mark.parametrize("name", WITH_DRAWS)
def test_old_draws_do_not_fit_a_network_with_other_sites_or_probabilities(name):
    """Version 0.1.0 counted the probabilities among what must agree, so its files still do."""
    model, _, _, _ = parts(name)
    pb.patch_(model, pb.EMP(7, probabilities=(0.4, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1)), "output")
    with pytest.raises(pb.errors.WrongDraws, match="other sites"):
        pb.Draws.load(PATCHES / f"{name}.draws.json", model)
