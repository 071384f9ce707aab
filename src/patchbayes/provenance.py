"""Where a record comes from: when, from which commit, on what machine, with which versions."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

_SOURCE = Path(__file__).resolve().parent


def provenance() -> dict[str, Any]:
    """What every record says besides its numbers: `date`, `commit`, `machine` and `versions`."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": {"processor": _processor(), "cores": os.cpu_count(), "threads": torch.get_num_threads()},
        "versions": {
            "patchbayes": _version("patchbayes"),
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
    }


def commit() -> str | None:
    """The commit of the checkout that this package lies in, with "-dirty" where its source was changed; else None."""
    top = _git("rev-parse", "--show-toplevel")
    if top is None or Path(top) not in _SOURCE.parents or _git("ls-files", str(_SOURCE)) == "":
        return None  # installed without a checkout, or below another project's one
    changed = _git("status", "--porcelain", str(_SOURCE))
    return f"{_git('rev-parse', '--short', 'HEAD')}{'-dirty' if changed else ''}"


def _git(*words: str) -> str | None:
    try:
        # Optional locks would get in the way of the user's own git commands, which may run at this moment.
        done = subprocess.run(
            ["git", "--no-optional-locks", *words], capture_output=True, text=True, cwd=_SOURCE, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    for line in information.read_text().splitlines() if information.exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
