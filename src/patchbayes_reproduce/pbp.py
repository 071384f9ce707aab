"""Probabilistic backpropagation (Hernandez-Lobato and Adams, 2015; table 1): the rival by moment matching.

A perceptron with ReLU units whose weights are independent Gaussians N(m, v). One example at a time, the moments of all
activations are passed forward, and the weights take the moments of their posterior given that example:

    m <- m + v dlogZ/dm,    v <- v - v^2 ((dlogZ/dm)^2 - 2 dlogZ/dv),    Z = N(y; m_out, v_out + noise)

with Gamma laws on the precisions of noise and prior, and a pass of expectation propagation over the prior's factors after
each epoch. All splits of a set are learned together: they do not touch each other. The slopes are written out, since one
example at a time is too little for autograd.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .regression_splits import StackedSplits

EPOCHS = 40
_SHAPE = _RATE = 6.0  # of the Gamma laws: three observations of variance one


@dataclass
class Weights:
    """Means and variances of a layer's weights for R splits, (R, outputs, inputs + 1): the last input is the constant."""

    mean: Tensor
    variance: Tensor


class PBP:
    """Networks with one hidden layer for R splits, trained in double precision.

    noise_shape, noise_rate (R,): of the Gamma law of the noise's precision. The prior's are those of one layer and split.
    """

    def __init__(self, splits: int, inputs: int, hidden: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        start = _RATE / (_SHAPE - 1)
        self.generator = generator
        self.layers = []
        for out, into in ((hidden, inputs + 1), (1, hidden + 1)):
            noise = torch.randn(splits, out, into, generator=generator, dtype=torch.float64)
            mean = noise / math.sqrt(into)
            self.layers.append(Weights(mean, torch.full_like(mean, start)))
        self.noise_shape = torch.full((splits,), _SHAPE, dtype=torch.float64)
        self.noise_rate = torch.full((splits,), _RATE, dtype=torch.float64)
        self.prior = _PriorFactors(self.layers, splits, start)

    def fit_(self, inputs: Tensor, targets: Tensor, epochs: int = EPOCHS) -> None:
        """inputs (R, N, F) and targets (R, N), standardized."""
        inputs, targets = inputs.double(), targets.double()
        splits, number, _ = inputs.shape
        rows = torch.arange(splits)
        for _ in range(epochs):
            order = torch.stack([torch.randperm(number, generator=self.generator) for _ in range(splits)])
            for place in order.T:
                self._learn_(inputs[rows, place], targets[rows, place])
            self.prior.refine_(self.layers)

    def predict(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of the targets, noise included, (R, B) each; inputs (R, B, F)."""
        with torch.no_grad():
            mean, variance = moments(self.layers, inputs.double().movedim(1, 0))
        noise = self.noise_rate / (self.noise_shape - 1)
        return mean.T, (variance + noise).T

    @torch.no_grad()
    def _learn_(self, x: Tensor, y: Tensor) -> None:
        """One example of each split: x (R, F), y (R,)."""
        first, second = self.layers
        a, b = self.noise_shape, self.noise_rate
        x = _with_constant(x).unsqueeze(-1)
        hidden = _first(first, x)
        mean, variance = _second(second, hidden)
        error = y - mean
        noisy = variance + b / (a - 1)
        by_mean = error / noisy
        slopes = _slopes(second, x, hidden, by_mean, 0.5 * (by_mean.square() - 1 / noisy))
        for layer, (to_mean, to_variance) in zip(self.layers, slopes, strict=True):
            m = torch.addcmul(layer.mean, layer.variance, to_mean)
            change = torch.addcmul(2 * to_variance, to_mean, to_mean, value=-1)
            v = torch.addcmul(layer.variance, layer.variance.square(), change)
            fine = (v > 1e-100) & (v + m.abs() < torch.inf)
            layer.mean = torch.where(fine, m, layer.mean)
            layer.variance = torch.where(fine, v, layer.variance)
        z, z_1, z_2 = (log_evidence(error, total) for total in (noisy, variance + b / a, variance + b / (a + 1)))
        self.noise_shape, self.noise_rate = _gamma(z, z_1, z_2, a, b)


@dataclass
class Hidden:
    """Units after a ReLU, (..., R, H, 1): mean and variance, the probability that one is on, and its density at zero."""

    on: Tensor
    density: Tensor
    mean: Tensor
    variance: Tensor


def moments(layers: Sequence[Weights], x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of the output, (..., R), for inputs (..., R, F): Gaussian before the ReLU, independent units."""
    first, second = layers
    return _second(second, _first(first, _with_constant(x).unsqueeze(-1)))


def _first(layer: Weights, x: Tensor) -> Hidden:
    """The hidden units for inputs (..., R, F + 1, 1), which have no variance."""
    size = x.shape[-2]
    mean, variance = (layer.mean @ x) / math.sqrt(size), (layer.variance @ x.square()) / size
    return relu(mean, variance)


def _second(layer: Weights, hidden: Hidden) -> tuple[Tensor, Tensor]:
    """Mean and variance of the output, (..., R); the last weight is that of the constant."""
    size = layer.mean.shape[-1]
    (m, of_constant), (v, its_variance) = (_parts(weights) for weights in (layer.mean, layer.variance))
    mean = (m @ hidden.mean + of_constant) / math.sqrt(size)
    spread = (m.square() + v) @ hidden.variance + v @ hidden.mean.square() + its_variance
    return mean[..., 0, 0], spread[..., 0, 0] / size


def _slopes(
    second: Weights, x: Tensor, hidden: Hidden, by_mean: Tensor, by_variance: Tensor
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Slopes of log Z with respect to both layers' means and variances, from those of the output's mean and variance (R,)."""
    size = second.mean.shape[-1]
    m, v = (_parts(weights)[0].mT for weights in (second.mean, second.variance))
    to_mean, to_variance = by_mean.view(-1, 1, 1) / math.sqrt(size), by_variance.view(-1, 1, 1) / size
    square = hidden.mean.square()
    of_mean = to_mean * hidden.mean + 2 * to_variance * m * hidden.variance
    of_variance = to_variance * (hidden.variance + square)
    last = tuple(torch.cat([some, of], 1).mT for some, of in ((of_mean, to_mean), (of_variance, to_variance)))
    on, density = hidden.on, hidden.density
    after_mean = to_mean * m + 2 * to_variance * v * hidden.mean
    after_variance = to_variance * (m.square() + v)
    before_mean = on * after_mean + 2 * hidden.mean * (1 - on) * after_variance
    before_variance = 0.5 * density * after_mean + (on - hidden.mean * density) * after_variance
    into = x.mT
    size = x.shape[-2]
    return (before_mean @ into / math.sqrt(size), before_variance @ into.square() / size), (last[0], last[1])


def relu(mean: Tensor, variance: Tensor) -> Hidden:
    """Mean and variance of max(0, a), a ~ N(mean, variance)."""
    deviation = variance.sqrt()
    ratio = mean / deviation
    on, density = torch.special.ndtr(ratio), (-0.5 * ratio.square()).exp() / math.sqrt(2 * math.pi)
    out = torch.addcmul(mean * on, deviation, density)
    square = torch.addcmul(variance * on, mean, out)  # E max(0, a)^2
    return Hidden(on, density / deviation, out, torch.addcmul(square, out, out, value=-1).clamp_min(0.0))


def log_evidence(error: Tensor, variance: Tensor) -> Tensor:
    """log N(error; 0, variance) + log(2 pi) / 2."""
    return -0.5 * (variance.log() + error.square() / variance)


def _with_constant(values: Tensor) -> Tensor:
    return torch.nn.functional.pad(values, (0, 1), value=1.0)


def _parts(weights: Tensor) -> tuple[Tensor, Tensor]:
    """The weights of the hidden units and of the constant."""
    return weights[..., :-1], weights[..., -1:]


def _gamma(z: Tensor, z_1: Tensor, z_2: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Shape and rate that match two moments, from log Z at a, a + 1 and a + 2; the old ones where they cannot."""
    shape = 1 / ((z_2 - 2 * z_1 + z).exp() * (a + 1) / a - 1)
    rate = 1 / ((z_2 - z_1).exp() * (a + 1) / b - (z_1 - z).exp() * a / b)
    fine = shape.isfinite() & rate.isfinite() & (shape > 1) & (rate > 0)
    return torch.where(fine, shape, a), torch.where(fine, rate, b)


Array = NDArray[np.float64]


class _PriorFactors:
    """The approximate factors of the prior N(w; 0, 1/lambda) on every weight, and of lambda ~ Gamma, for R splits."""

    def __init__(self, layers: Sequence[Weights], splits: int, variance: float) -> None:
        shapes = [layer.mean.shape for layer in layers]
        self.precision = [np.full(shape, 1 / variance) for shape in shapes]
        self.product = [np.zeros(shape) for shape in shapes]  # of mean and precision
        self.shape = [np.zeros(shape) for shape in shapes]
        self.rate = [np.zeros(shape) for shape in shapes]
        self.a, self.b = np.full(splits, _SHAPE), np.full(splits, _RATE)

    def refine_(self, layers: Sequence[Weights]) -> None:
        """One pass of expectation propagation, weight after weight: all share one lambda."""
        for number, layer in enumerate(layers):
            mean, variance = layer.mean.detach().numpy().copy(), layer.variance.detach().numpy().copy()
            for i in range(mean.shape[1]):
                for j in range(mean.shape[2]):
                    self._refine_one(number, i, j, mean, variance)
            layer.mean, layer.variance = torch.from_numpy(mean), torch.from_numpy(variance)

    def _refine_one(self, number: int, i: int, j: int, mean: Array, variance: Array) -> None:
        at = np.s_[:, i, j]
        precision, product = self.precision[number], self.product[number]
        shape, rate = self.shape[number], self.rate[number]
        cavity_precision = 1 / variance[at] - precision[at]
        cavity_product = mean[at] / variance[at] - product[at]
        a, b = self.a - shape[at], self.b - rate[at]
        with np.errstate(all="ignore"):
            v, m = 1 / cavity_precision, cavity_product / cavity_precision
            fine = (v > 0) & (v < 1e6) & (b > 0) & (a > 1)
            total = v + b / (a - 1)
            z, z_1, z_2 = (-0.5 * (np.log(t) + m**2 / t) for t in (total, v + b / a, v + b / (a + 1)))
            slope, by_variance = -m / total, -0.5 / total + 0.5 * m**2 / total**2
            new_m = m + v * slope
            new_v = v - v**2 * (slope**2 - 2 * by_variance)
            new_a = 1 / (np.exp(z_2 - 2 * z_1 + z) * (a + 1) / a - 1)
            new_b = 1 / (np.exp(z_2 - z_1) * (a + 1) / b - np.exp(z_1 - z) * a / b)
            fine &= np.isfinite(new_m) & np.isfinite(new_v) & (new_v > 0) & np.isfinite(new_a) & np.isfinite(new_b)
            fine &= (new_a > 0) & (new_b > 0)
            updates = (
                (precision, 1 / new_v - cavity_precision),
                (product, new_m / new_v - cavity_product),
                (shape, new_a - a),
                (rate, new_b - b),
                (mean, new_m),
                (variance, new_v),
            )
            for array, value in updates:
                array[at] = np.where(fine, value, array[at])
        self.a, self.b = np.where(fine, new_a, self.a), np.where(fine, new_b, self.b)


def rmse_on_test(stack: StackedSplits, hidden: int, epochs: int = EPOCHS, seed: int = 0) -> Tensor:
    """The root mean squared error on the test part of every split, (R,), in the target's own unit (the first target)."""
    network = PBP(len(stack.numbers), stack.train_inputs.shape[-1], hidden, seed)
    network.fit_(stack.train_inputs, stack.train_targets[..., 0], epochs)
    mean, _ = network.predict(stack.test_inputs)
    errors = mean - stack.test_targets[..., 0].double()
    return errors.square().mean(1).sqrt() * stack.unit[:, 0].double()
