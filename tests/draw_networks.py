"""Networks of linear layers, each patched with a method of its own, for the tests of draws."""

import torch
from torch import nn

import patchbayes as pb


def network(*methods: pb.posteriors.Mixture, features: int = 2) -> nn.Sequential:
    """One linear layer for each method, patched with it."""
    model = nn.Sequential(*(nn.Linear(features, features) for _ in methods))
    pb.patch_(model, {str(number): method for number, method in enumerate(methods)})
    return model


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def counts(indices: torch.Tensor, outcomes: int) -> list[int]:
    return torch.bincount(indices.flatten(), minlength=outcomes).tolist()


MIXED = (pb.EMP(3), pb.ECMP(2), pb.EMP(7), pb.posteriors.Mixture(components=1, tie="unit", zero=True))
