"""Writing into a run folder: one trainer at a time, and what is said where the disk refuses."""

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from ..errors import PatchbayesError

_NAME = ".lock"
_held: set[Path] = set()


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


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make the folder if need be, and hold it; refused while another trainer does.

    If no run has begun in it when the block ends, what was made for it is taken away again.
    The system holds the lock for the process and drops it with the process, however that ends: a lock cannot be left
    behind. (It is not inherited by processes that prepare batches, which may outlive a killed trainer for seconds.)
    """
    path = folder.resolve() / _NAME
    if folder.exists() and not folder.is_dir():
        raise PatchbayesError(
            f"{folder} is a file, and a run needs a folder.\n  do       choose a new or empty folder."
        )
    made = [one for one in (path.parent, *path.parent.parents) if not one.exists()]
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    if path in _held:
        raise _busy(folder, f"this process, {os.getpid()}")
    with writing(path):
        file = path.open("a+b", buffering=0)  # so that nothing is left to be written when it is closed
    with file:
        if not _lock(file.fileno()):
            file.seek(0)
            raise _busy(folder, file.read().decode(errors="replace").strip() or "another process")
        _held.add(path)
        try:
            with writing(path):
                file.truncate(0)
                file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
            yield
        finally:
            _held.discard(path)
            if not (folder / "config.json").exists():
                path.unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # something else is in it
                    for one in made:
                        one.rmdir()


def _lock(descriptor: int) -> bool:
    try:
        import fcntl
    except ImportError:  # Windows: no such locks
        return True
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _busy(folder: Path, who: str) -> PatchbayesError:
    return PatchbayesError(
        f"{folder} is being trained in by {who}.\n  do       wait for it or stop it, or choose another folder."
    )
