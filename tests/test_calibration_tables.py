"""What the tables of trained networks say, from rows made by hand; and that nobody is scored on what it was fitted to."""

import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import nn

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"
MACHINE = {"processor": "a processor", "threads": 1}


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    before = set(sys.modules)
    monkeypatch.syspath_prepend(FOLDER)
    yield
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == FOLDER:
            del sys.modules[name]


def pair(seed, gain, error, nll=(3.0, 2.0, 1.5), commit="abc"):
    kinds = dict(zip(("original", "temperature", "bayesianized"), nll, strict=True))
    return {
        "seed": seed,
        "commit": commit,
        "nll": kinds,
        "gain": gain,
        "gain_error": error,
        "temperature": 1.5,
        "chosen": "learned",
    }


def test_pairs_count_the_runs_that_are_clearly_behind_and_name_the_worst():
    rows = {"one": [pair(0, 0.1, 0.01), pair(1, -0.03, 0.01)], "two": [pair(0, -0.01, 0.01, (2.0, 1.0, 1.0), "def")]}
    made = import_module("trained_tables").pairs({"rows": rows, "machine": MACHINE})
    assert "| one | 2 | 1.50 | 3.0000 | 2.0000 | 1.5000 | +0.0350 ± 0.0100 | learned, learned |" in made
    assert "| mean of all | | | 2.5000 | 1.5000 | 1.2500 | +0.2500 | |" in made
    assert "Of 3 runs, 1 are behind temperature scaling by more than two standard errors" in made
    assert "the worst is at -3.0 (one, seed 1)" in made
    assert "commits abc, def" in made


def test_pairs_that_all_chose_the_temperature_are_not_behind():
    made = import_module("trained_tables").pairs({"rows": {"one": [pair(0, 0.0, 0.0)]}, "machine": MACHINE})
    assert "Of 1 runs, 0 are behind" in made


def test_rivals_stand_in_the_order_of_their_scores():
    def row(title, nll, gain=0.0):
        scores = {"nll": nll, "ece": 0.02, "ece_floor": 0.01, "accuracy": 0.7, "gain": gain, "gain_error": 0.01}
        names = {"network": "cifar_resnet20", "title": title, "seed": 0, "scored": 500, "patch_share": 0.1}
        return names | scores | {"passes": 1, "trained_on": 0, "commit": "abc"}

    rows = [row("temperature scaling", 1.0), row("vector scaling", 1.0, -0.2), row("bayesianize_", 0.8, 0.2)]  # one tie
    made = import_module("trained_tables").rivals({"rows": rows, "machine": MACHINE}).splitlines()
    assert [line.split("|")[2].strip() for line in made[2:5]] == [
        "`bayesianize_`",
        "temperature scaling",
        "vector scaling",
    ]
    assert "+0.2000 ± 0.0100" in made[2]
    assert "±" not in made[3]


@pytest.mark.parametrize("number", [10, 60, 5000])
def test_held_out_examples_are_never_scored(number):
    curves = import_module("calibration_curves")
    values = torch.arange(100)
    subject = curves.Subject(nn.Identity(), values, values, lambda x: x)
    held_out = torch.cat([x for x, _ in subject.held_out(number)])
    scored, targets = subject.scored(number)
    assert len(held_out) == min(number, 50)
    assert not set(held_out.tolist()) & set(scored.tolist())
    assert torch.equal(scored, targets)


def test_a_table_without_a_record_says_so(tmp_path):
    text = "<!-- table: large_head -->\nold\n<!-- end table -->\n"
    made = import_module("readme_tables").render(text, tmp_path)
    assert made == "<!-- table: large_head -->\nNo record `results/large_head.json` yet.\n<!-- end table -->\n"
