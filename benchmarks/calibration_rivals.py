"""The rivals of `bayesianize_`, for `bayesianize.py --rivals`: the same networks and images, at most 20 passes.

Every rival is given a temperature of its own, fitted to held-out images. Those that learn from training data (ABNN, SWAG,
trained patches, Laplace) see at most 5,000 training images once: no rival is given a whole epoch.

    temperature scaling, vector scaling    of the logits (the second: a factor and a shift for each class)
    views + temperature                    the plain network on the image and its mirror image; on ten shifted images
    last-layer Laplace                     laplace-torch: Kronecker factors, prior by marginal likelihood, probit; one pass
    ABNN                                   the layer of torch-uncertainty, two networks of ten draws, trained by the loop here
    SWAG on norms                          20 snapshots of the norm parameters on the way of SGD; diagonal and low rank
    Gaussian noise on norms                one relative size, chosen on 300 held-out images
    dropout after the fact                 before norms and output, the rate chosen on 300 held-out images
    mean network of trained patches        ECMP(5) on the norms, trained, its mean in one pass
"""

import copy
import functools
import json
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from calibration_curves import BATCH, DRAWS, HELD_OUT, SUBJECTS, log_probs, made
from records import commit, write_record
from rivals import insert_dropout_
from scoring import paired, row
from subjects import define_torchvision_operators
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import patchbayes as pb
from patchbayes import metrics, views

FEW = 300
OURS, MEAN, VIEWED = "bayesianize_", "bayesianize_, its mean network", "bayesianize_ on ten views"
SIZES, RATES = (0.03, 0.06, 0.1, 0.16), (0.005, 0.015, 0.04, 0.1)
#: Of SWAG and trained patches: 0.01 is too fast for some trained networks.
LEARNING_RATES = (0.01, 0.001)

Predict = Callable[[Tensor], Tensor]


@dataclass
class Material:
    """One network and what everybody may see: held-out images for choices, training images for those that train."""

    network: nn.Module
    held_out: tuple[Tensor, Tensor]
    training: tuple[Tensor, Tensor]
    seed: int

    def copied(self) -> nn.Module:
        return copy.deepcopy(self.network)

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)

    def fitted(self, predict: Predict, number: int = 500) -> Predict:
        """The prediction with the temperature that fits so many held-out images."""
        x, y = (part[:number] for part in self.held_out)
        temperature = metrics.fit_temperature(predict(x), y)
        return lambda new: metrics.apply_temperature(predict(new), temperature)

    def best(self, make: Callable[[float], Predict], values: Iterable[float]) -> tuple[float, Predict]:
        """Of several settings the one with the least NLL on 300 held-out images, each with its temperature there."""
        x, y = (part[:FEW] for part in self.held_out)

        def loss(value: float) -> float:
            found = make(value)(x)
            return metrics.nll(metrics.apply_temperature(found, metrics.fit_temperature(found, y)), y)

        make = functools.cache(make)
        value = min(values, key=loss)
        return value, make(value)


def plain(model: nn.Module) -> Predict:
    """Log-probabilities of one pass."""

    @torch.no_grad()
    def predict(x: Tensor) -> Tensor:
        return torch.cat([model(part).float().log_softmax(1) for part in x.split(BATCH)])

    return predict


def averaged(passes: Callable[[], Iterable[nn.Module]]) -> Predict:
    """Log of the mean probability over networks, one after the other."""

    def predict(x: Tensor) -> Tensor:
        found = [plain(model)(x) for model in passes()]
        return torch.logsumexp(torch.stack(found), 0) - math.log(len(found))

    return predict


def _norms(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]


def _train(
    model: nn.Module,
    material: Material,
    parameters: list[nn.Parameter],
    rate: float,
    weight: Tensor | None = None,
) -> Iterable[int]:
    """SGD over the training images once, with the running statistics as they are; the number of each step."""
    x, y = material.training
    optimizer = torch.optim.SGD(parameters, rate, 0.9, weight_decay=5e-4)
    for step, rows in enumerate(torch.randperm(len(x), generator=material.generator()).split(BATCH)):
        optimizer.zero_grad()
        cross_entropy(model(x[rows]), y[rows], weight).backward()
        optimizer.step()
        yield step


def temperature(material: Material) -> Predict:
    return material.fitted(plain(material.network), len(material.held_out[1]))


def vector_scaling(material: Material) -> Predict:
    x, y = material.held_out
    logits = plain(material.network)(x)
    factors, shifts = torch.ones(logits.shape[1], requires_grad=True), torch.zeros(logits.shape[1], requires_grad=True)
    optimizer = torch.optim.LBFGS([factors, shifts], max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(logits * factors + shifts, y)
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    a, b = factors.detach(), shifts.detach()
    return lambda new: (plain(material.network)(new) * a + b).log_softmax(1)


def seen(which: Any) -> Callable[[Material], Predict]:
    def make(material: Material) -> Predict:
        def predict(x: Tensor) -> Tensor:
            parts = [
                pb.predict(material.network, part, "mean", views=which, likelihood=pb.likelihoods.Categorical())
                for part in x.split(BATCH)
            ]
            return torch.cat([part.log_probs for part in parts])

        return material.fitted(predict)

    return make


def laplace(material: Material) -> Predict:
    define_torchvision_operators()
    from laplace import Laplace

    x, y = material.training
    model: nn.Module = material.copied().to(memory_format=torch.contiguous_format)  # its vectors are views
    approximation = Laplace(model, "classification", subset_of_weights="last_layer", hessian_structure="kron")
    approximation.fit(DataLoader(TensorDataset(x, y), batch_size=BATCH))
    approximation.optimize_prior_precision(method="marglik")

    def predict(new: Tensor) -> Tensor:
        found = [approximation(part, pred_type="glm", link_approx="probit") for part in new.split(BATCH)]
        return torch.cat(found).detach().clamp_min(1e-12).log()

    return material.fitted(predict)


def abnn(material: Material) -> Predict:
    define_torchvision_operators()
    from torch_uncertainty.layers.bayesian.abnn import BatchNormAdapter2d
    from torch_uncertainty.post_processing.abnn import _replace_bn_layers

    members: list[nn.Module] = []
    classes = material.network(material.held_out[0][:2]).shape[1]
    for member in range(2):
        model = material.copied()
        _replace_bn_layers(model, alpha=0.01)
        adapters = [module for module in model.modules() if isinstance(module, BatchNormAdapter2d)]
        generator = torch.Generator().manual_seed(2 * material.seed + member)
        weight = torch.ones(classes)
        weight[torch.randperm(classes, generator=generator)[: int(classes**0.5)]] += 4.0
        model.train()
        for _ in _train(model, material, [p for m in adapters for p in m.parameters()], 0.005, weight):
            pass
        members.append(model.eval())
    torch.manual_seed(material.seed)
    return material.fitted(averaged(lambda: [model for model in members for _ in range(DRAWS // 2)]))


def swag(material: Material) -> Predict:
    def make(rate: float) -> Predict:
        model = material.copied()
        parameters = [p for module in _norms(model) for p in module.parameters()]
        steps = math.ceil(len(material.training[0]) / BATCH)
        snapshots = [
            nn.utils.parameters_to_vector(parameters).detach().clone()
            for step in _train(model, material, parameters, rate)
            if step % max(1, steps // DRAWS) == 0
        ]
        way = torch.stack(snapshots)
        mean, away = way.mean(0), way - way.mean(0)
        deviation = away.square().mean(0).sqrt()
        generator = material.generator()
        drawn = [
            mean
            + (
                deviation * torch.randn(mean.shape, generator=generator)
                + torch.randn(len(way), generator=generator) @ away / math.sqrt(len(way) - 1)
            )
            / math.sqrt(2)
            for _ in range(DRAWS)
        ]

        def passes() -> Iterable[nn.Module]:
            for values in drawn:
                nn.utils.vector_to_parameters(values, parameters)
                yield model.eval()

        return averaged(passes)

    return material.fitted(material.best(make, LEARNING_RATES)[1])


def noise(material: Material) -> Predict:
    model = material.copied()
    parameters = [p for module in _norms(model) for p in module.parameters()]
    values = [p.detach().clone() for p in parameters]

    def make(size: float) -> Predict:
        @torch.no_grad()
        def passes() -> Iterable[nn.Module]:
            generator = material.generator()
            for _ in range(DRAWS):
                for p, value in zip(parameters, values, strict=True):
                    scale = size * value.square().mean().sqrt()
                    p.copy_(value + scale * torch.randn(value.shape, generator=generator))
                yield model

        return averaged(passes)

    return material.fitted(material.best(make, SIZES)[1])


def dropout(material: Material) -> Predict:
    model = material.copied()
    insert_dropout_(model)
    inserted = [module for module in model.modules() if isinstance(module, nn.Dropout)]

    def make(rate: float) -> Predict:
        def passes() -> Iterable[nn.Module]:
            torch.manual_seed(material.seed)
            for module in inserted:
                module.p = rate
                module.train()
            return [model] * DRAWS

        return averaged(passes)

    return material.fitted(material.best(make, RATES)[1])


def trained_mean(material: Material) -> Predict:
    def make(rate: float) -> Predict:
        model = material.copied()
        pb.patch_(model, pb.ECMP(5, jitter=0.1), "norm", generator=material.generator())
        patches = [p for site in pb.patched_sites(model).values() for p in site.parameters().values()]
        model.train()
        for module in _norms(model):
            module.eval()  # the running statistics stay
        for _ in _train(model, material, patches, rate):
            pass
        return plain(model.eval())

    return material.fitted(material.best(make, LEARNING_RATES)[1])


@dataclass(frozen=True)
class Rival:
    """How it is made, what a prediction costs in passes, what it sees of the training data, whether it depends on the seed."""

    make: Callable[[Material], Predict]
    passes: float
    trains: bool = False
    random: bool = False
    package: str | None = None


RIVALS: dict[str, Rival] = {
    "temperature scaling": Rival(temperature, 1),
    "vector scaling": Rival(vector_scaling, 1),
    "plain, mirrored too, + temperature": Rival(seen(views.mirror), 2),
    "plain, ten views, + temperature": Rival(seen(views.shifts()), 10),
    "last-layer Laplace": Rival(laplace, 1, trains=True, package="laplace"),
    "ABNN": Rival(abnn, DRAWS, trains=True, random=True, package="torch_uncertainty"),
    "SWAG on norms": Rival(swag, DRAWS, trains=True, random=True),
    "Gaussian noise on norms": Rival(noise, DRAWS, random=True),
    "dropout after the fact": Rival(dropout, DRAWS, random=True),
    "mean network of trained patches": Rival(trained_mean, 1, trains=True, random=True),
}


def missing(rival: Rival) -> str | None:
    """Why a rival cannot run here."""
    absent = rival.package is not None and find_spec(rival.package) is None
    return f"the package {rival.package} is not installed" if absent else None


#: What a run can be asked to measure; the mean network comes with OURS.
CONTESTANTS = [OURS, VIEWED, *RIVALS]


def contest(networks: list[str], seeds: list[int], scored: int, folder: Path, results: Path, titles: list[str]) -> None:
    """Measure what the record lacks: ours, then every rival on every network, those that depend on a seed with every seed."""
    path = results / "calibration_rivals.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"] if path.exists() else []
    for name in networks:
        subject = SUBJECTS[name](folder)
        assert subject.training is not None
        x, targets = subject.scored(scored)[0], subject.scored(scored)[1]
        x = subject.inputs(x)
        held_out = subject.held_out(HELD_OUT)
        together = (torch.cat([part for part, _ in held_out]), torch.cat([part for _, part in held_out]))
        reference = temperature(Material(subject.network, together, subject.training, 0))(x)

        def keep(title: str, seed: int, found: Tensor, **more: Any) -> None:
            one = {"network": name, "title": title, "seed": seed, "scored": scored, "commit": commit()}  # noqa: B023
            one |= row(found, targets) | paired(found, reference, targets) | more  # noqa: B023
            print(json.dumps(one), flush=True)
            rows.append(one)
            write_record("calibration_rivals", {"rows": rows}, results)

        def wanted(title: str, seed: int) -> bool:
            known = [(r["network"], r["title"], r["seed"], r["scored"]) for r in rows]
            return title in titles and (name, title, seed, scored) not in known  # noqa: B023

        for seed in seeds:
            material = Material(subject.network, together, subject.training, seed)
            if wanted(OURS, seed):
                model, how = made(subject, HELD_OUT, seed)
                keep(OURS, seed, log_probs(model, x, DRAWS), **how | {"passes": DRAWS, "trained_on": 0})
                keep(MEAN, seed, log_probs(model, x, "mean"), passes=1, trained_on=0)
            if wanted(VIEWED, seed):
                model, how = made(subject, HELD_OUT, seed, views=views.shifts())
                found = log_probs(model, x, DRAWS, views.shifts())
                keep(VIEWED, seed, found, **how | {"passes": DRAWS, "trained_on": 0})
            for title, rival in RIVALS.items():
                if not wanted(title, seed) or (seed != seeds[0] and not rival.random):
                    continue
                if missing(rival):
                    print(f"{title}: {missing(rival)}")
                    continue
                worked = time.process_time()
                predict = rival.make(material)
                worked = time.process_time() - worked
                images = len(subject.training[1]) if rival.trains else 0
                keep(title, seed, predict(x), passes=rival.passes, trained_on=images, cpu_seconds=worked)
