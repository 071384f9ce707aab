"""Evaluation under corruption: against the unpatched network, on examples of all classes, from a folder."""

import shutil
from importlib import import_module

import numpy as np
import pytest
import torch

from command_line import command
from patchbayes.data import read
from patchbayes.data.corruptions import CORRUPTIONS
from patchbayes.runs import EvaluationOptions, RunFolder, evaluate

evaluation_module = import_module("patchbayes.runs.evaluate")  # not the function of that name


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder of two trained runs."""
    folder = tmp_path_factory.mktemp("runs")
    fast = "--data digits --model small_cnn --epochs 2 --lr 0.01 --batch-size 32"
    for name, method in {"vanilla": "vanilla", "ecmp": "ecmp(3, jitter=0.3)"}.items():
        command(f"train {fast} --method '{method}'", folder / name)
    return folder


def test_corruptions_are_measured_against_the_unpatched_network(runs, tmp_path):
    pytest.importorskip("imagecorruptions")
    for name in ("ecmp", "vanilla"):
        shutil.copytree(runs / name, tmp_path / name)
    line = "evaluate --draws 2 --corruptions --corruption-examples 40 --corruption-draws 2 --severities 3 --json"
    ecmp, vanilla = (record["corruptions"] for record in command(line, tmp_path / "ecmp", tmp_path / "vanilla").json)
    assert tuple(vanilla["names"]) == CORRUPTIONS
    assert vanilla["severities"] == [3]
    assert (vanilla["mce"], vanilla["reference"]) == (pytest.approx(100), "vanilla")
    assert len(vanilla["error"]) == len(vanilla["nll"]) == len(vanilla["ece"]) == 15
    ratios = [sum(ours) / sum(theirs) for ours, theirs in zip(ecmp["error"], vanilla["error"], strict=True)]
    assert ecmp["mce"] == pytest.approx(100 * np.mean(ratios))
    assert vanilla["num_examples"] == 40


def test_corrupted_examples_are_of_all_classes_where_those_of_a_class_stand_together(runs, tmp_path, monkeypatch):
    pytest.importorskip("imagecorruptions")
    shutil.copytree(runs / "vanilla", tmp_path / "vanilla")
    seen = []

    def watched(classifiers, split, *arguments, **options):
        seen.append(split)
        return corruption_scores(classifiers, split, *arguments, **options)

    corruption_scores = evaluation_module.corruption_scores
    monkeypatch.setattr(evaluation_module, "corruption_scores", watched)
    run = RunFolder.open(tmp_path / "vanilla")
    test = run.dataset().test
    evaluate(
        [run],
        EvaluationOptions(draws=1, curve=(), replicates=20, corruptions=True, severities=(1,), corruption_examples=10),
    )
    (split,) = seen
    assert torch.equal(split.targets, test.targets[torch.arange(10) * len(test) // 10])


def test_corrupted_images_of_a_folder(runs, tmp_path):
    """The folder holds the clean test images, so that every error under corruption is the clean one."""
    shutil.copytree(runs / "vanilla", tmp_path / "vanilla")
    images, labels = read("digits").test.fetch(torch.arange(60))
    folder = tmp_path / "digits-c"
    folder.mkdir()
    np.save(folder / "labels.npy", np.tile(labels.numpy(), 5))
    for name in CORRUPTIONS:
        np.save(folder / f"{name}.npy", np.tile(images.permute(0, 2, 3, 1).numpy(), (5, 1, 1, 1)))
    line = "evaluate --draws 2 --split test[:60] --severities 1,5 --json --corruption-folder"
    (record,) = command(line, folder, tmp_path / "vanilla").json
    found = record["corruptions"]
    assert np.array(found["error"]).shape == (15, 2)
    assert np.array(found["error"]) == pytest.approx(found["clean_error"])
    options = [
        EvaluationOptions(draws=1, curve=(), replicates=20, corruptions=folder, severities=(1,), corruption_draws=draws)
        for draws in (1, 4)
    ]
    one, four = (evaluate([RunFolder.open(runs / "ecmp")], chosen)[0].corruptions for chosen in options)
    assert one.mean("nll") > four.mean("nll")
