"""Two processes (gloo on the CPU, started by torchrun): as one process to rounding, and resumed to the same bits."""

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import patchbayes
import two_processes
from patchbayes.runs import RunFolder, TrainingConfig, read_evaluation, train
from patchbayes.runs.state import read_state
from small_runs import write_npz
from test_training_resume import assert_equal_runs
from two_processes import torchrun

pytestmark = pytest.mark.slow

SCRIPT = """
import json, sys
from patchbayes.runs import TrainingConfig, TrainingInterrupted, train

def main():
    try:
        train(TrainingConfig.from_json(json.loads(sys.argv[1])), sys.argv[2], resume=True, trust_code=True)
    except TrainingInterrupted as interruption:
        print(interruption)

if __name__ == "__main__":
    main()
"""
NETWORK = """
from torch import nn

def layer_norms(num_outputs, input_shape):
    (features,) = input_shape
    return nn.Sequential(nn.LayerNorm(features), nn.Linear(features, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, num_outputs))
"""


@pytest.fixture
def launch(tmp_path, monkeypatch):
    """Start a training on two processes."""
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "own_network.py").write_text(NETWORK)
    write_npz(tmp_path / "classes.npz")
    monkeypatch.syspath_prepend(str(tmp_path))
    paths = os.pathsep.join([str(Path(patchbayes.__file__).parents[1]), str(tmp_path)])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    started = []

    def start(config: TrainingConfig, folder: Path) -> subprocess.Popen:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port=0"]
        command += ["--standalone", str(tmp_path / "script.py"), json.dumps(config.to_json()), str(folder)]
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    sys.modules.pop("own_network", None)


def config(tmp_path, **settings):
    fixed = {"data": f"npz:{tmp_path}/classes.npz", "model": "own_network:layer_norms", "batch_size": 15, "threads": 1}
    return TrainingConfig(**{**fixed, "epochs": 3, "lr": 0.05, **settings})


def finish(process):
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 0, output
    return output


@pytest.mark.parametrize(
    "settings", [{"method": "vanilla"}, {"method": "vanilla", "optimizer": "sgd", "device": "cpu"}]
)
def test_two_processes_are_one_to_rounding(launch, tmp_path, settings):
    """43 examples in batches of 14 and 15: the parts of the processes are not always of equal size."""
    chosen = config(tmp_path, **settings)
    finish(launch(chosen, tmp_path / "two"))
    train(chosen, tmp_path / "one", trust_code=True)
    assert "2 process(es)" in (tmp_path / "two" / "log.txt").read_text()
    one, two = (load_file(tmp_path / name / "last.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys()
    for key, value in one.items():
        torch.testing.assert_close(two[key], value, rtol=1e-3, atol=1e-4)
    for ours, theirs in zip(RunFolder(tmp_path / "one").history(), RunFolder(tmp_path / "two").history(), strict=True):
        for key in ("loss", "nll", "kl", "held_out_nll"):
            assert theirs[key] == pytest.approx(ours[key], rel=1e-3)


@pytest.mark.parametrize(
    ("method", "number"), [("ecmp", signal.SIGTERM), ("ensemble", signal.SIGTERM), ("dropout(0.1)", signal.SIGKILL)]
)
def test_two_processes_resume_to_the_same_bits(launch, tmp_path, method, number):
    chosen = config(tmp_path, method=method, epochs=25, checkpoint_steps=2)
    finish(launch(chosen, tmp_path / "whole"))
    process = launch(chosen, tmp_path / "parts")
    metrics = tmp_path / "parts" / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and len(metrics.read_text().splitlines()) >= 2):
        time.sleep(0.005)
    if number == signal.SIGTERM:
        process.send_signal(number)
    else:  # the first of the two processes; torchrun then ends the other
        os.kill(int((tmp_path / "parts" / ".lock").read_text().split()[1]), number)
    process.communicate(timeout=120)
    assert len(metrics.read_text().splitlines()) < 25
    log = tmp_path / "parts" / "log.txt"
    assert ("interrupted in epoch" in log.read_text()) == (number == signal.SIGTERM)
    finish(launch(chosen, tmp_path / "parts"))
    assert "resumed after epoch" in log.read_text()
    assert_equal_runs(tmp_path / "whole", tmp_path / "parts")


def words(chosen, folder):
    """patchbayes train with these settings, as torchrun takes it."""
    settings = {key: value for key, value in chosen.to_json().items() if value is not None and value != []}
    found = ["-m", "patchbayes", "train", folder, "--quiet", "--resume"]
    found += ["--data", settings.pop("data"), "--model", settings.pop("model")]
    for key, value in settings.items():
        found += ["--set", f"{key}={value if isinstance(value, str) else json.dumps(value)}"]
    return [*found, "--trust-code"]


@pytest.fixture
def inputs(tmp_path):
    (tmp_path / "own_network.py").write_text(NETWORK)
    write_npz(tmp_path / "classes.npz")
    return tmp_path


def start(chosen, folder, number=2):
    return torchrun(words(chosen, folder), number, paths=[folder.parent])


def rows_in(folder):
    metrics = folder / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


def wait_for(condition, process, seconds=120):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None and not condition():
        time.sleep(0.01)


def states(folder):
    return load_file(folder / "last.safetensors")


def test_two_one_two_processes_go_on_from_the_same_state(inputs):
    """With the same draws on both processes, and no batch norm, that is the run of one process, to rounding."""
    chosen = config(inputs, method="emp(3)", epochs=30, same_draws=True, checkpoint_steps=1)
    for number in (2, 1):
        process = start(chosen, inputs / "parts", number)
        reached = rows_in(inputs / "parts") + 4
        wait_for(lambda reached=reached: rows_in(inputs / "parts") >= reached, process)
        process.send_signal(signal.SIGTERM)
        ended(process)
    assert rows_in(inputs / "parts") < 30
    ends(start(chosen, inputs / "parts"))
    assert rows_in(inputs / "parts") == 30
    log = (inputs / "parts" / "log.txt").read_text()
    assert log.count("resumed after epoch") == 2
    assert [line.partition("; ")[2][:12] for line in log.splitlines() if "process(es)" in line] == [
        "2 process(es", "1 process(es", "2 process(es"
    ]  # fmt: skip
    ends(start(chosen, inputs / "one", 1))
    one, parts = states(inputs / "one"), states(inputs / "parts")
    for key, value in one.items():
        torch.testing.assert_close(parts[key], value, rtol=2e-2, atol=2e-3)


def ended(process):
    return two_processes.finish(process)


def ends(process):
    output = ended(process)
    assert process.returncode == 0, output
    return output


def test_own_draws_differ_from_the_same_draws(inputs):
    for same_draws in (False, True):
        ends(start(config(inputs, method="emp(3)", same_draws=same_draws), inputs / str(same_draws)))
    one, other = (states(inputs / name) for name in ("False", "True"))
    assert any(not torch.equal(one[key], other[key]) for key in one)


def test_components_learn_apart_on_two_processes_as_on_one(inputs):
    """To the bit: each process trains the components of its hands alone, and they are put together."""
    chosen = config(inputs, method="emp(3)", learn="patches", component_workers=1)
    for number in (1, 2):
        ends(start(chosen, inputs / str(number), number))
    one, two = (states(inputs / str(number)) for number in (1, 2))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[key], two[key]) for key in one)


def test_turns_on_two_processes_are_those_of_one(inputs):
    chosen = config(inputs, method="emp(3)", alternate=2.0, epochs=6, same_draws=True)
    for number in (1, 2):
        ends(start(chosen, inputs / str(number), number))
    one, two = (states(inputs / str(number)) for number in (1, 2))
    for key, value in one.items():
        torch.testing.assert_close(two[key], value, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(("which", "number"), [(0, signal.SIGKILL), (1, signal.SIGKILL), (1, signal.SIGSTOP)])
def test_a_lost_process_ends_the_job_with_one_message_and_loses_no_step(inputs, which, number):
    """Without a checkpoint on the way: what is there afterwards was saved by the process that was left."""
    chosen = config(inputs, method="emp(3)", epochs=4000, report_epochs=4000, checkpoint_seconds=None, timeout=10.0)
    ends(start(dataclasses.replace(chosen, epochs=8, report_epochs=8), inputs / "reference"))
    process = start(chosen, inputs / "run")
    log = inputs / "run" / "log.txt"
    wait_for(lambda: log.exists() and "started" in log.read_text(), process)
    time.sleep(2)
    began = time.monotonic()
    os.kill(two_processes.children(process.pid)[which], number)
    output = ended(process)
    assert process.returncode != 0
    assert time.monotonic() - began < 90
    assert output.count("another of the 2 processes of this run ended") == 1, output
    assert "the state after the last whole step" in output
    progress = read_state(inputs / "run" / "last.safetensors")[1]["progress"]
    assert (progress["epoch"], progress["step"]) > (0, 0)


def test_ten_random_kills_change_nothing(inputs):
    chosen = config(inputs, method="emp(3)", epochs=60, checkpoint_seconds=None, timeout=20.0)
    ends(start(chosen, inputs / "whole"))
    generator = random.Random(0)
    kills = 0
    for _ in range(40):
        process = start(chosen, inputs / "killed")
        before = rows_in(inputs / "killed")
        wait_for(lambda before=before: rows_in(inputs / "killed") > before, process)
        time.sleep(generator.random() * 0.2)
        alive = two_processes.children(process.pid)
        if kills < 10 and process.poll() is None and alive:
            os.kill(generator.choice(alive), signal.SIGKILL)
            kills += 1
        ended(process)
        if process.returncode == 0:
            break
    assert kills == 10
    assert process.returncode == 0
    assert_equal_runs(inputs / "whole", inputs / "killed")


def test_two_processes_evaluate_as_one(inputs):
    ends(start(config(inputs, method="emp(3)"), inputs / "run", 1))
    found = []
    for number in (1, 2):
        evaluating = ["-m", "patchbayes", "evaluate", inputs / "run", "--draws", 20, "--trust-code", "--json"]
        output = ends(torchrun(evaluating, number, paths=[inputs]))
        assert output.count('"schema"') == 1, output  # the first process alone prints
        found.append(read_evaluation(inputs / "run"))
    one, two = found
    assert one.num_draws == two.num_draws
    for name, metric in one.metrics.items():
        assert two.metrics[name].value == pytest.approx(metric.value, rel=1e-4, abs=1e-6), name
    assert two.draws_curve == one.draws_curve or all(
        other == pytest.approx(value, rel=1e-4, abs=1e-6)
        for name, scores in one.draws_curve.scores.items()
        for value, other in zip(scores.value, two.draws_curve.scores[name].value, strict=True)
    )
