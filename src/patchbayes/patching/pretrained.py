"""Folders that others can read too: the mean network under its ordinary names, the patch beside it, and a card.

model.safetensors    the ordinary network with the mean of every patched parameter, and the state of the patches
patch.safetensors    what `save` writes: posteriors, prior, likelihood with its temperature, digests
patch_config.json    how the network was patched, to be read by people
README.md            a card: sites, how to load it, what was measured when it was calibrated
"""

import functools
import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from ..digests import digests_alone
from ..errors import CheckpointMismatch, PatchbayesError
from ..files import replacing, write_atomically
from .checkpoint import describe, load_, load_ordinary_, site_tensors, write_file
from .network import own_network, root_of
from .ordinary_state import is_patch_key, ordinary_state
from .patch import is_patched, unpatch_
from .patch_file import CONFIG_FILE, PATCH_FILE, PatchFile
from .roots import extend_roots, original_class
from .selection import copied

WEIGHTS_FILE, CARD_FILE = "model.safetensors", "README.md"
_BEGIN, _END = "<!-- patchbayes: begin -->", "<!-- patchbayes: end -->"


def save_pretrained(model: nn.Module, folder: str | Path, **options: Any) -> None:
    """Write a patched network into a folder that people can use without patchbayes, and with it as it is.

    An ordinary `from_pretrained` of the folder gives the mean network: nothing is left without weights. `from_pretrained` of
    this package, or `load_(model, folder)`, gives the patched one. Networks that have a `save_pretrained` of their own
    (transformers, PEFT adapters) write their part with it, with the `options`; calling theirs on a patched network does the
    same as this function, so that checkpoints of the Hugging Face `Trainer` are such folders. Of other networks the weights are
    written to model.safetensors; there are no options then. Tied weights are written once.
    """
    root, _ = root_of(model)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    own = getattr(original_class(root), "save_pretrained", None)
    if own is not None:
        _save_with(own, root, folder, options)
        return
    if options:
        raise PatchbayesError(
            f"save_pretrained: {type(root).__name__} has no save_pretrained of its own that could take "
            f"{', '.join(options)}."
        )
    state = ordinary_state(root) | _patch_state(root)
    tensors = {key: value.cpu().contiguous() for key, value in _once(state).items()}
    with replacing(folder / WEIGHTS_FILE) as temporary:
        safetensors.torch.save_file(tensors, temporary, metadata={"format": "pt", **digests_alone(tensors)})
    _write_patch(root, folder)


def from_pretrained(source: Callable[..., Any], folder: str | Path, **options: Any) -> Any:
    """The patched network of a folder of `save_pretrained`, in evaluation mode.

    source    the class whose `from_pretrained` reads the ordinary network, such as AutoModelForSequenceClassification or
              PeftModel (then with model=, the base that the adapter belongs to); or a function that makes the ordinary network.
    options   for that call.

    The class comes from this call and never from the folder: nothing in a folder is run (`trust_remote_code` is refused) and
    nothing is unpickled. The patch is refused where the weights are not those it was trained on; another dtype is not a
    reason.
    """
    folder = Path(folder)
    if not (folder / PATCH_FILE).is_file():
        raise CheckpointMismatch(
            f"from_pretrained: {folder} holds no {PATCH_FILE}; expected a folder that patchbayes.save_pretrained wrote.\n"
            "  do       for an ordinary network, call the class's own from_pretrained."
        )
    if options.pop("trust_remote_code", False):
        raise PatchbayesError(
            "from_pretrained(trust_remote_code=True): nothing in a folder is run; load the class yourself."
        )
    reader = getattr(source, "from_pretrained", None)
    model = _ordinary(source, folder, options) if reader is None else _read_with(reader, folder, options)
    if not isinstance(model, nn.Module):
        raise PatchbayesError(f"from_pretrained: expected a network from {source!r}, got a {type(model).__name__}.")
    load_(model, folder)
    return model.eval()


def merge_(model: nn.Module, keep: Any = "mean") -> nn.Module:
    """Merge the adapters of a patched PEFT network into its base, in place; the ordinary network without adapters.

    keep    which adapters to merge, as in `unpatch_`: "mean", the number of a component, or one draw. Patches elsewhere in the
            network are undone alike.
    """
    root, _ = root_of(model)
    if not hasattr(root, "merge_and_unload"):
        raise PatchbayesError(
            f"merge_: {type(root).__name__} has no adapters to merge.\n  do       unpatch_(model, keep=...) for patches alone."
        )
    unpatch_(root, keep)
    return root.merge_and_unload()  # type: ignore[operator]


@extend_roots("save_pretrained")
def _saving(cls: type[nn.Module]) -> Callable[..., Any] | None:
    own: Any = getattr(cls, "save_pretrained", None)
    if own is None:
        return None

    @functools.wraps(own)
    def save_pretrained(self: nn.Module, save_directory: Any, *args: Any, **options: Any) -> Any:
        bound = inspect.signature(own).bind(self, save_directory, *args, **options)
        given = {
            key: value for key, value in bound.arguments.items() if key not in ("self", "save_directory", "kwargs")
        }
        return _save_with(own, self, Path(save_directory), given | bound.arguments.get("kwargs", {}))

    return save_pretrained


@extend_roots("load_adapter")
def _loading_adapter(cls: type[nn.Module]) -> Callable[..., Any] | None:
    own: Any = getattr(cls, "load_adapter", None)
    if own is None:
        return None

    @functools.wraps(own)
    def load_adapter(self: nn.Module, model_id: Any, adapter_name: Any = None, *args: Any, **options: Any) -> Any:
        if own_network(self) is None or adapter_name not in getattr(self, "peft_config", {}):
            return own(self, model_id, adapter_name, *args, **options)
        plain = _mean_copy(self)
        result = own(plain, model_id, adapter_name, *args, **options)  # what is not patched, both have
        if (Path(model_id) / PATCH_FILE).is_file():
            load_(self, model_id)
        else:
            self.load_state_dict(plain.state_dict(), strict=False)  # starts the posteriors anew
        return result

    return load_adapter


@extend_roots("merge_and_unload")
def _merging(cls: type[nn.Module]) -> Callable[..., Any] | None:
    return _leaving(cls, "merge_and_unload")


@extend_roots("unload")
def _unloading(cls: type[nn.Module]) -> Callable[..., Any] | None:
    return _leaving(cls, "unload")


def _leaving(cls: type[nn.Module], name: str) -> Callable[..., Any] | None:
    """A method after which there is no such root any more: the mean network goes through it."""
    if not hasattr(cls, "get_base_model"):  # PEFT's networks hand it on to the adapters' model
        return None

    def left(self: nn.Module, *args: Any, **options: Any) -> Any:
        unpatch_(self, keep="mean")
        return getattr(self, name)(*args, **options)

    left.__name__ = name
    return left


def _save_with(own: Callable[..., Any], root: nn.Module, folder: Path, options: Mapping[str, Any]) -> Any:
    """The network's own way to write itself, given the ordinary weights; then the patch, by the main process alone."""
    if hasattr(root, "peft_config"):  # PEFT asks its parts for their names, and would take posteriors for adapters
        result = own(_mean_copy(root), str(folder), **{**options, "state_dict": None})
    else:
        given = options.get("state_dict")
        patches = _patch_state(root) if given is None else {k: v for k, v in given.items() if is_patch_key(k)}
        result = own(root, str(folder), **{**options, "state_dict": ordinary_state(root) | patches})
    if options.get("is_main_process", True):
        _write_patch(root, folder)
    return result


def _mean_copy(root: nn.Module) -> nn.Module:
    """The mean network as an ordinary one; all that is not patched is the same tensors."""
    patched = {id(p) for site in root_of(root)[1].sites for p in site.parameters().values()}
    plain = copied(root, [p for p in root.parameters() if id(p) not in patched])
    unpatch_(plain, keep="mean")
    return plain


def _write_patch(root: nn.Module, folder: Path) -> None:
    # the folder's weights are means, which may differ from the layers' own by rounding: none of these is left out
    write_file(root, folder / PATCH_FILE, site_tensors(root))
    description = describe(root)
    write_atomically(folder / CONFIG_FILE, (json.dumps(description, indent=1) + "\n").encode())
    _write_card(folder / CARD_FILE, description)


def _write_card(path: Path, description: Mapping[str, Any]) -> None:
    """The card, as a section of its own in one that is there already."""
    section = f"{_BEGIN}\n{card(description)}\n{_END}\n"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    if _BEGIN in text and _END in text:
        before, _, rest = text.partition(_BEGIN)
        text = before + section + rest.partition(_END)[2].lstrip("\n")
    else:
        text = f"{text.rstrip()}\n\n{section}" if text.strip() else section
    write_atomically(path, text.encode())


def card(description: Mapping[str, Any]) -> str:
    """What a reader of the folder should know, in Markdown."""
    methods = sorted({str(site["method"].get("method", site["module"])) for site in description["sites"]})
    lines = [
        f"# {description['network']} with {len(description['sites'])} random layers (patchbayes)",
        "",
        f"The weights are those of the mean network, which any reader of {WEIGHTS_FILE} gets. `{PATCH_FILE}` makes it a "
        f"Bayesian network again ({', '.join(methods)}; `{CONFIG_FILE}` has all settings):",
        "",
        "```python",
        "import patchbayes as pb",
        "",
        f'model = pb.from_pretrained({description["network"]}, "this folder")',
        "prediction = pb.predict(model, inputs, draws=20)",
        "```",
        "",
        "## Calibration",
        "",
    ]
    measured = description.get("calibration")
    if not measured:
        return "\n".join(
            [*lines, "Not measured: run `pb.calibrate_(model, held_out)` before trusting its probabilities."]
        )
    lines += [
        f"Measured on {measured['held_out']:,.0f} held-out examples, which also chose spread and temperature "
        f"(averages of {measured['draws']:.0f} draws{_on_views(measured)}):",
        "",
        "| network | NLL | ECE | accuracy |",
        "|---|---|---|---|",
    ]
    for key, name in (("before", "as it was"), ("scaled", "temperature alone"), ("after", "this one")):
        cells = [f"{measured[f'{key}_nll']:.4f}"]
        cells += [
            f"{100 * measured[k]:.1f} %" if (k := f"{key}_{what}") in measured else "" for what in ("ece", "accuracy")
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _on_views(measured: Mapping[str, Any]) -> str:
    return f" on the views {measured['views']}; predict with the same views" if "views" in measured else ""


def _patch_state(root: nn.Module) -> dict[str, Tensor]:
    return {key: value.detach() for key, value in root.state_dict().items() if is_patch_key(key)}


def _once(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every tensor under its first name."""
    known: set[tuple[int, torch.Size]] = set()
    kept = {}
    for key, value in state.items():
        place = (value.data_ptr(), value.shape)
        if value.numel() == 0 or place not in known:
            kept[key] = value
        known.add(place)
    return kept


def _read_with(reader: Callable[..., Any], folder: Path, options: dict[str, Any]) -> Any:
    first = next(iter(inspect.signature(reader).parameters), "")
    if first == "model":  # PEFT: the base, then the adapter's folder
        if "model" not in options:
            raise PatchbayesError(
                "from_pretrained: an adapter needs the network it was trained on.\n"
                "  do       from_pretrained(PeftModel, folder, model=base)."
            )
        if not (folder / "adapter_model.safetensors").is_file():
            raise CheckpointMismatch(f"from_pretrained: {folder} holds no adapter_model.safetensors.")
        return reader(options.pop("model"), str(folder), **options)
    return reader(str(folder), use_safetensors=True, trust_remote_code=False, **options)


def _ordinary(source: Callable[..., Any], folder: Path, options: dict[str, Any]) -> Any:
    model = source(**options)
    if isinstance(model, nn.Module) and not is_patched(model):
        load_ordinary_(model, PatchFile(folder / WEIGHTS_FILE))
    return model
