"""How far a network's draws spread: a level for all sites and its slope over the depth, searched by forward passes alone."""

import contextlib
import copy
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..draws.draws import Draws
from ..draws.layout import NetworkDraw
from ..errors import PatchbayesError
from ..layers import is_norm
from ..likelihoods import Likelihood
from ..patching.frames import Frame, pushed
from ..patching.network import PatchedNetwork, Site
from ..patching.prefix import FixedPrefix, find_prefix, sites_alone_learn
from ..patching.selection import call, evaluating
from .held_out import HeldOut, to_device
from .restoring import put_back
from .score import Average, best_temperature, scores
from .tries import Tried, Tries

#: Steps in the logarithm of the spread: of the first look, and around the best of it; and in the slope over the depth.
_COARSE, _FINE, _SLOPE = math.log(2.0), math.log(1.4), 1.2
_MOST_STEPS = 6  # of the first look, in one direction
_PREFIX_PASSES = 2 * 16  # at most, to find what lies before the first site: two inputs
_LOOKS = 4  # places of a look at one set of layers of several
_FIRST_SHARE = 0.25  # of the budget, for three places of the first look
#: The deviation of the slope from its start that is expected; few examples do not move it.
_SLOPE_PRIOR = 0.7
_SLOPING = 4  # sites at least, for a slope
_FITTED = (
    1  # nats by which the examples speak for nothing for each number that the search fits: a level, perhaps a slope
)
#: Temperatures of the draws that are tried, as multiples of that of the mean network; and 1.
_DRAW_TEMPERATURES = (0.7, 1.0, 1.4, 2.0, 2.8)
_KEPT = 2**24  # numbers of drawn layers that are held at a time
_VALUES = 2**22  # numbers that temperatures are fitted to: a few dense predictions have as many labels as are needed


class ScaledFrame(Frame):
    """A draw whose deviations from the mean are multiplied by a factor at each site.

    keep   hold the values of these sites, for the next batch.
    """

    def __init__(
        self, network: PatchedNetwork, draw: NetworkDraw, factors: Mapping[Site, Tensor], keep: bool = False
    ) -> None:
        super().__init__(network, draw, running=True)
        self._factors, self._keep, self._kept = factors, keep, dict[tuple[Site, str], Tensor]()

    def value(self, site: Site, name: str) -> Tensor:
        if (kept := self._kept.get((site, name))) is not None:
            return kept
        value = super().value(site, name)
        factor = self._factors.get(site)
        if factor is None or not value.is_floating_point():
            return value
        mean = site.posterior.mean()[name].detach()
        scaled = mean + factor.to(mean) * (value.detach() - mean)
        if self._keep:
            self._kept[site, name] = scaled
        return scaled


@dataclass
class Learned:
    """What the search found: the logarithm of a factor for each scalable site, the temperatures beside it, and its way.

    ahead_of_start   whether its NLL is below that of the spread that the network had by more than the fitted numbers give for
                     nothing.
    """

    log_factors: dict[Site, float]
    draw_temperature: float
    log_temperature: float
    tried: list[Tried] = field(default_factory=list)
    passes: int = 0
    interrupted: bool = False
    ahead_of_start: bool = True


def scalable_sites(network: PatchedNetwork) -> list[Site]:
    """The sites whose spread can be multiplied: not those of an explicit ensemble, whose mean network means nothing."""
    return [site for site in network.sites if site.posterior.names and not is_member(site) and _scales(site)]


def is_member(site: Site) -> bool:
    """Whether one draw picks a member of the whole network (tie "network"), trained by itself: means of members say nothing."""
    groups = site.posterior.groups()
    return groups is not None and groups.tie == "network"


def rigid_sites(network: PatchedNetwork) -> list[Site]:
    """The sites that are random in prediction and whose spread cannot be multiplied."""
    scalable = scalable_sites(network)
    random = (site for site in network.sites if site.posterior.groups() is not None or site.posterior.noise != "none")
    return [site for site in random if site not in scalable]


class SpreadSearch:
    """The spread that makes the NLL of the averaged prediction least: of all draws in use, the same in every place tried.

        log factor_i = level + slope * depth_i,   depth from -1/2 at the first site to 1/2 at the last

    A first look doubles or halves the level while that helps; then five places around the best, on more examples, give a
    parabola in each of the two numbers. Where both are least is tried too, and the best of the six is taken. At every place
    the temperature of the draws and that of their average are those that fit it best. No gradient is needed: the two numbers
    are all that so few passes can tell (the gradient of a single site's spread at 64 examples is a tenth of its own noise).
    """

    def __init__(
        self,
        model: nn.Module,
        network: PatchedNetwork,
        held_out: HeldOut,
        likelihood: Likelihood,
        *,
        draws: int,
        budget: int,
        temperature: float,
        rival: float,
        output: Callable[[Any], Tensor],
        view: Callable[[Any, int], Any] | None = None,
        progress: Callable[[str, float], None] | None = None,
        layers: str = "",
        tried: Sequence[Tried] = (),
        tries: Tries | None = None,
    ) -> None:
        """budget: image-passes. temperature, rival: those of the mean network, and its NLL with it. view: (inputs, draw).

        tried: what a look at these sites has tried, to go on from. tries: where everything tried is kept.
        """
        self.model, self.network, self.held_out, self.likelihood = model, network, held_out, likelihood
        self.draws, self.budget, self.rival = draws, budget, rival
        self.output, self.view, self.progress, self.layers = output, view, progress, layers
        several = likelihood.offers in ("ClassPrediction", "LabelPrediction") and draws > 1
        self.draw_temperatures = [1.0, *(t * temperature for t in _DRAW_TEMPERATURES)] if several else [1.0]
        self._prefix: FixedPrefix | None = None
        self.sites = scalable_sites(network)
        number = len(self.sites)
        self.depths = {site: i / (number - 1) - 0.5 if number > 1 else 0.0 for i, site in enumerate(self.sites)}
        made = Draws.stratified(model, draws)  # those that `predict` makes
        self.pool = [made.network_draw(which, network.device) for which in range(draws)]
        numbers = sum(p.numel() for site in self.sites for p in site.posterior.mean().values())
        self._small = draws * numbers <= _KEPT
        self.tried, self.tries = list(tried), tries
        self._ahead = 0.0  # of the spread that the network has, in nats of all examples
        self._looking = view is None and draws > 1  # for what lies before the first site: paid here
        looking = _PREFIX_PASSES if self._looking else 0
        self._may_try = looking + draws <= budget
        self.passes, self.started = looking if self._may_try else 0, time.perf_counter()

    def look(self) -> Tried:
        """The best of a first look that takes the whole budget."""
        return self._first_look(self._affordable(self.budget / _LOOKS)) if self._may_try else self._untried

    def run(self, stopped: bool = False) -> Learned:
        """The search; after Ctrl-C the best until then. stopped: it has come already, and something was tried before it."""
        if stopped:
            return self._found(min(self.tried, key=lambda one: one.nll), True)
        if not (self.tried or self._may_try):
            return self._found(self._untried, False)
        interrupted = False
        try:
            if self.tried:
                best = min(self.tried, key=lambda one: one.nll)
            else:
                best = self._first_look(self._affordable(_FIRST_SHARE * self.budget / 3))
            self._ahead = best.examples * (self.tried[0].nll - best.nll)
            best = self._around(best, self._affordable((self.budget - self.passes) / (6 if self._sloping else 4)))
        except KeyboardInterrupt:
            if not self.tried:
                raise
            interrupted = True
            best = min(self.tried, key=lambda one: one.nll)
            self._ahead = best.examples * (self.tried[0].nll - best.nll)
        return self._found(best, interrupted)

    def start(self) -> Learned:
        """The temperatures that fit the spread that the network has."""
        if self.tried or not self._may_try:
            return self._found(self.tried[0] if self.tried else self._untried, False)
        return self._found(self._try(0.0, 0.0, self._affordable(self.budget / 2)), False)

    @property
    def _untried(self) -> Tried:
        """The spread that the network has, where the budget has no room to try any."""
        return Tried(0.0, 0.0, math.inf, 1.0, 0.0, 0, self.layers)

    @property
    def _sloping(self) -> bool:
        return len(self.sites) >= _SLOPING

    def _found(self, best: Tried, interrupted: bool) -> Learned:
        factors = {site: best.level + best.slope * depth for site, depth in self.depths.items()}
        ahead = self._ahead > _FITTED * (2 if self._sloping else 1)
        return Learned(
            factors, best.draw_temperature, best.log_temperature, self.tried, self.passes, interrupted, ahead
        )

    def _first_look(self, examples: int) -> Tried:
        best = self._try(0.0, 0.0, examples)
        first = -1 if best.nll > self.rival else 1
        for direction in (first, -first):
            moved = False
            for step in range(1, _MOST_STEPS + 1):
                if self.passes + self.draws * examples > self.budget:
                    return best
                new = self._try(direction * step * _COARSE, 0.0, examples)
                if not new.nll < best.nll:
                    break
                best, moved = new, True
            if moved:
                break
        return best

    def _around(self, center: Tried, examples: int) -> Tried:
        """The least of two parabolas through the center and its neighbors, on more examples, or one of these if it is not."""
        if self.passes + 3 * self.draws * examples > self.budget:
            return center
        center = self._try(center.level, center.slope, examples)
        sides = [self._try(center.level + sign * _FINE, center.slope, examples) for sign in (-1, 1)]
        level, slope = center.level + _FINE * _vertex(sides[0].nll, center.nll, sides[1].nll), center.slope
        around = [center, *sides]
        if self._sloping and self.passes + 2 * self.draws * examples <= self.budget:
            sides = [self._try(center.level, slope + sign * _SLOPE, examples) for sign in (-1, 1)]
            unlikely = 0.5 * (_SLOPE / _SLOPE_PRIOR) ** 2 / examples
            slope += _SLOPE * _vertex(sides[0].nll + unlikely, center.nll, sides[1].nll + unlikely)
            around += sides
        new = all((one.level, one.slope) != (level, slope) for one in around)
        if new and self.passes + self.draws * examples <= self.budget:
            around.append(self._try(level, slope, examples))
        best = min(around, key=lambda one: one.nll)
        self._ahead += examples * (center.nll - best.nll)
        return best

    def _affordable(self, passes: float) -> int:
        return max(1, min(int(passes / self.draws), len(self.held_out)))

    def _try(self, level: float, slope: float, examples: int) -> Tried:
        found = None if self.tries is None else self.tries.get(self.layers, level, slope, examples)
        if found is None:
            found = self._scored(level, slope, examples)
            if self.tries is not None:
                self.tries.add(found, examples)
        self.passes += self.draws * found.examples
        self._tell()
        self.tried.append(found)
        return found

    @torch.no_grad()
    def _scored(self, level: float, slope: float, examples: int) -> Tried:
        factors = {site: torch.tensor(math.exp(level + slope * depth)) for site, depth in self.depths.items()}
        averages: dict[float, list[Average]] = {t: [] for t in self.draw_temperatures}
        targets: list[Tensor] = []
        device, held = self.network.device, 0
        frames = [ScaledFrame(self.network, draw, factors, self._small) for draw in self.pool]
        with evaluating(self.model), self._scaled_in_place(factors):
            for inputs, wanted in self.held_out.first(examples).batches:
                inputs, wanted = to_device(inputs, device), wanted.to(device or "cpu")
                outputs = []
                with self._prefix_kept(inputs):
                    for which, frame in enumerate(frames):
                        seen = inputs if self.view is None else self.view(inputs, which)
                        with pushed(frame):
                            outputs.append(self.output(call(self.model, seen)))
                stacked = torch.stack(outputs).float()
                for t, some in averages.items():
                    some.append(Average.of_outputs(self.likelihood, stacked, t))
                    held += some[-1].numel
                targets.append(wanted)
                self._tell(self.draws * sum(map(len, targets)))
                if held > _VALUES:
                    break
        found = Tried(level, slope, math.inf, 1.0, 0.0, sum(map(len, targets)), self.layers)
        for t, some in averages.items():
            if all(bool(part.isfinite().all()) for average in some for part in average.parts):
                temperature = best_temperature(some, targets)
                nll = -float(scores(some, targets, temperature).mean())
                if nll < found.nll:
                    found = dataclasses.replace(
                        found, nll=nll, draw_temperature=t, log_temperature=math.log(temperature)
                    )
        return found

    @contextlib.contextmanager
    def _scaled_in_place(self, factors: Mapping[Site, Tensor]) -> Iterator[None]:
        """In the block, sites that draw outputs and no weights have the spread that is tried."""
        local = [site for site in factors if not site.posterior.joint]
        held = [(p, p.detach().clone()) for site in local for p in site.parameters().values()]
        try:
            for site in local:
                site.posterior.scale_spread_(float(factors[site]))
            yield
        finally:
            put_back(held)

    def _prefix_kept(self, inputs: Any) -> contextlib.AbstractContextManager[None]:
        """In the block, what lies before the first site is not run again for every draw of these inputs."""
        if self._looking and isinstance(inputs, Tensor):
            self._looking = False
            with sites_alone_learn(self.network, self.model):
                self._prefix = find_prefix(self.model, inputs[:2])
        return contextlib.nullcontext() if self._prefix is None else self._prefix.serving(self._prefix.values(inputs))

    def _tell(self, more: int = 0) -> None:
        if self.progress is not None:
            done = min(1.0, (self.passes + more) / self.budget) if self.budget else 1.0
            self.progress("spread", (time.perf_counter() - self.started) * (1 - done) / done)


def _vertex(left: float, middle: float, right: float) -> float:
    """Where a parabola through (-1, left), (0, middle), (1, right) is least, at most 3/2 away, else the least of the three."""
    curvature, slope = left + right - 2 * middle, 0.5 * (right - left)
    if not (math.isfinite(curvature) and curvature > 0):
        return min((middle, 0.0), (left, -1.0), (right, 1.0))[1]
    return max(-1.5, min(1.5, -slope / curvature))


def start_norms_(network: PatchedNetwork) -> None:
    """Let the spread of norms fall with their depth, by a factor e from the first to the last, in place; where other layers
    are random too, it is half as large.

    Noise in late norms harms more than it tells: on 1,000 CIFAR-100 images a ResNet-20 gained 0.012, 0.036 and 0.052 nats on
    temperature scaling where it rose, stayed and fell (0.07 to 0.15 of the values); a ResNet-56 0.067 and 0.066 in the last
    two. Beside the first convolutions half of it was as good on the images that chose the temperatures, better by 0.02 on
    others, and by 0.1 on corrupted ones (ResNet-20, ten draws).
    """
    scalable = scalable_sites(network)
    sites = [site for site in scalable if is_norm(site.module)]
    size = 1.0 if len(sites) == len(scalable) else 0.5
    for number, site in enumerate(sites):
        depth = number / (len(sites) - 1) - 0.5 if len(sites) > 1 else 0.0
        site.posterior.scale_spread_(size * math.exp(-depth))


@torch.no_grad()
def relative_spread(site: Site, draw: NetworkDraw) -> float:
    """The root mean square of a site's deviations from its mean in one draw, as a part of that of the mean itself; where
    weights are not drawn, of all draws."""
    mean, value = site.posterior.mean(), site.realized(draw)
    names = [name for name in site.posterior.names if mean[name].is_floating_point()]
    if site.posterior.joint:
        apart = sum(float((value[name] - mean[name]).double().square().sum()) for name in names)
    else:
        apart = sum(float(value.double().sum()) for value in site.posterior.variance().values())
    size = sum(float(mean[name].double().square().sum()) for name in names)
    return math.sqrt(apart / size) if size else 0.0


def _scales(site: Site) -> bool:
    """Whether a posterior's spread can be multiplied: tried on a copy, since it is the posterior's to say."""
    trial = copy.deepcopy(site.posterior, {id(site.module): site.module})
    kept = {name: p.detach().clone() for name, p in site.module._parameters.items() if p is not None}
    try:
        trial.scale_spread_(0.5)
    except PatchbayesError:
        return False
    finally:  # the copy has the layer's own parameters, which a posterior may move its mean into
        with torch.no_grad():
            for name, value in kept.items():
                site.module._parameters[name].copy_(value)  # type: ignore[union-attr]
    return site.posterior.noise != "example" or not site.posterior.joint
