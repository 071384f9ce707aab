"""Normalizing flows over a vector: affine coupling layers (Dinh et al., 2017), started as the identity."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..draws.randomness import normal_like
from ..errors import NotASite, PatchbayesError

_PAIRS = 32  # of opposite noise, in the mean of a flow


class CouplingFlow(nn.Module):
    """x -> y by L layers, each of which changes every other number as the rest says: D numbers, `hidden` units a layer.

        y = m x + (1 - m) (x exp(s) + t),   s = tanh(...), t of a perceptron of m x;   log|dy/dx| = sum (1 - m) s

    m alternates between even and odd places. The last layer of each perceptron starts at zero, so that y = x.
    """

    keep: Tensor

    def __init__(self, size: int, layers: int, hidden: int, like: Tensor) -> None:
        super().__init__()
        like = like.detach()
        self.size = size
        self.enter = nn.Parameter(like.new_zeros(layers, hidden, size))
        self.enter_bias = nn.Parameter(like.new_zeros(layers, hidden))
        self.leave = nn.Parameter(like.new_zeros(layers, 2 * size, hidden))
        self.leave_bias = nn.Parameter(like.new_zeros(layers, 2 * size))
        keep = (torch.arange(size).unsqueeze(0) + torch.arange(layers).unsqueeze(1)) % 2 == 0
        self.register_buffer("keep", keep.to(like), persistent=False)

    @torch.no_grad()
    def start_(self, generator: torch.Generator) -> None:
        """The identity, with perceptrons that can learn to be another."""
        noise = torch.randn(self.enter.shape, generator=generator) / math.sqrt(self.size)
        self.enter.copy_(noise.to(self.enter))
        for parameter in (self.enter_bias, self.leave, self.leave_bias):
            parameter.zero_()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x (..., D) gives y (..., D) and the logarithm of the determinant, (...)."""
        log_determinant = x.new_zeros(x.shape[:-1])
        for layer, keep in enumerate(self.keep):
            scale, shift = self._scale_and_shift(layer, keep * x)
            log_scale = (1 - keep) * scale
            x = x * log_scale.exp() + (1 - keep) * shift
            log_determinant = log_determinant + log_scale.sum(-1)
        return x, log_determinant

    def inverse(self, y: Tensor) -> Tensor:
        """The x that `forward` takes to y, (..., D)."""
        for layer in reversed(range(len(self.keep))):
            keep = self.keep[layer]
            scale, shift = self._scale_and_shift(layer, keep * y)
            y = (y - (1 - keep) * shift) * (-(1 - keep) * scale).exp()
        return y

    def _scale_and_shift(self, layer: int, kept: Tensor) -> tuple[Tensor, Tensor]:
        hidden = F.linear(kept, self.enter[layer], self.enter_bias[layer]).tanh()
        scale, shift = F.linear(hidden, self.leave[layer], self.leave_bias[layer]).chunk(2, dim=-1)
        return scale.tanh(), shift


class FlowLaw(nn.Module):
    """The law of a vector of D numbers: Gaussian noise with learned deviations around a center, sent through a flow.

        v = shift + stretch T(center + s eps)
        log q(v) = -|eps|^2 / 2 - sum log s - log|dT| - D log stretch - D/2 log(2 pi)

    shift and stretch are not learned: `scale_` sets them.
    """

    shift: Tensor
    stretch: Tensor

    def __init__(self, size: int, layers: int, hidden: int, like: Tensor) -> None:
        super().__init__()
        like = like.detach()
        self.flow = CouplingFlow(size, layers, hidden, like)
        self.before_softplus = nn.Parameter(like.new_zeros(size))
        self.register_buffer("shift", like.new_zeros(size))
        self.register_buffer("stretch", like.new_ones(()))

    @torch.no_grad()
    def start_(self, deviation: Tensor, generator: torch.Generator) -> None:
        """The identity, with Gaussian noise of the given deviations, (D,)."""
        self.flow.start_(generator)
        self.before_softplus.copy_(deviation + (-torch.expm1(-deviation)).log())
        self.shift.zero_()
        self.stretch.fill_(1.0)

    def forward(self, center: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """v (..., D) and the expected part of log q(v) + D/2 log(2 pi), (...): -D/2 in place of -|eps|^2 / 2, its mean."""
        deviation = F.softplus(self.before_softplus)
        value, log_determinant = self.flow(torch.addcmul(center, deviation, noise))
        size = self.before_softplus.numel()
        log_q = -0.5 * size - deviation.log().sum() - log_determinant - size * self.stretch.log()
        return self.shift + self.stretch * value, log_q

    def at_center(self, center: Tensor) -> Tensor:
        """v without noise, (D,)."""
        return self.shift + self.stretch * self.flow(center)[0]

    def mean(self, center: Tensor) -> Tensor:
        """The expectation of v, (D,), over fixed noise: 32 points and their opposites."""
        half = normal_like(center.detach().expand(_PAIRS, -1), torch.tensor(0))
        value, _ = self(center, torch.cat([half, -half]))
        offset: Tensor = (value - value[:1]).mean(0)
        return value[0] + offset

    @torch.no_grad()
    def scale_(self, center: Tensor, factor: float) -> None:
        """Multiply all deviations from the mean by `factor`."""
        mean = self.mean(center)
        self.shift.copy_(mean * (1 - factor) + factor * self.shift)
        self.stretch.mul_(factor)


def check_flow(name: str, layers: int, hidden: int, scale: float) -> None:
    """Refuse sizes that no flow can have."""
    for field, number in (("layers", layers), ("hidden", hidden)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise PatchbayesError(f"{name}({field}={number!r}): expected an integer of at least 1.")
    if not (isinstance(scale, int | float) and math.isfinite(scale) and scale > 0):
        raise PatchbayesError(f"{name}(scale={scale!r}): expected a finite deviation above 0.")


def check_vector(size: int) -> None:
    """Refuse a layer whose vector has no two halves."""
    if size < 2:
        raise NotASite(f"a flow needs a vector of at least two numbers, and this one has {size}")
