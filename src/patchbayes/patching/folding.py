"""The temperature of a classifier's mean network, in its output layer: an ordinary network that is calibrated."""

from typing import Any

import torch
from torch import Tensor, nn

from ..errors import PatchbayesError
from ..likelihoods import Likelihood
from .selection import as_tensor, call, evaluating, select


def check_foldable(likelihood: Likelihood, keep: object) -> None:
    """Refuse what has no logits that a temperature divides, and networks that are not the mean one."""
    if keep != "mean":
        raise PatchbayesError(
            f'unpatch_(keep={keep!r}, example_input=...): the temperature is that of the mean network.\n  do       keep="mean".'
        )
    if likelihood.offers not in ("ClassPrediction", "LabelPrediction"):
        raise PatchbayesError(
            f"unpatch_(example_input=...): the temperature of {type(likelihood).__name__} is a factor on its variance, which "
            "no layer holds.\n  do       leave example_input out, and multiply the variance by mean_temperature yourself."
        )


def fold_temperature_(model: nn.Module, temperature: float, example_input: Any) -> None:
    """Divide the parameters of the output layer by the temperature, in place, and see that the logits follow.

    The parameters get other memory, so that they can be put back.
    """
    before = _logits(model, example_input)
    names = list(select(model, "output", example_input, required=False).modules)
    layer = model.get_submodule(names[0]) if names else None
    for parameter in layer._parameters.values() if layer is not None else ():
        if parameter is not None:
            parameter.data = parameter.data / temperature
    after = temperature * _logits(model, example_input).double()
    allowed = 64 * torch.finfo(before.dtype).eps * float(before.double().abs().amax()) if before.numel() else 0.0
    if layer is None or not bool(((after - before.double()).abs() <= allowed).all()):
        where = f'the last layer that runs, "{names[0]}",' if names else "no layer"
        raise PatchbayesError(
            f"unpatch_(example_input=...): {where} gives the logits of {type(model).__name__}, or its weights are used "
            "elsewhere too: the temperature cannot be put into it.\n"
            f"  do       leave example_input out, and divide the logits by {temperature:.4g} yourself."
        )


def _logits(model: nn.Module, example_input: Any) -> Tensor:
    with evaluating(model):
        return as_tensor(call(model, example_input)).detach().clone()
