"""How many parameters a method needs, and how large its ensemble is (section 3.3, tables 1 and 3).

Pure counting: closed formulas, and `patched_count` for a real, unpatched network.
"""

import math
from collections.abc import Collection, Iterable
from typing import Literal

from torch import nn

from .errors import PatchbayesError

CountedMethod = Literal["emp", "ecmp", "dropout", "dropconnect", "ensemble"]


def patched_count(model: nn.Module, modules: Iterable[nn.Module], components: int) -> int:
    """N + (K - 1) * (parameters of `modules`): the size of `model` once these modules have K components.

    The ResNet-18 and PyramidNet columns of table 3: the modules are every BN and the output layer. `[model]` gives
    the explicit ensemble, K N. A parameter reached twice (shared, or a module and its child) counts once.
    """
    _check_components("patched_count", components)
    base = {id(p): p.numel() for p in model.parameters()}
    patched = {id(p): p.numel() for module in modules for p in module.parameters()}
    foreign = patched.keys() - base.keys()
    if foreign:
        raise PatchbayesError(
            f"patched_count: {len(foreign)} of the {len(patched)} parameters of `modules` are not in "
            f"{type(model).__name__}; pass modules of this very model, not of a copy."
        )
    return sum(base.values()) + (components - 1) * sum(patched.values())


def norm_overhead(features: int, components: int) -> int:
    """2 (K - 1) N_2: extra parameters of a patched BN after a layer with N_2 outputs or channels (section 3.3)."""
    _check_components("norm_overhead", components)
    return 2 * (components - 1) * features


def linear_ends_overhead(first: tuple[int, int], last: tuple[int, int], components: int) -> int:
    """(K - 1) ((I_1 + 1) O_1 + (I_L + 1) O_L): patched linear input and output layers with bias (section 3.3).

    first, last: (inputs, outputs) of the layer.
    """
    _check_components("linear_ends_overhead", components)
    return (components - 1) * sum((inputs + 1) * outputs for inputs, outputs in (first, last))


def conv_ends_overhead(first: tuple[int, int, int], last: tuple[int, int, int], components: int) -> int:
    """(K - 1) (k_1^2 I_1 O_1 + k_L^2 I_L O_L): patched convolutional ends without bias (section 3.3).

    first, last: (kernel width, input channels, output channels) of the layer.
    """
    _check_components("conv_ends_overhead", components)
    return (components - 1) * sum(kernel**2 * inputs * outputs for kernel, inputs, outputs in (first, last))


def mlp_count(method: CountedMethod, layers: int, hidden: int, components: int) -> int:
    """Parameters of table 3's MLP with L layers of H units: 1,009,900 plain, 1,129,100 EMP (L = H = 100, K = 5).

        plain, dropout, DropConnect   L H^2 + (L - 1) H
        EMP, ECMP                     the same + (K - 1) (2 (L - 1) H + H^2)
        explicit ensemble             K times the plain network

    A formula, not a network: the base has one vector of H per hidden layer (a bias or BN shift) where the overhead
    counts two (BN scale and shift), and the output layer has no bias, against section 3.3. No module has both counts.
    """
    _check_components("mlp_count", components)
    plain = layers * hidden**2 + (layers - 1) * hidden
    patched = plain + (layers - 1) * norm_overhead(hidden, components) + (components - 1) * hidden**2
    counts = {
        "emp": patched,
        "ecmp": patched,
        "dropout": plain,
        "dropconnect": plain,
        "ensemble": components * plain,
    }
    return counts[_known("mlp_count", method, counts)]


def mlp_log10_ensemble_size(method: CountedMethod, layers: int, hidden: int, components: int) -> float:
    """log10 of the effective ensemble size in table 3: how many networks the MLP can be drawn as.

        EMP K^L, ECMP K^(H^2 + L H), dropout 2^(L H), DropConnect 2^(L H^2), explicit ensemble K

    Orders of growth in the paper, evaluated here with constant 1: ECMP's L H stands for 2 (L - 1) H BN elements.
    """
    _check_components("mlp_log10_ensemble_size", components)
    sizes = {
        "emp": layers * math.log10(components),
        "ecmp": (hidden**2 + layers * hidden) * math.log10(components),
        "dropout": layers * hidden * math.log10(2),
        "dropconnect": layers * hidden**2 * math.log10(2),
        "ensemble": math.log10(components),
    }
    return sizes[_known("mlp_log10_ensemble_size", method, sizes)]


def overhead_percent(parameters: int, base: int) -> float:
    """100 (parameters - base) / base: the bracketed numbers of table 1."""
    return 100 * (parameters - base) / base


def _check_components(function: str, components: int) -> None:
    if components < 1:
        raise PatchbayesError(f"{function}: components={components}; a layer has at least one component.")


def _known(function: str, method: str, methods: Collection[str]) -> str:
    if method not in methods:
        raise PatchbayesError(f"{function}: method={method!r} is unknown; use one of {', '.join(methods)}.")
    return method
