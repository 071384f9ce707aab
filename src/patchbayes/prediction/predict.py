"""predict: the posterior predictive of a patched network."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ..draws import Draws, network_of
from ..errors import PatchbayesError
from ..likelihoods import Categorical, Gaussian, Likelihood, checked_likelihood
from ..network import Network
from .loop import loop, undisturbed
from .moments import MonteCarloMean
from .prediction import ClassPrediction, Prediction, RegressionPrediction


def predict(
    model: nn.Module,
    inputs: Any,
    draws: int | Draws = 20,
    *,
    likelihood: Likelihood | None = None,
    keep_draws: bool = False,
    generator: torch.Generator | None = None,
    select: Callable[[Any], Any] | None = None,
    output: Callable[[Any], Tensor] | None = None,
) -> Any:
    """The posterior predictive p(y | x) = (1/S) sum_s p(y | x, w_s), w_s ~ q (Algorithm 1, appendix B.3).

    inputs      a tensor (one batch), a tuple (several arguments) or mapping (keywords) of tensors, or any iterable of batches
                such as a DataLoader; of a batch that is a tuple or list the first element is the input, the rest (labels)
                is left, unless `select` says otherwise. Batches go to the network's device.
    draws       a number S of independent draws, or `Draws`; the same draws serve all inputs.
    likelihood  `Categorical()` (default) for a `ClassPrediction`, `Gaussian(precision)` for a `RegressionPrediction`.
    keep_draws  keep what each draw said; memory then grows with S. Needed for quantiles, log_prob and samples.
    generator   source of the seed where `draws` is a number; without one the seed is 0, so that a call can be repeated.
    select      batch -> inputs, for batches that are made otherwise.
    output      network output -> tensor, for networks that return something else (a `.logits` attribute is found).

    The network runs in evaluation mode without gradients and comes back exactly as it was, also after an error.
    """
    network: Network = network_of(model)
    chosen = _checked_draws(model, network, draws, generator)
    likelihood = checked_likelihood(likelihood or Categorical())
    parts: list[Prediction] = []
    first = 0
    with undisturbed(model, network):
        for batch in _batches(inputs, select):
            batch = _to_device(batch, network.device)
            size = _batch_size(batch)
            examples = torch.arange(first, first + size)
            values = loop(model, network, batch, chosen, examples, output or _as_tensor)
            if isinstance(likelihood, Categorical):
                parts.append(_predict_classes(values, chosen, likelihood, keep_draws))
            else:
                parts.append(_predict_means(values, chosen, likelihood, keep_draws))
            first += size
    if not parts:
        raise PatchbayesError(
            "predict: the inputs hold no batch; an iterable must give at least one (is the loader empty?)."
        )
    return parts[0] if len(parts) == 1 else type(parts[0]).concatenate(parts)


class Predictor(nn.Module):
    """A module that answers with the posterior predictive, for pipelines that call a model and expect an answer.

    Its output is the averaged log-probabilities (B, C), or for `Gaussian` the pair mean (B, D), variance (B, D). The draws
    are made once: the same input always gives the same answer. No gradients. Arguments as in `predict`.
    """

    def __init__(
        self,
        model: nn.Module,
        draws: int | Draws = 20,
        likelihood: Likelihood | None = None,
        *,
        generator: torch.Generator | None = None,
        select: Callable[[Any], Any] | None = None,
        output: Callable[[Any], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.draws = _checked_draws(model, network_of(model), draws, generator)
        self.likelihood = checked_likelihood(likelihood or Categorical())
        self.select, self.output = select, output

    def forward(self, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, Tensor]:
        inputs = kwargs or (args if len(args) != 1 else args[0])
        if args and kwargs:
            raise PatchbayesError("Predictor: give all inputs by position or all by keyword.")
        prediction = predict(
            self.model, inputs, self.draws, likelihood=self.likelihood, select=self.select, output=self.output
        )
        if isinstance(prediction, ClassPrediction):
            return prediction.log_probs
        return prediction.mean, prediction.variance


def _predict_classes(values: Iterator[Tensor], draws: Draws, likelihood: Categorical, keep: bool) -> ClassPrediction:
    probs, entropy = MonteCarloMean(draws), MonteCarloMean(draws)
    log_mean = torch.full((), -torch.inf)  # beside the mean, since probabilities may underflow
    kept: list[Tensor] = []
    dtype = torch.float32
    for value, weight in zip(values, draws.weights.tolist(), strict=True):
        dtype = torch.promote_types(value.dtype, torch.float32)
        draw_log_probs = likelihood.log_probs(value.to(_accumulator(value)))
        draw_probs = draw_log_probs.exp()
        probs.add(draw_probs, weight)
        if weight:
            log_mean = torch.logaddexp(log_mean.to(draw_log_probs), draw_log_probs + math.log(weight))
        entropy.add(torch.special.entr(draw_probs).sum(-1), weight)
        if keep:
            kept.append(draw_probs.to(dtype))
    return ClassPrediction(
        num_draws=len(draws),
        standard_error_kind=probs.kind,
        weights=draws.weights,
        probs=probs.mean.to(dtype),
        log_probs=log_mean.to(dtype),
        standard_error=probs.standard_error.to(dtype),
        expected_entropy=entropy.mean.to(dtype),
        draw_probs=torch.stack(kept) if keep else None,
    )


def _predict_means(values: Iterator[Tensor], draws: Draws, likelihood: Gaussian, keep: bool) -> RegressionPrediction:
    means, products = MonteCarloMean(draws), MonteCarloMean(draws)
    kept: list[Tensor] = []
    dtype, origin = torch.float32, torch.zeros(())
    for value, weight in zip(values, draws.weights.tolist(), strict=True):
        dtype = torch.promote_types(value.dtype, torch.float32)
        value = value.unsqueeze(-1) if value.dim() == 1 else value
        if value.dim() != 2:
            raise PatchbayesError(
                f"predict: a regression network returns (B, D) or (B,), this one {tuple(value.shape)}.\n"
                "  do       pass output=lambda y: y.flatten(1)."
            )
        wide = value.to(_accumulator(value))
        origin = wide if means.all.count == 0 else origin
        means.add(wide, weight)
        centered = wide - origin  # shifted by the first draw, so that products do not cancel
        products.add(centered.unsqueeze(-1) * centered.unsqueeze(-2), weight)
        if keep:
            kept.append(value.to(dtype))
    shift = means.mean - origin
    covariance = products.mean - shift.unsqueeze(-1) * shift.unsqueeze(-2)
    return RegressionPrediction(
        num_draws=len(draws),
        standard_error_kind=means.kind,
        weights=draws.weights,
        mean=means.mean.to(dtype),
        standard_error=means.standard_error.to(dtype),
        epistemic_covariance=covariance.to(dtype),
        precision=float(likelihood.precision),
        draw_means=torch.stack(kept) if keep else None,
    )


def _checked_draws(model: nn.Module, network: Network, draws: Any, generator: torch.Generator | None) -> Draws:
    if isinstance(draws, Draws):
        if generator is not None:
            raise PatchbayesError("generator= is for making draws; the draws given were made already.")
        network.check(draws)
        if not len(draws):
            raise PatchbayesError("predict: the given Draws hold no draw; at least one is needed.")
        return draws
    return Draws.sample(model, draws, generator)


def _batches(inputs: Any, select: Callable[[Any], Any] | None) -> Iterator[Any]:
    if isinstance(inputs, Tensor | tuple | Mapping):
        yield inputs if select is None else select(inputs)
        return
    if not isinstance(inputs, Iterable):
        raise PatchbayesError(f"predict: inputs are tensors or an iterable of batches, not a {type(inputs).__name__}.")
    for batch in inputs:
        if select is not None:
            yield select(batch)
        else:
            yield batch[0] if isinstance(batch, tuple | list) else batch


def _to_device(batch: Any, device: torch.device | None) -> Any:
    if isinstance(batch, Mapping):
        batch = dict(batch)
    for place, leaf in enumerate(tree_leaves(batch)):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and torch.isnan(leaf).any():
            raise PatchbayesError(
                f"predict: input tensor {place} holds NaN, {int(torch.isnan(leaf).sum())} of {leaf.numel()} values."
            )
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, batch)


def _batch_size(batch: Any) -> int:
    sizes = [leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]
    if not sizes:
        raise PatchbayesError("predict: a batch holds no tensor; give tensors, or select=batch -> inputs.")
    return sizes[0]


def _as_tensor(value: Any) -> Tensor:
    found = value if isinstance(value, Tensor) else getattr(value, "logits", None)
    if isinstance(found, Tensor):
        return found
    raise PatchbayesError(
        f"predict: the network returns a {type(value).__name__}; a tensor (or a .logits) is required.\n"
        "  do       pass output=lambda y: y[...] that picks it."
    )


def _accumulator(value: Tensor) -> torch.dtype:
    return torch.float32 if value.device.type == "mps" else torch.float64
