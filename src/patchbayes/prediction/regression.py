"""The posterior predictive of numbers: a mean, and a variance that has an epistemic and an aleatoric part."""

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from ..draws.draws import Draws
from ..errors import PatchbayesError
from ..likelihoods import Likelihood
from ..metrics.temperature import fit_variance_factor
from .averages import Kept, of_all, predictives
from .loop import Outputs
from .moments import Moments, MonteCarloMean
from .plan import Plan
from .prediction import PER_DRAW, PER_INPUT, Prediction, check_level, check_shape, needed


@dataclass(frozen=True, kw_only=True)
class MeanPrediction(Prediction):
    """Mean and variance of the posterior predictive, for B inputs and D targets, whatever law the draws have.

        y = mean + sqrt(T) (y_average - mean),   y_average ~ (1/S) sum_s p(y | x, w_s)

    mean                (B, D): (1/S) sum_s f(x, w_s), f being the mean of y under a draw.
    standard_error      (B, D): Monte-Carlo standard error of the mean.
    covariance_of_means (B, D, D): covariance of f over the draws, before the factor T.
    noise_variance      (B, D): (1/S) sum_s Var[y | x, w_s], before the factor T.
    draw_means          (S, B, D) with keep_draws=True, else None.

    The likelihood's temperature T is a factor on the predictive variance, of both of its parts: the whole prediction is
    stretched around its mean, which stays. What the draws said is in `draw_means`, as it was.
    """

    mean: Tensor = field(metadata=PER_INPUT)
    covariance_of_means: Tensor = field(metadata=PER_INPUT)
    noise_variance: Tensor = field(metadata=PER_INPUT)
    draw_means: Tensor | None = field(default=None, metadata=PER_DRAW)

    estimate = "mean"
    varying: ClassVar[bool] = False  # whether the noise differs between draws, and is kept
    reported = ("mean", "variance", "epistemic_variance", "aleatoric_variance")

    @classmethod
    def averaged(
        cls,
        outputs: Outputs,
        draws: Draws | None,
        likelihood: Likelihood,
        draw_temperature: float,
        temperature: float,
        keep: bool,
        plan: Plan,
    ) -> Self:
        means, products, noise = MonteCarloMean(draws), Moments(), Moments()
        kept, kept_variances = (
            Kept(means.number, keep),
            Kept(means.number, keep and cls.varying),
        )
        dtype, origin = torch.float32, None
        for members, dtype, found in predictives(outputs, likelihood, ("mean", "variance")):
            mean, variance = (v.unsqueeze(-1) if v.dim() == 2 else v for v in (found["mean"], found["variance"]))
            if mean.dim() != 3 or variance.shape != mean.shape:
                raise PatchbayesError(
                    f"predict: expected a regression network that returns (B, D) or (B,), got {tuple(mean.shape[1:])}.\n"
                    "  do       pass output=lambda y: y.flatten(1)."
                )
            origin = mean[0] if origin is None else origin
            weights = means.weights_of(members).to(mean)
            means.add(members, mean, weights)
            noise.add(variance, weights)
            centered = mean - origin  # shifted by the first draw, so that products do not cancel
            products.add(centered.unsqueeze(-1) * centered.unsqueeze(-2), weights)
            kept.add(members, mean.to(dtype))
            kept_variances.add(members, variance.to(dtype))
        assert origin is not None
        shift = means.mean - origin
        covariance = products.mean - shift.unsqueeze(-1) * shift.unsqueeze(-2)
        more: dict[str, Any] = {"draw_variances": kept_variances.values} if kept_variances.wanted else {}
        return cls(
            **of_all(draws, plan, means, temperature),
            standard_error=means.standard_error().to(dtype),
            mean=means.mean.to(dtype),
            covariance_of_means=covariance.to(dtype),
            noise_variance=noise.mean.to(dtype),
            draw_means=kept.values,
            **more,
        )

    @property
    def epistemic_covariance(self) -> Tensor:
        """(B, D, D): covariance of f over the draws, times T."""
        return self.temperature * self.covariance_of_means

    @property
    def epistemic_variance(self) -> Tensor:
        """(B, D): variance of f over the draws, (1/S) sum f^2 - mean^2, times T."""
        return self.epistemic_covariance.diagonal(dim1=-2, dim2=-1)

    @property
    def aleatoric_variance(self) -> Tensor:
        """(B, D): the noise, on average over the draws, times T."""
        return self.temperature * self.noise_variance

    @property
    def variance(self) -> Tensor:
        """(B, D): epistemic plus aleatoric (appendix B.3)."""
        return self.epistemic_variance + self.aleatoric_variance

    @property
    def covariance(self) -> Tensor:
        """(B, D, D): (1/S) sum f f^T - mean mean^T plus the noise (appendix B.3), times T."""
        return self.epistemic_covariance + torch.diag_embed(self.aleatoric_variance)

    @property
    def answer(self) -> tuple[Tensor, Tensor]:
        """mean (B, D) and variance (B, D)."""
        return self.mean, self.variance

    @property
    def tolerated_error(self) -> Tensor:
        """(B,): the standard error of the mean as a part of the predictive deviation, the largest of the targets'."""
        return (self.standard_error / self.variance.sqrt()).flatten(1).amax(1).cpu()

    def fit_temperature(self, targets: Tensor) -> float:
        """The factor on the predictive variance that fits held-out targets (B, D) best, shrunk towards 1.

        From mean and variance alone, as if the law were Gaussian. Before any factor: set it with
        `likelihood.set_temperature_`.
        """
        check_shape("fit_temperature", targets, self.mean.shape)
        variance = self.covariance_of_means.diagonal(dim1=-2, dim2=-1) + self.noise_variance
        return fit_variance_factor(self.mean.unsqueeze(0), variance.unsqueeze(0), targets)

    def sample(self, number: int = 1, generator: torch.Generator | None = None) -> Tensor:
        """Not known: a `MeanPrediction` has moments only."""
        raise PatchbayesError(
            f"sample: a {type(self).__name__} knows mean and variance, not the law of y.\n"
            "  do       use a likelihood that offers more, such as Gaussian, or sample from the draws' own law (draw_means)."
        )

    def _mixed(self, new: Self, share: Tensor) -> dict[str, Tensor]:
        column, square = share.view(-1, 1), share.view(-1, 1, 1)
        gap = new.mean - self.mean
        between = square * (1 - square) * gap.unsqueeze(-1) * gap.unsqueeze(-2)
        return {
            "mean": torch.lerp(self.mean, new.mean, column),
            "noise_variance": torch.lerp(self.noise_variance, new.noise_variance, column),
            "covariance_of_means": torch.lerp(self.covariance_of_means, new.covariance_of_means, square) + between,
        }


@dataclass(frozen=True, kw_only=True)
class RegressionPrediction(MeanPrediction):
    """The posterior predictive of a regression, for B inputs and D targets: a mixture of S Gaussians.

        p_average(y) = (1/S) sum_s N(y | f_s, v_s),   stretched around its mean by sqrt(T), T being the likelihood's temperature

    mean, variance, epistemic_variance, aleatoric_variance and the rest as in `MeanPrediction`; here `log_prob`, `quantile`,
    `interval` and `sample` are those of the mixture, with keep_draws=True. The noise v_s is the same in all draws.
    """

    @property
    def precision(self) -> float | Tensor:
        """tau_output, before the factor T: the noise variance is T / precision. One number, or one for each target (D,)."""
        first = self.noise_variance[:1].flatten()
        return float(1 / first[0]) if first.numel() and bool((first == first[0]).all()) else 1 / first

    def mixture(self) -> tuple[Tensor, Tensor]:
        """The Gaussians that the prediction is an average of, T included: means and variances, (S, B, D) each.

        Needs keep_draws=True.
        """
        means = needed(self.draw_means, "mixture")
        return self.mean + self.temperature**0.5 * (means - self.mean), self.temperature * self._variances(means)

    def log_prob(self, targets: Tensor) -> Tensor:
        """(B,): log density of the mixture at the targets (B, D), log sum_s w_s N(y | f_s, v_s). Needs keep_draws=True."""
        needed(self.draw_means, "log_prob")
        check_shape("log_prob", targets, self.mean.shape)
        means, variances = self.mixture()
        squares = ((targets - means).square() / variances + variances.log() + math.log(2 * math.pi)).sum(-1)
        return torch.logsumexp(self.weights.to(means).log().unsqueeze(-1) - 0.5 * squares, dim=0)

    def quantile(self, level: float) -> Tensor:
        """(B, D): the level-quantile of each target under the mixture. Needs keep_draws=True."""
        check_level("quantile", level)
        needed(self.draw_means, "quantile")
        means, variances = (part.double() for part in self.mixture())
        deviation = variances.sqrt()
        reach = deviation * float(torch.special.ndtri(torch.tensor(level, dtype=torch.float64)))
        low, high = (means + reach).amin(0), (means + reach).amax(0)  # it lies between those of the extreme members
        weights = self.weights.to(means).view(-1, 1, 1)
        for _ in range(60):
            middle = (low + high) / 2
            below = (weights * torch.special.ndtr((middle - means) / deviation)).sum(0) < level
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return ((low + high) / 2).to(self.mean.dtype)

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """((B, D), (B, D)): the central interval that holds y with probability `level`. Needs keep_draws=True."""
        check_level("interval", level)
        return self.quantile((1 - level) / 2), self.quantile((1 + level) / 2)

    def sample(self, number: int = 1, generator: torch.Generator | None = None) -> Tensor:
        """Replicated targets y*, (R, B, D): a draw of the network and fresh noise each. Needs keep_draws=True."""
        needed(self.draw_means, "sample")
        means, variances = self.mixture()
        generator = generator or torch.Generator().manual_seed(0)
        picked = self._pick(number, generator, "sample").to(means.device)
        chosen, deviation = means[picked], variances.expand_as(means)[picked].sqrt()
        noise = torch.randn(chosen.shape, generator=generator, dtype=chosen.dtype).to(chosen.device)
        return chosen + noise * deviation

    def fit_temperature(self, targets: Tensor) -> float:
        """The factor on the predictive variance that fits held-out targets (B, D) best, shrunk towards 1.

        By the density of the mixture. Before any factor: set it with `likelihood.set_temperature_`. Needs keep_draws=True.
        """
        means = needed(self.draw_means, "fit_temperature")
        check_shape("fit_temperature", targets, self.mean.shape)
        return fit_variance_factor(means, self._variances(means), targets, self.weights)

    def _variances(self, means: Tensor) -> Tensor:
        """The noise of each draw before the factor T, (S, B, D)."""
        return self.noise_variance.expand_as(means)


@dataclass(frozen=True, kw_only=True)
class HeteroscedasticPrediction(RegressionPrediction):
    """A `RegressionPrediction` whose noise depends on the input and on the draw.

    draw_variances  (S, B, D): the noise of each draw, with keep_draws=True, else None; `noise_variance` is their average.
    """

    draw_variances: Tensor | None = field(default=None, metadata=PER_DRAW)

    varying = True

    @property
    def precision(self) -> float | Tensor:
        """Not one: every input has a noise of its own, `aleatoric_variance`."""
        raise PatchbayesError(
            "precision: every input has a noise of its own here.\n  do       use aleatoric_variance (B, D)."
        )

    def _variances(self, means: Tensor) -> Tensor:
        return needed(self.draw_variances, "mixture")
