"""Commands that are killed at any moment: run again, they end with what an uninterrupted one writes, and leave nothing else."""

import json
import os
import random
import shlex
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import patchbayes as pb
from command_line import command
from patchbayes.cli import application
from patchbayes.runs import RunFolder
from small_runs import write_npz

TRAIN = "train new --data npz:d.npz --model mlp:16 --method emp(3) --epochs 12 --batch-size 4 --set checkpoint_steps=3 --quiet"
HELD_OUT = "--data npz:d.npz --held-out test"
BAYESIANIZE = f"bayesianize plain/best.safetensors new --model mlp:16 {HELD_OUT} --sites output --budget 3000"
REPRODUCE = "reproduce ablations --scale smoke --results new --work new/work"
# The command, what runs it again after a kill, and how often it is killed: a hundred times in all, in about ten minutes.
COMMANDS = {
    "train": (TRAIN, f"{TRAIN} --resume", 30),
    "bayesianize": (BAYESIANIZE, f"{BAYESIANIZE} --resume", 16),
    "evaluate": ("evaluate net --draws 30", "evaluate net --draws 30", 14),
    "report": ("report net plain -o new.html", "report net plain -o new.html", 12),
    "export": ("export", "export", 12),  # the function: it is no command
    "reproduce": (REPRODUCE, REPRODUCE, 12),
    "demo": ("demo new --epochs 1", "demo new --epochs 1", 4),
}
CHANGING = (
    "path",  # of the checkpoint that was patched: the two runs are in different folders
    "date",
    "commit",
    "machine",
    "versions",
    "training_seconds",
    "seconds",
    "train_seconds",
    "other_seconds",
    "report",
    "command",
)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    place = tmp_path_factory.mktemp("killed")
    write_npz(place / "d.npz")
    before = Path.cwd()
    os.chdir(place)
    try:
        for name, method in (("net", "emp(3)"), ("plain", "vanilla")):
            command(f"train {name} --data npz:d.npz --model mlp:16 --method {method} --epochs 2 --batch-size 8 --quiet")
        command("evaluate net plain --draws 5")
    finally:
        os.chdir(before)
    return place


@pytest.fixture
def place(prepared, tmp_path, monkeypatch):
    shutil.copytree(prepared, tmp_path / "work")
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


def without_times(value):
    if isinstance(value, dict):
        return {key: without_times(item) for key, item in value.items() if key not in CHANGING}
    return [without_times(item) for item in value] if isinstance(value, list) else value


def written(place):
    """Everything below a folder, without what depends on the clock; a log says when it was interrupted."""
    found = {}
    for path in sorted(place.rglob("*")):
        name = str(path.relative_to(place))
        if path.suffix == ".safetensors":
            found[name] = {key: value.tolist() for key, value in load_file(path).items()}
        elif path.suffix == ".json":
            found[name] = without_times(json.loads(path.read_text()))
        elif path.suffix == ".jsonl":
            found[name] = [without_times(json.loads(line)) for line in path.read_text().splitlines()]
        elif path.is_file() and path.name not in ("log.txt", ".lock"):
            found[name] = len(path.read_bytes()) > 0
    return found


def export():
    network = RunFolder.open("net").model()
    draws = pb.Draws.sample(network, 6, generator=torch.Generator().manual_seed(0))
    draws.save("new.json")
    for name in ("new.pt2", "new.onnx"):
        pb.export(network, name, draws, example_input=torch.zeros(2, 4))


def started(line):
    """A process of its own that runs the command, forked from this one so that it need not import anything again."""
    pid = os.fork()
    if pid == 0:
        try:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            torch.set_num_threads(1)
            if line == "export":
                export()
                os._exit(0)
            sys.argv = ["patchbayes", *shlex.split(line)]
            application.run()
            os._exit(0)
        except SystemExit as error:
            os._exit(int(error.code or 0))
        except BaseException:
            os._exit(99)
    return pid


def killed(line, seconds):
    """Whether the command was still running after so many seconds, and was killed then."""
    pid = started(line)
    time.sleep(seconds)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return os.WIFSIGNALED(status)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_killed_command_ends_as_an_uninterrupted_one(place, capsys, name):
    line, again, kills = COMMANDS[name]
    rng = random.Random(name)
    shutil.copytree(place, place.parent / "whole")
    os.chdir(place.parent / "whole")
    began = time.monotonic()
    pid = started(line)
    assert os.waitpid(pid, 0)[1] == 0
    duration = time.monotonic() - began
    expected = written(place.parent / "whole")
    os.chdir(place)
    count = finished = 0
    while count < kills:
        begun = Path("new").exists() if name == "train" else Path("new.tried.json").exists()
        if killed(again if begun else line, rng.uniform(0, duration)):
            count += 1
        else:  # it was done before the kill: from the start
            finished += 1
            for path in Path().glob("new*"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        if name == "train" and rng.random() < 0.2:
            shutil.rmtree("new", ignore_errors=True)
    if name == "bayesianize" and Path("new").exists():
        shutil.rmtree("new")
    assert os.waitpid(started(again), 0)[1] == 0
    with capsys.disabled():
        print(f"\n{name}: {count} kills within {duration:.1f} s each, {finished} runs done before theirs")
    assert [path.name for path in place.rglob("*.part")] == []
    assert written(place) == expected
