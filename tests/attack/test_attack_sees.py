"""The attack sees what it looks for: each kind of fault, made on purpose, is counted."""

import importlib
import subprocess
import sys
import time

import pytest
from attacking import CANARY, attack, survives

from patchbayes.errors import PatchbayesError

STATE = {"value": 0}


def refusing(message="this cannot be used: 3 is given, 4 is needed."):
    raise PatchbayesError(message)


def changing():
    STATE["value"] += 1
    refusing()


@pytest.mark.parametrize(
    ("run", "outcome", "fault"),
    [
        (lambda: {}["key"], "raw", "KeyError: 'key'"),
        (lambda: time.sleep(5), "hanging", "more than 0.2 s"),
        (lambda: subprocess.run([sys.executable, "-c", ""], check=True), "accepted", "executed subprocess.Popen"),
        (lambda: importlib.import_module(CANARY), "accepted", "executed exec <code object <module>"),
        (lambda: refusing("no"), "refused", "says only 'no'"),
        (changing, "refused", "refused, and changed something"),
    ],
)
def test_faults_are_seen(tmp_path, monkeypatch, run, outcome, fault):
    (tmp_path / f"{CANARY}.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    tally = attack("nothing", 1, lambda rng: run, unchanged=lambda: STATE["value"], seconds=0.2)
    assert tally.outcomes == {outcome: 1}
    assert any(fault in one for one in tally.faults), tally.faults


def test_what_is_in_order_is_no_fault(capsys):
    survives(attack("nothing", 3, lambda rng: refusing), capsys, refused=1)
    with pytest.raises(AssertionError):
        survives(attack("nothing", 3, lambda rng: refusing), capsys, refused=0, accepted=0.1)


def test_cases_depend_on_the_seed_alone():
    seen = []
    for seed in (0, 0, 1):
        attack("nothing", 2, lambda rng: lambda: seen.append(rng.random()), seed=seed)
    assert seen[:2] == seen[2:4] != seen[4:]
