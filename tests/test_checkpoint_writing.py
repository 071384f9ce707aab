"""Files are written whole or not at all, and nothing is pickled."""

import ast
import contextlib
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
from safetensors.torch import save_file
from torch import nn

import patchbayes as pb
from patchbayes.files import replacing
from saved_networks import X, network, refused, trained

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


def test_a_folder_that_is_not_there_is_named(tmp_path):
    missing = tmp_path / "nowhere" / "patch.safetensors"
    with pytest.raises(pb.PatchbayesError, match=f"the folder {missing.parent} does not exist"):
        pb.save(trained(), missing)
    assert not missing.parent.exists()


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
        model[3].patchbayes.components.weight.zero_()
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
            model[3].patchbayes.components.weight.zero_()
        folder.chmod(0o555)
        with without_privileges(), pytest.raises(PermissionError):
            pb.save(model, path)
        folder.chmod(0o755)
        assert path.read_bytes() == old
        assert list(folder.iterdir()) == [path]


def test_a_path_that_cannot_be_written_leaves_nothing_behind(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(pb.PatchbayesError, match="it is a folder"):
        pb.save(trained(), tmp_path / "folder")
    with pytest.raises(pb.PatchbayesError, match="does not exist"):
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
    model = trained(prior=pb.prior.Prior(2.0))

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
    with pb.use_draw(model.eval(), pb.Draws.sample(model, 1)):
        assert torch.equal(model(X), source.eval()(X))
    pb.save(model, tmp_path / "patch")
    pb.load_(source, tmp_path / "patch")
    assert torch.equal(pb.predict(model, X, 3).probs, pb.predict(source, X, 3).probs)
