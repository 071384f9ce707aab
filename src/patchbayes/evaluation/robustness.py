"""How a classifier does on what it was not trained for: corrupted images, and inputs of another kind."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data import Preparation, Split
from ..data.corruptions import CORRUPTIONS, CorruptedSplit
from ..errors import PatchbayesError
from ..metrics import (
    accuracy,
    auroc,
    corruption_errors,
    expected_calibration_error,
    fpr_at_tpr,
    nll,
    relative_corruption_errors,
)
from .answers import ClassAnswers, class_answers, fitting_batch_size


@dataclass(frozen=True)
class Classifier:
    """A network to be tested: its name, the preparation of its inputs (C, H, W), its number of classes."""

    name: str
    model: nn.Module
    preparation: Preparation
    input_shape: tuple[int, ...]
    num_classes: int

    def answers(self, raw: Tensor, targets: Tensor, draws: int) -> ClassAnswers:
        """The predictive on raw inputs."""
        size = fitting_batch_size(draws, self.num_classes)

        def batches() -> Iterator[tuple[Tensor, Tensor]]:
            for part, wanted in zip(raw.split(size), targets.split(size), strict=True):
                yield self.preparation.inputs(part), wanted

        return class_answers(self.model, batches(), draws)


def corruption_scores(
    classifiers: Sequence[Classifier],
    split: Split,
    draws: int,
    *,
    severities: Sequence[int] = (1, 2, 3, 4, 5),
    corrupted: Callable[[str, int], Split] | None = None,
    seed: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> list[dict[str, Any]]:
    """Error, NLL and ECE of each classifier under each of the fifteen corruptions, on the same corrupted images.

    corrupted  name, severity -> corrupted examples that are there already; by default they are made from `split`.
    """
    found: list[dict[str, Any]] = [
        {"names": list(CORRUPTIONS), "severities": list(severities), "error": [], "nll": [], "ece": []}
        for _ in classifiers
    ]
    for name in CORRUPTIONS:
        lines: list[dict[str, list[float]]] = [{"error": [], "nll": [], "ece": []} for _ in classifiers]
        for severity in severities:
            say(f"{name}, severity {severity}")
            part = corrupted(name, severity) if corrupted else CorruptedSplit(split, name, severity, seed)
            raw, targets = part.fetch(torch.arange(len(part)))
            for classifier, line in zip(classifiers, lines, strict=True):
                log_probs = classifier.answers(raw, targets, draws).log_probs
                line["error"].append(1 - accuracy(log_probs.exp(), targets))
                line["nll"].append(nll(log_probs, targets))
                line["ece"].append(expected_calibration_error(log_probs.exp(), targets))
        for scores, line in zip(found, lines, strict=True):
            for key, values in line.items():
                scores[key].append(values)
    return found


def compared_with(scores: dict[str, Any], clean: float, reference: Mapping[str, Any], reference_clean: float) -> None:
    """Add mCE and relative mCE (tables 5, 7 and 8) against a reference network, which has 100; None where not defined."""
    errors, others = (torch.tensor(s["error"], dtype=torch.float64) for s in (scores, reference))
    for key in ("mce", "relative_mce"):
        try:
            if key == "mce":
                scores[key] = corruption_errors(errors, others).mean
            else:
                scores[key] = relative_corruption_errors(errors, clean, others, reference_clean).mean
        except PatchbayesError:  # the reference makes no error there
            scores[key] = None


def out_of_distribution(classifier: Classifier, known: ClassAnswers, other: Split, draws: int) -> list[dict[str, Any]]:
    """How well uncertainty tells inputs of another kind from the network's own: AUROC and FPR95, by entropy and, of
    several draws, by mutual information.

    Images of another size or number of channels are fitted: resized, and gray repeated or color averaged.
    """
    raw, _ = other.fetch(torch.arange(len(other)))
    unknown = classifier.answers(fitted(raw, classifier.input_shape), torch.zeros(len(raw), dtype=torch.int64), draws)
    scores = [("entropy", _entropy(known), _entropy(unknown))]
    if known.num_draws > 1:
        scores.append(("mutual information", known.mutual_information, unknown.mutual_information))
    return [
        {"score": score, "auroc": auroc(own, foreign), "fpr95": fpr_at_tpr(own, foreign)}
        for score, own, foreign in scores
    ]


def fitted(raw: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Raw inputs made to the shape (C, H, W) or (F,) of another data set; the dtype stays."""
    if raw.shape[1:] == shape:
        return raw
    if raw.dim() != 4 or len(shape) != 3:
        raise PatchbayesError(
            f"inputs of shape {tuple(raw.shape[1:])} cannot be made into {shape}: only images can be fitted to images."
        )
    pixels = raw.float()
    if raw.shape[1] != shape[0]:
        pixels = pixels.mean(1, keepdim=True).expand(-1, shape[0], -1, -1)
    if tuple(raw.shape[2:]) != tuple(shape[1:]):
        pixels = F.interpolate(pixels, size=tuple(shape[1:]), mode="bilinear", antialias=True)
    return pixels.round().clamp(0, 255).to(raw.dtype)


def _entropy(answers: ClassAnswers) -> Tensor:
    return torch.special.entr(answers.probs).sum(-1)
