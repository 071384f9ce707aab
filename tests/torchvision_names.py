"""Names that torchvision's import needs: beside a CPU-only torch its compiled part does not load (torchmetrics imports it)."""

import importlib.util

import torch


def torchvision_operators() -> torch.library.Library | None:
    """Define the two names, if they are missing; keep the result as long as they are needed."""
    if importlib.util.find_spec("torchvision") is None or hasattr(torch.ops.torchvision, "nms"):
        return None
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library
