"""The scheme to train with: a mixed one, components where they are cheap and masks everywhere else."""

import math
from collections.abc import Callable

from torch import nn

from ..errors import PatchbayesError
from .dropout import Dropout
from .method import Method
from .mixture import ECMP

#: K, unless told otherwise.
COMPONENTS = 5
_JITTER, _RATE = 0.2, 0.1
_FASTEST = 5e-3


def mixed(noise: float = 1.0, components: int = COMPONENTS) -> dict[str | Callable[[str, nn.Module], bool], Method]:
    """Rules for `patch_`: ECMP on norms and output, and ordinary dropout before all hidden layers.

    `noise` is the one dial: the components start apart by a jitter of 0.2 * noise, and activations are dropped with probability
    0.1 * noise, in training alone: up to a noise of 1 those of whole units together, which costs less time, above it each by
    itself, which regularizes more. 1 suits a network that would otherwise fit its training set; one that fits it only in part
    does better with 0.25, one that fits it by heart with 1.5, and one that is not overconfident without patches.

    Each of K components is drawn in one of K steps. With Adam, give them K times the learning rate, so they keep up, but at
    most 0.005: `objective.parameter_groups(model, lr=1e-3, patch_lr=5e-3)`. With SGD that was worse than one rate for all.
    `warm_up_` before every epoch keeps the noise away from a network that still learns. Afterwards `calibrate_` fits spread and
    temperature.

    The paper names mixed schemes as future work; `docs/training.md` has the measurements.
    """
    if isinstance(noise, bool) or not isinstance(noise, int | float) or not (math.isfinite(noise) and 0 <= noise < 10):
        raise PatchbayesError(f"mixed(noise={noise!r}): expected a number from 0 to below 10, with 1 as the default.")
    return {
        "norm+output": ECMP(components, jitter=_JITTER * noise),
        "hidden": Dropout(_RATE * noise, tie="unit" if noise <= 1 else "activation", predict=False),
    }


def adam_rate(lr: float) -> float:
    """Adam's learning rate for components where the rest has `lr`: K times that, at most 0.005, never less than `lr`."""
    return max(lr, min(COMPONENTS * lr, _FASTEST))
