"""The fully connected network of the ten regression datasets (tables 12 and 13)."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Literal

from torch import nn

from ..errors import PatchbayesError


def mlp(
    in_features: int,
    hidden: Sequence[int] = (50,),
    out_features: int = 1,
    norm: Literal["batch"] | None = "batch",
    gamma: float | None = None,
) -> nn.Sequential:
    """ReLU network with BN "after the input and after the hidden layer" (appendix D).

        x -> [norm0] -> hidden1 -> ReLU -> [norm1] -> ... -> output

    A hidden layer is read as linear map and ReLU, so the norm follows the ReLU: the one reading in which BN and
    dropout stand at the same two places. `gamma` is where the BN scales start, 0.2 if not given (the paper's).
    The explicit ensemble's members have neither: `norm=None`. Dropout at those places is `patch_(mlp(..., norm=None),
    Dropout(0.005), "linear")`.

    (B, in_features) -> (B, out_features), also for one output.
    """
    if norm not in ("batch", None):
        raise PatchbayesError(f'mlp: norm={norm!r} is unknown; use "batch" or None.')
    if norm is None and gamma is not None:
        raise PatchbayesError(
            f'mlp: gamma={gamma} is the start of the BN scales, but norm=None; drop it or use norm="batch".'
        )
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    features = in_features
    for i, width in enumerate([in_features, *hidden]):
        if i > 0:
            layers[f"hidden{i}"] = nn.Linear(features, width)
            layers[f"relu{i}"] = nn.ReLU()
        if norm == "batch":
            bn = nn.BatchNorm1d(width)
            nn.init.constant_(bn.weight, 0.2 if gamma is None else gamma)
            layers[f"norm{i}"] = bn
        features = width
    layers["output"] = nn.Linear(features, out_features)
    return nn.Sequential(layers)
