"""Simulated records for the report's tests, as the JSON of evaluation.json files, and how the tests read them."""

import base64
import copy
import io
import math
from functools import cache

import numpy as np
import torch
from hypothesis import strategies as st

from patchbayes import report
from patchbayes.report.records import EvaluatedRun
from patchbayes.runs.record import EvaluationRecord

CORRUPTIONS = [
    *(
        "gaussian_noise",
        "shot_noise",
        "impulse_noise",
        "defocus_blur",
        "glass_blur",
        "motion_blur",
        "zoom_blur",
        "snow",
    ),
    *("frost", "fog", "brightness", "contrast", "elastic_transform", "pixelate", "jpeg_compression"),
]
CLASSES = ["airplane", "bird", "car", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
# Of each method: how far its logits are too large, how much its draws differ, how good its trunk is.
METHODS = {
    "vanilla": (3.4, 0.0, 1.00),
    "Dropout(rate=0.1)": (3.0, 0.4, 0.99),
    "EMP(K=5)": (2.9, 0.7, 1.01),
    "ECMP(K=5)": (2.8, 0.9, 1.02),
}


class Simulation:
    """Logits of S draws for N examples of C classes, from a trunk that sees the truth through noise."""

    def __init__(self, method, seed, examples=800, draws=40):
        self.excess, self.spread, self.skill = METHODS[method]
        shared = np.random.default_rng(0)
        self.targets = shared.integers(len(CLASSES), size=examples)
        self.difficulty = shared.normal(size=(examples, len(CLASSES)))
        self.own = np.random.default_rng((seed, list(METHODS).index(method)))
        self.draws = draws if self.spread else 1

    def probs(self, signal=1.9, draws=None):
        """Class probabilities (S, N, C)."""
        evidence = signal * self.skill * np.eye(len(CLASSES))[self.targets] + 0.75 * self.difficulty
        trunk = evidence + 0.25 * self.own.normal(size=evidence.shape)
        jitter = self.spread * self.own.normal(size=(min(draws or self.draws, self.draws), *evidence.shape))
        return softmax(self.excess * (1.5 * trunk + 0.5 * jitter))


def softmax(logits):
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def bins_of(probs, targets, weights=None):
    """(count, confidence, accuracy) of 20 bins of the largest probability, NaN where a bin is empty."""
    confidence, right = probs.max(1), probs.argmax(1) == targets
    weights = np.ones(len(targets)) if weights is None else weights
    which = np.clip(np.ceil(confidence * 20).astype(int) - 1, 0, 19)
    count, *sums = (np.bincount(which, w, minlength=20) for w in (weights, weights * confidence, weights * right))
    with np.errstate(invalid="ignore"):
        return count, sums[0] / count, sums[1] / count


def scores(probs, targets, weights=None):
    """Every metric of the schema that follows from (N, C) probabilities; `weights` resample the examples."""
    weights = np.ones(len(targets)) if weights is None else weights
    count, confidence, accuracy = bins_of(probs, targets, weights)
    gaps = np.where(count > 5, np.abs(np.nan_to_num(confidence - accuracy)), 0)
    right = probs.argmax(1) == targets
    order = (-probs.max(1)).argsort()
    kept = weights[order].cumsum()
    risk = (weights * ~right)[order].cumsum() / np.maximum(kept, 1e-9)
    one_hot = np.eye(probs.shape[1])[targets]
    return {
        "accuracy": float(np.average(right, weights=weights)),
        "nll": float(np.average(-np.log(probs[np.arange(len(targets)), targets]), weights=weights)),
        "brier": float(np.average(((probs - one_hot) ** 2).sum(1), weights=weights)),
        "ece": float((count * gaps).sum() / count.sum()),
        "mce": float(gaps.max()),
        "aurc": float(np.average(risk, weights=weights[order])),
    }


def with_intervals(probs, targets, rng, resamples=30):
    values, size = scores(probs, targets), len(targets)
    samples = [
        scores(probs, targets, rng.multinomial(size, np.full(size, 1 / size)).astype(float)) for _ in range(resamples)
    ]
    limits = {name: np.quantile([s[name] for s in samples], [0.025, 0.975]) for name in values}
    # The basic bootstrap: calibration errors of resamples are larger than the original's.
    return {
        name: {"value": v, "low": float(2 * v - limits[name][1]), "high": float(2 * v - limits[name][0])}
        for name, v in values.items()
    }


def floors(probs, rng, resamples=10):
    """ECE and MCE against labels drawn from the probabilities themselves."""
    labels = [(rng.random((len(probs), 1)) > probs.cumsum(1)).sum(1).clip(max=9) for _ in range(resamples)]
    found = [scores(probs, drawn) for drawn in labels]
    return (float(np.mean([f[name] for f in found])) for name in ("ece", "mce"))


def scaled(probs, temperature):
    return softmax(np.log(probs) / temperature)


def nullable(values):
    return [None if math.isnan(v) else float(v) for v in values]


def picture(rng, size=24):
    from PIL import Image

    coarse = Image.fromarray(rng.integers(30, 230, size=(5, 5, 3), dtype=np.uint8))
    out = io.BytesIO()
    coarse.resize((size, size), Image.Resampling.BICUBIC).save(out, "PNG")
    return base64.b64encode(out.getvalue()).decode()


def auroc(foreign, own):
    order = np.concatenate([foreign, own]).argsort().argsort() + 1
    return float((order[: len(foreign)].sum() - len(foreign) * (len(foreign) + 1) / 2) / (len(foreign) * len(own)))


@cache
def _corrupted(method, seed):
    """Scores by corruption and severity: each step takes away some of what can be seen of the truth."""
    simulation = Simulation(method, seed + 2000)
    return [
        [
            scores(simulation.probs(1.9 - 0.22 * s * (1 + 0.04 * i), draws=3).mean(0), simulation.targets)
            for s in range(1, 6)
        ]
        for i in range(len(CORRUPTIONS))
    ]


@cache
def _simulate(method, seed):
    simulation = Simulation(method, seed)
    rng = np.random.default_rng((7, seed))
    members, targets = simulation.probs(), simulation.targets
    probs = members.mean(0)
    confidence, predicted = probs.max(1), probs.argmax(1)
    right = predicted == targets
    count, bin_confidence, bin_accuracy = bins_of(probs, targets)
    metrics = with_intervals(probs, targets, rng)
    metrics["ece"]["floor"], metrics["mce"]["floor"] = floors(probs, rng)
    held_out = Simulation(method, seed + 1000).probs().mean(0)
    temperature = float(min(np.linspace(0.5, 4, 36), key=lambda t: scores(scaled(held_out, t), targets)["nll"]))
    counts = [s for s in (1, 5, 20, 40) if s <= simulation.draws]
    curve = {s: scores(members[:s].mean(0), targets) for s in counts}
    information = (members * np.log(members)).sum(-1).mean(0) - (probs * np.log(probs)).sum(1)
    corrupted = {name: [[score[name] for score in row] for row in _corrupted(method, seed)] for name in ("nll", "ece")}
    errors, reference = (
        1 - np.array([[s["accuracy"] for s in row] for row in _corrupted(m, seed)]) for m in (method, "vanilla")
    )
    clean = 1 - metrics["accuracy"]["value"]
    clean_reference = 1 - scores(Simulation("vanilla", seed).probs().mean(0), targets)["accuracy"]
    foreign = simulation.probs(signal=0.0).mean(0).max(1)
    order = (-confidence).argsort()
    kept = [round(0.05 * k, 2) for k in range(1, 21)]
    edges = np.linspace(0, 1, 21)
    name = f"{method.split('(')[0].lower()}-seed{seed}"
    sites = ["", *[f"layer{i}.{j}.bn{k}" for i in (1, 2, 3) for j in (0, 1, 2) for k in (1, 2)], "fc"][1:]
    components = "K" in method

    def example(i):
        return {
            "index": int(i),
            "true": CLASSES[targets[i]],
            "predicted": CLASSES[predicted[i]],
            "confidence": float(confidence[i]),
            "mutual_information": float(information[i]),
            "png": picture(np.random.default_rng(int(i))),
        }

    record = {
        "schema": 1,
        "name": name,
        "folder": f"runs/{name}",
        "task": "classification",
        "method": method,
        "model": "cifar_resnet20",
        "sites": "norm+output" if components else "",
        "data": "cifar10",
        "split": "test[5000:]",
        "num_examples": len(targets),
        "classes": CLASSES,
        "draws": 40,
        "num_draws": simulation.draws,
        "exact": False,
        "seed": seed,
        "command": f"patchbayes evaluate runs/{name} --draws {simulation.draws} --split 'test[5000:]'",
        "train_command": f"patchbayes train runs/{name} --data cifar10 --model cifar_resnet20 "
        f"--method {name.split('-')[0]} --seed {seed}",
        "commit": "c9ec0d9",
        "machine": {"processor": "x86_64", "cores": 2},
        "versions": {"python": "3.11.2", "torch": "2.13.0", "patchbayes": "0.1.0"},
        "date": f"2025-11-16T0{seed}:00:00",
        "parameters": {
            "unpatched": 272474,
            "patched": 280554 if components else 272474,
            "patched_sites": len(sites) if components else 0,
            "log10_ensemble_size": {"EMP": 13.3, "ECM": 1412.0}.get(method[:3]),
        },
        "patch_report": f"patched {len(sites)} sites of CifarResNet: 272,474 -> 280,554 parameters (+2.97 %)\n"
        "  BatchNorm2d x18  " + method + "  +5,504  layer1.0.bn1, layer1.0.bn2, layer1.1.bn1, ... layer3.2.bn2\n"
        "  Linear x1        " + method + "  +2,600  fc\n  skipped  conv1: not selected"
        if components
        else None,
        "training_seconds": 170.0 + 20 * seed + 10 * len(method),
        "metrics": metrics,
        "temperature": {
            "temperature": temperature,
            "fitted_on": "test[:5000]",
            "metrics": with_intervals(scaled(probs, temperature), targets, rng),
        },
        "draws_curve": {
            "draws": counts,
            **{
                m: {"value": [curve[s][m] for s in counts], "standard_error": [0.01 * curve[s][m] / s for s in counts]}
                for m in ("accuracy", "nll", "ece", "brier")
            },
        },
        "reliability": {
            "count": count.astype(int).tolist(),
            "confidence": nullable(bin_confidence),
            "accuracy": nullable(bin_accuracy),
        },
        "histogram": {
            "edges": edges.tolist(),
            "correct": np.histogram(confidence[right], edges)[0].tolist(),
            "wrong": np.histogram(confidence[~right], edges)[0].tolist(),
        },
        "coverage": {
            "coverage": kept,
            "accuracy": [float(right[order[: max(1, round(k * len(order)))]].mean()) for k in kept],
        },
        "diversity": {
            "disagreement": float((members[0].argmax(-1) != members[-1].argmax(-1)).mean()),
            "mutual_information": float(information.mean()),
            "components": [
                {"site": site, "distance": float(0.1 * simulation.spread * rng.gamma(20) / 20)} for site in sites
            ]
            if components
            else [],
        }
        if simulation.draws > 1
        else None,
        "ood": [
            {
                "data": data,
                "score": "entropy",
                "auroc": auroc(shift - foreign, -confidence),
                "fpr95": float((shift - foreign <= np.quantile(-confidence, 0.95)).mean()),
            }
            for data, shift in (("svhn", 0.05), ("cifar100", 0.0))
        ],
        "corruptions": {
            "names": CORRUPTIONS,
            "severities": [1, 2, 3, 4, 5],
            "error": errors.tolist(),
            "nll": corrupted["nll"],
            "ece": corrupted["ece"],
            "mce": 100 * float((errors.sum(1) / reference.sum(1)).mean()),
            "relative_mce": 100 * float(((errors - clean).sum(1) / (reference - clean_reference).sum(1)).mean()),
            "reference": "vanilla",
            "clean_error": clean,
            "num_examples": 300,
            "draws": 20,
        },
        "examples": {
            "most_certain": [example(i) for i in order[:8]],
            "least_certain": [example(i) for i in order[::-1][:8]],
        },
        "quantiles": None,
    }
    history = [
        {
            "epoch": epoch,
            "loss": 2.2 * math.exp(-epoch / 8) + 0.3 + 0.02 * float(rng.normal()),
            "kl": 3000.0 + 40 * epoch + 10 * float(rng.normal()),
            "train_seconds": 9.1,
            "held_out_nll": metrics["nll"]["value"] + 1.2 * math.exp(-epoch / 6) + 0.02 * float(rng.normal()),
            "held_out_accuracy": metrics["accuracy"]["value"]
            - 0.4 * math.exp(-epoch / 5)
            + 0.005 * float(rng.normal()),
            "lr": 0.1 * (1 + math.cos(math.pi * epoch / 30)) / 2,
        }
        for epoch in range(1, 31)
    ]
    return record, history


def simulate(methods=tuple(METHODS), seeds=(0, 1, 2)):
    """(evaluations, histories) of every method with every seed, as fresh values."""
    pairs = [copy.deepcopy(_simulate(method, seed)) for method in methods for seed in seeds]
    return [record for record, _ in pairs], [history for _, history in pairs]


def simulate_regression(seeds=(0, 1, 2), examples=400):
    """The same for two regression methods: the first one claims too narrow intervals."""
    normal = torch.distributions.Normal(torch.tensor(0.0).double(), torch.tensor(1.0).double())
    levels = [round(0.05 * k, 2) for k in range(1, 20)]
    evaluations, histories = [], []
    for method, claimed, noise in (("vanilla", 0.6, 1.0), ("ECMP(K=5)", 0.95, 0.97)):
        for seed in seeds:
            rng = np.random.default_rng((seed, int(100 * claimed)))
            residual = torch.tensor(noise * rng.normal(size=examples))
            z = residual / claimed

            def rows(residual=residual, z=z, claimed=claimed):
                pdf, cdf = normal.log_prob(z).exp(), normal.cdf(z)
                return {
                    "rmse": residual.square(),
                    "log_density": normal.log_prob(z) - math.log(claimed),
                    "crps": claimed * (z * (2 * cdf - 1) + 2 * pdf - 1 / math.sqrt(math.pi)),
                    "coverage_95": (z.abs() < 1.96).double(),
                    "interval_width_95": torch.full_like(z, 2 * 1.96 * claimed),
                }

            def interval(name, values, rng=rng):
                end = math.sqrt if name == "rmse" else float
                draws = [end(values[rng.integers(examples, size=examples)].mean()) for _ in range(60)]
                low, high = np.quantile(draws, [0.025, 0.975])
                return {"value": end(values.mean()), "low": float(low), "high": float(high)}

            name = f"{method.split('(')[0].lower()}-r{seed}"
            evaluations.append(
                {
                    "schema": 1,
                    "name": name,
                    "folder": f"runs/{name}",
                    "task": "regression",
                    "method": method,
                    "model": "mlp",
                    "data": "diabetes",
                    "split": "test",
                    "num_examples": examples,
                    "draws": 100,
                    "seed": seed,
                    "command": f"patchbayes evaluate runs/{name}",
                    "train_command": f"patchbayes train runs/{name} --data diabetes --seed={seed}",
                    "metrics": {metric: interval(metric, values) for metric, values in rows().items()},
                    "quantiles": {
                        "level": levels,
                        "observed": [float((z < normal.icdf(torch.tensor(p))).double().mean()) for p in levels],
                    },
                }
            )
            histories.append([{"epoch": e, "loss": 1 / e, "held_out_rmse": 1.0 + 1 / e} for e in range(1, 21)])
    return evaluations, histories


def one_run():
    (record,), (history,) = simulate(["ECMP(K=5)"], [0])
    return record, history


# ---- reading


def source_of(record, number=1):
    """Where a record is from, for messages: its folder, or its number."""
    folder = record.get("folder") if isinstance(record, dict) else None
    return f"{folder}/evaluation.json" if isinstance(folder, str) and folder else f"record {number}"


def read_run(record, history=(), number=1):
    return EvaluatedRun.of(EvaluationRecord.from_json(record, source_of(record, number)), history)


def write_report(records, histories, path, **options):
    """The report on records that are still JSON."""
    read = [EvaluationRecord.from_json(record, source_of(record, n)) for n, record in enumerate(records, 1)]
    return report.write_report(read, histories, path, **options)


def leaves(value, path=()):
    """The path of every value inside a record, containers too."""
    if path:
        yield path
    steps = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, inner in steps:
        yield from leaves(inner, (*path, step))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)


def mutated(data, record):
    """The record with one value, anywhere, replaced by any JSON value."""
    path = data.draw(st.sampled_from(sorted(leaves(record), key=str)))
    container = record
    for step in path[:-1]:
        container = container[step]
    container[path[-1]] = data.draw(JSON)
    return record
