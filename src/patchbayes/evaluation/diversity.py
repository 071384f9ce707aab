"""Whether the draws of a network are many models or one: in their answers, and in the values of their components."""

from typing import Any

from torch import nn

from ..patching import is_patched, patched_sites
from ..posteriors import Mixture
from .answers import ClassAnswers


def diversity(model: nn.Module, answers: ClassAnswers | None = None) -> dict[str, Any] | None:
    """How unlike the draws answer, and how far apart components lie; None for an unpatched network.

    disagreement, mutual_information: of the draws, averaged over inputs; None from a single draw, and in regression.
    components: for each site of a mixture the root mean square difference between two components, relative to the root mean
    square of their mean.
    """
    if not is_patched(model):
        return None
    several = answers is not None and answers.num_draws > 1
    return {
        "disagreement": float(answers.disagreement.double().mean()) if answers and several else None,
        "mutual_information": float(answers.mutual_information.double().mean()) if answers and several else None,
        "components": _distances(model),
    }


def _distances(model: nn.Module) -> list[dict[str, Any]]:
    found = []
    for name, site in patched_sites(model).items():
        if not isinstance(site.method, Mixture) or site.method.components < 2:
            continue
        stored = [site.posterior.stored(parameter).detach().double() for parameter in site.posterior.names]
        apart = sum(2 * float(values.var(0, correction=1).sum()) for values in stored)  # E |a - b|^2 = 2 Var
        size = sum(float(values.mean(0).square().sum()) for values in stored)
        if size > 0:
            found.append({"site": name, "distance": (apart / size) ** 0.5})
    return found
