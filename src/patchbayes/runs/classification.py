"""What an evaluation says of a classifier: scores with intervals, calibration, coverage, examples."""

import io
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ..data import Split
from ..data.extras import optional
from ..metrics import (
    CalibrationBins,
    Interval,
    accuracy,
    adaptive_calibration_error,
    apply_temperature,
    aurc,
    bootstrap,
    brier_per_example,
    calibration_bins,
    calibration_floor,
    classwise_calibration_error,
    correct,
    coverage_curve,
    expected_calibration_error,
    fit_temperature,
    maximum_calibration_error,
    nll_per_example,
)
from ..metrics.calibration import bin_numbers
from .answers import ClassAnswers, ScoresAtDraws
from .record import (
    CoveragePoints,
    CurveScores,
    DrawsCurve,
    Example,
    Examples,
    Histogram,
    Metric,
    Reliability,
    Temperature,
)

_BINS = 20


def class_scores(log_probs: Tensor, targets: Tensor, replicates: int = 1000) -> dict[str, Metric]:
    """Every score with its bootstrap interval; beside the calibration errors the floor of a perfectly calibrated model."""
    probs = log_probs.exp()
    right = correct(probs, targets)

    def mean(values: Tensor) -> Interval:
        return bootstrap(torch.mean, values.double(), replicates=replicates)

    found = {
        "accuracy": as_metric(mean(right)),
        "nll": as_metric(mean(nll_per_example(log_probs, targets))),
        "brier": as_metric(mean(brier_per_example(probs, targets))),
        "aurc": as_metric(bootstrap(aurc, probs.amax(1), right, replicates=replicates)),
    }
    if probs.shape[1] > 5:
        found["top5_accuracy"] = as_metric(mean(correct(probs, targets, top=5)))
    errors: dict[str, Callable[..., float]] = {
        "ece": expected_calibration_error,
        "mce": maximum_calibration_error,
        "adaptive_ece": adaptive_calibration_error,
        "classwise_ece": classwise_calibration_error,
    }
    for name, error in errors.items():
        interval = bootstrap(error, probs, targets, replicates=replicates)
        floor = calibration_floor(probs, error, replicates=min(200, replicates)).mean
        found[name] = replace(as_metric(interval), floor=floor)
    return found


def temperature_scores(
    answers: ClassAnswers, fitted: ClassAnswers, fitted_on: str, replicates: int = 1000
) -> Temperature:
    """The scores after temperature scaling of the averaged prediction, the temperature fitted on other examples."""
    temperature = fit_temperature(fitted.log_probs, fitted.targets)
    scaled = apply_temperature(answers.log_probs.double(), temperature)
    return Temperature(temperature, fitted_on, class_scores(scaled, answers.targets, replicates))


def draws_curve(at_draws: dict[int, ScoresAtDraws]) -> DrawsCurve | None:
    """Accuracy, NLL, ECE and MCE against the number of draws: mean over repeats, and its standard error (None from one).

    Also the accuracy among five classes.
    """
    if not at_draws:
        return None
    scores = {}
    measures: dict[str, Callable[[ScoresAtDraws], Tensor]] = {
        "accuracy": lambda scores: scores.correct.double().mean(1),
        "nll": lambda scores: -scores.log_prob.double().mean(1),
        "top5_accuracy": lambda scores: scores.within_five.double().mean(1),
        "ece": lambda scores: torch.tensor([bins.expected_error for bins in _bins(scores)]),
        "mce": lambda scores: torch.tensor([bins.maximum_error for bins in _bins(scores)]),
    }
    for name, measure in measures.items():
        repeats = [measure(scores).double() for scores in at_draws.values()]
        means, errors = ([of(values) for values in repeats] for of in (_mean, _standard_error))
        scores[name] = CurveScores(tuple(means), tuple(errors))
    return DrawsCurve(tuple(at_draws), scores)


def _mean(values: Tensor) -> float | None:
    return float(values.mean())


def _standard_error(values: Tensor) -> float | None:
    return float(values.std() / len(values) ** 0.5) if len(values) > 1 else None


def _bins(scores: ScoresAtDraws) -> list[CalibrationBins]:
    """The bins of each repeat."""
    return [bins_of(*row) for row in zip(scores.confidence, scores.correct, strict=True)]


def bins_of(confidence: Tensor, right: Tensor) -> CalibrationBins:
    """The paper's bins from the top probability (N,) of each example and whether it was right (N,)."""
    values = torch.stack([torch.ones_like(confidence), confidence, right.to(confidence)]).double()
    sums = values.new_zeros(3, _BINS).index_add(1, bin_numbers(confidence, _BINS), values)
    return CalibrationBins.from_sums(sums, min_count=6)


def shapes_of_confidence(answers: ClassAnswers) -> tuple[Reliability, Histogram, CoveragePoints]:
    """The reliability diagram, the histogram of confidence and the accuracy-coverage curve."""
    probs, targets = answers.probs, answers.targets
    confidence, right = probs.amax(1), correct(probs, targets).bool()
    bins = calibration_bins(probs, targets, _BINS)
    places = bin_numbers(confidence, _BINS)
    curve = coverage_curve(confidence, right, points=min(100, len(targets)))

    def counts(which: Tensor) -> tuple[int, ...]:
        return tuple(torch.bincount(places[which], minlength=_BINS).tolist())

    return (
        Reliability(tuple(bins.count.tolist()), known(bins.confidence), known(bins.accuracy)),
        Histogram(tuple(i / _BINS for i in range(_BINS + 1)), counts(right), counts(~right)),
        CoveragePoints(tuple(curve.coverage.tolist()), known(curve.accuracy)),
    )


def known(values: Tensor) -> tuple[float | None, ...]:
    """Numbers of a record: None in place of NaN."""
    return tuple(None if value != value else value for value in values.tolist())


def extreme_examples(answers: ClassAnswers, split: Split, classes: tuple[str, ...], number: int = 8) -> Examples:
    """The inputs of which the network is most and least certain, as pictures where they are images."""
    probs = answers.probs
    order = probs.amax(1).argsort(descending=True)
    most, least = (
        tuple(_example(int(i), answers, probs, split, classes) for i in which[:number])
        for which in (order, order.flip(0))
    )
    return Examples(most, least)


def _example(i: int, answers: ClassAnswers, probs: Tensor, split: Split, classes: tuple[str, ...]) -> Example:
    raw, _ = split.fetch(torch.tensor([i]))
    named = int(probs[i].argmax())
    return Example(
        i,
        classes[int(answers.targets[i])],
        classes[named],
        float(probs[i, named]),
        float(answers.mutual_information[i]),
        _png(raw[0]) if raw.dim() == 4 else None,
    )


def _png(pixels: Tensor) -> bytes:
    """Pixels (C, H, W) as a PNG, small ones enlarged by a whole factor to be seen."""
    pillow = optional("PIL.Image", "cli", "writing pictures of examples")
    factor = max(1, 64 // max(pixels.shape[1:]))
    large = pixels.repeat_interleave(factor, 1).repeat_interleave(factor, 2)
    array = large.permute(1, 2, 0).numpy() if len(large) == 3 else large[0].numpy()
    content = io.BytesIO()
    pillow.fromarray(array).save(content, format="PNG", optimize=True)
    return content.getvalue()


def as_metric(interval: Interval) -> Metric:
    return Metric(interval.value, interval.low, interval.high)


def clean_error(answers: ClassAnswers) -> float:
    return 1 - accuracy(answers.probs, answers.targets)
