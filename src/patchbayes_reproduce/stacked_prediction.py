"""Prediction by stacked networks: all draws of one network in a few matrix products, scored as they come.

Axes: S draws, F inputs, H hidden units, D targets, B examples.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from patchbayes.errors import PatchbayesError

from .stacked_training import EPS, StackedNetworks, dropped_positions

CHUNK = 2**18  # hidden activations computed at once: they stay in the cache


@dataclass(frozen=True)
class DrawnNetworks:
    """S draws of one network in evaluation mode, batch norms and dropout's scaling folded into the two linear maps.

        f_s(x) = output_s relu(hidden_s x + hidden_shift_s) + output_shift_s

    hidden (S, H, F), hidden_shift (S, H, 1), output (S, D, H), output_shift (S, D, 1).
    """

    hidden: Tensor
    hidden_shift: Tensor
    output: Tensor
    output_shift: Tensor

    @classmethod
    def realize(cls, networks: StackedNetworks, number: int, components: Tensor | None = None) -> "DrawnNetworks":
        """Network `number` under the draws `components` (S, 2 (F + H)), None for a single component."""
        recipe, p = networks.recipe, {name: value[number] for name, value in networks.parameters.items()}
        hidden, output = p["hidden_weight"].unsqueeze(0), p["output_weight"].unsqueeze(0)
        hidden_shift, output_shift = p["hidden_bias"].view(1, -1, 1), p["output_bias"].view(1, -1, 1)
        if recipe.norm != "none":
            patches = p["patches"]
            drawn = patches[:1] if components is None else patches.gather(0, components)
            scale0, shift0, scale1, shift1 = drawn.split(networks.sizes, -1)  # (S, F or H)
            mean0, mean1 = networks.running_mean[number].split(networks.sizes[1:3])
            rstd0, rstd1 = (networks.running_var[number] + EPS).rsqrt().split(networks.sizes[1:3])
            scale0, scale1 = scale0 * rstd0, scale1 * rstd1
            shift0, shift1 = shift0 - mean0 * scale0, shift1 - mean1 * scale1
            hidden_shift = hidden_shift + hidden @ shift0.unsqueeze(-1)
            hidden = hidden * scale0.unsqueeze(1)
            if recipe.norm == "after":
                output_shift = output_shift + output @ shift1.unsqueeze(-1)
                output = output * scale1.unsqueeze(1)
            else:
                hidden_shift = hidden_shift * scale1.unsqueeze(-1) + shift1.unsqueeze(-1)
                hidden = hidden * scale1.unsqueeze(-1)
        keep = 1 - recipe.rate
        return cls(hidden / keep, hidden_shift, output / keep, output_shift)

    def outputs(self, inputs: Tensor) -> Tensor:
        """inputs (F, B) give (S, D, B)."""
        s, h, f = self.hidden.shape
        hidden = (self.hidden.reshape(s * h, f) @ inputs).view(s, h, -1)
        hidden.add_(self.hidden_shift).relu_()
        return torch.baddbmm(self.output_shift, self.output.expand(s, -1, -1), hidden)

    def masked_outputs(self, inputs: Tensor, dropped_inputs: Tensor, dropped_hidden: Tensor, draws: int) -> Tensor:
        """`draws` passes with dropped activations: positions in a flattened (draws, F, B) and (draws, H, B)."""
        x = inputs.repeat(draws, 1, 1)
        x.view(-1)[dropped_inputs] = 0
        hidden = torch.baddbmm(self.hidden_shift, self.hidden.expand(draws, -1, -1), x).relu_()
        hidden.view(-1)[dropped_hidden] = 0
        return torch.baddbmm(self.output_shift, self.output.expand(draws, -1, -1), hidden)


def drawn_outputs(
    networks: StackedNetworks, number: int, inputs: Tensor, draws: int, generator: torch.Generator
) -> Iterator[Tensor]:
    """Outputs of network `number` at inputs (B, F), in chunks (s, D, B) of equal weight.

    EMP: all K^2 networks, exactly. ECMP and dropout: `draws` independent draws. One component: the network itself.
    """
    if draws < 1:
        raise PatchbayesError(f"drawn_outputs(draws={draws}): at least one draw.")
    recipe, x = networks.recipe, inputs.T.contiguous()
    chunk = max(1, CHUNK // (recipe.hidden * len(inputs)))
    chunks = [min(chunk, draws - start) for start in range(0, draws, chunk)]
    f, _, h, _ = networks.sizes
    if recipe.rate:
        network = DrawnNetworks.realize(networks, number)
        for s in chunks:
            dropped_inputs = dropped_positions(s * f * len(inputs), recipe.rate, generator)
            dropped_hidden = dropped_positions(s * h * len(inputs), recipe.rate, generator)
            yield network.masked_outputs(x, dropped_inputs, dropped_hidden, s)
    elif recipe.components == 1:
        yield DrawnNetworks.realize(networks, number).outputs(x)
    elif recipe.tie == "site":
        pairs = torch.tensor(list(itertools.product(range(recipe.components), repeat=2)))
        for part in pairs.repeat_interleave(torch.tensor([2 * f, 2 * h]), dim=1).split(chunk):
            yield DrawnNetworks.realize(networks, number, part).outputs(x)
    else:
        for s in chunks:
            components = torch.randint(recipe.components, (s, 2 * (f + h)), generator=generator)
            yield DrawnNetworks.realize(networks, number, components).outputs(x)


class Score:
    """RMSE of the mean prediction and log predictive density, for each target, from draws that come in chunks.

        lpd_d = (1/B) sum_b log (1/S) sum_s N(y_bd | f_s(x_b)_d, 1 / tau)

    targets (B, D) in the units of the network; `unit` (D,) is the size of such a unit in the targets' own, in which tau and
    both results are.
    """

    def __init__(self, targets: Tensor, unit: Tensor, tau: float) -> None:
        self._targets, self._unit, self._tau = targets.T, unit.unsqueeze(-1), tau
        self._count = 0
        self._error = torch.zeros(self._targets.shape, dtype=torch.float64)
        self._log_sum = torch.full(self._targets.shape, -math.inf, dtype=torch.float64)

    def add(self, outputs: Tensor) -> None:
        """outputs (s, D, B)."""
        error = (outputs - self._targets) * self._unit
        self._count += len(error)
        self._error += error.sum(0, dtype=torch.float64)
        exponents = error.square_().mul_(-self._tau / 2)
        self._log_sum = torch.logaddexp(self._log_sum, exponents.logsumexp(0).double())

    @property
    def rmse(self) -> list[float]:
        return (self._error / self._count).square().mean(-1).sqrt().tolist()

    @property
    def lpd(self) -> list[float]:
        log_density = self._log_sum - math.log(self._count) + 0.5 * math.log(self._tau / (2 * math.pi))
        return log_density.mean(-1).tolist()
