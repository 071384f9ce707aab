"""`patchbayes predict`: images and rows in, answers out, as a stream."""

import csv
import io
import json
import os
import shutil

import pytest
import torch

from command_line import command, strict_json
from patchbayes import conformal, predict
from patchbayes.data import read
from patchbayes.metrics import threshold_at_risk
from patchbayes.patching.network import network_of
from patchbayes.prediction.predict import make_draws
from patchbayes.runs import RunFolder


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Trained runs on digits and on tables, with new pictures and rows to answer."""
    place = tmp_path_factory.mktemp("predict")
    _write_tables(place)
    fast = "--epochs 2 --lr 0.01 --batch-size 32"
    command(f"train {fast} --data digits --model small_cnn --method ecmp(3)", place / "digits")
    command(f"train {fast} --data digits --model small_cnn --method vanilla", place / "vanilla")
    command(f"train {fast} --model mlp --data csv:{place}/classes.csv#answer", place / "classes")
    command(f"train {fast} --model mlp --data csv:{place}/amounts.csv#amount", place / "amounts")
    _write_pictures(place / "pictures")
    return place


def _write_tables(place):
    generator = torch.Generator().manual_seed(0)
    rows = [(a, b, ("red", "blue")[a > b]) for a, b in torch.randn(80, 2, generator=generator).tolist()]
    for name, target, value in (
        ("classes", "answer", lambda a, b, color: "=1+1" if a + b > 0 else "=2+2"),
        ("amounts", "amount", lambda a, b, color: f"{10 + 5 * a + b:.3f}"),
    ):
        lines = [f"a,b,color,{target}", *(f"{a},{b},{color},{value(a, b, color)}" for a, b, color in rows)]
        (place / f"{name}.csv").write_text("\n".join(lines) + "\n")
    (place / "new.csv").write_text("note;color;b;a\nx;red;0.5;1.5\n;blue;-1;0.25\ny;red;0;0\n")
    (place / "numbers.csv").write_text("a,b\n1,2\n")
    (place / "green.csv").write_text("a,b,color\n1,2,red\n1,2,green\n")


def _write_pictures(folder):
    images = pytest.importorskip("PIL.Image")
    (folder / "deeper").mkdir(parents=True)
    raw, _ = read("digits").test.fetch(torch.arange(5))
    for i, pixels in enumerate(raw[:, 0].numpy()):
        name = f"deeper/{i}.PNG" if i == 4 else f"{i}.{'jpg' if i == 3 else 'png'}"
        images.fromarray(pixels).save(folder / name)
    images.fromarray(raw[0, 0].numpy()).resize((40, 40)).convert("RGB").save(folder / "large.jpg")
    (folder / "notes.txt").write_text("no picture")


def answers(line, *words, code=0):
    found = command(f"predict --format jsonl {line}", *words, code=code)
    return [strict_json(row) for row in found.out.splitlines()]


def predicted(run, inputs, draws):
    model = run.model()
    return predict(
        model, inputs, make_draws(model, network_of(model), draws, "balanced", None), likelihood=run.likelihood()
    )


def test_pictures_of_a_folder_are_answered_as_the_network_predicts(place):
    found = answers("--draws 7", place / "digits", place / "pictures")
    names = ["0.png", "1.png", "2.png", "3.jpg", "deeper/4.PNG", "large.jpg"]
    assert [row["input"] for row in found] == [str(place / "pictures" / name) for name in names]
    run = RunFolder.open(place / "digits")
    data = run.dataset()
    raw, _ = data.test.fetch(torch.tensor([0, 1, 2, 4]))
    expected = predicted(run, data.preparation.inputs(raw), 7)
    for i, row in enumerate(row for row in found if row["input"].lower().endswith("png")):
        assert row["class"] == data.classes[int(expected.probs[i].argmax())]
        assert row["probability"] == pytest.approx(float(expected.probs[i].max()), abs=1e-5)
        assert row["epistemic"] == pytest.approx(float(expected.mutual_information[i]), abs=1e-5)
        assert row["aleatoric"] == pytest.approx(float(expected.expected_entropy[i]), abs=1e-5)
    assert {row["draws"] for row in found} == {7}
    assert "refer" not in found[0]


def test_files_and_folders_come_in_the_order_given(place):
    files = [place / "pictures" / "2.png", place / "pictures" / "deeper", place / "pictures" / "0.png"]
    found = [row["input"] for row in answers("", place / "digits", *files)]
    assert found == [str(files[0]), str(files[1] / "4.PNG"), str(files[2])]


def test_a_table_a_csv_file_and_json_lines_say_the_same(place):
    words = (place / "digits", place / "pictures")
    table = command("predict", *words).out.splitlines()
    comma = list(csv.DictReader(io.StringIO(command("predict --format csv", *words).out)))
    lines = answers("", *words)
    assert table[0].split() == ["input", "class", "probability", "epistemic", "aleatoric", "draws"]
    for shown, cells, row in zip(table[1:], comma, lines, strict=True):
        assert shown.split()[:2] == [cells["input"], cells["class"]] == [row["input"], row["class"]]
        assert float(shown.split()[2]) == pytest.approx(row["probability"], rel=1e-3)
        assert float(cells["probability"]) == pytest.approx(row["probability"], rel=1e-5)
    assert "\x1b" not in "".join(table)


def test_rows_with_numbers_and_words_whatever_the_order_of_columns(place):
    found = answers("", place / "classes", place / "new.csv")
    assert [row["input"] for row in found] == ["new.csv:2", "new.csv:3", "new.csv:4"]
    run = RunFolder.open(place / "classes")
    assert run.config["data"]["features"] == ["a", "b", "color=blue", "color=red"]
    raw = torch.tensor([[1.5, 0.5, 0, 1], [0.25, -1, 1, 0], [0, 0, 0, 1]])
    expected = predicted(run, run.dataset().preparation.inputs(raw), 20).probs
    assert [row["class"] for row in found] == [("=1+1", "=2+2")[i] for i in expected.argmax(1).tolist()]
    assert [row["probability"] for row in found] == pytest.approx(expected.amax(1).tolist(), abs=1e-5)


def test_a_regression_answers_in_the_units_of_the_target(place):
    (row, *_) = answers("--draws 9", place / "amounts", place / "new.csv")
    run = RunFolder.open(place / "amounts")
    data = run.dataset()
    inputs = data.preparation.inputs(torch.tensor([[1.5, 0.5, 0, 1], [0.25, -1, 1, 0], [0, 0, 0, 1]]))
    expected = predicted(run, inputs, 9)
    (mean,), (std,) = data.preparation.target_mean, data.preparation.target_std
    assert row.keys() == {"input", "mean", "epistemic", "aleatoric", "draws"}
    assert row["mean"] == pytest.approx(float(expected.mean[0, 0]) * std + mean, rel=1e-4)
    assert row["epistemic"] == pytest.approx(float(expected.epistemic_variance[0, 0]) ** 0.5 * std, rel=1e-3)
    assert row["aleatoric"] == pytest.approx(std * float(run.likelihood().precision) ** -0.5, rel=1e-5)


def test_an_unpatched_network_answers_once_and_knows_no_epistemic_uncertainty(place):
    found = answers("", place / "vanilla", place / "pictures")
    assert {row["draws"] for row in found} == {1}
    assert {row["epistemic"] for row in found} == {0.0}
    assert min(row["aleatoric"] for row in found) > 0
    assert "answers once" in command("predict --tolerance 0.1", place / "vanilla", place / "pictures", code=1).err


def test_a_cell_that_a_spreadsheet_would_run_is_neutralized_in_csv_alone(place):
    rows = list(csv.DictReader(io.StringIO(command("predict --format csv", place / "classes", place / "new.csv").out)))
    assert {row["class"] for row in rows} <= {"'=1+1", "'=2+2"}
    assert all(row["class"].startswith("=") for row in answers("", place / "classes", place / "new.csv"))


@pytest.mark.parametrize("form", ["table", "jsonl", "csv"])
def test_answers_come_before_the_last_file_is_read(place, form):
    first = place / "pictures" / "0.png"
    words = (place / "digits", first, place / "pictures" / "1.png", place / "missing.png")
    found = command(f"predict --batch-size 2 --format {form}", *words, code=1)
    assert str(first) in found.out
    assert "1.png" in found.out
    assert found.err.splitlines()[-1].endswith(f"{place / 'missing.png'} is not there.")


def test_rows_come_before_a_file_that_is_missing(place):
    found = command("predict --batch-size 3", place / "classes", place / "new.csv", place / "missing.csv", code=1)
    assert [line.split()[0] for line in found.out.splitlines()] == ["input", "new.csv:2", "new.csv:3", "new.csv:4"]
    assert "missing.csv" in found.err


def test_the_batch_size_changes_when_rows_come_and_not_what_they_say(place):
    one, all_ = (answers(f"--batch-size {size}", place / "digits", place / "pictures") for size in (1, 64))
    assert [row["input"] for row in one] == [row["input"] for row in all_]
    assert [row["probability"] for row in one] == pytest.approx([row["probability"] for row in all_], abs=1e-4)
    late = command("predict --batch-size 64", place / "digits", place / "pictures", place / "missing.png", code=1)
    assert len(late.out.splitlines()) == len(all_) + 1  # one that cannot be read does not cost the others of its batch


def test_answers_below_the_threshold_of_a_risk_are_referred(place):
    run = RunFolder.open(place / "digits")
    data = run.dataset()
    (inputs, targets), *_ = data.batches(data.part("test[:600]"), 600)
    probs = predicted(run, inputs, 20).probs
    confidence, named = probs.max(1)
    threshold = threshold_at_risk(confidence.clamp_max(1), named == targets, 0.1)
    found = answers("--risk 0.1 --risk-on test[:600]", place / "digits", place / "pictures")
    assert 0 < threshold < 1  # so that there is something to see
    assert [row["refer"] for row in found] == [row["probability"] < threshold for row in found]
    assert all(row["refer"] for row in answers("--risk 0.0001", place / "digits", place / "pictures"))
    found = command("predict --risk 0.0001", place / "digits", place / "pictures")
    assert "no threshold could be shown to keep the risk below 0.0001" in found.err
    table = found.out.splitlines()
    assert all(line.endswith("refer") for line in table)


def test_a_tolerance_stops_the_drawing_of_sure_inputs(place):
    found = answers("--tolerance 0.02", place / "digits", place / "pictures")
    assert min(row["draws"] for row in found) < 400
    sharp = answers("--tolerance 0.00001", place / "digits", place / "pictures")
    assert sum(row["draws"] for row in sharp) > sum(row["draws"] for row in found)


def test_sets_and_intervals_of_a_coverage(place):
    run = RunFolder.open(place / "digits")
    batch, targets = read("digits").test.fetch(torch.arange(600))
    inputs = run.dataset().preparation.inputs(batch)
    found = conformal(predicted(run, inputs, 20), targets, 0.9)
    rows = answers("--coverage 0.9 --risk-on test[:600]", place / "digits", place / "pictures")
    for row in rows:
        assert len(row["set"]) <= 1 or row["set"][0] == row["class"]
        assert (row["class"] in row["set"]) == (1 - row["probability"] <= float(found.threshold))
    wide = answers("--coverage 0.997 --risk-on test", place / "digits", place / "pictures")
    assert sum(len(row["set"]) for row in wide) > sum(len(row["set"]) for row in rows)
    plain = answers("--coverage 0.9 --risk-on test[:600]", place / "vanilla", place / "pictures")
    assert all(isinstance(row["set"], list) for row in plain)
    table = command("predict --coverage 0.997 --risk-on test", place / "digits", place / "pictures").out
    assert " | " in table
    narrow, large = (
        answers(f"--coverage {c} --risk-on test", place / "amounts", place / "new.csv") for c in (0.5, 0.8)
    )
    for one, other in zip(narrow, large, strict=True):
        assert other["low"] < one["low"] < one["mean"] < one["high"] < other["high"]


def test_the_data_set_need_not_be_there_but_for_a_risk(place, tmp_path):
    shutil.copytree(place / "classes", tmp_path / "run")
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    config["data"]["spec"] = "csv:gone.csv#answer"
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    assert len(answers("", tmp_path / "run", place / "new.csv")) == 3
    assert "gone.csv is not there" in command("predict --risk 0.1", tmp_path / "run", place / "new.csv", code=1).err
    os.symlink(place / "classes.csv", tmp_path / "gone.csv")
    assert len(answers("--risk 0.3 --data-dir", tmp_path, tmp_path / "run", place / "new.csv")) == 3


def test_the_last_checkpoint_answers_otherwise_than_the_best(tmp_path, place):
    command(
        "train --data digits --model small_cnn --epochs 3 --lr 0.3 --patch-lr 1.5 --set sharing=0 --schedule constant --seed 3",
        tmp_path / "run",
    )
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    best, last = (answers(f"--checkpoint {which}", tmp_path / "run", place / "pictures") for which in ("best", "last"))
    assert (best == last) == rows[-1]["best"]
    assert not rows[-1]["best"]  # the learning rate is so large that the end is not the best


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("digits nosuch.png", 1, "nosuch.png is not there"),
        ("digits empty", 1, "holds no image"),
        ("digits new.csv", 1, "cannot be read as an image"),
        ("digits pictures/notes.txt", 1, "cannot be read as an image"),
        ("classes pictures/0.png", 1, "cannot be read as a CSV file"),
        ("classes numbers.csv", 1, "no column for the feature 'color=blue'"),
        ("classes green.csv", 1, "line 3: 'green' in column 'color'"),
        ("nosuch new.csv", 1, "is not a run folder"),
        ("classes new.csv --draws 0", 2, "greater than or equal to 1"),
        ("classes new.csv --draws 5 --tolerance 0.1", 1, "give one"),
        ("classes new.csv --batch-size 0", 2, "greater than or equal to 1"),
        ("classes new.csv --tolerance -1", 1, "above 0"),
        ("classes new.csv --risk 2", 1, "between 0 and 1"),
        ("classes new.csv --risk 0.1 --risk-on train", 1, "was trained on train"),
        ("classes new.csv --risk-on test", 2, "--risk-on is for --risk and --coverage"),
        ("classes new.csv --coverage 1.5", 1, "between 0 and 1"),
        ("classes new.csv --coverage 0.9 --risk-on train", 1, "was trained on train"),
        ("classes new.csv --coverage 0.99", 1, "at least 99 held-out examples"),
        ("amounts new.csv --risk 0.1", 1, "a risk is for classification"),
        ("classes new.csv --format xml", 2, "is not one of"),
        ("classes new.csv --checkpoint first", 2, "is not one of"),
    ],
)
def test_what_cannot_be_answered_is_said(place, monkeypatch, line, code, said):
    (place / "empty").mkdir(exist_ok=True)
    monkeypatch.chdir(place)
    found = command(f"predict {line}", code=code)
    assert said in found.err
    assert "Traceback" not in found.err
