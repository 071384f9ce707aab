"""Resuming: to the same bits, wherever a run was stopped; locks, full and read-only disks, changed configurations."""

import contextlib
import os
import resource
import signal
import subprocess
from importlib import import_module
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from patchbayes.digests import described
from patchbayes.errors import CheckpointMismatch, PatchbayesError
from patchbayes.runs import RunFolder, TrainingConfig, TrainingInterrupted, train
from patchbayes.runs.data_order import EpochBatches
from patchbayes.runs.writing import locked
from small_runs import rows_of, same, write_npz

training_module = import_module("patchbayes.runs.train")  # not the function of that name


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data")
    write_npz(path / "classes.npz")
    write_npz(path / "numbers.npz", task="regression")
    return path


def config(folder, **settings):
    return TrainingConfig(
        **{"data": f"npz:{folder}/classes.npz", "model": "mlp:8", "epochs": 3, "batch_size": 16, **settings}
    )


def assert_equal_runs(one: Path, other: Path) -> None:
    """The same weights, optimizer state and progress; the same best network; the same metrics: apart from seconds."""
    for name in ("last.safetensors", "best.safetensors"):
        assert same(load_file(one / name), load_file(other / name)), name
    assert rows_of(RunFolder(one)) == rows_of(RunFolder(other))
    assert progress_of(one) == progress_of(other)
    assert [path.name for path in one.glob(".*.part")] == []


def progress_of(folder):
    with safe_open(folder / "last.safetensors", "pt") as file:
        description = described(file.metadata(), str(folder))
    for row in description["progress"]["rows"]:
        row.pop("train_seconds")
    return description | {"progress": description["progress"] | {"seconds": None}}


@contextlib.contextmanager
def signal_at(epoch, step, number=signal.SIGTERM):
    """Send this process a signal while it prepares that batch."""
    original = EpochBatches.__getitem__

    def signalling(self, which):
        if (self.epoch, which) == (epoch, step):
            signal.raise_signal(number)
        return original(self, which)

    EpochBatches.__getitem__ = signalling
    try:
        yield
    finally:
        EpochBatches.__getitem__ = original


# ---- stopped by a signal

CASES = {
    "ecmp": {},
    "vanilla-sgd": {"method": "vanilla", "optimizer": "sgd", "nesterov": True},
    "emp-draws": {"method": "emp(5, per_example=True)", "draws_per_step": 2, "optimizer": "adamw", "weight_decay": 0.1},
    "dropout": {"method": "dropout(0.3)", "objective": "simplified"},
    "learned-prior": {"method": "emp", "prior": "learned"},
    "gamma-prior": {"method": "gaussianmixture(2)", "prior": "gamma"},
    "meanfield": {"method": "meanfield", "schedule": "step", "warmup": 1.0},
    "ensemble": {"method": "ensemble(2)", "optimizer": "sgd"},
    "jitter": {"jitter_warmup": 2.0, "patch_lr": 0.01},
    "turns": {"alternate": 0.67, "sharing": 0.2},
    "shared-decay": {"sharing": 0.5, "objective": "simplified"},
    "rules": {"method": "norm: emp(3); output: dropout(0.1)"},
    "bfloat16": {"precision": "bfloat16"},
    "rows": {"report_epochs": 2, "workers": 1},
}


@pytest.mark.parametrize("name", CASES)
def test_sigterm_finishes_the_step_and_resuming_gives_the_same_bits(data, tmp_path, name):
    chosen = config(data, **CASES[name])
    train(chosen, tmp_path / "whole")
    before = signal.getsignal(signal.SIGTERM)
    steps = [(0, 1), (0, 2), (2, 0)] if chosen.workers == 0 else []
    for epoch, step in steps:
        with signal_at(epoch, step), pytest.raises(TrainingInterrupted) as stop:
            train(chosen, tmp_path / "parts", resume=True)
        assert (
            f"epoch {epoch + 1} of 3, step {step + 1} of 3; everything is saved.\n  do       go on with resume=True"
            in str(stop.value)
        )
        assert stop.value.signal_number == signal.SIGTERM
        assert signal.getsignal(signal.SIGTERM) is before
        progress = progress_of(tmp_path / "parts")["progress"]
        assert (progress["epoch"], progress["step"]) == (epoch, step + 1)
    train(chosen, tmp_path / "parts", resume=True)
    assert_equal_runs(tmp_path / "whole", tmp_path / "parts")


def test_a_regression_with_learned_precision_resumes_too(data, tmp_path):
    chosen = config(data, data=f"npz:{data}/numbers.npz", learn_precision=True)
    train(chosen, tmp_path / "whole")
    with signal_at(1, 1), pytest.raises(TrainingInterrupted):
        train(chosen, tmp_path / "parts")
    train(chosen, tmp_path / "parts", resume=True)
    assert_equal_runs(tmp_path / "whole", tmp_path / "parts")


@pytest.fixture
def ctrl_c():
    """As a terminal has it: what runs in the background may have been started with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_is_sigterm_and_a_second_one_ends_at_once(data, tmp_path, monkeypatch):
    with signal_at(0, 1, signal.SIGINT), pytest.raises(TrainingInterrupted) as stop:
        train(config(data), tmp_path / "run")
    assert stop.value.signal_number == signal.SIGINT
    monkeypatch.setattr(training_module, "save_state", lambda *_: signal.raise_signal(signal.SIGINT))
    with signal_at(0, 2, signal.SIGINT), pytest.raises(KeyboardInterrupt):
        train(config(data), tmp_path / "run", resume=True)


def test_a_signal_during_the_look_at_the_held_out_part_repeats_it_later(data, tmp_path, monkeypatch):
    train(config(data), tmp_path / "whole")
    original = training_module.held_out_scores
    looks = []

    def interrupted(*arguments):
        looks.append(1)
        if len(looks) == 2:
            signal.raise_signal(signal.SIGTERM)
        return original(*arguments)

    monkeypatch.setattr(training_module, "held_out_scores", interrupted)
    with pytest.raises(TrainingInterrupted, match="epoch 2 of 3, step 3 of 3"):
        train(config(data), tmp_path / "parts")
    assert len(RunFolder(tmp_path / "parts").history()) == 1
    train(config(data), tmp_path / "parts", resume=True)
    assert_equal_runs(tmp_path / "whole", tmp_path / "parts")


# ---- what resuming means


def test_resuming_a_finished_run_changes_nothing(data, tmp_path):
    run = train(config(data), tmp_path / "run")
    before = {path.name: path.read_bytes() for path in run.path.iterdir() if path.name != "log.txt"}
    train(config(data), tmp_path / "run", resume=True)
    assert before == {path.name: path.read_bytes() for path in run.path.iterdir() if path.name != "log.txt"}


def test_resuming_where_nothing_is_yet_starts(data, tmp_path):
    train(config(data), tmp_path / "whole")
    train(config(data), tmp_path / "new", resume=True)
    assert_equal_runs(tmp_path / "whole", tmp_path / "new")


def test_another_configuration_is_refused_by_name_and_free_settings_are_not(data, tmp_path):
    with signal_at(0, 1), pytest.raises(TrainingInterrupted):
        train(config(data), tmp_path / "run")
    with pytest.raises(PatchbayesError) as error:
        train(config(data, lr=0.5, epochs=4), tmp_path / "run", resume=True)
    assert "- epochs was 3, is 4" in str(error.value)
    assert "- lr was None, is 0.5" in str(error.value)
    train(config(data, workers=1, checkpoint_steps=1, tensorboard=False), tmp_path / "run", resume=True)


def test_other_data_are_refused(data, tmp_path):
    write_npz(tmp_path / "classes.npz")
    with signal_at(0, 1), pytest.raises(TrainingInterrupted):
        train(config(tmp_path), tmp_path / "run")
    write_npz(tmp_path / "classes.npz", seed=1)
    with pytest.raises(PatchbayesError, match=r"started with different settings.\n  - preparation was .*, and is now"):
        train(config(tmp_path), tmp_path / "run", resume=True)


def test_the_number_of_threads_stays_that_of_the_start(data, tmp_path):
    """Another number of threads would change the last bits."""
    torch.set_num_threads(2)
    train(config(data), tmp_path / "whole")
    with signal_at(1, 1), pytest.raises(TrainingInterrupted):
        train(config(data), tmp_path / "parts")
    torch.set_num_threads(1)
    train(config(data), tmp_path / "parts", resume=True)
    assert torch.get_num_threads() == 1
    assert_equal_runs(tmp_path / "whole", tmp_path / "parts")


def test_metrics_after_the_checkpoint_are_cut_off(data, tmp_path):
    train(config(data), tmp_path / "whole")
    with signal_at(1, 1), pytest.raises(TrainingInterrupted):
        train(config(data), tmp_path / "parts")
    with (tmp_path / "parts" / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 2, "loss": 7.0}\n{"epo')
    train(config(data), tmp_path / "parts", resume=True)
    assert_equal_runs(tmp_path / "whole", tmp_path / "parts")


def test_a_best_network_that_was_not_written_is_written_on_resuming(data, tmp_path, monkeypatch):
    train(config(data), tmp_path / "whole")
    original = training_module._Trainer._save_best

    def interrupted(self):
        if (
            self.progress.epoch == 3
        ):  # the state says that this epoch is the best; best.safetensors is of the one before
            raise KeyboardInterrupt
        original(self)

    with monkeypatch.context() as patched:
        patched.setattr(training_module._Trainer, "_save_best", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(config(data), tmp_path / "parts")
    best = [load_file(tmp_path / name / "best.safetensors") for name in ("whole", "parts")]
    assert not same(*best)
    train(config(data), tmp_path / "parts", resume=True)
    assert_equal_runs(tmp_path / "whole", tmp_path / "parts")


def test_tensorboard_forgets_what_is_done_again(data, tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    chosen = config(data, tensorboard=True)
    with signal_at(2, 1), pytest.raises(TrainingInterrupted):
        train(chosen, tmp_path / "run")
    train(chosen, tmp_path / "run", resume=True)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("loss")] == [3, 6, 9]


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-10], lambda b: b"", lambda b: b.replace(b"training-2", b"training-9")]
)
def test_a_damaged_state_is_an_error(data, tmp_path, damage):
    path = train(config(data), tmp_path / "run").path / "last.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CheckpointMismatch, match=r"last.safetensors is not a whole state of a training run"):
        train(config(data), tmp_path / "run", resume=True)


# ---- one trainer at a time


def test_a_folder_in_use_is_refused_and_a_dead_trainer_s_is_not(data, tmp_path):
    ready, done = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with locked(tmp_path / "run"):
                os.write(done, b".")
                signal.pause()
        finally:
            os._exit(1)
    try:
        assert os.read(ready, 1) == b"."
        with pytest.raises(PatchbayesError, match=f"is being trained in by process {child} on "):
            train(config(data), tmp_path / "run")
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready)
        os.close(done)
    train(config(data), tmp_path / "run")


def test_a_folder_in_use_by_this_process_is_refused(data, tmp_path):
    with locked(tmp_path / "run"):
        with pytest.raises(PatchbayesError, match=f"is being trained in by this process, {os.getpid()}"):
            train(config(data), tmp_path / "run")
    with locked(tmp_path / "run"):
        pass


# ---- disks


def test_a_disk_that_is_full_at_the_start_is_named_and_nothing_is_left(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(PatchbayesError, match=r"\.lock cannot be written"), locked(tmp_path / "run"):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_whole_leaves_the_old_one(data, tmp_path):
    train(config(data), tmp_path / "whole")
    with signal_at(1, 1), pytest.raises(TrainingInterrupted):
        train(config(data), tmp_path / "parts")
    state = tmp_path / "parts" / "last.safetensors"
    before = state.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) - 1000, hard))
    try:
        with pytest.raises(
            PatchbayesError, match=r"last.safetensors cannot be written .*File too large.* as it was.\n.*--resume"
        ):
            train(config(data), tmp_path / "parts", resume=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert state.read_bytes() == before
    train(config(data), tmp_path / "parts", resume=True)
    assert_equal_runs(tmp_path / "whole", tmp_path / "parts")


@pytest.fixture
def small_disk(tmp_path):
    """A disk of its own, of 96 KB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96k", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("no permission to mount a small disk here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_leaves_the_last_checkpoint(data, tmp_path, small_disk):
    train(config(data), tmp_path / "whole")
    with signal_at(1, 1), pytest.raises(TrainingInterrupted):
        train(config(data), small_disk / "run")
    before = (small_disk / "run" / "last.safetensors").read_bytes()
    filler = small_disk / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(512))
    with pytest.raises(
        PatchbayesError, match=r"cannot be written \(.*No space left on device.*\); what was written before"
    ):
        train(config(data), small_disk / "run", resume=True)
    assert (small_disk / "run" / "last.safetensors").read_bytes() == before
    filler.unlink()
    train(config(data), small_disk / "run", resume=True)
    assert_equal_runs(tmp_path / "whole", small_disk / "run")


def test_a_read_only_disk_is_an_error(data, small_disk):
    (small_disk / "run").mkdir()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for folder in (small_disk / "run", small_disk / "new"):
        with pytest.raises(PatchbayesError, match=r"cannot be written \(Read-only file system\)"):
            train(config(data), folder)


def test_a_folder_below_a_file_is_an_error(data, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PatchbayesError, match=r"run cannot be written \(Not a directory\)"):
        train(config(data), tmp_path / "file" / "run")
    with pytest.raises(PatchbayesError, match=r"is a file, and a run needs a folder"):
        train(config(data), tmp_path / "file")
