"""What becomes of the gradients between the backward pass and the optimizer's step."""

import torch
from torch import nn

from ..patching import patched_sites


@torch.no_grad()
def share_gradients_(network: nn.Module, share: float) -> None:
    """Let the components that were not drawn learn from those that were.

    The gradients g_1 ... g_K of a layer's components become (1 - share) g_k + share (g_1 + ... + g_K). The sum is the
    gradient with respect to what was drawn, so that 0 changes nothing and at 1 all components move alike, as one network
    would. In between, the gradient is multiplied by a positive definite matrix: steps are others, and where they end, where
    the expected gradient is zero, is the same.
    """
    for site in patched_sites(network).values():
        for name in site.posterior.names:
            gradient = site.components(name).grad
            if gradient is not None:
                gradient.lerp_(gradient.sum(0).expand_as(gradient), share)


def hold_still_(optimizer: torch.optim.Optimizer, epochs: float, step: int, steps_per_epoch: int) -> None:
    """In step 0, 1, ... of the run, let only those learn whose turn it is (coordinate descent, appendix C.2).

    Turns last `epochs` each; shared parameters have the first, patched ones the second, and so on. Without a gradient a
    parameter rests: it is not decayed, and what the optimizer knows of it stays as it is.
    """
    turn = step // max(1, round(epochs * steps_per_epoch))
    resting = ("patched", "shared")[turn % 2]
    for group in optimizer.param_groups:
        if group["name"].startswith(resting):
            for parameter in group["params"]:
                parameter.grad = None
