"""Functions run by several processes that torchrun starts (gloo on the CPU), and what each of them returned."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import patchbayes

_SCRIPT = """
import datetime, gc, importlib, json, sys
import torch

def main():
    module, function, folder = sys.argv[1:4]
    torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    found = getattr(importlib.import_module(module), function)(*json.loads(sys.argv[4]))
    with open(f"{folder}/rank{torch.distributed.get_rank()}.json", "w") as file:
        json.dump(found, file)
    gc.collect()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()

if __name__ == "__main__":
    main()
"""


def environment(*paths) -> dict[str, str]:
    own = [str(Path(patchbayes.__file__).parents[1]), str(Path(__file__).parent), *map(str, paths)]
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(own)}


def torchrun(words, number=2, paths=(), **options) -> subprocess.Popen:
    """Start a job of several processes, in a session of its own."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={number}",
        *map(str, words),
    ]
    outputs = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=environment(*paths), start_new_session=True, **{**outputs, **options})


def finish(process: subprocess.Popen, timeout: float = 240) -> str:
    """What a job printed; it is killed, with all its processes, if it does not end in time."""
    try:
        return process.communicate(timeout=timeout)[0]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def on_processes(folder: Path, module: str, function: str, *arguments, number=2) -> list:
    """What a function of a test module returned on each process; arguments and results are JSON."""
    script = folder / "script.py"
    script.write_text(_SCRIPT)
    process = torchrun([script, module, function, folder, json.dumps(arguments)], number)
    output = finish(process)
    assert process.returncode == 0, output
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(number)]


def children(parent: int) -> list[int]:
    """The processes that a process has started and that live, in the order of their numbers."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == parent and fields[0] != "Z":
            found.append(int(status.parent.name))
    return sorted(found)
