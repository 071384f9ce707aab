"""The matrix of networks and the benchmark of the estimators: they run, failures are named, tables say what records say."""

from importlib import import_module

import pytest
import torch
from torch import nn

from test_benchmarks import _importable  # noqa: F401  a fixture that every test takes


def test_a_network_goes_through_all_steps_and_failures_are_named():
    matrix, tables = import_module("matrix"), import_module("integration_tables")
    with torch.random.fork_rng():
        good = matrix.tried(lambda: (matrix.Recurrent(nn.LSTM, True), torch.randint(60, (3, 9))))
        bad = matrix.tried(lambda: (nn.Sequential(nn.ReLU()), torch.rand(2, 3)))
    assert list(good) == list(matrix.STEPS)
    assert [step["passed"] for step in good.values()] == [True] * 6
    assert good["predict"]["note"] == "captured"
    assert list(bad) == ["patch"]
    assert bad["patch"]["note"].startswith("NothingToPatch")
    rows = [{"library": "torch", "network": n, "steps": s} for n, s in (("LSTM", good), ("ReLU", bad))]
    made = tables.matrix({"rows": rows, "commit": "abc", "command": "python x", "versions": {"torch": "2"}})
    assert "| torch | 2 | 1 | 1 | 1 | 1 | 1 | 1 | 1 |" in made
    assert "Not tried yet: resnet18 (timm), " in made
    assert "85.7 % of 7 steps pass. ReLU, patch: NothingToPatch" in made


def test_the_families_of_the_matrix_are_those_of_the_capture_benchmark():
    matrix, capture = import_module("matrix"), import_module("capture")
    assert len(capture.TIMM) >= 30
    assert len(capture.TRANSFORMERS) >= 15
    assert len(capture.TORCHVISION) >= 10
    assert set(matrix.LIBRARIES) == {*capture.LIBRARIES, "torch"}
    assert [name for name, _ in matrix.of_torch()] == ["U-Net", "LSTM", "LSTM, bidirectional", "GRU"]


def test_the_table_of_estimators_says_who_is_best():
    tables = import_module("integration_tables")
    row = {"set": "iris", "seed": 0, "rows": 105, "nll": 0.2, "seconds": 1.0}
    ours, other = (
        row | {"contestant": "patchbayes", "score": 0.9},
        row | {"contestant": "mlp", "score": 0.8, "nll": 0.1},
    )
    ours["aurc"] = {"confidence": 0.01, "entropy": 0.02}
    record = {"rows": [ours, other], "commit": "abc", "command": "python x"}
    made = tables.sklearn_sets(record)
    assert "| iris, 105 | accuracy | 90.0 %; 0.200; 1.0 s | 80.0 %; 0.100; 1.0 s |  |" in made
    assert "best score on 1 and the best NLL on 0 of 1 sets" in made
    assert "| iris | 1.00 % | 2.00 % |" in tables.selective(record)


@pytest.mark.slow
def test_the_benchmark_of_estimators_runs_and_goes_on_where_it_stopped(tmp_path, monkeypatch, capsys):
    pytest.importorskip("sklearn", "1.6")
    sets = import_module("sklearn_sets")
    words = ["--seeds", "0", "--sets", "iris", "diabetes", "--results", str(tmp_path)]
    sets.main(words)
    capsys.readouterr()
    sets.main(words)
    assert capsys.readouterr().out == f"written: {tmp_path / 'sklearn_sets.json'}\n"
