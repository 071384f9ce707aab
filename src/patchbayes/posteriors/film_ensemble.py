"""FiLM-Ensemble (Turkoglu et al., 2022): an ensemble whose members share all but the affine parameters of norm layers."""

from dataclasses import dataclass

from ..errors import PatchbayesError
from .mixture import Mixture, Statistics, Tie


@dataclass(frozen=True)
class FiLMEnsemble(Mixture):
    """EMP on norm layers, tied over the network: one draw picks the member everywhere, and members keep their own statistics.

    It differs from EMP in what one draw is shared by: K networks instead of K to the number of norm layers, which all have
    been trained as they are used. Train all members in a step: `forward_draws(model, inputs, Draws.enumerate(model))`.
    """

    tie: Tie = "network"
    statistics: Statistics = "per_component"

    default_sites = "norm"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tie != "network":
            raise PatchbayesError(
                f'FiLMEnsemble(tie={self.tie!r}): a member is one for the whole network.\n  do       EMP, for tie="site".'
            )

    @property
    def label(self) -> str:
        return f"FiLMEnsemble(K={self.components})"
