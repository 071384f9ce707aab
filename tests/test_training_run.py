"""train from end to end: the run folder, every setting changes something, members of an ensemble, regression, bad input."""

import contextlib
import copy
import json
import math
import os
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import patchbayes as pb
from patchbayes.data import read
from patchbayes.errors import PatchbayesError
from patchbayes.nets.named import build_net
from patchbayes.training import RunFolder, TrainingConfig, train
from patchbayes.training import training as training_module
from patchbayes.training.data_order import EpochBatches
from patchbayes.training.data_record import data_record
from patchbayes.training.ordinary_checkpoint import sha256_of
from patchbayes.training.patched_net import patched_net
from patchbayes.training.schedule import learning_rate_factor


def write_npz(path: Path, seed: int = 0, task: str = "classification") -> None:
    """A small table: three classes, or two targets of different size."""
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(60, 4)).astype("float32")
    noise = generator.normal(size=60).astype("float32")
    if task == "classification":
        y = (x[:, 0] + 0.3 * noise > 0).astype("int64") + (x[:, 1] > 0.5)
    else:
        y = np.stack([100 + 10 * x[:, 0] + noise, x[:, 1] * x[:, 2]], axis=1)
    np.savez(path, x_train=x[:48], y_train=y[:48], x_test=x[48:], y_test=y[48:])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("data")
    write_npz(path / "classes.npz")
    write_npz(path / "numbers.npz", task="regression")
    return path


@pytest.fixture
def settings(folder):
    return {"data": "npz:classes.npz", "data_dir": str(folder), "model": "mlp:8", "epochs": 2, "batch_size": 16}


def rows_of(run):
    """The rows of metrics without what depends on the clock."""
    return [{key: value for key, value in row.items() if "seconds" not in key} for row in run.history()]


def tensors_of(path, start=""):
    return {key: value for key, value in load_file(path).items() if key.startswith(start)}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


# ---- the run folder


@pytest.mark.parametrize("method", ["vanilla", "dropout", "emp", "ecmp", "dropconnect", "meanfield", "ensemble"])
def test_every_method_trains_and_comes_back_out_of_its_folder(settings, tmp_path, method):
    settings |= {"method": method, "epochs": 12, "lr": 0.01}
    run = train(TrainingConfig(**settings), tmp_path / "run")
    assert {path.name for path in run.path.iterdir()} == {
        ".lock", "best.safetensors", "config.json", "last.safetensors", "log.txt", "metrics.jsonl"
    }  # fmt: skip
    rows = run.history()
    assert [row["epoch"] for row in rows] == list(range(1, 13))
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert rows[-1]["loss"] == pytest.approx(rows[-1]["nll"] + rows[-1]["kl"] / 43)
    dataset = run.dataset()
    inputs, targets = next(dataset.batches(dataset.held_out, 100))
    best = min(range(12), key=lambda epoch: rows[epoch]["held_out_nll"])
    assert rows[best]["best"]
    for which, epoch in (("best", best), ("last", 11)):
        network = run.model(which)
        assert not network.training
        if method == "vanilla":
            log_probs = network(inputs).detach().log_softmax(1)
        else:
            log_probs = pb.predict(network, inputs, 5).log_probs
        nll = -float(log_probs.gather(1, targets[:, None]).mean())
        assert nll == pytest.approx(rows[epoch]["held_out_nll"], rel=1e-4)


def test_a_network_learns_digits(tmp_path):
    config = TrainingConfig(data="digits", model="small_cnn", method="ecmp", epochs=6, batch_size=64, lr=3e-3)
    rows = train(config, tmp_path / "run").history()
    assert rows[-1]["held_out_accuracy"] > 0.8
    assert rows[-1]["held_out_nll"] < 1.5 < rows[0]["held_out_nll"]


def test_the_same_configuration_gives_the_same_bits_and_leaves_the_process_as_it_was(settings, tmp_path):
    config = TrainingConfig(**settings, threads=2)
    torch.set_num_threads(1)
    before = torch.get_rng_state()
    runs = [train(config, tmp_path / name) for name in "ab"]
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == 1
    assert float(torch.tensor(1e-310, dtype=torch.float64) * 1) > 0  # denormal numbers are what they were
    assert rows_of(runs[0]) == rows_of(runs[1])
    for name in ("best", "last"):
        assert same(*(tensors_of(run.path / f"{name}.safetensors") for run in runs))


def test_config_json_holds_the_resolved_configuration(settings, tmp_path):
    run = train(TrainingConfig(**settings), tmp_path / "run")
    content = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (content["schema"], content["kind"], content["model"]) == (1, "train", "mlp:8")
    assert TrainingConfig.from_json(content["training"]) == run.training == TrainingConfig(**settings)
    assert content["data"]["num_train"] == 43
    assert content["data"]["input_shape"] == [4]
    assert content["versions"]["torch"] == torch.__version__
    assert "patched 3 sites" in (tmp_path / "run" / "log.txt").read_text()
    with safe_open(tmp_path / "run" / "last.safetensors", "pt") as file:
        assert json.loads(file.metadata()["patchbayes"])["format"] == "patchbayes-training-1"


def test_the_best_checkpoint_is_an_ordinary_file_of_the_package(settings, tmp_path):
    run = train(TrainingConfig(**settings), tmp_path / "run")
    network = build_net("mlp:8", 3, (4,))
    pb.load_(network, run.path / "best.safetensors")
    assert same(network.state_dict(), run.model().state_dict())


def test_the_dataset_is_prepared_as_in_the_run_and_may_have_moved(settings, tmp_path, folder):
    run = train(TrainingConfig(**settings), tmp_path / "run")
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    with np.load(folder / "classes.npz") as content:
        arrays = dict(content)
    np.savez(moved / "classes.npz", **arrays | {"x_train": arrays["x_train"] + 5})
    dataset = run.dataset(moved)
    assert dataset.preparation == run.dataset().preparation  # not that of the changed examples
    assert dataset.train.fetch(torch.tensor([0]))[0].mean() > 3
    np.savez(moved / "classes.npz", **arrays | {"x_train": arrays["x_train"][:, :3], "x_test": arrays["x_test"][:, :3]})
    with pytest.raises(PatchbayesError, match=r"is not the data set .*input_shape was \[4\], and is now \[3\]"):
        run.dataset(moved)


def test_history_leaves_out_a_line_that_is_being_written(settings, tmp_path):
    run = train(TrainingConfig(**settings), tmp_path / "run")
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 3, "lo')
    assert len(run.history()) == 2
    (run.path / "metrics.jsonl").write_text("{broken\n")
    with pytest.raises(PatchbayesError, match="is damaged"):
        run.history()


def test_without_a_held_out_part_the_best_is_the_last(settings, tmp_path):
    run = train(TrainingConfig(**settings, held_out=0.0), tmp_path / "run")
    assert "held_out_nll" not in run.history()[0]
    assert [row["best"] for row in run.history()] == [True, True]
    assert same(run.model("best").state_dict(), run.model("last").state_dict())


def test_folders_that_are_no_runs(tmp_path):
    with pytest.raises(PatchbayesError, match=r"is not a run folder: it has no config.json"):
        RunFolder.open(tmp_path)
    for text, message in (
        ("{", "is not the configuration of a run"),
        ("[]", "is not the configuration of a run"),
        ('{"schema": 1, "kind": "train"}', "is not the configuration of a run"),
        ('{"schema": 2, "kind": "train", "model": "mlp", "data": {}, "training": {}}', "of another version"),
        (
            '{"schema": 1, "kind": "other", "model": "mlp", "data": {}, "training": {}, "base": {}}',
            "of another version",
        ),
    ):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(PatchbayesError, match=message):
            RunFolder(tmp_path)


def test_a_run_without_checkpoint_says_so(settings, tmp_path):
    run = train(TrainingConfig(**settings), tmp_path / "run")
    (run.path / "best.safetensors").unlink()
    with pytest.raises(PatchbayesError, match=r"has no best.safetensors yet"):
        run.model()
    with pytest.raises(PatchbayesError, match='give "best" or "last"'):
        run.model("worst")


# ---- kind "bayesianize"


@pytest.fixture
def bayesianized(settings, tmp_path):
    """A run folder as bayesianizing leaves it: an ordinary checkpoint, and patches for it."""
    data = train(TrainingConfig(**settings, method="vanilla"), tmp_path / "vanilla").dataset()
    base = build_net("mlp:8", 3, (4,), seed=5)
    save_file(base.state_dict(), tmp_path / "base.safetensors")
    run = RunFolder.create(
        tmp_path / "patched",
        {
            "kind": "bayesianize",
            "model": "mlp:8",
            "base": {"path": str(tmp_path / "base.safetensors"), "sha256": sha256_of(tmp_path / "base.safetensors")},
            "data": data_record(data, settings["data_dir"]),
        },
    )
    pb.patch_(base, pb.ECMP(3))
    pb.save(base, run.path / "patch.safetensors")
    return run, base


def test_a_bayesianized_network_comes_back_from_base_and_patch(bayesianized, tmp_path):
    run, network = bayesianized
    assert run.kind == "bayesianize"
    assert same(run.model().state_dict(), network.state_dict())
    assert not run.model().training
    assert run.dataset().num_outputs == 3
    assert isinstance(run.likelihood(), pb.Categorical)
    assert run.history() == []
    run.append({"epoch": 1, "loss": 0.5})
    assert run.history() == [{"epoch": 1, "loss": 0.5}]
    with pytest.raises(PatchbayesError, match='of the kind "bayesianize", which cannot be resumed by training'):
        train(TrainingConfig(**vars(RunFolder(tmp_path / "vanilla").training)), run.path, resume=True)


def test_a_changed_or_missing_base_is_refused(bayesianized, tmp_path):
    run, _ = bayesianized
    save_file(build_net("mlp:8", 3, (4,), seed=6).state_dict(), tmp_path / "base.safetensors")
    with pytest.raises(PatchbayesError, match="is not the checkpoint that was patched"):
        run.model()
    (tmp_path / "base.safetensors").unlink()
    with pytest.raises(PatchbayesError, match="is not there"):
        run.model()


def test_components_that_share_all_and_start_alike_train_as_the_network_alone(folder, tmp_path):
    settings = DEFAULT | {"optimizer": "sgd", "lr": 0.05, "objective": "simplified", "data_dir": str(folder)}
    train(TrainingConfig(**settings, method="vanilla"), tmp_path / "alone")
    alone = RunFolder(tmp_path / "alone").model("last").state_dict()
    for method, sharing in (("emp", 1.0), ("ecmp", 1.0), ("emp", 0.5)):
        settings |= {"method": method, "jitter": 0.0, "sharing": sharing}
        network = train(TrainingConfig(**settings), tmp_path / f"{method}{sharing}").model("last")
        alike = [
            torch.allclose(component, alone[f"{site.name}.{name}"], atol=1e-6)
            for site in pb.patched_sites(network).values()
            for name in site.posterior.names
            for component in site.components(name)
        ]
        assert all(alike) == (sharing == 1.0)


# ---- every setting changes something

DEFAULT: dict[str, object] = {"data": "npz:classes.npz", "model": "mlp:8", "epochs": 2, "batch_size": 16}
# name: (another value, what else must be set for it to mean something)
CHANGES = {
    "model": ("mlp:9", {}),
    "held_out": (0.3, {}),
    "data_seed": (1, {}),
    "method": ("emp", {}),
    "sites": ("output", {}),
    "components": (3, {}),
    "rate": (0.3, {"method": "dropout"}),
    "jitter": (0.3, {}),
    "init": ("independent", {}),
    "per_example": (True, {}),
    "jitter_warmup": (1.0, {}),
    "objective": ("simplified", {}),
    "prior_precision": (9.0, {}),
    "weight_decay": (0.5, {}),
    "output_precision": (9.0, {"data": "npz:numbers.npz"}),
    "learn_precision": (True, {"data": "npz:numbers.npz"}),
    "draws_per_step": (2, {}),
    "optimizer": ("adamw", {"weight_decay": 0.5}),
    "lr": (0.3, {}),
    "patch_lr": (0.3, {}),
    "sharing": (0.1, {}),
    "alternate": (1.0, {}),
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


@pytest.mark.parametrize("name", CHANGES)
def test_every_setting_that_decides_the_result_changes_it(trained, name):
    value, others = CHANGES[name]
    assert not same(trained(**others), trained(**others | {name: value}))


def test_every_setting_has_a_test():
    elsewhere = {
        "data", "data_dir", "target", "size", "split", "task", "augmentation", "device", "threads", "workers",
        "report_epochs", "eval_draws", "checkpoint_seconds", "checkpoint_steps", "tensorboard",
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
    }.items():
        config = TrainingConfig(data=f"csv:{tmp_path}/table.csv", model="mlp:4", epochs=1, **settings)
        run = train(config, tmp_path / name)
        read[name] = (run.config["data"]["classes"], run.config["data"]["preparation"]["mean"])
        assert run.dataset().preparation.to_config() == run.config["data"]["preparation"]
    assert read["base"][0] == ["b"]
    assert read["target"][0] == ["c"]
    assert read["base"][1] != read["split"][1]
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
    assert isinstance(likelihood, pb.Gaussian)
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


# ---- ensembles


def test_members_of_an_ensemble_learn_as_networks_alone(settings, tmp_path):
    """With the start of each member, the same data order and plain SGD: every member is the network trained alone."""
    settings |= {"optimizer": "sgd", "lr": 0.1, "epochs": 3, "method": "ensemble", "components": 3}
    config = TrainingConfig(**settings)
    start, _ = patched_net(config, 3, (4,))
    members = train(config, tmp_path / "ensemble").model("last")
    for number in range(3):
        alone = _unpatched(start, number)
        trained = _train_alone(TrainingConfig(**{**settings, "method": "vanilla", "components": None}), alone)
        for name, value in _unpatched(members, number).state_dict().items():
            torch.testing.assert_close(value, trained.state_dict()[name], rtol=1e-4, atol=1e-5)


def _unpatched(network, number):
    network = copy.deepcopy(network)
    pb.unpatch_(network, number)
    return network


def _train_alone(config, network):
    """The training loop, written out."""
    dataset = read(config.data, config.data_dir)
    optimizer = torch.optim.SGD(network.parameters(), lr=config.lr, momentum=0.9)
    network.train()
    for epoch in range(config.epochs):
        for step, (inputs, targets, _) in enumerate(EpochBatches(dataset, 16, config.seed, epoch).starting_at(0, 0)):
            optimizer.param_groups[0]["lr"] = config.lr * learning_rate_factor(config, epoch * 3 + step, 3)
            penalty = sum(0.5 * parameter.square().sum() for parameter in network.parameters()) / len(dataset.train)
            optimizer.zero_grad()
            (torch.nn.functional.cross_entropy(network(inputs), targets) + penalty).backward()
            optimizer.step()
    return network


def test_vanilla_is_the_loop_written_out(settings, tmp_path):
    config = TrainingConfig(**settings, method="vanilla", optimizer="sgd", lr=0.1)
    run = train(config, tmp_path / "run")
    alone = _train_alone(config, build_net("mlp:8", 3, (4,)))
    for name, value in run.model("last").state_dict().items():
        torch.testing.assert_close(value, alone.state_dict()[name], rtol=1e-5, atol=1e-6)


# ---- bad input


def test_a_folder_that_is_used_is_refused(settings, tmp_path):
    config = TrainingConfig(**settings)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "thesis.tex").write_text("...")
    for resume in (False, True):
        with pytest.raises(PatchbayesError, match=r"is not empty \(thesis.tex\); a run needs a folder of its own"):
            train(config, tmp_path / "used", resume=resume)
        assert os.listdir(tmp_path / "used") == ["thesis.tex"]
        with pytest.raises(PatchbayesError, match=r"thesis.tex is a file, and a run needs a folder"):
            train(config, tmp_path / "used" / "thesis.tex", resume=resume)
    train(config, tmp_path / "run")
    with pytest.raises(PatchbayesError, match=r"holds a run already.\n  do       go on with it by resume=True"):
        train(config, tmp_path / "run")


def test_nothing_is_written_where_the_configuration_cannot_work(settings, tmp_path):
    for changes, message in (
        ({"data": "npz:absent.npz"}, "absent.npz"),
        ({"model": "resnet18"}, "takes images"),
        ({"sites": "no.such.layer"}, "no module named"),
        ({"output_precision": 2.0}, "are for regression"),
        ({"batch_size": 1}, r"leave 1 for a batch; at least 2 \(batch norm\)"),
    ):
        with pytest.raises(PatchbayesError, match=message):
            train(TrainingConfig(**settings | changes), tmp_path / "run")
        assert not (tmp_path / "run").exists()
    train(TrainingConfig(**settings), tmp_path / "run")  # and the folder is still good


def test_a_loss_that_is_not_finite_is_an_error_and_leaves_the_last_good_state(settings, tmp_path):
    config = TrainingConfig(**settings | {"epochs": 5}, optimizer="sgd", lr=1e20, schedule="constant", warmup=4.0)
    with pytest.raises(PatchbayesError, match=r"the loss is not finite in epoch 1, step \d .*\n.*a smaller lr"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run" / "last.safetensors").exists()


def test_accelerate_missing_is_said(settings, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(PatchbayesError, match=r"training needs the package accelerate .*\n.*patchbayes\[cli\]"):
        train(TrainingConfig(**settings), tmp_path / "run")
