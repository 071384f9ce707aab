"""warm_up_: noise in training as far as held-out data show that the network is overconfident."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import PatchbayesError
from ..likelihoods import Likelihood, checked_likelihood
from ..patching.network import PatchedNetwork, root_of
from ..patching.selection import as_tensor
from .calibrate import BATCH, Calibration
from .held_out import HeldOut, Select, select_for
from .score import Average, best_temperature, scores
from .spread import is_member

_EXAMPLES = 1500
_STEEPNESS, _CHANCE = 2.0, 0.9


def warm_up_(
    model: nn.Module,
    held_out: Iterable[Any],
    *,
    likelihood: Likelihood | None = None,
    select: Select | None = None,
    output: Callable[[Any], Tensor] | None = None,
) -> float:
    """Let training draw as far as the network is overconfident, and not while it still learns: call it before every epoch.

    Noise helps a network that fits its training data and is overconfident; it harms one that does not. The first call turns all
    draws off: training then computes with the mean network, as if there were no patches. The components move together, and
    their distances stay as they are. Every later call finds the best temperature T of the mean network on held-out data, in
    one pass, and of the next training steps this share draws:

        min(1, max(0, 2 (T - 1)))

    and none where the classes are told hardly better than by their frequencies: what knows nothing is not overfitted. The share
    is returned. Called once, before all epochs, it would never let the network draw. A compiled network draws in all steps
    or none, from a share of 0.5. `forward_draws` and `use_draw`, which are asked for draws, make them all the same.

    held_out, likelihood, select, output   as in `calibrate_`; at most 1,500 examples are used.
    """
    root, network = root_of(model)
    _check_has_mean(network)
    chosen = HeldOut.read(held_out, _EXAMPLES, BATCH, torch.Generator().manual_seed(0), select or select_for(model))
    likelihood = checked_likelihood(likelihood or network.likelihood)
    calibration = Calibration(root, network, chosen, likelihood, 1, 0, output or as_tensor, lambda _stage, _left: None)
    averages = calibration.mean_averages()  # before the first epoch, too: wrong batches are refused now, not after it
    if network.share is None:
        network.share = 0.0
        return 0.0
    temperature = best_temperature(averages, calibration.targets)
    learned = -float(scores(averages, calibration.targets, temperature).mean()) < _CHANCE * _entropy(averages, chosen)
    network.share = min(1.0, max(0.0, _STEEPNESS * (temperature - 1))) if learned else 0.0
    return network.share


def _entropy(averages: list[Average], held_out: HeldOut) -> float:
    """The NLL of the frequencies of the classes; infinite for what are no classes."""
    if averages[0].kind != "classes":
        return math.inf
    labels = torch.cat([targets.flatten() for targets in held_out.targets])
    frequencies = labels[labels != averages[0].ignored].unique(return_counts=True)[1].double()
    return float(torch.special.entr(frequencies / frequencies.sum()).sum())


def _check_has_mean(network: PatchedNetwork) -> None:
    """Refuse what cannot be trained as one network: members of an ensemble, batch norms with statistics by component."""
    for site in network.sites:
        if is_member(site) or "running_mean" in dict(site.posterior.named_buffers()):
            raise PatchbayesError(
                f'warm_up_: the components of "{site.name}" ({site.method.label}) are trained one by one, as members or with '
                "statistics of their own, and have no mean to train.\n"
                '  do       leave warm_up_ out, or patch with pb.mixed() or a method with statistics="shared".'
            )
