"""What a network answers on a set of examples: the predictive of each, and how it depends on the number of draws."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..draws.draws import Draws
from ..likelihoods import Gaussian
from ..patching.network import network_of
from ..patching.patch import is_patched
from ..patching.selection import evaluating
from ..prediction.on_ranks import predict_on_ranks
from ..prediction.predict import Sampling, make_draws
from ..ranks import exchanged, part_of, rank_and_number
from ..views import Views

_KEPT = 2**26  # values of single draws held at a time: 256 MB
_TOP = 5
_REPEATS = 10  # at most so many groups of S draws tell how much a score at S draws varies


@dataclass(frozen=True)
class ScoresAtDraws:
    """How groups of S draws answered: each row (R, N) is the average of another S draws.

    within_five: whether the target is among the five most probable classes.
    """

    log_prob: Tensor
    confidence: Tensor
    correct: Tensor
    within_five: Tensor


@dataclass(frozen=True)
class ClassAnswers:
    """The predictive of a classifier on N examples.

    log_probs (N, C), targets (N,), mutual_information (N,), disagreement (N,): the share of pairs of draws that name
    different classes. `at_draws`: for each S of the curve. num_draws: how many networks were averaged; exact: all there are.
    """

    log_probs: Tensor
    targets: Tensor
    mutual_information: Tensor
    disagreement: Tensor
    at_draws: dict[int, ScoresAtDraws]
    num_draws: int
    exact: bool

    @property
    def probs(self) -> Tensor:
        return self.log_probs.exp()


@dataclass(frozen=True)
class ValueAnswers:
    """The predictive of a regression on N examples, in the units of the targets.

    means (S, N, D), weights (S,), deviation (D,): of the noise; targets (N, D). num_draws and exact as in `ClassAnswers`.
    """

    means: Tensor
    weights: Tensor
    deviation: Tensor
    targets: Tensor
    num_draws: int
    exact: bool


Batches = Iterable[tuple[Tensor, Tensor]]


def class_answers(
    model: nn.Module,
    batches: Batches,
    draws: int,
    *,
    curve: Iterable[int] = (),
    sampling: Sampling = "balanced",
    views: Views | None = None,
) -> ClassAnswers:
    """The predictive of a classifier, patched or not, with the scores of smaller numbers of draws beside it.

    An unpatched network answers once; its mutual information and disagreement are zero. A point S of the curve comes from
    groups of S draws of the kind that `predict` makes for S by that `sampling`; where it would take all networks there are,
    from stratified ones (independent ones for "iid"). `views` are those of `predict`.
    """
    if not is_patched(model):
        return _plain_class_answers(model, batches)
    taken = make_draws(model, network_of(model), draws, sampling, None)
    points = [number for number in curve if number <= draws]
    pools = _pools(model, taken, points, draws, sampling)
    parts: list[tuple[Tensor, ...]] = []
    scores: dict[int, list[tuple[Tensor, ...]]] = {number: [] for number in points}
    for inputs, targets in batches:
        prediction = predict_on_ranks(model, inputs, taken, keep_draws=True, views=views)
        unlike = _disagreement(prediction.draw_probs.argmax(-1), prediction.weights)
        parts.append((prediction.log_probs, targets, prediction.mutual_information, unlike))
        for pool, numbers in pools:
            kept = prediction if pool is taken else predict_on_ranks(model, inputs, pool, keep_draws=True, views=views)
            for number in numbers:
                scores[number].append(_scores_of_groups(number, kept.draw_probs, targets, kept.temperature))
    joined = [torch.cat(column).cpu() for column in zip(*parts, strict=True)]
    at_draws = {
        number: ScoresAtDraws(*(torch.cat(column, dim=1).cpu() for column in zip(*rows, strict=True)))
        for number, rows in scores.items()
    }
    return ClassAnswers(joined[0], joined[1], joined[2], joined[3], at_draws, len(taken), taken.is_exact)


def _pools(
    model: nn.Module, taken: Draws, points: Iterable[int], draws: int, sampling: Sampling
) -> list[tuple[Draws, list[int]]]:
    """Draws that are cut into groups, each kind with its numbers of draws; `taken` itself where it is of that kind."""
    makers = {"iid": Draws.sample, "stratified": Draws.stratified, "orthogonal": Draws.orthogonal}
    of_kind: dict[str, list[int]] = {}
    for number in points:
        (kind,) = make_draws(model, network_of(model), number, sampling, None).schemes
        if kind not in makers:
            kind = "iid" if sampling == "iid" else "stratified"
        of_kind.setdefault(kind, []).append(number)
    return [
        (
            taken if taken.schemes == {kind} else makers[kind](model, min(draws, _REPEATS * max(numbers))),
            numbers,
        )
        for kind, numbers in of_kind.items()
    ]


def plain_outputs(model: nn.Module, inputs: Tensor) -> Tensor:
    """The output (B, ...) of an unpatched network in evaluation mode; of several processes each computes its part."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    rank, ranks = rank_and_number()
    parts = min(ranks, len(inputs))
    own = part_of(len(inputs), min(rank, parts - 1), parts)
    with evaluating(model):
        output: Any = model(inputs[own.start : own.stop].to(device))
    return torch.cat(exchanged(torch.as_tensor(getattr(output, "logits", output)))[:parts])


def fitting_batch_size(draws: int, outputs: int, largest: int = 256) -> int:
    """A batch so small that what every draw says of it fits into memory easily."""
    return max(1, min(largest, _KEPT // (draws * outputs)))


def _scores_of_groups(size: int, draw_probs: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, ...]:
    """The parts of `ScoresAtDraws` (R, B), of averages over R disjoint groups of `size` draws."""
    repeats = min(_REPEATS, len(draw_probs) // size)
    means = draw_probs[: repeats * size].unflatten(0, (repeats, size)).mean(1)
    if temperature != 1:
        means = torch.softmax(means.log() / temperature, -1)
    targets = targets.to(means.device)
    confidence, named = means.max(-1)
    chosen = means.gather(-1, targets.expand(repeats, -1).unsqueeze(-1)).squeeze(-1)
    best = means.topk(min(_TOP, means.shape[-1]), -1).indices
    within = (best == targets.unsqueeze(-1)).any(-1)
    return chosen.clamp_min(torch.finfo(means.dtype).tiny).log(), confidence, named == targets, within


def _disagreement(named: Tensor, weights: Tensor) -> Tensor:
    """(B,): the probability that two different draws of `named` (S, B) name different classes; 0 for a single draw."""
    weights = weights.to(named.device)
    same = torch.zeros(named.shape[1], dtype=torch.float64, device=named.device)
    for draw in range(len(named)):
        same += weights[draw] * (weights.unsqueeze(1) * (named == named[draw])).sum(0)
    itself = weights.square().sum()
    return (1 - (same - itself) / (1 - itself)).clamp_min(0) if len(named) > 1 else torch.zeros_like(same)


def value_answers(
    model: nn.Module,
    batches: Batches,
    draws: int,
    likelihood: Gaussian,
    mean: Tensor,
    std: Tensor,
    sampling: Sampling = "balanced",
) -> ValueAnswers:
    """The predictive of a regression; `mean` and `std` (D,) bring the standardized outputs and targets to target units."""
    mean, std = mean.double(), std.double()
    means, targets = [], []
    taken = make_draws(model, network_of(model), draws, sampling, None) if is_patched(model) else None
    weights = torch.ones(1, dtype=torch.float64)
    for inputs, wanted in batches:
        if taken is not None:
            prediction = predict_on_ranks(model, inputs, taken, likelihood=likelihood, keep_draws=True)
            kept, weights = prediction.draw_means, prediction.weights
        else:
            kept = plain_outputs(model, inputs).unsqueeze(0)
        means.append(kept.cpu().double() * std + mean)
        targets.append(wanted.cpu().double() * std + mean)
    deviation = std * float(likelihood.precision) ** -0.5
    joined = torch.cat(means, dim=1)
    return ValueAnswers(joined, weights, deviation, torch.cat(targets), len(joined), taken is None or taken.is_exact)


def _plain_class_answers(model: nn.Module, batches: Batches) -> ClassAnswers:
    log_probs, targets = [], []
    for inputs, wanted in batches:
        log_probs.append(torch.log_softmax(plain_outputs(model, inputs).float(), -1).cpu())
        targets.append(wanted.cpu())
    joined, none = torch.cat(log_probs), torch.zeros(sum(map(len, targets)))
    return ClassAnswers(joined, torch.cat(targets), none, none, {}, 1, True)
