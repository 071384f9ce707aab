"""Methods by name, and patching a network with one."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import nn

from ..errors import PatchbayesError
from ..patch_report import PatchReport
from ..patching import patch_
from ..posteriors import ECMP, EMP, DropConnect, Dropout, Ensemble, MeanField, Method, Mixture
from ..posteriors.mixture import Init
from ..prior import Prior
from ..selection import Sites, is_norm, select

#: The methods, with what each can be given, and where it is put if nothing else is said.
_OPTIONS: dict[str, tuple[str, ...]] = {
    "vanilla": (),
    "dropout": ("rate",),
    "emp": ("components", "jitter", "init", "per_example"),
    "ecmp": ("components", "jitter", "init", "per_example"),
    "dropconnect": ("rate",),
    "meanfield": ("jitter",),
    "ensemble": ("components", "jitter", "init"),
}
_SITES = {"dropout": "norm", "meanfield": "all", "ensemble": "all"}
_MIXTURES: dict[str, Callable[..., Mixture]] = {"emp": EMP, "ecmp": ECMP, "ensemble": Ensemble}
_MASKS: dict[str, Callable[[float], Method]] = {"dropout": Dropout, "dropconnect": DropConnect}

METHODS = tuple(_OPTIONS)


def build_method(
    name: str,
    *,
    components: int | None = None,
    rate: float | None = None,
    jitter: float | None = None,
    init: Init | None = None,
    per_example: bool = False,
) -> Method | None:
    """The method of that name; None for "vanilla", a network that is not patched. What a method does not have is refused.

    components   K of "emp", "ecmp" and "ensemble"; 5 if not given.
    rate         the share that "dropout" and "dropconnect" drop; 0.005 if not given (the paper's).
    jitter       how far apart components start that start as copies, in multiples of a parameter's root mean square; the
                 initial deviation of "meanfield". 0.1 if not given.
    init         "copies" (if not given, for "emp" and "ecmp") or "independent" (for "ensemble").
    per_example  whether "emp" and "ecmp" draw for each example of a batch in training, on norm layers.
    """
    if name not in METHODS:
        raise PatchbayesError(f"method {name!r} is not known; known are {', '.join(METHODS)}.")
    given = {
        option: value
        for option, value in (
            ("components", components),
            ("rate", rate),
            ("jitter", jitter),
            ("init", init),
            ("per_example", per_example or None),
        )
        if value is not None
    }
    for option, value in given.items():
        if option not in _OPTIONS[name]:
            owners = ", ".join(method for method, options in _OPTIONS.items() if option in options)
            raise PatchbayesError(
                f"method {name!r} has no {option} ({option}={value!r} was given); it is for {owners}."
            )
    if name in _MIXTURES:
        method = _MIXTURES[name](**given)
        if method.init == "independent" and jitter is not None:
            raise PatchbayesError(
                f"method {name!r}: jitter={jitter!r} is for components that start as copies, and these start "
                'independently.\n  do       leave it out, or init="copies".'
            )
        return method
    if name in _MASKS:
        return _MASKS[name](0.005 if rate is None else rate)
    if name == "meanfield":
        return MeanField() if jitter is None else MeanField(scale=jitter)
    return None


def default_sites(name: str) -> str:
    """Where a method is put if nothing else is said: the paper's sites."""
    return _SITES.get(name, "norm+output")


def patch_with_(
    network: nn.Module,
    method: Method,
    sites: str,
    *,
    precision: float = 1.0,
    seed: int = 0,
    input_shape: tuple[int, ...] | None = None,
) -> PatchReport:
    """Patch a built network in place; a draw for each example is taken where the layer allows it, on norm layers.

    precision: of the prior, on weights and biases. input_shape: traces which layer is the output.
    """
    example = None if input_shape is None else torch.zeros(2, *input_shape)
    rules: Method | Mapping[Sites, Method] = method
    if isinstance(method, Mixture) and method.per_example:
        chosen = select(network, sites, example).modules
        norms = {name for name, module in chosen.items() if is_norm(module)}
        others = chosen.keys() - norms
        if not norms:
            raise PatchbayesError(
                f'per_example=True: sites="{sites}" has no norm layer; only those draw for each example.'
            )
        rules = {lambda name, _: name in norms: method}
        if others:
            rules = {**rules, lambda name, _: name in others: replace(method, per_example=False)}
    generator = torch.Generator().manual_seed(seed)
    return patch_(network, rules, sites, example_input=example, prior=Prior(precision, precision), generator=generator)
