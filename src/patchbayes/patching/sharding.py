"""What several devices cannot do with a patched network, refused with the reason."""

from typing import Any, NoReturn

from torch import nn

from ..errors import PatchbayesError
from .network import PatchedNetwork


def refuse_sharded(network: PatchedNetwork, what: str) -> None:
    """Refuse to read components that FSDP has cut into pieces: the K components of a vector are stored as one, and a piece of
    it is no component."""
    for site in network.sites:
        held = list(site.parameters().values())
        managed = site.module.__dict__.get("_is_fsdp_managed_module", False)
        if any(hasattr(parameter, "_fsdp_flattened") for parameter in held) or (managed and not held):
            raise PatchbayesError(
                f"{what}: FullyShardedDataParallel cuts parameters into flat pieces, and a piece of K components is no "
                "component.\n  do       fully_shard(model) as a whole (FSDP2), or DistributedDataParallel."
            )
        if any(hasattr(parameter, "device_mesh") for parameter in held):  # fully_shard
            raise PatchbayesError(
                f'{what}: the components of "{site.name}" are cut into pieces (fully_shard), and a piece is no component.\n'
                "  do       fully_shard(model) as a whole, not layer by layer, and read the network between forward and "
                "backward;\n           or DistributedDataParallel: patches are small, and with resting shared parameters "
                "they alone are exchanged."
            )


def refuse_replicas(_self: nn.Module, *_: Any) -> NoReturn:
    """In place of `_replicate_for_data_parallel`."""
    raise PatchbayesError(
        "nn.DataParallel copies a network into threads in every forward pass; the copies of a patched one would read the draw "
        "and the components of the original, and components that were not drawn would lose their gradients.\n"
        "  do       DistributedDataParallel, one process for each device: torchrun --nproc-per-node N ..."
    )
