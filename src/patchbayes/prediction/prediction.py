"""What a posterior predictive says: class probabilities or a mean, and how uncertain they are, and why."""

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from ..draws import Draws
from ..errors import PatchbayesError
from .moments import StandardErrorKind
from .plan import Plan


@dataclass(frozen=True)
class PredictiveCheck:
    """A posterior predictive check: the statistic of the data, of replicated data (R,), and P(replicated >= observed)."""

    observed: float
    replicated: Tensor
    p_value: float


@dataclass(frozen=True)
class Prediction(ABC):
    """What all predictions have.

    num_draws            S, how many draws were averaged.
    standard_error_kind  where `standard_error` comes from; "exact" after enumeration, "unknown" (then NaN) with one draw,
                         draws that come twice, or a part of an enumeration.
    weights              the weight of each draw, (S,) float64.
    draws                the draws themselves: pass them to `predict` again to compare networks, inputs or engines.
    plan                 what was computed, and how much of it was shared; print it.
    draws_used           (B,) int64: S, or fewer where `tolerance` stopped early.
    """

    num_draws: int
    standard_error_kind: StandardErrorKind
    weights: Tensor
    draws: Draws
    plan: Plan
    draws_used: Tensor

    def __len__(self) -> int:
        """B, the number of inputs."""
        return len(next(v for v in self._per_input().values() if v is not None))

    def __getitem__(self, which: slice | Tensor | Sequence[int]) -> Self:
        """The prediction for some of the inputs."""
        kept: dict[str, Any] = {
            name: value[which] if value is not None else None for name, value in self._per_input().items()
        }
        kept |= {name: getattr(self, name)[:, which] for name in self._per_draw() if getattr(self, name) is not None}
        return dataclasses.replace(self, **kept)

    @classmethod
    def concatenate(cls, predictions: Sequence[Self]) -> Self:
        """One prediction for the inputs of several, which must come from the same draws."""
        if not predictions:
            raise PatchbayesError("concatenate: nothing given; pass at least one prediction.")
        first = predictions[0]
        for other in predictions[1:]:
            if other.num_draws != first.num_draws or not torch.equal(other.weights, first.weights):
                raise PatchbayesError("concatenate: the predictions do not come from the same draws.")
            if any((getattr(other, name) is None) != (getattr(first, name) is None) for name in first._per_draw()):
                raise PatchbayesError("concatenate: some predictions kept their draws, some did not (keep_draws).")
        joined: dict[str, Any] = {
            n: torch.cat([p._per_input()[n] for p in predictions])
            for n, v in first._per_input().items()
            if v is not None
        }
        joined |= {
            name: torch.cat([getattr(p, name) for p in predictions], dim=1)
            for name in first._per_draw()
            if getattr(first, name) is not None
        }
        return dataclasses.replace(first, **joined)

    def usable(self) -> Self:
        """The same with ordinary tensors, where those were made in inference mode."""
        made: dict[str, Any] = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        made = {name: v.clone() for name, v in made.items() if isinstance(v, Tensor) and v.is_inference()}
        return dataclasses.replace(self, **made)

    def _per_input(self) -> dict[str, Tensor]:
        skip = {"num_draws", "standard_error_kind", "weights", "draws", "plan", "precision", *self._per_draw()}
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name not in skip}

    def _per_draw(self) -> tuple[str, ...]:
        return ()

    def _replicates(self, kept: Tensor | None, number: int, generator: torch.Generator | None, what: str) -> Tensor:
        """The kept draws picked for `number` replicates, each a draw for all inputs: (R, B, ...)."""
        if kept is None:
            raise PatchbayesError(f"{what} needs every draw: call predict(..., keep_draws=True).")
        if number < 1:
            raise PatchbayesError(f"{what}: the number of samples is at least 1, {number} was given.")
        generator = generator or torch.Generator().manual_seed(0)
        picked = torch.multinomial(self.weights, number, replacement=True, generator=generator)
        return kept[picked.to(kept.device)]

    @abstractmethod
    def sample(self, number: int = 1, generator: torch.Generator | None = None) -> Tensor:
        """Replicated targets, (R, B, ...). Needs keep_draws=True."""

    def check(
        self,
        targets: Tensor,
        statistic: Callable[[Tensor], Tensor | float],
        replicates: int = 1000,
        generator: torch.Generator | None = None,
    ) -> PredictiveCheck:
        """Posterior predictive check (appendix B.3): replicate y* for all inputs, compare a statistic with the data's.

        `statistic` maps targets of all inputs to a number. A p-value near 0 or 1 says that the data are unlike what the
        model would produce, in that respect. Needs keep_draws=True.
        """
        samples = self.sample(replicates, generator)
        if targets.shape != samples.shape[1:]:
            raise PatchbayesError(
                f"check: targets have the shape {tuple(targets.shape)}, not {tuple(samples.shape[1:])}."
            )
        observed = float(statistic(targets))
        replicated = torch.tensor([float(statistic(sample)) for sample in samples], dtype=torch.float64)
        return PredictiveCheck(observed, replicated, float((replicated >= observed).double().mean()))


@dataclass(frozen=True)
class ClassPrediction(Prediction):
    """The posterior predictive of a classifier, for B inputs and C classes (the classes are the last axis).

    probs            (B, C): (1/S) sum_s p(y | x, w_s).
    log_probs        (B, C): logarithm of the averaged probabilities, also where those underflow.
    standard_error   (B, C): Monte-Carlo standard error of each probability.
    expected_entropy (B,): (1/S) sum_s H[p(y | x, w_s)], in nats: what remains uncertain with the weights known (aleatoric).
    draw_probs       (S, B, C) with keep_draws=True, else None.
    """

    probs: Tensor
    log_probs: Tensor
    standard_error: Tensor
    expected_entropy: Tensor
    draw_probs: Tensor | None = None

    @property
    def predicted_class(self) -> Tensor:
        """(B,) int64."""
        return self.probs.argmax(-1)

    @property
    def confidence(self) -> Tensor:
        """(B,): the largest probability."""
        return self.probs.amax(-1)

    @property
    def entropy(self) -> Tensor:
        """(B,): entropy of the averaged probabilities, in nats: all uncertainty."""
        return torch.special.entr(self.probs).sum(-1)

    @property
    def mutual_information(self) -> Tensor:
        """(B,): entropy minus expected entropy: what the draws disagree on (epistemic)."""
        return (self.entropy - self.expected_entropy).clamp_min(0)

    def sample(self, number: int = 1, generator: torch.Generator | None = None) -> Tensor:
        """Replicated class labels, (R, B) int64: a draw of the network for each replicate. Needs keep_draws=True."""
        generator = generator or torch.Generator().manual_seed(0)
        probs = self._replicates(self.draw_probs, number, generator, "sample")
        flat = torch.multinomial(probs.reshape(-1, probs.shape[-1]).cpu(), 1, generator=generator)
        return flat.reshape(probs.shape[:-1]).to(probs.device)

    def _per_draw(self) -> tuple[str, ...]:
        return ("draw_probs",)


@dataclass(frozen=True)
class RegressionPrediction(Prediction):
    """The posterior predictive of a regression, for B inputs and D targets: a mixture of S Gaussians.

    mean                  (B, D): (1/S) sum_s f(x, w_s).
    standard_error        (B, D): Monte-Carlo standard error of the mean.
    epistemic_covariance  (B, D, D): covariance of f over the draws.
    precision             tau_output: the noise variance is 1 / precision.
    draw_means            (S, B, D) with keep_draws=True, else None.
    """

    mean: Tensor
    standard_error: Tensor
    epistemic_covariance: Tensor
    precision: float
    draw_means: Tensor | None = None

    @property
    def epistemic_variance(self) -> Tensor:
        """(B, D): variance of f over the draws, (1/S) sum f^2 - mean^2."""
        return self.epistemic_covariance.diagonal(dim1=-2, dim2=-1)

    @property
    def aleatoric_variance(self) -> Tensor:
        """(B, D): the noise, 1 / tau_output."""
        return torch.full_like(self.mean, 1 / self.precision)

    @property
    def variance(self) -> Tensor:
        """(B, D): epistemic plus aleatoric (appendix B.3)."""
        return self.epistemic_variance + self.aleatoric_variance

    @property
    def covariance(self) -> Tensor:
        """(B, D, D): (1/S) sum f f^T - mean mean^T + I / tau_output (appendix B.3)."""
        return self.epistemic_covariance + torch.diag_embed(self.aleatoric_variance)

    def log_prob(self, targets: Tensor) -> Tensor:
        """(B,): log density of the mixture at the targets (B, D), log sum_s w_s N(y | f_s, 1/tau). Needs keep_draws=True."""
        means = self._kept("log_prob")
        if targets.shape != self.mean.shape:
            raise PatchbayesError(
                f"log_prob: targets have the shape {tuple(targets.shape)}, not {tuple(self.mean.shape)}."
            )
        squares = (means - targets).square().sum(-1)
        size = self.mean.shape[-1]
        constant = 0.5 * size * math.log(self.precision / (2 * math.pi))
        log_weights = self.weights.to(means).log().unsqueeze(-1)
        return constant + torch.logsumexp(log_weights - 0.5 * self.precision * squares, dim=0)

    def quantile(self, level: float) -> Tensor:
        """(B, D): the level-quantile of each target under the mixture. Needs keep_draws=True."""
        if not 0 < level < 1:
            raise PatchbayesError(f"quantile(level={level!r}): a level lies between 0 and 1.")
        means = self._kept("quantile").double()
        deviation = self.precision**-0.5
        reach = deviation * float(torch.special.ndtri(torch.tensor(level, dtype=torch.float64)))
        low, high = (
            means.amin(0) + reach,
            means.amax(0) + reach,
        )  # the quantile lies between those of the extreme members
        weights = self.weights.to(means).view(-1, 1, 1)
        for _ in range(60):
            middle = (low + high) / 2
            below = (weights * torch.special.ndtr((middle - means) / deviation)).sum(0) < level
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return ((low + high) / 2).to(self.mean.dtype)

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """((B, D), (B, D)): the central interval that holds y with probability `level`. Needs keep_draws=True."""
        if not 0 < level < 1:
            raise PatchbayesError(f"interval(level={level!r}): a level lies between 0 and 1.")
        return self.quantile((1 - level) / 2), self.quantile((1 + level) / 2)

    def sample(self, number: int = 1, generator: torch.Generator | None = None) -> Tensor:
        """Replicated targets y*, (R, B, D): a draw of the network and fresh noise each. Needs keep_draws=True."""
        generator = generator or torch.Generator().manual_seed(0)
        means = self._replicates(self.draw_means, number, generator, "sample")
        noise = torch.randn(means.shape, generator=generator, dtype=means.dtype).to(means.device)
        return means + noise * self.precision**-0.5

    def _kept(self, what: str) -> Tensor:
        if self.draw_means is None:
            raise PatchbayesError(f"{what} needs every draw: call predict(..., keep_draws=True).")
        return self.draw_means

    def _per_draw(self) -> tuple[str, ...]:
        return ("draw_means",)
