"""What every benchmark record says besides its numbers: when, where, with what, from which commit."""

import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).resolve().parent.parent / "results"


def write_record(name: str, content: dict[str, Any]) -> Path:
    """Write results/<name>.json with the machine, versions and commit beside the content."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    record = {"benchmark": name, **_circumstances(), **content}
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def _circumstances() -> dict[str, Any]:
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], capture_output=True, text=True, cwd=RESULTS.parent).stdout.strip()

    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": git("rev-parse", "--short", "HEAD") + ("-dirty" if git("status", "--porcelain", "src") else ""),
        "machine": {"cores": os.cpu_count(), "processor": _processor(), "threads": torch.get_num_threads()},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
