"""Draws that see views: each draw of a network gets one view of the inputs, and the average is over both."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..draws.draws import Draws
from ..draws.layout import Law, Layout, Series
from ..errors import PatchbayesError
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


def split_information(prediction: Any, views: Any) -> dict[str, Tensor]:
    """What the views disagree on, and what the draws do that see the same view: (B,) each, in nats.

        mutual information = (H[p] - mean_v H[p_v]) + mean_v (H[p_v] - mean_{s sees v} H[p_s])

    with p_v the average of the draws that see view v, each as it is, before any temperature; of labels, (B, L) each. With few
    draws for a view, p_v is noisy, and the first part holds some of what belongs to the second.

    prediction   of `predict(model, x, draws, views=views, keep_draws=True)`.
    """
    kept = getattr(prediction, "draw_probs", None)
    if kept is None or prediction.draws is None:
        raise PatchbayesError("split_information: expected the prediction of a classifier with keep_draws=True.")
    if not hasattr(prediction, "averaged_probs"):  # a label is present or absent
        kept = torch.stack([kept, 1 - kept], -1)
    if prediction.draw_temperature != 1:  # what was softened is sharpened again
        kept = torch.softmax(prediction.draw_temperature * kept.log(), -1)
    number = len(kept)
    seen_by = torch.tensor(as_views(views, number).assigned(number, block_of(prediction.draws)), device=kept.device)
    means = [kept[seen_by == view].mean(0) for view in seen_by.unique()]
    if number < 2 * len(means):
        raise PatchbayesError(
            f"split_information: {number} draws on {len(means)} views; where each view has one draw, the two cannot be told "
            "apart.\n  do       take at least two draws for each view."
        )
    between = torch.stack([torch.special.entr(mean).sum(-1) for mean in means]).mean(0)
    views_part = torch.special.entr(kept.mean(0)).sum(-1) - between
    return {"views": views_part, "draws": between - torch.special.entr(kept).sum(-1).mean(0)}


def block_of(draws: Draws) -> int:
    """How many consecutive draws balance each other: the number of components where all draw groups have the same, else 1."""
    outcomes = {span.outcomes for span in draws.layout.spans}
    return outcomes.pop() if len(outcomes) == 1 else 1
