"""Training from scratch at equal epochs: which defaults of EMP and ECMP keep up with the unpatched network.

For each variant the test accuracy, NLL and ECE (20 draws, test images up to --examples), mean over seeds, and the record
results/from_scratch_<data>.json. The variants change one thing at a time: how components start (copies with a jitter, or
independent), a draw per example, the learning rate of the patches, a jitter that grows during training.

The default (K times the learning rate for patches) was chosen by test scores on digits, and the unpatched network had no such
search: digits show what the choice does, they cannot confirm it. Other data sets can.

    python benchmarks/from_scratch.py --data fashion-mnist --epochs 3 --seeds 0 1 [--variants "emp, K lr" ...]
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from records import write_record

from patchbayes.evaluation.answers import class_answers
from patchbayes.metrics import accuracy, expected_calibration_error, nll
from patchbayes.training import TrainingConfig, train

COMPONENTS = 5


def variants(lr: float, epochs: int) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {"vanilla": {"method": "vanilla"}, "dropout": {"method": "dropout"}}
    for method in ("emp", "ecmp"):
        found |= {
            f"{method}, K lr (default)": {"method": method},
            f"{method}, lr": {"method": method, "patch_lr": lr},
            f"{method}, sqrt(K) lr": {"method": method, "patch_lr": lr * COMPONENTS**0.5},
            f"{method}, K lr, jitter 0.03": {"method": method, "jitter": 0.03},
            f"{method}, K lr, jitter 0.3": {"method": method, "jitter": 0.3},
            f"{method}, K lr, jitter grows": {"method": method, "jitter_warmup": epochs / 2},
            f"{method}, K lr, independent": {"method": method, "init": "independent"},
            f"{method}, draw per example": {"method": method, "per_example": True},
        }
    return found


def measure(settings: dict[str, Any], options: argparse.Namespace, seed: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        config = TrainingConfig(
            data=options.data,
            model=options.model,
            epochs=options.epochs,
            batch_size=options.batch,
            lr=options.lr,
            objective="simplified",
            seed=seed,
            threads=1,
            held_out=0.0,
            report_epochs=options.epochs,
            **settings,
        )
        began = time.process_time()
        run = train(config, Path(folder) / "run", quiet=True)
        seconds = time.process_time() - began
        data = run.dataset()
        test = data.part(f"test[:{min(options.examples, len(data.test))}]")
        answers = class_answers(run.model("last"), data.batches(test, 250), 20)
    probs = answers.probs
    return {
        "accuracy": accuracy(probs, answers.targets),
        "nll": nll(answers.log_probs, answers.targets),
        "ece": expected_calibration_error(probs, answers.targets),
        "processor_seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="digits")
    parser.add_argument("--model", default="small_cnn")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.003)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--examples", type=int, default=5000)
    parser.add_argument("--variants", nargs="+")
    options = parser.parse_args()
    torch.set_num_threads(1)
    chosen = variants(options.lr, options.epochs)
    if options.variants:
        chosen = {name: chosen[name] for name in options.variants}
    rows: dict[str, list[dict[str, float]]] = {}
    for name, settings in chosen.items():
        rows[name] = [measure(settings, options, seed) for seed in options.seeds]
        columns = {key: [row[key] for row in rows[name]] for key in rows[name][0]}
        texts = [
            f"{key} {statistics.fmean(v):.4f}" + (f" ± {statistics.stdev(v):.4f}" if len(v) > 1 else "")
            for key, v in columns.items()
        ]
        print(f"{name:<28} {'  '.join(texts)}", flush=True)
    content = {key: value for key, value in vars(options).items() if key != "variants"}
    name = f"from_scratch_{options.data.partition(':')[0].replace('-', '_')}"
    print("written:", write_record(name, {"settings": content, "rows": rows}))


if __name__ == "__main__":
    main()
