"""Targets among the inputs: a batch that is a mapping may hold its labels, and a language model shifts them."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

#: Where a batch that is a mapping holds its targets.
TARGET_KEYS = ("labels", "label", "targets", "target", "y")
IGNORED = -100  # a label that does not count


def without_targets(model: nn.Module, batch: Any) -> Any:
    """The batch without targets that the network does not need to answer: its optional labels, and what it does not name."""
    if not (hasattr(batch, "keys") and hasattr(batch, "__getitem__")):
        return batch
    known = {key: batch[key] for key in batch.keys()}  # noqa: SIM118
    parameters: Mapping[str, inspect.Parameter] = inspect.signature(model.forward).parameters
    for key in TARGET_KEYS:
        asked = parameters.get(key)
        optional = asked is not None and asked.default is None and key == "labels"
        if key in known and (asked is None or optional):
            labels = known.pop(key)
            if "decoder_input_ids" in parameters and "decoder_input_ids" not in known and isinstance(labels, Tensor):
                shift = getattr(model, "prepare_decoder_input_ids_from_labels", None)
                known |= {} if shift is None else {"decoder_input_ids": shift(labels)}
    return known


def predicts_next_token(model: nn.Module) -> bool:
    """Whether the output at a position is about the token after it, as causal language models of transformers have it."""
    return network_name(model).endswith(("ForCausalLM", "LMHeadModel"))


def network_name(model: nn.Module) -> str:
    """The name of a network's class; of an adapter's network that of its base."""
    base: Any = getattr(model, "get_base_model", lambda: model)
    return type(base()).__name__


def targets_of_outputs(model: nn.Module, labels: Tensor) -> Tensor:
    """The targets (B, T) of the outputs at each position: the labels, or where the next token is predicted, the next label."""
    if not predicts_next_token(model) or labels.dim() < 2:
        return labels
    return torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], IGNORED)], 1)
