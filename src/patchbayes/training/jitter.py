"""A jitter that grows: components start as copies and are moved apart over the first epochs."""

import torch
from torch import nn

from ..patching import patched_sites
from ..posteriors import Mixture
from ..posteriors.posterior import root_mean_square
from .config import TrainingConfig
from .data_order import JITTER, stream


@torch.no_grad()
def grow_jitter_(network: nn.Module, config: TrainingConfig, step: int, steps_per_epoch: int) -> None:
    """Before step 0, 1, ... of the run: move every component but the first by its share of the jitter.

    After the warm-up each has been moved by jitter * rms * N(0, 1), along one direction, where rms is the root mean square
    of component 0 at the time of the move.
    """
    growing = round(config.jitter_warmup * steps_per_epoch)
    if step >= growing:
        return
    for number, site in enumerate(patched_sites(network).values()):
        assert isinstance(site.method, Mixture)
        jitter = Mixture().jitter if config.jitter is None else config.jitter
        first = {name: site.components(name)[0] for name in site.posterior.names}
        generator = stream(config.seed, JITTER, number)
        for name in site.posterior.names:
            others = site.components(name)[1:]
            size = jitter / growing * root_mean_square(name, first)
            others += size * torch.randn(others.shape, generator=generator).to(others)
