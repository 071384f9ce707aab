"""Components that start independently: from the module's own initializer, run again."""

import copy

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
