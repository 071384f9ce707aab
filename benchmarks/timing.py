"""Timing: calls in turn, medians with quartiles, and what a part of the draws says of all of them."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import patchbayes as pb
from patchbayes.patching.network import network_of
from patchbayes.prediction.engine import Engine
from patchbayes.prediction.plan import Plan
from patchbayes.prediction.predict import make_draws

FEWEST_DRAWS = 10  # timed, whatever the budget
_MOST_ROUNDS = 101


def in_turn(
    calls: Mapping[str, Callable[[], Any]],
    enough: float,
    fewest: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of every call in every round. The calls take turns, so that the machine's noise hits all alike.

    Rounds go on until `enough` seconds are spent, at least `fewest`; every second round runs backwards. With the clock
    `time.process_time`, and one thread, other processes on the machine count little.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    began = time.perf_counter()
    for number in range(_MOST_ROUNDS):
        if number >= fewest and time.perf_counter() - began > enough:
            break
        for name in list(calls) if number % 2 == 0 else list(calls)[::-1]:
            start = clock()
            calls[name]()
            seconds[name].append(clock() - start)
    return seconds


def summary(name: str, values: list[float]) -> dict[str, Any]:
    """The median under `name` and the quartiles beside it."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return {name: middle, f"{name}_quartiles": [low, high]}


def times(factor: float, seconds: list[float]) -> list[float]:
    """Every round scaled."""
    return [factor * value for value in seconds]


def quotients(above: list[float], below: list[float]) -> list[float]:
    """Round by round."""
    return [a / b for a, b in zip(above, below, strict=True)]


def draws_to_time(num_draws: int, one_pass: float, budget: float) -> int:
    """How many of the draws a timing runs: as many passes as fit the budget, at least ten."""
    return min(num_draws, max(FEWEST_DRAWS, int(budget / one_pass)))


@dataclass(frozen=True)
class Part:
    """A prediction by the engine that is timed on some of its draws: what is timed, its plan, and the plan of all draws."""

    draws: int | pb.Draws
    timed: Plan
    whole: Plan

    @property
    def factor(self) -> float:
        """The time of all draws over that of the timed ones: the ratio of their arithmetic, 1 where all are timed.

        The ratio of their numbers is none: what draws share (all before the first site, say) is computed once in both.
        """
        return arithmetic(self.whole) / arithmetic(self.timed)

    @property
    def num_timed(self) -> int:
        """Draws that were timed, not counting heads."""
        return self.timed.num_draws // self.timed.heads


def arithmetic(plan: Plan) -> float:
    """The least arithmetic of a plan, in passes of the whole network."""
    return plan.floor * plan.num_draws


def part_of(model: nn.Module, x: Tensor, draws: int | pb.Draws, most_passes: int) -> Part:
    """All draws where they, or their arithmetic, are `most_passes` at the most, else the first `most_passes` draws."""
    whole = plan_of(model, x, draws)
    number = draws if isinstance(draws, int) else len(draws)
    if number <= most_passes or arithmetic(whole) <= most_passes:
        return Part(draws, whole, whole)
    some = most_passes if isinstance(draws, int) else draws[:most_passes]
    return Part(some, plan_of(model, x, some), whole)


def plan_of(model: nn.Module, x: Tensor, draws: int | pb.Draws) -> Plan:
    """The plan of `predict(model, x, draws)`, from its first results only. Captures the network, if that was not done."""
    network = network_of(model)
    examples = torch.arange(len(x))
    with torch.inference_mode():
        chosen = make_draws(model, network, draws, "balanced", None)
        machine = Engine(model, network, chosen, mode="graph", memory_limit=None)
        if isinstance(draws, int):
            machine.marginalize_head_(x, examples, _as_it_is)
        next(machine.outputs(x, examples, _as_it_is))
    return machine.plan


def _as_it_is(value: Any) -> Any:
    return value
