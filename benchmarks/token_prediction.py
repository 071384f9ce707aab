"""What averaged token-level prediction costs beside a plain loop that adds up probabilities (small GPT-2, 20,000 tokens).

    python benchmarks/token_prediction.py

8 sequences of 128 tokens, 20 draws. Each way runs in a process of its own: processor seconds, and by how much the largest
resident memory exceeds that before the call. Needs transformers.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from records import RESULTS, write_record
from subjects import define_torchvision_operators

import patchbayes as pb

define_torchvision_operators()  # transformers imports torchvision where it is installed
VOCABULARY, ROWS, LENGTH, DRAWS = 20_000, 8, 128, 20
WAYS = ("plain loop", "predict")


def plain_loop(model: Any, tokens: torch.Tensor) -> None:
    """Mean probabilities and mean entropies, nothing else."""
    draws = pb.Draws.stratified(model, DRAWS)
    probs: Any = 0
    entropy: Any = 0
    with torch.no_grad():
        for number in range(DRAWS):
            with pb.use_draw(model, draws[number]):
                log_probs = model(tokens).logits.log_softmax(-1)
            of_draw = log_probs.exp()
            entropy = entropy - (of_draw * log_probs).sum(-1) / DRAWS
            probs = probs + of_draw / DRAWS


def measured(way: str) -> dict[str, float]:
    """One way, in this process."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    size = {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": LENGTH}
    model = GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0)).eval()
    pb.patch_(model, pb.EMP(5, jitter=0.2), "norm")
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model(tokens[:1])
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the largest resident memory begins anew
    started = time.process_time()
    if way == "plain loop":
        plain_loop(model, tokens)
    else:
        prediction = pb.predict(model, {"input_ids": tokens}, DRAWS)
        assert bool(prediction.mutual_information.isfinite().all())
    return {"seconds": time.process_time() - started, "megabytes": _memory("VmHWM") - before}


def _memory(name: str) -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--way", choices=WAYS, help="measure one way, in this process")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=RESULTS, help="where the record is written")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.way:
        print(json.dumps(measured(options.way)))
        return
    rounds: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(options.rounds):
        for way in WAYS:
            done = subprocess.run([sys.executable, __file__, "--way", way], capture_output=True, text=True, check=True)
            rounds[way].append(json.loads(done.stdout.splitlines()[-1]))
    least = {way: {key: min(one[key] for one in some) for key in some[0]} for way, some in rounds.items()}
    ratios = {w: {k: round(v / least["plain loop"][k], 3) for k, v in one.items()} for w, one in least.items()}
    setting = {"vocabulary": VOCABULARY, "rows": ROWS, "length": LENGTH, "draws": DRAWS}
    write_record(
        "token_prediction", {"setting": setting, "least": least, "ratios": ratios, "rounds": rounds}, options.folder
    )
    print(json.dumps(ratios, indent=1))


if __name__ == "__main__":
    main()
