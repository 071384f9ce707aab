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
        steps = _forward(self.layers, x)
        mean, variance = steps[-1].mean.squeeze(-1), steps[-1].variance.squeeze(-1)
        a, b = self.noise_shape, self.noise_rate
        error = y - mean
        z, z_1, z_2 = (log_evidence(error, variance + noise) for noise in (b / (a - 1), b / a, b / (a + 1)))
        total = variance + b / (a - 1)
        by_mean = error / total
        for layer, slopes in zip(self.layers, _slopes(self.layers, x, steps, by_mean, total), strict=True):
            m = torch.addcmul(layer.mean, layer.variance, slopes.mean)
            change = torch.addcmul(2 * slopes.variance, slopes.mean, slopes.mean, value=-1)
            v = torch.addcmul(layer.variance, layer.variance.square(), change)
            fine = (v > 1e-100) & m.isfinite() & v.isfinite()
            layer.mean = torch.where(fine, m, layer.mean)
            layer.variance = torch.where(fine, v, layer.variance)
        self.noise_shape, self.noise_rate = _gamma(z, z_1, z_2, a, b)


@dataclass
class _Step:
    """What a layer gave, before its ReLU and after it (the last has none), for the way back: (..., R, units) each."""

    into_mean: Tensor
    into_variance: Tensor
    mean: Tensor
    variance: Tensor


def moments(layers: Sequence[Weights], x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of the output, (..., R), for inputs (..., R, F): Gaussian before every ReLU, independent units."""
    last = _forward(layers, x)[-1]
    return last.mean.squeeze(-1), last.variance.squeeze(-1)


def _forward(layers: Sequence[Weights], x: Tensor) -> list[_Step]:
    mean, variance = x, torch.zeros_like(x)
    steps = []
    for number, layer in enumerate(layers):
        mean, variance = _with_constant(mean, 1.0), _with_constant(variance, 0.0)
        size = layer.mean.shape[-1]
        m, v = layer.mean, layer.variance
        into_mean = (m @ mean.unsqueeze(-1)).squeeze(-1) / math.sqrt(size)
        spread = m.square() @ variance.unsqueeze(-1) + v @ (variance + mean.square()).unsqueeze(-1)
        into_variance = spread.squeeze(-1) / size
        last = number == len(layers) - 1
        mean, variance = (into_mean, into_variance) if last else relu_moments(into_mean, into_variance)
        steps.append(_Step(into_mean, into_variance, mean, variance))
    return steps


def _slopes(layers: Sequence[Weights], x: Tensor, steps: list[_Step], by_mean: Tensor, total: Tensor) -> list[Weights]:
    """Slopes of log Z with respect to every layer's means and variances, from d log Z / d m_out (R,) and v_out + noise."""
    found: list[Weights] = []
    to_mean = by_mean.unsqueeze(-1)
    to_variance = 0.5 * (by_mean.square() - 1 / total).unsqueeze(-1)
    for number in reversed(range(len(layers))):
        layer, into = layers[number], steps[number - 1] if number else _Step(x, x, x, torch.zeros_like(x))
        mean, variance = _with_constant(into.mean, 1.0), _with_constant(into.variance, 0.0)
        size = layer.mean.shape[-1]
        to_mean, to_variance = to_mean / math.sqrt(size), to_variance / size
        column = to_variance.unsqueeze(-1)
        slope = to_mean.unsqueeze(-1) * mean.unsqueeze(-2) + 2 * layer.mean * (column * variance.unsqueeze(-2))
        found.insert(0, Weights(slope, column * (variance + mean.square()).unsqueeze(-2)))
        if number == 0:
            break
        by_v = (to_variance.unsqueeze(-2) @ layer.variance).squeeze(-2)
        by_m = (to_mean.unsqueeze(-2) @ layer.mean).squeeze(-2) + 2 * mean * by_v
        by_v = by_v + (to_variance.unsqueeze(-2) @ layer.mean.square()).squeeze(-2)
        to_mean, to_variance = _relu_slopes(into, by_m[..., :-1], by_v[..., :-1])
    return found


def _relu_slopes(step: _Step, by_mean: Tensor, by_variance: Tensor) -> tuple[Tensor, Tensor]:
    """Slopes before a ReLU from those after it: d mean = Phi dm + phi / (2 s) dv, d variance = 2 mean (1 - Phi) dm + ..."""
    deviation = step.into_variance.sqrt()
    ratio = step.into_mean / deviation
    on = torch.special.ndtr(ratio)
    density = (-0.5 * ratio.square()).exp() / (math.sqrt(2 * math.pi) * deviation)
    to_mean = on * by_mean + 2 * step.mean * torch.special.ndtr(-ratio) * by_variance
    return to_mean, 0.5 * density * by_mean + (on - step.mean * density) * by_variance


def relu_moments(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of max(0, a), a ~ N(mean, variance)."""
    deviation = variance.sqrt()
    ratio = mean / deviation
    above, below = torch.special.ndtr(ratio), torch.special.ndtr(-ratio)
    # the mean of N(0, 1) above -ratio, by its series far in the tail
    far = ratio < -30
    safe = torch.where(far, -30.0, ratio)
    hazard = (-0.5 * safe.square() - 0.5 * math.log(2 * math.pi) - torch.special.log_ndtr(safe)).exp()
    tail = torch.where(far, ratio, -30.0)
    hazard = torch.where(far, -tail - 1 / tail + 2 / tail**3, hazard)
    if_on = mean + deviation * hazard
    out = above * if_on
    return out, out * if_on * below + above * variance * (1 - hazard * (hazard + ratio))


def log_evidence(error: Tensor, variance: Tensor) -> Tensor:
    """log N(error; 0, variance) + log(2 pi) / 2."""
    return -0.5 * (variance.log() + error.square() / variance)


def _with_constant(values: Tensor, constant: float) -> Tensor:
    return torch.nn.functional.pad(values, (0, 1), value=constant)


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
