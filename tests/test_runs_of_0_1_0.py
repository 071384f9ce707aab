"""Run folders and records that version 0.1.0 wrote: read, resumed, evaluated and reported as they were meant."""

import json
import shutil
from pathlib import Path

import pytest
import torch

import patchbayes as pb
from command_line import command, strict_json
from patchbayes.runs import EvaluationOptions, RunFolder, read_evaluation, train
from patchbayes.runs.record import EvaluationRecord

WRITTEN = Path(__file__).parent / "written_by_0_1_0"
EVALUATED = ("run-vanilla", "run-dropout", "run-ecmp")


@pytest.fixture
def folder(tmp_path):
    """A copy. Runs were made with two threads, which a resumed run takes over: on a busy machine they wait for each other."""
    shutil.copytree(WRITTEN, tmp_path / "old")
    for path in (tmp_path / "old").glob("*/config.json"):
        config = strict_json(path.read_text())
        if "machine" in config:
            config["machine"]["threads"] = 1
            path.write_text(json.dumps(config))
    return tmp_path / "old"


@pytest.mark.parametrize("name", EVALUATED)
def test_a_record_is_read_and_written_back_as_it_was(name):
    content = json.loads((WRITTEN / name / "evaluation.json").read_text())
    record = read_evaluation(WRITTEN / name)
    assert record.to_json() == content | {"views": None}  # which 0.1.0 did not have
    assert EvaluationRecord.from_json(record.to_json(), "again") == record


def test_the_settings_of_a_run_are_those_it_was_started_with():
    assert RunFolder(WRITTEN / "half-emp").training.method == "emp(3, jitter=0.3)"
    assert RunFolder(WRITTEN / "half-emp").training.sharing == 0.5
    assert RunFolder(WRITTEN / "run-ecmp").training.sites == "norm+output"
    assert RunFolder(WRITTEN / "run-vanilla").training.method == "vanilla"


def test_an_interrupted_run_goes_on_to_what_the_whole_run_is(folder):
    """Rows differ by rounding, which grows in 60 epochs and differs between processors; other draws differ far more."""
    begun = RunFolder(folder / "half-emp")
    assert len(begun.history()) == 5
    run = train(begun.training, begun.path, resume=True)
    whole = RunFolder(folder / "whole-emp")
    ours, theirs = run.history(), whole.history()
    assert len(ours) == len(theirs) == 60
    for one, other in zip(ours, theirs, strict=True):
        for key in ("epoch", "step", "lr"):
            assert one[key] == pytest.approx(other[key], rel=1e-12), key
        for key in ("loss", "nll", "kl", "held_out_nll"):
            assert one[key] == pytest.approx(other[key], rel=3e-3), key
        assert one["held_out_accuracy"] == pytest.approx(other["held_out_accuracy"], abs=0.02)
    for key, value in run.model("last").state_dict().items():
        torch.testing.assert_close(value, whole.model("last").state_dict()[key], rtol=0.01, atol=0.01)


def test_the_command_line_resumes_it_too(folder):
    found = command("train --resume --json", folder / "half-emp").json
    assert found["epoch"] == 60


@pytest.mark.parametrize("name", EVALUATED)
def test_a_network_answers_as_it_did(folder, name):
    before = read_evaluation(folder / name)
    command("evaluate --draws 5", folder / name)
    after = read_evaluation(folder / name)
    for metric, found in before.metrics.items():
        assert after.metrics[metric].value == pytest.approx(found.value, abs=1e-5), metric
    assert after.parameters == before.parameters
    assert after.method == before.method
    assert after.sites == before.sites
    assert after.diversity == before.diversity or after.diversity.disagreement == pytest.approx(
        before.diversity.disagreement, abs=1e-5
    )


def test_records_of_both_versions_stand_in_one_report(folder, tmp_path):
    command("evaluate --draws 5", folder / "run-ecmp")
    names = [folder / name for name in EVALUATED]
    command("report --format markdown -o", tmp_path / "report.md", *names)
    text = (tmp_path / "report.md").read_text()
    assert "ECMP(K=5)" in text
    assert "Dropout(0.1)" in text


def test_patches_for_a_checkpoint_are_read(folder):
    path = folder / "bayes-run" / "config.json"
    config = strict_json(path.read_text())
    config["base"]["path"] = str(folder / "vanilla.safetensors")
    path.write_text(json.dumps(config))
    run = RunFolder(folder / "bayes-run")
    network = run.model()
    assert {site.method.label for site in pb.patched_sites(network).values()} == {"ECMP(K=5)"}
    (row,) = run.history()
    data = run.dataset()
    inputs, targets = next(data.batches(data.part("test[:200]"), 200))
    log_probs = pb.predict(network, inputs, 20).log_probs
    assert -float(log_probs.gather(1, targets[:, None]).mean()) == pytest.approx(row["held_out_nll"], rel=0.01)


def test_the_old_names_of_modules_warn_and_still_work():
    with pytest.warns(DeprecationWarning, match=r"patchbayes\.training\.train is now patchbayes\.runs\.train"):
        from patchbayes.training import train as old_train
    with pytest.warns(DeprecationWarning, match=r"is now patchbayes\.runs\.EvaluationOptions"):
        from patchbayes.evaluation import Evaluating
    assert (old_train, Evaluating) == (train, EvaluationOptions)
    with pytest.raises(ImportError):
        from patchbayes.training import METHODS  # noqa: F401
