"""Networks whose weights accelerate keeps elsewhere and brings in when a layer runs (cpu_offload, dispatch_model).

Its hooks wrap the forward of single modules. A posterior is a module that is never called, so its weights are brought in here,
by the same hooks, whenever its layer runs; and a layer that had a hook before it was patched shall run as a patched one.
"""

import contextlib
import types
from collections.abc import Iterator

import torch
from torch import nn

_HOOK, _WRAPPED = "_hf_hook", "_old_forward"


@contextlib.contextmanager
def brought_in(posterior: nn.Module) -> Iterator[None]:
    """The weights of a posterior on the device where they are used, for the block, if they are kept elsewhere."""
    away = [module for module in posterior.modules() if _is_away(module)]
    for module in away:
        module.__dict__[_HOOK].pre_forward(module)
    try:
        yield
    finally:
        for module in away:
            module.__dict__[_HOOK].post_forward(module, None)


def is_offloaded(posterior: nn.Module) -> bool:
    """Whether its weights are away; told by the first, for this is asked whenever a layer runs."""
    for module in (posterior, *posterior._modules.values()):
        for parameter in module._parameters.values() if module is not None else ():
            if parameter is not None:
                return parameter.is_meta
    return False


def execution_device(module: nn.Module) -> torch.device | None:
    """Where the weights of a layer come to when it runs."""
    for part in module.modules():
        device = getattr(part.__dict__.get(_HOOK), "execution_device", None)
        if device is not None:
            return torch.device(device)
    return None


def rebind_forward_(module: nn.Module) -> None:
    """After the class of a module changed: let a hook that wraps its forward call the one of the class it has now."""
    if _HOOK in module.__dict__ and _WRAPPED in module.__dict__:
        module.__dict__[_WRAPPED] = types.MethodType(type(module).forward, module)


def _is_away(module: nn.Module) -> bool:
    return _HOOK in module.__dict__ and any(p is not None and p.is_meta for p in module._parameters.values())
