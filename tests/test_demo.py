"""patchbayes demo: the direction of its story on a small scale, its table, its page, and going on where it was."""

import dataclasses
import json
import re

import pytest
import torch

import patchbayes as pb
from command_line import command
from patchbayes.cli.demo import demo_record
from patchbayes.cli.demo_study import fashion, fit, held_out_batches
from patchbayes.cli.demo_table import COLUMNS, OWN, best_of, finding, in_numbers, lines_of_table, merged, titled
from patchbayes.cli.reliability import reliability_picture
from patchbayes.data import read
from patchbayes.data.small_images import SMALL_CORRUPTIONS, corrupt_small
from patchbayes.errors import PatchbayesError
from patchbayes.metrics import accuracy, expected_calibration_error, nll
from patchbayes.nets import small_cnn
from patchbayes.objective import parameter_groups

# What the direction of the story needs at least. Ten seeds leave at least twice as much.
EXCESS, LESS_ECE, LESS_NLL, LESS_ACCURACY = 0.05, 0.025, 0.035, 0.05


def before_and_after(seed):
    """A small network trained on 300 images until it fits them, without and with patches."""
    material = dataclasses.replace(fashion(seed, train=300, corrupted=1), batch=32, learning_rate=3e-3)
    held_out, (x, y) = held_out_batches(material), material.test
    scores = []
    for patches in (False, True):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = small_cnn(1, 10, 14)
        if patches:
            pb.patch_(model, pb.mixed(), generator=torch.Generator().manual_seed(seed))
        rates = {"lr": material.learning_rate}
        parameters = parameter_groups(model, patch_lr=5e-3, **rates) if patches else model.parameters()
        fit(model, material, 40, seed, torch.optim.Adam(parameters, **rates))
        if patches:
            pb.calibrate_(model, held_out, draws=5, budget=2000, seed=seed)
        prediction = pb.predict(model, x, draws="mean")
        scores.append(
            {
                "nll": nll(prediction.log_probs, y),
                "ece": expected_calibration_error(prediction.probs, y),
                "accuracy": accuracy(prediction.probs, y),
                "excess": float(prediction.confidence.mean()) - accuracy(prediction.probs, y),
            }
        )
    return scores


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_network_is_overconfident_and_training_with_patches_calibrates_it(seed):
    before, after = before_and_after(seed)
    assert before["excess"] > EXCESS
    assert after["ece"] < before["ece"] - LESS_ECE
    assert after["nll"] < before["nll"] - LESS_NLL
    assert after["accuracy"] > before["accuracy"] - LESS_ACCURACY


def test_the_bundled_images_are_small_and_balanced():
    data = read("fashion", held_out=1 / 3)
    assert data.input_shape == (1, 14, 14)
    assert [len(part) for part in (data.train, data.held_out, data.test)] == [2000, 1000, 2000]
    assert data.test.targets.bincount().tolist() == [200] * 10
    assert torch.cat([data.train.targets, data.held_out.targets]).bincount().tolist() == [300] * 10
    assert data.classes[0] == "T-shirt/top"
    with pytest.raises(PatchbayesError, match="'fashion' alone"):
        read("fashion:somewhere")


@pytest.mark.parametrize("name", SMALL_CORRUPTIONS)
def test_corruptions_grow_with_severity_and_repeat(name):
    images, _ = read("fashion").test.fetch(torch.arange(50))
    distances = []
    for severity in (1, 2, 3):
        changed = corrupt_small(images, name, severity, seed=3)
        assert changed.dtype == torch.uint8
        assert changed.shape == images.shape
        assert torch.equal(changed, corrupt_small(images, name, severity, seed=3))
        distances.append(float((changed.float() - images.float()).abs().mean()))
    assert 0 < distances[0] < distances[1] < distances[2]
    with pytest.raises(PatchbayesError, match="severity 4"):
        corrupt_small(images, name, 4)


@pytest.fixture(scope="module")
def record():
    return demo_record()


def test_the_record_is_the_committed_one(record):
    from pathlib import Path

    results = Path(__file__).resolve().parent.parent / "results"
    assert json.loads((results / "regime_fashion.json").read_text()) == record
    assert "dirty" not in record["commit"]


def test_the_table_fits_and_marks_the_best_and_the_rivals_that_win(record):
    rows = titled(record["seeds"], record)
    assert next(iter(rows)) == "original"
    assert set(OWN) < set(rows)
    lines = lines_of_table(rows, color=False)
    assert max(map(len, lines)) <= 100
    assert sum(line.count("*") for line in lines) >= len(COLUMNS)
    assert "\033" not in "".join(lines)
    assert "\033[1m" in "".join(lines_of_table(rows, color=True))
    worse = {**rows, "rival": {**rows["original"], "accuracy": 1.0}}
    assert best_of(worse, COLUMNS[0]) == {"rival"}
    assert "A rival is best in: right %, clean (rival)" in "\n".join(lines_of_table(worse, color=False))
    equal, other = ({**rows, OWN[1]: {**rows[OWN[2]], "nll": rows[OWN[2]]["nll"] + more}} for more in (0.0, 0.1))
    assert "Rows (b) are equal" in lines_of_table(equal, color=False)[-1]
    assert "Rows (b) are equal" not in "\n".join(lines_of_table(other, color=False))


def test_the_first_sentence_and_the_scores_below_it_have_the_numbers(record):
    rows = titled(record["seeds"][:1], record)
    sentence, scores = finding(rows, 1.0), in_numbers(rows)
    for row in (rows["original"], rows[OWN[2]]):
        assert f"claims {100 * row['confidence']:.0f} % and is right on {100 * row['accuracy']:.0f} %" in sentence
        assert f"{100 * row['ece']:.1f} %" in scores
        assert f"{row['nll']:.3f}" in scores
    assert ("too sure" in sentence) == (rows["original"]["confidence"] > rows["original"]["accuracy"])
    assert len(scores) <= 100


def test_bins_of_several_seeds_are_averaged_by_count():
    assert merged([[[1, 0.92, 1.0]], [[3, 0.94, 0.0], [2, 0.3, 0.5]]]) == [
        [2, 0.3, 0.5],
        [4, pytest.approx(0.935), 0.25],
    ]


def test_the_picture_has_a_bar_for_each_bin():
    picture = reliability_picture({"before": {"reliability": [[5, 0.97, 0.5], [5, 0.2, 0.2]], "ece": 0.2}})
    assert picture.count("<rect") == 2
    assert "before, ECE 20.0 %" in picture


@pytest.mark.slow
def test_the_command_writes_table_and_page_and_goes_on_where_it_was(tmp_path):
    folder = tmp_path / "demo"
    printed = command("demo", folder, "--epochs", 1).out
    assert re.match(r"An ordinary network that gets \d+ % of its training images right is ", printed)
    assert max(len(line) for line in printed.splitlines()[1:] if "page:" not in line) <= 100
    page = (folder / "report.html").read_text()
    assert "Bold: best of its column." in page
    assert "<svg" in page
    assert "<script" not in page
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*.json")}
    assert len(before) == 3
    again = command("demo", folder, "--epochs", 1, "--json").json
    assert {path: path.stat().st_mtime_ns for path in folder.glob("*.json")} == before
    assert again["finding"] == printed.splitlines()[0]
    assert list(again["live"]) == list(again["record"])
