"""What changes from step to step as a function of the step alone: nothing to save, nothing to resume."""

import math
from collections.abc import Iterable

from ..patching.network import Site
from .config import TrainingConfig


def learning_rate_factor(config: TrainingConfig, step: int, steps_per_epoch: int) -> float:
    """What the learning rates are multiplied by in step 0, 1, ... of the whole run.

    A linear warm-up to 1, then by name, over the share t of the remaining run that is done:

        constant   1
        cosine     (1 + cos(pi t)) / 2
        step       step_factor to the number of milestones passed, which are shares of the whole run
    """
    total = config.epochs * steps_per_epoch
    rising = config.warmup * steps_per_epoch
    if step < rising:
        return (step + 1) / (math.floor(rising) + 1)
    if config.schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(total - rising, 1)))
    if config.schedule == "step":
        milestones = (0.5, 0.75) if config.milestones is None else config.milestones
        factor = 0.1 if config.step_factor is None else config.step_factor
        return factor ** sum(step >= share * total for share in milestones)
    return 1.0


def grow_spread_(sites: Iterable[Site], epochs: float, step: int, steps_per_epoch: int) -> None:
    """Before step 0, 1, ... of the run: let the spread of these sites around their means grow, over the first `epochs`.

    Before step t the deviations from the mean are multiplied by (t + 1) / t, before step 0 by one over the number of steps:
    but for what is learned on the way, they grow in equal parts to what the method starts with.
    """
    growing = round(epochs * steps_per_epoch)
    if step < growing:
        factor = (step + 1) / step if step else 1 / growing
        for site in sites:
            site.posterior.scale_spread_(factor)
