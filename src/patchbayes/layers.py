"""What kind of layer a module is: by its class, or by its likeness to one."""

import torch
from torch import nn

NORMS = (
    nn.modules.batchnorm._NormBase,
    nn.modules.instancenorm._InstanceNorm,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
)
_EPSILONS = ("eps", "epsilon", "variance_epsilon")


def is_norm(module: nn.Module) -> bool:
    """A normalization layer with affine parameters, known by class or by likeness.

    A look-alike has a one-dimensional `weight`, no parameter of more dimensions, and either "norm" in its class name or an
    epsilon.
    """
    parameters = [p for p in module._parameters.values() if p is not None] + drawn_values(module)
    if not parameters:
        return False
    if isinstance(module, NORMS):
        return True
    affine = all(p.dim() <= 1 for p in parameters) and getattr(module, "weight", None) is not None
    named = "norm" in type(module).__name__.lower()
    return affine and (named or any(isinstance(getattr(module, name, None), float) for name in _EPSILONS))


def is_linear(module: nn.Module) -> bool:
    """A fully connected layer: nn.Linear, or a look-alike with in_features, out_features and a two-dimensional weight."""
    if isinstance(module, nn.Linear):
        return True
    alike = hasattr(module, "in_features") and hasattr(module, "out_features")
    weight = getattr(module, "weight", None) if alike else None
    return isinstance(weight, torch.Tensor) and weight.dim() == 2


def is_conv(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.conv._ConvNd)


def is_compiled(module: nn.Module) -> bool:
    """What `torch.compile(module)` returns; known by name, so that the compiler is not imported to ask."""
    return type(module).__name__ == "OptimizedModule"


def drawn_values(module: nn.Module) -> list[torch.Tensor]:
    """Parameters that the module shows but does not hold itself: parametrized ones, and those of a patched layer."""
    names = list(module.parametrizations) if nn.utils.parametrize.is_parametrized(module) else []  # type: ignore[arg-type]
    posterior = module._modules.get("patchbayes")
    return [getattr(module, name) for name in (*names, *getattr(posterior, "names", ()))]
