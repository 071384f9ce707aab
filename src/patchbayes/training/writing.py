"""What is said when a file of a run cannot be written."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from ..errors import PatchbayesError


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a failure to write `path` in the block (disk full, no permission) into an error that says what to do."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise PatchbayesError(
            f"{path} cannot be written ({why}); what was written before is as it was.\n"
            "  do       make room, or make the folder writable, and go on with resume=True (--resume)."
        ) from error
