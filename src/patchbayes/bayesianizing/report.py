"""What bayesianizing did: the scales tried and chosen, held-out scores before and after, times, sizes."""

from dataclasses import dataclass

from torch import Tensor

from ..metrics import accuracy, expected_calibration_error, nll
from ..patch_report import PatchReport


@dataclass(frozen=True)
class Scores:
    """NLL per example in nats; accuracy, expected calibration error (20 bins) and mean confidence as shares of 1."""

    nll: float
    accuracy: float
    ece: float
    confidence: float

    @classmethod
    def of(cls, log_probs: Tensor, targets: Tensor) -> "Scores":
        probs = log_probs.exp()
        confidence = float(probs.max(1).values.double().mean())
        return cls(
            nll(log_probs, targets), accuracy(probs, targets), expected_calibration_error(probs, targets), confidence
        )

    @property
    def overconfidence(self) -> float:
        """Mean confidence minus accuracy."""
        return self.confidence - self.accuracy

    def __str__(self) -> str:
        return (
            f"NLL {self.nll:.4f}   accuracy {100 * self.accuracy:.2f} %   confidence {100 * self.confidence:.2f} %   "
            f"ECE {100 * self.ece:.2f} %"
        )


@dataclass(frozen=True)
class Trial:
    """One point of the search: the scale of every group of sites, and its score on held-out examples.

    stage   "jitter" (untrained components, scales are jitters), "spread" (trained ones, scales are factors), or "balance"
            (scales are factors on what was chosen before; more examples and draws).
    """

    stage: str
    scales: dict[str, float]
    scores: Scores


@dataclass(frozen=True)
class BayesianizeReport:
    """The result of `bayesianize_`. Print it for a summary.

    patch           what was patched.
    jitter          of each group of sites, the jitter that training began with (or that was left, without training).
    spread          of each group, the factor that the trained components' deviations from their mean were multiplied by.
    balance         the last factor on all deviations, which made the mean confidence equal to the accuracy.
    jitter_source   "held-out", "given" or "default" (no held-out data: the documented value).
    kept            "trained", or "untrained" where training did not improve the held-out NLL and was undone.
    tried           all points of the search.
    num_held_out    held-out examples that chose and that `before`, `after` and `temperature_scaled` are computed on; 0: none.
    before, after   the original network, and the bayesianized one. The same examples chose a few scalars.
    temperature, temperature_scaled   the reference: one temperature for the original, fitted on the same examples.
    first_loss, last_loss   mean training loss of the first and last tenth of the steps; None without training.
    patch_bytes, model_bytes  what the patches take in a file, and the original network.
    seconds         time of each part.
    """

    patch: PatchReport
    jitter: dict[str, float]
    spread: dict[str, float]
    balance: float
    jitter_source: str
    kept: str
    tried: tuple[Trial, ...]
    num_held_out: int
    before: Scores | None
    after: Scores | None
    temperature: float | None
    temperature_scaled: Scores | None
    num_steps: int
    first_loss: float | None
    last_loss: float | None
    patch_bytes: int
    model_bytes: int
    seconds: dict[str, float]

    def __str__(self) -> str:
        lines = [str(self.patch), ""]
        source = {"default": "the documented default: no held-out data", "given": "given", "held-out": "chosen"}
        lines.append(f"jitter  {_scales(self.jitter)} ({source[self.jitter_source]})")
        if self.num_steps:
            lines.append(f"loss    {self.first_loss:.4f} -> {self.last_loss:.4f} in {self.num_steps} steps")
            lines.append(
                f"spread  {_scales(self.spread)} times what training left"
                if self.kept == "trained"
                else "training did not improve the held-out NLL, so the untrained components were kept"
            )
        if self.balance != 1:
            lines.append(f"balance {self.balance:.4g} times that, to bring the confidence to the accuracy")
        for trial in self.tried:
            lines.append(f"  tried {trial.stage} {_scales(trial.scales):<28} {trial.scores}")
        if self.before is not None:
            chosen = " (those that made the choices)" if self.tried else ""
            lines.append(f"on {self.num_held_out} held-out examples{chosen}")
            lines.append(f"  before                    {self.before}")
            lines.append(f"  after                     {self.after}")
            lines.append(f"  temperature {self.temperature:<5.2f} instead {self.temperature_scaled}")
        share = 100 * self.patch_bytes / self.model_bytes
        lines.append(
            f"size    {self.patch_bytes:,} bytes of patches, {share:.1f} % of the network's {self.model_bytes:,}"
        )
        if self.seconds:
            lines.append("time    " + ", ".join(f"{name} {value:.0f} s" for name, value in self.seconds.items()))
        return "\n".join(lines)


def _scales(scales: dict[str, float]) -> str:
    return ", ".join(f"{group} {value:.4g}" for group, value in scales.items())
