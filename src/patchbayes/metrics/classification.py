"""Accuracy, likelihood and squared error of class probabilities; of each example, and on average."""

import torch
from torch import Tensor

from ..errors import PatchbayesError
from .checks import check_examples, checked_log_probs, checked_probs


def accuracy(probs: Tensor, targets: Tensor, top: int = 1) -> float:
    """The share of examples whose class is among the `top` most probable. probs (B, C), targets (B,)."""
    check_examples("accuracy", targets)
    return float(correct(probs, targets, top).double().mean())


def nll(log_probs: Tensor, targets: Tensor) -> float:
    """Mean negative log-likelihood per example, in nats. log_probs (B, C), targets (B,)."""
    check_examples("nll", targets)
    return float(nll_per_example(log_probs, targets).mean())


def brier(probs: Tensor, targets: Tensor) -> float:
    """Mean squared distance to the one-hot target, summed over classes: between 0 and 2. probs (B, C), targets (B,)."""
    check_examples("brier", targets)
    return float(brier_per_example(probs, targets).mean())


def correct(probs: Tensor, targets: Tensor, top: int = 1) -> Tensor:
    """Whether the class is among the `top` most probable, (B,) bool. probs (B, C), targets (B,)."""
    probs, targets = checked_probs("accuracy", probs, targets)
    if not 1 <= top <= probs.shape[1]:
        raise PatchbayesError(f"accuracy(top={top}): between 1 and the number of classes, {probs.shape[1]}.")
    # Of several largest probabilities, argmax takes the class that the calibration errors take.
    chosen = probs.argmax(1, keepdim=True) if top == 1 else probs.topk(top, dim=1).indices
    return (chosen == targets.unsqueeze(1)).any(1)


def nll_per_example(log_probs: Tensor, targets: Tensor) -> Tensor:
    """-log p(y | x), (B,) float64. log_probs (B, C), targets (B,)."""
    log_probs, targets = checked_log_probs("nll", log_probs, targets)
    return -log_probs.gather(1, targets.unsqueeze(1)).squeeze(1)


def brier_per_example(probs: Tensor, targets: Tensor) -> Tensor:
    """Squared distance to the one-hot target, summed over classes, (B,) float64. probs (B, C), targets (B,)."""
    probs, targets = checked_probs("brier", probs, targets)
    return (probs - torch.nn.functional.one_hot(targets, probs.shape[1])).square().sum(1)
