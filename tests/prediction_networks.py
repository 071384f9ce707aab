"""A small classifier, patched in many ways, and its predictions by other means: plain forwards, and NumPy."""

from collections import OrderedDict

import numpy as np
import scipy.special
import scipy.stats
import torch
from torch import nn

import patchbayes as pb

# Two-sided normal quantile at a false alarm of 1e-6 (4.89), with room for the approximation.
Z_LIMIT = 5.3


def classifier(seed=0):
    torch.manual_seed(seed)
    layers = OrderedDict(
        hidden=nn.Linear(4, 6), norm=nn.BatchNorm1d(6), relu=nn.ReLU(), middle=nn.LayerNorm(6), fc=nn.Linear(6, 3)
    )
    model = nn.Sequential(layers).double()
    model.norm.running_mean.normal_()
    model.norm.running_var.uniform_(0.5, 2)
    return model


def patched(method, sites="norm+output", seed=0):
    model = classifier(seed)
    pb.patch_(model, method, sites)
    return model


def some_inputs(rows=7, seed=3):
    return torch.randn(rows, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def softmax(logits):
    return scipy.special.softmax(np.asarray(logits), axis=-1)


@torch.no_grad()
def explicit_probs(model, inputs, draws):
    """(S, B, C), a plain evaluation forward for each draw."""
    was_training = model.training
    model.eval()
    outputs = []
    for i in range(len(draws)):
        with pb.use_draw(model, draws[i]):
            outputs.append(model(inputs).numpy())
    model.train(was_training)
    return softmax(np.stack(outputs))


def numpy_probs(model, inputs, draws):
    """(S, B, C) from the realized weights, by a forward pass written in NumPy."""
    drawn = {name: site.realize(draws) for name, site in pb.patched_sites(model).items()}
    weights = {name: {k: v.detach().numpy() for k, v in values.items()} for name, values in drawn.items()}
    mean, var = model.norm.running_mean.numpy(), model.norm.running_var.numpy()
    first_weight, first_bias = model.hidden.weight.detach().numpy(), model.hidden.bias.detach().numpy()
    outputs = []
    for s in range(len(draws)):
        h = inputs.numpy() @ first_weight.T + first_bias
        h = (h - mean) / np.sqrt(var + 1e-5) * weights["norm"]["weight"][s] + weights["norm"]["bias"][s]
        h = np.maximum(h, 0)
        h = (h - h.mean(1, keepdims=True)) / np.sqrt(h.var(1, keepdims=True) + 1e-5)
        h = h * weights["middle"]["weight"][s] + weights["middle"]["bias"][s]
        outputs.append(h @ weights["fc"]["weight"][s].T + weights["fc"]["bias"][s])
    return softmax(np.stack(outputs))


METHODS = {
    "EMP": pb.EMP(3, jitter=0.5),
    "ECMP": pb.ECMP(3, jitter=0.5),
    "noisy": pb.EMP(2, jitter=0.5, sigma=0.2),
    "skewed": pb.EMP(3, jitter=0.5, probabilities=(0.6, 0.3, 0.1)),
    "Ensemble": pb.Ensemble(3, init="copies", jitter=0.5, statistics="shared"),
    "MeanField": pb.posteriors.MeanField(scale=0.5),
}
