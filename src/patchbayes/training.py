"""Moved to `patchbayes.runs`; the old name goes with the next release."""

import warnings
from typing import Any

_NAMES = ("RunFolder", "TrainingConfig", "TrainingInterrupted", "load_ordinary_", "train")


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'patchbayes.training' has no attribute {name!r}")
    from . import runs

    warnings.warn(
        f"patchbayes.training.{name} is now patchbayes.runs.{name}; the old name goes with the next release.",
        DeprecationWarning,
        stacklevel=2,
    )
    return getattr(runs, name)
