"""Exported predictors beside `predict`, on the same draws: largest difference, and seconds of both in turn.

onnxruntime and torch with one thread each; a capture is made before anything is timed. Untrained weights; transformers are
built from their configuration. A Predictor, which realizes the weights of its draws once, is timed as well.

    python benchmarks/export_time.py [--networks cnn ...] [--draws 10] [--batch 8] [--budget 1] [--results FOLDER]
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from records import RESULTS, write_record
from subjects import define_torchvision_operators
from timing import in_turn, quotients, summary
from torch import nn

import patchbayes as pb
from patchbayes.nets import mlp, small_cnn

_HIDDEN = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "num_labels": 3,
}


def _bert(batch: int) -> tuple[nn.Module, Any]:
    from transformers import BertConfig, BertForSequenceClassification

    tokens = torch.arange(16 * batch).reshape(batch, 16) % 100
    return BertForSequenceClassification(BertConfig(vocab_size=100, **_HIDDEN)), {"input_ids": tokens}


def _vit(batch: int) -> tuple[nn.Module, Any]:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(image_size=32, patch_size=8, **_HIDDEN)
    return ViTForImageClassification(config), {"pixel_values": torch.rand(batch, 3, 32, 32)}


#: network and inputs for a batch
NETWORKS: dict[str, Callable[[int], tuple[nn.Module, Any]]] = {
    "cnn": lambda batch: (small_cnn(size=16), torch.rand(batch, 1, 16, 16)),
    "vit": _vit,
    "bert": _bert,
    "mlp": lambda batch: (mlp(13, hidden=(50, 50), out_features=2), torch.rand(batch, 13)),
    "regression": lambda batch: (mlp(13, hidden=(50, 50), out_features=1), torch.rand(batch, 13)),
}


def measure(name: str, draws: int, batch: int, budget: float) -> dict[str, Any]:
    """One network: norms and output patched with ECMP, written as ONNX and read by onnxruntime."""
    import onnxruntime

    torch.manual_seed(0)
    model, x = NETWORKS[name](batch)
    model.eval()
    pb.patch_(model, pb.ECMP(5, jitter=0.3), "norm+output", example_input=x)
    likelihood = pb.likelihoods.Gaussian() if name == "regression" else None
    chosen = pb.Draws.stratified(model, draws)
    with tempfile.TemporaryDirectory() as folder:
        began = time.process_time()
        written = pb.export(model, Path(folder) / "m.onnx", chosen, example_input=x, likelihood=likelihood)
        row: dict[str, Any] = {"name": name, "seconds_to_write": time.process_time() - began, "size": written.size}
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(written.path, options)
    values = [x] if isinstance(x, torch.Tensor) else list(x.values())
    feeds = {given: value.numpy() for given, value in zip(written.inputs, values, strict=True)}
    predictor = pb.Predictor(model, chosen, likelihood=likelihood)
    calls: dict[str, Callable[[], Any]] = {
        "onnx": partial(session.run, None, feeds),
        "predict": partial(pb.predict, model, x, chosen, engine="graph", likelihood=likelihood),
        "predictor": (lambda: predictor(x)) if isinstance(x, torch.Tensor) else (lambda: predictor(**x)),
    }
    prediction = calls["predict"]()
    found = dict(zip(written.outputs, map(torch.from_numpy, calls["onnx"]()), strict=True))
    row["difference"] = max(float((value - getattr(prediction, n)).abs().max()) for n, value in found.items())
    calls["predictor"]()
    seconds = in_turn(calls, budget, clock=time.process_time)
    row |= summary("onnx", seconds["onnx"]) | summary("predict", seconds["predict"])
    row |= summary("ratio", quotients(seconds["onnx"], seconds["predict"]))
    return row | summary("of_predictor", quotients(seconds["onnx"], seconds["predictor"]))


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--draws", type=int, default=10)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--budget", type=float, default=1, help="seconds for a timing")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args(words)
    torch.set_num_threads(1)
    define_torchvision_operators()
    rows = []
    for name in arguments.networks:
        rows.append(measure(name, arguments.draws, arguments.batch, arguments.budget))
        print(rows[-1], flush=True)
    content = {"draws": arguments.draws, "batch": arguments.batch, "rows": rows}
    print("written:", write_record("export_time", content, arguments.results))


if __name__ == "__main__":
    main()
