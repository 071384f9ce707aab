"""Shared and patched parameters that learn in turns."""

import torch


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
