"""How components start: whether there is room for them, and independent ones from the module's own initializer, run again."""

import copy
import os
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..errors import PatchbayesError
from .posterior import own_parameters


def initialized_again(module: nn.Module, times: int, generator: torch.Generator) -> list[dict[str, Tensor]]:
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if reset is None:
        raise PatchbayesError(
            f'init="independent" at a {type(module).__name__}: it has no reset_parameters() to run again.\n'
            '  do       init="copies" for this site.'
        )
    seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
    fresh = []
    parameter = next(iter(own_parameters(module).values()))
    devices = [parameter.device] if parameter.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        clone = copy.deepcopy(module)
        for _ in range(times):
            (getattr(clone, "reset_parameters", None) or clone._reset_parameters)()  # type: ignore[operator]
            fresh.append({name: p.detach().clone() for name, p in own_parameters(clone).items()})
    return fresh


def check_memory(components: int, values: Mapping[str, Tensor]) -> None:
    """Refuse what this machine could not hold, before anything is made."""
    needed = components * sum(p.numel() * p.element_size() for p in values.values())
    present = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else needed
    if needed > present:
        raise PatchbayesError(
            f"components={components}: they would take {needed / 2**30:,.0f} GiB, and this machine has "
            f"{present / 2**30:,.0f} GiB."
        )
