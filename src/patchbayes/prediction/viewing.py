"""Draws that see views: each draw of a network gets one view of the inputs, and the average is over both."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..draws.draws import Draws
from ..draws.layout import Law, Layout, Series
from ..views import as_views
from .loop import Members, Outputs

if TYPE_CHECKING:
    from .engine import Engine


class Viewing:
    """The views of a prediction, and an engine for the draws of each."""

    def __init__(self, views: Any, machine: "Engine | None") -> None:
        number = len(machine.draws) if machine is not None else 1
        self.views = as_views(views, number)
        self.parts: list[tuple[int, list[int], Engine]] = []
        if machine is not None:
            seen_by = self.views.assigned(number, block_of(machine.draws))
            for view in dict.fromkeys(seen_by):
                draws = [draw for draw, seen in enumerate(seen_by) if seen == view]
                engine = type(machine)(  # what captures graphs is imported when it is needed
                    machine.model,
                    machine.network,
                    machine.draws[draws],
                    mode=machine.mode,
                    memory_limit=machine.memory_limit,
                    batches=machine.batches,
                )
                self.parts.append((view, draws, engine))

    def outputs(self, inputs: Any, examples: Tensor, output: Callable[[Any], Tensor]) -> Outputs:
        """The outputs of all draws for one batch, each on its view."""
        for view, draws, engine in self.parts:
            for members, values in engine.outputs(self.views.view(inputs, view), examples, output):
                yield Members([[draws[place] for place in some] for some in members]), values

    def passes(self, inputs: Any, run: Callable[[Any], Outputs]) -> tuple[Draws, Outputs]:
        """The outputs of one network on every view, as if each view were a draw."""
        draws = Draws(Law(Layout([], ["views"])), [Series("iid", 0, range(len(self.views)))])
        return draws, self._passes(inputs, run)

    def _passes(self, inputs: Any, run: Callable[[Any], Outputs]) -> Outputs:
        for view in range(len(self.views)):
            for _, values in run(self.views.view(inputs, view)):
                yield Members([[view]]), values


def block_of(draws: Draws) -> int:
    """How many consecutive draws balance each other: the number of components where all draw groups have the same, else 1."""
    outcomes = {span.outcomes for span in draws.layout.spans}
    return outcomes.pop() if len(outcomes) == 1 else 1
