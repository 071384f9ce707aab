"""Where the progress of a calibration is told."""

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def shown(progress: Callable[[str, float], None] | None) -> Iterator[Callable[[str, float], None]]:
    """Where progress is told: to the given function, or on a terminal, or nowhere."""
    if progress is not None or not sys.stderr.isatty():
        yield progress or (lambda _stage, _left: None)
        return
    try:
        yield lambda stage, left: print(f"\r{stage}: {left:.0f} s left   ", end="", file=sys.stderr, flush=True)
    finally:
        print("\r" + " " * 48 + "\r", end="", file=sys.stderr, flush=True)
