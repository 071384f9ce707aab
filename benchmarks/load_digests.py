"""What checking digests costs: loading a whole network from a file with digests and from the same file without, in turn.

    python benchmarks/load_digests.py
    python benchmarks/load_digests.py --model mlp:64 --seconds 0.1 --results /tmp/out

Processor time is measured, which other programs on the machine disturb least. The files are in the system's cache, so that
reading takes the least time and the share of the digests is the largest.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import safetensors.torch
import torch
from records import RESULTS, write_record
from timing import summary

import patchbayes as pb
from patchbayes.digests import described
from patchbayes.nets.named import build_net


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--seconds", type=float, default=20.0, help="to spend on timing")
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    network = build_net(given.model, 1000, (3, 64, 64))
    pb.patch_(network, pb.ECMP(5))
    with tempfile.TemporaryDirectory() as folder:
        checked, unchecked = Path(folder) / "checked.safetensors", Path(folder) / "unchecked.safetensors"
        pb.save(network, checked, whole=True)
        _without_digests(checked, unchecked)
        size = checked.stat().st_size
        seconds: dict[str, list[float]] = {"with": [], "without": []}
        began = time.perf_counter()
        while len(seconds["with"]) < 3 or time.perf_counter() - began < given.seconds:
            for name, file in (("with", checked), ("without", unchecked)):
                start = time.process_time()
                pb.load_(network, file)
                seconds[name].append(time.process_time() - start)
    shares = [1 - without / checking for checking, without in zip(seconds["with"], seconds["without"], strict=True)]
    content = {
        "model": given.model,
        "megabytes": size / 1e6,
        "rounds": len(shares),
        **summary("with_digests_seconds", seconds["with"]),
        **summary("without_digests_seconds", seconds["without"]),
        **summary("share_of_loading", shares),
    }
    print(
        f"{given.model}, {size / 1e6:.0f} MB: {1e3 * statistics.median(seconds['with']):.1f} ms to load, of which checking "
        f"digests is {100 * content['share_of_loading']:.1f} % "
        f"(quartiles {', '.join(f'{100 * q:.1f}' for q in content['share_of_loading_quartiles'])})"
    )
    print("written:", write_record("load_digests", content, given.results))


def _without_digests(source: Path, target: Path) -> None:
    """The same tensors and description, as 0.1.0 wrote them."""
    with safetensors.safe_open(source, "pt") as file:
        description = described(file.metadata(), str(source))
    del description["digests"]
    tensors = safetensors.torch.load_file(source)
    safetensors.torch.save_file(tensors, target, metadata={"patchbayes": json.dumps(description)})


if __name__ == "__main__":
    main()
