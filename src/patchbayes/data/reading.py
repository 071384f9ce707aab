"""read: from the text that names a data set to the Dataset."""

import dataclasses
import difflib
import os
from collections.abc import Mapping
from pathlib import Path

from ..errors import PatchbayesError
from ..named_code import called, looks_like_code, named_function
from .arrays import read_npz
from .bundled import read_diabetes, read_digits, read_fashion, read_photos
from .cifar import read_cifar10, read_cifar100
from .columns import Kind
from .contents import Contents, divided
from .csv_file import read_csv
from .dataset import Dataset
from .download import Source, found
from .idx import DIGIT_CLASSES, FASHION_CLASSES, read_idx
from .image_folder import read_image_folder
from .sources import CIFAR10, CIFAR100, FASHION_MNIST, MNIST, UCI
from .splits import Task
from .uci import read_uci

FORMS = (
    "fashion",
    "digits",
    "photos",
    "diabetes",
    "cifar10[:DIR]",
    "cifar100[:DIR]",
    "mnist[:DIR]",
    "fashion-mnist[:DIR]",
    "idx:DIR",
    "images:DIR",
    "csv:FILE#COLUMN",
    "uci:NAME",
    "npz:FILE",
    "package.module:function",
)
_KINDS = tuple(form.split(":")[0].split("[")[0] for form in FORMS[:-1])
# Which options of `read` a kind of data understands; the others are refused there, never ignored.
_OPTIONS = {
    "csv": {"target", "split", "task", "columns"},
    "uci": {"target", "split"},
    "images": {"size"},
    "npz": {"task"},
}


def names_code(spec: str) -> bool:
    """Whether `read(spec)` runs a function that is not of this package."""
    return spec.partition(":")[0] not in _KINDS and looks_like_code(spec)


def read(
    spec: str,
    data_dir: Path | str | None = None,
    *,
    held_out: float = 0.1,
    seed: int = 0,
    target: str | int | None = None,
    size: int | None = None,
    split: int = 0,
    task: Task | None = None,
    columns: Mapping[str, Kind] | None = None,
    trust_code: bool = False,
) -> Dataset:
    """The data set that a text names; `FORMS` lists the texts.

    data_dir: where public sets lie, or are downloaded to; $PATCHBAYES_DATA where None, else ~/.cache/patchbayes. Paths in
        the text are looked for in the working directory, then there.
    held_out: share of the training part that is kept for selection, drawn by `seed`; 0 keeps none.
    target: csv: name or number of the column to predict (or csv:FILE#COLUMN); uci: which target, where there are two.
    size: images: side in pixels (224 where None).
    split: uci: which published split; csv: which random split into training and test part. The test part never depends
        on `seed`, so that runs with different seeds can be compared.
    task: csv, npz: forces "classification" or "regression".
    columns: csv: what some columns hold, {"age": "number"}, as in `Column`; what was decided for all is in the data set's.
    trust_code: whether a function that the text names may be imported and called; not where the text came with a file of
        someone else.
    """
    if names_code(spec) and not trust_code:
        named_function(spec, "data", trusted=False)  # refuses
    kind = spec.partition(":")[0]
    root = Path(data_dir or os.environ.get("PATCHBAYES_DATA") or Path.home() / ".cache" / "patchbayes").expanduser()
    given = {"target": target is not None, "size": size is not None, "split": split != 0, "task": task is not None}
    given["columns"] = bool(columns)
    refused = [option for option, is_given in given.items() if is_given and option not in _OPTIONS.get(kind, ())]
    if refused:
        raise PatchbayesError(f"{spec}: {refused[0]} means nothing for this data; leave it out.")
    try:
        content = _contents(spec, root, target, size, split, task, columns, trust_code)
    except OSError as error:
        raise PatchbayesError(f"{spec}: {error}.") from error
    if isinstance(content, Contents):
        return content.dataset(spec, held_out, seed)
    train, kept = divided(spec, content.train, content.held_out, held_out, seed)
    return dataclasses.replace(content, name=spec, train=train, held_out=kept)


def _contents(
    spec: str,
    root: Path,
    target: str | int | None,
    size: int | None,
    split: int,
    task: Task | None,
    columns: Mapping[str, Kind] | None,
    trust_code: bool,
) -> Contents | Dataset:
    kind, _, place = spec.partition(":")
    match kind:
        case "fashion":
            if place:
                raise PatchbayesError(f"{spec}: fashion comes with this library; write 'fashion' alone.")
            return read_fashion()
        case "digits" | "photos" | "diabetes":
            if place:
                raise PatchbayesError(f"{spec}: {kind} comes with scikit-learn; write {kind!r} alone.")
            return {"digits": read_digits, "photos": read_photos, "diabetes": read_diabetes}[kind]()
        case "cifar10":
            return read_cifar10(_public(CIFAR10, spec, place, root))
        case "cifar100":
            return read_cifar100(_public(CIFAR100, spec, place, root))
        case "mnist":
            return read_idx(_public(MNIST, spec, place, root), DIGIT_CLASSES)
        case "fashion-mnist":
            return read_idx(_public(FASHION_MNIST, spec, place, root), FASHION_CLASSES)
        case "idx":
            return read_idx(_existing(spec, place, root))
        case "images":
            return read_image_folder(_existing(spec, place, root), size)
        case "npz":
            return read_npz(_existing(spec, place, root), task)
        case "csv":
            file, column = _file_and_target(spec, place, target)
            return read_csv(_existing(spec, file, root), column, task, split, columns)
        case "uci":
            name, column = _file_and_target(spec, place, target)
            return read_uci(_uci_folder(spec, name, root), column, split)
        case _:
            return _from_function(spec, trust_code)


def _public(source: Source, spec: str, place: str, root: Path) -> Path:
    """The folder of a public set: the given one, else the one in the data folder, downloaded where it is missing."""
    if not place:
        return found(source, root)
    folder = _existing(spec, place, root)
    if source.missing(folder) and not source.missing(folder / source.folder):
        return folder / source.folder
    lacking = source.missing(folder)
    if lacking:
        raise PatchbayesError(
            f"{folder} lacks {', '.join(lacking)}; put it there, or leave the folder out to download."
        )
    return folder


def _existing(spec: str, place: str, root: Path) -> Path:
    if not place:
        raise PatchbayesError(f"{spec}: a path is missing after the colon.")
    given = Path(place).expanduser()
    for path in (given, root / given):
        if path.exists():
            return path
    raise PatchbayesError(
        f"{spec}: {given} is not there" + ("." if given.is_absolute() else f", nor is {root / given}.")
    )


def _file_and_target(spec: str, place: str, target: str | int | None) -> tuple[str, str | int | None]:
    """FILE#COLUMN into its two parts; a column given twice must be the same."""
    file, mark, column = place.rpartition("#")
    if not mark or Path(place).exists():
        return place, target
    if target is not None and str(target) != column:
        raise PatchbayesError(f"{spec}: names the target {column!r}, and target={target!r} was given; leave one out.")
    return file, column


def _uci_folder(spec: str, name: str, root: Path) -> Path:
    by_folder = {source.folder.removeprefix("uci/"): source for source in UCI.values()}
    source = UCI.get(name) or by_folder.get(name)
    if source is not None:
        return found(source, root)
    for folder in (root / "uci" / name, Path(name)):
        if (folder / "data.txt").is_file():
            return folder
    raise PatchbayesError(
        f"{spec}: not one of {', '.join(UCI)}, and no folder {root / 'uci' / name} with data.txt and its index files."
    )


def _from_function(spec: str, trust_code: bool) -> Contents | Dataset:
    """What package.module:function returns, called without arguments: a Dataset, or Contents."""
    if not looks_like_code(spec):
        near = difflib.get_close_matches(spec.partition(":")[0], _KINDS, 1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise PatchbayesError(f"unknown data {spec!r}.{hint} Known are {', '.join(FORMS)}.")
    given = called(named_function(spec, "data", trusted=trust_code), spec, "data")
    if not isinstance(given, Contents | Dataset):
        raise PatchbayesError(
            f"data {spec!r}: the function returned {type(given).__name__}; a Dataset or Contents is needed."
        )
    return given
