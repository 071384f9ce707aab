"""The interface that every likelihood keeps. Defining a subclass is enough to use, save and load it."""

import inspect
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from ..errors import PatchbayesError

#: The buffers of every likelihood.
TEMPERATURES = ("temperature", "mean_temperature", "draw_temperature")
_LIKELIHOODS: dict[str, type["Likelihood"]] = {}


class Likelihood(nn.Module, ABC):
    """p(y | x, w): what one draw's output says about the target, and the temperature of the prediction made from all.

    A subclass writes `log_prob` (what training maximizes) and `predictive` (what `predict` averages), and says in `offers`
    which prediction the average becomes. It keeps each argument of its constructor as an attribute of the same name
    (a number, a text, or a tensor), so that a file can describe it; what is learned or fitted is a parameter or a buffer.
    Subclassing registers it under its class name, in a user's module too: files name the class and are read without
    importing anything, so the module that defines it must be imported first.

        offers                                     `predictive` gives, for D draws
        "ClassPrediction"                          log_probs (D, B, ..., C)
        "LabelPrediction"                          logits (D, B, ...) of independent labels
        "RegressionPrediction"                     mean and variance (D, B, T): Gaussian, the same variance in every draw
        "HeteroscedasticPrediction"                mean and variance (D, B, T): Gaussian, a variance for each draw and input
        "MeanPrediction"                           mean and variance (D, B, T) of any law: moments, but no quantiles

    temperature       () float64, 1 unless fitted: the *averaged* prediction is sharpened (below 1) or softened (above 1) by it,
                      log p_T = log_softmax(log p / T); a Gaussian's predictive variance is multiplied by it. It has no part
                      in `log_prob`: training is not tempered.
    mean_temperature  the same for the mean network in one pass, which needs another one: it lacks the spread of the draws.
    draw_temperature  what each draw says of classes or labels is softened by it *before* the average, log_softmax(log p_s / t).
                      At 1 probabilities are averaged, and one draw that is sure of itself and wrong outweighs many; the higher
                      it is, the closer comes the average to that of the logits. `temperature` then sharpens the average.
                      It means nothing for numbers, nor for the mean network, and has no part in what draws disagree on
                      (`mutual_information`).
    """

    offers: ClassVar[str]
    temperature: Tensor
    mean_temperature: Tensor
    draw_temperature: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in TEMPERATURES:
            self.register_buffer(name, torch.ones((), dtype=torch.float64))

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        known = _LIKELIHOODS.get(cls.__name__)
        if known is not None and known.__module__ != cls.__module__ and known.__module__.startswith(__package__):
            raise PatchbayesError(
                f"class {cls.__name__}(Likelihood): patchbayes has a likelihood of that name, and files go by the name.\n"
                "  do       call it otherwise."
            )
        _LIKELIHOODS[cls.__name__] = cls

    @abstractmethod
    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """log p(y | x, w_s): outputs (S, B, ...), targets (B, ...) give (S, B), or (S, B, ...) with a term for each label."""

    @abstractmethod
    def predictive(self, outputs: Tensor) -> Mapping[str, Tensor]:
        """p(y | x, w_s) of every draw, in the form that `offers` asks for. outputs (D, B, ...), in double precision."""

    def counted(self, targets: Tensor) -> Tensor:
        """Which examples have a target at all, (B,) bool: those that have none are left out of averages."""
        return torch.ones(targets.shape[:1], dtype=torch.bool, device=targets.device)

    def expected_log_prob(self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        """The likelihood term of the ELBO per example, (): sum_s w_s (1/B) sum_b log p(y_b | x_b, w_s) (appendix B.2).

        The terms of an example with several labels are summed. B counts the examples that have a target (`counted`); a
        batch without any gives 0. weights (S,) sum to one: the probabilities of enumerated draws; equal if not given.

        outputs (S, B, ...), targets (B, ...).
        """
        log_prob = self.log_prob(outputs, targets)
        if log_prob.dim() > 2:
            log_prob = log_prob.flatten(2).sum(-1)
        examples = self.counted(targets).sum().clamp_min(1)
        if weights is None:
            return log_prob.sum() / (len(log_prob) * examples)
        if weights.shape != log_prob.shape[:1]:
            raise PatchbayesError(
                f"expected_log_prob: expected one weight for each of the {len(log_prob)} draws, got {tuple(weights.shape)}."
            )
        return (weights.to(log_prob) @ log_prob).sum() / examples

    def set_temperature_(
        self,
        temperature: float | None = None,
        *,
        mean_temperature: float | None = None,
        draw_temperature: float | None = None,
    ) -> Self:
        """Set the temperature of the averaged prediction, that of the mean network, that of each draw, or several."""
        for name, value in zip(TEMPERATURES, (temperature, mean_temperature, draw_temperature), strict=True):
            if value is not None:
                if not (math.isfinite(value) and value > 0):
                    raise PatchbayesError(f"set_temperature_({name}={value!r}): expected a finite number above 0.")
                getattr(self, name).fill_(value)
        return self

    def config(self) -> dict[str, Any]:
        """The likelihood as JSON: its class and the arguments of its constructor. `state_dict` has the rest."""
        names = list(inspect.signature(type(self)).parameters)
        missing = [name for name in names if not hasattr(self, name)]
        if missing:
            raise PatchbayesError(
                f"{type(self).__name__} cannot be described in a file: its constructor takes {', '.join(missing)}, "
                "which it does not keep.\n  do       self.name = name, for each argument."
            )
        values = {name: getattr(self, name) for name in names}
        values = {name: v.detach().tolist() if isinstance(v, Tensor) else v for name, v in values.items()}
        module = type(self).__module__  # told to whoever reads the file without having imported it
        origin = {} if module.startswith(__package__) else {"module": module}
        config = {"likelihood": type(self).__name__, **origin, **values}
        try:
            json.dumps(config)
        except TypeError as error:
            raise PatchbayesError(
                f"{type(self).__name__} cannot be described in a file: {error}.\n"
                "  do       let its constructor take numbers, texts, lists of these, or tensors."
            ) from None
        return config

    def extra_repr(self) -> str:
        shown = {name: value for name, value in self.config().items() if name not in ("likelihood", "module")}
        for name in TEMPERATURES:
            if float(getattr(self, name)) != 1:
                shown[name] = float(getattr(self, name))
        return ", ".join(
            f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}" for name, value in shown.items()
        )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Files of older versions lack temperatures: those are 1."""
        for name in TEMPERATURES:
            state_dict.setdefault(prefix + name, torch.ones((), dtype=torch.float64))
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Follow the network to its device but keep the precision: a temperature in bfloat16 has three digits."""

        def keep(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        return super()._apply(keep, recurse)  # type: ignore[no-untyped-call]


def wrong_shape(name: str, outputs: Tensor, targets: Tensor) -> PatchbayesError:
    """The error of targets (B, ...) that are not of the shape of one draw's outputs, (S, B, ...)."""
    text = (
        f"{name}: expected targets in the shape of one output, {tuple(outputs.shape[1:])}, got {tuple(targets.shape)}."
    )
    if outputs.shape[1:] == (*targets.shape, 1):
        text += "\n  do       targets.unsqueeze(-1)."
    elif (*outputs.shape[1:], 1) == targets.shape:
        text += "\n  do       targets.squeeze(-1)."
    return PatchbayesError(text)


def tempered(found: Mapping[str, Tensor], temperature: float) -> Mapping[str, Tensor]:
    """What draws say of classes or labels, each softened by a temperature above 1; of numbers, as it is."""
    if temperature == 1 or not found.keys() & {"log_probs", "logits"}:
        return found
    if "logits" in found:
        return {"logits": found["logits"] / temperature}
    return {"log_probs": torch.log_softmax(found["log_probs"] / temperature, -1)}


def likelihood_from_config(config: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> Likelihood:
    """The likelihood that `Likelihood.config` and `state_dict` describe. Nothing is imported: an unknown class is an error."""
    options = dict(config)
    name, module = options.pop("likelihood", None), options.pop("module", None)
    if not isinstance(name, str) or name not in _LIKELIHOODS:
        where = f"the module {module}, which defines it" if module else "the module that defines it"
        raise PatchbayesError(
            f"the likelihood {name!r} is not known; known are {', '.join(sorted(_LIKELIHOODS))}.\n"
            f"  do       import {where}, then try again."
        )
    try:
        likelihood = _LIKELIHOODS[name](**options)
        if tensors is not None:
            likelihood.load_state_dict(dict(tensors))
    except (TypeError, RuntimeError) as error:
        raise PatchbayesError(f"likelihood {name}: {error}.") from None
    for which in TEMPERATURES:
        value = float(getattr(likelihood, which))
        if not (math.isfinite(value) and value > 0):
            raise PatchbayesError(f"likelihood {name}: expected a {which} above 0, got {value}.")
    return likelihood


def checked_likelihood(likelihood: Any) -> Likelihood:
    """The likelihood itself, or an error that says what one is."""
    if isinstance(likelihood, Likelihood):
        return likelihood
    hint = "" if not isinstance(likelihood, type) else f"\n  do       make one: {likelihood.__name__}()."
    raise PatchbayesError(
        f"likelihood={likelihood!r}: expected a likelihood, such as patchbayes.likelihoods.Categorical() or "
        f"patchbayes.likelihoods.Gaussian(precision=...).{hint}"
    )
