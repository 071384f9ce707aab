"""`patchbayes train`: what it writes, how it goes on, and that every option does something."""

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch

import patchbayes as pb
from command_line import command, strict_json
from patchbayes.runs import RunFolder

FILES = {"config.json", "metrics.jsonl", "log.txt", "last.safetensors", "best.safetensors"}


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """A small table with a number, a word and two possible targets."""
    file = tmp_path_factory.mktemp("table") / "table.csv"
    rng = random.Random(0)
    lines = ["a,b,color,answer,amount"]
    for _ in range(100):
        a, b, color = rng.gauss(0, 1), rng.gauss(0, 1), rng.choice(["red", "blue"])
        lines.append(f"{a:.4f},{b:.4f},{color},{'yes' if a + (color == 'red') > 0 else 'no'},{2 * a + b:.4f}")
    file.write_text("\n".join(lines) + "\n")
    return file


@pytest.fixture(scope="module")
def begun(table, tmp_path_factory):
    """A trained run, and what the command printed."""
    folder = tmp_path_factory.mktemp("runs") / "plain"
    return folder, command("train", folder, *basis(table))


def basis(table):
    return ["--data", f"csv:{table}#answer", "--model", "mlp", "--epochs", 2, "--batch-size", 16]


def rows(folder):
    """The metrics without what depends on the clock."""
    found = [strict_json(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "train_seconds"} for row in found]


def weights(folder):
    return safetensors.torch.load_file(folder / "best.safetensors")


def test_the_run_folder(begun, table):
    folder, found = begun
    assert {path.name for path in folder.iterdir() if not path.name.startswith(".")} == FILES
    config = strict_json((folder / "config.json").read_text())
    assert (config["schema"], config["kind"], config["model"]) == (1, "train", "mlp")
    assert config["training"]["data"] == f"csv:{table}#answer"
    assert config["training"]["method"] == "ecmp(5)"  # what was not given is written out
    assert config["data"]["classes"] == ["no", "yes"]
    assert [row["epoch"] for row in rows(folder)] == [1, 2]
    assert found.out.splitlines()[-1] == f"next: patchbayes evaluate {folder}"
    assert f"held out accuracy {rows(folder)[-1]['held_out_accuracy']:.4g}" in found.out
    assert found.err == ""  # nothing moves and nothing is colored where nobody watches
    assert "\x1b" not in found.out
    assert "done" in (folder / "log.txt").read_text()


def test_a_finished_run_is_resumed_to_itself(begun):
    folder, _ = begun
    before = {name: (folder / name).read_bytes() for name in FILES - {"log.txt"}}
    found = command("train --resume --json", folder).json
    assert found["folder"] == str(folder)
    assert found["epoch"] == 2
    assert {name: (folder / name).read_bytes() for name in before} == before


def test_an_interrupted_run_goes_on_to_the_same_bits(table, tmp_path, monkeypatch):
    """The network interrupts the training in the middle of the second epoch, as Ctrl-C does."""
    monkeypatch.chdir(tmp_path)
    Path("interrupting_net.py").write_text(
        "from pathlib import Path\n\nimport torch\n\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self, outputs, shape):\n"
        "        super().__init__()\n"
        "        self.norm, self.output = torch.nn.BatchNorm1d(shape[0]), torch.nn.Linear(shape[0], outputs)\n"
        "        self.calls = 0\n"
        "    def forward(self, x):\n"
        "        self.calls += self.training\n"
        "        if self.calls == 7 and Path('interrupt').exists():\n"
        "            raise KeyboardInterrupt\n"
        "        return self.output(self.norm(x))\n\n"
        "def build(num_outputs, input_shape):\n    return Net(num_outputs, input_shape)\n"
    )
    options = [*basis(table), "--model", "interrupting_net:build", "--set", "checkpoint_steps=1"]
    command("train whole", *options)
    Path("interrupt").touch()
    command("train broken", *options, code=130)
    assert len(rows(Path("broken"))) == 1
    Path("interrupt").unlink()
    command("train broken --resume --trust-code")
    assert rows(Path("broken")) == rows(Path("whole"))
    ours, theirs = weights(Path("broken")), weights(Path("whole"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    sys.modules.pop("interrupting_net")


def test_a_configuration_file_gives_what_the_command_line_does_not(begun, table, tmp_path):
    folder, _ = begun
    command("train", tmp_path / "same", "--config", folder / "config.json")
    assert rows(tmp_path / "same") == rows(folder)
    plain = tmp_path / "plain.json"
    plain.write_text(json.dumps({"data": f"csv:{table}#answer", "model": "mlp", "epochs": 1, "seed": 5}))
    command("train --epochs 3 --set seed=6 --seed 7", tmp_path / "other", "--config", plain)
    training = strict_json((tmp_path / "other" / "config.json").read_text())["training"]
    assert (training["epochs"], training["seed"]) == (3, 6)  # the file, then the options, then --set
    assert len(rows(tmp_path / "other")) == 3


def test_the_settings_are_listed_without_naming_a_folder():
    out = command("train --settings").out
    assert all(name in out for name in ("jitter_warmup", "milestones", "sharing", "checkpoint_steps"))


OPTIONS = {
    "--model": ("own_small_net:build", ""),
    "--method": ("emp", ""),
    "--sites": ("norm", ""),
    "--objective": ("simplified", ""),
    "--optimizer": ("sgd", ""),
    "--lr": ("0.05", ""),
    "--patch-lr": ("0.05", ""),
    "--schedule": ("constant", ""),
    "--epochs": ("1", ""),
    "--batch-size": ("8", ""),
    "--draws-per-step": ("3", ""),
    "--seed": ("1", ""),
    "--precision": ("bfloat16", ""),
    "--held-out": ("0.3", ""),
    "--set": ("warmup=1", ""),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_changes_the_result(option, begun, table, tmp_path, monkeypatch):
    value, beside = OPTIONS[option]
    monkeypatch.chdir(tmp_path)
    Path("own_small_net.py").write_text(
        "import torch\n\ndef build(num_outputs, input_shape):\n"
        "    return torch.nn.Sequential(torch.nn.BatchNorm1d(input_shape[0]), torch.nn.Linear(input_shape[0], num_outputs))\n"
    )
    expected = begun[0]
    if beside:
        expected = Path("without")
        command(f"train {beside} without", *basis(table))
    command(f"train {beside} with", *basis(table), option, value)
    assert rows(Path("with")) != rows(expected)
    sys.modules.pop("own_small_net", None)


@pytest.mark.parametrize("method", ["ecmp(3)", "ecmp(5, jitter=0.7)", "norm: emp(5); linear: dropout(0.1)"])
def test_every_part_of_a_method_changes_the_result(method, begun, table, tmp_path):
    command("train", tmp_path / "run", *basis(table), "--method", method)
    assert strict_json((tmp_path / "run" / "config.json").read_text())["training"]["method"] == method
    assert rows(tmp_path / "run") != rows(begun[0])


def test_several_methods_in_one_network(table, tmp_path):
    """EMP on norms beside dropout and ECMP, with learned precisions of the prior, as the text of one option."""
    folder = tmp_path / "run"
    text = "norm: emp(3); hidden1: dropout(0.1); output: ecmp(2)"
    command("train", folder, *basis(table), "--method", text, "--set", "prior=learned")
    run = RunFolder.open(folder)
    assert run.training.method == text
    model = run.model()
    found = {name: site.method for name, site in pb.patched_sites(model).items()}
    dropout = pb.Dropout(0.1)
    assert found == {"norm0": pb.EMP(3), "norm1": pb.EMP(3), "hidden1": dropout, "output": pb.ECMP(2)}
    assert any(key.startswith("patchbayes_prior") for key in weights(folder))
    assert "accuracy" in command("evaluate", folder, "--draws", 4).out


def test_a_method_of_the_user_s_own_module(table, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own_method.py").write_text(
        "from dataclasses import dataclass\n\nfrom patchbayes.posteriors import Dropout\n\n"
        "@dataclass(frozen=True)\nclass Half(Dropout):\n    rate: float = 0.5\n"
    )
    assert "there is no method 'half'" in command("train run --method half", *basis(table), code=1).err
    command("--import own_method train run --method half", *basis(table))
    assert strict_json(Path("run/config.json").read_text())["training"]["method"] == "half(0.5)"
    command("evaluate run --draws 2")
    assert "import nosuch: No module named 'nosuch'" in command("--import nosuch train run", code=1).err
    sys.modules.pop("own_method")


def test_options_that_change_no_number(begun, table, tmp_path):
    command("train --device cpu --quiet", tmp_path / "cpu", *basis(table))
    assert strict_json((tmp_path / "cpu" / "config.json").read_text())["training"]["device"] == "cpu"
    assert rows(tmp_path / "cpu") == rows(begun[0])
    command("train --data csv:table.csv#answer --data-dir", table.parent, tmp_path / "found", *basis(table)[2:])
    assert rows(tmp_path / "found") == rows(begun[0])
    missing = command("train --data csv:table.csv#answer --model mlp", tmp_path / "missing", code=1)
    assert "table.csv is not there" in missing.err


def test_tensorboard_files_are_written_where_it_is_installed(table, tmp_path):
    pytest.importorskip("tensorboard")
    command("train --tensorboard", tmp_path / "run", *basis(table))
    assert list((tmp_path / "run" / "tensorboard").iterdir())


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("", 2, "give --data and --model"),
        ("--data digits", 2, "give --model"),
        ("--data digits --model nosuch", 1, "known    mlp, small_cnn"),
        ("--data nosuch --model mlp", 1, "unknown data 'nosuch'"),
        ("--data diabetes --model small_cnn", 1, 'use "mlp" for tables'),
        ("--data digits --model mlp --method nosuch", 1, "there is no method 'nosuch'"),
        ("--data digits --model mlp --epochs 0", 2, "--epochs 0: expected a number of at least 1"),
        ("--data digits --model mlp --epochs two", 2, "--epochs"),
        ("--data digits --model mlp --lr nan", 2, "--lr nan: expected a finite number"),
        ("--data digits --model mlp --method 'emp(5, rate=0.1)'", 1, "EMP has no field 'rate'"),
        ("--data digits --model mlp --set nosuch=3", 1, "unknown 'nosuch'"),
        ("--data digits --model mlp --set warmup", 2, "write KEY=VALUE"),
        ("--data digits --model mlp --set epochs=many", 1, "a whole number"),
        ("--data digits --model mlp --set epochs=0", 1, "TrainingConfig(epochs=0)"),
        ("--data digits --model mlp --config nosuch.json", 2, "nosuch.json"),
        ("--resume", 1, "is not a run folder"),
    ],
)
def test_bad_values_are_refused_before_anything_is_written(line, code, said, tmp_path):
    found = command(f"train {line}", tmp_path / "run", code=code)
    assert said in found.err
    assert found.out == ""
    assert not (tmp_path / "run" / "config.json").exists()


def test_a_used_folder_and_another_configuration_are_refused(begun, table):
    folder, _ = begun
    assert "already holds a run" in command("train", folder, *basis(table), code=1).err
    assert "epochs was 2, is 5" in command("train --resume --epochs 5", folder, code=1).err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_the_run_and_is_told_by_the_exit_code(number, code, tmp_path):
    words = ["train", "run", "--data", "digits", "--model", "small_cnn", "--epochs", "500", "--batch-size", "400"]
    process = subprocess.Popen(
        [sys.executable, "-m", "patchbayes", *words], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    history = tmp_path / "run" / "metrics.jsonl"
    while not (history.exists() and history.stat().st_size) and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == code, said
    assert "--resume" in said or "resume=True" in said
    assert "Traceback" not in said
    assert (tmp_path / "run" / "last.safetensors").exists()


def test_resuming_what_was_killed_before_it_began_starts_it(tmp_path):
    line = "train --data digits --model small_cnn --epochs 1 --resume"
    command(line, tmp_path / "run")
    assert (tmp_path / "run" / "last.safetensors").exists()
