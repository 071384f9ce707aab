"""predict: the posterior predictive of a patched network."""

import functools
import itertools
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypedDict, Unpack

import torch
from torch import Tensor, nn

from ..draws.draws import Draws, check_count, check_is_module
from ..errors import PatchbayesError
from ..likelihoods import Categorical, Likelihood, checked_likelihood
from ..patching.network import PatchedNetwork, network_of
from ..patching.patch import is_patched
from ..patching.selection import as_tensor
from ..patching.sharding import refuse_sharded
from ..views import Views
from .adaptive import until_sure
from .averages import Statistics, average
from .batches import batch_size, batches, is_batch, on_device, progress
from .engine import Engine
from .loop import at_rest, mean_pass, same_random_state, undisturbed
from .mc_dropout import dropout_passes
from .plan import Plan
from .prediction import Prediction
from .targets import without_targets
from .viewing import Viewing

Sampling = Literal["balanced", "stratified", "orthogonal", "iid"]
Mode = Literal["auto", "loop", "graph"]
Number = int | Draws | Literal["exact", "auto", "mean"]

MOST_DRAWS = 400  # that "auto" takes for an input
_TOLERANCE = 0.01
_FEW_OUTCOMES = 32  # networks that "auto" enumerates rather than draws


def predict(
    model: nn.Module,
    inputs: Any,
    draws: Number = 20,
    *,
    likelihood: Likelihood | None = None,
    keep_draws: bool = False,
    tolerance: float | None = None,
    sampling: Sampling = "balanced",
    engine: Mode = "auto",
    memory_limit: int | None = None,
    generator: torch.Generator | None = None,
    select: Callable[[Any], Any] | None = None,
    output: Callable[[Any], Tensor] | None = None,
    dropout: bool = False,
    views: Views | Callable[[Any, torch.Generator], Any] | None = None,
    statistics: Statistics | None = None,
) -> Any:
    """The posterior predictive p(y | x) = (1/S) sum_s p(y | x, w_s), w_s ~ q (Algorithm 1, appendix B.3).

    inputs      a tensor (one batch), a tuple (several arguments) or mapping (keywords) of tensors, or any iterable of batches
                such as a DataLoader; of a batch that is a tuple or list the first element is the input, the rest (labels)
                is left, unless `select` says otherwise, and so are labels in a mapping. Batches go to the network's device.
    draws       a number S of draws, or `Draws`; the same draws serve all inputs. Where S or fewer distinct networks exist
                all are taken, with their probabilities: no Monte-Carlo error. "exact" demands that. "auto" draws until the
                Monte-Carlo error is below `tolerance`, for each input, at most 400 times. "mean" is one pass of the mean
                network. Where the output layer is cheap beside the rest, each of S draws is taken with several of its
                components (all, for EMP); `num_draws` then counts every network averaged, S times `plan.heads`, and
                `prediction.draws` holds them.
    likelihood  what an output says: `Categorical()` for a `ClassPrediction`, `Gaussian(precision)` for a
                `RegressionPrediction`; by default the network's own, else `Categorical()`.
    keep_draws  keep what each draw said; memory then grows with S. Needed for quantiles, log_prob and samples.
    tolerance   for draws="auto": the Monte-Carlo standard error of the largest probability (of the mean, relative to the
                predictive deviation, in regression) that is wanted with 90 % confidence; 0.01 if not given.
    sampling    how a number of draws is made: "stratified" (every component equally often), "orthogonal" (every pair of
                components too: EMP), "balanced" (orthogonal where two such blocks fit into S, else stratified), or "iid" (the
                paper's).
    engine      "auto": capture the network as a graph once that pays, and share all work that draws have in common;
                "graph": capture it in any case; "loop": a forward pass for each draw, the readable path. All give the same
                numbers up to rounding; `prediction.plan` tells what was done.
    memory_limit  bytes that draws computed together, and weights kept for the next batch, may take; by default a quarter of
                what is free.
    generator   source of the seed where `draws` is a number; without one the seed is 0, so that a call can be repeated.
    select      batch -> inputs, for batches that are made otherwise.
    output      network output -> tensor, for networks that return something else ("logits" are found).
    views       ways to look at the inputs, `patchbayes.views`, one for each draw and every one equally often; without draws
                (draws="mean", or a network that is not patched) a pass for each.
    dropout     for a network that is not patched: keep its own `nn.Dropout` layers on, in S passes (MC dropout).
    statistics  "all", or "averages": of a classifier only the averaged probabilities and entropies, in float32 (the standard
                error is then unknown), for hardly more time and memory than a loop that adds up probabilities. By default
                averages where a draw says more than four million numbers at several positions of each input (tokens).

    A network that is not patched is one exact draw: a single pass. The network runs in evaluation mode without gradients and
    comes back exactly as it was, also after an error.
    """
    options = Options(
        likelihood=likelihood,
        keep_draws=keep_draws,
        tolerance=tolerance,
        sampling=sampling,
        engine=engine,
        memory_limit=memory_limit,
        generator=generator,
        select=select,
        output=output,
        dropout=dropout,
        views=views,
        statistics=statistics,
    )
    with same_random_state():  # a loader may use it between two batches
        parts = list(predict_batches(model, inputs, draws, **options))
    if not parts:
        raise PatchbayesError(
            "predict: the inputs hold no batch; expected an iterable that gives at least one (is the loader empty?)."
        )
    return parts[0] if len(parts) == 1 else type(parts[0]).concatenate(parts)


class Options(TypedDict, total=False):
    """The keywords of `predict`."""

    likelihood: Likelihood | None
    keep_draws: bool
    tolerance: float | None
    sampling: Sampling
    engine: Mode
    memory_limit: int | None
    generator: torch.Generator | None
    select: Callable[[Any], Any] | None
    output: Callable[[Any], Tensor] | None
    dropout: bool
    views: Views | Callable[[Any, torch.Generator], Any] | None
    statistics: Statistics | None


def predict_batches(
    model: nn.Module, inputs: Any, draws: Number = 20, **options: Unpack[Options]
) -> Iterator[Prediction]:
    """`predict` as a stream: a prediction for each batch, as soon as it is there. Memory does not grow with the batches.

    Arguments as in `predict`. The weights of the draws are made once for all batches, from the parameters as they are at the
    first one. Between two batches the network is as it was, and may be used otherwise. Shows its progress on a terminal.
    """
    check_is_module(model)
    model = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    network = network_of(model) if is_patched(model) else None
    check_options(draws, network, options)
    predicting = Predicting(model, network, draws, options, num_batches=_length(inputs))
    first = 0
    for batch in progress(batches(inputs, options.get("select")), inputs):
        with torch.inference_mode():
            batch = on_device(without_targets(model, batch), predicting.device)
            size = batch_size(batch)
            prediction = predicting.batch(batch, torch.arange(first, first + size))
        first += size
        yield prediction.usable()


class Predicting:
    """One prediction on its way: the draws, and what is kept from batch to batch."""

    def __init__(
        self,
        model: nn.Module,
        network: PatchedNetwork | None,
        draws: Number,
        options: Options,
        num_batches: int,
    ) -> None:
        self.model, self.network, self.options = model, network, options
        self.output = options.get("output") or as_tensor
        self.keep, self.statistics = options.get("keep_draws", False), options.get("statistics")
        own = network.likelihood if network is not None else Categorical()
        self.likelihood = checked_likelihood(options.get("likelihood") or own)
        self.machine: Engine | None = None
        self.number = draws
        self.tolerance = options.get("tolerance") or _TOLERANCE if draws == "auto" else None
        if network is not None:
            refuse_sharded(network, "predict")
        one_network = network is not None and not network.sites and options.get("views") is not None  # sees every view
        if network is not None and draws != "mean" and not one_network:
            made = make_draws(model, network, draws, options.get("sampling", "balanced"), options.get("generator"))
            self.machine = Engine(
                model,
                network,
                made,
                mode=options.get("engine", "auto"),
                memory_limit=options.get("memory_limit"),
                batches=num_batches,
            )
        self.started = not (isinstance(draws, int) or draws == "auto")
        self.viewing = None if options.get("views") is None else Viewing(options["views"], self.machine)

    @functools.cached_property
    def device(self) -> torch.device | None:
        tensors = itertools.chain(self.model.parameters(), self.model.buffers())
        return next((tensor.device for tensor in tensors), None)

    def batch(self, inputs: Any, examples: Tensor) -> Any:
        """The prediction for one batch."""
        machine = self.machine
        if self.viewing is not None and machine is not None:
            outputs = self.viewing.outputs(inputs, examples, self.output)
            return average(outputs, machine.draws, self.likelihood, self.keep, machine.plan, statistics=self.statistics)
        if machine is None:
            return self._without_draws(inputs, examples)
        if not self.started:  # heads, if any, then serve all batches
            machine.marginalize_head_(inputs, examples, self.output)
            self.started = True
        if self.tolerance is not None and not machine.draws.is_exact:
            return until_sure(machine, inputs, examples, self.output, self.likelihood, self.tolerance)
        outputs = machine.outputs(inputs, examples, self.output)
        return average(outputs, machine.draws, self.likelihood, self.keep, machine.plan, statistics=self.statistics)

    def _without_draws(self, inputs: Any, examples: Tensor) -> Any:
        if self.options.get("dropout"):
            number = self.number if isinstance(self.number, int) else 1
            draws, outputs = dropout_passes(
                self.model, inputs, number, examples, self.output, self.options.get("generator")
            )
            plan = Plan.of_draws(draws)
            plan.fallback = "masks of the network's own dropout layers"
            return average(outputs, draws, self.likelihood, self.keep, plan, statistics=self.statistics)
        plan = Plan(1, "mean" if self.network is not None else "none", exact=True, networks=1)
        plan.fallback = "the mean network" if self.network is not None else "the network is not patched"
        resting = at_rest(self.model)
        network = network_of(resting) if self.network is not None else None
        with undisturbed(resting):
            if self.viewing is not None:
                draws, outputs = self.viewing.passes(
                    inputs, lambda seen: mean_pass(resting, network, seen, self.output)
                )
                return average(
                    outputs,
                    draws,
                    self.likelihood,
                    self.keep,
                    plan,
                    mean=self.network is not None,
                    statistics=self.statistics,
                )
            outputs = mean_pass(resting, network, inputs, self.output)
            # One pass is all there is to keep: log_prob and quantiles of a regression need nothing more.
            return average(
                outputs,
                None,
                self.likelihood,
                self.keep or self.statistics is None,
                plan,
                mean=self.network is not None,
                statistics=self.statistics,
            )


def check_options(draws: Number, network: PatchedNetwork | None, options: Options) -> None:
    engine, tolerance = options.get("engine", "auto"), options.get("tolerance")
    if engine not in ("auto", "loop", "graph"):
        raise PatchbayesError(f'predict(engine={engine!r}): expected "auto", "loop" or "graph".')
    if isinstance(draws, str) and draws not in ("exact", "auto", "mean"):
        raise PatchbayesError(f'predict(draws={draws!r}): expected a number, Draws, "exact", "auto" or "mean".')
    if not isinstance(draws, str | Draws):
        check_count(draws)
    if tolerance is not None and draws != "auto":
        raise PatchbayesError(f'predict(tolerance={tolerance!r}) is for draws="auto", got draws={draws!r}.')
    if tolerance is not None and not tolerance > 0:
        raise PatchbayesError(f"predict(tolerance={tolerance!r}): expected a standard error above 0.")
    if draws == "auto" and options.get("keep_draws"):
        raise PatchbayesError(
            'predict(draws="auto"): inputs use different draws, so keep_draws=True cannot keep them all.\n'
            "  do       give a number of draws."
        )
    if options.get("statistics") not in (None, "all", "averages"):
        raise PatchbayesError(f'predict(statistics={options["statistics"]!r}): expected "all" or "averages".')
    if options.get("statistics") == "averages" and (draws == "auto" or options.get("keep_draws")):
        raise PatchbayesError('predict(statistics="averages") goes without draws="auto" and keep_draws=True.')
    if options.get("views") is not None and (draws == "auto" or options.get("dropout")):
        raise PatchbayesError('predict: views go with a number of draws or "mean", not with "auto" or dropout=True.')
    if options.get("dropout") and network is not None:
        raise PatchbayesError(
            "predict(dropout=True) is for a network that is not patched; this one is.\n"
            "  do       patch it with pb.Dropout(rate) at the sites where masks are wanted."
        )
    seen = network.calibration.get("views") if network is not None and network.calibration else None
    if seen is not None and options.get("views") is None:
        warnings.warn(
            f"the network was calibrated with views ({seen}), and its temperatures hold for them: give the same views=...",
            stacklevel=4,
        )
    if network is None and isinstance(draws, Draws):
        raise PatchbayesError("predict: Draws were given for a network that is not patched; expected a number.")


def _length(inputs: Any) -> int:
    """How many batches will come; 1 where that is not known."""
    return len(inputs) if not is_batch(inputs) and hasattr(inputs, "__len__") else 1


def make_draws(
    model: nn.Module, network: PatchedNetwork, draws: Any, sampling: Sampling, generator: torch.Generator | None
) -> Draws:
    """The draws that `predict` means by a number, by "exact" or "auto", or by `Draws`."""
    makers = {"stratified": Draws.stratified, "orthogonal": Draws.orthogonal, "iid": Draws.sample}
    if sampling not in ("balanced", *makers):
        raise PatchbayesError(f'predict(sampling={sampling!r}): expected "balanced", {", ".join(map(repr, makers))}.')
    if isinstance(draws, Draws):
        if generator is not None:
            raise PatchbayesError("generator= is for making draws; the draws given were made already.")
        network.check(draws)
        if not len(draws):
            raise PatchbayesError("predict: the given Draws hold no draw; expected at least one.")
        return draws
    if draws == "exact":
        return Draws.enumerate(model)
    number = MOST_DRAWS if draws == "auto" else draws
    made = Draws.sample(model, number)  # also checks the number
    if network.layout.log10_outcomes < math.log10((_FEW_OUTCOMES if draws == "auto" else number) + 0.5):
        return Draws.enumerate(model)
    if sampling == "balanced":
        symbols, exponent = made.law.orthogonal_block or (1, math.inf)
        fits = math.isfinite(exponent) and 2 * symbols**exponent <= len(made)
        sampling = "orthogonal" if fits else "stratified"
    return makers[sampling](model, number, generator)
