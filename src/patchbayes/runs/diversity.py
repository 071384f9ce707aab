"""Whether the draws of a network are many models or one: in their answers, and in the values of their components."""

import torch
from torch import nn

from ..patching.patch import is_patched, patched_sites
from .answers import ClassAnswers
from .record import Diversity, SiteDistance


def diversity(model: nn.Module, answers: ClassAnswers | None = None) -> Diversity | None:
    """How unlike the draws answer, and how far apart components lie; None for an unpatched network.

    disagreement, mutual_information: of the draws, averaged over inputs; None from a single draw, and in regression.
    components: for each site that has several, the root mean square difference between two components, relative to the root
    mean square of their mean.
    """
    if not is_patched(model):
        return None
    if answers is None or answers.num_draws < 2:
        return Diversity(components=_distances(model))
    disagreement, information = (
        float(values.double().mean()) for values in (answers.disagreement, answers.mutual_information)
    )
    return Diversity(disagreement, information, _distances(model))


def _distances(model: nn.Module) -> tuple[SiteDistance, ...]:
    found = []
    for name, site in patched_sites(model).items():
        number = site.posterior.num_components
        if number < 2:
            continue
        components = [site.posterior.component(k) for k in range(number)]
        apart = size = 0.0
        for parameter in site.posterior.names:
            values = torch.stack([component[parameter].detach().double() for component in components])
            apart += 2 * float(values.var(0, correction=1).sum())  # E |a - b|^2 = 2 Var
            size += float(values.mean(0).square().sum())
        if size > 0:
            found.append(SiteDistance(name, (apart / size) ** 0.5))
    return tuple(found)
