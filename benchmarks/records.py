"""What every benchmark record says besides its numbers: when, where, with what, from which commit, by which command."""

import json
import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from patchbayes.files import write_atomically

RESULTS = Path(__file__).resolve().parent.parent / "results"


def write_record(name: str, content: dict[str, Any], folder: Path = RESULTS) -> Path:
    """Write <folder>/<name>.json with the machine, versions, commit and command beside the content."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.json"
    record = {"benchmark": name, **_circumstances(), **content}
    write_atomically(path, (json.dumps(record, indent=1) + "\n").encode())
    return path


def commit() -> str:
    """The commit in short, with "-dirty" where the package differs from it."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], capture_output=True, text=True, cwd=RESULTS.parent).stdout.strip()

    return git("rev-parse", "--short", "HEAD") + ("-dirty" if git("status", "--porcelain", "src") else "")


def _circumstances() -> dict[str, Any]:
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *_repeatable(sys.argv[1:])]),
        "commit": commit(),
        "machine": {"cores": os.cpu_count(), "processor": _processor(), "threads": torch.get_num_threads()},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }


def _repeatable(words: list[str]) -> list[str]:
    """The words of a command but for where data and results lay."""
    places = {"--work", "--folder", "--data-dir", "--results"}
    return [word for before, word in zip(["", *words], words, strict=False) if not {before, word} & places]


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
