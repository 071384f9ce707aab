"""What calibrate_ and bayesianize_ did and what it brought: print it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from ..metrics import accuracy, calibration_bins
from ..patching.report import PatchReport
from .score import Average, scores
from .tries import Tried

_BAR, _BINS = 30, 5
#: Held-out examples that are too few to keep some of them away from learning, and to trust the scores.
FEW = 100


@dataclass(frozen=True)
class Scores:
    """NLL per example in nats; for classes also ECE and accuracy, both between 0 and 1.

    reliability   for classes, of each bin of confidence that is not empty: examples, mean confidence, accuracy.
    """

    nll: float
    ece: float | None = None
    accuracy: float | None = None
    reliability: tuple[tuple[int, float, float], ...] = ()

    @classmethod
    def of(cls, averages: Sequence[Average], targets: Sequence[Tensor], temperature: float) -> "Scores":
        nll = -float(scores(averages, targets, temperature).mean())
        if averages[0].kind != "classes":
            return cls(nll)
        log_probs = torch.cat([a.parts[0].flatten(0, -2) for a in averages]).double()
        labels = torch.cat([y.flatten() for y in targets]).to(log_probs.device)
        counted = labels != averages[0].ignored
        probs = torch.softmax(log_probs[counted] / temperature, -1)
        labels = labels[counted]
        bins = calibration_bins(probs, labels)
        columns = zip(*(column.tolist() for column in (bins.count, bins.confidence, bins.accuracy)), strict=True)
        filled = tuple((number, sure, right) for number, sure, right in columns if number)
        return cls(nll, bins.expected_error, accuracy(probs, labels), filled)

    @property
    def shown_ece(self) -> float | None:
        """ECE, where there are enough examples for it to mean something."""
        return self.ece if sum(number for number, _, _ in self.reliability) >= FEW else None

    def __str__(self) -> str:
        text = f"NLL {self.nll:.4f}"
        if self.shown_ece is not None:
            text += f"  ECE {100 * self.shown_ece:4.1f} %"
        if self.accuracy is not None:
            text += f"  accuracy {100 * self.accuracy:.1f} %"
        return text


@dataclass(frozen=True)
class CalibrationReport:
    """What `calibrate_` chose, and how the network scores on the held-out examples that chose it.

    chosen            "learned": the spread that was learned; "start": the one that the network had; "none": the mean network.
    spread            by site, the deviations of the draws as a part of the values themselves (root mean squares).
    factors           by site, what the spread that the network had was multiplied by.
    temperature       of the averaged prediction, mean_temperature that of the mean network in one pass, draw_temperature that
                      of each draw before the average.
    before            the mean network as it was; temperature_scaled the same with `mean_temperature`; after: the result.
    gain, gain_error  NLL of temperature scaling minus that of the spread that was judged, and its standard error, on the
                      `judged` examples that were kept away from learning; on all where that is 0, since there were few.
    num_classes       of a classification, else 0.
    of_variance       whether the temperatures are factors on the variance of a prediction of numbers.
    tried             every spread that was tried, with its NLL on the examples that it was tried on.
    warming           whether `warm_up_` kept draws out of its training to the end.
    trained_without   whether the network was patched after its training (`bayesianize_`).
    passes            inputs that went through the network; scoring_passes those of the last scores.
    """

    chosen: Literal["learned", "start", "none"]
    spread: dict[str, float]
    factors: dict[str, float]
    temperature: float
    mean_temperature: float
    before: Scores
    temperature_scaled: Scores
    after: Scores
    gain: float | None
    gain_error: float | None
    num_held_out: int
    draws: int
    tried: tuple[Tried, ...]
    passes: int
    scoring_passes: int
    seconds: dict[str, float]
    draw_temperature: float = 1.0
    interrupted: bool = False
    views: str | None = None
    warming: bool = False
    trained_without: bool = False
    judged: int = 0
    of_variance: bool = False
    num_classes: int = 0

    @property
    def losses(self) -> tuple[float, ...]:
        """NLL of every spread that was tried, in the order of trying."""
        return tuple(one.nll for one in self.tried)

    def __str__(self) -> str:
        few = " (fewer than 100: these numbers are rough)" if self.num_held_out < FEW else ""
        lines = ["interrupted: the best until then was kept"] if self.interrupted else []
        lines += [
            f"on {self.num_held_out} held-out example{'s' * (self.num_held_out != 1)}{few}"
            + (f", views: {self.views}" if self.views else "")
        ]
        alone = f"{self._what} alone"
        width = max(len(f"{self.draws} draws"), len(alone))
        passes = "1 pass" if self.views is None else "its views"
        rows = [("as it was", passes, self.before), (alone, passes, self.temperature_scaled)]
        rows.append((f"{self.draws} draws" if self.chosen != "none" else "chosen", "", self.after))
        lines += [f"  {name:<{width}}  {scores}" + (f"  ({note})" if note else "") for name, note, scores in rows]
        lines.append(self._temperatures)
        lines += [text for text in (self.verdict, *self.remarks) if text]
        lines += reliability_lines(self.before, self.after)
        if self.chosen != "none":
            lines += bars(self.spread, self.factors)
        if self.tried:
            lines.append("tried   (spread, slope over the depth, NLL, number of examples)")
            lines += [
                f"  x{math.exp(one.level):<6.3g} {one.slope:+.1f}  {one.nll:8.4f}  {one.examples:<6} {one.layers}".rstrip()
                for one in self.tried
            ]
        lines.append(
            f"work    {self.passes:,} inputs through the network and {self.scoring_passes:,} for the last scores; "
            + ", ".join(f"{name} {value:.0f} s" for name, value in self.seconds.items())
        )
        return "\n".join(lines)

    @property
    def _temperatures(self) -> str:
        """In a line: the factor for one pass and, where draws were chosen, what is done to them and to their average."""
        one_pass = f"{self._what}: one pass {self._factor(self.mean_temperature)}"
        if self.chosen == "none":
            return one_pass
        average = self._factor(self.temperature)
        if self.draw_temperature == 1:
            return f"{one_pass}; average of {self.draws} draws {average}"
        return f"{one_pass}; {self.draws} draws {self.draw_temperature:.3f} each, then their average {average}"

    @property
    def _what(self) -> str:
        return "variance factor" if self.of_variance else "temperature"

    def _factor(self, value: float) -> str:
        return f"{value:.4g}" if self.of_variance else f"{value:.3f}"

    @property
    def verdict(self) -> str:
        """In a sentence or two: whether draws are better than the temperature alone."""
        if self.gain is None or self.gain_error is None:
            return ""
        if self.chosen == "none" or self.gain <= 0:
            return (
                f"Draws are not clearly better than the {self._what} alone here (gain in NLL {self.gain:.4f} +- "
                f'{self.gain_error:.4f}): predict in one pass, draws="mean".'
            )
        measured = f"NLL lower by {self.gain:.4f} +- {self.gain_error:.4f} than with the {self._what} alone"
        spread = "The spread that was learned" if self.chosen == "learned" else "The spread that it had"
        where = (
            f"{self.judged} examples that it was not learned on"
            if self.judged
            else "the examples that it was learned on"
        )
        chance = ' That may be chance; one pass, draws="mean", costs less.' if self.gain < 2 * self.gain_error else ""
        return f"{spread}: {measured}, on {where}.{chance}"

    @property
    def remarks(self) -> list[str]:
        """What is to be done, and what looks odd: in the report and on its page."""
        found = [self.warning] if self.warning else []
        if self.before.accuracy == 1 and self.num_held_out >= FEW:
            found.append(
                "All answers are right: was the network trained on these examples? Then nothing here means much."
            )
        if self.at_chance:
            found.append(
                "The answers are no better than guessing: is the network trained, are its weights loaded, and are inputs "
                "prepared and classes numbered as in training?"
            )
        before, after = self.before.shown_ece, self.after.shown_ece
        known = before is not None and after is not None
        if known and after > before + 0.005 and self.after.nll < self.before.nll:  # type: ignore[operator]
            found.append(
                "NLL is lower, ECE is higher: the two do not agree on this network. See the reliability below."
            )
        return found

    @property
    def at_chance(self) -> bool:
        """Whether it is right no more often than guessing among equally frequent classes, up to two standard errors."""
        if self.before.accuracy is None or not self.num_classes or self.num_held_out < FEW:
            return False
        guessing = 1 / self.num_classes
        return self.before.accuracy < guessing + 2 * math.sqrt(guessing * (1 - guessing) / self.num_held_out)

    @property
    def warning(self) -> str:
        """What to do about a classifier that is less sure than it could be, "" for all others."""
        if self.warming:
            return "It was trained without draws to the end: warm_up_, called before every epoch, never found it overconfident."
        if self.mean_temperature >= 1 or self.before.accuracy is None:
            return ""
        text = "The best temperature is below 1: the network is less sure than it could be."
        if self.trained_without:
            return f"{text} The temperature makes up for that; draws rarely gain more."
        if not self.factors:
            return f"{text} Patches would gain little."
        do = "more epochs, less noise (pb.mixed(0.25)) or pb.warm_up_; keep the lowest NLL."
        return f"{text}\nIf it was trained with patches: {do}"


@dataclass(frozen=True)
class BayesianizeReport:
    """What `bayesianize_` patched, and what `calibrate_` made of it.

    patch         the layers that were chosen.
    patch_bytes   what a file holds of the patches that the network has now; 0 where no draws were chosen and none are left.
    tried_bytes   the same of the patches that were tried.
    """

    patch: PatchReport
    calibration: CalibrationReport
    patch_bytes: int
    tried_bytes: int
    model_bytes: int
    call: str = field(default="")

    def __getattr__(self, name: str) -> Any:
        """The fields of `calibration` are also those of this report."""
        if name.startswith("_") or name == "calibration":
            raise AttributeError(name)
        return getattr(self.calibration, name)

    @property
    def size(self) -> str:
        """One sentence: what was added, and what a file holds of it, without names and digests."""
        if not self.patch_bytes:
            tried = f"no patches (those that were tried: {self.tried_bytes:,} bytes)"
            return f"{tried}; the network's own {self.model_bytes:,} bytes, and a {self.calibration._what}"
        added, share = self.patch.parameters_after - self.patch.parameters_before, self.patch_bytes / self.model_bytes
        return (
            f"{added:,} parameters were added; their values take {self.patch_bytes:,} bytes, {100 * share:.1f} % of the "
            f"network's {self.model_bytes:,}"
        )

    def __str__(self) -> str:
        patched = str(self.patch) if self.patch_bytes else f"tried, then removed: {self.patch}"
        return "\n".join([patched, "", str(self.calibration), f"size    {self.size}", "load    " + self.call])


def reliability_lines(before: Scores, after: Scores) -> list[str]:
    """How often the network was right among the answers of like confidence, in five bins, before and after."""
    if not (before.reliability and after.reliability):
        return []
    lines = ["reliability: share of correct answers at each confidence, before and after"]
    for number in range(_BINS):
        cells = []
        for one in (before, after):
            own = [bin for bin in one.reliability if min(int(bin[1] * _BINS), _BINS - 1) == number]
            total = sum(count for count, _, _ in own)
            right = sum(count * accuracy for count, _, accuracy in own)
            cells.append(f"{100 * right / total:3.0f} % of {total:<6}" if total else f"{'-':>3}{'':<12}")
        low = 100 * number // _BINS
        lines.append(f"  {low:3}-{low + 100 // _BINS:<3} %   {cells[0]}  {cells[1]}".rstrip())
    return lines


def bars(spread: Mapping[str, float], factors: Mapping[str, float]) -> list[str]:
    """A line for each site: its spread, a bar, and the factor that made it."""
    shown = {name: value for name, value in spread.items() if value > 0}
    if not shown:
        return []
    width, largest = max(len(name) for name in shown), max(shown.values())
    lines = ["spread of each site, as a part of its values"]
    for name, value in shown.items():
        bar = "#" * max(1, round(_BAR * value / largest))
        factor = f"  x{factors[name]:.2g}" if name in factors else ""
        lines.append(f"  {name:<{width}} {100 * value:6.2f} % {bar:<{_BAR}}{factor}")
    return lines
