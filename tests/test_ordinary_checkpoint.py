"""Weights that others trained, read from the files that training scripts write."""

import copy
import json
import zipfile

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import patchbayes as pb
from patchbayes.errors import CheckpointMismatch
from patchbayes.nets import small_cnn
from patchbayes.runs import load_ordinary_
from patchbayes.runs.state import FORMAT


@pytest.fixture
def network():
    return small_cnn(1, 4, 8)


def other_weights(network):
    return {key: torch.full_like(value, 3) for key, value in network.state_dict().items()}


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: state,
        lambda state: {f"module.{key}": value for key, value in state.items()},
        lambda state: {"state_dict": state, "epoch": 3},
        lambda state: {"state_dict": {f"model.{key}": value for key, value in state.items()}, "best": 0.1},
        lambda state: {"model": {"state_dict": state}},
        lambda state: {f"module._orig_mod.{key}": value for key, value in state.items()},
    ],
    ids=["bare", "ddp", "state_dict", "lightning", "nested", "compiled"],
)
def test_state_dicts_in_their_usual_wrappings(network, tmp_path, wrap):
    torch.save(wrap(other_weights(network)), tmp_path / "weights.pt")
    load_ordinary_(network, tmp_path / "weights.pt")
    assert all((value == 3).all() for value in network.state_dict().values())


def test_safetensors_and_missing_counters_of_batches(network, tmp_path):
    state = {key: value for key, value in other_weights(network).items() if "num_batches" not in key}
    save_file({f"module.{key}": value for key, value in state.items()}, tmp_path / "weights.safetensors")
    load_ordinary_(network, tmp_path / "weights.safetensors")
    assert all((network.state_dict()[key] == 3).all() for key in state)


def test_names_of_the_network_are_kept_though_they_look_like_a_wrapping(tmp_path):
    network = nn.ModuleDict({"module": nn.Linear(2, 2)})
    torch.save(other_weights(network), tmp_path / "weights.pt")
    load_ordinary_(network, tmp_path / "weights.pt")
    assert (network["module"].weight == 3).all()


def test_a_mismatch_lists_what_does_not_fit_and_changes_nothing(network, tmp_path):
    state = other_weights(network)
    state["head.weight"] = state.pop("fc.weight")
    state["conv1.weight"] = torch.zeros(16, 3, 3, 3)
    torch.save(state, tmp_path / "weights.pt")
    before = copy.deepcopy(network.state_dict())
    with pytest.raises(CheckpointMismatch) as error:
        load_ordinary_(network, tmp_path / "weights.pt")
    for line in (
        "missing in the file: fc.weight",
        "not in the network: head.weight",
        "conv1.weight: (16, 3, 3, 3) in the file, (16, 1, 3, 3) in the network",
    ):
        assert line in str(error.value)
    assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())


class Evil:
    """Would run a command where a file with it is unpickled."""

    def __reduce__(self):
        return (print, ("unpickled",))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "there is no file"),
        (lambda path: path.write_bytes(b"not a checkpoint"), "cannot be read as a checkpoint"),
        (lambda path: path.write_bytes(b""), "cannot be read as a checkpoint"),
        (lambda path: torch.save({"state_dict": Evil()}, path), "could run anything"),
        (lambda path: torch.save(nn.Linear(2, 2), path), "could run anything"),
        (lambda path: torch.save([torch.zeros(2)], path), "holds no state dict.*got a list"),
        (lambda path: torch.save({"epoch": 3}, path), "got a mapping with the keys 'epoch'"),
        (lambda path: torch.save({}, path), "got an empty mapping"),
    ],
)
def test_files_that_are_no_checkpoints(network, tmp_path, capsys, make, message):
    make(tmp_path / "weights.pt")
    with pytest.raises(CheckpointMismatch, match=message):
        load_ordinary_(network, tmp_path / "weights.pt")
    assert "unpickled" not in capsys.readouterr().out


def test_broken_and_patched_safetensors_are_refused(network, tmp_path):
    path = tmp_path / "weights.safetensors"
    save_file(other_weights(network), path)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(CheckpointMismatch, match="not a whole safetensors file"):
        load_ordinary_(network, path)
    patched = copy.deepcopy(network)
    pb.patch_(patched, pb.EMP(2))
    pb.save(patched, path, whole=True)
    with pytest.raises(CheckpointMismatch, match="holds a patched network; expected an ordinary checkpoint"):
        load_ordinary_(network, path)
    with pytest.raises(CheckpointMismatch, match=r"is a folder.\n  do       give the file of the weights"):
        load_ordinary_(network, tmp_path)
    save_file({}, path, metadata={"patchbayes": json.dumps({"format": FORMAT})})
    with pytest.raises(CheckpointMismatch, match=r"is the state of a training.\n  do       give the weights alone"):
        load_ordinary_(network, path)


def test_the_public_networks_load(data_dir):
    """The weights that others trained on CIFAR-100."""
    from patchbayes.nets.named import build_net

    files = sorted((data_dir / "pretrained").glob("*resnet20*.safetensors"))
    if not files:
        pytest.skip("no pretrained networks there")
    network = build_net("cifar_resnet20", 100, (3, 32, 32))
    start = network.fc.weight.detach().clone()
    load_ordinary_(network, files[0])
    assert not torch.equal(network.fc.weight, start)
    with pytest.raises(CheckpointMismatch, match="missing in the file"):
        load_ordinary_(build_net("cifar_resnet56", 100, (3, 32, 32)), files[0])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("convert", "message"),
    [
        (lambda weight: weight.to_sparse(), "is sparse, nested, quantized or without values"),
        (lambda weight: weight.to("meta"), "is sparse, nested, quantized or without values"),
        (lambda weight: torch.quantize_per_tensor(weight, 0.1, 0, torch.qint8), "is sparse, nested, quantized"),
        (lambda weight: torch.nested.nested_tensor(list(weight)), "is sparse, nested, quantized"),
        (lambda weight: weight.to(torch.complex64), r"torch\.complex64 in the file, torch\.float32 in the network"),
        (lambda weight: weight.to(torch.int8), r"torch\.int8 in the file, torch\.float32 in the network"),
    ],
    ids=["sparse", "meta", "quantized", "nested", "complex", "whole"],
)
def test_tensors_that_are_not_ordinary_change_nothing(network, tmp_path, convert, message):
    before = copy.deepcopy(network.state_dict())
    state = other_weights(network)
    last = [key for key, value in state.items() if value.dim() == 2][-1]
    torch.save({**state, last: convert(state[last])}, tmp_path / "weights.pt")
    with pytest.raises(CheckpointMismatch, match=message):
        load_ordinary_(network, tmp_path / "weights.pt")
    assert all(torch.equal(before[key], value) for key, value in network.state_dict().items())


def test_half_precision_is_taken(network, tmp_path):
    torch.save(
        {key: value.half() for key, value in other_weights(network).items() if value.is_floating_point()},
        tmp_path / "w.pt",
    )
    load_ordinary_(network, tmp_path / "w.pt")
    assert all((value == 3).all() for value in network.parameters())


def test_a_file_that_unpacks_to_more_than_its_size_is_refused(network, tmp_path):
    torch.save(other_weights(network), tmp_path / "plain.pt")
    with (
        zipfile.ZipFile(tmp_path / "plain.pt") as plain,
        zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as bomb,
    ):
        for member in plain.infolist():
            bomb.writestr(member.filename, plain.read(member))
    load_ordinary_(network, tmp_path / "plain.pt")
    with pytest.raises(CheckpointMismatch, match=r"is a compressed archive .* torch.save compresses nothing"):
        load_ordinary_(network, tmp_path / "bomb.pt")
