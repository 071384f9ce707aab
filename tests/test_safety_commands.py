"""Commands on what strangers made: code is run only where it is trusted, and nothing is worked for in vain."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import patchbayes as pb
from command_line import command
from patchbayes.bayesianizing.run import bayesianize_checkpoint
from patchbayes.digests import described
from patchbayes.errors import CheckpointMismatch, PatchbayesError, UntrustedCode
from patchbayes.nets.named import build_net
from patchbayes.runs import RunFolder, TrainingConfig, train

CODE = """
import pathlib, torch
pathlib.Path({marker!r}).touch()
from patchbayes.data import read
def net(outputs, shape): return torch.nn.Sequential(torch.nn.Linear(shape[0], outputs))
def data(): return read({data!r})
"""


def write_table(folder, words=False):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 4)).astype("float32")
    y = (x[:, 0] > 0).astype("int64")
    np.savez(folder / "d.npz", x_train=x[:48], y_train=y[:48], x_test=x[48:], y_test=y[48:])
    lines = [f"{a:.3f},{b:.3f},{c:.3f},{d:.3f},{['no', 'yes'][t]}" for (a, b, c, d), t in zip(x, y, strict=True)]
    (folder / "t.csv").write_text("\n".join(["a,b,c,d,y", *lines]) + "\n")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Small runs: "net" on rows of a CSV file, patched; "plain" without."""
    folder = tmp_path_factory.mktemp("runs")
    write_table(folder)
    for name, method in (("net", "ecmp(3)"), ("plain", "vanilla")):
        config = TrainingConfig(data=f"csv:{folder / 't.csv'}", target="y", model="mlp:8", method=method, epochs=1)
        train(config, folder / name, quiet=True)
    return folder


@pytest.fixture
def runs(trained, tmp_path, monkeypatch):
    shutil.copytree(trained, tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    return Path("runs")


def edit(run, **changes):
    config = json.loads((run / "config.json").read_text())
    for key, value in changes.items():
        *path, last = key.split("__")
        target = config
        for part in path:
            target = target[part]
        target[last] = value
    (run / "config.json").write_text(json.dumps(config))


# Code that a run folder names


@pytest.fixture
def evil(runs):
    (runs / "evil.py").write_text(CODE.format(marker=str(Path("ran").absolute()), data=f"csv:{runs / 't.csv'}#y"))
    yield runs
    for name in ("runs.evil", "runs"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    "line",
    [
        "predict runs/net runs/t.csv",
        "evaluate runs/net --draws 5",
        "train runs/net --resume",
        "train new --config c.json",
    ],
)
@pytest.mark.parametrize("what", ["model", "data"])
def test_a_run_folder_does_not_run_code(evil, line, what):
    if what == "model":
        edit(evil / "net", model="runs.evil:net", training__model="runs.evil:net")
    else:
        edit(evil / "net", data__spec="runs.evil:data", training__data="runs.evil:data")
    shutil.copy(evil / "net" / "config.json", "c.json")
    if what == "data" and line.startswith("predict"):
        line += " --risk 0.2"  # else the data are not read
    told = command(line, code=1)
    assert f"runs.evil:{'net' if what == 'model' else 'data'}" in told.err
    assert "--trust-code" in told.err
    assert not Path("ran").exists()
    with pytest.raises(UntrustedCode, match=r"net names code of its own: (model|data) 'runs.evil"):
        (RunFolder.open(evil / "net").model if what == "model" else RunFolder.open(evil / "net").dataset)()


def test_code_is_run_where_it_is_trusted_or_named_by_the_user(evil):
    command("train own --data csv:runs/t.csv#y --model runs.evil:net --method vanilla --epochs 1")
    assert Path("ran").exists()
    assert "--trust-code" in command("predict own runs/t.csv", code=1).err
    assert "probability" in command("predict own runs/t.csv --trust-code").out
    command("train own --resume --trust-code")
    command("train own --resume --model runs.evil:net")


@pytest.mark.parametrize("name", ["train", "evaluate", "predict"])
def test_trust_is_in_the_help(name):
    assert "--trust-code" in command(f"{name} --help").out


def test_a_file_in_the_working_directory_is_not_executed(runs):
    """Whatever it is called: as a module that Python or a package imports late."""
    for name in ("secrets", "PIL", "accelerate", "typer", "sklearn"):
        Path(f"{name}.py").write_text(f"import pathlib; pathlib.Path('executed-{name}').touch()\n")
    program = "import sys; sys.argv = ['patchbayes', 'predict', 'runs/net', 'runs/t.csv']\n"
    program += "from patchbayes.cli import main; main()"
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, list(Path().glob("executed-*"))) == (0, []), done.stderr


# Answers


def overflowing(runs, rows):
    """New rows, some of which are so large that the network's outputs are not finite."""
    state = load_file(runs / "plain" / "best.safetensors")
    state = {key: value * (1e15 if value.dim() == 2 else 1) for key, value in state.items()}
    save_file(state, runs / "plain" / "best.safetensors")
    Path("new.csv").write_text("a,b,c,d\n" + "".join(f"{value},{value},{value},{value}\n" for value in rows))


def test_what_is_not_finite_is_no_answer(runs):
    overflowing(runs, [0, 1e30, 0, -1e30, 0])
    told = command("predict runs/plain new.csv --format jsonl --risk 0.3 --risk-on test", code=1)
    rows = [json.loads(line) for line in told.out.splitlines()]
    assert [row["input"] for row in rows] == ["new.csv:2", "new.csv:4", "new.csv:6"]  # none is lost
    assert all(isinstance(row["refer"], bool) and row["probability"] > 0 for row in rows)
    assert "2 of the inputs could not be answered" in told.err
    assert "new.csv:3" in told.err
    assert "new.csv:5" in told.err


def test_refer_unless_the_probability_is_at_least_the_threshold(runs):
    import dataclasses

    from patchbayes.runs import NewInputs

    opened = NewInputs.open(runs / "net", "best", None, draws=3, tolerance=None, batch_size=8)
    for threshold, refer in ((float("nan"), True), (0.0, False), (float("inf"), True)):
        rows = list(dataclasses.replace(opened, threshold=threshold).answers([runs / "t.csv"]))
        assert {row["refer"] for row in rows} == {refer}


def test_a_patched_network_answers_the_rows_that_it_can(runs):
    state = RunFolder.open(runs / "net").model()
    with torch.no_grad():
        for parameter in state.parameters():
            parameter.mul_(1e20 if parameter.dim() > 1 else 1)
    pb.save(state, runs / "net" / "best.safetensors", whole=True)
    Path("new.csv").write_text("a,b,c,d\n0,0,0,0\n1e35,1e35,1e35,1e35\n0,0,0,0\n")
    told = command("predict runs/net new.csv --format jsonl", code=1)
    assert [json.loads(line)["input"] for line in told.out.splitlines()] == ["new.csv:2", "new.csv:4"]
    assert "new.csv:3" in told.err


def test_empty_names_are_refused(runs):
    assert "an empty name is no file" in command("predict runs/net", "", code=2).err
    assert "got an empty one" in command("report runs/net -o", "", code=2).err
    told = command("train new --data digits --model mlp --sites", "", code=2)
    assert "--sites : expected a name" in told.err
    base = "bayesianize runs/plain/best.safetensors new --model mlp:8 --data npz:runs/d.npz --held-out test"
    assert "--sites: expected layers" in command(f"{base} --sites", "", code=2).err
    command(f"{base} --batch-size 0", code=2)
    options = {"data": "digits", "model": "mlp", "held_out": "test", "batch_size": 0}
    with pytest.raises(PatchbayesError, match="batch_size=0; expected at least 1"):
        bayesianize_checkpoint(runs / "plain" / "best.safetensors", Path("new"), **options)
    assert not Path("new").exists()


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("train new --data digits --model mlp --set threads=100000", 1),
        ("train new --data digits --model mlp --set workers=100000", 1),
        (f"train new --data digits --model mlp --epochs {2**70}", 2),
        ("train new --data digits --model mlp --set eval_draws=1000000000000000", 1),
        ("predict runs/net runs/t.csv --draws 1000000000000000", 2),
        ("evaluate runs/net --draws 1000000000000000", 2),
        ("train new --data sys:exit --model mlp", 1),
        ("params sys:exit", 1),
    ],
)
def test_numbers_and_names_that_end_no_work_are_refused(runs, line, code):
    command(line, code=code)
    assert not Path("new").exists()


def test_nothing_commands_the_terminal(runs):
    edit(runs / "net", data__classes=["\x1b[2Jno", "y\x9bes\u202e"])
    for form in ("table", "jsonl", "csv"):
        told = command(f"predict runs/net runs/t.csv --format {form}").out
        assert not set(told) & {"\x1b", "\x9b", "\u202e"}
    assert json.loads(command("predict runs/net runs/t.csv --format jsonl").out.splitlines()[0])["class"] in (
        "\x1b[2Jno", "y\x9bes\u202e"
    )  # fmt: skip
    assert "\x1b" not in command("train new --data", "\x1b[31mx:", "--model mlp", code=2).err.replace("\x1b[31mx", "")


# Targets are tried before the work


def test_places_are_tried_before_the_work(runs, monkeypatch):
    def refuse(path):
        raise PatchbayesError(f"{path} cannot be written (No space left on device); nothing was done yet.")

    import patchbayes.bayesianizing.run as bayesianizing

    monkeypatch.setattr(sys.modules["patchbayes.runs.evaluate"], "probe_writing", refuse)
    monkeypatch.setattr(bayesianizing, "probe_writing", refuse)
    monkeypatch.setattr(bayesianizing, "bayesianize_", None)
    monkeypatch.setattr(sys.modules["patchbayes.runs.evaluate"], "class_answers", None)
    assert "nothing was done yet" in command("evaluate runs/net", code=1).err
    base = "bayesianize runs/plain/best.safetensors new --model mlp:8 --data npz:runs/d.npz --held-out test"
    assert "nothing was done yet" in command(base, code=1).err


def test_a_bayesianized_folder_is_there_whole_or_not_at_all(runs, monkeypatch):
    import patchbayes.bayesianizing.run as bayesianizing

    line = (
        "bayesianize runs/plain/best.safetensors new --model mlp:8 --data csv:runs/t.csv#y --held-out test --budget 500"
    )

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(bayesianizing, "save", full)
        assert "No space left" in command(line, code=1).err
    assert sorted(path.name for path in Path().iterdir()) == ["new.tried.json", "runs"]  # for --resume
    command(f"{line} --resume")
    assert (Path("new") / "patch.safetensors").exists()
    assert sorted(path.name for path in Path().iterdir()) == ["new", "runs"]


def test_extras_are_looked_for_before_the_work(runs, monkeypatch):
    import importlib.util

    find = importlib.util.find_spec
    gone = ("imagecorruptions", "sklearn")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in gone else find(name))
    for line, extra in (("demo out", "cli"), ("evaluate runs/net --corruptions", "corruptions")):
        told = command(line, code=1)
        assert f'pip install "patchbayes[{extra}]"' in told.err
        assert "nothing was done" in told.err
    assert not Path("out").exists()


# Damaged runs


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {}}, "data.spec: expected a text"),
        ({"data__num_outputs": 10**9}, "data.num_outputs: expected 2"),
        ({"data__input_shape": [10**9, 10**9, 10**9]}, "data.input_shape: expected the shape"),
        ({"data__reading": {"trust_code": True}}, "data.reading: expected keywords among"),
        ({"data__preparation": {"mean": ["x"], "std": [1]}}, "data.preparation: expected a preparation"),
        ({"data__columns": {"a": "code"}}, "data.columns.a: expected one of"),
        ({"machine": {"threads": 10**6}}, "machine.threads: expected a number of threads"),
        ({"data__classes": "ab"}, "data.classes: expected a list"),
    ],
)
def test_a_damaged_configuration_names_the_key(runs, changes, message):
    edit(runs / "net", **changes)
    assert message in command("predict runs/net runs/t.csv", code=1).err


def test_deep_or_foreign_json(runs):
    (runs / "net" / "metrics.jsonl").write_bytes(b'{"epoch": 1, "loss": "\xff"}\n')
    assert "metrics.jsonl is damaged" in command("evaluate runs/net --draws 2", code=1).err
    (runs / "net" / "metrics.jsonl").write_bytes(b"[" * 10**6 + b"\n")
    assert "nested too deeply" in command("evaluate runs/net --draws 2", code=1).err
    (runs / "net" / "config.json").write_bytes(b"[" * 10**6)
    assert "nested too deeply" in command("predict runs/net runs/t.csv", code=1).err
    assert "nested too deeply" in command("train new --config runs/net/config.json", code=2).err


def test_a_progress_that_cannot_be(runs):
    from safetensors import safe_open

    file = runs / "net" / "last.safetensors"
    with safe_open(file, "pt") as state:
        description = described(state.metadata(), str(file))
        tensors = {key: state.get_tensor(key) for key in state.keys()}  # noqa: SIM118
    for key, value in (("epoch", -1), ("step", "1"), ("rows", [3]), ("nll", None), ("rows", [{"epoch": "x"}])):
        wrong = {**description, "progress": {**description["progress"], key: value}}
        save_file(tensors, file, metadata={"patchbayes": json.dumps(wrong)})
        told = command("train runs/net --resume", code=1)
        assert f"progress.{key}" in told.err or f"{key}: expected" in told.err or f"{key}[0]" in told.err


# Integrity


def flipped(file, position, bit=3):
    content = bytearray(file.read_bytes())
    content[position] ^= 1 << bit
    file.write_bytes(content)


@pytest.mark.parametrize("name", ["net/best", "net/last", "plain/best", "plain/last"])
def test_every_flipped_bit_of_a_checkpoint_is_seen(runs, name):
    file = runs / f"{name}.safetensors"
    whole = file.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    run, which = RunFolder.open(runs / name.partition("/")[0]), name.partition("/")[2]
    assert pb.digests.verify(file) == len(load_file(file))
    run.model(which)
    for position in np.random.default_rng(0).integers(header, len(whole), 40):
        flipped(file, position, int(position) % 8)
        for look in (lambda: pb.digests.verify(file), lambda: run.model(which)):
            with pytest.raises(CheckpointMismatch, match=r"damaged|is another"):
                look()
        file.write_bytes(whole)


def test_a_changed_description_is_seen(runs):
    file = runs / "net" / "best.safetensors"
    file.write_bytes(
        file.read_bytes().replace(b'\\"k\\": 3', b'\\"k\\": 2').replace(b'\\"tau\\": 1.0', b'\\"tau\\": 2.0')
    )
    with pytest.raises(CheckpointMismatch, match="description is damaged"):
        pb.digests.verify(file)
    with pytest.raises(CheckpointMismatch, match="description is damaged"):
        RunFolder.open(runs / "net").model()


def test_large_tensors_have_digests_that_see_changes_and_moves():
    from patchbayes.digests import digest

    tensor = torch.randn(3000, 7, generator=torch.Generator().manual_seed(0))
    known = {digest(tensor), digest(tensor.half()), digest(tensor.reshape(7, 3000)), digest(tensor.flip(0))}
    swapped, moved, changed = tensor.clone(), tensor.clone(), tensor.clone()
    swapped.view(-1)[[0, 5000]] = tensor.view(-1)[[5000, 0]]
    moved.view(-1)[:2048] = tensor.view(-1)[1024:3072]
    changed.view(-1)[20_999] += 1e-6
    known |= {digest(swapped), digest(moved), digest(changed)}
    assert len(known) == 7
    assert digest(tensor) == digest(tensor.t().contiguous().t())
    unaligned = torch.zeros(3000 * 7 * 4 + 1, dtype=torch.uint8)[1:]
    unaligned.copy_(tensor.view(-1).view(torch.uint8))
    assert digest(unaligned) == digest(tensor.view(-1).view(torch.uint8).clone())


def test_a_file_without_digests_is_not_verified(tmp_path):
    save_file({"a": torch.zeros(3)}, tmp_path / "a.safetensors")
    for file, message in ((tmp_path / "a.safetensors", "has no digests"), (tmp_path / "b", "there is no file")):
        with pytest.raises(CheckpointMismatch, match=message):
            pb.digests.verify(file)


def test_a_checkpoint_of_another_kind_does_not_answer(runs):
    shutil.copy(runs / "plain" / "best.safetensors", runs / "net" / "best.safetensors")
    assert (
        "holds an ordinary network, and the run is of a patched" in command("predict runs/net runs/t.csv", code=1).err
    )


def test_a_network_of_another_dtype_keeps_it(tmp_path):
    network = build_net("mlp:8", 2, (4,))
    pb.patch_(network, pb.EMP(2), "output")
    pb.save(network, tmp_path / "net.safetensors", whole=True)
    other = build_net("mlp:8", 2, (4,)).double()
    pb.load_(other, tmp_path / "net.safetensors")
    assert {value.dtype for value in other.parameters()} == {torch.float64}
    x = torch.ones(3, 4)
    torch.testing.assert_close(other.eval()(x.double()).float(), network.eval()(x))


# Columns


def test_columns_are_recorded_and_used_again(runs):
    lines = Path("runs/t.csv").read_text().splitlines()
    Path("comma.csv").write_text("\n".join(line.replace(",", ";").replace(".", ",") for line in lines) + "\n")
    line = "train new --data csv:comma.csv#y --model mlp:8 --method vanilla --epochs 1"
    command(f"{line} --column d:ignore --column a:decimal-comma")
    record = RunFolder.open("new").config["data"]
    kinds = {"a": "decimal-comma", "b": "decimal-comma", "c": "decimal-comma", "d": "ignore", "y": "category"}
    assert record["columns"] == kinds
    assert record["features"] == ["a", "b", "c"]
    assert "column d: ignore (given)" in Path("new/log.txt").read_text()
    assert len(command("predict new comma.csv --format jsonl").out.splitlines()) == 60
    command("train new --resume")
    command("evaluate new --draws 2")


# Workers of a killed demo


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_worker_outlives_a_killed_demo(tmp_path, number):
    process = subprocess.Popen(
        [sys.executable, "-m", "patchbayes", "demo", str(tmp_path / "demo"), "--epochs", "2000"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    workers = []
    while len(workers) < 3 and time.monotonic() < deadline:  # two, and the process that tracks what they share
        time.sleep(0.2)
        workers = children(process.pid)
    time.sleep(10)  # they import, and begin
    assert len(workers) >= 2
    os.kill(process.pid, number)
    process.wait(30)
    deadline = time.monotonic() + 20
    while any(map(alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert [pid for pid in workers if alive(pid)] == []


def children(pid):
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_documents_are_not_written_from_a_folder_without_records(tmp_path):
    told = command("reproduce --write-docs --results", tmp_path / "typo", "--docs", tmp_path / "docs", code=1)
    assert "holds no record of an experiment" in told.err
    assert not (tmp_path / "docs").exists()
