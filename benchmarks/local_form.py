"""The local form against drawn weights: the same spread on linear layers, temperatures fitted alike, NLL and time.

    digits    a perceptron of two hidden layers, all linear layers (`digits, smoothed` of pairs.py)
    intents   CLINC150, the output layer, 150 classes; and all linear layers (`intents` of pairs.py)
    head      an untrained layer from 1,280 features to 1,000 classes, for the time alone

One record, results/local_form.json: NLL on 1,000 examples that neither the network nor its temperatures have seen, and the
processor's time of `predict` for 64 inputs and 20 draws, the median of nine calls.

    python benchmarks/local_form.py [--seeds 0 1] [--data-dir FOLDER] [--results FOLDER]
"""

import argparse
import copy
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from pairs import PAIRS
from records import RESULTS, write_record
from torch import Tensor, nn

import patchbayes as pb
from patchbayes.posteriors import Spread

BATCH, DRAWS, SIZE, CALLS = 64, 20, 0.2, 9
CASES = (("digits, smoothed", "linear"), ("intents", "output"), ("intents", "linear"))


def seconds(model: nn.Module, x: Tensor) -> float:
    """Of one call, after one that captures the network."""
    pb.predict(model, x, DRAWS, engine="graph")
    taken = []
    for _ in range(CALLS):
        began = time.process_time()
        pb.predict(model, x, DRAWS, engine="graph")
        taken.append(time.process_time() - began)
    return statistics.median(taken)


def case(name: str, sites: str, seed: int, folder: Path) -> dict[str, Any]:
    torch.manual_seed(seed)
    pair = PAIRS[name](folder)
    order = torch.randperm(len(pair.targets), generator=torch.Generator().manual_seed(seed))
    x, y = pair.inputs[order], pair.targets[order]
    half = min(1000, len(y) // 2)
    found, logs = {}, {}
    for form in ("weights", "local"):
        model = copy.deepcopy(pair.network).eval()
        pb.patch_(model, Spread(5, SIZE, form=form), sites, example_input=x[:2])
        held_out = list(zip(x[:half].split(BATCH), y[:half].split(BATCH), strict=True))
        pb.calibrate_(model, held_out, spread="keep", draws=DRAWS, seed=seed)
        scored = slice(half, 2 * half)
        said = pb.predict(model, list(x[scored].split(BATCH)), DRAWS).log_probs
        logs[form] = said[torch.arange(len(said)), y[scored]].double()
        found[form] = {"nll": -float(logs[form].mean()), "seconds": seconds(model, x[:BATCH])}
    gain = logs["local"] - logs["weights"]
    error = float(gain.std() / len(gain) ** 0.5)
    return {"network": name, "sites": sites, "seed": seed, "gain": float(gain.mean()), "gain_error": error, **found}


def head() -> dict[str, Any]:
    torch.manual_seed(0)
    network, x = nn.Sequential(nn.Linear(1280, 1000)).eval(), torch.randn(BATCH, 1280)
    found = {}
    for form in ("weights", "local"):
        model = copy.deepcopy(network)
        pb.patch_(model, Spread(5, SIZE, form=form), "all")
        found[form] = {"seconds": seconds(model, x)}
    return {"network": "head", "sites": "all", **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("PATCHBAYES_DATA", "."))
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [head()]
    for name, sites in CASES:
        for seed in options.seeds:
            rows.append(case(name, sites, seed, Path(options.data_dir)))
            print(rows[-1], flush=True)
    write_record("local_form", {"draws": DRAWS, "batch": BATCH, "size": SIZE, "rows": rows}, options.results)


if __name__ == "__main__":
    main()
