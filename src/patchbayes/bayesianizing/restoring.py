"""What fitting may change in a patched network, kept so that it can be put back."""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from ..likelihoods import Categorical
from ..patching.network import PatchedNetwork, root_of
from ..patching.patch import is_patched
from ..patching.roots import install_root_, remove_root_
from ..prior import Prior


def contents(network: PatchedNetwork) -> list[tuple[Tensor, Tensor]]:
    """Everything that fitting may change, with a copy of it."""
    held: list[Tensor] = [p for site in network.sites for p in site.parameters().values()]
    return [(tensor, tensor.detach().clone()) for tensor in [*held, *network.likelihood.buffers()]]


@torch.no_grad()
def put_back(held: Sequence[tuple[Tensor, Tensor]]) -> None:
    for tensor, value in held:
        tensor.copy_(value)


@contextlib.contextmanager
def restored_on_error(network: PatchedNetwork) -> Iterator[None]:
    """If the block fails, what the posteriors hold, the likelihood and what is known of its fit are as they were."""
    held, likelihood, calibration = contents(network), network.likelihood, network.calibration
    try:
        yield
    except BaseException:
        put_back(held)
        network.likelihood, network.calibration = likelihood, calibration
        raise


@contextlib.contextmanager
def with_record(model: nn.Module) -> Iterator[tuple[nn.Module, PatchedNetwork]]:
    """The root of the patched network and its record; a network without patches gets a record that holds its likelihood."""
    if is_patched(model):
        yield root_of(model)
        return
    network = PatchedNetwork(0, Prior(), Categorical())
    install_root_(model, network)
    try:
        yield model, network
    except BaseException:
        remove_root_(model)
        raise
