"""A trained LoRA adapter made Bayesian without training: `bayesianize_` beside training-free Bayesianization and a temperature.

    python benchmarks/adapters.py --seeds 5

A network of three linear layers learns 1,700 pictures of clothes (14 x 14, bundled); an adapter of rank 4 (PEFT) then learns
300 pictures in negative. All that comes after sees 1,000 held-out negatives, and is scored once on 2,000 others.

The rival (Shi et al., 2024): with B = U diag(d) V', noise N(0, (s / d_i)^2) on the rows of V'A, where s is the largest for
which the held-out NLL of the average is at most 1 % above the adapter's own (bisection, 12 steps); 20 draws, with and without a
temperature on top. Needs peft.
"""

import argparse
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from records import RESULTS, write_record
from subjects import define_torchvision_operators
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import patchbayes as pb
from patchbayes.cli.demo_study import fashion
from patchbayes.metrics import accuracy, expected_calibration_error, nll
from patchbayes.metrics.temperature import fit_temperature

define_torchvision_operators()  # transformers, which PEFT imports, imports torchvision where it is installed
BASE, ADAPTED, DRAWS, TOLERANCE, STEPS = 1700, 300, 20, 0.01, 12
Pair = tuple[Tensor, Tensor]


def trained(model: nn.Module, data: Pair, epochs: int, seed: int) -> None:
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 3e-3)
    order = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for rows in torch.randperm(len(data[1]), generator=order).split(64):
            optimizer.zero_grad()
            cross_entropy(model(data[0][rows]), data[1][rows]).backward()
            optimizer.step()


def adapter(seed: int) -> tuple[nn.Module, Pair, Pair]:
    """The trained adapter on its base, held-out and test pictures."""
    from peft import LoraConfig, get_peft_model

    material = fashion(seed, corrupted=1)
    flat: Callable[[Pair], Pair] = lambda pair: (pair[0].flatten(1), pair[1])  # noqa: E731
    x, y = flat(material.train)
    held_out, test = flat(material.held_out), flat(material.test)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        sizes = (x.shape[1], 128, 128)
        layers = [part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
        base = nn.Sequential(*layers, nn.Linear(128, 10))
        trained(base, (x[:BASE], y[:BASE]), 15, seed)
        model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=["0", "2", "4"]))
    trained(model, (-x[BASE : BASE + ADAPTED], y[BASE : BASE + ADAPTED]), 60, seed)
    return model.eval(), (-held_out[0], held_out[1]), (-test[0], test[1])


class TrainingFree:
    """The rival: noise on V'A, in the adapter's own parameters, which come back as they were."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        self.model, self.seed = model, seed
        named = dict(model.named_parameters())
        self.pairs = [(a, named[name.replace("lora_A", "lora_B")]) for name, a in named.items() if "lora_A" in name]

    @torch.no_grad()
    def log_probs(self, x: Tensor, size: float) -> Tensor:
        """The average of the draws at a size of noise, (B, C)."""
        before = [(a.clone(), b.clone()) for a, b in self.pairs]
        generator = torch.Generator().manual_seed(self.seed)
        found = []
        for _ in range(DRAWS):
            for (a, b), (old_a, old_b) in zip(self.pairs, before, strict=True):
                u, d, v = torch.linalg.svd(old_b, full_matrices=False)
                noise = torch.randn(old_a.shape, generator=generator) * (size / d.clamp_min(1e-6)).unsqueeze(1)
                b.copy_(u * d)
                a.copy_(v @ old_a + noise)
            found.append(torch.log_softmax(self.model(x), -1))
        for (a, b), (old_a, old_b) in zip(self.pairs, before, strict=True):
            a.copy_(old_a)
            b.copy_(old_b)
        return torch.stack(found).logsumexp(0) - torch.tensor(float(DRAWS)).log()

    def largest(self, held_out: Pair) -> float:
        """The largest noise within the tolerance of the held-out loss."""
        bound = (1 + TOLERANCE) * nll(self.log_probs(held_out[0], 0.0), held_out[1])
        low, high = 0.0, 10.0
        for _ in range(STEPS):
            middle = (low + high) / 2
            low, high = (
                (middle, high) if nll(self.log_probs(held_out[0], middle), held_out[1]) <= bound else (low, middle)
            )
        return low


def scored(log_probs: Tensor, targets: Tensor) -> dict[str, float]:
    probs = log_probs.double().exp()
    return {
        "nll": nll(log_probs, targets),
        "ece": expected_calibration_error(probs, targets),
        "accuracy": accuracy(probs, targets),
    }


def run(seed: int) -> dict[str, Any]:
    model, held_out, test = adapter(seed)
    rival = TrainingFree(model, seed)
    size = rival.largest(held_out)
    free, on_held_out = rival.log_probs(test[0], size), rival.log_probs(held_out[0], size)
    temperature = fit_temperature(on_held_out, held_out[1])
    rows = {
        "as trained": scored(rival.log_probs(test[0], 0.0), test[1]),
        "training-free": scored(free, test[1]),
        "training-free, temperature": scored(torch.log_softmax(free / temperature, -1), test[1]),
    }
    batches = list(zip(held_out[0].split(64), held_out[1].split(64), strict=True))
    report = pb.bayesianize_(model, batches, sites="lora", draws=DRAWS, seed=seed)
    rows["temperature"] = scored(pb.predict(model, test[0], "mean").log_probs, test[1])
    rows["bayesianize_"] = scored(pb.predict(model, test[0], DRAWS).log_probs, test[1])
    return {"seed": seed, "noise": size, "chosen": report.chosen, "rows": rows}


def table(record: dict[str, Any]) -> str:
    """The record in Markdown: means over seeds."""
    lines = ["| adapter | NLL | ECE | accuracy |", "|---|---|---|---|"]
    for name, mean in record["means"].items():
        lines.append(f"| {name} | {mean['nll']:.4f} | {100 * mean['ece']:.1f} % | {100 * mean['accuracy']:.1f} % |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=RESULTS, help="where the record is written")
    parser.add_argument("--table", action="store_true", help="print the record in Markdown, and run nothing")
    options = parser.parse_args()
    if options.table:
        print(table(json.loads((options.folder / "adapters.json").read_text())))
        return
    runs: list[dict[str, Any]] = []
    for seed in range(options.seeds):
        runs.append(run(seed))
        means = {
            name: {key: sum(one["rows"][name][key] for one in runs) / len(runs) for key in ("nll", "ece", "accuracy")}
            for name in runs[0]["rows"]
        }
        setting = {"base": BASE, "adapted": ADAPTED, "draws": DRAWS, "tolerance": TOLERANCE}
        write_record("adapters", {"setting": setting, "means": means, "runs": runs}, options.folder)
    print(json.dumps(means, indent=1))


if __name__ == "__main__":
    main()
