"""`patchbayes train --noise`: the mixed scheme by one number, or the number chosen on the held-out part."""

import dataclasses

import numpy as np
import pytest

import patchbayes as pb
from command_line import command, strict_json
from patchbayes.bayesianizing.noise import train_with_chosen_noise, with_noise
from patchbayes.errors import PatchbayesError
from patchbayes.runs import RunFolder, TrainingConfig

BASIS = ["--model", "mlp:32", "--epochs", 6, "--batch-size", 32, "--held-out", 0.4, "--lr", 0.01, "-q"]


def written(path, wrong, seed=0):
    """Two classes on the sides of a plane, a share of the labels wrong: the more, the more a network can overfit."""
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(300, 20)).astype("float32")
    y = (x.sum(1) > 0).astype("int64") ^ (generator.random(300) < wrong)
    np.savez(path, x_train=x[:250], y_train=y[:250], x_test=x[250:], y_test=y[250:])
    return path


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    return written(tmp_path_factory.mktemp("table") / "table.npz", wrong=0.0)


def test_a_number_stands_for_the_rules_of_the_mixed_scheme(table, tmp_path):
    command("train", tmp_path / "run", "--data", f"npz:{table}", *BASIS, "--noise", 0.5)
    model = RunFolder.open(tmp_path / "run").model()
    methods = {name: site.method for name, site in pb.patched_sites(model).items()}
    assert set(methods.values()) <= set(pb.mixed(0.5).values())
    assert "ecmp(5)" in RunFolder.open(tmp_path / "run").training.method  # 0.1, half of the jitter, is ECMP's default
    command("train", tmp_path / "plain", "--data", f"npz:{table}", *BASIS, "--noise", 0)
    assert RunFolder.open(tmp_path / "plain").training.method == "vanilla"


def test_a_network_that_is_not_overconfident_is_left_without_patches(table, tmp_path):
    """After few steps it is less sure than it could be: one run, and its folder goes on where it was."""
    said = command("train", tmp_path / "run", "--data", f"npz:{table}", *BASIS, "--noise", "auto")
    assert [path.name for path in sorted((tmp_path / "run").iterdir())] == ["noise-0"]
    assert "at most 1" in said.out
    assert "chosen: no patches" in said.out
    assert f"next: patchbayes evaluate {tmp_path}/run/noise-0" in said.out
    again = command("train", tmp_path / "run", "--noise", "auto", "--resume", "-q", "--json").json
    assert again["noise"] == 0
    assert again["temperature"] <= 1
    refused = command("train", tmp_path / "run", "--data", f"npz:{table}", *BASIS, "--noise", "auto", code=1)
    assert "already" in refused.err


def test_an_overconfident_network_is_trained_with_noise_and_the_held_out_part_chooses(tmp_path):
    config = TrainingConfig(
        data=f"npz:{written(tmp_path / 'noisy.npz', wrong=0.3)}",
        model="mlp:64",
        epochs=30,
        batch_size=32,
        held_out=0.4,
        lr=0.01,
        prior_precision=0.01,
        report_epochs=30,
    )
    said = []
    trials = train_with_chosen_noise(config, tmp_path / "run", quiet=True, say=said.append)
    by_noise = {trial.noise: trial for trial in trials}
    assert by_noise[0.0].temperature > 1
    plain, one = by_noise[0.0], by_noise[1.0]
    first, second = (1.5, 2.0) if one.nll < plain.nll and one.temperature > 1 else (0.5, 0.25)
    levels = {0.0, 1.0, first} | ({second} if by_noise[first].nll < one.nll else set())
    assert set(by_noise) == levels
    assert trials[0].nll == min(trial.nll for trial in trials)
    assert len(said) == len(levels)
    for trial in trials:
        kept = strict_json((trial.folder / "config.json").read_text())["training"]
        assert kept["method"] == with_noise(config, trial.noise).method
        assert kept["patch_lr"] == (0.01 if trial.noise else None)


def test_with_adam_the_components_learn_faster_unless_told_otherwise():
    """Five times the rate for five components, but no more than 0.005; with SGD that hurts."""
    config = TrainingConfig(data="digits", model="mlp", optimizer="adam")
    for lr, expected in ((None, 5e-3), (5e-4, 2.5e-3), (3e-3, 5e-3), (0.02, 0.02)):
        assert with_noise(dataclasses.replace(config, lr=lr), 1.0).patch_lr == pytest.approx(expected)
    assert with_noise(dataclasses.replace(config, optimizer="sgd"), 1.0).patch_lr is None
    assert with_noise(dataclasses.replace(config, patch_lr=0.3), 1.0).patch_lr == 0.3
    assert with_noise(dataclasses.replace(config, patch_lr=0.3), 0.0).patch_lr is None


def test_what_cannot_be_is_refused(table, tmp_path):
    for words, expected in (
        (["--noise", "much"], "expected a number"),
        (["--noise", "1", "--method", "emp"], "leave out --method"),
        (["--noise", "1", "--sites", "norm"], "leave out --method and --sites"),
    ):
        assert expected in command("train", tmp_path / "x", "--data", f"npz:{table}", *BASIS, *words, code=2).err
    with pytest.raises(PatchbayesError, match="held_out is 0"):
        train_with_chosen_noise(TrainingConfig(data="digits", model="mlp", held_out=0.0), tmp_path / "x")
    assert not (tmp_path / "x").exists()
