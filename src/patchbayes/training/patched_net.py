"""The network that a run trains: built by name, started by the seed, patched."""

import dataclasses

from torch import nn

from ..nets.named import build_net
from ..patch_report import PatchReport
from ..posteriors import Mixture
from .config import TrainingConfig
from .data_order import PATCHES, stream_seed
from .methods import patch_with_


def patched_net(
    config: TrainingConfig, num_outputs: int, input_shape: tuple[int, ...]
) -> tuple[nn.Module, PatchReport | None]:
    """The network at the start of training, and what was patched (None for vanilla)."""
    network = build_net(config.model, num_outputs, input_shape, config.seed)
    method = config.build_method()
    if method is None:
        return network, None
    if config.jitter_warmup and isinstance(method, Mixture):
        method = dataclasses.replace(method, jitter=0.0)
    report = patch_with_(
        network,
        method,
        config.chosen_sites,
        precision=1.0 if config.prior_precision is None else config.prior_precision,
        seed=stream_seed(config.seed, PATCHES),
        input_shape=input_shape,
    )
    return network, report
