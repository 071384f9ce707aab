"""`patchbayes bayesianize`: an ordinary checkpoint becomes a run folder that can be evaluated and that predicts."""

import re
import shutil

import pytest
import safetensors.torch
import torch

import patchbayes as pb
from command_line import command, strict_json
from patchbayes.bayesianizing.calibrate import Calibration
from patchbayes.patching import patch as patching
from patchbayes.patching.network import network_of
from patchbayes.runs import RunFolder

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
    """A run that held-out data chose, and what the command printed."""
    line = f"bayesianize {DATA} --method ecmp(2) --sites norm+output --held-out test[:120] --budget 4000"
    return place / "chosen", command(line, place / "net.safetensors", place / "chosen")


def test_held_out_data_choose(chosen, place):
    folder, found = chosen
    assert {path.name for path in folder.iterdir()} >= {"config.json", "metrics.jsonl", "patch.safetensors"}
    config = strict_json((folder / "config.json").read_text())
    assert (config["kind"], config["held_out"], config["method"]) == ("bayesianize", "test[:120]", "ECMP(K=2)")
    assert config["base"]["path"] == str(place / "net.safetensors")
    assert config["command"].startswith("patchbayes bayesianize")
    assert "on 120 held-out examples" in found.out
    assert re.search(rf"^temperature: .* {config['temperature']:.3f}$", found.out, re.M)
    assert found.out.splitlines()[-1] == f"next: patchbayes evaluate {folder} --split 'test[120:]'"
    assert found.err == ""
    assert "\x1b" not in found.out


def test_the_network_of_the_run_is_the_one_given_with_patches_on_it(chosen, place):
    model = RunFolder.open(chosen[0]).model()
    given = safetensors.torch.load_file(place / "net.safetensors")
    assert set(patching.patched_sites(model)) == {"bn1", "bn2", "fc"}
    assert torch.equal(model.conv1.weight, given["conv1.weight"])
    stored = patching.patched_sites(model)["fc"].posterior.stored("weight")
    assert stored.shape == (2, *given["fc.weight"].shape)


def test_a_page_shows_what_was_chosen(chosen):
    folder, found = chosen
    text = (folder / "bayesianize.html").read_text()
    config = strict_json((folder / "config.json").read_text())
    for title in ("Scores", "Reliability", "Held-out NLL along the way", "Cost, size, and how to load it"):
        assert f'<h2 id="{title.lower().replace(" ", "-").replace(",", "")}">{title}</h2>' in text
    load = f'patchbayes.load_(network, "{folder / "patch.safetensors"}")'
    assert load in found.out
    assert load.replace('"', "&quot;") in text
    assert f"Temperature of the average {config['temperature']:.3f}" in text
    assert text.count("<circle") == len(re.findall(r"^  x\S+ +[+-]\d", found.out, re.M)) > 2
    assert "reliability: share of correct answers at each confidence" in found.out
    assert "src=" not in text
    assert "http-equiv" in text
    if any(config["spread"].values()):
        assert all(f"<code>{name}</code>" in text for name in config["spread"])


def test_the_next_command_that_it_names_works(chosen):
    folder, found = chosen
    command(found.out.splitlines()[-1].removeprefix("next: patchbayes ") + " --draws 3")
    record = strict_json((folder / "evaluation.json").read_text())
    assert (record["method"], record["split"], record["num_examples"]) == ("ECMP(K=2)", "test[120:]", 779)
    assert record["sites"] == "norm+output"
    assert record["train_command"].startswith("patchbayes bayesianize")


def test_what_chose_is_not_scored(chosen):
    for split in ("test", "test[:120]", "test[119:]"):
        found = command("evaluate --draws 2 --split", split, chosen[0], code=1)
        assert f"was chosen on test[:120], and some of these examples would be scored (split {split})" in found.err


def test_both_file_formats_give_the_same_patches(place, tmp_path):
    for name in ("net.safetensors", "net.pt"):
        line = f"bayesianize {DATA} --held-out test[:100] --budget 1000 --json"
        found = command(line, place / name, tmp_path / name).json
        assert found["folder"] == str(tmp_path / name)
        assert found["num_held_out"] == 100
    one, other = (
        safetensors.torch.load_file(tmp_path / n / "patch.safetensors") for n in ("net.safetensors", "net.pt")
    )
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize(
    "option",
    [
        "--method spread(3)",
        "--budget 4000",
        "--draws 6",
        "--seed 1",
        "--sites norm",
        "--predict-cost 3",
        "--patch-bytes 1",
        "--patch-bytes 1 --small lowrank(1,2)",
        "--patch-bytes 1 --small none",
        "--views mirror",
        "--held-out test[:90]",
    ],
)
def test_every_option_changes_the_result(place, tmp_path, option):
    def run(options, folder):
        return command(f"bayesianize {DATA} --json {options}", place / "net.pt", folder).json

    usual = run("--held-out test[:80] --budget 1000", tmp_path / "usual")
    other = run(f"--held-out test[:80] --budget 1000 {option}", tmp_path / "other")
    for found in (usual, other):
        del found["folder"], found["seconds"]
    assert usual != other


def test_the_views_are_written_down_and_used(place, tmp_path):
    """In config.json, in the file, in the report; evaluate and predict average over them."""
    line = f"bayesianize {DATA} --held-out test[:100] --budget 2000 --views shifts(1,False)"
    said = command(line, place / "net.pt", tmp_path / "run").out
    assert "on 100 held-out examples, views: shifts(1, False) (5)" in said
    assert (
        "On 100 held-out examples, views: shifts(1, False) (5)" in (tmp_path / "run" / "bayesianize.html").read_text()
    )
    assert strict_json((tmp_path / "run" / "config.json").read_text())["views"] == "shifts(1, False)"
    run = RunFolder.open(tmp_path / "run")
    assert network_of(run.model()).calibration["views"] == "shifts(1, False)"
    command("evaluate --draws 10 --split test[100:140]", tmp_path / "run")
    record = strict_json((tmp_path / "run" / "evaluation.json").read_text())
    assert record["views"] == "shifts(1, False)"
    dataset = run.dataset()
    x, y = next(iter(dataset.batches(dataset.part("test[100:140]"), 40)))
    with pytest.warns(UserWarning, match="calibrated with views"):
        found = [pb.predict(run.model(), x, 10, views=views).log_probs for views in (run.views(), None)]
    nll, without = (-float(log_probs[torch.arange(40), y].mean()) for log_probs in found)
    assert record["metrics"]["nll"]["value"] == pytest.approx(nll, abs=1e-4)
    assert abs(nll - without) > 1e-3
    pb.save_pretrained(run.model(), tmp_path / "folder")
    assert (
        "on the views shifts(1, False); predict with the same views" in (tmp_path / "folder" / "README.md").read_text()
    )
    assert strict_json((tmp_path / "folder" / "patch_config.json").read_text())["calibration"]["views"] == (
        "shifts(1, False)"
    )
    config = tmp_path / "run" / "config.json"
    config.write_text(config.read_text().replace('"views": "shifts(1, False)"', '"views": "shifts(0)"'))
    assert "the name of views, such as shifts(1, True)" in command("evaluate", tmp_path / "run", code=1).err
    for name in ("turned", "mirror(1)", "shifts(x)", "shifts(1", "crops(2)"):
        assert (
            "expected" in command(line.replace("shifts(1,False)", name), place / "net.pt", tmp_path / "no", code=1).err
        )


def test_a_base_that_moved_or_changed_is_named(place, tmp_path):
    base = tmp_path / "net.pt"
    shutil.copy(place / "net.pt", base)
    command(f"bayesianize {DATA} --held-out test[:50] --budget 500", base, tmp_path / "run")
    weights = torch.load(base, weights_only=True)
    weights["state_dict"]["module.fc.bias"] += 1
    torch.save(weights, base)
    assert f"{base} is not the checkpoint that was patched" in command("evaluate", tmp_path / "run", code=1).err
    base.unlink()
    missing = command("evaluate", tmp_path / "run", code=1).err
    assert f"the checkpoint that was patched, {base}, is missing" in missing
    assert '"base" in config.json' in missing


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("net.pt run --held-out train", 1, "is part of what the network was trained on"),
        ("net.pt run --held-out ' train[:50]'", 1, "is part of what the network was trained on"),
        ("net.pt run --held-out held_out", 1, "is part of what the network was trained on"),
        ("net.pt run --held-out validation", 1, "no part 'validation'"),
        ("net.pt run", 2, "Missing option '--held-out'"),
        ("nosuch.pt run --held-out test", 1, "there is no file nosuch.pt"),
        ("net.pt trained --held-out test", 1, "trained already exists and is not an empty folder"),
        ("net.pt net.pt --held-out test", 1, "net.pt already exists"),
        ("net.pt run --held-out test --model mlp", 1, "missing in the file: norm0.weight"),
        ("net.pt run --held-out test --data diabetes", 1, "diabetes is a regression"),
        ("net.pt run --held-out test --method spread(1)", 1, "components"),
        ("net.pt run --held-out test --method nosuch", 1, "nosuch"),
        ("net.pt run --held-out test --predict-cost 0.5", 1, "predict_cost=0.5"),
        ("net.pt run --held-out test --patch-bytes 0", 2, "greater than or equal to 1"),
        ("net.pt run --held-out test --small nosuch", 1, "nosuch"),
        ("net.pt run --held-out test --sites norm --small none", 1, 'small and patch_bytes go with sites="auto"'),
        ("net.pt run --held-out test --budget 0", 2, "greater than or equal to 1"),
        ("trained/config.json run --held-out test", 1, "cannot be read as a checkpoint"),
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
        command("predict --format jsonl --risk 0.2 --risk-on test[120:]", chosen[0], place / "three.png").out
    )
    assert row.keys() >= {"class", "probability", "refer"}
    assert "only a training can be resumed" in command("train --resume", chosen[0], code=1).err


def test_a_run_without_patches_is_evaluated_and_asked(place, tmp_path, monkeypatch):
    """Where draws are not chosen: the file holds the temperature, and everything takes one pass of the network given."""
    images = pytest.importorskip("PIL.Image")
    monkeypatch.setattr(Calibration, "_gain", lambda self, *given: (0.0, 1.0, False))
    folder = tmp_path / "none"
    said = command(f"bayesianize {DATA} --held-out test[:120] --budget 2000", place / "net.safetensors", folder).out
    assert "size    no patches (those that were tried: " in said
    run = RunFolder.open(folder)
    model = run.model()
    assert patching.patched_sites(model) == {}
    given = safetensors.torch.load_file(place / "net.safetensors")
    assert all(torch.equal(model.state_dict()[name], value) for name, value in given.items())
    command("evaluate --split test[120:160] --draws 5", folder)
    record = strict_json((folder / "evaluation.json").read_text())
    assert (record["num_draws"], record["exact"], record["method"]) == (1, True, "vanilla")
    x, y = next(iter(run.dataset().batches(run.dataset().part("test[120:160]"), 40)))
    temperature = strict_json((folder / "config.json").read_text())["temperature"]
    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(model(x) / temperature, y)
    assert record["metrics"]["nll"]["value"] == pytest.approx(float(expected), abs=1e-4)
    pixels = run.dataset().test.fetch(torch.tensor([3]))[0][0, 0]
    images.fromarray(pixels.numpy()).save(tmp_path / "three.png")
    row = strict_json(command("predict --format jsonl", folder, tmp_path / "three.png").out)
    assert row.keys() >= {"class", "probability"}


def test_small_methods_are_those_that_are_named(place, tmp_path):
    def run(small):
        folder = tmp_path / small.partition("(")[0]
        options = f"--held-out test[:80] --budget 1000 --patch-bytes 1 --small {small}"
        return command(f"bayesianize {DATA} {options}", place / "net.pt", folder).out

    assert "LowRank(1, 2)" in run("lowrank(1,2)")
    assert "RankOne(2, unit)" in run("rankone(2)")
    without = run("none")
    assert "LowRank" not in without
    assert "RankOne" not in without
