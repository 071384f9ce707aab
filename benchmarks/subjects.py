"""What is measured: networks with untrained weights, before and after patching, and a batch of random inputs."""

import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import patchbayes as pb
from patchbayes.nets import cifar_resnet20, mlp, resnet18

NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "mlp": (lambda: mlp(13, hidden=(50, 50), out_features=2), (13,), "hidden2+norm2+output"),
    "resnet20": (lambda: cifar_resnet20(100), (3, 32, 32), "layer3.2.bn1+layer3.2.bn2+output"),
    "resnet18": (lambda: resnet18(100, stem="cifar"), (3, 32, 32), "layer4.1.bn1+layer4.1.bn2+output"),
    "resnet18_224": (lambda: resnet18(1000), (3, 224, 224), "layer4.1.bn1+layer4.1.bn2+output"),
}
METHODS = {"emp": pb.EMP(5), "ecmp": pb.ECMP(5)}


@dataclass(frozen=True)
class Subject:
    """A network before and after patching, a batch, and roughly the seconds of an unpatched pass."""

    plain: nn.Module
    model: nn.Module
    x: Tensor
    one_pass: float

    @classmethod
    def make(cls, network: str, sites: str, method: str, batch: int) -> "Subject":
        """Sites as in `patch_`, or "last": the last block and the output layer."""
        build, shape, last = NETWORKS[network]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            plain, model, x = build().eval(), build().eval(), torch.randn(batch, *shape)
            pb.patch_(model, METHODS[method], last if sites == "last" else sites)
        return cls(plain, model, x, _seconds_of_a_pass(plain, x))

    def passes(self, number: int) -> None:
        """Run the network before patching."""
        with torch.inference_mode():
            for _ in range(number):
                self.plain(self.x)


def _seconds_of_a_pass(network: nn.Module, x: Tensor) -> float:
    with torch.inference_mode():
        network(x)
        began = time.perf_counter()
        network(x)
    return time.perf_counter() - began


def define_torchvision_operators() -> None:
    """Make torchvision importable beside a torch that its compiled part was not built for.

    Its import asks for two operators of that part; a schema is enough, since nothing here computes with them.
    """
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        import torchvision  # noqa: F401
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
