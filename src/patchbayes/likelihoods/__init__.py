"""How the network's output speaks of the data: class probabilities, labels, or a mean with noise. One file each."""

from .bernoulli import Bernoulli
from .categorical import Categorical
from .gaussian import Gaussian
from .heteroscedastic import HeteroscedasticGaussian
from .likelihood import Likelihood, checked_likelihood, likelihood_from_config

__all__ = [
    "Bernoulli",
    "Categorical",
    "Gaussian",
    "HeteroscedasticGaussian",
    "Likelihood",
    "checked_likelihood",
    "likelihood_from_config",
]
