"""What the paper's two image experiments would take on one GPU: hours and memory, from parts that are counted here.

Operations of a training step and of a forward pass are counted on two images and scaled to the batch, the epochs, the test
images and the draws; memory is that of the parameters, gradients and Adam's two averages, and of what the backward pass keeps
of a batch. Hours follow from the speed that a card sustains, which is an assumption and stated.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from patchbayes.runs import TrainingConfig
from patchbayes.runs.network import patched_net

from .experiment import ComparedNumber, Experiment, Scale, TextTable, Workspace
from .image_study import METHODS
from .step_memory import saved_for_backward

#: Operations a second that a card sustains in float32, a multiplication and an addition being two.
_SUSTAINED = 1e13
_COUNTED = 2  # images that operations and bytes are counted on
_STATES = 4  # of a parameter: itself, its gradient, Adam's two averages


@dataclass(frozen=True)
class PaperScale:
    """An experiment of the paper: its network, images and extent. corrupted: images of all corruptions and severities."""

    model: str
    classes: int
    side: int
    batch: int
    epochs: int
    train: int
    test: int
    draws: int
    corrupted: int = 0
    corrupted_draws: int = 0


_SCALES = {
    "CIFAR-100": PaperScale("pyramidnet110", 100, 32, 256, 400, 50_000, 10_000, 200),
    "ImageNet": PaperScale("resnet18", 1000, 224, 256, 100, 1_281_167, 50_000, 200, 75 * 50_000, 100),
}
_SMOKE = {"digits": PaperScale("small_cnn", 10, 8, 32, 2, 1000, 100, 5)}
_LABELS = ("vanilla", "dropout", "emp_bn_output", "ecmp_bn_output")


def run(scale: Scale, setting: Workspace) -> dict[str, Any]:
    """Counts for each experiment and method: the same on every machine."""
    found: dict[str, Any] = {}
    for name, paper in (_SMOKE if scale == "smoke" else _SCALES).items():
        found[name] = {"scale": vars(paper), "methods": {}}
        for label in _LABELS:
            setting.say(f"counting {name}, {label}")
            found[name]["methods"][label] = _counts(paper, label)
    return {"experiments": found}


def _counts(paper: PaperScale, label: str) -> dict[str, float]:
    config = TrainingConfig.from_json({"data": "random", "model": paper.model, **METHODS[label]})
    shape = (3, paper.side, paper.side)
    network, _ = patched_net(config, paper.classes, shape)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_COUNTED, *shape, generator=generator)
    y = torch.randint(paper.classes, (_COUNTED,), generator=generator)
    with FlopCounterMode(display=False) as forward, torch.no_grad():
        network(x)
    with FlopCounterMode(display=False) as step:
        F.cross_entropy(network(x), y).backward()
    return {
        "parameters": sum(p.numel() for p in network.parameters()),
        "forward_flops": forward.get_total_flops() / _COUNTED,
        "step_flops": step.get_total_flops() / _COUNTED,
        "saved_bytes": saved_for_backward(network, lambda: network(x)) / _COUNTED,
    }


def needs(paper: PaperScale, counts: dict[str, float], draws: bool) -> dict[str, float]:
    """Hours of training, of testing and under corruption, and gigabytes of a training step."""
    tested, corrupted = (paper.draws, paper.corrupted_draws) if draws else (1, 1)
    hour = 3600 * _SUSTAINED
    return {
        "training": paper.epochs * paper.train * counts["step_flops"] / hour,
        "testing": paper.test * tested * counts["forward_flops"] / hour,
        "corrupted": paper.corrupted * corrupted * counts["forward_flops"] / hour,
        "gigabytes": (4 * _STATES * counts["parameters"] + paper.batch * counts["saved_bytes"]) / 1e9,
    }


def rows(result: dict[str, Any]) -> list[ComparedNumber]:
    """The paper gives a week on several GPUs of a kind that it does not name."""
    return []


def tables(result: dict[str, Any]) -> dict[str, TextTable]:
    made: dict[str, TextTable] = {}
    header = ["method", "training, h", "testing, h", "under corruption, h", "memory of a step, GB"]
    for name, found in result["experiments"].items():
        paper = PaperScale(**found["scale"])
        lines = []
        for label, counts in found["methods"].items():
            need = needs(paper, counts, draws=label != "vanilla")
            lines.append([label, *(f"{need[key]:.3g}" for key in ("training", "testing", "corrupted", "gigabytes"))])
        title = f"{name}: {paper.model}, batch {paper.batch}, {paper.epochs} epochs, S = {paper.draws}, one card that sustains "
        made[f"{title}{_SUSTAINED / 1e12:g} TFLOP/s (an assumption), every draw a whole pass"] = header, lines
    return made


EXPERIMENT = Experiment(
    name="gpu-needs",
    title="What paper scale needs of one GPU",
    items=("section 5",),
    duration={"smoke": "1 s", "small": "1 min", "paper": "1 min"},
    run=run,
    rows=rows,
    tables=tables,
)
