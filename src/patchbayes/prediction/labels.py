"""The posterior predictive of independent labels: the probability that each is present."""

import functools
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

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


@dataclass(frozen=True, kw_only=True)
class LabelPrediction(Prediction):
    """The posterior predictive of labels, for B inputs and L labels (of whatever shape the network's output has).

        p(y = 1 | x) = sigmoid(logit p_average / T),   p_average = (1/S) sum_s p_t(y = 1 | x, w_s)

    probs            (B, L): the probability that a label is present; `logits` their log-odds, `log_prob` the density.
    standard_error   (B, L): Monte-Carlo standard error of `probs`, at T other than 1 by the delta method.
    averaged_log_present, averaged_log_absent   (B, L): logarithms of p_average and 1 - p_average, before the temperature.
    expected_entropy (B, L): (1/S) sum_s H[p(y | x, w_s)] of each label, in nats (aleatoric).
    unsoftened_probs (B, L): (1/S) sum_s p(y = 1 | x, w_s); None at t = 1, where p_average is the same.
    draw_probs       (S, B, L) with keep_draws=True, else None: p_t of every draw, whose mean is p_average.

    As in a `ClassPrediction`, p_t is a draw at the `draw_temperature`; `probs` and `entropy` are tempered, `expected_entropy`
    and `mutual_information` are those of the draws as they are. All are per label: labels of one input are not independent over
    draws, and `log_prob` of a whole input is the product of its labels' averages, as the tempered prediction treats them.
    """

    averaged_log_present: Tensor = field(metadata=PER_INPUT)
    averaged_log_absent: Tensor = field(metadata=PER_INPUT)
    expected_entropy: Tensor = field(metadata=PER_INPUT)
    unsoftened_probs: Tensor | None = field(default=None, metadata=PER_INPUT)
    draw_probs: Tensor | None = field(default=None, metadata=PER_DRAW)

    estimate = "probs"
    reported = ("probs", "logits", "predicted_labels", "entropy", "expected_entropy", "mutual_information")

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
        probs, present, absent, entropy = MonteCarloMean(draws), LogMean(), LogMean(), Mean()
        kept, unsoftened, dtype = Kept(probs.number, keep), Mean(), torch.float32
        for members, dtype, said in predictives(outputs, likelihood, ("logits",)):
            weights = probs.weights_of(members).to(said["logits"])
            entropy.add(_entropy(said["logits"]), weights)
            if draw_temperature != 1:
                unsoftened.add(said["logits"].sigmoid(), weights)
            logits = tempered(said, draw_temperature)["logits"]
            draw_probs = logits.sigmoid()
            probs.add(members, draw_probs, weights)
            present.add(logsigmoid(logits), weights)
            absent.add(logsigmoid(-logits), weights)
            kept.add(members, draw_probs.to(dtype))
        error = probs.standard_error()
        if temperature != 1:  # dq / dp = q (1 - q) / (T p (1 - p))
            odds = (present.value - absent.value) / temperature
            slope = (logsigmoid(odds) + logsigmoid(-odds) - present.value - absent.value).exp() / temperature
            error = (slope * error).where(error > 0, error)
        return cls(
            **of_all(draws, plan, probs, temperature, draw_temperature),
            standard_error=error.to(dtype),
            averaged_log_present=present.value.to(dtype),
            averaged_log_absent=absent.value.to(dtype),
            expected_entropy=entropy.mean.to(dtype),
            unsoftened_probs=None if draw_temperature == 1 else unsoftened.mean.to(dtype),
            draw_probs=kept.values,
        )

    @functools.cached_property
    def logits(self) -> Tensor:
        """(B, L): log-odds of each label, at the temperature."""
        return (self.averaged_log_present - self.averaged_log_absent) / self.temperature

    @property
    def probs(self) -> Tensor:
        """(B, L): the probability that each label is present, at the temperature."""
        return self.averaged_log_present.exp() if self.temperature == 1 else self.logits.sigmoid()

    @property
    def predicted_labels(self) -> Tensor:
        """(B, L) bool: the labels that are more likely present than absent; the same at every temperature."""
        return self.logits > 0

    @property
    def entropy(self) -> Tensor:
        """(B, L): entropy of each label under `probs`, in nats: all uncertainty."""
        return _entropy(self.logits)

    @property
    def mutual_information(self) -> Tensor:
        """(B, L): what the draws disagree on (epistemic), of the draws as they are: no temperature changes it."""
        if self.num_draws == 1:
            return torch.zeros_like(self.expected_entropy)  # to the last bit
        if self.unsoftened_probs is None:
            whole = _entropy(self.averaged_log_present - self.averaged_log_absent)
        else:
            whole = torch.special.entr(self.unsoftened_probs) + torch.special.entr(1 - self.unsoftened_probs)
        return (whole - self.expected_entropy).clamp_min(0)

    @property
    def answer(self) -> Tensor:
        """logits (B, L)."""
        return self.logits

    @property
    def tolerated_error(self) -> Tensor:
        """(B,): the largest standard error of a label's probability."""
        return (
            self.standard_error.flatten(1).amax(1).cpu() if self.standard_error.dim() > 1 else self.standard_error.cpu()
        )

    def log_prob(self, targets: Tensor, ignore_index: int = -100) -> Tensor:
        """(B,): log-probability of targets (B, L) of 0 and 1, summed over the labels that are not `ignore_index`."""
        counted = self._counted("log_prob", targets, ignore_index)
        chosen = torch.where(targets == 1, logsigmoid(self.logits), logsigmoid(-self.logits)).where(counted, 0.0)
        return chosen.flatten(1).sum(1) if chosen.dim() > 1 else chosen

    def fit_temperature(self, targets: Tensor, ignore_index: int = -100) -> float:
        """The temperature that fits held-out labels (B, L) of 0 and 1 best, shrunk towards 1 by what they leave uncertain.

        Of the averages before any temperature: set it with `likelihood.set_temperature_`. Labels `ignore_index` do not count.
        """
        counted = self._counted("fit_temperature", targets, ignore_index)
        pairs = torch.stack([self.averaged_log_absent, self.averaged_log_present], -1)
        return fit_temperature(pairs[counted], targets[counted].long())

    def sample(self, number: int = 1, generator: torch.Generator | None = None) -> Tensor:
        """Replicated labels, (R, B, L) int64: a draw of the network for each replicate. Needs keep_draws=True, and T = 1."""
        kept = needed(self.draw_probs, "sample")
        if self.temperature != 1:
            raise PatchbayesError(
                f"sample: replicates follow single draws, and the temperature {self.temperature:g} belongs to their average.\n"
                "  do       predict with a likelihood of temperature 1, or draw labels from `probs`."
            )
        generator = generator or torch.Generator().manual_seed(0)
        probs = kept[self._pick(number, generator, "sample").to(kept.device)]
        return torch.bernoulli(probs.cpu(), generator=generator).to(probs.device, torch.int64)

    def _counted(self, what: str, targets: Tensor, ignore_index: int) -> Tensor:
        check_shape(what, targets, self.logits.shape)
        counted = targets != ignore_index
        if not bool(((targets == 0) | (targets == 1) | ~counted).all()):
            raise PatchbayesError(f"{what}: expected labels 0 and 1 (or {ignore_index}: ignored), got others.")
        return counted

    def _possible(self, bound: Tensor) -> Tensor:
        return bound.clamp(0, 1)

    def _mixed(self, new: Self, share: Tensor) -> dict[str, Tensor]:
        column = share.reshape(-1, *[1] * (self.expected_entropy.dim() - 1))
        fields = {"expected_entropy": torch.lerp(self.expected_entropy, new.expected_entropy, column)}
        if self.unsoftened_probs is not None and new.unsoftened_probs is not None:
            fields["unsoftened_probs"] = torch.lerp(self.unsoftened_probs, new.unsoftened_probs, column)
        for name in ("averaged_log_present", "averaged_log_absent"):
            fields[name] = torch.logaddexp(getattr(self, name) + (-column).log1p(), getattr(new, name) + column.log())
        return fields


def _entropy(logits: Tensor) -> Tensor:
    """Of a label with these log-odds, in nats."""
    return torch.special.entr(logits.sigmoid()) + torch.special.entr((-logits).sigmoid())
