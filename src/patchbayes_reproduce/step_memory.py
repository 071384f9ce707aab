"""What a training step holds in memory, counted from the tensors themselves: the same on every machine."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from patchbayes.draws.draws import Draws
from patchbayes.nets import mlp
from patchbayes.patching.drawing import forward_draws
from patchbayes.patching.patch import patch_
from patchbayes.posteriors import ECMP, EMP, DropConnect, Dropout, Ensemble, MeanField
from patchbayes.posteriors.method import Method

#: Methods of table 3, and the sites that its counts assume, for K components.
PAPER_METHODS: dict[str, Callable[[int], tuple[Method, str]]] = {
    "emp": lambda components: (EMP(components), "norm+output"),
    "ecmp": lambda components: (ECMP(components), "norm+output"),
    "dropout": lambda components: (Dropout(0.005), "norm"),
    "dropconnect": lambda components: (DropConnect(0.005), "linear+conv"),
    "ensemble": lambda components: (Ensemble(components), "all"),
}
METHODS: dict[str, Callable[[int], tuple[Method, str]]] = {
    **PAPER_METHODS,
    "mean_field_gaussian": lambda components: (MeanField(), "all"),
}


def step_memory(method: str, layers: int, hidden: int, components: int = 5, batch: int = 100) -> dict[str, int]:
    """Bytes that a training step of an MLP with L layers of H units holds: its parameters, and what backward needs.

    Gradients and optimizer state come on top, in proportion to the parameters.
    """
    model = mlp(hidden, [hidden] * (layers - 1), hidden)
    if method != "vanilla":
        patch_(model, *METHODS[method](components))
    x = torch.randn(batch, hidden, generator=torch.Generator().manual_seed(0))
    saved = saved_for_backward(
        model, lambda: model(x) if method != "ensemble" else forward_draws(model, x, Draws.enumerate(model))
    )
    return {"parameters": sum(p.nbytes for p in model.parameters()), "saved_for_backward": saved}


def saved_for_backward(model: nn.Module, forward: Callable[[], object]) -> int:
    """Bytes that autograd keeps after `forward` for the backward pass, the parameters of `model` not counted."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        kept = forward()  # while it lives, no storage is used twice
    del kept
    return sum(saved.values())
