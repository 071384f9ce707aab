"""Held-out examples that choose: a random part of them in memory, and how a network scores on it."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ..draws import network_of
from ..errors import PatchbayesError
from ..prediction import predict
from ..selection import call, evaluating
from .report import Scores

_BATCH = 125  # examples at a time: what the networks' activations leave of a processor's cache


class HeldOut:
    """Held-out examples in memory: inputs, and class numbers (B,)."""

    def __init__(self, inputs: Any, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets
        pieces = torch.arange(len(targets)).split(_BATCH)
        self._batches = [(tree_map(lambda leaf: _rows(leaf, rows), inputs), targets[rows]) for rows in pieces]  # noqa: B023

    @classmethod
    def read(cls, batches: Iterable[Any], most: int, generator: torch.Generator) -> "HeldOut":
        """At most `most` examples, a random part of all."""
        number = sum(len(checked_batch("held_out", batch)[1]) for batch in batches)
        if not number:
            raise PatchbayesError(
                "bayesianize_: held_out gave no example; give a loader or list that can be read again."
            )
        chosen = torch.zeros(number, dtype=torch.bool)
        chosen[torch.randperm(number, generator=generator)[:most]] = True
        parts: list[tuple[Any, Tensor]] = []
        first = 0
        for batch in batches:
            inputs, targets = checked_batch("held_out", batch)
            rows = chosen[first : first + len(targets)].nonzero().squeeze(1)
            first += len(targets)
            parts.append((tree_map(lambda leaf: _rows(leaf, rows), inputs), targets[rows.to(targets.device)].cpu()))  # noqa: B023
        if first != number:
            raise PatchbayesError(
                f"bayesianize_: held_out gave {number} examples when read first and {first} when read again; it must be "
                "readable several times (a DataLoader, or a list of batches), not a generator."
            )
        inputs = tree_map(lambda *leaves: torch.cat(leaves), *(inputs for inputs, _ in parts))
        return cls(inputs, torch.cat([targets for _, targets in parts]))

    def __len__(self) -> int:
        return len(self.targets)

    def part(self, most: int, generator: torch.Generator) -> "HeldOut":
        """At most `most` of these examples, a random part."""
        if most >= len(self):
            return self
        rows = torch.randperm(len(self), generator=generator)[:most]
        return HeldOut(tree_map(lambda leaf: _rows(leaf, rows), self.inputs), self.targets[rows])

    def inputs_for(self, model: nn.Module) -> list[Any]:
        """The inputs of every batch, on the network's device."""
        device = next((p.device for p in model.parameters()), None)
        return [to_device(inputs, device) for inputs, _ in self._batches]

    def log_probs(self, model: nn.Module) -> Tensor:
        """Log-probabilities (B, C) of a network that is not patched."""
        with evaluating(model):
            outputs = [call(model, inputs) for inputs in self.inputs_for(model)]
        logits = torch.cat([logits_of(output) for output in outputs]).float().cpu()
        if logits.dim() != 2:
            raise PatchbayesError(
                f"bayesianize_: the network's output for a batch is {tuple(logits.shape)}; logits (B, C) are required."
            )
        highest = int(self.targets.max())
        if highest >= logits.shape[1] or int(self.targets.min()) < 0:
            raise PatchbayesError(
                f"bayesianize_: held_out holds the class number {highest}, and the network has {logits.shape[1]} outputs."
            )
        return torch.log_softmax(logits, -1)

    def scores(self, model: nn.Module, draws: int, seed: int) -> Scores:
        """Scores of a patched network; the same draws whenever the seed is the same."""
        device = network_of(model).device
        batches = [(to_device(inputs, device), targets) for inputs, targets in self._batches]
        generator = torch.Generator().manual_seed(seed)
        prediction = predict(model, batches, draws, generator=generator)
        return Scores.of(prediction.log_probs.float().cpu(), self.targets)


def checked_batch(name: str, batch: Any) -> tuple[Any, Tensor]:
    """A batch (inputs, targets) with class numbers (B,), or an error that says what it is instead."""
    if not (isinstance(batch, tuple | list) and len(batch) == 2 and isinstance(batch[1], Tensor)):
        raise PatchbayesError(
            f"bayesianize_: a batch of {name} is a pair (inputs, targets); given was a {type(batch).__name__}."
        )
    inputs, targets = batch
    if targets.is_floating_point() or targets.dim() != 1:
        raise PatchbayesError(
            f"bayesianize_: the targets of {name} are class numbers (B,); given were {targets.dtype} {tuple(targets.shape)}.\n"
            "  do       for regression, patch_ the network and train it with negative_elbo(..., likelihood=Gaussian())."
        )
    sizes = {leaf.shape[0] for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.dim()}
    if sizes != {len(targets)}:
        raise PatchbayesError(
            f"bayesianize_: a batch of {name} has {len(targets)} targets, and inputs for {sorted(sizes)}."
        )
    return inputs, targets


def to_device(inputs: Any, device: torch.device | None) -> Any:
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, inputs)


def logits_of(output: Any) -> Tensor:
    """The output itself, or its `.logits`."""
    found = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if isinstance(found, Tensor):
        return found
    raise PatchbayesError(
        f"bayesianize_: the network returns a {type(output).__name__}; a tensor of logits (or a .logits) is required."
    )


def _rows(leaf: Any, rows: Tensor) -> Any:
    return leaf[rows.to(leaf.device)] if isinstance(leaf, Tensor) and leaf.dim() else leaf
