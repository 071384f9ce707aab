"""Table 6 and tables 9-11 once more with a residual network, ResNet-8: do the claims depend on the architecture?

There is no paper scale: the paper has PyramidNet alone on CIFAR-100. Smoke and paper scale are those of `cifar100`.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from . import cifar100
from .cifar100 import run_small, small_study
from .experiment import Scale, Workspace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STUDY = small_study("resnet8", 40)


def run(scale: Scale, setting: Workspace) -> dict[str, Any]:
    if scale != "small":
        return cifar100.run(scale, setting)
    return run_small(_STUDY, setting, "cifar100-resnet-small") | {"scale": scale}


def figures(result: dict[str, Any]) -> "dict[str, Figure]":
    return {name.replace("cifar100", "cifar100_resnet"): one for name, one in cifar100.figures(result).items()}


EXPERIMENT = replace(
    cifar100.EXPERIMENT,
    name="cifar100-resnet",
    title="CIFAR-100 with a residual network",
    run=run,
    figures=figures,
)
