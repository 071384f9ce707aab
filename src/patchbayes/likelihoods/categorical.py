"""One of C classes."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ..errors import PatchbayesError
from .likelihood import Likelihood

#: What is wrong, and what to do, where a network gives probabilities in the place of logits.
PROBABILITIES = "the network gives probabilities (none below 0, and they sum to 1 over the classes)"
LOGITS_INSTEAD = "leave its last softmax out, or pass output=lambda probs: probs.log()"


class Categorical(Likelihood):
    """The output holds logits (or log-probabilities) of C classes along `class_dim`; targets are class numbers.

    class_dim     the axis of the classes in the network's output (B, ...): -1 for (B, C), 1 for images (B, C, H, W).
    ignore_index  targets of this number contribute nothing and are not counted, as in `torch.nn.functional.cross_entropy`.
    """

    offers = "ClassPrediction"

    def __init__(self, class_dim: int = -1, ignore_index: int = -100) -> None:
        super().__init__()
        for name, value in (("class_dim", class_dim), ("ignore_index", ignore_index)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise PatchbayesError(f"Categorical({name}={value!r}): expected an integer.")
        if class_dim == 0:
            raise PatchbayesError("Categorical(class_dim=0): axis 0 holds the examples; classes stand on another.")
        self.class_dim, self.ignore_index = class_dim, ignore_index

    def are_probabilities(self, outputs: Tensor) -> bool:
        """Whether outputs (S, B, C) sum to 1 over the classes, none below 0: logits of two examples or more never do."""
        if not bool((outputs >= 0).all()):
            return False
        sums = outputs.detach().double().sum(self.class_dim if self.class_dim < 0 else self.class_dim + 1)
        return sums.numel() > 1 and bool((sums - 1).abs().max() < 1e-3)

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """log p(y | x, w) of every label: outputs (S, B, C), targets (B,) give (S, B); 0 where the label is ignored.

        With more axes than B there is a term for each position: (S, B, C, H, W) and (B, H, W) give (S, B, H, W).
        """
        log_probs = self.log_probs(outputs, lead=1)
        shape = log_probs.shape[1:-1]
        if targets.is_floating_point() or targets.dtype == torch.bool or targets.shape != shape:
            if log_probs.shape[-1] == 1 and bool(((targets == 0) | (targets == 1)).all()):
                do = "for one logit and labels 0 and 1, pass likelihood=patchbayes.likelihoods.Bernoulli()"
            elif targets.shape == (*shape, log_probs.shape[-1]) and log_probs.shape[-1] > 1:
                do = "of one-hot targets take targets.argmax(-1)"
            elif targets.shape == (*shape, 1) and not targets.is_floating_point():
                do = "targets.squeeze(-1)"
            elif targets.shape == shape and bool((targets == targets.long()).all()):
                do = "targets.long(), or likelihood=patchbayes.likelihoods.Gaussian() if the targets are numbers, not classes"
            else:
                do = "where targets are numbers, not classes, pass likelihood=patchbayes.likelihoods.Gaussian()"
            expected, got = "class numbers", f"{targets.dtype}"
            if targets.shape != shape:
                expected, got = f"class numbers of shape {tuple(shape)}", f"{got} of shape {tuple(targets.shape)}"
            raise PatchbayesError(f"Categorical: expected {expected} as targets, got {got}.\n  do       {do}.")
        valid = targets != self.ignore_index
        chosen = targets.to(torch.int64).where(valid, 0).expand(log_probs.shape[:-1]).unsqueeze(-1)
        try:
            found = log_probs.gather(-1, chosen).squeeze(-1)
        except RuntimeError as error:
            if "out of bounds" not in str(error):
                raise
            do = "number the classes from 0; if there are more of them than outputs, these labels need another network"
            if log_probs.shape[-1] == 1:
                do = "for one logit and labels 0 and 1, pass likelihood=patchbayes.likelihoods.Bernoulli() and float targets"
            raise PatchbayesError(
                f"Categorical: expected classes 0 to {log_probs.shape[-1] - 1} (or {self.ignore_index}: ignored), got numbers "
                f"from {int(targets[valid].min())} to {int(targets[valid].max())}.\n  do       {do}."
            ) from None
        return found.masked_fill(~valid, 0.0)

    def predictive(self, outputs: Tensor) -> Mapping[str, Tensor]:
        """log_probs (D, B, ..., C), the classes last."""
        return {"log_probs": self.log_probs(outputs, lead=1)}

    def counted(self, targets: Tensor) -> Tensor:
        """Examples with at least one label that is not ignored, (B,) bool."""
        return (targets != self.ignore_index).flatten(1).any(1) if targets.dim() > 1 else targets != self.ignore_index

    def log_probs(self, outputs: Tensor, lead: int = 0) -> Tensor:
        """log-probabilities with the classes last. `lead` axes stand before the output's own."""
        dim = self.class_dim + lead if self.class_dim >= 0 else self.class_dim
        if not -outputs.dim() <= dim < outputs.dim() or outputs.dim() - lead < 2:
            raise PatchbayesError(
                f"Categorical(class_dim={self.class_dim}): expected an output (B, ..., C, ...) with that axis, got "
                f"{tuple(outputs.shape[lead:])}.\n  do       for one logit an example, use Bernoulli()."
            )
        return torch.log_softmax(outputs, dim).movedim(dim, -1)
