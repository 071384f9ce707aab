"""train from end to end: the run folder, members of an ensemble, bad input."""

import copy
import json
import os
import sys
from importlib import import_module

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import patchbayes as pb
from patchbayes.data import read
from patchbayes.errors import PatchbayesError
from patchbayes.nets.named import build_net
from patchbayes.runs import RunFolder, TrainingConfig, train
from patchbayes.runs.data_order import EpochBatches
from patchbayes.runs.data_record import data_record
from patchbayes.runs.network import patched_net
from patchbayes.runs.ordinary_checkpoint import sha256_of
from patchbayes.runs.schedule import learning_rate_factor
from small_runs import DEFAULT, rows_of, same, tensors_of, write_tables

training_module = import_module("patchbayes.runs.train")  # not the function of that name


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tables(tmp_path_factory.mktemp("data"))


@pytest.fixture
def settings(folder):
    return DEFAULT | {"data_dir": str(folder)}


# ---- the run folder


@pytest.mark.parametrize(
    "method", ["vanilla", "dropout(0.1)", "emp", "ecmp", "dropconnect(0.1)", "meanfield", "ensemble"]
)
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
        assert json.loads(file.metadata()["patchbayes"])["format"] == "patchbayes-training-2"


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
    assert isinstance(run.likelihood(), pb.likelihoods.Categorical)
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
    with pytest.raises(PatchbayesError, match="is missing"):
        run.model()


def test_components_that_share_all_and_start_alike_train_as_the_network_alone(folder, tmp_path):
    settings = DEFAULT | {"optimizer": "sgd", "lr": 0.05, "objective": "simplified", "data_dir": str(folder)}
    settings |= {"weight_decay": 0.0}  # equal decay of all K components is K times that of the network alone
    train(TrainingConfig(**settings, method="vanilla"), tmp_path / "alone")
    alone = RunFolder(tmp_path / "alone").model("last").state_dict()
    for method, sharing in (("emp", 1.0), ("ecmp", 1.0), ("emp", 0.5)):
        settings |= {"method": f"{method}(5, jitter=0.0)", "sharing": sharing}
        network = train(TrainingConfig(**settings), tmp_path / f"{method}{sharing}").model("last")
        alike = [
            torch.allclose(component, alone[f"{site.name}.{name}"], atol=1e-6)
            for site in pb.patched_sites(network).values()
            for name in site.posterior.names
            for component in (site.posterior.component(k)[name] for k in range(5))
        ]
        assert all(alike) == (sharing == 1.0)


# ---- ensembles


def test_members_of_an_ensemble_learn_as_networks_alone(settings, tmp_path):
    """With the start of each member, the same data order and plain SGD: every member is the network trained alone."""
    settings |= {"optimizer": "sgd", "lr": 0.1, "epochs": 3, "method": "ensemble(3)"}
    config = TrainingConfig(**settings)
    start, _ = patched_net(config, 3, (4,))
    members = train(config, tmp_path / "ensemble").model("last")
    for number in range(3):
        alone = _unpatched(start, number)
        trained = _train_alone(TrainingConfig(**{**settings, "method": "vanilla"}), alone)
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
    with pytest.raises(PatchbayesError, match=r"already holds a run.\n  do       go on with it by resume=True"):
        train(config, tmp_path / "run")


def test_nothing_is_written_where_the_configuration_cannot_work(settings, tmp_path):
    for changes, message in (
        ({"data": "npz:absent.npz"}, "absent.npz"),
        ({"model": "resnet18"}, "takes images"),
        ({"sites": "no.such.layer"}, "no module named"),
        ({"output_precision": 2.0}, "are for regression"),
        ({"batch_size": 1}, r"leave 1 for a batch, expected at least 2 \(batch norm\)"),
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
