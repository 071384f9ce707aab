"""Saving and loading: safetensors with a JSON description in the header. Nothing is pickled, nothing is half written."""

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
import torch
from torch import Tensor, nn

from ..digests import damaged, refuse_damaged, sealed
from ..errors import CheckpointMismatch, PatchbayesError
from ..files import replacing
from ..likelihoods import Categorical
from ..posteriors.posterior import CHILD
from ..prior import PRIOR_KEY, LearnedPrior, Prior, prior_from_config
from .network import PatchedNetwork, root_of
from .ordinary_state import alias_names, is_patch_key, ordinary_shapes, tied_names
from .patch import is_patched, patch_, untouched_on_error
from .patch_file import CONFIG_FILE, FORMAT, LIKELIHOOD_KEY, PATCH_FILE, PatchFile, Shapes, likelihood_of, method_of
from .roots import GENERATOR_KEY, install_root_
from .selection import layers_of
from .shared_tensors import digest_of, fingerprints, other_tensors


def save(model: nn.Module, path: str | Path, *, whole: bool = False) -> None:
    """Write a patched network: by default only what patching changed, with `whole=True` all of it.

    A patch-only file holds the sites' posteriors, their layers' own tensors (running statistics), the generator and the
    prior, and a hash of every shared tensor, so that it is only ever put on the network it was trained on. Tensors of the
    sites that `bayesianize_` left as they were count as shared. Every tensor has a digest (`verify`). Written atomically.
    """
    write_file(model, path, patch_tensors(model), whole=whole)


def write_file(model: nn.Module, path: str | Path, mine: Mapping[str, Tensor], *, whole: bool = False) -> None:
    """The file of `save`, whose patch are the tensors `mine`; all others are shared."""
    root, network = root_of(model)
    state = {key: value.detach() for key, value in root.state_dict().items()}
    aliases = alias_names(root)
    shared = {key: value for key, value in state.items() if key not in mine and key not in aliases}
    kept = {k: v for k, v in (state if whole else {key: state[key] for key in mine}).items() if k not in aliases}
    description = {**describe(model), "kind": "whole" if whole else "patch", **fingerprints(shared)}
    tensors = {key: value.cpu().contiguous() for key, value in kept.items()}
    if isinstance(network.prior, LearnedPrior):
        tensors |= {f"{PRIOR_KEY}.{k}": v.detach().cpu().clone() for k, v in network.prior.state_dict().items()}
    tensors |= {f"{LIKELIHOOD_KEY}.{k}": v.detach().cpu().clone() for k, v in network.likelihood.state_dict().items()}
    with replacing(Path(path)) as temporary:
        safetensors.torch.save_file(tensors, temporary, metadata=sealed(description, tensors))


def site_tensors(model: nn.Module) -> dict[str, Tensor]:
    """All tensors of the sites, by their names in the state dict, and the generator."""
    root, network = root_of(model)
    state = root.state_dict()
    return {key: state[key] for key in _patch_keys(network, state, alias_names(root))}


def patch_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What a patch-only file holds: tensors of the sites but for those that are still the ordinary network's own."""
    given = root_of(model)[1].given
    return {key: value for key, value in site_tensors(model).items() if given.get(key) != digest_of(value)}


def remember_given_(model: nn.Module) -> None:
    """Take what the sites' layers hold now beside their posteriors for the ordinary network's own: files leave it out."""
    own = {key: value for key, value in site_tensors(model).items() if not is_patch_key(key)}
    root_of(model)[1].given = {key: digest_of(value) for key, value in own.items()}


def describe(model: nn.Module) -> dict[str, Any]:
    """What patching made of a network, in words and numbers that JSON takes; no tensors."""
    root, network = root_of(model)
    return {
        "format": FORMAT,
        "kind": "patch",
        "network": type(root).__name__,
        "sites": [
            {"name": s.name, "module": type(s.module).__name__, "method": s.method.config(), "tied": sorted(s.tied)}
            for s in network.sites
        ],
        "prior": network.prior.config(),
        "likelihood": network.likelihood.config(),
        "calibration": network.calibration,
    }


def load_(model: nn.Module, path: str | Path, *, check_shared: bool = True) -> None:
    """Read a file into a network, in place.

    A file of `save`, or a folder of `save_pretrained`: an ordinary network is patched as the file says; a patched one must
    have the same sites. A patch-only file is refused where the shared weights are not those it was trained on (in whatever
    precision they were loaded), unless `check_shared=False`. An ordinary safetensors checkpoint of the unpatched network:
    its values start every component anew. A safetensors file of a patched network's state dict: the network must be patched
    alike, or the folder's patch_config.json says how. On any mismatch, and where a tensor is not what its digest says, the
    network is left as it was, and the error lists what is wrong. A method that the file names must be defined: nothing is
    imported for it.
    """
    path = Path(path)
    file = PatchFile(path / PATCH_FILE if path.is_dir() else path)
    if file.description is None:
        (_load_state if any(map(is_patch_key, file.shapes)) else load_ordinary_)(model, file)
        return
    wanted = file.description["sites"]
    fresh = not is_patched(model)
    if fresh:
        _check_before_patching(model, file)
    with untouched_on_error(model):
        if fresh:
            _patch_as(model, wanted, file.path)
        root, network = root_of(model)
        read = file.tensors()
        tensors = dict(read)
        prior_tensors = {k: tensors.pop(k) for k in list(tensors) if k.startswith(f"{PRIOR_KEY}.")}
        likelihood = likelihood_of(file, tensors)
        tensors = _upgraded(network, tensors)
        problems = _compare_sites(network, wanted) or _compare_tensors(root, network, tensors, file, check_shared)
        problems = problems or damaged(file.description, read)
        if problems:
            raise CheckpointMismatch(_listing(f"{path} does not fit {type(root).__name__}", problems))
        prior = prior_from_config(file.description["prior"], prior_tensors, root)
        root.load_state_dict(tensors, strict=False)
        network.prior, network.calibration = prior, file.description.get("calibration")
        network.given = {key: digest_of(value) for key, value in _left_out(root, file).items()}
        if likelihood is not None:
            network.likelihood = likelihood.to(network.device)


def _check_before_patching(model: nn.Module, file: PatchFile) -> None:
    """Compare shapes on stand-ins without memory: a small file must not make patching allocate what it does not hold."""
    assert file.description is not None
    modules = layers_of(model)
    wanted = file.description["sites"]
    absent = [f'"{s["name"]}" ({s["module"]}) is not in the network' for s in wanted if s["name"] not in modules]
    if absent:
        raise CheckpointMismatch(_listing(f"{file.path} was saved from another network", absent))
    problems = []
    for site in wanted:
        prefix = f"{site['name']}." if site["name"] else ""
        found = {key: shape for key, shape in file.shapes.items() if key.startswith(prefix)}
        for key, shape in _posterior_shapes(modules[site["name"]], method_of(site, file.path)).items():
            full = prefix + key
            old = full.replace(f"{CHILD}.components.", "parametrizations.") + ".original"
            given = found.get(full, found.get(old))
            if given is not None and _size(given) != _size(shape):
                problems.append(f"{full}: {given} in the file, {shape} in the network")
            elif key == f"{CHILD}.logits" and any(other.endswith(key) for other in file.shapes):
                continue  # sites that share the network's draw share its law, which the file holds once
            elif given is None and not any(key.startswith(_stored_below(prefix)) for key in found):
                problems.append(f"missing in the file: {full}")
    if problems:
        raise CheckpointMismatch(_listing(f"{file.path} does not fit {type(model).__name__}", problems))


def _stored_below(prefix: str) -> tuple[str, str]:
    """How keys begin that hold something of a site's posterior, now and in version 0.1.0."""
    return f"{prefix}{CHILD}.", f"{prefix}parametrizations."


def _posterior_shapes(module: nn.Module, method: Any) -> Shapes:
    """The shapes of what a method would store for a layer, found on the meta device; empty where that cannot be done."""
    stand_in = copy.copy(module)
    stand_in.__dict__ = dict(module.__dict__)
    for place in ("_parameters", "_buffers"):
        held = module.__dict__[place]
        stand_in.__dict__[place] = {n: None if t is None else _on_meta(t) for n, t in held.items()}
    stand_in.__dict__["_modules"] = {}
    try:
        posterior = method.without_spread().posterior(stand_in, torch.Generator().manual_seed(0))
        values = {n: p.detach() for n, p in stand_in._parameters.items() if p is not None}
        posterior.start_(values, torch.Generator().manual_seed(0))
    except (RuntimeError, NotImplementedError, PatchbayesError):
        return {}
    return {f"{CHILD}.{key}": tuple(value.shape) for key, value in posterior.state_dict().items()}


def _on_meta(tensor: Tensor) -> Tensor:
    on_meta = tensor.detach().to("meta")
    return nn.Parameter(on_meta, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else on_meta


def _size(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def load_ordinary_(model: nn.Module, file: PatchFile) -> None:
    """A checkpoint of the unpatched network; what a file holds of patches beside it is left."""
    target = root_of(model)[0] if is_patched(model) else model
    expected = ordinary_shapes(target)
    tensors = file.tensors()
    refuse_damaged(file.metadata, tensors, f"load_: {file.path}")
    tensors = {key: value for key, value in tensors.items() if not is_patch_key(key)}
    tied = tied_names(target)
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
        raise CheckpointMismatch(_listing(f"{file.path} is not a checkpoint of {type(target).__name__}", problems))
    target.load_state_dict(tensors, strict=False)


def _load_state(model: nn.Module, file: PatchFile) -> None:
    """A state dict of a patched network, with or without the ordinary names beside those of the patches."""
    beside = file.path.parent / CONFIG_FILE
    fresh = not is_patched(model)
    if fresh and not beside.is_file():
        raise CheckpointMismatch(
            f"load_: {file.path} is the state dict of a patched network and does not say how it was patched.\n"
            f"  do       patch_ the network as that one was, or load_ a folder of save_pretrained (with {CONFIG_FILE})."
        )
    described = file.described_by(beside) if fresh else None
    if described is not None:
        file.description = described
        _check_before_patching(model, file)
    with untouched_on_error(model):
        if described is not None:
            _patch_as(model, described["sites"], beside)
        root, _ = root_of(model)
        tensors, state, aliases = file.tensors(), root.state_dict(), alias_names(root)
        ordinary = ordinary_shapes(root).keys() - state.keys()
        tensors = {key: value for key, value in tensors.items() if key not in ordinary and key not in aliases}
        expected = {key for key in state if key not in aliases and key != GENERATOR_KEY}
        problems = [f"missing in the file: {key}" for key in sorted(expected - tensors.keys())]
        problems += [f"not in the network: {key}" for key in sorted(tensors.keys() - expected - {GENERATOR_KEY})]
        problems += [
            f"{key}: {tuple(tensors[key].shape)} in the file, {tuple(state[key].shape)} in the network"
            for key in sorted(expected & tensors.keys())
            if tensors[key].shape != state[key].shape
        ]
        if problems:
            raise CheckpointMismatch(_listing(f"{file.path} does not fit {type(root).__name__}", problems))
        root.load_state_dict(tensors, strict=False)


def _patch_as(model: nn.Module, wanted: list[dict[str, Any]], path: Path) -> None:
    if not wanted:  # a network without patches that has a temperature
        install_root_(model, PatchedNetwork(0, Prior(), Categorical()))
        return
    tied: Literal["together", "separate"] = "together" if any(site["tied"] for site in wanted) else "separate"
    rules = {_named(site["name"]): method_of(site, path) for site in wanted}
    try:
        patch_(model, rules, tied=tied)
    except PatchbayesError as error:
        raise CheckpointMismatch(f"{path}: the network cannot be patched as the file says. {error}") from None


def _named(wanted: str) -> Any:
    return lambda name, module: name == wanted


def _upgraded(network: PatchedNetwork, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a file of version 0.1.0 under the names and in the shapes of this one."""
    for site in network.sites:
        prefix = f"{site.name}." if site.name else ""
        start, end = f"{prefix}parametrizations.", ".original"
        keys = {k[len(start) : -len(end)]: k for k in tensors if k.startswith(start) and k.endswith(end)}
        keys |= {k[len(prefix) :]: k for k in tensors if k.startswith(f"{prefix}component_")}
        if keys:
            old = {name: tensors.pop(key) for name, key in keys.items()}
            tensors |= {prefix + key: value for key, value in site.posterior.upgrade(old).items()}
    return tensors


def _compare_sites(network: PatchedNetwork, wanted: list[dict[str, Any]]) -> list[str]:
    ours = {site.name: site for site in network.sites}
    theirs = {site["name"]: site for site in wanted}
    problems = [f'site "{name}" of the file is not patched here' for name in theirs if name not in ours]
    problems += [f'site "{name}" here is not in the file' for name in ours if name not in theirs]
    for name in ours.keys() & theirs.keys():
        method = ours[name].method
        mine = json.loads(json.dumps(method.config()))
        for field, value in theirs[name]["method"].items():
            if field not in method.start_fields and mine.get(field) != value:
                problems.append(f'site "{name}": {field} is {value!r} in the file, {mine.get(field)!r} here')
    return sorted(problems)


def _compare_tensors(
    root: nn.Module,
    network: PatchedNetwork,
    tensors: Mapping[str, Tensor],
    file: PatchFile,
    check_shared: bool,
) -> list[str]:
    assert file.description is not None
    state = root.state_dict()
    aliases = alias_names(root)
    mine = _patch_keys(network, state, aliases) - _left_out(root, file).keys()
    whole = file.description["kind"] == "whole"
    expected = {key for key in (state if whole else mine) if key not in aliases}
    problems = [f"missing in the file: {key}" for key in sorted(expected - tensors.keys())]
    problems += [f"not in the network: {key}" for key in sorted(tensors.keys() - expected)]
    problems += [
        f"{key}: {tuple(tensors[key].shape)} in the file, {tuple(state[key].shape)} in the network"
        for key in sorted(expected & tensors.keys())
        if tensors[key].shape != state[key].shape
    ]
    problems += [
        f"{key}: {tensors[key].dtype} in the file, {state[key].dtype} in the network"
        for key in sorted(expected & tensors.keys())
        if tensors[key].is_floating_point() != state[key].is_floating_point()
    ]
    if not whole and check_shared and not problems:
        shared = {key: value for key, value in state.items() if key not in mine and key not in aliases}
        problems += other_tensors(shared, file.description)
    return problems


def _patch_keys(network: PatchedNetwork, state: Mapping[str, Tensor], aliases: Mapping[str, str]) -> set[str]:
    """State-dict keys that belong to the sites (posterior, own parameters and buffers), and the generator; first names."""
    keys = {GENERATOR_KEY}
    for site in network.sites:
        prefix = f"{site.name}." if site.name else ""
        own = {*site.posterior.names, *site.module._parameters, *site.module._buffers}
        keys |= {prefix + name for name in own} | {f"{prefix}{CHILD}.{key}" for key in site.posterior.state_dict()}
    return {aliases.get(key, key) for key in keys if key in state}


def _left_out(root: nn.Module, file: PatchFile) -> dict[str, Tensor]:
    """The sites' own tensors that a patch-only file counts among the shared ones."""
    assert file.description is not None
    if file.description["kind"] == "whole":
        return {}
    shared = file.description["shared"]
    return {key: value for key, value in site_tensors(root).items() if key in shared and not is_patch_key(key)}


def _listing(what: str, problems: list[str]) -> str:
    shown = [*problems[:12], *([f"... and {len(problems) - 12} more"] if len(problems) > 12 else [])]
    do = "give it a network of the architecture that the file was made for"
    if problems[0].startswith("shared"):
        do = "load the network's own weights first; or save all of it, save(..., whole=True), and load that"
    return f"load_: {what}:{''.join(f'{chr(10)}  - {one}' for one in shown)}\n  do       {do}."
