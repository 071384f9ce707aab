"""How a classifier does on what it was not trained for: corrupted images, and inputs of another kind."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data import Preparation, Split
from ..data.corruptions import CORRUPTIONS, CorruptedSplit, Strengths
from ..errors import PatchbayesError
from ..metrics import (
    auroc,
    correct,
    corruption_errors,
    fpr_at_tpr,
    nll_per_example,
    relative_corruption_errors,
)
from ..prediction.predict import Sampling
from ..views import Views
from .answers import ClassAnswers, class_answers, fitting_batch_size
from .classification import bins_of
from .record import Corruptions, OutOfDistribution

_AT_ONCE = 500  # images held at a time


@dataclass(frozen=True)
class Classifier:
    """A network to be tested: its name, the preparation of its inputs (C, H, W), its number of classes, how it is drawn, and on
    which views."""

    name: str
    model: nn.Module
    preparation: Preparation
    input_shape: tuple[int, ...]
    num_classes: int
    sampling: Sampling = "balanced"
    views: Views | None = None

    def answers(self, raw: Tensor, targets: Tensor, draws: int) -> ClassAnswers:
        """The predictive on raw inputs."""
        size = fitting_batch_size(draws, self.num_classes)

        def batches() -> Iterator[tuple[Tensor, Tensor]]:
            for part, wanted in zip(raw.split(size), targets.split(size), strict=True):
                yield self.preparation.inputs(part), wanted

        return class_answers(self.model, batches(), draws, sampling=self.sampling, views=self.views)


def corruption_scores(
    classifiers: Sequence[Classifier],
    split: Split,
    draws: int,
    *,
    severities: Sequence[int] = (1, 2, 3, 4, 5),
    corrupted: Callable[[str, int], Split] | None = None,
    strengths: Strengths = "imagenet",
    seed: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> list[Corruptions]:
    """Error, NLL and ECE of each classifier under each of the fifteen corruptions, on the same corrupted images.

    Every image is read and corrupted once for all classifiers, and only a few hundred are held at a time.

    corrupted  name, severity -> corrupted examples that are there already; by default they are made from `split`, with
               strengths made for ImageNet or for small images.
    """
    tables = [{name: list[tuple[float, ...]]() for name in ("error", "nll", "ece")} for _ in classifiers]
    for corruption in CORRUPTIONS:
        rows: list[list[tuple[float, float, float]]] = [[] for _ in classifiers]
        for severity in severities:
            say(f"{corruption}, severity {severity}")
            part = (
                corrupted(corruption, severity)
                if corrupted
                else CorruptedSplit(split, corruption, severity, seed, strengths)
            )
            for row, scores in zip(rows, _pair_scores(classifiers, part, draws), strict=True):
                row.append(scores)
        for table, row in zip(tables, rows, strict=True):
            for name, values in zip(table, zip(*row, strict=True), strict=True):
                table[name].append(values)
    return [
        Corruptions(
            CORRUPTIONS,
            tuple(severities),
            error=tuple(table["error"]),
            nll=tuple(table["nll"]),
            ece=tuple(table["ece"]),
            draws=draws,
        )
        for table in tables
    ]


def _pair_scores(classifiers: Sequence[Classifier], part: Split, draws: int) -> list[tuple[float, float, float]]:
    """Error, NLL and ECE of each classifier on a part that is fetched once, block by block."""
    found: list[list[tuple[Tensor, Tensor, Tensor]]] = [[] for _ in classifiers]
    for indices in torch.arange(len(part)).split(_AT_ONCE):
        raw, targets = part.fetch(indices)
        for classifier, blocks in zip(classifiers, found, strict=True):
            log_probs = classifier.answers(raw, targets, draws).log_probs
            probs = log_probs.exp()
            blocks.append((correct(probs, targets), nll_per_example(log_probs, targets), probs.amax(1)))
    scores = []
    for blocks in found:
        right, loss, confidence = (torch.cat(column) for column in zip(*blocks, strict=True))
        error = 1 - float(right.double().mean())
        scores.append((error, float(loss.double().mean()), bins_of(confidence, right).expected_error))
    return scores


def compared_with(scores: Corruptions, reference: Corruptions, name: str) -> Corruptions:
    """The scores with mCE and relative mCE (tables 5, 7 and 8) against a network of that name, which has 100.

    They are None where they are not defined.
    """
    errors, others = (torch.tensor(one.error, dtype=torch.float64) for one in (scores, reference))
    assert scores.clean_error is not None
    assert reference.clean_error is not None
    found: dict[str, float | None] = {"mce": None, "relative_mce": None}
    with contextlib.suppress(PatchbayesError):  # the reference makes no error there
        found["mce"] = corruption_errors(errors, others).mean
    with contextlib.suppress(PatchbayesError):
        clean = (scores.clean_error, reference.clean_error)
        found["relative_mce"] = relative_corruption_errors(errors, clean[0], others, clean[1]).mean
    return replace(scores, mce=found["mce"], relative_mce=found["relative_mce"], reference=name)


def out_of_distribution(
    classifier: Classifier, known: ClassAnswers, other: Split, data: str, draws: int
) -> list[OutOfDistribution]:
    """How well uncertainty tells inputs of another kind, those of `data`, from the network's own.

    AUROC and FPR95, by entropy and, of several draws, by mutual information.

    Images of another size or number of channels are fitted: resized, and gray repeated or color averaged.
    """
    raw, _ = other.fetch(torch.arange(len(other)))
    unknown = classifier.answers(fitted(raw, classifier.input_shape), torch.zeros(len(raw), dtype=torch.int64), draws)
    scores = [("entropy", _entropy(known), _entropy(unknown))]
    if known.num_draws > 1:
        scores.append(("mutual information", known.mutual_information, unknown.mutual_information))
    return [
        OutOfDistribution(data, score, auroc(own, foreign), fpr_at_tpr(own, foreign)) for score, own, foreign in scores
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
