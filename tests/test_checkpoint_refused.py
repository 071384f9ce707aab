"""Files that do not fit, are damaged, foreign or too new: refused with a list, and without a trace."""

import contextlib
import pickle
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

import patchbayes as pb
from patchbayes.errors import CheckpointMismatch
from saved_networks import network, refused, rewritten, trained
from zoo import TiedLanguageModel, assert_same, snapshot

# ---- refusals


def test_other_shared_weights_are_refused_by_name_unless_told_otherwise(tmp_path):
    model = trained()
    pb.save(model, tmp_path / "file")
    expected = [f"shared tensor 0.{name} is not the one that the patch was trained on" for name in ("weight", "bias")]
    refused(network(seed=1), tmp_path / "file", *expected)
    refused(trained(seed=1), tmp_path / "file", *expected)
    target = network(seed=1)
    pb.load_(target, tmp_path / "file", check_shared=False)
    assert torch.equal(
        target.state_dict()["3.patchbayes.components.weight"], pb.patched_sites(model)["3"].components("weight")
    )


@pytest.mark.parametrize(
    "method",
    [
        pb.EMP(3, norm_scale=0.2),
        pb.ECMP(3, init="independent"),
        pb.EMP(2, statistics="per_component"),
        pb.posteriors.MeanField(),
    ],
    ids=["norm_scale", "independent", "statistics", "MeanField"],
)
def test_a_refused_file_leaves_an_ordinary_network_ordinary(method, tmp_path):
    pb.save(trained(method), tmp_path / "file")
    target = network(seed=1)
    nn.init.normal_(target[1].weight)
    refused(target, tmp_path / "file")


@pytest.mark.parametrize("tied", ["together", "separate"])
def test_a_refused_file_leaves_tied_weights_tied(tied, tmp_path):
    model = TiedLanguageModel()
    pb.patch_(model, pb.ECMP(3), "output", tied=tied)
    pb.save(model, tmp_path / "file")
    target = TiedLanguageModel()
    nn.init.normal_(target.norm.weight)
    refused(target, tmp_path / "file", "shared tensor norm.weight")
    assert target.decoder.weight is target.embedding.weight


@pytest.mark.parametrize(
    ("method", "sites", "line"),
    [
        (pb.EMP(4), "norm+output", 'site "1": components is 3 in the file, 4 here'),
        (pb.ECMP(3), "norm+output", "site \"3\": tie is 'site' in the file, 'element' here"),
        (pb.EMP(3, sigma=0.1), "norm+output", 'site "1": sigma is 0.0 in the file, 0.1 here'),
        (pb.EMP(3, probabilities=(0.5, 0.25, 0.25)), "norm+output", 'site "1": probabilities is None in the file'),
        (pb.posteriors.MeanField(), "norm+output", "site \"1\": method is 'Mixture' in the file, 'MeanField' here"),
        (pb.EMP(3), "norm", 'site "3" of the file is not patched here'),
        (pb.EMP(3), "all", 'site "0" here is not in the file'),
    ],
)
def test_other_sites_or_methods_are_refused_with_a_list(method, sites, line, tmp_path):
    pb.save(trained(pb.EMP(3)), tmp_path / "file")
    refused(trained(method, sites), tmp_path / "file", line, "Sequential")


def test_what_matters_only_at_the_start_may_differ(tmp_path):
    pb.save(trained(pb.EMP(3, jitter=0.3)), tmp_path / "file")
    pb.load_(trained(pb.EMP(3, init="independent", norm_scale=0.2)), tmp_path / "file")


def test_a_file_of_another_network_is_refused(tmp_path):
    pb.save(trained(), tmp_path / "file")
    refused(
        nn.Sequential(nn.Linear(3, 2)), tmp_path / "file", '"1" (BatchNorm1d) is not in the network', '"3" (Linear)'
    )
    refused(network(width=5), tmp_path / "file", "3.patchbayes.components.weight: (3, 2, 4) in the file, (3, 2, 5)")
    refused(nn.Sequential(*(nn.ReLU() for _ in range(4))), tmp_path / "file", "cannot be patched as the file says")


def test_a_long_list_is_cut(tmp_path):
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(20)))
    pb.patch_(model, pb.EMP(2), "0")
    pb.save(model, tmp_path / "file")
    refused(nn.Sequential(*(nn.Linear(2, 2) for _ in range(20))), tmp_path / "file", "... and 26 more")


# ---- damaged, foreign and newer files


@pytest.mark.parametrize("target", [network, trained], ids=["ordinary", "patched"])
@pytest.mark.parametrize(
    "content",
    [b"", b"not a checkpoint", b"\x00" * 100, pickle.dumps({"a": 1}), b"\xff" * 8 + b"{}"],
    ids=["empty", "text", "zeros", "pickle", "huge header"],
)
def test_a_foreign_file_is_refused(content, target, tmp_path):
    (tmp_path / "file").write_bytes(content)
    refused(target(), tmp_path / "file", str(tmp_path / "file"), "not a whole safetensors file")


def test_a_file_that_is_not_there_or_a_folder_is_refused(tmp_path):
    refused(trained(), tmp_path / "absent", f"there is no file {tmp_path / 'absent'}")
    refused(trained(), tmp_path, "there is no file")


def edit(**changes):
    def change(description, tensors):
        for key, value in changes.items():
            if value is None:
                del description[key]
            else:
                description[key] = value

    return change


def edit_site(**changes):
    def change(description, tensors):
        for key, value in changes.items():
            description["sites"][0]["method"][key] = value

    return change


EDITS = {
    "newer format": (
        edit(format="patchbayes-3"),
        "'patchbayes-3', this version reads patchbayes-1 and patchbayes-2; update patchbayes",
    ),
    "no format": (edit(format=None), "damaged"),
    "no sites": (edit(sites=None), "damaged"),
    "sites a number": (edit(sites=3), "damaged"),
    "sites of strings": (edit(sites=["1"]), "damaged"),
    "no prior": (edit(prior=None), "damaged"),
    "a prior that is none": (edit(prior={"tau": -1.0, "rho": 1.0}), "damaged"),
    "a learned prior without its tensors": (edit(prior={"learned_layers": ["0"]}), "damaged"),
    "shared a list": (edit(shared=[]), "damaged"),
    "another kind": (edit(kind="half"), "damaged"),
    "an unknown method": (edit_site(method="Cauchy"), "Cauchy"),
    "an unknown field": (edit_site(temperature=1.0), "temperature"),
    "an impossible K": (edit_site(components=0), "components=0"),
    "another K": (edit_site(components=4), "1.patchbayes.components.weight: (12,) in the file, (16,) in the network"),
    "a tensor too few": (
        lambda d, t: t.pop("3.patchbayes.components.bias"),
        "missing in the file: 3.patchbayes.components.bias",
    ),
    "a tensor too many": (lambda d, t: t.update(extra=torch.zeros(1)), "not in the network: extra"),
    "no generator": (lambda d, t: t.pop("patchbayes_generator"), "missing in the file: patchbayes_generator"),
    "another hash": (lambda d, t: d["shared"].update({"0.bias": "0" * 16}), "shared tensor 0.bias"),
    "a hash too many": (lambda d, t: d["shared"].update({"7.bias": "0" * 16}), "the network has no 7.bias"),
}  # fmt: skip


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_file_is_refused(name, tmp_path):
    change, expected = EDITS[name]
    pb.save(trained(), tmp_path / "file")
    edited = rewritten(tmp_path / "file", change)
    refused(network(), edited, str(edited), expected)
    if name != "another K":
        refused(trained(), edited, expected)


def test_a_description_that_is_no_json_is_refused(tmp_path):
    pb.save(trained(), tmp_path / "file")
    for text in ("{", "[]", "null", "3"):
        save_file(load_file(tmp_path / "file"), tmp_path / "edited", metadata={"patchbayes": text})
        refused(network(), tmp_path / "edited", "damaged")


@pytest.fixture(scope="module")
def saved() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        pb.save(trained(pb.EMP(3, norm_scale=0.2)), Path(folder) / "file")
        return (Path(folder) / "file").read_bytes()


def load_bytes(content: bytes) -> None:
    """A changed file is loaded or refused, and a refusal changes nothing."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        path.write_bytes(content)
        model = network()
        before = snapshot(model)
        try:
            pb.load_(model, path)
        except CheckpointMismatch:
            assert_same(before, model)
            raise


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_truncated_file_is_refused_wherever_it_ends(saved, data):
    length = data.draw(st.integers(0, len(saved) - 1))
    with pytest.raises(CheckpointMismatch):
        load_bytes(saved[:length])


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_changed_byte_in_the_header_never_ends_in_another_error(saved, data):
    header = 8 + int.from_bytes(saved[:8], "little")
    place = data.draw(st.integers(0, header - 1))
    value = data.draw(st.one_of(st.integers(0, 255), st.sampled_from(list(b'0123456789"{}[]:,.-ntf '))))
    with contextlib.suppress(CheckpointMismatch):
        load_bytes(saved[:place] + bytes([value]) + saved[place + 1 :])
