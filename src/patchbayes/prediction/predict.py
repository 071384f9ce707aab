"""predict: the posterior predictive of a patched network."""

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, Literal, TypedDict, Unpack

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ..draws import Draws, network_of
from ..errors import PatchbayesError
from ..likelihoods import Categorical, Likelihood, checked_likelihood
from ..network import Network
from .adaptive import until_sure
from .averages import average
from .engine import Engine
from .loop import undisturbed
from .memory import keep_freed_memory
from .prediction import ClassPrediction, Prediction

Sampling = Literal["balanced", "stratified", "orthogonal", "iid"]


def predict(
    model: nn.Module,
    inputs: Any,
    draws: int | Draws | Literal["exact"] = 20,
    *,
    likelihood: Likelihood | None = None,
    keep_draws: bool = False,
    tolerance: float | None = None,
    sampling: Sampling = "balanced",
    engine: Literal["auto", "loop"] = "auto",
    compile: bool = False,
    memory_limit: int | None = None,
    generator: torch.Generator | None = None,
    select: Callable[[Any], Any] | None = None,
    output: Callable[[Any], Tensor] | None = None,
) -> Any:
    """The posterior predictive p(y | x) = (1/S) sum_s p(y | x, w_s), w_s ~ q (Algorithm 1, appendix B.3).

    inputs      a tensor (one batch), a tuple (several arguments) or mapping (keywords) of tensors, or any iterable of batches
                such as a DataLoader; of a batch that is a tuple or list the first element is the input, the rest (labels)
                is left, unless `select` says otherwise. Batches go to the network's device.
    draws       a number S of draws, or `Draws`; the same draws serve all inputs. Where S or fewer distinct networks exist
                all are taken, with their probabilities: no Monte-Carlo error. "exact" demands that. Where the output layer is
                cheap beside the rest, each of the S draws is taken with several of its components (all, for EMP);
                `num_draws` then counts every network averaged, S times `plan.heads`, and `prediction.draws` holds them.
    likelihood  `Categorical()` (default) for a `ClassPrediction`, `Gaussian(precision)` for a `RegressionPrediction`.
    keep_draws  keep what each draw said; memory then grows with S. Needed for quantiles, log_prob and samples.
    tolerance   stop early: for each input, draw until the Monte-Carlo standard error of its largest probability (of its mean,
                relative to the predictive deviation, in regression) is below this with 90 % confidence, or `draws` are used up.
    sampling    how a number of draws is made: "stratified" (every component equally often), "orthogonal" (every pair of
                components too: EMP), "balanced" (orthogonal where two such blocks fit into S, else stratified), or "iid" (the
                paper's).
    engine      "auto": share all work that draws have in common; "loop": a forward pass for each, the readable path. Both
                give the same numbers up to rounding; `prediction.plan` tells what was done.
    compile     run the traced stages through torch.compile.
    memory_limit  bytes that draws computed together may take; by default a quarter of what is free.
    generator   source of the seed where `draws` is a number; without one the seed is 0, so that a call can be repeated.
    select      batch -> inputs, for batches that are made otherwise.
    output      network output -> tensor, for networks that return something else (a `.logits` attribute is found).

    The network runs in evaluation mode without gradients and comes back exactly as it was, also after an error.
    """
    options = Options(
        likelihood=likelihood,
        keep_draws=keep_draws,
        tolerance=tolerance,
        sampling=sampling,
        engine=engine,
        compile=compile,
        memory_limit=memory_limit,
        generator=generator,
        select=select,
        output=output,
    )
    # one batch leaves no trace by itself; a loader may also use the global random state between two
    loading = nullcontext() if _is_batch(inputs) else undisturbed(model, network_of(model))
    with loading:
        parts = list(predict_batches(model, inputs, draws, **options))
    if not parts:
        raise PatchbayesError(
            "predict: the inputs hold no batch; an iterable must give at least one (is the loader empty?)."
        )
    return parts[0] if len(parts) == 1 else type(parts[0]).concatenate(parts)


class Options(TypedDict, total=False):
    """The keywords of `predict`."""

    likelihood: Likelihood | None
    keep_draws: bool
    tolerance: float | None
    sampling: Sampling
    engine: Literal["auto", "loop"]
    compile: bool
    memory_limit: int | None
    generator: torch.Generator | None
    select: Callable[[Any], Any] | None
    output: Callable[[Any], Tensor] | None


def predict_batches(
    model: nn.Module, inputs: Any, draws: int | Draws | Literal["exact"] = 20, **options: Unpack[Options]
) -> Iterator[Prediction]:
    """`predict` as a stream: a prediction for each batch, as soon as it is there. Memory does not grow with the batches.

    Arguments as in `predict`. Between two batches the network is as it was, and may be used otherwise. Shows its progress on
    a terminal.
    """
    network: Network = network_of(model)
    model = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    engine, tolerance = options.get("engine", "auto"), options.get("tolerance")
    keep_draws, output = options.get("keep_draws", False), options.get("output") or _as_tensor
    if engine not in ("auto", "loop"):
        raise PatchbayesError(f'predict(engine={engine!r}): give "auto" or "loop".')
    if tolerance is not None and not tolerance > 0:
        raise PatchbayesError(f"predict(tolerance={tolerance!r}): the wanted standard error is above 0.")
    if tolerance is not None and keep_draws:
        raise PatchbayesError(
            "predict: with a tolerance inputs use different draws, so keep_draws cannot keep them all."
        )
    chosen = make_draws(model, network, draws, options.get("sampling", "balanced"), options.get("generator"))
    likelihood = checked_likelihood(options.get("likelihood") or Categorical())
    machine = Engine(
        model,
        network,
        chosen,
        compile=options.get("compile", False),
        memory_limit=options.get("memory_limit"),
        by_loop=engine == "loop",
    )
    keep_freed_memory()
    first = 0
    for batch in _progress(_batches(inputs, options.get("select")), inputs):
        with undisturbed(model, network), torch.inference_mode():
            batch = _to_device(batch, network.device)
            size = _batch_size(batch)
            examples = torch.arange(first, first + size)
            if first == 0 and engine == "auto" and isinstance(draws, int):  # heads, if any, then serve all batches
                machine.marginalize_head_(batch, examples, output)
            if tolerance is not None and not chosen.is_exact:
                prediction: Any = until_sure(machine, batch, examples, output, likelihood, tolerance)
            else:
                outputs = machine.outputs(batch, examples, output)
                prediction = average(outputs, machine.draws, likelihood, keep_draws, machine.plan)
        first += size
        yield prediction.usable()


class Predictor(nn.Module):
    """A module that answers with the posterior predictive, for pipelines that call a model and expect an answer.

    Its output is the averaged log-probabilities (B, C), or for `Gaussian` the pair mean (B, D), variance (B, D). The draws
    are made once: the same input always gives the same answer. No gradients. Arguments as in `predict`.
    """

    def __init__(
        self,
        model: nn.Module,
        draws: int | Draws | Literal["exact"] = 20,
        likelihood: Likelihood | None = None,
        *,
        sampling: Sampling = "balanced",
        generator: torch.Generator | None = None,
        select: Callable[[Any], Any] | None = None,
        output: Callable[[Any], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.draws = make_draws(model, network_of(model), draws, sampling, generator)
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


def make_draws(
    model: nn.Module, network: Network, draws: Any, sampling: Sampling, generator: torch.Generator | None
) -> Draws:
    """The draws that `predict` means by a number, by "exact", or by `Draws`."""
    makers = {"stratified": Draws.stratify, "orthogonal": Draws.orthogonalize, "iid": Draws.sample}
    if sampling not in ("balanced", *makers):
        raise PatchbayesError(f'predict(sampling={sampling!r}): give "balanced", {", ".join(map(repr, makers))}.')
    if isinstance(draws, Draws):
        if generator is not None:
            raise PatchbayesError("generator= is for making draws; the draws given were made already.")
        network.check(draws)
        if not len(draws):
            raise PatchbayesError("predict: the given Draws hold no draw; at least one is needed.")
        return draws
    if draws == "exact":
        return Draws.enumerate(model)
    made = Draws.sample(model, draws)  # also checks the number
    if network.layout.log10_outcomes < math.log10(len(made) + 0.5):
        return Draws.enumerate(model)
    if sampling == "balanced":
        symbols, exponent = network.layout.orthogonal_block or (1, math.inf)
        fits = math.isfinite(exponent) and 2 * symbols**exponent <= len(made)
        sampling = "orthogonal" if fits else "stratified"
    return makers[sampling](model, draws, generator)


def _batches(inputs: Any, select: Callable[[Any], Any] | None) -> Iterator[Any]:
    if _is_batch(inputs):
        yield inputs if select is None else select(inputs)
        return
    if not isinstance(inputs, Iterable):
        raise PatchbayesError(f"predict: inputs are tensors or an iterable of batches, not a {type(inputs).__name__}.")
    for batch in inputs:
        if select is not None:
            yield select(batch)
        else:
            yield batch[0] if isinstance(batch, tuple | list) else batch


def _is_batch(inputs: Any) -> bool:
    """Whether the inputs are one batch, rather than an iterable of batches."""
    return isinstance(inputs, Tensor | tuple | Mapping)


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


def _progress(batches: Iterator[Any], inputs: Any) -> Iterator[Any]:
    """The batches, with their number on the terminal where there is one and more than one batch."""
    if not sys.stderr.isatty() or _is_batch(inputs):
        yield from batches
        return
    total = f" of {len(inputs)}" if hasattr(inputs, "__len__") else ""
    try:
        for number, batch in enumerate(batches, start=1):
            print(f"\rpredicting batch {number}{total} ", end="", file=sys.stderr, flush=True)
            yield batch
    finally:
        print("\r" + " " * 48 + "\r", end="", file=sys.stderr, flush=True)
