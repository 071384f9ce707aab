"""The network of the tests of KL and losses, in double precision, and its stored values as NumPy arrays."""

import numpy as np
import torch
from torch import nn

from stored import mean_field, stored_values


def network() -> nn.Sequential:
    """In double precision, with no parameter at zero."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model


def stored_gaussian(model: nn.Module, site: str, name: str) -> np.ndarray:
    """The mean and the deviation before softplus of a mean-field parameter, (2, *shape)."""
    return np.stack([part.numpy() for part in mean_field(model, site, name)])


def uniform(number: int) -> np.ndarray:
    return np.full(number, 1 / number)


def normal_prior(precision: float) -> torch.distributions.Normal:
    return torch.distributions.Normal(torch.zeros((), dtype=torch.float64), precision**-0.5)


ONE = np.ones(1)


TAU, RHO, SIGMA = 1.7, 0.6, 0.3


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.decoder = nn.Linear(3, 5)
        self.decoder.weight = self.embedding.weight

    def forward(self, tokens):
        return self.decoder(self.embedding(tokens))


def flat(model, site, name):
    values = stored_values(model, site, name)
    return values.reshape(len(values), -1)
