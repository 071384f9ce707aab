"""Prediction: S passes of the unpatched network, the plain loop, and the engine, over a grid of networks, batches and draws.

All in one process; the calls of a cell take turns, and ratios are taken within a round, then their median and quartiles.

    unpatched   S passes of the network before patching: the plain limit.
    loop        a forward pass for each of S independent draws.
    engine      the same draws, so the same numbers, by the engine.
    floor       the engine's time over its arithmetic floor: the plan's counted arithmetic at the unpatched network's speed.
    to error    the time that the engine takes with draws of its own choice (balanced, heads, enumeration) to the Monte-Carlo
                error that the loop has at S = 200, as a fraction of the loop's time. The error is the root mean square of the
                reported standard errors of the first eight inputs.

Where S passes take longer than the budget, as many as fit (at least ten) are timed: the loop's time is scaled by draws, the
engine's by its counted arithmetic (marked ~). Parts: the grid; the regression network of the UCI sets, enumerated, against
loops of 200 and of the paper's 10,000 draws; a BERT of MiniLM's size; an output layer of 1,000 classes over several batches;
other libraries (`rivals.py`). BERT and the output layer are timed by the processor's clock, on one thread. Early stopping
writes a record of its own.

    python benchmarks/prediction.py [--networks mlp ...] [--sites last ...] [--methods emp ...] [--batch 8 ...]
                                    [--draws 200 ...] [--parts grid uci bert head rivals] [--budget 0.75] [--results FOLDER]
    python benchmarks/prediction.py --early-stopping [--images 64] [--rounds 5] [--data-dir FOLDER] [--results FOLDER]
"""

import argparse
import itertools
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import rivals
import torch
from records import RESULTS, write_record
from safetensors.torch import load_file
from subjects import METHODS, NETWORKS, Subject, define_torchvision_operators
from timing import Part, draws_to_time, in_turn, part_of, plan_of, quotients, summary, times
from torch import Tensor

import patchbayes as pb
from patchbayes.nets import cifar_resnet20, mlp, resnet18
from patchbayes.prediction.predict import MOST_DRAWS

FILTERS: dict[str, list[Any]] = {
    "networks": list(NETWORKS),
    "sites": ["norm+output", "last"],
    "methods": list(METHODS),
    "batch": [1, 8, 64],
    "draws": [1, 20, 200],
    "parts": ["grid", "uci", "bert", "head", "rivals"],
}
BERT_SITES = {"output": "output", "norms of the last layer": "*encoder.layer.5*LayerNorm", "norm+output": "norm+output"}
ERROR_DRAWS = 200  # of the loop whose error is to be reached
PAPER_DRAWS = 10_000  # of the regression experiments
RIVAL_BATCH = 8
_RATIOS = ("ratio", "work", "floor_ratio")  # engine / loop; arithmetic / S passes; engine / that arithmetic
_PROBE_DRAWS, _PROBE_INPUTS = 40, 8  # on which the errors of both are compared
_LONG = 10  # seconds of a loop that is run twice, not three times
_BLOCK = 5  # draws in which every component comes once


def measure(subject: Subject, numbers: Sequence[int], budget: float) -> list[dict[str, Any]]:
    """The cells of one patched network and batch, one for each number of draws."""
    draws = pb.Draws.sample(subject.model, max(numbers))
    together: dict[int, list[int]] = {}  # numbers of draws that are timed on the same first draws
    for number in numbers:
        together.setdefault(draws_to_time(number, subject.one_pass, budget), []).append(number)
    return [cell for timed, some in together.items() for cell in _cells(subject, draws, timed, some, budget)]


def _cells(subject: Subject, draws: pb.Draws, timed: int, numbers: list[int], budget: float) -> list[dict[str, Any]]:
    model, x = subject.model, subject.x
    passes = min(timed, max(3, int(budget / subject.one_pass)))
    calls: dict[str, Callable[[], Any]] = {
        "unpatched": partial(subject.passes, passes),
        "loop": partial(pb.predict, model, x, draws[:timed], engine="loop"),
    }
    parts = {number: part_of(model, x, draws[:number], timed) for number in numbers}
    for part in parts.values():  # the same call where as many draws are timed
        calls[f"engine {part.num_timed}"] = partial(pb.predict, model, x, part.draws, engine="graph")
    own = own_choice(subject, max(_BLOCK, int(budget / subject.one_pass))) if ERROR_DRAWS in numbers else None
    if own is not None:
        calls["own"] = partial(pb.predict, model, x, own.draws, engine="graph")
    seconds = in_turn(calls, budget, fewest=2 if timed * subject.one_pass > _LONG else 3)
    cells = []
    for number, part in parts.items():
        unpatched = times(number / passes, seconds["unpatched"])
        loop = times(number / timed, seconds["loop"])
        engine = times(part.factor, seconds[f"engine {part.num_timed}"])
        work = part.whole.floor
        cell: dict[str, Any] = {"draws": number, "rounds": len(loop), "scaled": timed < number}
        cell["timed_draws"] = {"unpatched": passes, "loop": timed, "engine": part.num_timed}
        cell |= summary("unpatched", unpatched) | summary("loop", loop) | summary("engine", engine)
        cell |= summary("ratio", quotients(engine, loop)) | {"work": work}
        cell |= summary("floor_ratio", quotients(engine, times(work, unpatched)))
        if own is not None and number == ERROR_DRAWS:
            cell |= summary("to_error", quotients(times(own.factor, seconds["own"]), loop)) | _described(own)
        cells.append(cell)
    return cells


def own_choice(subject: Subject, most_passes: int) -> Part:
    """The engine's own draws, as many as reach the error of a loop of 200 independent ones."""
    model, x = subject.model, subject.x
    if plan_of(model, x, ERROR_DRAWS).exact:
        return part_of(model, x, ERROR_DRAWS, most_passes)
    few = x[:_PROBE_INPUTS]
    loop = _size(pb.predict(model, few, pb.Draws.sample(model, _PROBE_DRAWS)).standard_error)
    mine = _size(pb.predict(model, few, _PROBE_DRAWS, engine="graph").standard_error)
    needed = ERROR_DRAWS * (mine / loop) ** 2
    return part_of(model, x, _BLOCK * max(1, math.ceil(needed / _BLOCK)), most_passes)


def _size(standard_error: Tensor) -> float:
    return float(standard_error.double().square().mean().sqrt())


def _described(own: Part) -> dict[str, Any]:
    plan = own.whole
    return {
        "own": {
            "sampling": plan.sampling,
            "draws": plan.num_draws // plan.heads,
            "heads": plan.heads,
            "timed_draws": own.num_timed,
        }
    }


def measure_uci(batch: int, budget: float) -> dict[str, Any]:
    """The regression network with both batch norms patched: all of its 25 networks, against loops of draws."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, x = mlp(13).eval(), torch.randn(batch, 13)
        pb.patch_(model, METHODS["emp"], "norm")
    likelihood, draws = pb.likelihoods.Gaussian(precision=0.1), pb.Draws.sample(model, ERROR_DRAWS)
    exact = pb.predict(model, x, "exact", likelihood=likelihood)
    calls: dict[str, Callable[[], Any]] = {
        "exact": partial(pb.predict, model, x, "exact", likelihood=likelihood),
        "loop": partial(pb.predict, model, x, draws, likelihood=likelihood, engine="loop"),
    }
    seconds = in_turn(calls, budget)
    paper_loop = times(PAPER_DRAWS / ERROR_DRAWS, seconds["loop"])
    row: dict[str, Any] = {"batch": batch, "networks": exact.num_draws, "rounds": len(paper_loop)}
    row |= {"loop_draws": ERROR_DRAWS, "paper_draws": PAPER_DRAWS, "paper_timed_draws": ERROR_DRAWS}
    row |= summary("exact", seconds["exact"]) | summary("loop", seconds["loop"]) | summary("paper_loop", paper_loop)
    row |= summary("ratio", quotients(seconds["exact"], seconds["loop"]))
    return row | summary("paper_ratio", quotients(seconds["exact"], paper_loop))


def measure_bert(sites: str, budget: float, draws: int = 20, batch: int = 8, length: int = 32) -> dict[str, Any]:
    """A BERT of six layers and 384 units (random weights): the engine against S passes of the unpatched network."""
    define_torchvision_operators()
    import transformers

    config = transformers.BertConfig(
        vocab_size=1000,
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=12,
        intermediate_size=1536,
        num_labels=3,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        unpatched = transformers.BertForSequenceClassification(config).eval()
        model = transformers.BertForSequenceClassification(config).eval()
        pb.patch_(model, METHODS["ecmp"], BERT_SITES[sites])
        tokens = torch.randint(1000, (batch, length))
    chosen = pb.Draws.sample(model, draws)

    def passes() -> None:
        with torch.inference_mode():
            for _ in range(draws):
                unpatched(tokens)

    calls: dict[str, Callable[[], Any]] = {
        "unpatched": passes,
        "loop": partial(pb.predict, model, tokens, chosen, engine="loop"),
        "engine": partial(pb.predict, model, tokens, chosen, engine="graph"),
    }
    plan = pb.predict(model, tokens, chosen, engine="graph").plan
    seconds = in_turn(calls, budget, clock=time.process_time)
    row: dict[str, Any] = {"sites": sites, "batch": batch, "length": length, "draws": draws, "work": plan.floor}
    for name, some in seconds.items():
        row |= summary(name, some)
    row |= summary("passes", times(draws, quotients(seconds["engine"], seconds["unpatched"])))
    return row | summary("ratio", quotients(seconds["engine"], seconds["loop"]))


def measure_head(budget: float, draws: int = 20, batch: int = 8, batches: int = 6) -> dict[str, Any]:
    """A ResNet-18 for 224 pixels with only its output layer of 1,000 classes patched, over all batches of one prediction."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        unpatched, model = resnet18(1000).eval(), resnet18(1000).eval()
        pb.patch_(model, METHODS["ecmp"], "output")
        inputs = [torch.randn(batch, 3, 224, 224) for _ in range(batches)]

    def passes() -> None:
        with torch.inference_mode():
            for x in inputs:
                unpatched(x)

    def predictions() -> None:
        for _ in pb.predict_batches(model, inputs, draws, engine="graph"):
            pass

    predictions()
    seconds = in_turn({"unpatched": passes, "engine": predictions}, budget, clock=time.process_time)
    row: dict[str, Any] = {"batch": batch, "batches": batches, "draws": draws}
    row |= summary("unpatched", seconds["unpatched"]) | summary("engine", seconds["engine"])
    return row | summary("passes", quotients(seconds["engine"], seconds["unpatched"]))


def measure_early_stopping(
    folder: Path, num_images: int = 64, tolerance: float = 0.01, rounds: int = 5
) -> dict[str, Any]:
    """A network trained on CIFAR-100 by others, patched, on test images: draws="auto" against all that it may take."""
    model = cifar_resnet20(100).eval()
    model.load_state_dict(load_file(folder / "pretrained" / "cifar100_resnet20.safetensors"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pb.patch_(model, pb.ECMP(5, jitter=0.12), "norm+output")
    x = cifar100_test_images(folder, num_images)
    num_draws = MOST_DRAWS
    every = pb.predict(model, x, num_draws, engine="graph")
    stopped = pb.predict(model, x, "auto", tolerance=tolerance, engine="graph")
    calls: dict[str, Callable[[], Any]] = {
        "all": partial(pb.predict, model, x, num_draws, engine="graph"),
        "stopped": partial(pb.predict, model, x, "auto", tolerance=tolerance, engine="graph"),
    }
    seconds = in_turn(calls, 0, fewest=rounds, clock=time.process_time)
    used = stopped.draws_used.double() / every.plan.heads
    top = every.probs.argmax(-1, keepdim=True)
    change = (stopped.probs - every.probs).gather(-1, top).abs()
    return (
        {"network": "cifar_resnet20", "data": "cifar100 test", "inputs": num_images, "method": "ECMP(5, jitter=0.12)"}
        | {"sites": "norm+output", "tolerance": tolerance, "draws": num_draws, "heads": every.plan.heads}
        | {
            "draws_used": float(used.mean()),
            "draws_used_quartiles": used.quantile(torch.tensor([0.25, 0.75]).double()).tolist(),
        }
        | {"inputs_with_all_draws": int((used == num_draws).sum()), "largest_change_of_top": float(change.max())}
        | {"rounds": len(seconds["all"])}
        | summary("all", seconds["all"])
        | summary("stopped", seconds["stopped"])
        | summary("ratio", quotients(seconds["stopped"], seconds["all"]))
    )


def cifar100_test_images(folder: Path, number: int) -> Tensor:
    """The first test images as the network wants them, (N, 3, 32, 32)."""
    size = 2 + 3 * 32 * 32  # two label bytes before the pixels
    records = np.fromfile(folder / "cifar-100-binary" / "test.bin", np.uint8, count=number * size).reshape(number, size)
    pixels = torch.from_numpy(records[:, 2:].reshape(number, 3, 32, 32).astype(np.float32)) / 255
    mean, std = torch.tensor([0.5070, 0.4865, 0.4409]), torch.tensor([0.2673, 0.2564, 0.2761])
    return (pixels - mean.view(3, 1, 1)) / std.view(3, 1, 1)


def main(words: Sequence[str] | None = None) -> None:
    arguments = parse(words)
    warnings.simplefilter("ignore")
    if arguments.early_stopping:
        content = measure_early_stopping(data_folder(arguments.data_dir), arguments.images, rounds=arguments.rounds)
        print(
            "tolerance {tolerance}: {draws_used:.1f} of {draws} draws on average, {ratio:.3f} of the time".format(
                **content
            )
        )
        print("written:", write_record("early_stopping", content, arguments.results))
        return
    content = {"budget": arguments.budget}
    if "grid" in arguments.parts:
        content["cells"] = run_grid(arguments)
    if "uci" in arguments.parts:
        content["uci"] = []
        for batch in arguments.batch:
            content["uci"].append(measure_uci(batch, arguments.budget))
            show_uci(content["uci"][-1])
    if "bert" in arguments.parts and find_spec("transformers"):
        content["bert"] = [measure_bert(sites, arguments.budget) for sites in BERT_SITES]
        for row in content["bert"]:
            print(
                "BERT, {sites}: {passes:.2f} passes for {draws} draws, {ratio:.3f} of the loop".format(**row),
                flush=True,
            )
    if "head" in arguments.parts:
        content["head"] = row = measure_head(arguments.budget)
        print(
            "output of 1,000 classes: {passes:.2f} passes for {draws} draws of {batches} batches".format(**row),
            flush=True,
        )
    if "rivals" in arguments.parts:
        content["rivals"] = []
        numbers = [number for number in arguments.draws if number > 1]
        for network in arguments.networks:
            for row in rivals.compare(network, RIVAL_BATCH, numbers, arguments.budget):
                content["rivals"].append(row)
                show_rival(row)
    print("written:", write_record(record_name(arguments), content, arguments.results))


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, values in FILTERS.items():
        choices = None if isinstance(values[0], int) else values
        parser.add_argument(f"--{name}", nargs="+", type=type(values[0]), default=values, choices=choices)
    parser.add_argument("--budget", type=float, default=0.75, help="seconds for a timing")
    parser.add_argument("--early-stopping", action="store_true", help="measure that, and nothing else")
    parser.add_argument("--images", type=int, default=64, help="for --early-stopping: test images")
    parser.add_argument("--rounds", type=int, default=5, help="for --early-stopping: how often both are timed")
    parser.add_argument("--data-dir", type=Path, help="for --early-stopping; else the environment's PATCHBAYES_DATA")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the record")
    arguments = parser.parse_args(words)
    if min(*arguments.batch, *arguments.draws) < 1 or not arguments.budget > 0:
        parser.error("--batch and --draws are at least 1, --budget is above 0")
    return arguments


def data_folder(given: Path | None) -> Path:
    folder = given or Path(os.environ.get("PATCHBAYES_DATA", ""))
    needed = ("pretrained/cifar100_resnet20.safetensors", "cifar-100-binary/test.bin")
    missing = [name for name in needed if not (folder / name).is_file()]
    if missing:
        sys.exit(f"--early-stopping: {folder} lacks {', '.join(missing)}; name the folder with --data-dir.")
    return folder


def record_name(arguments: argparse.Namespace) -> str:
    """The complete run is "prediction"; one with filters names what they leave."""
    given = {name: getattr(arguments, name) for name, values in FILTERS.items() if getattr(arguments, name) != values}
    return "_".join(["prediction", *(str(value) for values in given.values() for value in values)])


def run_grid(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    for text in ("network", "sites", "method", "batch", "S", "unpatched s", "loop s", "engine s", *_RATIOS, "to_error"):
        print(f"{text:>12}", end=" ")
    print()
    cells = []
    settings = (arguments.networks, arguments.sites, arguments.methods, arguments.batch)
    for network, sites, method, batch in itertools.product(*settings):
        where = {"network": network, "sites": sites, "method": method, "batch": batch}
        for cell in measure(Subject.make(network, sites, method, batch), arguments.draws, arguments.budget):
            cells.append(where | cell)
            show(cells[-1])
    return cells


def show(cell: dict[str, Any]) -> None:
    mark = "~" if cell["scaled"] else ""
    texts = [str(cell[name]) for name in ("network", "sites", "method", "batch", "draws")]
    texts += [f"{mark}{cell[name]:.4f}" for name in ("unpatched", "loop", "engine")]
    texts += [f"{cell[name]:.3f}" for name in _RATIOS]
    texts += [f"{cell['to_error']:.3f}"] if "to_error" in cell else []
    print(" ".join(f"{text:>12}" for text in texts), flush=True)


def show_uci(row: dict[str, Any]) -> None:
    print(
        f"regression network, batch {row['batch']}: all {row['networks']} networks in {row['exact']:.4f} s; loop of "
        f"{row['loop_draws']} {row['loop']:.3f} s, of {row['paper_draws']} ~{row['paper_loop']:.2f} s; "
        f"1/{1 / row['ratio']:.0f} and 1/{1 / row['paper_ratio']:.0f} of the time",
        flush=True,
    )


def show_rival(row: dict[str, Any]) -> None:
    where = f"{row['network']:>12} batch {row['batch']} S {row['draws']:>3} {row['name']:<40}"
    if "unavailable" in row:
        print(where, row["unavailable"], flush=True)
    else:
        mark = "~" if row["scaled"] else ""
        print(where, f"{mark}{row['seconds']:.4f} s, {row['times_unpatched']:.3f} x S unpatched passes", flush=True)


if __name__ == "__main__":
    main()
