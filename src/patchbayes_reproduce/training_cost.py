"""What a training step costs (section 5): time, arithmetic and memory of every method against the unpatched network.

The paper: the unpatched ResNet-18 took about a week, EMP and ECMP "only a few additional hours"; a method with a parameter
overhead of 100 %, such as a mean-field Gaussian, would need twice the FLOPs and train 2 to 4 times as long.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from patchbayes.errors import PatchbayesError
from patchbayes.likelihoods import Categorical
from patchbayes.runs import TrainingConfig
from patchbayes.runs.loss import TrainingLoss, build_optimizer
from patchbayes.runs.network import patched_net

from .experiment import ComparedNumber, Experiment, Scale, TextTable, Workspace
from .step_memory import saved_for_backward

#: Methods by the names that records have for them.
METHODS = {
    "vanilla": "vanilla",
    "dropout": "dropout(0.005)",
    "emp": "emp(5)",
    "ecmp": "ecmp(5)",
    "meanfield": "meanfield",
    "ensemble": "ensemble(5)",
}
_NUM_DATA = 50_000  # N of the KL; it changes no cost
_WEEK = 168.0  # hours


@dataclass(frozen=True)
class Subject:
    """A network by name, and the batch of random inputs that a step trains it on."""

    model: str
    num_classes: int
    input_shape: tuple[int, ...]
    batch_size: int
    rounds: int


_SUBJECTS: Mapping[Scale, Subject] = {
    "smoke": Subject("small_cnn", 10, (1, 8, 8), 16, 3),
    "small": Subject("resnet18_cifar", 100, (3, 32, 32), 32, 11),
    "paper": Subject("resnet18", 1000, (3, 224, 224), 256, 51),
}


class TrainingStep:
    """A training step as `patchbayes train` makes it: forward, backward and Adam, on the same batch every time.

    All methods have the simplified loss, weight decay in the optimizer; mean-field, which needs its KL, has the ELBO. The
    ensemble trains its five members in each step.
    """

    def __init__(self, method: str, subject: Subject, device: torch.device) -> None:
        content = {
            "data": "random",
            "model": subject.model,
            "method": METHODS[method],
            "batch_size": subject.batch_size,
            "objective": "elbo" if method == "meanfield" else "simplified",
        }
        config = TrainingConfig.from_json(content)
        network, _ = patched_net(config, subject.num_classes, subject.input_shape)
        self.loss = TrainingLoss(network.to(device), Categorical(), config, _NUM_DATA).train()
        self.optimizer = build_optimizer(config, network, self.loss.likelihood)
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(subject.batch_size, *subject.input_shape, generator=generator).to(device)
        self.targets = torch.randint(subject.num_classes, (subject.batch_size,), generator=generator).to(device)

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        self.loss(self.inputs, self.targets)[0].backward()
        self.optimizer.step()

    def memory(self) -> dict[str, int]:
        """Bytes that a step holds, counted from the tensors themselves: the same on every machine. After a first step."""
        parameters = list(self.loss.parameters())
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        return {
            "parameters": sum(p.nbytes for p in parameters),
            "gradients": sum(p.grad.nbytes for p in parameters if p.grad is not None),
            "optimizer": sum(value.nbytes for value in states if isinstance(value, torch.Tensor)),
            "saved_for_backward": saved_for_backward(self.loss, lambda: self.loss(self.inputs, self.targets)),
        }

    def flops(self) -> int:
        """Arithmetic of the matrix products and convolutions of a step."""
        with FlopCounterMode(display=False) as counter:
            self()
        return int(counter.get_total_flops())


def run(scale: Scale, setting: Workspace) -> dict[str, Any]:
    """Memory, FLOPs and seconds of a step by method; a method that does not fit into a GPU's memory is left out."""
    subject = _SUBJECTS[scale]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if scale == "paper" and device.type == "cpu":
        raise PatchbayesError(
            "reproduce cost: at the paper's scale, batches of 256 images of 224 x 224, it is measured on a GPU; torch sees "
            "none here.\n  do       --scale small."
        )
    steps: dict[str, TrainingStep] = {}
    costs: dict[str, dict[str, Any]] = {}
    for method in METHODS:
        setting.say(f"{method}: memory and FLOPs")
        before = _allocated(device)
        step = _started(method, subject, device)
        if step is None:
            setting.say(f"{method} does not fit into the memory of {device}")
            continue
        peak = None if before is None else torch.cuda.max_memory_allocated(device) - before
        costs[method] = {"memory": step.memory(), "peak_on_gpu": peak, "flops": step.flops()}
        steps[method] = step
    setting.say(f"{subject.rounds} rounds of all methods in turn")
    for method, seconds in in_turn(steps, subject.rounds).items():
        costs[method]["seconds"] = seconds
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {"scale": scale, "device": name, "subject": asdict(subject), "methods": costs}


def _started(method: str, subject: Subject, device: torch.device) -> TrainingStep | None:
    """A step that ran twice, since the first has no optimizer state yet; None where it does not fit into memory."""
    try:
        step = TrainingStep(method, subject, device)
        step()
        step()
    except torch.OutOfMemoryError:
        return None
    return step


def _allocated(device: torch.device) -> int | None:
    """Bytes in use on a GPU, from where the peak is measured anew; None for a processor, where torch does not count."""
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def in_turn(steps: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every step in every round. All take turns, every second round backwards: noise hits all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds):
        for name in list(steps) if number % 2 == 0 else list(steps)[::-1]:
            began = _now()
            steps[name]()
            seconds[name].append(_now() - began)
    return seconds


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def ratio_quartiles(seconds: Sequence[float], reference: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile of the ratio, taken within each round."""
    low, middle, high = statistics.quantiles([a / b for a, b in zip(seconds, reference, strict=True)], n=4)
    return low, middle, high


def rows(result: dict[str, Any]) -> list[ComparedNumber]:
    """What the paper says of its week of training: "a few additional hours" is 2 to 6; "2-4x" is 3 +- 1."""
    subject, costs = result["subject"], result["methods"]
    comparable = subject["model"].startswith("resnet18")
    why = f"{subject['model']}, batch {subject['batch_size']}, {result['device']}"

    def claim(what: str, method: str, paper: float, tolerance: float, ours: Callable[[str], float]) -> ComparedNumber:
        measured = ours(method) if method in costs else None
        missing = "" if method in costs else "; it does not fit into memory"
        return ComparedNumber(
            f"{what}, times vanilla", paper, measured, tolerance if comparable else None, why + missing
        )

    def of_time(method: str) -> float:
        return ratio_quartiles(costs[method]["seconds"], costs["vanilla"]["seconds"])[1]

    def of_flops(method: str) -> float:
        return float(costs[method]["flops"] / costs["vanilla"]["flops"])

    few = "(a few additional hours on a week, read as 2 to 6)"
    return [
        claim(f"training time of EMP {few}", "emp", 1.024, 0.012, of_time),
        claim(f"training time of ECMP {few}", "ecmp", 1.024, 0.012, of_time),
        claim("FLOPs of mean-field (twice)", "meanfield", 2.0, 0.1, of_flops),
        claim("training time of mean-field (2 to 4)", "meanfield", 3.0, 1.0, of_time),
    ]


def tables(result: dict[str, Any]) -> dict[str, TextTable]:
    subject, costs = result["subject"], result["methods"]
    plain = costs["vanilla"]
    times, memory = [], []
    for method in METHODS:
        if method not in costs:
            times.append([method, "does not fit into memory", "-", "-", "-"])
            continue
        cost = costs[method]
        low, ratio, high = ratio_quartiles(cost["seconds"], plain["seconds"])
        times.append(
            [
                method,
                f"{statistics.median(cost['seconds']):.4g}",
                f"{ratio:.3f} ({low:.3f} to {high:.3f})",
                f"{_WEEK * (ratio - 1):+.1f}",
                f"{cost['flops'] / plain['flops']:.3f}",
            ]
        )
        parts = cost["memory"]
        total = sum(parts.values())
        peak = cost["peak_on_gpu"]
        memory.append(
            [
                method,
                *(f"{parts[part] / 1e6:.2f}" for part in plain["memory"]),
                f"{total / sum(plain['memory'].values()):.3f}",
                f"{parts['parameters'] / plain['memory']['parameters']:.3f}",
                "-" if peak is None else f"{peak / 1e6:.2f}",
            ]
        )
    what = f"{subject['model']}, {' x '.join(map(str, subject['input_shape']))}, batch {subject['batch_size']}"
    rounds = f"{result['device']}, {subject['rounds']} rounds"
    names = ("parameters", "gradients", "optimizer", "saved for backward")
    return {
        f"Time of a training step: {what}; {rounds}, median and quartiles of the ratio within a round": (
            ["method", "seconds", "times vanilla", "hours more on a week", "FLOPs, times vanilla"],
            times,
        ),
        f"Memory of a training step: {what}": (
            [
                "method",
                *(f"{name}, MB" for name in names),
                "all, times vanilla",
                "parameters, times vanilla",
                "peak on GPU, MB",
            ],
            memory,
        ),
    }


EXPERIMENT = Experiment(
    name="cost",
    title="The cost of training",
    items=("section 5",),
    duration={"smoke": "2 s", "small": "5 min", "paper": "5 min on a GPU"},
    run=run,
    rows=rows,
    tables=tables,
)
