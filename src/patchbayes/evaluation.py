"""Moved to `patchbayes.runs`; the old name goes with the next release."""

import warnings
from typing import Any

_NAMES = ("NewInputs", "evaluate", "read_evaluation", "write_evaluation")


def __getattr__(name: str) -> Any:
    new = "EvaluationOptions" if name == "Evaluating" else name
    if name not in (*_NAMES, "Evaluating"):
        raise AttributeError(f"module 'patchbayes.evaluation' has no attribute {name!r}")
    from . import runs

    warnings.warn(
        f"patchbayes.evaluation.{name} is now patchbayes.runs.{new}; the old name goes with the next release.",
        DeprecationWarning,
        stacklevel=2,
    )
    return getattr(runs, new)
