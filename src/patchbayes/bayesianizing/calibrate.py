"""calibrate_: how far draws spread and how sharp their average is, fitted to held-out data."""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..draws.draws import Draws, check_is_module
from ..errors import PatchbayesError
from ..likelihoods import Likelihood, checked_likelihood
from ..patching.drawing import hold
from ..patching.frames import MEAN
from ..patching.network import PatchedNetwork, Site
from ..patching.selection import as_tensor, call, evaluating
from ..prediction import predict_batches
from ..views import Views, as_views
from .held_out import HeldOut, Select, select_for, to_device
from .progress import shown
from .report import FEW, CalibrationReport, Scores
from .restoring import put_back, restored_on_error, with_record
from .score import Average, best_temperature, check_scored, raised_temperature, scores
from .spread import Learned, SpreadSearch, is_member, relative_spread, rigid_sites, scalable_sites
from .tries import Tried, Tries

#: Examples in a batch.
BATCH = 64
#: Of the held-out examples, the part that is kept away from learning and judges its result.
_AWAY, _MOST_AWAY = 0.3, 1000
#: Numbers that learning fits beyond the temperature: the NLL on the N examples that fitted them is too low by this over N.
_FITTED = 4
#: Standard errors by which the draws must be ahead of the temperature alone on the examples that judge: at least, and where
#: they are few or have learned too; so many examples ask for one.
_CAUTION, _MOST_CAUTION, _ONE_ERROR = 0.5, 2.0, 100


def calibrate_(
    model: nn.Module,
    held_out: Iterable[Any],
    *,
    draws: int = 20,
    spread: Literal["learn", "keep"] = "learn",
    budget: int = 40_000,
    examples: int = 1200,
    likelihood: Likelihood | None = None,
    seed: int = 0,
    select: Select | None = None,
    output: Callable[[Any], Tensor] | None = None,
    views: Views | Callable[[Any, torch.Generator], Any] | None = None,
    tolerance: float = 0.0,
    progress: Callable[[str, float], None] | None = None,
) -> CalibrationReport:
    """Fit the spread of a patched network's draws, and the temperature of their average, to held-out data; in place.

    1. The mean network, in one pass, gets the temperature that fits it: temperature scaling, the rival.
    2. A factor on the spread of all sites, and how it changes with their depth, are searched for `draws` draws
       (`SpreadSearch`), with the temperature that softens each draw before the average (`Likelihood.draw_temperature`).
    3. The averaged prediction gets its own temperature, shrunk towards 1 where examples are few: spread and softened draws
       can only make a network more cautious.
    4. Where some noise cannot be scaled (the masks of dropout), draws as they were are kept if they are no worse on all
       examples than what the search found.
    5. Where the search found a spread that is ahead of the one that the network had by no more than fitting gives for
       nothing, the network keeps its own. Where the result is no better than temperature scaling (on examples that were
       kept away from learning by half a standard error, by up to two where they are few, and on all of them by more than
       fitting a few numbers gives for nothing), spread becomes 0 and the report says so.
    6. With a `tolerance`, the temperatures are then raised as far as that allows.

    A network without patches gets its temperature alone: `predict`, `save` and `load_` then know it as a network without sites.
    So does an explicit ensemble, whose members were trained one by one: there is no mean network that they spread around.
    The temperatures live in the network's likelihood, which `predict` uses and `save` keeps.

    held_out   batches that the network was not trained on, readable twice: pairs (inputs, targets), several inputs and then the
               targets, or mappings with labels in them; `select` (batch -> inputs, targets) for all others.
    draws      how many draws prediction will take; the default is that of `predict`.
    spread     "keep" fits the temperatures alone.
    budget     inputs through the network while learning; there are no backward passes. The last scores, examples * draws
               passes, come on top.
    examples   held-out examples that are used at most, a random part by `seed`; they are held in memory.
    likelihood what the output says of the targets; that of the patched network if not given.
    output     network output -> tensor, for networks that return something else (`.logits` and ["logits"] are found).
    views      as in `predict`, which must then be given the same: the draws are calibrated on their views, and the rival is the
               mean network averaged over the same views, with a temperature.
    tolerance  NLL on held-out data, in nats, that is given up for caution: under shift every network is too sure of itself, and
               0.01 here buys much there.
    progress   called with the stage and the seconds left of it; by default a line on a terminal.

    Ctrl-C while learning keeps the best until then. After any other error the network is as it was.
    """
    check_is_module(model)
    check_numbers("calibrate_", draws, budget, examples, tolerance)
    if spread not in ("learn", "keep"):
        raise PatchbayesError(f'calibrate_(spread={spread!r}): expected "learn" or "keep".')
    generator = torch.Generator().manual_seed(seed)
    examples = affordable_examples(examples, budget, views, draws)
    chosen = HeldOut.read(held_out, examples, BATCH, generator, select or select_for(model))
    with with_record(model) as (root, network), restored_on_error(network), shown(progress) as tell:
        likelihood = checked_likelihood(likelihood or network.likelihood)
        network.calibration = None  # with views, perhaps, that no longer hold
        calibration = Calibration(root, network, chosen, likelihood, draws, budget, output or as_tensor, tell, views)
        return calibration.run(spread, tolerance)


class Calibration:
    """The steps of `calibrate_` on one network."""

    def __init__(
        self,
        model: nn.Module,
        network: PatchedNetwork,
        held_out: HeldOut,
        likelihood: Likelihood,
        draws: int,
        budget: int,
        output: Callable[[Any], Tensor],
        progress: Callable[[str, float], None],
        views: Views | Callable[[Any, torch.Generator], Any] | None = None,
        layers: str = "",
        tries: Tries | None = None,
    ) -> None:
        self.model, self.network, self.held_out, self.likelihood = model, network, held_out, likelihood
        self.draws, self.budget, self.output, self.progress = draws, budget, output, progress
        self.views = None if views is None else as_views(views, draws)
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.targets = [targets.to(self.device) for targets in held_out.targets]
        self.layers, self.tries, self.looked = layers, tries, list[Tried]()
        self.plain, self.averages = list[Average](), list[Average]()
        self.passes = self.scoring_passes = self.away = 0
        self.stopped = False
        self.seconds: dict[str, float] = {}
        self._clock = time.perf_counter()

    def follow(self, other: "Calibration") -> None:
        """Take over what another calibration, of other sites of the same network, has found out and spent."""
        self.plain, self.passes, self.looked, self.seconds = other.plain, other.passes, other.looked, other.seconds
        self.stopped = other.stopped

    def look(self, share: float) -> float:
        """The least NLL of a first look that takes this share of the budget; after Ctrl-C the best until then."""
        temperature = self._scale_mean()
        search = self._search(temperature, min(share * self.budget, self.budget - self.passes))
        try:
            search.look()
        except KeyboardInterrupt:
            if not (search.tried or self.looked):
                raise
            self.stopped = True
        self.passes += search.passes
        self.looked = self.looked + search.tried
        self._lap("spread")
        return min((one.nll for one in search.tried), default=math.inf)

    def _scale_mean(self) -> float:
        """The temperature of the mean network, and with it the scores of the rival."""
        if not self.plain:
            self.plain = self.mean_averages()
            self.passes += len(self.held_out) * (1 if self.views is None else len(self.views))
            self._lap("mean network")
        temperature = best_temperature(self.plain, self.targets)
        self.rival, self.away = scores(self.plain, self.targets, temperature), self._kept_away()
        return temperature

    def run(
        self, spread: Literal["learn", "keep"], tolerance: float = 0.0, try_start: bool = True
    ) -> CalibrationReport:
        """try_start: where the learned spread is hardly better than that which the network had, judge that one."""
        likelihood, number = self.likelihood, len(self.held_out)
        mean_temperature = self._scale_mean()
        before, scaled = (Scores.of(self.plain, self.targets, t) for t in (1.0, mean_temperature))
        sites = scalable_sites(self.network)
        result = Result("none", dict.fromkeys(sites, 0.0), mean_temperature, scaled)
        members = any(map(is_member, self.network.sites))
        searched = bool(self.network.sites) and not members
        learning, rigid = spread == "learn" and bool(sites), bool(rigid_sites(self.network))
        search = self._search(mean_temperature, self.budget - self.passes) if searched else None
        found = None if search is None else search.run(self.stopped) if learning else search.start()
        if members:
            result = self._judged("start", Learned({}, 1.0, 0.0))
        elif search is not None and found is not None:
            self.passes += found.passes
            self._lap("spread")
            learned = learning and (found.ahead_of_start or not try_start)
            held = [(p.data, p.detach().clone()) for site in sites if rigid for p in site.parameters().values()]
            result = self._judged("learned", found) if learned else self._judged("start", search.start())
            if rigid and not result.interrupted:
                result = self._or_as_it_was(result, held)
        if found is not None and learning and not result.worth and not result.interrupted:
            drawn, result = result, Result("none", {}, mean_temperature, scaled, result.gain, result.gain_error)
            if rigid:  # draws go on to differ, and keep the spread and the temperatures that fit them
                result.temperature, result.draw_temperature = drawn.temperature, drawn.draw_temperature
                result.factors = drawn.factors
        if result.kind == "none" and not rigid:
            result.factors = dict.fromkeys(sites, 0.0)
            self._scale(result.factors)
        if tolerance and (self.averages or result.kind == "none"):
            mean_temperature = raised_temperature(self.plain, self.targets, mean_temperature, tolerance)
            averages = self.plain if result.kind == "none" and not rigid else self.averages
            result.temperature = raised_temperature(averages, self.targets, result.temperature, tolerance)
            scored = (self.plain, mean_temperature) if result.kind == "none" else (averages, result.temperature)
            result.scores = Scores.of(scored[0], self.targets, scored[1])
        if members:  # no mean network to compare with
            before, scaled = Scores.of(self.averages, self.targets, 1.0), result.scores
            result.gain = result.gain_error = None
        self._lap("scores")
        likelihood.set_temperature_(
            result.temperature, mean_temperature=mean_temperature, draw_temperature=result.draw_temperature
        )
        self.network.likelihood = likelihood
        self.network.calibration = self._measured(before, scaled, result.scores)
        return CalibrationReport(
            chosen=result.kind,
            spread=self._spread(sites),
            factors={site.name: factor for site, factor in result.factors.items()},
            temperature=result.temperature,
            mean_temperature=mean_temperature,
            draw_temperature=result.draw_temperature,
            before=before,
            temperature_scaled=scaled,
            after=result.scores,
            gain=result.gain,
            gain_error=result.gain_error,
            num_held_out=number,
            draws=self.draws,
            tried=tuple(self._tried(found)),
            passes=self.passes,
            scoring_passes=self.scoring_passes,
            seconds=self.seconds,
            views=None if self.views is None else repr(self.views),
            warming=self.network.share == 0,
            judged=sum(map(len, self.targets[: self.away])),
            num_classes=self.plain[0].parts[0].shape[-1] if self.plain[0].kind == "classes" else 0,
            of_variance=likelihood.offers not in ("ClassPrediction", "LabelPrediction"),
            interrupted=result.interrupted or (found is not None and found.interrupted),
        )

    def _tried(self, found: Learned | None) -> list[Tried]:
        own = found.tried if found else []
        return [one for one in self.looked if one.layers != self.layers] + own

    def _measured(self, before: Scores, scaled: Scores, after: Scores) -> dict[str, Any]:
        """What the network and its files keep of the scores, and of the views that they hold for."""
        found: dict[str, Any] = {"held_out": len(self.held_out), "draws": self.draws}
        found |= {} if self.views is None else {"views": self.views.name[:100]}
        rows = {"before": before, "scaled": scaled, "after": after}
        names = ("nll", "ece", "accuracy")
        cells = {f"{row}_{name}": getattr(scores, name) for row, scores in rows.items() for name in names}
        return found | {name: value for name, value in cells.items() if value is not None}

    def _judged(self, kind: Literal["learned", "start"], found: Learned) -> "Result":
        """The network with a spread, scored: the learned one, which is written into it, or the one that it has."""
        factors = dict.fromkeys(scalable_sites(self.network), 1.0)
        if kind == "learned":
            factors = {site: math.exp(value) for site, value in found.log_factors.items()}
            self._scale(factors)
        self.likelihood.set_temperature_(draw_temperature=found.draw_temperature)
        averages = self._averages(may_stop=kind == "learned")
        softened = found.draw_temperature
        if averages is None:
            nll = min((one.nll for one in found.tried), default=math.nan)
            temperature = math.exp(found.log_temperature)
            return Result(kind, factors, temperature, Scores(nll), draw_temperature=softened, interrupted=True)
        self.averages = averages
        temperature = best_temperature(averages, self.targets)
        gain, error, worth = self._gain(averages, temperature, _FITTED if kind == "learned" else 1)
        scored = Scores.of(averages, self.targets, temperature)
        return Result(kind, factors, temperature, scored, gain, error, worth, softened)

    def _or_as_it_was(self, result: "Result", held: list[tuple[Tensor, Tensor]]) -> "Result":
        """Where masks stay, whatever the search says: the draws as they were, with a temperature of their average alone, if
        they are no worse on all examples than what the search found on few. held: parameters before the search."""
        averages, found = self.averages, [(p.data, p.detach().clone()) for p, _ in held]
        put_back(held)
        plain = self._judged("start", Learned({}, 1.0, 0.0))
        if plain.scores.nll <= result.scores.nll:
            return plain
        put_back(found)
        self.averages = averages
        return result

    def _spread(self, sites: list[Site]) -> dict[str, float]:
        if not sites:
            return {}
        draw = Draws.stratified(self.model, 1).network_draw(0, self.network.device)
        return {site.name: relative_spread(site, draw) for site in sites}

    def _search(self, temperature: float, budget: float) -> SpreadSearch:
        """The search for a spread that fits all batches but those that are kept away from it."""
        kept = sum(map(len, self.targets[: self.away]))
        return SpreadSearch(
            self.model,
            self.network,
            HeldOut(self.held_out.batches[self.away :]),
            self.likelihood,
            draws=self.draws,
            budget=int(budget),
            temperature=temperature,
            rival=-float(self.rival[kept:].mean()),
            output=self.output,
            view=None if self.views is None else self._seen_by,
            progress=self.progress,
            layers=self.layers,
            tried=[one for one in self.looked if one.layers == self.layers],
            tries=self.tries,
        )

    def _seen_by(self, inputs: Any, draw: int) -> Any:
        assert self.views is not None
        outcomes = {span.outcomes for span in self.network.layout.spans}
        assigned = self.views.assigned(self.draws, outcomes.pop() if len(outcomes) == 1 else 1)
        return self.views.view(inputs, assigned[draw])

    def mean_averages(self) -> list[Average]:
        """What the mean network says of every batch."""
        found: list[Average] = []
        with hold(self.network, MEAN), evaluating(self.model):
            for inputs, targets in zip(self.held_out.inputs(self.device), self.targets, strict=True):
                seen = [inputs] if self.views is None else [self.views.view(inputs, v) for v in range(len(self.views))]
                outputs = torch.stack([self.output(call(self.model, one)) for one in seen])
                if not found:
                    check_scored(self.likelihood, outputs, targets)
                    if self.likelihood.offers == "ClassPrediction":
                        self.held_out.check_labels(getattr(self.likelihood, "ignore_index", None))
                if not bool((outputs < torch.inf).all()):
                    raise PatchbayesError(
                        "held_out: the network's output for it is not finite (NaN or infinity).\n"
                        "  do       look for NaN in the parameters and for inputs that are not prepared as in training."
                    )
                self.likelihood.log_prob(outputs, targets)
                found.append(Average.of_outputs(self.likelihood, outputs.float()))
        return found

    def _averages(self, may_stop: bool) -> list[Average] | None:
        """What the average of the draws says of every batch; None where that was interrupted and may be."""
        keep = self.likelihood.offers not in ("ClassPrediction", "LabelPrediction")
        batches = [(to_device(inputs, self.device), None) for inputs, _ in self.held_out.batches]
        averages: list[Average] = []
        started = time.perf_counter()
        try:
            for part in predict_batches(
                self.model,
                batches,
                self.draws,
                likelihood=self.likelihood,
                keep_draws=keep,
                output=self.output,
                views=self.views,
            ):
                averages.append(Average.of_prediction(self.likelihood, part))
                left = (time.perf_counter() - started) / len(averages) * (len(batches) - len(averages))
                self.progress("scores", left)
        except KeyboardInterrupt:
            if not may_stop:
                raise
            return None
        self.scoring_passes += self.draws * len(self.held_out)
        return averages

    def _gain(self, averages: list[Average], temperature: float, fitted: int) -> tuple[float, float, bool]:
        """By how much the draws are ahead of temperature scaling, the standard error of that, and whether it is worth it."""
        gains = scores(averages, self.targets, temperature) - self.rival
        judged = gains[: sum(len(targets) for targets in self.targets[: self.away])] if self.away else gains
        error = float(judged.std() / math.sqrt(len(judged))) if len(judged) > 1 else math.inf
        caution = max(_CAUTION, math.sqrt(_ONE_ERROR / len(judged))) if self.away else _MOST_CAUTION
        worth = float(gains.mean()) > fitted / len(gains) and float(judged.mean()) > min(caution, _MOST_CAUTION) * error
        return float(judged.mean()), error, worth

    def _kept_away(self) -> int:
        """How many batches judge and do not learn."""
        batches = len(self.held_out.batches)
        if len(self.held_out) < FEW or batches < 3:
            return 0
        return max(1, min(round(_AWAY * batches), _MOST_AWAY // BATCH, batches - 1))

    def _scale(self, factors: dict[Site, float]) -> None:
        for site, factor in factors.items():
            site.posterior.scale_spread_(factor)

    def _lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._clock
        self._clock = now


@dataclass
class Result:
    """A spread, and how the network scores with it on the held-out examples."""

    kind: Literal["learned", "start", "none"]
    factors: dict[Site, float]
    temperature: float
    scores: Scores
    gain: float | None = None
    gain_error: float | None = None
    worth: bool = True
    draw_temperature: float = 1.0
    interrupted: bool = False


def affordable_examples(examples: int, budget: int, views: Any, draws: int) -> int:
    """So many, or fewer where a pass of the mean network over all their views would take more than half of the budget."""
    return max(1, min(examples, budget // (2 * (1 if views is None else len(as_views(views, draws))))))


def check_numbers(caller: str, draws: int, budget: int, examples: int, tolerance: float) -> None:
    """Refuse numbers of draws, passes and examples, and a tolerance, that are none."""
    if isinstance(tolerance, bool) or not isinstance(tolerance, int | float) or not 0 <= tolerance < math.inf:
        raise PatchbayesError(f"{caller}(tolerance={tolerance!r}): expected a finite number of at least 0.")
    for name, value in (("draws", draws), ("budget", budget), ("examples", examples)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise PatchbayesError(f"{caller}({name}={value!r}): expected a whole number of at least 1.")
