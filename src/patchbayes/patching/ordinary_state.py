"""A patched network in terms of the ordinary one: the names, the shapes and the values that it would have unpatched."""

import torch
from torch import Tensor, nn

from ..posteriors.posterior import CHILD
from .network import root_of, site_of
from .patch_file import Shapes
from .roots import GENERATOR_KEY
from .selection import layers_of


@torch.no_grad()
def ordinary_state(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of the mean network, under the names that the unpatched network has; tied names share a tensor."""
    root, network = root_of(model)
    state = {key: value.detach() for key, value in root.state_dict().items() if not is_patch_key(key)}
    for site in network.sites:
        prefix = f"{site.name}." if site.name else ""
        for name, value in site.posterior.mean().items():
            state[prefix + name] = value.detach().clone()
            for other, _, other_name in site.tied.get(name, []):
                state[f"{other}.{other_name}" if other else other_name] = state[prefix + name]
    return state


def is_patch_key(key: str) -> bool:
    """Whether a key of a patched network's state dict is of its patches: a posterior's, or the generator's."""
    return f".{CHILD}." in f".{key}" or key == GENERATOR_KEY or key.endswith(f".{GENERATOR_KEY}")


def ordinary_shapes(root: nn.Module) -> Shapes:
    """Keys and shapes of the unpatched network's state dict."""
    shapes: Shapes = {key: tuple(value.shape) for key, value in root.state_dict().items() if not is_patch_key(key)}
    for name, module in layers_of(root).items():
        site = site_of(module)
        for own in site.posterior.names if site else ():
            shapes[f"{name}.{own}" if name else own] = site.shapes[own]  # type: ignore[union-attr]
            for other, _, other_name in site.tied.get(own, []):  # type: ignore[union-attr]
                shapes[f"{other}.{other_name}" if other else other_name] = site.shapes[own]  # type: ignore[union-attr]
    return shapes


def tied_names(root: nn.Module) -> dict[str, str]:
    """Ordinary names of tied parameters, with the first name of each."""
    tied = alias_names(root)
    for name, module in layers_of(root).items():
        site = site_of(module)
        for own, others in (site.tied if site else {}).items():
            tied |= {f"{other}.{other_name}": f"{name}.{own}" for other, _, other_name in others}
    return tied


def alias_names(root: nn.Module) -> dict[str, str]:
    """Keys that name a parameter or buffer again (tied weights), with the first name."""
    first: dict[int, str] = {}
    aliases = {}
    named = [*root.named_parameters(remove_duplicate=False), *root.named_buffers(remove_duplicate=False)]
    for key, tensor in named:
        if id(tensor) in first:
            aliases[key] = first[id(tensor)]
        first.setdefault(id(tensor), key)
    return aliases
