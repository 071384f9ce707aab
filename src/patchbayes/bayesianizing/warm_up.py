"""warm_up_: no noise in training until held-out data show that the network is overconfident."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import PatchbayesError
from ..likelihoods import Likelihood, checked_likelihood
from ..patching.network import PatchedNetwork, root_of
from ..prediction.batches import as_tensor
from .calibrate import BATCH, Calibration
from .held_out import HeldOut, Select, select_for
from .score import best_temperature
from .spread import is_member

_EXAMPLES = 1500


def warm_up_(
    model: nn.Module,
    held_out: Iterable[Any],
    *,
    likelihood: Likelihood | None = None,
    select: Select | None = None,
    output: Callable[[Any], Tensor] | None = None,
) -> bool:
    """Train without draws while the network is not overconfident, and with them while it is: call it before every epoch.

    Noise helps a network that fits its training data and is overconfident, and harms one that still learns. So from the first
    call on, training mode computes with the mean network, as if there were no patches: the components move together, and their
    distances stay as they are. Every later call finds the best temperature of the mean network on held-out data, in one pass.
    Above 1 the network is overconfident, and the next epoch draws; else it does not. Returns whether it will draw.

    It is the rule of `patchbayes train --noise auto` within one training. Called once, before all epochs, it would never let
    the network draw. `forward_draws` and `use_draw`, which are asked for draws, make them all the same.

    held_out, likelihood, select, output   as in `calibrate_`; at most 1,500 examples are used.
    """
    root, network = root_of(model)
    _check_has_mean(network)
    if network.warming is None:
        network.warming = True
        return False
    chosen = HeldOut.read(held_out, _EXAMPLES, BATCH, torch.Generator().manual_seed(0), select or select_for(model))
    likelihood = checked_likelihood(likelihood or network.likelihood)
    calibration = Calibration(root, network, chosen, likelihood, 1, 0, output or as_tensor, lambda _stage, _left: None)
    network.warming = best_temperature(calibration.mean_averages(), calibration.targets) <= 1
    return not network.warming


def _check_has_mean(network: PatchedNetwork) -> None:
    """Refuse what cannot be trained as one network: members of an ensemble, batch norms with statistics by component."""
    for site in network.sites:
        if is_member(site) or "running_mean" in dict(site.posterior.named_buffers()):
            raise PatchbayesError(
                f'warm_up_: the components of "{site.name}" ({site.method.label}) are trained one by one, as members or with '
                "statistics of their own, and have no mean to train.\n"
                '  do       leave warm_up_ out, or patch with pb.mixed() or a method with statistics="shared".'
            )
