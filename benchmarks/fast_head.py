"""How much of what patches gain on MiniLM is the faster output layer? Plain training and dropout with that rate too.

`mixed(pretrained=True)` trains the components of the output layer with five times the learning rate, because each is drawn in
one of five steps. Here the output layer of the plain network and of the one with MC dropout learns at that rate, all else as in
the regime "intents" of from_scratch.py: the same requests, epochs, seeds, and a temperature fitted to the same held-out ones.
The rate of dropout is the one that its record chose.

    python benchmarks/fast_head.py --data-dir ../shared/data
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from from_scratch import REGIMES
from records import RESULTS, write_record
from torch import nn

from patchbayes.cli.demo_study import DRAWS, Material, answers, fit, patched, scores_of, tempered
from patchbayes.cli.memory import keep_freed_memory
from patchbayes.files import write_atomically
from patchbayes.posteriors.mixed import adam_rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--data-dir", help="where the data lies")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "fast_head")
    parser.add_argument("--only-train", action="store_true", help="write no record yet")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    keep_freed_memory()
    regime = REGIMES["intents"]
    rate = json.loads((RESULTS / "regime_intents.json").read_text())["dropout_rate"]
    options.work.mkdir(parents=True, exist_ok=True)
    seeds = []
    for seed in options.seeds:
        file = options.work / f"{seed}.json"
        if not file.exists():
            material = regime.material(seed, options.data_dir)
            found = contest(material, "plain", seed, regime.epochs)
            found |= contest(material, f"dropout:{rate:g}", seed, regime.epochs)
            write_atomically(file, json.dumps(found).encode())
        seeds.append(json.loads(file.read_text()))
        print(seed, {name: round(row["nll"], 4) for name, row in seeds[-1].items()}, flush=True)
    if not options.only_train:
        content = {"epochs": regime.epochs, "draws": DRAWS, "seed_numbers": options.seeds, "seeds": seeds}
        print(f"wrote {write_record('fast_head', content)}")


def contest(material: Material, contestant: str, seed: int, epochs: int) -> dict[str, Any]:
    """The rows of a contestant that learned with a faster output layer."""
    model = patched(material, contestant, seed)
    fit(model, material, epochs, seed, _optimizer(model, material.learning_rate))
    forms: dict[str, Any] = {"one pass": "mean"} if contestant == "plain" else {"draws": DRAWS, "one pass": "mean"}
    rows = {}
    for form, draws in forms.items():
        row = scores_of(material, *tempered(material, answers(material, model, draws)))
        rows[f"{contestant.replace(':', ' ')}, {form}"] = {
            name: round(value, 5) for name, value in row.items() if isinstance(value, float)
        }
    return rows


def _optimizer(model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    head = [parameter for name, parameter in model.named_parameters() if name.startswith("classifier.")]
    assert head
    rest = [parameter for name, parameter in model.named_parameters() if not name.startswith("classifier.")]
    groups = [{"params": rest, "lr": learning_rate}, {"params": head, "lr": adam_rate(learning_rate)}]
    return torch.optim.Adam(groups)


if __name__ == "__main__":
    main()
