"""`patchbayes bayesianize`: an ordinary checkpoint becomes a run folder that can be evaluated and that predicts."""

import shutil

import pytest
import safetensors.torch
import torch

from command_line import command, strict_json
from patchbayes import patching
from patchbayes.training import RunFolder

DATA = "--model small_cnn --data digits"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A trained network, saved as others save theirs."""
    place = tmp_path_factory.mktemp("bayesianize")
    command("train --data digits --model small_cnn --method vanilla --epochs 4 --lr 0.01", place / "trained")
    weights = RunFolder.open(place / "trained").model().state_dict()
    safetensors.torch.save_file(weights, place / "net.safetensors")
    torch.save({"state_dict": {f"module.{key}": value for key, value in weights.items()}}, place / "net.pt")
    return place


@pytest.fixture(scope="module")
def chosen(place):
    """A run whose jitter was chosen on held-out data, and what the command printed."""
    line = f"bayesianize {DATA} -K 2 --held-out test[:60] --epochs 0.5"
    return place / "chosen", command(line, place / "net.safetensors", place / "chosen")


def test_the_jitter_is_chosen_on_held_out_data(chosen, place):
    folder, found = chosen
    assert {path.name for path in folder.iterdir()} >= {"config.json", "metrics.jsonl", "patch.safetensors"}
    config = strict_json((folder / "config.json").read_text())
    assert (config["kind"], config["held_out"], config["method"]) == ("bayesianize", "test[:60]", "ECMP(K=2)")
    assert config["base"]["path"] == str(place / "net.safetensors")
    assert config["command"].startswith("patchbayes bayesianize")
    assert "(chosen)" in found.out
    assert "on 60 held-out examples" in found.out
    assert found.out.splitlines()[-1] == (
        f"next: patchbayes evaluate {folder} --split 'test[60:]' --temperature-on 'test[:60]'"
    )
    assert found.err == ""
    assert "\x1b" not in found.out


def test_the_network_of_the_run_is_the_one_given_with_patches_on_it(chosen, place):
    model = RunFolder.open(chosen[0]).model()
    given = safetensors.torch.load_file(place / "net.safetensors")
    assert set(patching.patched_sites(model)) == {"bn1", "bn2", "fc"}
    assert torch.equal(model.conv1.weight, given["conv1.weight"])
    stored = patching.patched_sites(model)["fc"].posterior.stored("weight")
    assert stored.shape == (2, *given["fc.weight"].shape)
    assert not torch.equal(stored[0], stored[1])


def test_the_next_command_that_it_names_works(chosen):
    folder, found = chosen
    command(found.out.splitlines()[-1].removeprefix("next: patchbayes ") + " --draws 3")
    record = strict_json((folder / "evaluation.json").read_text())
    assert (record["method"], record["split"], record["num_examples"]) == ("ECMP(K=2)", "test[60:]", 839)
    assert record["sites"] == "norm+output"
    assert record["temperature"]["fitted_on"] == "test[:60]"
    assert record["train_command"].startswith("patchbayes bayesianize")


def test_what_the_jitter_was_chosen_on_is_not_scored(chosen):
    for split in ("test", "test[:60]", "test[59:]"):
        found = command("evaluate --draws 2 --split", split, chosen[0], code=1)
        assert f"was chosen on test[:60], and some of these examples would be scored (split {split})" in found.err


def test_without_held_out_data_the_default_jitter_is_taken_and_said(place):
    found = command(f"bayesianize {DATA} --epochs 0.25 --method emp --sites norm", place / "net.pt", place / "default")
    assert "the documented default: no held-out data" in found.out
    assert found.out.splitlines()[-1] == f"next: patchbayes evaluate {place / 'default'}"
    (record,) = command("evaluate --draws 2 --json", place / "default").json
    assert (record["method"], record["parameters"]["patched_sites"]) == ("EMP(K=5)", 2)
    assert record["temperature"] is None


def test_both_file_formats_give_the_same_patches(place, tmp_path):
    for name in ("net.safetensors", "net.pt"):
        found = command(f"bayesianize {DATA} --epochs 0.25 --json", place / name, tmp_path / name).json
        assert found["folder"] == str(tmp_path / name)
        assert found["jitter_source"] == "default"
    one, other = (
        safetensors.torch.load_file(tmp_path / n / "patch.safetensors") for n in ("net.safetensors", "net.pt")
    )
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize(
    "option",
    ["-K 3", "--jitter 0.4", "--epochs 0", "--lr 0.1", "--batch-size 32", "--seed 1", "--sites norm", "--method emp"],
)
def test_every_option_changes_the_patches(place, tmp_path, option):
    usual = place / "usual"
    if not usual.exists():
        command(f"bayesianize {DATA} --epochs 0.25", place / "net.pt", usual)
    command(f"bayesianize {DATA} --epochs 0.25 {option}", place / "net.pt", tmp_path / "run")
    one, other = (safetensors.torch.load_file(folder / "patch.safetensors") for folder in (usual, tmp_path / "run"))
    assert one.keys() != other.keys() or any(not torch.equal(one[key], other[key]) for key in one)


def test_a_base_that_moved_or_changed_is_named(chosen, place, tmp_path):
    base = tmp_path / "net.pt"
    shutil.copy(place / "net.pt", base)
    command(f"bayesianize {DATA} --epochs 0 --jitter 0.1", base, tmp_path / "run")
    weights = torch.load(base, weights_only=True)
    weights["state_dict"]["module.fc.bias"] += 1
    torch.save(weights, base)
    assert f"{base} is not the checkpoint that was patched" in command("evaluate", tmp_path / "run", code=1).err
    base.unlink()
    missing = command("evaluate", tmp_path / "run", code=1).err
    assert f"the checkpoint that was patched, {base}, is not there" in missing
    assert '"base" in config.json' in missing


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("net.pt run --held-out train", 1, "is of what the network was trained on"),
        ("net.pt run --held-out ' train[:50]'", 1, "is of what the network was trained on"),
        ("net.pt run --held-out held_out", 1, "is of what the network was trained on"),
        ("net.pt run --held-out validation", 1, "no part 'validation'"),
        ("nosuch.pt run", 1, "there is no file nosuch.pt"),
        ("net.pt trained", 1, "trained is there already and not an empty folder"),
        ("net.pt net.pt", 1, "net.pt is there already"),
        ("net.pt run --model mlp", 1, "missing in the file: norm0.weight"),
        ("net.pt run --data diabetes", 1, "diabetes is a regression"),
        ("net.pt run --jitter -1", 1, "jitter"),
        ("net.pt run --epochs -1", 1, "epochs"),
        ("net.pt run -K 1", 1, "components"),
        ("net.pt run --epochs 0 --lr 0.1", 2, "--lr is for training the patches"),
        ("net.pt run --method dropout", 2, "is not one of"),
        ("trained/config.json run", 1, "cannot be read as a checkpoint"),
    ],
)
def test_what_cannot_be_bayesianized_is_said_and_nothing_is_written(place, monkeypatch, line, code, said):
    monkeypatch.chdir(place)
    found = command(f"bayesianize {DATA} {line}", code=code)
    assert said in found.err
    assert found.out == ""
    assert not (place / "run").exists()


def test_it_predicts_and_refers_on_a_part_that_is_named(chosen, place):
    images = pytest.importorskip("PIL.Image")
    pixels = RunFolder.open(chosen[0]).dataset().test.fetch(torch.tensor([3]))[0][0, 0]
    images.fromarray(pixels.numpy()).save(place / "three.png")
    assert "held no examples out" in command("predict --risk 0.1", chosen[0], place / "three.png", code=1).err
    row = strict_json(
        command("predict --format jsonl --risk 0.2 --risk-on test[60:]", chosen[0], place / "three.png").out
    )
    assert row.keys() >= {"class", "probability", "refer"}
    assert "only a training can be resumed" in command("train --resume", chosen[0], code=1).err
