"""The networks of the paper's experiments, and a small one for demos.

Every `dropout` keyword is the paper's baseline (appendix D): elementwise dropout of activations before every batch
norm, a fresh mask per example. At the default of 0.0 no dropout layer exists, and it never changes a state-dict key.
"""

from patchbayes.nets.cifar_resnet import cifar_resnet20, cifar_resnet56
from patchbayes.nets.mlp import mlp
from patchbayes.nets.pyramidnet import pyramidnet
from patchbayes.nets.resnet import resnet18
from patchbayes.nets.small_cnn import small_cnn

__all__ = ["cifar_resnet20", "cifar_resnet56", "mlp", "pyramidnet", "resnet18", "small_cnn"]
