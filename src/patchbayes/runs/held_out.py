"""How good the network is on the examples held out, while it trains."""

import itertools
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..data import Dataset, Split
from ..likelihoods import Categorical, Likelihood
from ..patching.patch import is_patched
from ..patching.selection import evaluating
from ..prediction import predict
from ..ranks import rank_and_number, share_buffers_, summed


def held_out_scores(
    network: nn.Module,
    dataset: Dataset,
    split: Split,
    likelihood: Likelihood,
    draws: int,
    batch_size: int,
    stopped: Callable[[], bool] = lambda: False,
) -> dict[str, float] | None:
    """Scores of the average over a few draws: NLL in nats per example, and accuracy, or RMSE in the targets' own units.

    The NLL of a regression is minus the log density of the targets in their own units. None if `stopped` before the end. Of
    several processes each scores its part of the batches, and all have the scores.
    """
    device = next(network.parameters()).device
    units = torch.tensor(dataset.preparation.target_std, dtype=torch.float64)
    rank, ranks = rank_and_number()
    share_buffers_(network)
    log_prob, score, asked = 0.0, 0.0, False
    for inputs, targets in itertools.islice(dataset.batches(split, batch_size), rank, None, ranks):
        if stopped():
            asked = True
            break
        chosen, points = _scores(network, inputs.to(device), targets.to(device), likelihood, draws, units.to(device))
        log_prob, score = log_prob + float(chosen.double().sum()), score + float(points.double().sum())
    sums = torch.tensor([log_prob, score, float(asked)], dtype=torch.float64)
    log_prob, score, asked = summed(sums).tolist()
    if asked:
        return None
    nll, mean = -log_prob / len(split), score / len(split)
    if isinstance(likelihood, Categorical):
        return {"held_out_nll": nll, "held_out_accuracy": mean}
    return {"held_out_nll": nll + float(units.log().sum()), "held_out_rmse": math.sqrt(mean)}


def _scores(
    network: nn.Module, inputs: Tensor, targets: Tensor, likelihood: Likelihood, draws: int, units: Tensor
) -> tuple[Tensor, Tensor]:
    """log p(y) and correctness, or squared error (mean over targets), of each example: (B,), (B,)."""
    classes = isinstance(likelihood, Categorical)
    if not is_patched(network):
        with evaluating(network):
            outputs = network(inputs).float()
            log_prob = likelihood.log_prob(outputs[None], targets)[0]
    else:
        # The loop: the engine may compute draws together or not, as timing says, which would change the last bits.
        prediction = predict(network, inputs, draws, likelihood=likelihood, engine="loop", keep_draws=not classes)
        if classes:
            outputs = prediction.log_probs
            log_prob = outputs.gather(1, targets[:, None])[:, 0]
        else:
            outputs, log_prob = prediction.mean, prediction.log_prob(targets)
    if classes:
        return log_prob, outputs.argmax(1) == targets
    return log_prob, ((outputs - targets).double() * units).square().mean(1)
