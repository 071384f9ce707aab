"""What a posterior predictive says, whatever it is about: how sure the average over draws is, its parts, its replicates."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from ..draws.draws import Draws
from ..errors import PatchbayesError
from ..likelihoods import Likelihood
from ..metrics.student import student_t
from .loop import Outputs
from .moments import StandardErrorKind
from .plan import Plan

PER_INPUT: Mapping[str, Any] = {"axis": 0}  # metadata of a field with a row for each input
PER_DRAW: Mapping[str, Any] = {"axis": 1}  # of a field (S, B, ...) that is kept on demand

_KINDS: dict[str, type["Prediction"]] = {}


@dataclass(frozen=True)
class PredictiveCheck:
    """A posterior predictive check: the statistic of the data, of replicated data (R,), and P(replicated >= observed)."""

    observed: float
    replicated: Tensor
    p_value: float


@dataclass(frozen=True, kw_only=True)
class Prediction(ABC):
    """What all predictions have.

    num_draws            S, how many draws were averaged.
    standard_error_kind  where `standard_error` comes from; "exact" after enumeration, "unknown" (then NaN) with one draw,
                         draws that come twice, or a part of an enumeration.
    degrees_of_freedom   (B,): of `standard_error`, which few independent blocks may have to tell (three of them with twenty
                         balanced draws of five components): `monte_carlo_interval` takes that into account.
    weights              the weight of each draw, (S,) float64.
    draws                the draws themselves: pass them to `predict` again to compare networks, inputs or engines. None where
                         nothing was drawn (the mean network, a network without patches).
    plan                 what was computed, and how much of it was shared; print it.
    draws_used           (B,) int64: S, or fewer where `tolerance` stopped early.
    temperature          T of the likelihood, with which the averaged prediction is sharpened or softened; 1: not at all.
    draw_temperature     t of the likelihood, with which each draw was softened before the average; 1: not at all.

    A subclass says in `estimate` which of its properties the standard error belongs to, and in `reported` what `numpy` gives.
    """

    num_draws: int
    standard_error_kind: StandardErrorKind
    degrees_of_freedom: Tensor = field(metadata=PER_INPUT)
    weights: Tensor
    draws: Draws | None
    plan: Plan
    draws_used: Tensor = field(metadata=PER_INPUT)
    temperature: float = 1.0
    draw_temperature: float = 1.0
    standard_error: Tensor = field(metadata=PER_INPUT)

    estimate: ClassVar[str]
    reported: ClassVar[tuple[str, ...]]
    #: Those of `reported` that are taken from the draws as they are, before any temperature.
    untempered: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _KINDS[cls.__name__] = cls

    @classmethod
    @abstractmethod
    def averaged(
        cls,
        outputs: Outputs,
        draws: Draws | None,
        likelihood: Likelihood,
        draw_temperature: float,
        temperature: float,
        keep: bool,
        plan: Plan,
    ) -> Self:
        """The prediction for one batch, from the outputs of all draws: softened one by one, averaged, and tempered."""

    @classmethod
    def running(
        cls, outputs: Outputs, draws: Draws | None, likelihood: Likelihood, before: float, after: float, plan: Plan
    ) -> Self:
        """The same with averages alone where a kind of prediction can do with less; by default with everything."""
        return cls.averaged(outputs, draws, likelihood, before, after, False, plan)

    @property
    @abstractmethod
    def answer(self) -> Tensor | tuple[Tensor, Tensor]:
        """The prediction in one tensor, or two: what a `Predictor` returns."""

    @property
    @abstractmethod
    def tolerated_error(self) -> Tensor:
        """(B,): the Monte-Carlo error that `tolerance` is compared with."""

    @abstractmethod
    def fit_temperature(self, targets: Tensor) -> float:
        """The temperature that fits held-out targets best, shrunk towards 1 by what they leave uncertain.

        Of the averages as they were before any temperature, so that it replaces the likelihood's and does not add to it.
        """

    @abstractmethod
    def _mixed(self, new: Self, share: Tensor) -> dict[str, Tensor]:
        """The averages over the draws of both, those of `new` having the share (B,) of all."""

    @abstractmethod
    def sample(self, number: int = 1, generator: torch.Generator | None = None) -> Tensor:
        """Replicated targets, (R, B, ...). Needs keep_draws=True."""

    def __str__(self) -> str:
        """In a line: how many inputs and draws, and the mean of what is reported, one number for each."""
        tempered = (self.temperature, self.draw_temperature) != (1, 1)
        parts: dict[bool, list[str]] = {False: [], True: []}
        for name in self.reported:
            value = getattr(self, name)
            if isinstance(value, Tensor) and value.is_floating_point() and value.numel() == len(self) > 0:
                text = f"{name.replace('_', ' ')} {float(value.double().mean()):.3g}"
                parts[tempered and name in self.untempered].append(text)
        means = f"; mean {', '.join(parts[False])}" if parts[False] else ""
        means += f"; before temperatures {', '.join(parts[True])}" if parts[True] else ""
        number = "one pass" if self.draws is None else f"{self.num_draws:,} draw{'s' * (self.num_draws != 1)}"
        return f"{type(self).__name__}: {len(self):,} inputs, {number}, temperature {self.temperature:.3g}{means}"

    def __len__(self) -> int:
        """B, the number of inputs."""
        return len(self.draws_used)

    def __getitem__(self, which: slice | Tensor | Sequence[int]) -> Self:
        """The prediction for some of the inputs."""
        if isinstance(which, int):
            raise PatchbayesError(
                f"prediction[{which}]: expected a slice, numbers or a mask.\n  do       prediction[{which}:{which + 1}]."
            )
        kept: dict[str, Any] = {name: value[which] for name, value in self._fields(PER_INPUT).items()}
        kept |= {name: value[:, which] for name, value in self._fields(PER_DRAW).items()}
        return dataclasses.replace(self, **kept)

    @classmethod
    def concatenate(cls, predictions: Sequence[Self]) -> Self:
        """One prediction for the inputs of several, which must come from the same draws."""
        if not predictions:
            raise PatchbayesError("concatenate: expected at least one prediction, got none.")
        first = predictions[0]
        for other in predictions[1:]:
            if type(other) is not type(first):
                raise PatchbayesError(
                    f"concatenate: expected predictions of one kind, got {type(first).__name__} and {type(other).__name__}."
                )
            if other.num_draws != first.num_draws or not torch.equal(other.weights, first.weights):
                raise PatchbayesError("concatenate: the predictions do not come from the same draws.")
            for name in ("temperature", "draw_temperature"):
                one, another = getattr(first, name), getattr(other, name)
                if one != another:
                    raise PatchbayesError(f"concatenate: expected one {name}, got {one:g} and {another:g}.")
            if other._fields(PER_DRAW).keys() != first._fields(PER_DRAW).keys():
                raise PatchbayesError("concatenate: some predictions kept their draws, some did not (keep_draws).")
        joined: dict[str, Any] = {}
        for axis, metadata in enumerate((PER_INPUT, PER_DRAW)):
            parts = [prediction._fields(metadata) for prediction in predictions]
            joined |= {name: torch.cat([part[name] for part in parts], dim=axis) for name in parts[0]}
        return dataclasses.replace(first, **joined)

    def merged(self, new: Self, rows: Tensor) -> Self:
        """The same with `new` averaged in: other, independent draws for the inputs numbered by rows (len(new),)."""
        before = self[rows]
        used = before.draws_used + new.draws_used
        share = (new.draws_used.double() / used).to(new.standard_error)
        part = _column(share, new.standard_error)
        variance = ((1 - part) * before.standard_error).square() + (part * new.standard_error).square()
        fields: dict[str, Tensor] = {
            "draws_used": used,
            "degrees_of_freedom": before.degrees_of_freedom + new.degrees_of_freedom,
            "standard_error": variance.sqrt(),
            **before._mixed(new, share),
        }
        merged: dict[str, Any] = {}
        for name, value in fields.items():
            merged[name] = getattr(self, name).clone()
            merged[name][rows.to(value.device)] = value
        return dataclasses.replace(self, **merged)

    def monte_carlo_interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Where the average over infinitely many draws lies, with confidence `level`: two tensors like `probs` or `mean`.

            estimate -+ t(level; degrees of freedom) x standard error, t being Student's quantile

        This is the error made by averaging S draws instead of all; it says nothing about the target (`interval` does that, in
        regression). Under an "upper estimate" the confidence is at least `level`. Draws from two to four blocks have few
        degrees of freedom: plus and minus 1.96 standard errors would cover 68 to 86 %.
        """
        check_level("monte_carlo_interval", level)
        if self.standard_error_kind == "unknown":
            raise PatchbayesError(
                f"monte_carlo_interval: the error of these {self.num_draws} draws is unknown (a single one, draws that come "
                "twice, or a part of an enumeration).\n  do       predict with at least two draws that were made together."
            )
        quantiles = {
            d: 0.0 if d == torch.inf else student_t(int(d), level) for d in self.degrees_of_freedom.unique().tolist()
        }
        reach = torch.tensor([quantiles[d] for d in self.degrees_of_freedom.tolist()], dtype=torch.float64)
        middle = getattr(self, self.estimate)
        reach = _column(reach.to(middle), middle) * self.standard_error
        return self._possible(middle - reach), self._possible(middle + reach)

    def _possible(self, bound: Tensor) -> Tensor:
        """The nearest value that the estimate can take."""
        return bound

    def numpy(self) -> dict[str, np.ndarray]:
        """Everything it says as a plain dictionary of NumPy arrays, ready for `numpy.savez`; kept draws if there are any."""
        names = (
            *self.reported,
            "standard_error",
            "degrees_of_freedom",
            "draws_used",
            "weights",
            *self._fields(PER_DRAW),
        )
        arrays = {name: getattr(self, name).detach().cpu().numpy() for name in names}
        numbers = ("temperature", "draw_temperature", "num_draws")
        return arrays | {name: np.array(getattr(self, name)) for name in numbers}

    def to(self, device: torch.device | str) -> Self:
        """The same with its tensors on a device. Trainers move outputs so: a prediction can be what `predict_step` returns."""
        held: dict[str, Any] = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        moved: dict[str, Any] = {name: value.to(device) for name, value in held.items() if isinstance(value, Tensor)}
        return dataclasses.replace(self, **moved)

    def usable(self) -> Self:
        """The same with ordinary tensors, where those were made in inference mode."""
        made: dict[str, Any] = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        made = {name: v.clone() for name, v in made.items() if isinstance(v, Tensor) and v.is_inference()}
        return dataclasses.replace(self, **made)

    def check(
        self,
        targets: Tensor,
        statistic: Callable[[Tensor], Tensor | float],
        replicates: int = 1000,
        generator: torch.Generator | None = None,
    ) -> PredictiveCheck:
        """Posterior predictive check (appendix B.3): replicate y* for all inputs, compare a statistic with the data's.

        `statistic` maps targets of all inputs to a number. A p-value near 0 or 1 says that the data are unlike what the
        model would produce, in that respect. Needs keep_draws=True.
        """
        samples = self.sample(replicates, generator)
        check_shape("check", targets, samples.shape[1:])
        observed = float(statistic(targets))
        replicated = torch.tensor([float(statistic(sample)) for sample in samples], dtype=torch.float64)
        return PredictiveCheck(observed, replicated, float((replicated >= observed).double().mean()))

    def _fields(self, metadata: Mapping[str, Any]) -> dict[str, Tensor]:
        """The tensors with a row for each input, or those that were kept of every draw."""
        some = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.metadata == metadata}
        return {name: value for name, value in some.items() if value is not None}

    def _pick(self, number: int, generator: torch.Generator, what: str) -> Tensor:
        """The numbers of the draws behind `number` replicates, (R,) int64: each is one draw for all inputs."""
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise PatchbayesError(f"{what}: expected a number of samples of at least 1, got {number!r}.")
        if self.draws is not None and self.draws.layout.apart:
            raise PatchbayesError(
                f'{what}: "{self.draws.layout.apart[0]}" draws outputs for each example; a replicate needs one function for '
                'all of them.\n  do       patch it with form="weights".'
            )
        return torch.multinomial(self.weights, number, replacement=True, generator=generator)


def prediction_class(name: str) -> type[Prediction]:
    """The class of predictions that a likelihood offers by that name."""
    if name not in _KINDS:
        raise PatchbayesError(
            f"a likelihood offers {name!r}: expected the name of a prediction, one of {', '.join(sorted(_KINDS))}."
        )
    return _KINDS[name]


def needed(kept: Tensor | None, what: str) -> Tensor:
    """What was kept of every draw, or an error that says how to keep it."""
    if kept is None:
        raise PatchbayesError(f"{what} needs every draw: call predict(..., keep_draws=True).")
    return kept


def check_shape(what: str, targets: Tensor, shape: Sequence[int]) -> None:
    """Refuse targets of another shape."""
    if targets.shape != torch.Size(shape):
        raise PatchbayesError(f"{what}: expected targets of shape {tuple(shape)}, got shape {tuple(targets.shape)}.")


def check_level(what: str, level: float) -> None:
    """Refuse a level that is not between 0 and 1."""
    if not 0 < level < 1:
        raise PatchbayesError(f"{what}(level={level!r}): expected a level between 0 and 1.")


def _column(values: Tensor, like: Tensor) -> Tensor:
    """(B,) as (B, 1, ...), to be multiplied with a tensor (B, ...)."""
    return values.reshape(-1, *[1] * (like.dim() - 1))
