"""A small classifier with labels from known probabilities, in batches, and its loss."""

import torch
from torch import nn

import patchbayes as pb


def classifier(seed: int = 0, width: int = 32, scale: float = 1.0) -> nn.Sequential:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4)).eval()
    with torch.no_grad():
        net[4].weight.mul_(5 * scale)
        net[4].bias.mul_(5 * scale)
    return net


def labels_from(probs: torch.Tensor, seed: int = 1) -> torch.Tensor:
    return torch.multinomial(probs, 1, generator=torch.Generator().manual_seed(seed)).squeeze(1)


def inputs(number: int, seed: int = 2) -> torch.Tensor:
    return torch.randn(number, 6, generator=torch.Generator().manual_seed(seed))


def batches(x: torch.Tensor, y: torch.Tensor, size: int = 50) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(x.split(size), y.split(size), strict=True))


@torch.no_grad()
def nll(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    log_probs = pb.predict(model, x).log_probs
    return -float(log_probs[torch.arange(len(y)), y].mean())
