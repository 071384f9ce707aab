"""Download of a public data set: to a temporary folder, verified by checksum, then renamed into place file by file."""

import hashlib
import http.client
import logging
import shutil
import tarfile
import tempfile
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from ..errors import PatchbayesError
from ..files import abandoned, replacing, writer_mark

_SECONDS = 30
_CHUNK = 2**20
_TEMPORARY = ".download."
_LOG = logging.getLogger("patchbayes")


@dataclass(frozen=True)
class Source:
    """Where a public set is found.

    folder: below the data folder. files: what a complete folder holds; for a name ending in .gz the plain file will do.
    urls: what to fetch: these files, or tar archives that contain them.
    checksums: "md5:..." or "sha256:..." of each url's content, or a single one of all contents together, in order.
    elsewhere: other folders, below the data folder or absolute, where these files are looked for.
    """

    folder: str
    files: tuple[str, ...]
    urls: tuple[str, ...]
    checksums: tuple[str, ...]
    elsewhere: tuple[str, ...] = ()

    def missing(self, folder: Path) -> list[str]:
        """The files that a folder lacks."""
        return [
            name
            for name in self.files
            if not (folder / name).is_file() and not (folder / name.removesuffix(".gz")).is_file()
        ]


def found(source: Source, root: Path) -> Path:
    """The folder with the files of a set; where none is complete, they are downloaded into the data folder `root`."""
    for place in (source.folder, *source.elsewhere):
        if not source.missing(root / place):
            return root / place
    download(source, root)
    return root / source.folder


def download(source: Source, root: Path) -> None:
    """Fetches the files of a set into its folder below `root`. A file is there whole, or not at all."""
    folder = root / source.folder
    try:
        root.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(root)
        with tempfile.TemporaryDirectory(prefix=f"{_TEMPORARY}{writer_mark()}", dir=root) as temporary_name:
            temporary = Path(temporary_name)
            fetched = [_fetch(url, temporary) for url in source.urls]
            _verify(fetched, source)
            for file in fetched:
                if ".tar" in file.suffixes:
                    _unpack(file, temporary, source.files)
            folder.mkdir(parents=True, exist_ok=True)
            for name in source.missing(folder):
                with replacing(folder / name) as target:
                    shutil.copyfile(temporary / name, target)
    except (OSError, http.client.HTTPException, tarfile.TarError) as error:
        lacking = source.missing(folder)
        names = ", ".join(lacking[:4]) + (f" and {len(lacking) - 4} more" if len(lacking) > 4 else "")
        origin = source.urls[0] if len(source.urls) == 1 else source.urls[0].rpartition("/")[0]
        raise PatchbayesError(
            f"{folder} lacks {names}, and the download failed ({error}): put the files of {origin} there yourself, or name "
            f"the folder that has them (--data-dir or PATCHBAYES_DATA)."
        ) from error


def _remove_leftovers(root: Path) -> None:
    """Remove what downloads that were killed have left."""
    for folder in root.glob(f"{_TEMPORARY}*"):
        if abandoned(folder.name) and folder.is_dir() and not folder.is_symlink():
            shutil.rmtree(folder, ignore_errors=True)


def _fetch(url: str, folder: Path) -> Path:
    _LOG.info("downloading %s", url)
    file = folder / PurePosixPath(urlsplit(url).path).name
    request = urllib.request.Request(url, headers={"User-Agent": "patchbayes"})
    with urllib.request.urlopen(request, timeout=_SECONDS) as answer, file.open("wb") as target:
        shutil.copyfileobj(answer, target, _CHUNK)
    return file


def _verify(files: list[Path], source: Source) -> None:
    groups: Iterable[list[Path]] = [files] if len(source.checksums) == 1 else ([file] for file in files)
    for group, checksum in zip(groups, source.checksums, strict=True):
        algorithm, _, wanted = checksum.partition(":")
        digest = hashlib.new(algorithm, usedforsecurity=False)
        for file in group:
            with file.open("rb") as content:
                while chunk := content.read(_CHUNK):
                    digest.update(chunk)
        if digest.hexdigest() != wanted:
            raise PatchbayesError(
                f"{source.urls[files.index(group[0])]}: the {algorithm} is {digest.hexdigest()}, and {wanted} is expected; the "
                f"download was cut short or the file has changed. Nothing was kept: try again."
            )


def _unpack(archive: Path, folder: Path, names: tuple[str, ...]) -> None:
    """Writes the members called `names`, wherever they stand in the archive, into the folder; nothing else.

    An archive with a path that leaves its folder, a link or a device is refused as a whole.
    """
    with tarfile.open(archive) as tar:
        for member in tar:
            path = PurePosixPath(member.name)
            if path.is_absolute() or ".." in path.parts or not (member.isfile() or member.isdir()):
                raise PatchbayesError(
                    f"{archive.name}: the member {member.name!r} leads out of the archive or is no plain file; refused."
                )
            content = tar.extractfile(member) if member.isfile() and path.name in names else None
            if content is not None:
                with content, (folder / path.name).open("wb") as target:
                    shutil.copyfileobj(content, target, _CHUNK)
    lacking = [name for name in names if not (folder / name).is_file()]
    if lacking:
        raise PatchbayesError(f"{archive.name}: does not contain {', '.join(lacking)}.")
