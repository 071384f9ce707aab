"""What fitting may change in a patched network, kept so that it can be put back."""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..patching.network import PatchedNetwork


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
    """If the block fails, what the posteriors hold and the likelihood are as they were."""
    held, likelihood = contents(network), network.likelihood
    try:
        yield
    except BaseException:
        put_back(held)
        network.likelihood = likelihood
        raise
