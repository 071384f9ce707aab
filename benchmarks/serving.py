"""Latency as a service sees it: p50 and p99 of single requests, resident memory, with one and with several threads of clients.

A ResNet-20 at 32 pixels with 20 draws, every contender in a process of its own (memory is that of the process, after the
requests of a row), one torch thread for each request. Ratios are taken to the plain network at the same batch and number of
clients, in the same run. Freed memory is kept (`keep_freed_memory`): by default glibc gives it back, and asks for it again page
by page, which costs up to half of a prediction's time and depends on the thread.

    python benchmarks/serving.py [--seconds 3] [--batch 1 32] [--clients 1 4] [--contenders plain ...] [--results FOLDER]
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from records import RESULTS, write_record
from rivals import insert_dropout_
from subjects import define_torchvision_operators
from torch import Tensor, nn

import patchbayes as pb
from patchbayes.cli.memory import keep_freed_memory
from patchbayes.nets import cifar_resnet20

DRAWS = 20
LAST = "layer3.2.bn1+layer3.2.bn2+output"
Request = Callable[[Tensor], Any]


def _network() -> nn.Module:
    torch.manual_seed(0)
    return cifar_resnet20(100).eval()


def plain(_: Tensor) -> Request:
    model = _network()
    return lambda x: model(x).softmax(-1)


def tempered(_: Tensor) -> Request:
    model = _network()
    return lambda x: (model(x) / 1.7).softmax(-1)


def _patched(sites: str) -> Callable[[Tensor], Request]:
    def prepare(_: Tensor) -> Request:
        model = _network()
        pb.patch_(model, pb.ECMP(5), sites)
        return pb.Predictor(model, DRAWS)

    return prepare


def onnx(example: Tensor) -> Request:
    import onnxruntime

    model = _network()
    pb.patch_(model, pb.ECMP(5), LAST)
    with tempfile.TemporaryDirectory() as folder:
        pb.export(model, Path(folder) / "m.onnx", DRAWS, example_input=example)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(Path(folder) / "m.onnx", options)
    name = session.get_inputs()[0].name
    return lambda x: session.run(None, {name: x.numpy()})


def torch_uncertainty(_: Tensor) -> Request:
    """Dropout before every norm layer and the output layer; all draws in one batch, its default."""
    from torch_uncertainty.methods import mc_dropout

    model = _network()
    insert_dropout_(model)
    wrapped = mc_dropout(model, num_estimators=DRAWS).eval()
    return lambda x: wrapped(x).unflatten(0, (DRAWS, len(x))).softmax(-1).mean(0)


def laplace(example: Tensor) -> Request:
    from laplace import Laplace
    from torch.utils.data import DataLoader, TensorDataset

    fitted = Laplace(_network(), "classification", subset_of_weights="last_layer", hessian_structure="kron")
    data = TensorDataset(torch.randn(16, *example.shape[1:]), torch.arange(16) % 100)
    with torch.enable_grad():
        fitted.fit(DataLoader(data, 8))
    return lambda x: fitted(x, pred_type="nn", link_approx="mc", n_samples=DRAWS)


CONTENDERS: dict[str, Callable[[Tensor], Request]] = {
    "plain": plain,
    "temperature scaling": tempered,
    "patchbayes, norm+output": _patched("norm+output"),
    "patchbayes, last block": _patched(LAST),
    "patchbayes, output": _patched("output"),
    "patchbayes, last block, ONNX": onnx,
    "laplace-torch, last layer": laplace,
    "torch-uncertainty, MC dropout": torch_uncertainty,
}


def measure(name: str, sizes: Sequence[int], clients: Sequence[int], seconds: float) -> list[dict[str, Any]]:
    """Latencies of one contender, in this process: a row for every batch size and number of clients."""
    torch.set_num_threads(1)
    keep_freed_memory()  # for every contender
    warnings.simplefilter("ignore")
    define_torchvision_operators()
    inputs = {size: torch.rand(size, 3, 32, 32) for size in sizes}
    with torch.no_grad():
        began = time.perf_counter()
        request = CONTENDERS[name](inputs[sizes[0]])
        request(inputs[sizes[0]])
        first = time.perf_counter() - began
        for x in inputs.values():
            request(x)
    return [
        {"name": name, "batch": size, "clients": number, "first_answer": first}
        | _latencies(request, x, number, seconds)
        for size, x in inputs.items()
        for number in clients
    ]


def _latencies(request: Request, x: Tensor, clients: int, seconds: float) -> dict[str, Any]:
    def client(_: int) -> list[float]:
        found, until = [], time.perf_counter() + seconds
        with torch.no_grad():
            while time.perf_counter() < until or len(found) < 5:
                began = time.perf_counter()
                request(x)
                found.append(time.perf_counter() - began)
        return found

    with ThreadPoolExecutor(clients) as pool:
        began = time.perf_counter()
        latencies = sorted(latency for some in pool.map(client, range(clients)) for latency in some)
        took = time.perf_counter() - began
    return {
        "p50": statistics.median(latencies),
        "p99": latencies[min(len(latencies) - 1, int(0.99 * len(latencies)))],
        "per_second": len(latencies) / took,
        "resident": _resident(),
    }


def _resident() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def _in_a_process(name: str, sizes: Sequence[int], clients: Sequence[int], seconds: float) -> list[dict[str, Any]]:
    options = ["--batch", *map(str, sizes), "--clients", *map(str, clients), "--seconds", str(seconds)]
    command = [sys.executable, __file__, "--one", name, *options]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return [{"name": name, "unavailable": done.stderr.strip().splitlines()[-1][:200]}]
    return json.loads(done.stdout.strip().splitlines()[-1])  # type: ignore[no-any-return]


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 32])
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--one", choices=list(CONTENDERS), help="measure this one, in this process")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args(words)
    if arguments.one is not None:
        print(json.dumps(measure(arguments.one, arguments.batch, arguments.clients, arguments.seconds)))
        return
    rows: list[dict[str, Any]] = []
    for name in arguments.contenders:
        for row in _in_a_process(name, arguments.batch, arguments.clients, arguments.seconds):
            where = (row.get("batch"), row.get("clients"))
            plain = [r["p50"] for r in rows if (r["name"], r.get("batch"), r.get("clients")) == ("plain", *where)]
            rows.append(row | ({"times_plain": row["p50"] / plain[0]} if plain else {}))
            print(rows[-1], flush=True)
        written = write_record("serving", {"draws": DRAWS, "rows": rows}, arguments.results)
    print("written:", written)


if __name__ == "__main__":
    main()
