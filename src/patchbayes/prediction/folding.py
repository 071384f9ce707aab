"""Batch norm in evaluation mode is an affine map of its channels: computed as one, or folded into the layer before it.

    norm(x) = scale * x + shift,    scale = gamma / sqrt(var + eps),    shift = beta - mean * scale
    norm(conv(x)) = conv'(x),       W' = scale * W,                     b' = scale * b + shift

gamma and beta are those of the current draw. Folding replaces a pass over the activations by one over the weights.
"""

import copy
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from ..network import Site
from ..posteriors.mixture import MixturePosterior

# Activations that folding must save for each weight that it scales, and for its own calls: measured on CPU over the layers
# of ResNets at batches of 1 to 64, where it gained up to a third of convolution and norm, and cost up to a half if misused.
_PER_WEIGHT = 4
_PER_CALL = 100_000

_NORMS = (nn.BatchNorm2d.forward, nn.SyncBatchNorm.forward)  # in evaluation mode the second is the first
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class FoldedNorm(nn.Module):
    """A layer and the batch norm after it; `folds` tells whether the last call folded them into one."""

    def __init__(self, layer: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.layer: Any = layer
        self.norm: Any = norm
        self.folds = False

    def forward(self, x: Tensor) -> Tensor:
        self.folds = self._pays(x)
        if not self.folds:
            return self.norm(self.layer(x))
        scale, shift = affine(self.norm)
        weight, bias = self.layer.weight, self.layer.bias
        weight = weight * scale.view(-1, *[1] * (weight.dim() - 1))
        bias = shift if bias is None else torch.addcmul(shift, bias, scale)
        if isinstance(self.layer, nn.Linear):
            return F.linear(x, weight, bias)
        return self.layer._conv_forward(x, weight, bias)

    def _pays(self, x: Tensor) -> bool:
        weight = self.layer.weight
        if x.dim() != weight.dim() or not _one_precision(self.norm, x) or weight.dtype != x.dtype:
            return False
        stride = getattr(self.layer, "stride", ())
        activations = x.numel() * weight.shape[0] // max(x.shape[1], 1)
        for step in stride:
            activations //= step
        return activations > _PER_WEIGHT * weight.numel() + _PER_CALL


class AffineNorm(nn.Module):
    """A batch norm in evaluation mode as one multiplication and addition, which keeps the order in memory under vmap."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm: Any = norm

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() < 2 or not _one_precision(self.norm, x):
            return self.norm(x)
        self.norm._check_input_dim(x)
        scale, shift = affine(self.norm)
        shape = (-1, *[1] * (x.dim() - 2))
        return torch.addcmul(shift.view(shape), x, scale.view(shape))


def affine(norm: Any) -> tuple[Tensor, Tensor]:
    """scale and shift of each channel, (C,) and (C,), for the current draw."""
    scale = norm.weight * torch.rsqrt(norm.running_var + norm.eps)
    return scale, torch.addcmul(norm.bias, norm.running_mean, scale, value=-1)


def fold_norms(graph: fx.Graph, modules: dict[str, Any]) -> tuple[fx.GraphModule, list[FoldedNorm]]:
    """The operations of one draw, with each drawn batch norm joined to the layer that feeds it alone.

    `modules` are the targets of the graph's operations by name.
    """
    graph = copy.deepcopy(graph)
    extra: dict[str, FoldedNorm] = {}
    for node in list(graph.nodes):
        if not _is_drawn_norm(node, modules):
            continue
        (before,) = node.args
        if len(before.users) == 1 and _is_foldable_layer(before, modules):
            name = f"patchbayes_folded_{len(extra)}"
            extra[name] = FoldedNorm(modules[before.target], modules[node.target])
            _replace(graph, node, name, before.args)
            graph.erase_node(before)
    return fx.GraphModule(modules | extra, graph), list(extra.values())


def affine_norms(graph: fx.Graph, modules: dict[str, Any]) -> fx.GraphModule:
    """The operations in the form for several draws at once, with drawn batch norms as affine maps."""
    graph = copy.deepcopy(graph)
    extra: dict[str, AffineNorm] = {}
    for node in list(graph.nodes):
        if _is_drawn_norm(node, modules):
            name = f"patchbayes_affine_{len(extra)}"
            extra[name] = AffineNorm(modules[str(node.target)])
            _replace(graph, node, name, node.args)
    return fx.GraphModule(modules | extra, graph)


def _replace(graph: fx.Graph, node: fx.Node, target: str, args: Any) -> None:
    with graph.inserting_before(node):
        new = graph.create_node("call_module", target, args)
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def _is_drawn_norm(node: fx.Node, modules: dict[str, Any]) -> bool:
    """A batch norm that is a site, with statistics that are the same for all draws, called with one value."""
    if node.op != "call_module" or len(node.args) != 1 or node.kwargs or not isinstance(node.args[0], fx.Node):
        return False
    module = modules[str(node.target)]
    site = vars(module).get("_patchbayes_site")
    if type(module).forward not in _NORMS or "forward" in vars(module) or not isinstance(site, Site):
        return False
    method = site.method
    plain = not getattr(method, "per_example", False) and getattr(method, "statistics", "shared") == "shared"
    hooks = len(module._forward_pre_hooks) + len(module._forward_hooks)  # one of our own makes sure of a draw
    drawn = isinstance(site.posterior, MixturePosterior) and module.weight is not None and module.bias is not None
    return plain and hooks == 1 and drawn


def _is_foldable_layer(node: Any, modules: dict[str, Any]) -> bool:
    if node.op != "call_module" or len(node.args) != 1 or node.kwargs:
        return False
    module = modules[str(node.target)]
    if "forward" in vars(module) or module._forward_pre_hooks or module._forward_hooks:
        return False
    kind = type(module)
    return kind.forward is nn.Linear.forward or any(
        kind.forward is cls.forward and kind._conv_forward is cls._conv_forward for cls in _CONVOLUTIONS
    )


def _one_precision(norm: Any, x: Tensor) -> bool:
    if norm.running_mean is None or norm.running_var is None or torch.is_autocast_enabled(x.device.type):
        return False
    return bool(norm.running_mean.dtype == x.dtype == norm.running_var.dtype)
