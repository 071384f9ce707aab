"""The spread of a network's components: their mean, their deviations from it, and one scale for each group of sites."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..network import Site
from ..posteriors.posterior import root_mean_square


@dataclass(frozen=True)
class Part:
    """One parameter of a site: its mean (*shape), the deviations (K, *shape), the stored tensor, the group of its scale."""

    group: str
    stored: Tensor
    mean: Tensor
    deviation: Tensor


class Spread:
    """Components M_k = mean + scale * deviation_k; the deviations average to zero, sum_k p_k deviation_k = 0.

    So every scale keeps the mean network; at scale 0 all components are equal to it.
    """

    def __init__(self, parts: list[Part]) -> None:
        self._parts = parts

    @classmethod
    def random(cls, sites: Mapping[str, Site], groups: Mapping[str, str], generator: torch.Generator) -> "Spread":
        """Gaussian deviations, whose root mean square (weighted by p) at scale 1 is that of the parameter itself.

        `groups` tells the group of each site, by name. The sites' components are all equal when this is called.
        """
        parts = []
        for name, site in sites.items():
            values = {own: site.posterior.mean(own, site.components(own).detach()) for own in site.posterior.names}
            for own, mean in values.items():
                stored = site.components(own)
                noise = torch.randn(stored.shape, generator=generator).to(stored)
                noise = noise - site.posterior.mean(own, noise)
                size = site.posterior.mean(own, noise.square()).mean().sqrt()
                deviation = noise * (root_mean_square(own, values) / size) if size > 0 else noise
                parts.append(Part(groups[name], stored, mean, deviation))
        return cls(parts)

    @classmethod
    def of(cls, sites: Mapping[str, Site], groups: Mapping[str, str]) -> "Spread":
        """The spread that the components have now: scale 1."""
        parts = []
        for name, site in sites.items():
            for own in site.posterior.names:
                stored = site.components(own)
                mean = site.posterior.mean(own, stored.detach()).clone()
                parts.append(Part(groups[name], stored, mean, stored.detach() - mean))
        return cls(parts)

    @torch.no_grad()
    def scale_(self, scales: Mapping[str, float]) -> None:
        """Write the components with these scales, one for each group."""
        for part in self._parts:
            part.stored.copy_(part.mean + scales[part.group] * part.deviation)
