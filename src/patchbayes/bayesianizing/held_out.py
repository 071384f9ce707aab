"""Held-out examples that choose: a random part of them in memory, whatever form their batches have."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ..errors import PatchbayesError
from ..prediction.targets import TARGET_KEYS, predicts_next_token, targets_of_outputs

Select = Callable[[Any], tuple[Any, Tensor]]


class HeldOut:
    """Held-out examples in memory: batches of inputs, as the network takes them, and targets, in an order without pattern."""

    def __init__(self, batches: list[tuple[Any, Tensor]]) -> None:
        self.batches = batches

    @classmethod
    def read(
        cls, batches: Iterable[Any], most: int, size: int, generator: torch.Generator, select: Select | None = None
    ) -> "HeldOut":
        """At most `most` examples, a random part of all, in batches of `size`.

        Where inputs differ in shape between batches (padded text), examples stay with those that they came with.
        """
        if isinstance(batches, Tensor | Mapping | str) or not isinstance(batches, Iterable):
            raise PatchbayesError(
                f"held_out: expected an iterable of batches such as a DataLoader, got a {type(batches).__name__}.\n"
                "  do       for one batch in memory, pass [(inputs, targets)]."
            )
        counts = [len(pair_of(batch, select)[1]) for batch in batches]
        if not sum(counts):
            raise PatchbayesError(
                "held_out gave no example: expected a DataLoader or a list of batches (inputs, targets)."
            )
        chosen = torch.zeros(sum(counts), dtype=torch.bool)
        chosen[torch.randperm(len(chosen), generator=generator)[:most]] = True
        parts: list[tuple[Any, Tensor]] = []
        first = 0
        for batch in batches:
            inputs, targets = pair_of(batch, select)
            rows = chosen[first : first + len(targets)].nonzero().squeeze(1)
            first += len(targets)
            if len(rows):
                parts.append((_to_memory(inputs, rows), targets.detach()[rows.to(targets.device)].cpu()))
        if first != len(chosen):
            raise PatchbayesError(
                f"held_out gave {len(chosen)} examples when read first and {first} when read again: expected the same "
                "examples whenever it is read (a DataLoader, or a list of batches), not a generator."
            )
        return cls(_in_batches(parts, size, generator))

    def __len__(self) -> int:
        return sum(len(targets) for _, targets in self.batches)

    def first(self, number: int) -> "HeldOut":
        """The first examples, so many; the batches as they are."""
        batches: list[tuple[Any, Tensor]] = []
        for inputs, targets in self.batches:
            if number <= 0:
                break
            rows = torch.arange(min(number, len(targets)))
            number -= len(rows)
            batches.append(
                (inputs, targets) if len(rows) == len(targets) else (_to_memory(inputs, rows), targets[rows])
            )
        return HeldOut(batches)

    @property
    def targets(self) -> list[Tensor]:
        """The targets of every batch."""
        return [targets for _, targets in self.batches]

    def inputs(self, device: torch.device | None) -> Iterator[Any]:
        """The inputs of every batch, on the device."""
        for inputs, _ in self.batches:
            yield to_device(inputs, device)

    def check_labels(self, ignored: int | None) -> None:
        """Refuse labels that can choose nothing: a single class."""
        found = torch.cat([targets.flatten() for targets in self.targets])
        found = found[found != ignored] if ignored is not None else found
        if len(found) == 0:
            raise PatchbayesError(f"held_out: all of its labels are {ignored}, which means that they do not count.")
        if len(found) > 1 and bool((found == found[0]).all()):
            raise PatchbayesError(
                f"held_out: all {len(found)} labels are {found[0].item():g}: expected examples of several classes, drawn as "
                "those that the network will meet."
            )


def select_for(model: nn.Module) -> Select | None:
    """How a batch is read for a causal language model, where the output at a position is about the next label."""

    def shifted(batch: Any) -> tuple[Any, Tensor]:
        inputs, labels = pair_of(batch)
        return inputs, targets_of_outputs(model, labels)

    return shifted if predicts_next_token(model) else None


def pair_of(batch: Any, select: Select | None = None) -> tuple[Any, Tensor]:
    """Inputs and targets of a batch: a pair, several inputs and then the targets, or a mapping with the labels in it."""
    if select is not None:
        inputs, targets = select(batch)
    elif isinstance(batch, tuple | list) and len(batch) == 2:
        inputs, targets = batch
    elif isinstance(batch, tuple | list) and len(batch) > 2:
        *several, targets = batch
        inputs = tuple(several)
    elif hasattr(batch, "keys") and hasattr(batch, "__getitem__"):
        known = {key: batch[key] for key in batch.keys()}  # noqa: SIM118
        key = next((key for key in TARGET_KEYS if key in known), None)
        if key is None:
            raise PatchbayesError(
                f"held_out: a batch is a mapping with {', '.join(map(str, known))}, without {', '.join(TARGET_KEYS)}.\n"
                "  do       pass select=lambda batch: (inputs, targets)."
            )
        targets = known.pop(key)
        inputs = known
    else:
        one = "for one batch in memory, pass [(inputs, targets)]; else " if isinstance(batch, Tensor) else ""
        raise PatchbayesError(
            f"held_out: expected batches (inputs, targets), or mappings with labels, got a {type(batch).__name__}.\n"
            f"  do       {one}pass select=lambda batch: (inputs, targets)."
        )
    if isinstance(inputs, list):
        inputs = tuple(inputs)
    _check_pair(inputs, targets)
    return inputs, targets


def to_device(inputs: Any, device: torch.device | None) -> Any:
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, inputs)


def _check_pair(inputs: Any, targets: Any) -> None:
    if not isinstance(targets, Tensor) or targets.dim() == 0:
        shape = "a number" if isinstance(targets, Tensor) else f"a {type(targets).__name__}"
        do = "\n  do       torch.as_tensor(...)." if type(targets).__module__ == "numpy" else ""
        raise PatchbayesError(f"held_out: expected a tensor of targets for each batch, got {shape}.{do}")
    sizes = {leaf.shape[0] for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.dim()}
    if sizes != {len(targets)}:
        raise PatchbayesError(f"held_out: a batch has {len(targets)} targets, and inputs for {sorted(sizes)} examples.")
    for leaf in [*tree_leaves(inputs), targets]:
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and bool(leaf.isnan().any()):
            raise PatchbayesError(
                f"held_out: a batch holds NaN, in {int(leaf.isnan().sum())} of the {leaf.numel()} values of its "
                f"{'targets' if leaf is targets else 'inputs'}.\n"
                "  do       leave out the examples with missing values, or fill these in as for training."
            )


def _to_memory(inputs: Any, rows: Tensor) -> Any:
    return tree_map(lambda leaf: leaf.detach()[rows.to(leaf.device)].cpu() if _has_rows(leaf) else leaf, inputs)


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0


def _in_batches(parts: list[tuple[Any, Tensor]], size: int, generator: torch.Generator) -> list[tuple[Any, Tensor]]:
    shapes = {tuple(leaf.shape[1:] if _has_rows(leaf) else () for leaf in tree_leaves(inputs)) for inputs, _ in parts}
    if len(shapes) == 1:
        inputs = tree_map(
            lambda *leaves: torch.cat(leaves) if _has_rows(leaves[0]) else leaves[0], *(i for i, _ in parts)
        )
        parts = [(inputs, torch.cat([targets for _, targets in parts]))]
    batches = []
    for inputs, targets in parts:
        for rows in torch.randperm(len(targets), generator=generator).split(size):
            batches.append((_to_memory(inputs, rows), targets[rows]))
    order = torch.randperm(len(batches), generator=generator).tolist()
    return [batches[i] for i in order]
