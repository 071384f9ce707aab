"""The tables of docs/devices.md: steps become times, and bytes become times on many ranks, as the text beside them says."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))
import scaling_tables

SECONDS = {"plain": 1.0, "turn of the patches": 0.5, "turn of the shared": 0.8, "hand": 0.4}
RECORD = {
    "settings": {
        "turn": 2.0, "target_epoch": 2, "num_data": 20, "batch_size": 2, "model": "net", "data": "set", "epochs": 4
    },
    "machine": {"processor": "one"},
    "versions": {"torch": "2"},
    "commit": "abc",
    "command": "python benchmarks/scaling.py",
    "step_seconds": {"4, norm+output": {"seconds": SECONDS, "prefix_kept": True, "prefix_bytes": 12}},
    "trajectories": [
        {"components": 4, "kind": "plain", "seed": 0, "objective": [3.0, 2.0, 1.0, 0.9, 0.8]},
        {"components": 4, "kind": "coordinate descent", "seed": 0, "objective": [3.0, 2.0, 1.5, 1.0, 0.9]},
        {"components": 4, "kind": "workers", "seed": 0, "objective": [3.0, 2.9, 2.8, 2.7, 2.6]},
    ],
}  # fmt: skip


def test_seconds_are_steps_times_their_time():
    """Ten steps an epoch; the first two epochs belong to the shared parameters, the next two to the patches."""
    plain, turns, workers = RECORD["trajectories"]
    assert scaling_tables.seconds_after(RECORD, plain, 3, 1) == pytest.approx(30)
    assert scaling_tables.seconds_after(RECORD, turns, 3, 1) == pytest.approx(2 * 8 + 5)
    assert scaling_tables.seconds_after(RECORD, workers, 3, 1) == pytest.approx(2 * 8 + 4)
    # Hands take 3, 3, 2 and 2 of ten steps; of two processes the first has hands 0 and 2.
    assert scaling_tables.seconds_after(RECORD, workers, 3, 2) == pytest.approx(2 * 8 + 5 * 0.4)


def test_an_objective_that_is_not_reached_is_a_lower_bound():
    lines = scaling_tables.time_to_objective(RECORD).splitlines()
    assert lines[2] == "| 4 | plain | 1 of 1 | 1.00 (1.00-1.00) |  | 0.8000 |"
    assert lines[3] == "| 4 | coordinate descent | 1 of 1 | 1.05 (1.05-1.05) |  | 0.9000 |"  # 21 seconds against 20
    assert lines[4] == "| 4 | workers | 0 of 1 | 1.20 (1.20-1.20) | 1.00 (1.00-1.00) | 2.6000 |"
    assert "x 0.50" in scaling_tables.steps(RECORD)


def test_wall_times_of_whole_trainings_are_compared_seed_by_seed():
    runs = [
        {"components": 4, "kind": "plain", "seed": 0, "nll": [3.0, 2.0, 1.0, 0.5], "seconds": [1.0, 2.0, 3.0, 4.0]},
        {
            "components": 4,
            "kind": "two workers",
            "seed": 0,
            "nll": [2.5, 1.9, 1.5, 1.0],
            "seconds": [0.5, 1.0, 1.5, 2.0],
        },
    ]
    lines = scaling_tables.real_runs({"real_runs": runs}).splitlines()
    assert lines[2] == "| 4 | plain | 1 of 1 | 1.00 (1.00-1.00) | 1.00 | 0.5000 |"
    assert lines[3] == "| 4 | two workers | 1 of 1 | 0.50 (0.50-0.50) | 0.50 | 1.0000 |"


def test_an_all_reduce_takes_its_messages_and_its_bytes():
    assert scaling_tables.all_reduce(0, 8) == pytest.approx(6 * 20e-6)
    assert scaling_tables.all_reduce(10**10, 2) - scaling_tables.all_reduce(0, 2) == pytest.approx(1.0)
