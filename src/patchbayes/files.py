"""Files: written so that a reader sees the old content or the new one, never a part; read only where they are files."""

import contextlib
import json
import os
import re
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from .errors import PatchbayesError

_PART = ".part"
# JSON files are settings and records; beyond this size they are neither.
_MOST_JSON_BYTES = 256 * 2**20
_PROBE_BYTES = 2**20


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file beside `path` to write into; at the end it is flushed to disk and renamed to `path`.

    On any error the temporary file goes and the old file stays. What writers of the same file left behind that were killed
    is removed first.
    """
    if not path.parent.is_dir():
        raise PatchbayesError(
            f"{path} cannot be written: the folder {path.parent} does not exist.\n  do       create it first."
        )
    if path.is_dir():
        raise PatchbayesError(f"{path} cannot be written: it is a folder.\n  do       name a file in it.")
    remove_leftovers(path.parent, path.name)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.{writer_mark()}", suffix=_PART)
    os.close(descriptor)
    temporary = Path(name)
    try:
        yield temporary
        _flush(temporary)
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _flush(path.parent)


def write_atomically(path: Path, content: bytes) -> None:
    with replacing(path) as temporary:
        temporary.write_bytes(content)


@contextlib.contextmanager
def making_folder(path: Path) -> Iterator[Path]:
    """A temporary folder beside `path` to fill; at the end it is renamed to `path`, which is not there yet or is empty.

    On any error the temporary folder goes. A reader sees the whole folder or none.
    """
    path = path.absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(path.parent, path.name)
    temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.{writer_mark()}", suffix=_PART))
    try:
        yield temporary
        temporary.chmod(0o777 & ~_umask())
        if path.is_dir():
            path.rmdir()
        temporary.replace(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _flush(path.parent)


def writer_mark() -> str:
    """Stands in the names of temporary files, and tells whose they are: this machine's and process's."""
    return f"{_machine()}-{os.getpid()}-"


def abandoned(name: str) -> bool:
    """Whether the process of this machine whose `writer_mark` stands in a name is there no more."""
    found = re.search(rf"\.{re.escape(_machine())}-(\d+)-", name)
    if found is None or int(found[1]) == os.getpid():
        return False
    try:
        os.kill(int(found[1]), 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):  # there, and another user's
        return False
    return False


def remove_leftovers(folder: Path, name: str = "") -> list[str]:
    """Remove what killed writers have left in a folder: of the file or folder `name`, of every one where ""."""
    removed = []
    start = f".{name}." if name else "."
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            ours = entry.name.startswith(start) and entry.name.endswith(_PART)
            if ours and abandoned(entry.name):
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path, ignore_errors=True)
                else:
                    with contextlib.suppress(OSError):
                        os.unlink(entry.path)
                removed.append(entry.name)
    return sorted(removed)


def probe_writing(path: Path) -> None:
    """Find out now whether `path` can be written later: its folder exists or can be made, is writable and has room.

    Folders that had to be made for the trial are taken away again, so that a command that fails leaves nothing.
    """
    if path.is_dir():
        raise PatchbayesError(f"{path} is a folder, and a file is to be written there; give the name of a file.")
    made = [one for one in (path.parent, *path.parent.parents) if not one.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".probe.{writer_mark()}", suffix=_PART) as trial:
            trial.write(bytes(_PROBE_BYTES))
            trial.flush()
            os.fsync(trial.fileno())
    except OSError as error:
        raise PatchbayesError(
            f"{path} cannot be written ({error.strerror or error}); nothing was done yet.\n"
            "  do       make room, or make the folder writable, or name another place."
        ) from error
    finally:
        with contextlib.suppress(OSError):
            for one in made:
                one.rmdir()


def open_regular(path: Path) -> BinaryIO:
    """The file, open for reading. Pipes, sockets and devices are refused at once: reading them could wait forever."""
    if path.is_dir():
        raise PatchbayesError(f"{path} is a folder, and a file is wanted here.")
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except FileNotFoundError as error:
        raise PatchbayesError(f"{path} is not there.") from error
    except (OSError, ValueError) as error:  # a ValueError: a zero byte in the name
        raise PatchbayesError(f"{path}: cannot be opened ({getattr(error, 'strerror', None) or error}).") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise PatchbayesError(
            f"{path} is a pipe or a device, and a file is wanted here; save its content to a file first."
        )
    return os.fdopen(descriptor, "rb")


def read_json(path: Path) -> Any:
    """The content of a JSON file in UTF-8."""
    with open_regular(path) as file:
        content = file.read(_MOST_JSON_BYTES + 1)
    if len(content) > _MOST_JSON_BYTES:
        raise PatchbayesError(f"{path}: more than {_MOST_JSON_BYTES // 2**20} MB, too much for settings or records.")
    return parse_json(content, str(path))


def parse_json(content: bytes | str, where: str) -> Any:
    """The value of a JSON text; whatever is wrong with the text is one error, which begins with `where`."""
    try:
        return json.loads(content.decode("utf-8") if isinstance(content, bytes) else content)
    except RecursionError:
        raise PatchbayesError(f"{where}: is not JSON that can be read: it is nested too deeply.") from None
    except ValueError as error:  # also of bytes that are not UTF-8, and of numbers of thousands of digits
        raise PatchbayesError(f"{where}: is not JSON ({error}).") from None


def _machine() -> str:
    return re.sub(r"\W", "_", socket.gethostname()) or "localhost"


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
