"""From the outputs of draws to a prediction: running averages, whichever engine and order the outputs come in."""

import torch
from torch import Tensor

from ..draws import Draws
from ..errors import PatchbayesError
from ..likelihoods import Categorical, Gaussian, Likelihood
from .loop import Members, Outputs
from .moments import Moments, MonteCarloMean
from .plan import Plan
from .prediction import ClassPrediction, RegressionPrediction


def average(
    outputs: Outputs, draws: Draws, likelihood: Likelihood, keep: bool, plan: Plan
) -> ClassPrediction | RegressionPrediction:
    """The prediction for one batch."""
    if isinstance(likelihood, Categorical):
        return _classes(outputs, draws, likelihood, keep, plan)
    return _means(outputs, draws, likelihood, keep, plan)


def _classes(outputs: Outputs, draws: Draws, likelihood: Categorical, keep: bool, plan: Plan) -> ClassPrediction:
    probs, entropy = MonteCarloMean(draws), Moments()
    log_mean = torch.full((), -torch.inf)  # beside the mean, since probabilities may underflow
    kept = _Kept(draws) if keep else None
    dtype = torch.float32
    for members, values in outputs:
        dtype = torch.promote_types(values.dtype, torch.float32)
        log_probs = likelihood.log_probs(values.to(accumulator(values)), lead=1)
        draw_probs = log_probs.exp()
        weights = probs.weights_of(members).to(log_probs)
        probs.add(members, draw_probs, weights)
        entropy.add(torch.special.entr(draw_probs).sum(-1), weights)
        log_weights = weights.log().reshape(-1, *[1] * (log_probs.dim() - 1))
        log_mean = torch.logaddexp(log_mean.to(log_probs), torch.logsumexp(log_probs + log_weights, dim=0))
        if kept is not None:
            kept.add(members, draw_probs.to(dtype))
    return ClassPrediction(
        num_draws=len(draws),
        standard_error_kind=probs.kind,
        weights=draws.weights,
        draws=draws,
        plan=plan,
        draws_used=torch.full(probs.mean.shape[:1], len(draws)),
        probs=probs.mean.to(dtype),
        log_probs=log_mean.to(dtype),
        standard_error=probs.standard_error.to(dtype),
        expected_entropy=entropy.mean.to(dtype),
        draw_probs=kept.values if kept is not None else None,
    )


def _means(outputs: Outputs, draws: Draws, likelihood: Gaussian, keep: bool, plan: Plan) -> RegressionPrediction:
    means, products = MonteCarloMean(draws), Moments()
    kept = _Kept(draws) if keep else None
    dtype, origin = torch.float32, None
    for members, values in outputs:
        dtype = torch.promote_types(values.dtype, torch.float32)
        values = values.unsqueeze(-1) if values.dim() == 2 else values
        if values.dim() != 3:
            raise PatchbayesError(
                f"predict: a regression network returns (B, D) or (B,), this one {tuple(values.shape[1:])}.\n"
                "  do       pass output=lambda y: y.flatten(1)."
            )
        wide = values.to(accumulator(values))
        origin = wide[0] if origin is None else origin
        weights = means.weights_of(members).to(wide)
        means.add(members, wide, weights)
        centered = wide - origin  # shifted by the first draw, so that products do not cancel
        products.add(centered.unsqueeze(-1) * centered.unsqueeze(-2), weights)
        if kept is not None:
            kept.add(members, values.to(dtype))
    assert origin is not None
    shift = means.mean - origin
    covariance = products.mean - shift.unsqueeze(-1) * shift.unsqueeze(-2)
    return RegressionPrediction(
        num_draws=len(draws),
        standard_error_kind=means.kind,
        weights=draws.weights,
        draws=draws,
        plan=plan,
        draws_used=torch.full(means.mean.shape[:1], len(draws)),
        mean=means.mean.to(dtype),
        standard_error=means.standard_error.to(dtype),
        epistemic_covariance=covariance.to(dtype),
        precision=float(likelihood.precision),
        draw_means=kept.values if kept is not None else None,
    )


class _Kept:
    """Every draw's value, (S, B, ...), filled in any order."""

    def __init__(self, draws: Draws) -> None:
        self.number = len(draws)
        self.values: Tensor | None = None

    def add(self, members: Members, values: Tensor) -> None:
        if self.values is None:
            self.values = torch.empty(self.number, *values.shape[1:], dtype=values.dtype, device=values.device)
        for some, value in zip(members, values, strict=True):
            self.values[some] = value


def accumulator(value: Tensor) -> torch.dtype:
    """Sums are kept in double precision where the device has it."""
    return torch.float32 if value.device.type == "mps" else torch.float64
