"""What log-probabilities are worth: NLL, ECE beside its floor, accuracy, and the paired gain on a rival."""

import math

import torch
from torch import Tensor

from patchbayes import metrics


def row(log_probs: Tensor, targets: Tensor) -> dict[str, float]:
    probs = log_probs.exp().double()
    probs = probs / probs.sum(1, keepdim=True)
    return {
        "nll": metrics.nll(log_probs, targets),
        "ece": metrics.expected_calibration_error(probs, targets),
        "ece_floor": metrics.calibration_floor(probs).mean,
        "accuracy": metrics.accuracy(probs, targets),
    }


def paired(log_probs: Tensor, rival: Tensor, targets: Tensor) -> dict[str, float]:
    """By how much the NLL is below a rival's, and the standard error of that over the images."""
    gain = (log_probs - rival)[torch.arange(len(targets)), targets].double()
    return {"gain": float(gain.mean()), "gain_error": float(gain.std() / math.sqrt(len(gain)))}
