"""Two processes (gloo on the CPU, started by torchrun): as one process to rounding, and resumed to the same bits."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import patchbayes
from patchbayes.runs import RunFolder, TrainingConfig, train
from small_runs import write_npz
from test_training_resume import assert_equal_runs

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
