"""Files: what is in them, what comes back, what is refused without a trace, and that none is half written."""

import ast
import contextlib
import copy
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import safetensors
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

import patchbayes as pb
from patchbayes.draws import network_of
from patchbayes.errors import CheckpointMismatch, NotPatched
from patchbayes.files import replacing
from zoo import TiedLanguageModel, assert_same, snapshot

X = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))


def network(seed: int = 0, width: int = 4) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 2))


def trained(method=None, sites="norm+output", seed: int = 0, **options) -> nn.Sequential:
    """A patched network whose sites were trained for three steps; the shared weights are those of `network(seed)`."""
    model = network(seed)
    pb.patch_(model, method or pb.EMP(3), sites, **options)
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(X).square().sum().backward()
        optimizer.step()
    return model


METHODS = {
    "EMP": pb.EMP(3),
    "ECMP": pb.ECMP(3, init="independent"),
    "p": pb.EMP(2, probabilities=(0.7, 0.3)),
    "sigma": pb.ECMP(2, sigma=0.1, norm_scale=0.2),
    "Dropout": pb.Dropout(0.2),
    "DropConnect": pb.DropConnect(0.3),
    "units": pb.Mixture(components=2, tie="unit", zero=True, mix_bias=True),
    "Ensemble": pb.Ensemble(2),
    "statistics": pb.EMP(3, statistics="per_component"),
    "per example": {"norm": pb.EMP(2, per_example=True), "output": pb.EMP(2)},
    "MeanField": pb.MeanField(0.3),
    "rules": {"norm": pb.EMP(2), "output": pb.ECMP(4)},
}


def description_of(path: Path) -> dict:
    with safetensors.safe_open(path, "pt") as file:
        return json.loads(file.metadata()["patchbayes"])


def rewritten(path: Path, change) -> Path:
    """The file with its description changed by `change` (in place), and the tensors too if it takes two arguments."""
    tensors, description = load_file(path), description_of(path)
    change(description, tensors)
    other = path.with_name("edited.safetensors")
    save_file(tensors, other, metadata={"patchbayes": json.dumps(description)})
    return other


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
    assert set(whole) == set(model.state_dict())
    assert set(patch) == {key for key in whole if not key.startswith("0.")}
    assert patch["3.parametrizations.weight.original"].shape == (3, 2, 4)
    assert patch["1.component_running_mean"].shape == (3, 4)


def test_the_description_says_method_sites_prior_version_and_hashes(tmp_path):
    model = trained(pb.EMP(3), prior=pb.Prior(tau={"3": 2.0, "*": 1.0}, rho=4.0))
    pb.save(model, tmp_path / "file")
    description = description_of(tmp_path / "file")
    assert description["format"] == "patchbayes-1"
    assert description["kind"] == "patch"
    assert [(site["name"], site["module"]) for site in description["sites"]] == [("1", "BatchNorm1d"), ("3", "Linear")]
    assert description["sites"][0]["method"]["components"] == 3
    assert description["prior"] == {"tau": {"3": 2.0, "*": 1.0}, "rho": 4.0}
    assert set(description["shared"]) == {"0.weight", "0.bias"}
    target = network()
    pb.load_(target, tmp_path / "file")
    assert torch.equal(pb.kl(target), pb.kl(model))


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
    pb.patch_(model, pb.EMP(3), prior=pb.LearnedPrior(model, tau=2.0))
    pb.maximize_prior_(model)
    pb.save(model, tmp_path / "file")
    target = network()
    pb.load_(target, tmp_path / "file")
    prior = network_of(target).prior
    assert isinstance(prior, pb.LearnedPrior)
    assert torch.equal(prior.log_tau, network_of(model).prior.log_tau)
    assert torch.equal(prior.log_rho, network_of(model).prior.log_rho)
    assert torch.equal(pb.kl(target), pb.kl(model))


def test_a_learned_prior_of_other_layers_is_refused(tmp_path):
    model = network()
    pb.patch_(model, pb.EMP(3), prior=pb.LearnedPrior(model))
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
            for name in site.posterior.names:
                site.components(name).mul_(1.5)
    pb.save(model, tmp_path / "file", whole=whole)
    assert sum(value.shape == (3, 11, 6) for value in load_file(tmp_path / "file").values()) == (
        2 if tied == "separate" and sites == "all" else 1
    )
    pb.load_(target, tmp_path / "file")
    assert all(torch.equal(value, target.state_dict()[key]) for key, value in model.state_dict().items())
    if tied == "together":
        assert target.embedding.parametrizations.weight.original is target.decoder.parametrizations.weight.original
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
    pb.patch_(model, pb.EMP(2), "all", prior=pb.LearnedPrior(model))
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


# ---- refusals


def refused(model: nn.Module, path: Path, *expected: str, **options) -> None:
    before = snapshot(model)
    patched = pb.is_patched(model)
    prior = network_of(model).prior if patched else None
    with pytest.raises(CheckpointMismatch) as error:
        pb.load_(model, path, **options)
    for text in expected:
        assert text in str(error.value)
    assert_same(before, model)
    assert pb.is_patched(model) == patched
    assert not patched or network_of(model).prior is prior


def test_other_shared_weights_are_refused_by_name_unless_told_otherwise(tmp_path):
    model = trained()
    pb.save(model, tmp_path / "file")
    expected = [f"shared tensor 0.{name} is not the one that the patch was trained on" for name in ("weight", "bias")]
    refused(network(seed=1), tmp_path / "file", *expected)
    refused(trained(seed=1), tmp_path / "file", *expected)
    target = network(seed=1)
    pb.load_(target, tmp_path / "file", check_shared=False)
    assert torch.equal(
        target.state_dict()["3.parametrizations.weight.original"], pb.patched_sites(model)["3"].components("weight")
    )


@pytest.mark.parametrize(
    "method",
    [pb.EMP(3, norm_scale=0.2), pb.ECMP(3, init="independent"), pb.EMP(2, statistics="per_component"), pb.MeanField()],
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
        (pb.MeanField(), "norm+output", "site \"1\": method is 'Mixture' in the file, 'MeanField' here"),
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
    refused(network(width=5), tmp_path / "file", "3.parametrizations.weight.original: (3, 2, 4) in the file, (3, 2, 5)")
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
    "newer format": (edit(format="patchbayes-2"), "'patchbayes-2', this version reads 'patchbayes-1'; update patchbayes"),
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
    "another K": (edit_site(components=4), "1.parametrizations.weight.original: (3, 4) in the file, (4, 4) in the network"),
    "a tensor too few": (lambda d, t: t.pop("3.parametrizations.bias.original"), "missing in the file: 3.param"),
    "a tensor too many": (lambda d, t: t.update(extra=torch.zeros(1)), "not in the network: extra"),
    "no generator": (lambda d, t: t.pop("patchbayes_generator"), "missing in the file: patchbayes_generator"),
    "another hash": (lambda d, t: d["shared"].update({"0.bias": "0" * 16}), "shared tensor 0.bias"),
    "a hash too many": (lambda d, t: d["shared"].update({"7.bias": "0" * 16}), "shared tensor 7.bias"),
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


# ---- writing


@contextlib.contextmanager
def limited_file_size(number: int):
    """Writing beyond `number` bytes fails, as on a full disk."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (number, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


@contextlib.contextmanager
def without_privileges():
    """As an ordinary user, whom a read-only folder stops."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("whole", [False, True])
def test_a_disk_that_is_full_half_way_leaves_the_old_file(whole, tmp_path):
    model = trained()
    path = tmp_path / "file"
    pb.save(model, path, whole=whole)
    old = path.read_bytes()
    with torch.no_grad():
        model[3].parametrizations.weight.original.zero_()
    with limited_file_size(len(old) // 2), pytest.raises((OSError, safetensors.SafetensorError)):
        pb.save(model, path, whole=whole)
    assert path.read_bytes() == old
    assert list(tmp_path.iterdir()) == [path]
    pb.save(model, path, whole=whole)
    assert path.read_bytes() != old


def test_a_read_only_folder_leaves_the_old_file():
    model = trained()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "file"
        pb.save(model, path)
        old = path.read_bytes()
        with torch.no_grad():
            model[3].parametrizations.weight.original.zero_()
        folder.chmod(0o555)
        with without_privileges(), pytest.raises(PermissionError):
            pb.save(model, path)
        folder.chmod(0o755)
        assert path.read_bytes() == old
        assert list(folder.iterdir()) == [path]


def test_a_path_that_cannot_be_written_leaves_nothing_behind(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError):
        pb.save(trained(), tmp_path / "folder")
    with pytest.raises(OSError):
        pb.save(trained(), tmp_path / "absent" / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    assert not list((tmp_path / "folder").iterdir())


def test_an_interrupt_half_way_leaves_the_old_file_and_no_part(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def write() -> None:
        with replacing(path) as part:
            part.write_bytes(b"half of the n")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_process_killed_half_way_leaves_the_old_file(tmp_path):
    model = trained()
    path = tmp_path / "file"
    pb.save(model, path)
    old = path.read_bytes()
    code = (
        "import os, signal, sys, pathlib\n"
        "from patchbayes.files import replacing\n"
        "with replacing(pathlib.Path(sys.argv[1])) as part:\n"
        "    part.write_bytes(b'half')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    source = str(Path(pb.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": source}
    ended = subprocess.run([sys.executable, "-c", code, str(path)], env=environment, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert path.read_bytes() == old
    pb.load_(network(), path)


def test_a_new_file_has_ordinary_permissions(tmp_path):
    pb.save(trained(), tmp_path / "file")
    (tmp_path / "other").write_bytes(b"")
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "other").stat().st_mode


# ---- no pickle


def test_no_source_file_uses_pickle():
    for path in Path(pb.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {"pickle", "dill", "joblib", "shelve", "marshal"} & {name.split(".")[0] for name in names}, path
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.load", "torch.save"):
                assert "weights_only=True" in ast.unparse(node), path  # reads tensors and plain containers alone


def test_files_are_read_without_unpickling(tmp_path, monkeypatch):
    model = trained(prior=pb.Prior(2.0))

    def forbidden(*_args, **_kwargs):
        raise AssertionError("unpickled")

    for name in ("load", "loads", "dump", "dumps"):
        monkeypatch.setattr(pickle, name, forbidden)
    monkeypatch.setattr(torch, "load", forbidden)
    monkeypatch.setattr(torch, "save", forbidden)
    pb.save(model, tmp_path / "file")
    target = network()
    pb.load_(target, tmp_path / "file")
    assert torch.equal(model(X), target(X))


def test_a_file_made_by_torch_save_is_refused_and_not_run(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "exploded"),))

    torch.save({"weight": Bomb()}, tmp_path / "file")
    refused(network(), tmp_path / "file", "not a whole safetensors file")
    assert not (tmp_path / "exploded").exists()


def test_parametrizations_of_other_kinds_are_left_alone(tmp_path):
    def build(seed: int) -> nn.Module:
        model = network(seed)
        nn.utils.parametrizations.spectral_norm(model[0])
        return model

    source, model = build(3), build(0)
    save_file(source.state_dict(), tmp_path / "ordinary")
    pb.patch_(model, pb.EMP(3, jitter=0))
    pb.load_(model, tmp_path / "ordinary")
    with pb.drawn(model.eval(), pb.Draws.sample(model, 1)):
        assert torch.equal(model(X), source.eval()(X))
    pb.save(model, tmp_path / "patch")
    pb.load_(source, tmp_path / "patch")
    assert torch.equal(pb.predict(model, X, 3).probs, pb.predict(source, X, 3).probs)
