"""Every setting of a run, and every field of a method, changes something."""

import contextlib
import math
import os
import sys
import threading
from importlib import import_module

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import patchbayes as pb
from patchbayes.errors import PatchbayesError
from patchbayes.runs import TrainingConfig, train
from patchbayes.runs.data_order import EpochBatches
from small_runs import DEFAULT, same, tensors_of, write_npz, write_tables

training_module = import_module("patchbayes.runs.train")  # not the function of that name


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tables(tmp_path_factory.mktemp("data"))


@pytest.fixture
def settings(folder):
    return DEFAULT | {"data_dir": str(folder)}


# name: (another value, what else must be set for it to mean something)
CHANGES = {
    "model": ("mlp:9", {}),
    "held_out": (0.3, {}),
    "data_seed": (1, {}),
    "method": ("emp", {}),
    "sites": ("output", {}),
    "jitter_warmup": (1.0, {}),
    "objective": ("simplified", {}),
    "prior": ("learned", {}),
    "prior_precision": (9.0, {}),
    "lambdas": ((0.5, 0.5, 0.0, 0.0), {"objective": "simplified"}),
    "weight_decay": (0.5, {}),
    "output_precision": (9.0, {"data": "npz:numbers.npz"}),
    "learn_precision": (True, {"data": "npz:numbers.npz"}),
    "draws_per_step": (2, {}),
    "optimizer": ("adamw", {"weight_decay": 0.5}),
    "lr": (0.3, {}),
    "patch_lr": (0.3, {}),
    "sharing": (0.5, {}),
    "alternate": (1.0, {}),
    "learn": ("patches", {}),
    "component_workers": (1, {"method": "emp(3)", "learn": "patches"}),
    "momentum": (0.1, {"optimizer": "sgd"}),
    "nesterov": (True, {"optimizer": "sgd"}),
    "schedule": ("constant", {}),
    "milestones": ((0.1,), {"schedule": "step"}),
    "step_factor": (0.5, {"schedule": "step"}),
    "warmup": (1.0, {}),
    "epochs": (1, {}),
    "batch_size": (8, {}),
    "seed": (1, {}),
    "precision": ("bfloat16", {}),
}


@pytest.fixture(scope="module")
def trained(folder, tmp_path_factory):
    """The weights that a configuration gives, each trained once."""
    known = {}

    def weights(**settings):
        key = repr(sorted(settings.items()))
        if key not in known:
            path = tmp_path_factory.mktemp("run") / "run"
            train(TrainingConfig(data_dir=str(folder), **DEFAULT | settings), path)
            known[key] = tensors_of(path / "last.safetensors", "network.")
        return known[key]

    return weights


FIELDS = {
    "components": ("ecmp(5)", "ecmp(3)"),
    "rate": ("dropout(0.1)", "dropout(0.3)"),
    "jitter": ("ecmp(5)", "ecmp(5, jitter=0.3)"),
    "init": ("ecmp(5)", "ecmp(5, init='independent')"),
    "per_example": ("ecmp(5)", "ecmp(5, per_example=True)"),
    "scale": ("meanfield(0.1)", "meanfield(0.3)"),
    "rules": ("emp(5)", "norm: emp(5); output: ecmp(5)"),
}


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_of_a_method_changes_the_result(trained, name):
    one, other = FIELDS[name]
    assert not same(trained(method=one), trained(method=other))


@pytest.mark.parametrize("name", CHANGES)
def test_every_setting_that_decides_the_result_changes_it(trained, name):
    value, others = CHANGES[name]
    assert not same(trained(**others), trained(**others | {name: value}))


def test_every_setting_has_a_test():
    elsewhere = {
        "data", "data_dir", "target", "size", "split", "task", "columns", "augmentation", "device", "threads", "workers",
        "report_epochs", "eval_draws", "checkpoint_seconds", "checkpoint_steps", "tensorboard", "timeout", "same_draws",
    }  # fmt: skip
    assert set(TrainingConfig.__dataclass_fields__) == elsewhere | set(CHANGES)


def test_which_data_set(trained, folder, tmp_path):
    """data, data_dir, target, size, split and task decide what is read."""
    write_npz(tmp_path / "classes.npz", seed=1)
    run = train(TrainingConfig(data_dir=str(tmp_path), **DEFAULT), tmp_path / "run")
    assert not same(trained(), tensors_of(run.path / "last.safetensors", "network."))
    generator = np.random.default_rng(0)
    lines = ["a,b,c", *(f"{x:.3f},{y:.3f},{z:.3f}" for x, y, z in generator.normal(size=(40, 3)))]
    (tmp_path / "table.csv").write_text("\n".join(lines) + "\n")
    read = {}
    for name, settings in {
        "base": {"target": "b"},
        "target": {"target": "c"},
        "split": {"target": "b", "split": 1},
        "columns": {"target": "b", "columns": ("c:ignore",)},
    }.items():
        config = TrainingConfig(data=f"csv:{tmp_path}/table.csv", model="mlp:4", epochs=1, **settings)
        run = train(config, tmp_path / name)
        read[name] = (run.config["data"]["classes"], run.config["data"]["preparation"]["mean"])
        assert run.dataset().preparation.to_config() == run.config["data"]["preparation"]
    assert read["base"][0] == ["b"]
    assert read["target"][0] == ["c"]
    assert read["base"][1] != read["split"][1]
    assert len(read["base"][1]) == len(read["columns"][1]) + 1
    with np.load(folder / "classes.npz") as content:
        np.savez(tmp_path / "whole.npz", **content)
    config = TrainingConfig(data=f"npz:{tmp_path}/whole.npz", model="mlp:4", epochs=1, task="regression")
    assert train(config, tmp_path / "task").config["data"]["task"] == "regression"
    with pytest.raises(PatchbayesError, match="size means nothing for this data"):
        train(TrainingConfig(**DEFAULT, data_dir=str(folder), size=8), tmp_path / "size")


def test_augmentation(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, size=(30, 8, 8), dtype="uint8")
    labels = np.arange(30) % 2
    np.savez(tmp_path / "x.npz", x_train=pixels[:24], y_train=labels[:24], x_test=pixels[24:], y_test=labels[24:])
    config = {"data": f"npz:{tmp_path}/x.npz", "model": "small_cnn", "epochs": 1, "batch_size": 12}
    plain = train(TrainingConfig(**config), tmp_path / "plain")
    crop = train(TrainingConfig(**config, augmentation="crop"), tmp_path / "crop")
    assert crop.dataset().preparation.augmentation == "crop"
    assert not same(*(tensors_of(run.path / "last.safetensors", "network.") for run in (plain, crop)))


def test_settings_of_running_change_what_they_say_and_not_the_result(settings, tmp_path, monkeypatch, trained):
    saves, threads = [], []
    save_state = training_module.save_state
    getitem = EpochBatches.__getitem__

    def counted(*args):
        saves.append(args)
        save_state(*args)

    def noted(self, step):
        threads.append(torch.get_num_threads())
        (tmp_path / f"process-{os.getpid()}").touch()
        return getitem(self, step)

    monkeypatch.setattr(training_module, "save_state", counted)
    monkeypatch.setattr(EpochBatches, "__getitem__", noted)

    def run(name, **changes):
        saves.clear()
        threads.clear()
        for file in tmp_path.glob("process-*"):
            file.unlink()
        found = train(TrainingConfig(**settings | changes), tmp_path / name)
        assert same(tensors_of(found.path / "last.safetensors", "network."), trained())
        return found

    run("default")
    assert len(saves) == 2  # an epoch has three steps
    assert list(tmp_path.glob("process-*")) == [tmp_path / f"process-{os.getpid()}"]
    assert set(threads) == {1}
    run("steps", checkpoint_steps=2)
    assert len(saves) == 3 + 2
    run("seconds", checkpoint_seconds=0.0)
    assert len(saves) == 6 + 2
    run("never", checkpoint_seconds=None)
    assert len(saves) == 2
    run("workers", workers=1)
    assert tmp_path / f"process-{os.getpid()}" not in list(tmp_path.glob("process-*"))
    assert len(list(tmp_path.glob("process-*"))) == 2  # one for each epoch
    train(TrainingConfig(**settings, threads=2), tmp_path / "threads")  # the last bits may differ
    assert set(threads[-6:]) == {2}
    assert len(run("report", report_epochs=2).history()) == 1
    assert len(saves) == 1
    rows = [run(f"draws{draws}", eval_draws=draws).history()[-1] for draws in (1, 5)]
    assert rows[0]["held_out_nll"] != rows[1]["held_out_nll"]


def test_a_row_of_several_epochs_is_their_mean(settings, tmp_path):
    each = train(TrainingConfig(**settings | {"epochs": 3}), tmp_path / "each").history()
    both = train(TrainingConfig(**settings | {"epochs": 3}, report_epochs=2), tmp_path / "both").history()
    assert [row["epoch"] for row in both] == [2, 3]
    assert both[0]["nll"] == pytest.approx((each[0]["nll"] + each[1]["nll"]) / 2)
    assert both[1]["nll"] == pytest.approx(each[2]["nll"])


def test_the_device_setting_reaches_the_engine(settings, tmp_path, monkeypatch):
    import accelerate

    made = []
    original = accelerate.Accelerator

    def noted(**options):
        made.append(options["cpu"])
        return original(**options)

    monkeypatch.setattr(accelerate, "Accelerator", noted)
    for device in ("auto", "cpu"):
        train(TrainingConfig(**settings | {"epochs": 1}, device=device), tmp_path / device)
    assert made == [not torch.accelerator.is_available(), True]
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    train(TrainingConfig(**settings | {"epochs": 1}, device="auto"), tmp_path / "available")
    assert made[2:] == [False]


def test_tensorboard(settings, tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert not (train(TrainingConfig(**settings), tmp_path / "without").path / "tensorboard").exists()
    run = train(TrainingConfig(**settings, tensorboard=True), tmp_path / "with")
    events = EventAccumulator(str(run.path / "tensorboard")).Reload()
    shown = [(event.step, event.value) for event in events.Scalars("held_out_nll")]
    assert shown == [(row["step"], pytest.approx(row["held_out_nll"])) for row in run.history()]


def shown_on_a_terminal(monkeypatch, work):
    """What appears where standard error is a terminal while `work` runs."""
    pytest.importorskip("rich", reason="rich is not installed")
    master, slave = os.openpty()
    shown = []

    def watch():
        with contextlib.suppress(OSError):  # the end of the terminal
            while part := os.read(master, 4096):
                shown.append(part)

    watcher = threading.Thread(target=watch)
    watcher.start()
    with os.fdopen(slave, "w") as stderr, monkeypatch.context() as patched:
        patched.setenv("TERM", "xterm")
        patched.setattr(sys, "stderr", stderr)
        work()
    watcher.join()
    os.close(master)
    return b"".join(shown).decode()


def test_a_bar_on_a_terminal_unless_quiet(settings, tmp_path, monkeypatch):
    shown = shown_on_a_terminal(monkeypatch, lambda: train(TrainingConfig(**settings), tmp_path / "run"))
    assert "epoch 2: loss" in shown
    assert "100 %" in shown
    quiet = shown_on_a_terminal(monkeypatch, lambda: train(TrainingConfig(**settings), tmp_path / "quiet", quiet=True))
    assert quiet == ""


def test_nothing_is_shown_where_the_output_is_piped(settings, tmp_path, capfd):
    train(TrainingConfig(**settings), tmp_path / "run")
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""


# ---- regression


@pytest.mark.parametrize("method", ["vanilla", "emp"])
def test_regression_chooses_by_rmse_in_the_targets_units(settings, tmp_path, method):
    settings |= {"data": "npz:numbers.npz", "epochs": 25, "method": method, "lr": 0.1}
    settings |= {"patch_lr": 0.1} if method == "emp" else {}
    run = train(TrainingConfig(**settings, output_precision=4.0), tmp_path / "run")
    rows = run.history()
    rmse = [row["held_out_rmse"] for row in rows]
    assert min(rmse) < 0.6 * rmse[0]
    best = [row["epoch"] for row in rows if row["best"]][-1]
    assert rmse[best - 1] == min(rmse)
    assert run.config["data"]["preparation"]["target_std"][0] > 5
    likelihood = run.likelihood()
    assert isinstance(likelihood, pb.likelihoods.Gaussian)
    assert float(likelihood.precision) == pytest.approx(4.0)


def test_a_learned_precision_belongs_to_its_checkpoint(settings, tmp_path):
    settings |= {"data": "npz:numbers.npz", "epochs": 30, "learn_precision": True, "lr": 0.3, "schedule": "constant"}
    run = train(TrainingConfig(**settings), tmp_path / "run")
    rows = run.history()
    best = [row for row in rows if row["best"]][-1]
    assert best is not rows[-1]
    assert float(run.likelihood("best").precision) == pytest.approx(best["output_precision"])
    assert float(run.likelihood("last").precision) == pytest.approx(rows[-1]["output_precision"])
    saved = load_file(run.path / "last.safetensors")["likelihood.log_precision"]
    assert math.exp(float(saved)) == pytest.approx(rows[-1]["output_precision"])
    assert rows[-1]["output_precision"] != pytest.approx(1.0, rel=0.05)
