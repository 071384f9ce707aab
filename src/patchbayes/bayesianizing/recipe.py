"""bayesianize_: patch a trained network, train the patches alone, choose their spread on held-out data."""

import contextlib
import math
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..errors import PatchbayesError
from ..metrics import apply_temperature, fit_temperature
from ..network import Site, drawn
from ..objective import kl, negative_elbo
from ..patching import is_patched, patch_, patched_sites, unpatch_
from ..posteriors.mixture import ECMP, Mixture
from ..selection import Sites, call, select
from .held_out import HeldOut, checked_batch, logits_of, to_device
from .report import BayesianizeReport, Scores, Trial
from .search import best_factor, crossing
from .spread import Spread

#: Jitter of the trunk's sites where no held-out data can choose it; the search begins there too.
DEFAULT_JITTER = 0.05
#: Jitter of the output layer over that of the trunk, at the start: its noise meets one layer, the trunk's adds up over many.
_OUTPUT_RATIO = 3.0
#: Trained components bear more spread than untrained ones, so training begins with this times the best untrained jitter.
_TRAINING_RATIO = 1.5
_MOMENTUM = 0.9
#: Of the held-out examples, those that the search scores candidates on, with half the draws: the choice between candidates is
#: a comparison on the same examples, the balance of confidence and accuracy is not and needs more of them.
_SEARCHED = 1000
#: What the balance may cost in NLL, and how far it may go.
_NLL_LEEWAY = 0.02
_BALANCE_STEP, _BALANCE_REACH = 0.85, 2.0


def bayesianize_(
    model: nn.Module,
    train: Iterable[Any] | None,
    held_out: Iterable[Any] | None = None,
    *,
    method: Mixture | None = None,
    sites: Sites = "norm+output",
    jitter: float | Literal["auto"] = "auto",
    epochs: float = 0.5,
    lr: float = 0.001,
    examples: int = 2500,
    draws: int = 20,
    seed: int = 0,
    example_input: Any = None,
) -> BayesianizeReport:
    """Turn a trained classifier into a calibrated Bayesian one, in place: its mean network stays, its components spread.

    1. Patch it. The components start around the trained values, M_k = M + jitter * rms(M) * noise_k, with noise that averages
       to zero over the components: the mean network is the one given, which keeps its accuracy.
    2. Choose the jitter whose averaged prediction has the least held-out NLL. Training data cannot tell: a network fits it.
    3. Train the patches alone on the ELBO (Algorithm 1): everything else is frozen, batch-norm statistics too.
    4. Choose on the same held-out examples by which factor the trained components' deviations from their mean are multiplied,
       for the output layer apart. Where the result is no better than the untrained components of step 2, those are kept.
    5. Multiply all deviations by one more factor that makes the mean confidence on held-out data equal to the accuracy, where
       that costs less than 0.02 nats: the least NLL alone leaves the average of a well spread network too cautious.

    train      batches (inputs, targets) with a length, such as a DataLoader with the augmentation that the network was
               trained with; None with epochs=0.
    held_out   batches that the network was not trained on, readable several times. Without them the jitter is
               `DEFAULT_JITTER`, the spread stays as trained, and the report says so.
    method     a mixture of several components, ECMP(5) by default. Its own `jitter` is replaced by the one here.
    jitter     relative to the root mean square of a parameter; the output layer takes three times as much. A number switches
               the choice off (held-out data are then only scored), "auto" searches.
    epochs     passes over `train`, may be a fraction: half of one was enough on CIFAR-100. 0 only chooses the jitter.
    lr         of SGD with momentum 0.9, falling to 0 along a cosine.
    examples   held-out examples that are used, a random part by `seed`; steps 2 and 4 take a thousand of these at most.
    draws      draws of the network in step 5, as prediction will take them (`predict`'s default); half of it in 2 and 4.
    seed       of the components, the draws in training, the part of the held-out data. The order of `train` is its own.
    example_input   an input that shows which layer runs last, and is the output; if not given, held-out data do.

    Modes, frozen flags and everything outside the sites come back as they were; after an error or an interruption the
    whole network does. Save the result with `patchbayes.save`.
    """
    method = method if method is not None else ECMP(5)
    _check(model, train, held_out, method, jitter, epochs, lr, examples, draws)
    clock, generator = _Clock(), torch.Generator().manual_seed(seed)
    num_steps = _num_steps(train, epochs)
    model_bytes = _num_bytes(model)
    chosen = searched = before = scaled = temperature = after = None
    if held_out is not None:
        chosen = HeldOut.read(held_out, examples, generator)
        searched = chosen.part(_SEARCHED, generator)
        log_probs = chosen.log_probs(model)
        before = Scores.of(log_probs, chosen.targets)
        temperature = fit_temperature(log_probs, chosen.targets)
        scaled = Scores.of(apply_temperature(log_probs, temperature), chosen.targets)
        clock.lap("held-out data")
    with _undone_on_error(model), _modes_and_flags_kept(model):
        example = chosen.inputs_for(model)[0] if example_input is None and chosen is not None else example_input
        copies = replace(method, init="copies", jitter=0.0)
        report = patch_(model, copies, sites, example_input=example, generator=generator)
        patches = patched_sites(model)
        groups = _groups(model, patches)
        untrained = Spread.random(patches, groups, generator)
        ratios = {group: _OUTPUT_RATIO if group == "output" else 1.0 for group in groups.values()}
        scales = _times(ratios, DEFAULT_JITTER if jitter == "auto" else jitter)
        search = _Search(model, searched, (draws + 1) // 2, seed) if searched is not None and jitter == "auto" else None
        if search is not None:
            scales = search.jitter(untrained, scales)
            clock.lap("jitter")
        factors, kept, losses = dict.fromkeys(ratios, 1.0), "untrained", list[float]()
        if num_steps:
            assert train is not None
            kept, start = "trained", _times(scales, _TRAINING_RATIO if search is not None else 1.0)
            untrained.scale_(start)
            losses = _train(model, train, num_steps, lr)
            clock.lap("training")
            if search is not None:
                trained = Spread.of(patches, groups)
                factors = search.factors(trained, ratios)
                if search.least("spread") < search.least("jitter"):
                    trained.scale_(factors)
                    scales = start
                else:
                    kept, factors = "untrained", dict.fromkeys(ratios, 1.0)
        if kept == "untrained":
            untrained.scale_(scales)
        if search is not None:
            clock.lap("spread")
        balance = 1.0
        if chosen is not None:
            last = _Search(model, chosen, draws, seed, [] if search is None else search.trials)
            spread = Spread.of(patches, groups)
            balance, after = last.balance(spread, ratios) if search is not None else (1.0, last.now())
            clock.lap("balance" if search is not None else "scores")
        return BayesianizeReport(
            patch=report,
            jitter=scales,
            spread=factors,
            balance=balance,
            jitter_source="given" if jitter != "auto" else "default" if chosen is None else "held-out",
            kept=kept,
            tried=() if search is None else tuple(search.trials),
            num_held_out=0 if chosen is None else len(chosen),
            before=before,
            after=after,
            temperature=temperature,
            temperature_scaled=scaled,
            num_steps=num_steps,
            first_loss=_mean(losses[: len(losses) // 10 + 1]),
            last_loss=_mean(losses[-(len(losses) // 10 + 1) :]),
            patch_bytes=sum(_num_bytes(site.module) for site in patches.values()),
            model_bytes=model_bytes,
            seconds=clock.seconds,
        )


class _Search:
    """Scores of candidates on the held-out examples, always with the same draws; keeps what was tried."""

    def __init__(
        self, model: nn.Module, held_out: HeldOut, draws: int, seed: int, trials: list[Trial] | None = None
    ) -> None:
        self.trials: list[Trial] = [] if trials is None else trials
        self._model, self._held_out, self._draws, self._seed = model, held_out, draws, seed

    def jitter(self, untrained: Spread, start: dict[str, float]) -> dict[str, float]:
        """The best jitters, in the proportion of `start`."""
        factor = best_factor(lambda f: self._score("jitter", untrained, _times(start, f)), step=1.5, most=6)
        return _times(start, factor)

    def factors(self, trained: Spread, groups: Iterable[str]) -> dict[str, float]:
        """The best factors for the trained deviations: first one for all, then one for the output layer apart."""
        ones = dict.fromkeys(groups, 1.0)
        best = _times(ones, best_factor(lambda f: self._score("spread", trained, _times(ones, f)), step=1.3, most=5))
        if len(best) > 1:
            alone = best_factor(
                lambda f: self._score("spread", trained, best | {"output": f * best["output"]}), step=1.5, most=4
            )
            best |= {"output": alone * best["output"]}
        return best

    def balance(self, spread: Spread, groups: Iterable[str]) -> tuple[float, Scores]:
        """The factor at which confidence meets accuracy, and the scores there; 1 where no such factor is near."""

        def scores(factor: float) -> Scores:
            self._score("balance", spread, dict.fromkeys(groups, factor))
            return self.trials[-1].scores

        found = {1.0: scores(1.0)}
        step = _BALANCE_STEP if found[1.0].overconfidence < 0 else 1 / _BALANCE_STEP
        found[step] = scores(step)
        factor = crossing(found[1.0].overconfidence, found[step].overconfidence, step, _BALANCE_REACH)
        if factor is not None:
            found[factor] = scores(factor)
        allowed = [f for f in found if found[f].nll <= found[1.0].nll + _NLL_LEEWAY]
        best = min(allowed, key=lambda f: abs(found[f].overconfidence))
        spread.scale_(dict.fromkeys(groups, best))
        return best, found[best]

    def now(self) -> Scores:
        """The scores of the network as it is."""
        return self._held_out.scores(self._model, self._draws, self._seed)

    def least(self, stage: str) -> float:
        """The least NLL among the candidates of a stage."""
        return min(trial.scores.nll for trial in self.trials if trial.stage == stage)

    def _score(self, stage: str, spread: Spread, scales: dict[str, float]) -> float:
        spread.scale_(scales)
        scores = self.now()
        self.trials.append(Trial(stage, scales, scores))
        return scores.nll


def _train(model: nn.Module, train: Iterable[Any], num_steps: int, lr: float) -> list[float]:
    """Minimize the negative ELBO over the patches, one draw a step; the loss of every step.

    The network runs in evaluation mode, as it will predict. N in KL / N is the number of batches times the size of the first.
    """
    model.requires_grad_(False)
    posteriors = [site.posterior for site in patched_sites(model).values()]
    patches = [posterior.stored(name).requires_grad_() for posterior in posteriors for name in posterior.names]
    optimizer = torch.optim.SGD(patches, lr=lr, momentum=_MOMENTUM)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
    losses: list[float] = []
    num_data = 0
    batches = _endless(train)
    with torch.enable_grad():
        for step in range(num_steps):
            inputs, targets = checked_batch("train", next(batches))
            num_data = num_data or len(train) * len(targets)  # type: ignore[arg-type]
            device = patches[0].device
            with drawn(model):
                outputs = logits_of(call(model, to_device(inputs, device)))
            loss = negative_elbo(outputs[None], targets.to(device), kl(model, shared=False), num_data=num_data)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(float(loss.detach()))
            if not math.isfinite(losses[-1]):
                raise PatchbayesError(
                    f"bayesianize_: the training loss is {losses[-1]} at step {step + 1} of {num_steps}.\n"
                    f"  do       a smaller lr (it was {lr:g}) or jitter."
                )
            _show(f"training the patches: step {step + 1} of {num_steps}, loss {losses[-1]:.3f}")
    _show("")
    for patch in patches:
        patch.grad = None
    return losses


def _endless(train: Iterable[Any]) -> Iterator[Any]:
    while True:
        number = 0
        for number, batch in enumerate(train, start=1):  # noqa: B007
            yield batch
        if not number:
            raise PatchbayesError("bayesianize_: train gave no batch; give a loader or list that can be read again.")


def _show(text: str) -> None:
    """Progress on the terminal, where there is one; "" clears it."""
    if sys.stderr.isatty():
        print(f"\r{text:<72}" + ("" if text else "\r"), end="", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _modes_and_flags_kept(model: nn.Module) -> Iterator[None]:
    """Evaluation mode in the block; afterwards modes and frozen flags are as before."""
    modes = [(module, module.training) for module in model.modules()]
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
        for parameter, flag in flags:
            parameter.requires_grad_(flag)


@contextlib.contextmanager
def _undone_on_error(model: nn.Module) -> Iterator[None]:
    """Where the block fails, the network comes back unpatched, with its own values and buffers."""
    parameters = [(p, p.detach().clone(memory_format=torch.preserve_format), p.grad) for p in model.parameters()]
    buffers = [(b, b.clone()) for b in model.buffers()]
    try:
        yield
    except BaseException:
        if is_patched(model):
            unpatch_(model)
        for parameter, value, gradient in parameters:
            parameter.data, parameter.grad = value, gradient
        for buffer, value in buffers:
            buffer.copy_(value)
        raise


def _groups(model: nn.Module, patches: dict[str, Site]) -> dict[str, str]:
    """The group of each site: "output" for the output layer, "trunk" for the others."""
    try:
        output = set(select(model, "output").modules)
    except PatchbayesError:  # nothing like an output layer
        output = set()
    return {name: "output" if name in output else "trunk" for name in patches}


def _times(scales: dict[str, float], factor: float) -> dict[str, float]:
    return {group: scale * factor for group, scale in scales.items()}


def _mean(values: list[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _num_bytes(module: nn.Module) -> int:
    tensors = [*module.parameters(), *module.buffers()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _num_steps(train: Iterable[Any] | None, epochs: float) -> int:
    if train is None or not epochs:
        return 0
    try:
        return max(1, round(epochs * len(train)))  # type: ignore[arg-type]
    except TypeError:
        raise PatchbayesError(
            f"bayesianize_: train is a {type(train).__name__} without a length, which the learning-rate schedule needs.\n"
            "  do       give a DataLoader, or a list of batches (inputs, targets)."
        ) from None


class _Clock:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.seconds[name] = now - self._last
        self._last = now


def _check(
    model: nn.Module,
    train: Any,
    held_out: Any,
    method: Any,
    jitter: Any,
    epochs: Any,
    lr: Any,
    examples: Any,
    draws: Any,
) -> None:
    def refuse(given: str, required: str) -> None:
        raise PatchbayesError(f"bayesianize_({given}): {required}")

    def is_number(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)

    if not isinstance(model, nn.Module):
        refuse(f"a {type(model).__name__}", "the network is a torch.nn.Module.")
    if is_patched(model):
        refuse(f"a patched {type(model).__name__}", "it takes an ordinary trained network; unpatch_(model) first.")
    if not isinstance(method, Mixture) or method.zero or method.components < 2:
        refuse(f"method={method!r}", "a mixture of several components without a zero one, such as ECMP(5) or EMP(5).")
    if method.init != "copies" or method.norm_scale is not None:
        refuse(f"method={method!r}", 'a trained network starts its components, so init="copies" and no norm_scale.')
    if jitter != "auto" and not (is_number(jitter) and jitter > 0):
        refuse(f"jitter={jitter!r}", 'give "auto" or a number above 0.')
    if not (is_number(epochs) and epochs >= 0):
        refuse(f"epochs={epochs!r}", "a number of at least 0.")
    if not (is_number(lr) and lr > 0):
        refuse(f"lr={lr!r}", "the learning rate is a number above 0.")
    for name, value in (("examples", examples), ("draws", draws)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            refuse(f"{name}={value!r}", "an integer of at least 1.")
    for name, value in (("train", train), ("held_out", held_out)):
        if value is not None and (isinstance(value, Tensor) or not isinstance(value, Iterable)):
            refuse(f"{name}: a {type(value).__name__}", "give batches (inputs, targets), such as a DataLoader.")
    if train is None and epochs:
        refuse(f"train=None, epochs={epochs!r}", "give training data, or epochs=0.")
