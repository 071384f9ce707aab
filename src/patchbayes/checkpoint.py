"""Saving and loading: safetensors with a JSON description in the header. Nothing is pickled, nothing is half written."""

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from .draws import network_of
from .errors import CheckpointMismatch, PatchbayesError
from .files import replacing
from .network import GENERATOR_KEY, Network
from .patching import is_patched, patch_, unpatch_
from .posteriors import method_from_config
from .prior import PRIOR_KEY, LearnedPrior, Prior, prior_from_config
from .sites import DrawnParameter

FORMAT = "patchbayes-1"
_START_ONLY = ("init", "jitter", "norm_scale", "per_example", "scale")  # fields that matter only before training


def save(model: nn.Module, path: str | Path, *, whole: bool = False) -> None:
    """Write a patched network: by default only what patching changed, with `whole=True` all of it.

    A patch-only file holds the sites' components, their buffers (running statistics), the generator and the prior, and a
    hash of every shared tensor, so that it is only ever put on the network it was trained on. Written atomically.
    """
    root, network = _root_of(model)
    state = {key: value.detach() for key, value in root.state_dict().items()}
    aliases = _aliases(root)
    mine = _patch_keys(network, state, aliases)
    shared = {key: value for key, value in state.items() if key not in mine and key not in aliases}
    kept = {k: v for k, v in (state if whole else {key: state[key] for key in mine}).items() if k not in aliases}
    description: dict[str, Any] = {
        "format": FORMAT,
        "kind": "whole" if whole else "patch",
        "network": type(root).__name__,
        "sites": [
            {"name": s.name, "module": _kind(s.module), "method": s.method.config(), "tied": sorted(s.tied)}
            for s in network.sites
        ],
        "prior": network.prior.config(),
        "shared": {key: _digest(value) for key, value in shared.items()},
    }
    tensors = {key: value.cpu().contiguous() for key, value in kept.items()}
    if isinstance(network.prior, LearnedPrior):
        tensors |= {f"{PRIOR_KEY}.{k}": v.detach().cpu().clone() for k, v in network.prior.state_dict().items()}
    with replacing(Path(path)) as temporary:
        safetensors.torch.save_file(tensors, temporary, metadata={"patchbayes": json.dumps(description)})


def load_(model: nn.Module, path: str | Path, *, check_shared: bool = True) -> None:
    """Read a file into a network, in place.

    A file of `save`: an ordinary network is patched as the file says; a patched one must have the same sites. A patch-only
    file is refused where the shared weights are not those it was trained on, unless `check_shared=False`. An ordinary
    safetensors checkpoint of the unpatched network: its values start every component anew. On any mismatch the network
    is left as it was, and the error lists what does not fit.
    """
    tensors, description = _read(Path(path))
    if description is None:
        _load_ordinary(model, tensors, path)
        return
    wanted = description["sites"]
    fresh = not is_patched(model)
    before = _parameters_of(model, wanted) if fresh else []
    if fresh:
        _patch_as(model, wanted, path)
    try:
        root, network = _root_of(model)
        prior_tensors = {k: tensors.pop(k) for k in list(tensors) if k.startswith(f"{PRIOR_KEY}.")}
        problems = _compare_sites(network, wanted) or _compare_tensors(
            root, network, tensors, description, check_shared
        )
        if problems:
            raise CheckpointMismatch(_listing(f"{path} does not fit {type(root).__name__}", problems))
        prior = prior_from_config(description["prior"], prior_tensors, root)
        root.load_state_dict(tensors, strict=False)
        network.prior = prior
    except BaseException:
        if fresh:
            unpatch_(model)
            for module, name, parameter, value in before:  # a method may start norm weights elsewhere, or untie
                parameter.data = value
                module._parameters[name] = parameter
        raise


def _parameters_of(model: nn.Module, wanted: list[dict[str, Any]]) -> list[tuple[nn.Module, str, nn.Parameter, Tensor]]:
    modules = dict(model.named_modules())
    found = [modules[site["name"]] for site in wanted if site["name"] in modules]
    return [
        (module, name, parameter, parameter.detach().clone(memory_format=torch.preserve_format))
        for module in found
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    if not path.is_file():
        raise CheckpointMismatch(f"load_: there is no file {path}.")
    try:
        with safetensors.safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise CheckpointMismatch(
            f"load_: {path} is not a whole safetensors file ({error}); copy or save it again."
        ) from None
    if "patchbayes" not in metadata:
        return tensors, None
    try:
        description = json.loads(metadata["patchbayes"])
        if description["format"] != FORMAT:
            raise CheckpointMismatch(
                f"load_: {path} has the format {description['format']!r}, this version reads {FORMAT!r}; update patchbayes."
            )
        if description["kind"] not in ("patch", "whole") or not isinstance(description["shared"], dict):
            raise ValueError("kind or shared")
        for site in description["sites"]:
            method_from_config(site["method"])
            if not (isinstance(site["name"], str) and isinstance(site["tied"], list)):
                raise ValueError("sites")
        _check_prior(description["prior"], tensors)
    except CheckpointMismatch:
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointMismatch(f"load_: the description in {path} is damaged ({error!r}).") from None
    return tensors, description


def _check_prior(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    if "learned_layers" not in config:
        Prior(config["tau"], config["rho"])
        return
    for name in ("log_tau", "log_rho"):
        if tensors[f"{PRIOR_KEY}.{name}"].shape != (len(config["learned_layers"]),):
            raise ValueError(f"prior {name}")


def _load_ordinary(model: nn.Module, tensors: dict[str, Tensor], path: str | Path) -> None:
    target = _root_of(model)[0] if is_patched(model) else model
    expected = _ordinary_shapes(target)
    plain = _plain_names(target)
    tied = {plain.get(alias, alias): plain.get(first, first) for alias, first in _aliases(target).items()}
    for one, other in [*((first, alias) for alias, first in tied.items()), *tied.items()]:
        if one not in tensors and other in tensors:  # a file may hold tied weights under one of their names
            tensors[one] = tensors[other]
    found = {key: tuple(value.shape) for key, value in tensors.items()}
    absent = {key for key in expected if key not in found and not key.endswith("num_batches_tracked")}
    problems = [f"missing in the file: {key}" for key in sorted(absent)]
    problems += [f"not in the network: {key}" for key in found if key not in expected]
    problems += [
        f"{key}: {found[key]} in the file, {shape} in the network"
        for key, shape in expected.items()
        if key in found and found[key] != shape
    ]
    if problems:
        raise CheckpointMismatch(_listing(f"{path} is not a checkpoint of {type(target).__name__}", problems))
    target.load_state_dict(tensors, strict=False)


def _ordinary_shapes(root: nn.Module) -> dict[str, tuple[int, ...]]:
    """Keys and shapes of the unpatched network's state dict."""
    shapes = {}
    plain = _plain_names(root)
    for key, value in root.state_dict().items():
        if key == GENERATOR_KEY or key.rpartition(".")[2].startswith("component_"):
            continue
        shapes[plain.get(key, key)] = tuple(value.shape[1:] if key in plain else value.shape)
    return shapes


def _plain_names(root: nn.Module) -> dict[str, str]:
    """Keys of patched parameters, and the names that they have in the unpatched network."""
    lists = [
        name.removesuffix(".0")
        for name, m in root.named_modules(remove_duplicate=False)
        if isinstance(m, DrawnParameter)
    ]
    return {f"{name}.original": f".{name}".replace(".parametrizations.", ".")[1:] for name in lists}


def _patch_as(model: nn.Module, wanted: list[dict[str, Any]], path: str | Path) -> None:
    modules = dict(model.named_modules())
    absent = [
        f'"{site["name"]}" ({site["module"]}) is not in the network' for site in wanted if site["name"] not in modules
    ]
    if absent:
        raise CheckpointMismatch(_listing(f"{path} was saved from another network", absent))
    tied: Literal["together", "separate"] = "together" if any(site["tied"] for site in wanted) else "separate"
    rules = {}
    for site in wanted:
        rules[_named(site["name"])] = method_from_config(site["method"])
    try:
        patch_(model, rules, tied=tied)
    except PatchbayesError as error:
        raise CheckpointMismatch(f"{path}: the network cannot be patched as the file says. {error}") from None


def _named(wanted: str) -> Any:
    return lambda name, module: name == wanted


def _compare_sites(network: Network, wanted: list[dict[str, Any]]) -> list[str]:
    ours = {site.name: site for site in network.sites}
    theirs = {site["name"]: site for site in wanted}
    problems = [f'site "{name}" of the file is not patched here' for name in theirs if name not in ours]
    problems += [f'site "{name}" here is not in the file' for name in ours if name not in theirs]
    for name in ours.keys() & theirs.keys():
        mine = json.loads(json.dumps(ours[name].method.config()))
        for field, value in theirs[name]["method"].items():
            if field not in _START_ONLY and mine.get(field) != value:
                problems.append(f'site "{name}": {field} is {value!r} in the file, {mine.get(field)!r} here')
    return sorted(problems)


def _compare_tensors(
    root: nn.Module, network: Network, tensors: dict[str, Tensor], description: dict[str, Any], check_shared: bool
) -> list[str]:
    state = root.state_dict()
    aliases = _aliases(root)
    mine = _patch_keys(network, state, aliases)
    expected = {key for key in (state if description["kind"] == "whole" else mine) if key not in aliases}
    problems = [f"missing in the file: {key}" for key in sorted(expected - tensors.keys())]
    problems += [f"not in the network: {key}" for key in sorted(tensors.keys() - expected)]
    problems += [
        f"{key}: {tuple(tensors[key].shape)} in the file, {tuple(state[key].shape)} in the network"
        for key in sorted(expected & tensors.keys())
        if tensors[key].shape != state[key].shape
    ]
    if description["kind"] == "patch" and check_shared and not problems:
        shared = {key: value for key, value in state.items() if key not in mine and key not in aliases}
        for key in sorted(shared.keys() | description["shared"].keys()):
            if key not in shared or description["shared"].get(key) != _digest(shared[key]):
                problems.append(f"shared tensor {key} is not the one that the patch was trained on")
    return problems


def _patch_keys(network: Network, state: dict[str, Tensor], aliases: dict[str, str]) -> set[str]:
    """State-dict keys that belong to the sites (their own parameters and buffers), and the generator; first names."""
    keys = {GENERATOR_KEY}
    for site in network.sites:
        prefix = f"{site.name}." if site.name else ""
        own = set(site.posterior.fixed_names) | set(site.module._buffers)
        keys |= {f"{prefix}parametrizations.{name}.original" for name in site.posterior.names}
        keys |= {f"{prefix}{name}" for name in own if f"{prefix}{name}" in state}
    return {aliases.get(key, key) for key in keys}


def _aliases(root: nn.Module) -> dict[str, str]:
    """Keys that name a parameter or buffer again (tied weights), with the first name."""
    first: dict[int, str] = {}
    aliases = {}
    named = [*root.named_parameters(remove_duplicate=False), *root.named_buffers(remove_duplicate=False)]
    for key, tensor in named:
        if id(tensor) in first:
            aliases[key] = first[id(tensor)]
        first.setdefault(id(tensor), key)
    return aliases


def _root_of(model: nn.Module) -> tuple[nn.Module, Network]:
    network: Network = network_of(model)
    root = next(module for module in model.modules() if module.__dict__.get("_patchbayes") is network)
    return root, network


def _digest(tensor: Tensor) -> str:
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    header = f"{tensor.dtype}{tuple(tensor.shape)}".encode()
    return hashlib.sha256(header + content.tobytes()).hexdigest()[:16]


def _kind(module: nn.Module) -> str:
    return type(module).__name__.removeprefix("Parametrized")


def _listing(what: str, problems: list[str]) -> str:
    shown = "\n".join(f"  - {problem}" for problem in problems[:12])
    more = f"\n  - ... and {len(problems) - 12} more" if len(problems) > 12 else ""
    return f"load_: {what}:\n{shown}{more}"
