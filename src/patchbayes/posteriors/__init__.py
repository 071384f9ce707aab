"""One file for each distribution over the parameters of a site."""

from typing import Any

from ..errors import PatchbayesError
from .dropout import Dropout
from .gaussian import MeanField
from .mixture import ECMP, EMP, DropConnect, Ensemble, Mixture, Shared
from .posterior import Method, Posterior, SiteDraw

_METHODS: dict[str, type[Method]] = {"Mixture": Mixture, "MeanField": MeanField, "Dropout": Dropout}


def method_from_config(config: dict[str, Any]) -> Method:
    """The method that `Method.config` described."""
    fields = dict(config)
    name = fields.pop("method", None)
    if name not in _METHODS:
        raise PatchbayesError(f"method {name!r} is not known; known are {', '.join(sorted(_METHODS))}.")
    if isinstance(fields.get("probabilities"), list):
        fields["probabilities"] = tuple(fields["probabilities"])
    try:
        return _METHODS[name](**fields)
    except TypeError as error:
        raise PatchbayesError(f"method {name}: {error}.") from None


__all__ = [
    "ECMP",
    "EMP",
    "DropConnect",
    "Dropout",
    "Ensemble",
    "MeanField",
    "Method",
    "Mixture",
    "Posterior",
    "Shared",
    "SiteDraw",
    "method_from_config",
]
