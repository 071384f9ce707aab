"""SIGKILL at many points of a run, resumed each time: it ends with the same bits as a run that nobody killed.

The runs are children of a process of their own (this file, started as a script), which has imported everything and has no
threads, so that a child costs a fork and not an import.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import patchbayes
from patchbayes.runs import TrainingConfig, train


@pytest.fixture
def npz(tmp_path):
    from small_runs import write_npz

    write_npz(tmp_path / "classes.npz")
    return {
        "data": f"npz:{tmp_path}/classes.npz",
        "model": "mlp:8",
        "batch_size": 16,
        "epochs": 2,
        "checkpoint_steps": 2,
    }


DIGITS = {"data": "digits", "model": "small_cnn", "batch_size": 64, "lr": 0.01}


def test_killed_at_random_moments(tmp_path):
    settings = DIGITS | {"method": "ecmp", "epochs": 3, "checkpoint_steps": 3}
    assert killing(tmp_path, settings, "moments", number=8, share=0.4) >= 2


def test_killed_at_some_of_its_writes(tmp_path, npz):
    assert killing(tmp_path, npz, "writes", every=13) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("method", ["vanilla", "dropout(0.1)", "emp", "ecmp", "meanfield", "ensemble"])
def test_killed_at_very_many_random_moments(tmp_path, method):
    settings = DIGITS | {"method": method, "epochs": 12, "checkpoint_steps": 2, "augmentation": "crop"}
    assert killing(tmp_path, settings, "moments", number=60, share=0.1) >= 8


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ecmp", "vanilla"])
def test_killed_at_each_of_its_writes(tmp_path, npz, method):
    """Before and after every flush and rename, 29 (26 where the second epoch is not the best).

    Three each for the configuration, the metrics at the start, five states and the best networks; one for each row.
    """
    assert killing(tmp_path, npz | {"method": method}, "writes", every=1) in (2 * 26, 2 * 29)


def killing(folder: Path, settings: dict, way: str, **options) -> int:
    """Run this file as a script, and compare what the killed runs left with the one that was not; the number of kills."""
    from test_training_resume import assert_equal_runs

    source = str(Path(patchbayes.__file__).parents[1])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": source}
    task = json.dumps({"folder": str(folder), "settings": settings | {"threads": 1}, "way": way, "options": options})
    done = subprocess.run(
        [sys.executable, __file__, task], env=environment, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stderr
    killed = sorted(folder.glob("killed-*"))
    assert killed
    for path in killed:
        assert_equal_runs(folder / "whole", path)
    return int(done.stdout)


# ---- the script


def main(folder: str, settings: dict, way: str, options: dict) -> None:
    config = TrainingConfig.from_json(settings)
    train(config, Path(folder, "whole"), quiet=True)  # imports all that the children need
    print({"moments": at_moments, "writes": at_writes}[way](config, Path(folder), **options))


def at_moments(config: TrainingConfig, folder: Path, number: int, share: float) -> int:
    """One run, killed up to so many times within that share of the time that it takes; then left to end."""
    began = time.monotonic()
    assert not in_child(config, folder / "killed-never")
    longest = share * (time.monotonic() - began)
    generator = random.Random(0)
    kills = sum(in_child(config, folder / "killed-often", seconds=generator.uniform(0, longest)) for _ in range(number))
    assert not in_child(config, folder / "killed-often")
    return kills


def at_writes(config: TrainingConfig, folder: Path, every: int) -> int:
    """A run for each of its writes, killed there and then left to end."""
    kills = 0
    for after in (False, True):
        number, killed = 0, True
        while killed:
            path = folder / f"killed-{number}-{after}"
            killed = in_child(config, path, write=number, after=after)
            kills += killed
            assert not in_child(config, path)
            number += every
    return kills


def in_child(
    config: TrainingConfig, folder: Path, *, seconds: float | None = None, write: int | None = None, after: bool = False
) -> bool:
    """Train in a child process; whether it was killed: after so many seconds, or at the write of that number."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if write is not None:
                die_at_write(write, after)
            train(config, folder, resume=True, quiet=True)
            code = 0
        finally:
            os._exit(code)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


def die_at_write(number: int, after: bool) -> None:
    """Be killed when a file is flushed to disk or renamed for that time, before or after it is done."""
    count = 0

    def dying(original):
        def call(*arguments, **keywords):
            nonlocal count
            count += 1
            if count == number + 1 and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            result = original(*arguments, **keywords)
            if count == number + 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call

    os.fsync, os.replace = dying(os.fsync), dying(os.replace)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
