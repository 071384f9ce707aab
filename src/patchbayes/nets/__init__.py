"""The networks of the paper's experiments, and a small one for demos.

None has dropout layers: the paper's baseline (appendix D) is `patch_(network, Dropout(0.005), "norm")`.
"""

from .cifar_resnet import cifar_resnet20, cifar_resnet56, small_resnet
from .mlp import mlp
from .pyramidnet import pyramidnet
from .resnet import resnet18
from .small_cnn import small_cnn

__all__ = ["cifar_resnet20", "cifar_resnet56", "mlp", "pyramidnet", "resnet18", "small_cnn", "small_resnet"]
