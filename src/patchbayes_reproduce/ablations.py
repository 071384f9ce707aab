"""Ablations that the paper mentions: a component at zero (appendix D.1), K, the patched sites, S in training (appendix B.4).

All variants of a group train equally long, from the same start and on the same batches for a seed, and are compared with the
group's first variant seed by seed. The loss is the paper's simplified one (appendix C.1). Small scale is the bundled clothes,
2,000 images that the network learns by heart: K = 1, the network without patches, tells whether it is overconfident.

The residual network trains with Adam, its patches at K times the learning rate, since a component is drawn in a K-th of the
steps. How many draws a step takes is asked of an MLP with few assignments, which can all be taken: it trains with plain SGD,
whose expected step does not depend on S, so that only the noise of the gradient differs.
"""

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from patchbayes.data import Dataset, Split, read
from patchbayes.draws.draws import Draws
from patchbayes.errors import PatchbayesError
from patchbayes.files import write_atomically
from patchbayes.metrics import accuracy, calibration_floor, expected_calibration_error, fit_temperature, nll
from patchbayes.nets.named import build_net
from patchbayes.objective import Lambdas, parameter_groups
from patchbayes.patching.drawing import forward_draws
from patchbayes.patching.patch import patch_
from patchbayes.posteriors import ECMP, EMP, Mixture
from patchbayes.prediction import predict

from .calibrated_runs import outside_regime
from .experiment import ComparedNumber, Experiment, Scale, TextTable, Workspace, as_text
from .regression_sets import small_arithmetic
from .seed_statistics import interval_text, mean_of, paired_verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Ablation:
    """A mixture, where it is put, and the draws S of a training step; "exact" takes every assignment in each (B.4).

    share: part of the plan's epochs that it trains.
    """

    method: Mixture
    sites: str = "norm+output"
    network: Literal["residual", "mlp"] = "residual"
    draws: int | Literal["exact"] = 1
    share: float = 1.0


#: Four learned components and one at zero make five. "zero": weight and bias of the component; "zero weight": the bias is
#: not mixed, as in dropout (table 2). K = 1 is the unpatched network.
VARIANTS: dict[str, Ablation] = {
    "EMP": Ablation(EMP(5)),
    "EMP, one zero": Ablation(EMP(4, zero=True, mix_bias=True)),
    "EMP, one zero weight": Ablation(EMP(4, zero=True)),
    "ECMP": Ablation(ECMP(5)),
    "ECMP, one zero": Ablation(ECMP(4, zero=True, mix_bias=True)),
    "ECMP, one zero weight": Ablation(ECMP(4, zero=True)),
    **{f"EMP, K = {k}": Ablation(EMP(k)) for k in (1, 2, 3, 7, 10)},
    **{f"ECMP, K = {k}": Ablation(ECMP(k)) for k in (2, 10)},
    **{f"EMP, {sites}": Ablation(EMP(5), sites) for sites in ("norm", "output", "input", "norm+output+input")},
    **{f"S = {s}": Ablation(EMP(5), "norm", "mlp", s) for s in (1, 2, 5)},
    "exact, 25 networks": Ablation(EMP(5), "norm", "mlp", "exact"),
}
#: As many passes through the network for each: S draws in a step, and an S-th of the steps (appendix B.4).
EQUAL_COMPUTE: dict[str, Ablation] = {f"S = {s}": Ablation(EMP(5), "norm", "mlp", s, share=1 / s) for s in (1, 2, 5)}
EQUAL_TITLE = "Draws in a training step at equal compute: S draws, an S-th of the epochs"
#: title -> variants, the first of which is what the others are compared with
GROUPS: dict[str, Sequence[str]] = {
    "One component at zero, EMP": ("EMP", "EMP, one zero", "EMP, one zero weight"),
    "One component at zero, ECMP": ("ECMP", "ECMP, one zero", "ECMP, one zero weight"),
    "Number of components, EMP": ("EMP", *(f"EMP, K = {k}" for k in (1, 2, 3, 7, 10))),
    "Number of components, ECMP": ("ECMP", "ECMP, K = 2", "ECMP, K = 10"),
    "Patched sites": ("EMP", *(f"EMP, {sites}" for sites in ("norm", "output", "input", "norm+output+input"))),
    "Draws in a training step": ("S = 1", "S = 2", "S = 5", "exact, 25 networks"),
}


@dataclass(frozen=True)
class AblationPlan:
    """What the variants are trained on, and how long. The MLP is always trained on the digits.

    residual: the network by name. draws: S of the predictions. erased: share of the pixels made black in corrupted images.
    test: the part that is scored. held_out: share of the training part that the regime of the claims is told by.
    """

    data: str = "fashion"
    residual: str = "small_resnet"
    epochs: int = 40
    seeds: int = 5
    batch_size: int = 64
    draws: int = 20
    erased: float = 0.2
    test: str = "test"
    held_out: float = 1 / 3


_PLANS: Mapping[Scale, AblationPlan] = {
    "smoke": AblationPlan("digits", "small_cnn", epochs=1, seeds=2, batch_size=300, draws=5, test="test[:50]"),
    "small": AblationPlan(),
    "paper": AblationPlan("cifar100", "cifar_resnet20", epochs=200, batch_size=128, draws=100, held_out=0.1),
}


def run(scale: Scale, setting: Workspace) -> dict[str, Any]:
    """The scores of every variant and seed. Each is a file of the working directory, and is not computed again."""
    assert setting.work_dir is not None
    plan, folder = _PLANS[scale], setting.work_dir / f"ablations-{scale}"
    folder.mkdir(parents=True, exist_ok=True)
    data = {name: read(name, setting.data_dir, held_out=plan.held_out) for name in ("digits", plan.data)}

    def path_of(kind: str, label: str, seed: int) -> Path:
        return folder / f"{kind}{label.replace(', ', '-').replace(' ', '')}-{seed}.json"

    def is_finished(seed: int) -> bool:
        names = [("", label) for label in VARIANTS] + [("equal-", label) for label in EQUAL_COMPUTE]
        return all(path_of(kind, label, seed).exists() for kind, label in names)

    def scored(variants: Mapping[str, Ablation], kind: str, seed: int) -> dict[str, dict[str, float]]:
        scores: dict[str, dict[str, float]] = {}
        for label, variant in variants.items():
            path = path_of(kind, label, seed)
            settings = {"plan": asdict(plan), "variant": asdict(variant), "seed": seed}
            found = _read_scores(path, settings)
            if found is None:
                setting.say(f"{label}, seed {seed}")
                with small_arithmetic():
                    found = _trained_and_scored(variant, plan, data[_data_of(variant, plan)], seed)
                write_atomically(path, (json.dumps({"settings": settings, "scores": found}) + "\n").encode())
            scores[label] = found
        return scores

    seeds = [seed for seed in range(plan.seeds) if not setting.finished or is_finished(seed)]
    if not seeds:
        raise PatchbayesError(f"{folder}: no seed is finished yet; leave --finished out to go on.")
    each = [(scored(VARIANTS, "", seed), scored(EQUAL_COMPUTE, "equal-", seed)) for seed in seeds]
    variants = {label: [found[label] for found, _ in each] for label in VARIANTS}
    return {
        "scale": scale,
        "plan": asdict(plan) | {"seeds": len(seeds)},
        "variants": variants,
        "equal_compute": {label: [found[label] for _, found in each] for label in EQUAL_COMPUTE},
        "regimes": [{key: one[key] for key in ("train_accuracy", "temperature")} for one in variants["EMP, K = 1"]],
    }


def _data_of(variant: Ablation, plan: AblationPlan) -> str:
    return "digits" if variant.network == "mlp" else plan.data


def _read_scores(path: Path, settings: dict[str, Any]) -> dict[str, float] | None:
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text())
        scores: dict[str, float] = content["scores"]
        same = content["settings"] == json.loads(json.dumps(settings))
    except (ValueError, KeyError, TypeError):
        raise PatchbayesError(f"{path} is not a result of this experiment; move it away.") from None
    if not same:
        raise PatchbayesError(
            f"{path} was made with other settings.\n  do       choose another working directory, or move the file away."
        )
    return scores


def _trained_and_scored(variant: Ablation, plan: AblationPlan, data: Dataset, seed: int) -> dict[str, float]:
    began = time.perf_counter()
    network = train_variant(variant, plan, data, seed)
    seconds = time.perf_counter() - began
    assert data.held_out is not None
    trained, held_out, (raw, targets) = _whole(data.train), _whole(data.held_out), _whole(data.part(plan.test))
    of_training = _predicted(network, data, trained[0], plan)
    kept = torch.rand(raw.shape, generator=torch.Generator().manual_seed(0)) >= plan.erased
    log_probs, of_corrupted = (_predicted(network, data, inputs, plan) for inputs in (raw, raw * kept))
    return {
        "accuracy": accuracy(log_probs.exp(), targets),
        "nll": nll(log_probs, targets),
        "ece": expected_calibration_error(log_probs.exp(), targets),
        "ece_floor": calibration_floor(log_probs.exp(), replicates=200).mean,
        "corrupted_nll": nll(of_corrupted, targets),
        "train_nll": nll(of_training, trained[1]),
        "train_accuracy": accuracy(of_training.exp(), trained[1]),
        "temperature": fit_temperature(_predicted(network, data, held_out[0], plan), held_out[1]),
        "parameters": sum(p.numel() for p in network.parameters()),
        "training_seconds": round(seconds, 2),
    }


def train_variant(variant: Ablation, plan: AblationPlan, data: Dataset, seed: int) -> nn.Module:
    """The network of a variant after its share of the plan's epochs; start, batches and draws follow from the seed."""
    epochs = math.ceil(variant.share * plan.epochs)
    network = _patched(variant, plan, data, seed).train()
    device = next(network.parameters()).device
    draws = Draws.enumerate(network) if variant.draws == "exact" else variant.draws
    _update_statistics_once_a_step_(network, draws if isinstance(draws, int) else len(draws))
    raw, targets = _whole(data.train)
    steps = -(-len(raw) // plan.batch_size)
    optimizer = _optimizer(variant, plan, network)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * steps)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for batch in torch.randperm(len(raw), generator=generator).tensor_split(steps):
            inputs = data.preparation.inputs(data.preparation.augment(raw[batch], generator))
            optimizer.zero_grad()
            mean_cross_entropy(network, inputs.to(device), targets[batch].to(device), draws).backward()
            optimizer.step()
            schedule.step()
    return network


def mean_cross_entropy(network: nn.Module, inputs: Tensor, targets: Tensor, draws: int | Draws) -> Tensor:
    """The cross entropy of a batch, (), averaged over draws: (1 / S B) sum_s sum_b -log p(y_b | x_b, w_s).

    With `Draws.enumerate` it is the expectation under q, and its gradient has no noise but the batch's (appendix B.4): all
    assignments have the same probability here.
    """
    logits = forward_draws(network, inputs, draws)
    return F.cross_entropy(logits.flatten(0, 1), targets.repeat(len(logits)))


def _patched(variant: Ablation, plan: AblationPlan, data: Dataset, seed: int) -> nn.Module:
    spec = "mlp" if variant.network == "mlp" else plan.residual
    network = build_net(spec, data.num_outputs, data.input_shape, seed, trust_code=True)
    patch_(network, variant.method, variant.sites, generator=torch.Generator().manual_seed(seed))
    return network.to("cuda" if torch.cuda.is_available() else "cpu")


def _update_statistics_once_a_step_(network: nn.Module, draws: int) -> None:
    """Running statistics forget as much in a step of S draws, which update them S times, as in a step of one."""
    for module in network.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            assert module.momentum is not None
            module.momentum = 1 - (1 - module.momentum) ** (1 / draws)


def _optimizer(variant: Ablation, plan: AblationPlan, network: nn.Module) -> torch.optim.Optimizer:
    """A patch is drawn in one of K steps: it learns K times as fast, so that it comes as far as the shared parameters."""
    groups = parameter_groups(network, Lambdas.equal(0.001 / plan.batch_size))
    rate = 0.02 if variant.network == "mlp" else 0.002
    for group in groups:
        group["lr"] = rate * (variant.method.outcomes if group["name"].startswith("patched") else 1)
    if variant.network == "mlp":
        return torch.optim.SGD(groups, momentum=0.9)
    return torch.optim.Adam(groups)


def _whole(split: Split) -> tuple[Tensor, Tensor]:
    return split.fetch(torch.arange(len(split)))


def _predicted(network: nn.Module, data: Dataset, raw: Tensor, plan: AblationPlan) -> Tensor:
    """The log predictive of raw inputs, (B, C)."""
    batches = [data.preparation.inputs(part) for part in raw.split(500)]
    log_probs: Tensor = predict(network, batches, plan.draws).log_probs
    return log_probs.cpu()


def rows(result: dict[str, Any]) -> list[ComparedNumber]:
    """The paper mentions these variants and gives no number."""
    return []


#: column -> key of the scores, factor; smaller is better for those compared
_COMPARED = {
    "error %": ("accuracy", -100),
    "NLL": ("nll", 1),
    "ECE %": ("ece", 100),
    "corrupted NLL": ("corrupted_nll", 1),
}


def tables(result: dict[str, Any]) -> dict[str, TextTable]:
    """Scores of each group, and their differences to its first variant, paired over seeds."""
    made: dict[str, TextTable] = {}
    inside = outside_regime(result["regimes"]) is None
    for title, labels in GROUPS.items():
        judged = inside and VARIANTS[labels[0]].network == "residual"  # the digits never make an overconfident network
        reference = result["variants"][labels[0]]
        header = ["variant", "parameters", "accuracy %", "NLL", "ECE %", "floor %", "corrupted NLL"]
        header += [f"{column} against {labels[0]}" for column in _COMPARED]
        lines = []
        for label in labels:
            scores = result["variants"][label]
            verdicts = [
                "-"
                if scores is reference
                else "not comparable"
                if not judged
                else paired_verdict([factor * s[key] for s in scores], [factor * s[key] for s in reference])
                for key, factor in _COMPARED.values()
            ]
            lines.append(
                [
                    label,
                    f"{scores[0]['parameters']:,}",
                    interval_text([100 * s["accuracy"] for s in scores]),
                    interval_text([s["nll"] for s in scores]),
                    interval_text([100 * s["ece"] for s in scores]),
                    as_text(mean_of([100 * s["ece_floor"] for s in scores]), 3),
                    interval_text([s["corrupted_nll"] for s in scores]),
                    *verdicts,
                ]
            )
        plan = result["plan"]
        data = _data_of(VARIANTS[labels[0]], AblationPlan(**plan))
        made[f"{title}: {data}, {plan['epochs']} epochs, {plan['seeds']} seeds; mean and 95 % interval"] = header, lines
    made[EQUAL_TITLE] = _of_equal_compute(result["equal_compute"])
    return made


def _of_equal_compute(scores: Mapping[str, Sequence[Mapping[str, float]]]) -> TextTable:
    lines = []
    for label, rows in scores.items():
        of_training, of_test = ([row[key] for row in rows] for key in ("train_nll", "nll"))
        reference = [row["train_nll"] for row in scores["S = 1"]]
        verdict = "-" if label == "S = 1" else paired_verdict(of_training, reference)
        lines.append([label, interval_text(of_training), verdict, interval_text(of_test)])
    return ["variant", "training NLL", "against S = 1", "test NLL"], lines


def figures(result: dict[str, Any]) -> "dict[str, Figure]":
    """NLL and ECE against the number of components."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3), layout="constrained")
    for axes, (key, factor, name) in zip(
        figure.subplots(1, 2), (("nll", 1, "NLL"), ("ece", 100, "ECE %")), strict=True
    ):
        for method in ("EMP", "ECMP"):
            labels = GROUPS[f"Number of components, {method}"]
            points = sorted(
                (VARIANTS[label].method.components, [factor * s[key] for s in result["variants"][label]])
                for label in labels
            )
            axes.plot([k for k, _ in points], [mean_of(values) for _, values in points], label=method)
            for k, values in points:
                axes.plot([k] * len(values), values, linestyle="", marker=".", color=axes.lines[-1].get_color())
        axes.set(xlabel="components K", ylabel=name)
        axes.legend(fontsize="small")
    return {"ablations_components": figure}


EXPERIMENT = Experiment(
    name="ablations",
    title="Ablations",
    items=("appendix B.4", "appendix D.1", "sections 3.3 and 3.4"),
    duration={"smoke": "20 s", "small": "an hour of one idle core", "paper": "GPU-days"},
    run=run,
    rows=rows,
    tables=tables,
    figures=figures,
)
