"""predict on several processes: inputs and draws are divided over them, and all of them have the whole prediction.

Every process computes the outputs of some draws for some inputs. Where draws are divided, the outputs themselves are
exchanged and averaged as one process would average them; nothing is averaged twice, weighted by hand or rounded in between.
"""

import dataclasses
from typing import Any, Literal, Unpack

import torch
from torch import Tensor, nn

from ..draws.draws import Draws
from ..errors import PatchbayesError
from ..patching.network import network_of
from ..patching.patch import is_patched
from ..ranks import exchanged, part_of, rank_and_number
from .averages import average
from .batches import on_device
from .loop import Members
from .predict import Number, Options, Predicting, predict
from .prediction import PER_DRAW, PER_INPUT, Prediction

Over = Literal["auto", "inputs", "draws"]


def predict_on_ranks(
    model: nn.Module, inputs: Tensor, draws: Number = 20, *, over: Over = "auto", **options: Unpack[Options]
) -> Any:
    """`predict` for one batch (B, ...) that all processes hold: each computes its part, and all return the whole.

    over   what is divided: "inputs", "draws", or "auto": inputs, and draws too where there are fewer inputs than processes.

    The numbers are those of `predict` in one process, up to the rounding of batches of another size. All processes call this
    with the same network, inputs and options, under `torchrun` and after `torch.distributed.init_process_group`. Without
    other processes it is `predict`.
    """
    rank, ranks = rank_and_number()
    if over not in ("auto", "inputs", "draws"):
        raise PatchbayesError(f'predict_on_ranks(over={over!r}): expected "auto", "inputs" or "draws".')
    if ranks == 1:
        return predict(model, inputs, draws, **options)
    for name, given in (
        ('draws="auto"', draws == "auto"),
        ("views", options.get("views")),
        ("dropout", options.get("dropout")),
    ):
        if given:
            raise PatchbayesError(f"predict_on_ranks: {name} goes with one process only.\n  do       predict.")
    model = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    drawn = is_patched(model) and draws != "mean"
    rows, parts = _grid(ranks, len(inputs), over, drawn)
    row, part = divmod(rank if rank < rows * parts else 0, parts)  # more processes than work: they do the first one's
    own = part_of(len(inputs), row, rows)
    predicting = Predicting(model, network_of(model) if is_patched(model) else None, draws, options, num_batches=1)
    with torch.inference_mode():
        batch, examples = on_device(inputs, predicting.device), torch.arange(len(inputs))
        if predicting.machine is not None and not predicting.started:  # as one process does, from the whole batch
            predicting.machine.marginalize_head_(batch, examples, predicting.output)
            predicting.started = True
        some, numbers = batch[own.start : own.stop], examples[own.start : own.stop]
        if parts == 1:
            mine = predicting.batch(some, numbers)
        else:
            mine = _with_draws_of_others(predicting, some, numbers, (row, part, parts), options)
    return _joined(mine.usable(), rows, parts)


def _grid(ranks: int, inputs: int, over: Over, drawn: bool) -> tuple[int, int]:
    """Into how many parts inputs and draws are cut: their product is at most the number of processes."""
    if over == "draws" and drawn:
        return 1, ranks
    rows = min(ranks, inputs)
    return rows, ranks // rows if over == "auto" and drawn else 1


def _with_draws_of_others(
    predicting: Predicting, inputs: Tensor, examples: Tensor, place: tuple[int, int, int], options: Options
) -> Prediction:
    """The prediction for these inputs, of whose draws this process computes a part; place: row, part, number of parts."""
    assert predicting.machine is not None
    row, part, parts = place
    draws: Draws = predicting.machine.draws
    trunks = len(draws) // draws.heads  # the components of an output layer that share a trunk stay together
    own = part_of(trunks, part, parts)
    first, last = own.start * draws.heads, own.stop * draws.heads
    found: Tensor | None = None
    if last > first:
        machine = Predicting(predicting.model, predicting.network, draws[first:last], options, num_batches=1).machine
        assert machine is not None
        for members, values in machine.outputs(inputs, examples, predicting.output):
            if found is None:
                found = values.new_zeros(last - first, *values.shape[1:])
            for which, value in zip(members, values, strict=True):
                found[which] = value
    if found is None:
        found = torch.zeros(0, dtype=next(predicting.model.parameters()).dtype)
    whole = _outputs_of_all(found, len(inputs), row, parts)
    outputs = iter([(Members([[number] for number in range(len(whole))]), whole)])
    return average(outputs, draws, predicting.likelihood, predicting.keep, predicting.machine.plan)


def _outputs_of_all(found: Tensor, length: int, row: int, parts: int) -> Tensor:
    """Outputs (S, B, ...) from those of this process's draws; those of other inputs come along and are left."""
    none = not len(found)
    shapes = exchanged(torch.tensor([] if none else list(found.shape[2:]), dtype=torch.int64))
    known = exchanged(torch.tensor([0 if none else 1]))
    shape = next(tuple(one.tolist()) for one, there in zip(shapes, known, strict=True) if int(there))
    pieces = exchanged(found.reshape(-1, *shape).clone())[row * parts : (row + 1) * parts]
    return torch.cat([piece.reshape(-1, length, *shape) for piece in pieces])


def _joined(mine: Prediction, rows: int, parts: int) -> Prediction:
    """The prediction for all inputs, from those of the first process of every part of them."""
    fields: dict[str, Any] = {}
    for metadata, axis in ((PER_INPUT, 0), (PER_DRAW, 1)):
        for name, value in mine._fields(metadata).items():
            pieces = exchanged(value.movedim(axis, 0))[: rows * parts : parts]
            fields[name] = torch.cat(pieces).movedim(0, axis)
    return dataclasses.replace(mine, **fields)
