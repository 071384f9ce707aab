"""Corruption error: how much worse a network gets on corrupted images, relative to a reference (appendix D.4)."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..errors import PatchbayesError


@dataclass(frozen=True)
class CorruptionErrors:
    """Errors in percent of the reference's, which has 100: by_corruption (M,)."""

    by_corruption: Tensor

    @property
    def mean(self) -> float:
        """The mean over corruptions: mCE, or the relative mCE."""
        return float(self.by_corruption.mean())


def corruption_errors(errors: Tensor, reference: Tensor) -> CorruptionErrors:
    """CE_c = 100 E_c / E_c^reference, E_c being the top-1 error summed over severities; the mean over c is mCE.

    errors, reference (M, L): shares of wrong predictions under M corruptions (the paper's 15) at L severities (5).
    """
    errors, reference = _checked("corruption_errors", errors, reference)
    return _ratio("corruption_errors", errors.sum(1), reference.sum(1))


def relative_corruption_errors(
    errors: Tensor,
    clean: float,
    reference: Tensor,
    reference_clean: float | None,
    definition: Literal["standard", "paper"] = "standard",
) -> CorruptionErrors:
    """How much corruption adds to the error, relative to the reference; the mean over c is the relative mCE (rmCE).

        "standard"  rCE_c = 100 (E_c - E_clean) / (E_c^reference - E_clean^reference)    (Hendrycks and Dietterich)
        "paper"     rCE_c = 100 (E_c - E_clean) / (E_c^reference - E_clean)              (appendix D.4, literally)

    E_c is the error summed over the L severities, E_clean counts L times.
    Deviation: the paper's formula takes the method's own clean error off the reference's, which compares two networks
    rather than one before and after corruption; "standard" is the definition of the work it cites, and the default.

    errors, reference (M, L) as in `corruption_errors`; clean, reference_clean: shares of wrong predictions without
    corruption ("paper" has no use for reference_clean and takes None).
    """
    where = "relative_corruption_errors"
    errors, reference = _checked(where, errors, reference)
    if definition not in ("standard", "paper") or (definition == "paper") != (reference_clean is None):
        raise PatchbayesError(
            f"{where}(reference_clean={reference_clean!r}, definition={definition!r}): "
            '"standard" takes the clean error of the reference, "paper" takes None.'
        )
    subtracted = clean if reference_clean is None else reference_clean
    if not (0 <= clean <= 1 and 0 <= subtracted <= 1):
        raise PatchbayesError(f"{where}: clean errors are shares, from 0 to 1; given were {clean}, {reference_clean}.")
    return _ratio(where, (errors - clean).sum(1), (reference - subtracted).sum(1))


def _checked(where: str, errors: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    if errors.dim() != 2 or errors.shape != reference.shape or errors.numel() == 0:
        raise PatchbayesError(
            f"{where}: takes the errors of two networks, (corruptions, severities) both; given were "
            f"{tuple(errors.shape)} and {tuple(reference.shape)}."
        )
    for values in (errors, reference):
        if not bool(((values >= 0) & (values <= 1)).all()):
            raise PatchbayesError(f"{where}: errors are shares of wrong predictions, between 0 and 1.")
    return errors.double(), reference.double()


def _ratio(where: str, above: Tensor, below: Tensor) -> CorruptionErrors:
    if bool((below.abs() < 1e-9).any()):
        rows = torch.nonzero(below.abs() < 1e-9).flatten().tolist()
        raise PatchbayesError(
            f"{where}: the reference gives 0 to divide by for the corruptions {rows}: leave those out."
        )
    return CorruptionErrors(100 * above / below)
