"""The posterior predictive of a classifier: probabilities of C classes."""

import functools
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from ..draws.draws import Draws
from ..errors import PatchbayesError
from ..likelihoods import Likelihood
from ..likelihoods.likelihood import tempered
from ..metrics.temperature import fit_temperature
from .averages import Kept, of_all, predictives
from .loop import Outputs
from .moments import LogMean, Mean, MonteCarloMean
from .plan import Plan
from .prediction import PER_DRAW, PER_INPUT, Prediction, check_shape, needed
from .running import RunningAverages, fields_without_error, unknown_like


@dataclass(frozen=True, kw_only=True)
class ClassPrediction(Prediction):
    """The posterior predictive of a classifier, for B inputs and C classes (the classes are the last axis).

        p(y | x) = softmax(log p_average / T),   p_average = (1/S) sum_s p_t(y | x, w_s),   p_t = softmax(log p / t)

    probs, log_probs    (B, C): p(y | x) and its logarithm, also where probabilities underflow.
    standard_error      (B, C): Monte-Carlo standard error of `probs`, at T other than 1 by the delta method.
    averaged_probs, averaged_log_probs   (B, C): p_average, before the temperature; the same at T = 1. (kept_log_probs holds the
                        latter where they were averaged by themselves, None with statistics="averages".)
    expected_entropy    (B,): (1/S) sum_s H[p(y | x, w_s)], in nats: what remains uncertain with the weights known (aleatoric).
    unsoftened_probs    (B, C): (1/S) sum_s p(y | x, w_s); None at t = 1, where p_average is the same.
    draw_probs          (S, B, C) with keep_draws=True, else None: p_t of every draw, whose mean is p_average.

    T and t are `likelihood.temperature` and `draw_temperature`, 1 unless fitted. They change what is said about y, not what the
    draws say: `probs`, `log_probs`, `entropy`, `confidence` are tempered; `expected_entropy` and `mutual_information` are those
    of the draws as they are, whose sum is the entropy of `unsoftened_probs`. (Entropies at different temperatures do not
    combine: their difference may be negative. Softened draws are nearly uniform, and hardly disagree on anything.)
    """

    averaged_probs: Tensor = field(metadata=PER_INPUT)
    kept_log_probs: Tensor | None = field(default=None, metadata=PER_INPUT)
    expected_entropy: Tensor = field(metadata=PER_INPUT)
    unsoftened_probs: Tensor | None = field(default=None, metadata=PER_INPUT)
    draw_probs: Tensor | None = field(default=None, metadata=PER_DRAW)

    estimate = "probs"
    reported = (
        "probs",
        "log_probs",
        "predicted_class",
        "confidence",
        "entropy",
        "expected_entropy",
        "mutual_information",
    )
    untempered = ("expected_entropy", "mutual_information")

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
        probs, log_probs, entropy = MonteCarloMean(draws, joint=temperature != 1), LogMean(), Mean()
        kept, unsoftened, dtype = Kept(probs.number, keep), Mean(), torch.float32
        for members, dtype, said in predictives(outputs, likelihood, ("log_probs",)):
            draw_probs = said["log_probs"].exp()
            weights = probs.weights_of(members).to(draw_probs)
            entropy.add(torch.special.entr(draw_probs).sum(-1), weights)
            found = said["log_probs"]
            if draw_temperature != 1:
                unsoftened.add(draw_probs, weights)
                found = tempered(said, draw_temperature)["log_probs"]
                draw_probs = found.exp()
            probs.add(members, draw_probs, weights)
            log_probs.add(found, weights)
            kept.add(members, draw_probs.to(dtype))
        linear = None if temperature == 1 else _Tempering(log_probs.value, temperature)
        return cls(
            **of_all(draws, plan, probs, temperature, draw_temperature),
            standard_error=probs.standard_error(linear).to(dtype),
            averaged_probs=probs.mean.to(dtype),
            kept_log_probs=log_probs.value.to(dtype),
            expected_entropy=entropy.mean.to(dtype),
            unsoftened_probs=None if draw_temperature == 1 else unsoftened.mean.to(dtype),
            draw_probs=kept.values,
        )

    @classmethod
    def running(
        cls, outputs: Outputs, draws: Draws | None, likelihood: Likelihood, before: float, after: float, plan: Plan
    ) -> Self:
        averages = RunningAverages(1 if draws is None else len(draws), None if draws is None else draws.weights)
        for members, values in outputs:
            averages.add(members, values, likelihood, before)
            del values  # before the next draw makes its own
        found = averages.result()
        probs = found["averaged_probs"]
        return cls(
            **fields_without_error(draws, plan, len(probs), after, before), standard_error=unknown_like(probs), **found
        )

    @property
    def averaged_log_probs(self) -> Tensor:
        """(B, C): the logarithms of p_average, before the temperature."""
        return self.averaged_probs.log() if self.kept_log_probs is None else self.kept_log_probs

    @property
    def probs(self) -> Tensor:
        """(B, C): the probabilities of the classes, at the temperature."""
        return self.averaged_probs if self.temperature == 1 else self.log_probs.exp()

    @functools.cached_property
    def log_probs(self) -> Tensor:
        """(B, C): their logarithms, log_softmax(averaged_log_probs / T)."""
        if self.temperature == 1:
            return self.averaged_log_probs
        return torch.log_softmax(self.averaged_log_probs / self.temperature, -1)

    @property
    def predicted_class(self) -> Tensor:
        """(B,) int64; the same at every temperature."""
        return self.averaged_probs.argmax(-1)

    @property
    def confidence(self) -> Tensor:
        """(B,): the largest probability."""
        return self.probs.amax(-1)

    @property
    def entropy(self) -> Tensor:
        """(B,): entropy of `probs`, in nats: all uncertainty."""
        return torch.special.entr(self.probs).sum(-1)

    @property
    def mutual_information(self) -> Tensor:
        """(B,): what the draws disagree on (epistemic): the entropy of their average minus `expected_entropy`.

        Of the draws as they are: no temperature changes it.
        """
        if self.num_draws == 1:
            return torch.zeros_like(self.expected_entropy)  # to the last bit
        average = self.averaged_probs if self.unsoftened_probs is None else self.unsoftened_probs
        return (torch.special.entr(average).sum(-1) - self.expected_entropy).clamp_min(0)

    @property
    def answer(self) -> Tensor:
        """log_probs (B, C)."""
        return self.log_probs

    @property
    def tolerated_error(self) -> Tensor:
        """(B,): the standard error of the largest probability; of several positions, the largest."""
        top = self.averaged_probs.argmax(-1, keepdim=True)
        return self.standard_error.gather(-1, top).flatten(1).amax(1).cpu()

    def log_prob(self, targets: Tensor, ignore_index: int = -100) -> Tensor:
        """(B,): log-probability of the labels (B,), of several positions (B, ...) their sum; `ignore_index` counts for 0."""
        check_shape("log_prob", targets, self.averaged_probs.shape[:-1])
        counted, classes = targets != ignore_index, self.averaged_probs.shape[-1]
        if not bool((((targets >= 0) & (targets < classes)) | ~counted).all()):
            raise PatchbayesError(
                f"log_prob: expected labels from 0 to {classes - 1} (or {ignore_index}: ignored), got others."
            )
        found = (
            self.log_probs.gather(-1, targets.where(counted, 0).long().unsqueeze(-1)).squeeze(-1).where(counted, 0.0)
        )
        return found.flatten(1).sum(1) if found.dim() > 1 else found

    def fit_temperature(self, targets: Tensor, ignore_index: int = -100) -> float:
        """The temperature that fits held-out labels (B,) best, shrunk towards 1 by what they leave uncertain.

        Of the averages before any temperature: set it with `likelihood.set_temperature_`. Labels `ignore_index` do not count.
        """
        check_shape("fit_temperature", targets, self.averaged_probs.shape[:-1])
        counted = (targets != ignore_index).flatten()
        log_probs = self.averaged_log_probs.flatten(0, -2)
        return fit_temperature(log_probs[counted.to(log_probs.device)], targets.to(log_probs.device).flatten()[counted])

    def sample(self, number: int = 1, generator: torch.Generator | None = None) -> Tensor:
        """Replicated class labels, (R, B) int64: a draw of the network for each replicate. Needs keep_draws=True.

        Labels of the draws as they are: at another temperature than 1 there is no draw that a replicate could follow.
        """
        kept = needed(self.draw_probs, "sample")
        if self.temperature != 1:
            raise PatchbayesError(
                f"sample: replicates follow single draws, and the temperature {self.temperature:g} belongs to their average.\n"
                "  do       predict with a likelihood of temperature 1, or draw labels from `probs`."
            )
        generator = generator or torch.Generator().manual_seed(0)
        probs = kept[self._pick(number, generator, "sample").to(kept.device)]
        flat = torch.multinomial(probs.reshape(-1, probs.shape[-1]).cpu(), 1, generator=generator)
        return flat.reshape(probs.shape[:-1]).to(probs.device)

    def _possible(self, bound: Tensor) -> Tensor:
        return bound.clamp(0, 1)

    def _mixed(self, new: Self, share: Tensor) -> dict[str, Tensor]:
        column = share.reshape(-1, *[1] * (self.averaged_probs.dim() - 1))
        fewer = share.reshape(-1, *[1] * (self.expected_entropy.dim() - 1))
        both = (self.unsoftened_probs, new.unsoftened_probs)
        more = {} if both[0] is None or both[1] is None else {"unsoftened_probs": torch.lerp(both[0], both[1], column)}
        return more | {
            "averaged_probs": torch.lerp(self.averaged_probs, new.averaged_probs, column),
            "expected_entropy": torch.lerp(self.expected_entropy, new.expected_entropy, fewer),
            "kept_log_probs": torch.logaddexp(
                self.averaged_log_probs + (-column).log1p(), new.averaged_log_probs + column.log()
            ),
        }


class _Tempering:
    """The derivative of q = softmax(log p / T): dq_c = (q_c / T) (dp_c / p_c - sum_j q_j dp_j / p_j)."""

    def __init__(self, log_probs: Tensor, temperature: float) -> None:
        tempered = torch.log_softmax(log_probs / temperature, -1)
        self.probs = tempered.exp()
        ratio = (tempered - log_probs).exp() / temperature
        self.ratio = ratio.where(log_probs > -torch.inf, 0.0)  # an impossible class stays one

    def __call__(self, deviations: Tensor) -> Tensor:
        scaled = self.ratio * deviations
        return scaled - self.probs * scaled.sum(-1, keepdim=True)
