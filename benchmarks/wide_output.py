"""How fast may the components of a wide output layer learn? A network with group norms and 1,024 inputs to its output layer.

The bundled clothes (2,000 images at 14 x 14, 1,000 held out, 2,000 to test), `pb.mixed()`, 40 epochs. "plain" has no patches;
"K times" gives all components K times the learning rate of the rest; "by width" is what `parameter_groups` does with the same
`patch_lr`: less where a layer has more than 128 inputs. One pass, with a temperature fitted to the held-out images.

    python benchmarks/wide_output.py --seeds 0 1 2
"""

import argparse
from dataclasses import replace
from typing import Any

import torch
from records import write_record
from torch import Tensor, nn

import patchbayes as pb
from patchbayes.cli.demo_study import LEARNING_RATE, answers, fashion, fit, patched, scores_of, tempered
from patchbayes.cli.memory import keep_freed_memory
from patchbayes.posteriors.mixed import adam_rate

EPOCHS, WIDTHS = 40, (16, 32, 32, 64)
RATES = ("plain", "K times", "by width")


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm = nn.GroupNorm(4, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)).relu()


def network(seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        blocks = [Block(*sizes) for sizes in zip((1, *WIDTHS[:-1]), WIDTHS, (1, 2, 1, 2), strict=True)]
        return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(WIDTHS[-1] * 16, 10))


def scores(rate: str, seed: int) -> dict[str, float]:
    """One network, trained and scored."""
    material = replace(fashion(seed, corrupted=1), corrupted={}, unfamiliar=None, network=network)
    model = patched(material, "plain" if rate == "plain" else "mixed:1", seed)
    groups: Any = model.parameters()
    if rate != "plain":
        fast = adam_rate(LEARNING_RATE)
        groups = pb.objective.parameter_groups(model, lr=LEARNING_RATE, patch_lr=fast)
        for group in groups:
            if rate == "K times" and "_x" in group["name"]:
                group["lr"] = fast
    fit(model, material, EPOCHS, seed, torch.optim.Adam(groups, LEARNING_RATE))
    found = scores_of(material, *tempered(material, answers(material, model, "mean")))
    return {name: round(found[name], 5) for name in ("nll", "accuracy", "ece", "temperature")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    keep_freed_memory()
    rows = []
    for seed in options.seeds:
        for rate in RATES:
            rows.append({"rate": rate, "seed": seed, **scores(rate, seed)})
            print(rows[-1], flush=True)
    print(f"wrote {write_record('wide_output', {'epochs': EPOCHS, 'seed_numbers': options.seeds, 'rows': rows})}")


if __name__ == "__main__":
    main()
