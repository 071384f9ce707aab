"""Components that learn apart: the same bits in one process, in worker processes and on ranks; dead and hung workers."""

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import patchbayes
from patchbayes.draws.layout import NetworkDraw
from patchbayes.errors import PatchbayesError
from patchbayes.patching.drawing import hold
from patchbayes.patching.network import network_of
from patchbayes.runs import TrainingConfig, train
from patchbayes.runs.data_order import EpochBatches
from patchbayes.runs.data_record import training_data
from patchbayes.runs.disjoint_patches import HandTraining, Phase, RunningStatistics, dealt, num_hands
from patchbayes.runs.loss import TrainingLoss, build_likelihood, build_optimizer
from patchbayes.runs.network import patched_net
from patchbayes.runs.workers import WorkerPool
from small_runs import rows_of, same, tensors_of, write_npz
from two_processes import children


def config(tmp_path, **settings):
    write_npz(tmp_path / "classes.npz")
    fixed = {"data": f"npz:{tmp_path}/classes.npz", "model": "mlp:8", "method": "emp(3)", "epochs": 4, "batch_size": 8}
    return TrainingConfig(**{**fixed, "lr": 0.02, "alternate": 2.0, "component_workers": 1, "threads": 1, **settings})


def hand_training(chosen):
    """What a worker has: a network of its own, its loss, and its data."""
    dataset = training_data(chosen, False)
    network, _ = patched_net(chosen, dataset.num_outputs, dataset.input_shape)
    likelihood = build_likelihood(dataset.task, chosen)
    loss = TrainingLoss(network, likelihood, chosen, len(dataset.train)).train()
    optimizer = build_optimizer(chosen, network, likelihood)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.requires_grad_(group["name"].startswith("patched"))
    return HandTraining(chosen, loss, optimizer.param_groups, dataset)


def patched_values(training):
    return {
        f"{site.name}.{name}": parameter.detach().clone()
        for site in training.network.sites
        for name, parameter in site.parameters().items()
    }


def test_hands_hold_every_component_once_and_each_is_a_draw(tmp_path):
    training = hand_training(config(tmp_path))
    sites = training.network.layout.num_groups
    deals = [dealt(training.network, seed, Phase(0, 9), 3) for seed in range(100)]
    for deal in deals:
        assert deal.shape == (3, sites)
        assert all(sorted(column.tolist()) == [0, 1, 2] for column in deal.T)
    assert not torch.equal(deals[0], dealt(training.network, 0, Phase(9, 18), 3))
    pairs = torch.stack([deal[0, :2] for deal in deals])  # independent sites: all nine pairs come
    assert len(pairs.unique(dim=0)) == 9


def test_a_hand_changes_its_own_components_and_nothing_else(tmp_path):
    training = hand_training(config(tmp_path))
    before = patched_values(training)
    shared = {n: p.clone() for n, p in training.loss.named_parameters() if not p.requires_grad}
    components = dealt(training.network, 0, Phase(0, 9), 3)[1]
    found = training.train_(Phase(0, 9), 1)
    assert found.steps == 3
    assert all(torch.equal(p, shared[n]) for n, p in training.loss.named_parameters() if n in shared)
    for site in training.network.sites:
        for name, parameter in site.parameters().items():
            rows, old = parameter.detach().view(3, -1), before[f"{site.name}.{name}"].view(3, -1)
            changed = [k for k in range(3) if not torch.equal(rows[k], old[k])]
            assert changed == [int(components[site.posterior.offset])]


def test_a_component_learns_the_same_whatever_the_others_do(tmp_path):
    """After other hands have learned, before them, or without them: the same bits. With SGD, equal to a loop written out."""
    chosen = config(tmp_path, optimizer="sgd", momentum=0.0, lr=0.05, schedule="constant")
    alone, among = hand_training(chosen), hand_training(chosen)
    phase = Phase(0, 12)
    for hand in (2, 0, 1):
        among.train_(phase, hand)
    alone.train_(phase, 1)
    components = dealt(alone.network, chosen.seed, phase, 3)[1]
    written = hand_training(chosen)
    rows = {}
    for site in written.network.sites:
        place = int(components[site.posterior.offset])
        rows[site.name] = (place, {n: p.detach().view(3, -1)[place].clone() for n, p in site.parameters().items()})
    num_data = written.loss.num_data
    for step in phase.steps(1, 3):
        with torch.no_grad():
            for site in written.network.sites:
                place, values = rows[site.name]
                for name, parameter in site.parameters().items():
                    parameter.view(3, -1)[place] = values[name]
        epoch, place_in_epoch = divmod(step, written.steps_per_epoch)
        inputs, targets, _ = EpochBatches(written.dataset, chosen.batch_size, chosen.seed, epoch)[place_in_epoch]
        with hold(written.network, NetworkDraw(torch.tensor(0), components, explicit=True)):
            nll = nn.functional.cross_entropy(written.loss.network(inputs), targets)
        nll.backward()
        for site in written.network.sites:
            place, values = rows[site.name]
            for name, parameter in site.parameters().items():
                gradient = parameter.grad.view(3, -1)[place] + values[name] / num_data  # tau = rho = 1
                values[name] -= 0.05 * gradient
                parameter.grad = None
    for site, other in zip(alone.network.sites, among.network.sites, strict=True):
        place, values = rows[site.name]
        for name, parameter in site.parameters().items():
            mine = parameter.detach().view(3, -1)[place]
            assert torch.equal(mine, other.parameters()[name].detach().view(3, -1)[place])
            torch.testing.assert_close(mine, values[name], rtol=1e-4, atol=1e-6)


def test_hands_of_all_deals_have_the_gradient_of_the_elbo(tmp_path):
    """The mean over all draws of what a hand minimizes is the negative ELBO: enumerated, two components at two sites."""
    chosen = config(tmp_path, method="emp(2)", sites="norm")
    training = hand_training(chosen)
    network, loss = training.network, training.loss
    groups = network.layout.num_groups
    inputs, targets = training.dataset.train.fetch(torch.arange(16))
    inputs = training.dataset.preparation.inputs(inputs)
    total = 0.0
    for z in itertools.product(range(2), repeat=groups):
        with hold(network, NetworkDraw(torch.tensor(0), torch.tensor(z), explicit=True)):
            nll = nn.functional.cross_entropy(loss.network(inputs), targets)
        squares = sum(
            parameter.view(2, -1)[z[site.posterior.offset]].square().sum()
            for site in network.sites
            for parameter in site.parameters().values()
        )
        total = total + (nll + 0.5 * squares / loss.num_data) / 2**groups
    mine = torch.autograd.grad(total, [p for s in network.sites for p in s.parameters().values()])
    elbo = 0.0
    for z in itertools.product(range(2), repeat=groups):
        with hold(network, NetworkDraw(torch.tensor(0), torch.tensor(z), explicit=True)):
            elbo = elbo + nn.functional.cross_entropy(loss.network(inputs), targets) / 2**groups
    elbo = elbo + patchbayes.kl(loss.network, shared=False) / loss.num_data
    theirs = torch.autograd.grad(elbo, [p for s in network.sites for p in s.parameters().values()])
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", ["ecmp(3)", "dropout(0.1)", "emp(3, sigma=0.1)", "emp(2, probabilities=(0.3, 0.7))"])
def test_what_cannot_learn_apart_is_refused(tmp_path, method):
    with pytest.raises(PatchbayesError, match="no components that learn apart"):
        hand_training(config(tmp_path, method=method))


def test_different_numbers_of_components_are_refused(tmp_path):
    with pytest.raises(PatchbayesError, match=r"same number of components at all sites, got \[2, 3\]"):
        hand_training(config(tmp_path, method="norm: emp(2); output: emp(3)"))


def test_two_workers_give_the_bits_of_one_process(tmp_path):
    before = set(Path("/dev/shm").glob("patchbayes-*"))
    one = train(config(tmp_path), tmp_path / "one", quiet=True)
    two = train(config(tmp_path, component_workers=2), tmp_path / "two", quiet=True)
    assert rows_of(one) == rows_of(two)
    assert same(*(tensors_of(run.path / "last.safetensors", "network") for run in (one, two)))
    assert "turn of the patched parameters" in (tmp_path / "two" / "log.txt").read_text()
    assert set(Path("/dev/shm").glob("patchbayes-*")) <= before


class Watched:
    """A pool of workers on the small network, and what it said."""

    def __init__(self, tmp_path, **settings):
        self.chosen = config(tmp_path, component_workers=2, **settings)
        self.training = hand_training(self.chosen)
        self.statistics = RunningStatistics(self.training.loss.network)
        self.said: list[str] = []
        dataset = self.training.dataset
        self.pool = WorkerPool(
            self.chosen,
            self.training,
            self.statistics.size,
            (dataset.num_outputs, dataset.input_shape),
            trust_code=False,
            say=self.said.append,
        )

    def train(self, phase, stopped=lambda: False):
        with self.pool as pool:
            found = pool.train_(phase, self.statistics, stopped)
            return found, patched_values(self.training)


def serially(tmp_path, phase, **settings):
    training = hand_training(config(tmp_path, **settings))
    statistics = RunningStatistics(training.loss.network)
    for hand in range(3):
        statistics.begin()
        training.train_(phase, hand)
    return patched_values(training)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "word"), [(signal.SIGKILL, "ended (exit code -9)"), (signal.SIGSTOP, "made no step")]
)
def test_components_of_a_lost_worker_are_taken_over(tmp_path, number, word):
    phase = Phase(0, 900)
    watched = Watched(tmp_path, epochs=400, timeout=20.0)

    def strike():
        deadline = time.monotonic() + 200
        while time.monotonic() < deadline:
            if getattr(watched.pool, "shared", None) is not None and int(watched.pool.shared["heartbeat"][0]) > 3:
                os.kill(watched.pool.processes[0].pid, number)
                return
            time.sleep(0.01)

    thread = threading.Thread(target=strike)
    thread.start()
    found, values = watched.train(phase)
    thread.join(timeout=10)
    assert [one.steps for one in found] == [300, 300, 300]
    assert any(word in text and "learn again elsewhere" in text for text in watched.said)
    assert same(values, serially(tmp_path, phase, epochs=400))
    assert all(process.poll() is not None for process in watched.pool.processes)


@pytest.mark.slow
def test_where_all_workers_die_the_parent_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    watched = Watched(tmp_path)
    found, values = watched.train(Phase(0, 30))
    assert [one.steps for one in found] == [10, 10, 10]
    assert same(values, serially(tmp_path, Phase(0, 30)))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_worker_outlives_its_parent(tmp_path, number):
    write_npz(tmp_path / "classes.npz")
    environment = os.environ | {"PYTHONPATH": str(Path(patchbayes.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-m",
        "patchbayes",
        "train",
        str(tmp_path / "run"),
        "--data",
        f"npz:{tmp_path}/classes.npz",
    ]
    command += ["--model", "mlp:8", "--method", "emp(3)", "--epochs", "100000", "--quiet"]
    command += ["--set", "learn=patches", "--set", "component_workers=2", "--set", "batch_size=8"]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        deadline, workers = time.monotonic() + 120, []
        metrics = tmp_path / "run" / "metrics.jsonl"
        while time.monotonic() < deadline and not (metrics.exists() and metrics.read_text()):
            time.sleep(0.05)
        workers = children(process.pid)
        assert len(workers) == 2
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    if number == signal.SIGINT:
        assert "everything is saved" in errors
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and any(map(alive, workers)):
        time.sleep(0.05)
    assert not any(map(alive, workers))


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_number_of_hands_is_that_of_the_components(tmp_path):
    assert num_hands(network_of(hand_training(config(tmp_path)).loss.network)) == 3
