"""More than one process: step times, bytes, and time to an objective, of plain training, coordinate descent and workers.

    python benchmarks/scaling.py                       measure everything into results/scaling.json, part by part, resumable
    python benchmarks/scaling.py --again trajectories  measure a part again, whatever the record has

`readme_tables.py` makes the tables of docs/devices.md from the record.

Times are processor seconds of one thread: with a core of its own a process needs as long, whatever else runs on the machine.
What two processes wait for one another is wall time, of which the least of many repetitions is taken. "real_runs" is the wall
time of whole trainings by the command line, on one and on two processes, and wants an idle machine.
"""

import argparse
import functools
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from records import RESULTS, write_record
from torch import nn

import patchbayes as pb
from patchbayes.data import Dataset
from patchbayes.nets import resnet18
from patchbayes.patching.network import network_of
from patchbayes.ranks import process_group
from patchbayes.runs import TrainingConfig
from patchbayes.runs.coordinate_descent import Turns, turn_of
from patchbayes.runs.data_order import EpochBatches, num_steps
from patchbayes.runs.data_record import training_data
from patchbayes.runs.disjoint_patches import HandTraining, Phase, RunningStatistics
from patchbayes.runs.loss import TrainingLoss, build_likelihood, build_optimizer
from patchbayes.runs.network import patched_net
from patchbayes.runs.schedule import learning_rate_factor

COMPONENTS = (5, 20, 50)
EPOCHS, TARGET_EPOCH, TURN = 16, 8, 2.0
SEEDS = (0, 1, 2, 3, 4)
SETTINGS: dict[str, Any] = {
    "data": "digits", "model": "small_cnn", "held_out": 0.0, "augmentation": "none", "batch_size": 90, "lr": 0.002,
    "schedule": "constant", "epochs": EPOCHS,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "coordinate descent": {"alternate": TURN},
    "workers": {"alternate": TURN, "component_workers": 1},
}


@functools.cache
def data_of(name: str) -> Dataset:
    return training_data(TrainingConfig(data=name, model=SETTINGS["model"], held_out=0.0, augmentation="none"), False)


class Subject:
    """A training of a configuration, step by step, without a folder."""

    def __init__(self, config: TrainingConfig) -> None:
        self.config, self.dataset = config, data_of(config.data)
        data = self.dataset
        self.network, _ = patched_net(config, data.num_outputs, data.input_shape)
        likelihood = build_likelihood(data.task, config)
        self.loss = TrainingLoss(self.network, likelihood, config, len(data.train)).train()
        self.optimizer = build_optimizer(config, self.network, likelihood)
        self.turns = Turns(config, self.loss, self.optimizer, data)
        self.steps = num_steps(len(data.train), config.batch_size)
        self.hands = None
        if config.component_workers:
            self.hands = HandTraining(config, self.loss, self.optimizer.param_groups, data)

    def begin_turn(self, step: int) -> str | None:
        turn = turn_of(self.config, step, self.steps)
        if turn is not None and turn != self.turns.turn:
            self.turns.begin(turn, keep=self.hands is None, epochs=self.config.alternate or self.config.epochs)
        return turn

    def step(self, number: int) -> None:
        epoch, place = divmod(number, self.steps)
        batches = EpochBatches(self.dataset, self.config.batch_size, self.config.seed, epoch)
        inputs, targets, share = batches[place]
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate_factor(self.config, number, self.steps) * group["initial_lr"]
        self.optimizer.zero_grad()
        with self.turns.serving(lambda: batches.numbers(place)):
            loss, _, _ = self.loss(inputs, targets, share)
        loss.backward()
        self.optimizer.step()

    def phase(self, phase: Phase) -> None:
        assert self.hands is not None
        statistics_ = RunningStatistics(self.network)
        changes, steps = [], []
        for hand in range(self.hands.hands):
            statistics_.begin()
            found = self.hands.train_(phase, hand)
            assert found is not None
            changes.append(statistics_.flat())
            steps.append(found.steps)
        statistics_.merge(torch.stack(changes), torch.tensor(steps))

    @torch.no_grad()
    def objective(self) -> float:
        """The negative ELBO, its NLL from the first 200 training examples and five stratified draws, in evaluation mode."""
        raw, targets = self.dataset.train.fetch(torch.arange(200))
        inputs = self.dataset.preparation.inputs(raw)
        draws = pb.Draws.stratified(self.network, 5)
        self.network.eval()
        total = 0.0
        for part, wanted in zip(inputs.split(500), targets.split(500), strict=True):
            for number in range(5):
                with pb.use_draw(self.network, draws[number]):
                    total += float(nn.functional.cross_entropy(self.network(part), wanted, reduction="sum")) / 5
        self.network.train()
        turn, self.turns.turn = self.turns.turn, None
        if turn is not None:  # modes of batch norms that rest
            for module in self.network.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm) and not hasattr(module, "patchbayes"):
                    module.train(turn == "shared")
            self.turns.turn = turn
        return total / len(targets) + float(pb.kl(self.network, frozen=True)) / len(self.dataset.train)


def config(components: int, sites: str = "norm+output", **settings: Any) -> TrainingConfig:
    return TrainingConfig(**{**SETTINGS, "method": f"emp({components})", "sites": sites, **settings})


def step_seconds(rounds: int = 6) -> dict[str, Any]:
    """Processor seconds of a step, by components and kind; kinds take turns within a round."""
    found: dict[str, Any] = {}
    for components in COMPONENTS:
        for sites in ("norm+output", "output"):
            plain = Subject(config(components, sites))
            patched = Subject(config(components, sites, learn="patches"))
            patched.begin_turn(0)
            shared = Subject(config(components, sites, alternate=TURN))
            shared.begin_turn(0)
            subjects = {"plain": plain, "turn of the patches": patched, "turn of the shared": shared}
            hand = Subject(config(components, sites, learn="patches", component_workers=1))
            hand.begin_turn(0)
            seconds: dict[str, list[float]] = {name: [] for name in (*subjects, "hand")}
            for number in range(rounds + 2):
                for name, subject in subjects.items():
                    began = time.process_time()
                    subject.step(number)
                    seconds[name].append(time.process_time() - began)
                began = time.process_time()
                assert hand.hands is not None
                hand.hands.train_(Phase(number, number + 1), 0)
                seconds["hand"].append(time.process_time() - began)
            found[f"{components}, {sites}"] = {
                "seconds": {name: statistics.median(values[2:]) for name, values in seconds.items()},
                "prefix_kept": patched.turns.prefix is not None,
                "prefix_bytes": 0 if patched.turns.prefix is None else patched.turns.prefix.bytes_per_example,
            }
            print(components, sites, found[f"{components}, {sites}"], flush=True)
    return found


def trajectories(seeds: tuple[int, ...] = SEEDS) -> list[dict[str, Any]]:
    """The objective after every epoch, with the steps of each kind that it took."""
    found = []
    for components in COMPONENTS:
        for kind, settings in KINDS.items():
            for seed in seeds:
                subject = Subject(config(components, seed=seed, **settings))
                values = [subject.objective()]
                for epoch in range(EPOCHS):
                    first = epoch * subject.steps
                    turn = subject.begin_turn(first)
                    if turn == "patched" and subject.hands is not None:
                        subject.phase(Phase(first, first + subject.steps))
                    else:
                        for number in range(first, first + subject.steps):
                            subject.step(number)
                    values.append(subject.objective())
                found.append({"components": components, "kind": kind, "seed": seed, "objective": values})
                print(components, kind, seed, [round(v, 4) for v in values[::4]], flush=True)
    return found


def gradient_variance(draws: int = 60) -> dict[str, float]:
    """The variance that draws give to the gradient of two processes, own draws against the same: traces, patched and shared."""
    subject = Subject(config(5, sites="norm"))
    batches = EpochBatches(subject.dataset, 60, 0, 0)
    inputs, targets, _ = batches[0]
    halves = [(inputs[:30], targets[:30]), (inputs[30:], targets[30:])]
    pool = pb.Draws.sample(subject.network, 2 * draws)
    names = [name for name, _ in subject.network.named_parameters()]

    def gradient(half: int, draw: int) -> dict[str, torch.Tensor]:
        with pb.use_draw(subject.network, pool[draw]):
            loss = nn.functional.cross_entropy(subject.network(halves[half][0]), halves[half][1])
        parts = torch.autograd.grad(loss, list(subject.network.parameters()))
        return dict(zip(names, parts, strict=True))

    traces: dict[str, float] = {}
    for which in ("own", "same"):
        sums: dict[str, Any] = dict.fromkeys(names, 0.0)
        squares: dict[str, Any] = dict.fromkeys(names, 0.0)
        for number in range(draws):
            one = gradient(0, number)
            other = gradient(1, draws + number if which == "own" else number)
            for name in names:
                mean = (one[name] + other[name]).double() / 2
                sums[name], squares[name] = sums[name] + mean, squares[name] + mean.square()
        for name in names:
            variance = float((squares[name] / draws - (sums[name] / draws).square()).sum()) * draws / (draws - 1)
            key = f"{which}, {'patched' if 'patchbayes' in name else 'shared'}"
            traces[key] = traces.get(key, 0.0) + variance
    return traces


def exchanged_bytes() -> dict[str, Any]:
    """Bytes of a step under DDP, counted by its hook; their number does not depend on how many processes there are."""
    found = {}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for name, make, shape in (
            ("small_cnn, norm+output", lambda: patched_net(config(5), 10, (1, 8, 8))[0], (4, 1, 8, 8)),
            ("resnet18, norm", _resnet18, (2, 3, 32, 32)),
        ):
            for learn in ("all", "patches"):
                found[f"{name}, {learn}"] = _ddp_step(make(), shape, learn, steps=1)
    finally:
        dist.destroy_process_group()
    return found


def on_two_processes() -> dict[str, Any]:
    """Run by torchrun: a step under DDP, half of the batch on each process, and an all-reduce, the least of several."""
    found: dict[str, Any] = {"steps": {}, "all_reduce": {}}
    with process_group(600) as (rank, ranks):
        torch.set_num_threads(1)
        for size in (1, 10**4, 10**6):
            values, seconds = torch.zeros(size), []
            for _ in range(10):
                dist.barrier()
                began = time.perf_counter()
                dist.all_reduce(values)
                seconds.append(time.perf_counter() - began)
            found["all_reduce"][4 * size] = min(seconds)
        for components in COMPONENTS:
            for learn in ("all", "patches"):
                model = patched_net(config(components), 10, (1, 8, 8))[0]
                half = SETTINGS["batch_size"] // ranks
                found["steps"][f"{components}, {learn}"] = _ddp_step(model, (half, 1, 8, 8), learn)
    return found if rank == 0 else {}


def _resnet18() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = resnet18(1000)
    pb.patch_(model, pb.EMP(5), "norm")
    return model


def _ddp_step(model: nn.Module, shape: tuple[int, ...], learn: str, steps: int = 6) -> dict[str, Any]:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(learn == "all" or "patchbayes" in name)
    wrapped = nn.parallel.DistributedDataParallel(model)
    sent: list[int] = []

    def count(_state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        sent.append(bucket.buffer().numel() * bucket.buffer().element_size())
        future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return future.then(lambda done: done.value()[0] / dist.get_world_size())

    wrapped.register_comm_hook(None, count)
    generator = torch.Generator().manual_seed(dist.get_rank())
    inputs, targets = torch.randn(shape, generator=generator), torch.randint(10, shape[:1], generator=generator)
    seconds = []
    for _ in range(steps):
        began = time.process_time()
        nn.functional.cross_entropy(wrapped(inputs), targets).backward()
        seconds.append(time.process_time() - began)
    patched = sum(p.numel() for s in network_of(model).sites for p in s.parameters().values())
    return {
        "bytes": sum(sent) // steps,
        "seconds": statistics.median(seconds[1:] or seconds),
        "parameters": sum(p.numel() for p in model.parameters()),
        "patched_parameters": patched,
    }


def resnet_seconds(batch: int = 4, rounds: int = 3) -> dict[str, float]:
    """Processor seconds of a step of ResNet-18 (images of 32 pixels, norm patches), all learning and patches alone."""
    found = {}
    for learn in ("all", "patches"):
        model = _resnet18()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(learn == "all" or "patchbayes" in name)
        generator = torch.Generator().manual_seed(0)
        x, y = torch.randn(batch, 3, 32, 32, generator=generator), torch.randint(1000, (batch,), generator=generator)
        seconds = []
        for _ in range(rounds + 1):
            began = time.process_time()
            nn.functional.cross_entropy(model(x), y).backward()
            seconds.append(time.process_time() - began)
        found[learn] = statistics.median(seconds[1:])
    return found


def two_processes() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", __file__]
        subprocess.run([*command, "--rank-part", str(path)], check=True, timeout=900)
        return json.loads(path.read_text())


#: Whole trainings: settings and processes of each kind. Steps of the residual network take longer than their calls.
REAL_SETTINGS = {
    "data": "fashion", "model": "small_resnet", "augmentation": "none", "batch_size": 100, "schedule": "constant",
    "epochs": 8, "threads": 1,
}  # fmt: skip
REAL_KINDS: dict[str, tuple[dict[str, Any], int]] = {
    "plain": ({}, 1),
    "plain, two ranks": ({}, 2),
    "coordinate descent": ({"alternate": TURN}, 1),
    "two workers": ({"alternate": TURN, "component_workers": 2}, 1),
}


def real_runs(seeds: tuple[int, ...] = (0,)) -> list[dict[str, Any]]:
    """The mean training NLL of every epoch and the wall seconds until then, of whole trainings, kinds in turn."""
    found = []
    for components in COMPONENTS:
        for seed in seeds:
            for kind, (settings, ranks) in REAL_KINDS.items():
                with tempfile.TemporaryDirectory() as folder:
                    rows = _real_run(Path(folder) / "run", components, seed, settings, ranks)
                nlls = [row["nll"] for row in rows]
                seconds = list(itertools.accumulate(row["train_seconds"] for row in rows))
                found.append({"components": components, "kind": kind, "seed": seed, "nll": nlls, "seconds": seconds})
                print(components, kind, seed, round(nlls[-1], 3), round(seconds[-1], 1), flush=True)
    return found


def _real_run(folder: Path, components: int, seed: int, settings: dict[str, Any], ranks: int) -> list[dict[str, Any]]:
    launcher = ["torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", "-m"] if ranks > 1 else []
    words = [f"{name}={value}" for name, value in {**REAL_SETTINGS, "seed": seed, **settings}.items()]
    given = [part for word in words for part in ("--set", word)]
    command = [sys.executable, "-m", *launcher, "patchbayes", "train", str(folder), "--method", f"emp({components})"]
    subprocess.run([*command, *given, "--quiet"], check=True, timeout=900, capture_output=True)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


PARTS = {
    "step_seconds": step_seconds,
    "trajectories": trajectories,
    "exchanged_bytes": exchanged_bytes,
    "gradient_variance": gradient_variance,
    "resnet18_seconds": resnet_seconds,
    "two_processes": two_processes,
    "real_runs": real_runs,
}


def measure(again: list[str]) -> None:
    """Every part that the record does not have yet, or the parts named again; it is written after each."""
    path = RESULTS / "scaling.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    parts = {name: found[name] for name in PARTS if name in found}
    for name, part in PARTS.items():
        if name in again or (name not in parts and not again):
            parts[name] = part()
            num_data = len(data_of(SETTINGS["data"]).train)
            settings = {**SETTINGS, "turn": TURN, "target_epoch": TARGET_EPOCH, "num_data": num_data}
            write_record("scaling", {"settings": settings, **parts})
            print(name, "done", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--again", nargs="+", choices=list(PARTS), default=[], help="measure these parts alone, again")
    parser.add_argument("--rank-part", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.rank_part:
        found = on_two_processes()
        if found:
            arguments.rank_part.write_text(json.dumps(found))
    else:
        measure(arguments.again)


if __name__ == "__main__":
    main()
