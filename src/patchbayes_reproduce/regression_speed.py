"""How much faster all splits train together than one at a time: ratios of processor time, measured side by side.

    python -m patchbayes_reproduce.regression_speed --data-dir DATA --out results/regression/speed.json

"alone" is the same hand-written step on a stack of one split; "modules" is the usual way, an ordinary module patched by
`patch_`, autograd and torch.optim.Adam. "vmapped" are such modules for all splits at once, by `torch.func.stack_module_state`
and `vmap`: of unpatched networks alone, for a patched module counts its draws in place, which `torch.func.grad` refuses. Rounds
alternate between the ways, and a ratio is taken within a round, so that a noisy machine hits all alike.
"""

import argparse
import dataclasses
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, grad, stack_module_state, vmap

from patchbayes.files import write_atomically
from patchbayes.nets import mlp
from patchbayes.patching.patch import patch_
from patchbayes.posteriors import ECMP, EMP, Dropout
from patchbayes.provenance import provenance

from .regression_sets import METHODS, PAPER, recipe_of, small_arithmetic
from .regression_splits import SETS, StackedSplits, read_splits
from .stacked_training import Recipe, StackedNetworks, draw_steps, train_


def measure(set_name: str, method: str, data_dir: Path, rounds: int) -> dict[str, Any]:
    """Microseconds of processor time a step, and how many times longer all splits take one at a time."""
    data = read_splits(set_name, data_dir, range(SETS[set_name].splits))[0]
    recipe = dataclasses.replace(recipe_of(set_name, method, PAPER), epochs=1)
    splits = len(data.numbers)
    ways = {
        "stacked": _stacked(recipe, data, splits),
        "alone": _stacked(recipe, data, 1),
        "modules": _modules(recipe, data),
    }
    if recipe.components == 1 and not recipe.rate:
        ways["vmapped"] = _vmapped(recipe, data)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(-1, rounds):
        for name, epoch in ways.items():
            began = time.process_time()
            epoch()
            if number >= 0:  # the first round warms up
                seconds[name].append(time.process_time() - began)
    steps = -(-data.train_inputs.shape[1] // recipe.batch_size)
    found: dict[str, Any] = {"set": set_name, "method": method, "splits": splits, "steps": steps, "rounds": rounds}
    for name, values in seconds.items():
        found[f"{name}_microseconds_a_step"] = round(statistics.median(values) / steps * 1e6, 1)
        if name != "stacked":
            times = 1 if name == "vmapped" else splits
            ratios = [times * mine / all_ for mine, all_ in zip(values, seconds["stacked"], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            found[f"speed_up_over_{name}"] = {"median": middle, "quartiles": [low, high]}
    return found


def _stacked(recipe: Recipe, data: StackedSplits, splits: int) -> Callable[[], None]:
    x, y = data.train_inputs[:splits], data.train_targets[:splits]
    generator = torch.Generator().manual_seed(0)
    networks = StackedNetworks(recipe, splits, x.shape[2], y.shape[2], generator)
    return lambda: train_(networks, x, y, draw_steps(networks, x.shape[1], generator))


def _modules(recipe: Recipe, data: StackedSplits) -> Callable[[], None]:
    x, y = data.train_inputs[0], data.train_targets[0]
    model = mlp(x.shape[1], (recipe.hidden,), y.shape[1], norm=None if recipe.norm == "none" else "batch")
    if recipe.rate:
        patch_(model, Dropout(recipe.rate), "linear")
    elif recipe.components > 1:
        patch_(model, (EMP if recipe.tie == "site" else ECMP)(recipe.components), "norm")
    optimizer = torch.optim.Adam(model.parameters(), lr=recipe.lr, weight_decay=recipe.weight_decay)
    generator = torch.Generator().manual_seed(0)

    def epoch() -> None:
        for rows in torch.randperm(len(x), generator=generator).split(recipe.batch_size):
            optimizer.zero_grad()
            F.mse_loss(model(x[rows]), y[rows]).backward()
            optimizer.step()

    return epoch


def _vmapped(recipe: Recipe, data: StackedSplits) -> Callable[[], None]:
    """The unpatched modules of all splits in one step: `vmap` of `grad` over their stacked parameters and statistics."""
    x, y = data.train_inputs, data.train_targets
    norm: Literal["batch"] | None = None if recipe.norm == "none" else "batch"
    models = [mlp(x.shape[2], (recipe.hidden,), y.shape[2], norm=norm).train() for _ in data.numbers]
    parameters, statistics_of_norms = stack_module_state(models)

    def loss(weights: Any, buffers: Any, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(functional_call(models[0], (weights, buffers), (inputs,)), targets)

    gradients = vmap(grad(loss))
    optimizer = torch.optim.Adam(list(parameters.values()), lr=recipe.lr, weight_decay=recipe.weight_decay)
    generator = torch.Generator().manual_seed(0)

    def epoch() -> None:
        for rows in torch.randperm(x.shape[1], generator=generator).split(recipe.batch_size):
            found = gradients(parameters, statistics_of_norms, x[:, rows], y[:, rows])
            for name, parameter in parameters.items():
                parameter.grad = found[name]
            optimizer.step()

    return epoch


def main(words: Sequence[str] | None = None) -> None:
    """The command line of this file."""
    parser = argparse.ArgumentParser(description="Speed of training all splits together.")
    parser.add_argument("--sets", nargs="+", choices=list(SETS), default=["yacht", "kin8nm"])
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("PATCHBAYES_DATA"))
    parser.add_argument("--out", type=Path, default=Path("results/regression/speed.json"))
    given = parser.parse_args(words)
    if given.data_dir is None:
        parser.error("give --data-dir, or set PATCHBAYES_DATA, to the folder that holds uci/")
    rows = []
    with small_arithmetic():
        for set_name, method in itertools.product(given.sets, given.methods):
            rows.append(measure(set_name, method, Path(given.data_dir), given.rounds))
            names = [key.removeprefix("speed_up_over_") for key in rows[-1] if key.startswith("speed_up_over_")]
            over = [f"{rows[-1][f'speed_up_over_{name}']['median']:.1f} times over {name}" for name in names]
            print(f"{set_name} {method}: {', '.join(over)}", flush=True)
        record = {"experiment": "regression-speed", **provenance(), "load": os.getloadavg(), "rows": rows}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(given.out, (json.dumps(record, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
