"""One file for each distribution over the parameters of a site, behind the interface of `posterior.py`."""

from ..errors import NotASite
from .bayes_by_backprop import BayesByBackprop
from .dropout import Dropout
from .film_ensemble import FiLMEnsemble
from .flow import Flow
from .gaussian import MeanField
from .gaussian_dropout import GaussianDropout
from .learned_sigma import GaussianMixture
from .low_rank import LowRank
from .method import Method, constructors, method_from_config
from .mixed import mixed
from .mixture import ECMP, EMP, DropConnect, Ensemble, GaussianNoise, Mixture
from .mnf import MNF
from .posterior import KL, Groups, Posterior, SiteDraw
from .rank_one import BatchEnsemble, RankOne
from .spread import Spread

__all__ = [
    "ECMP",
    "EMP",
    "KL",
    "MNF",
    "BatchEnsemble",
    "BayesByBackprop",
    "DropConnect",
    "Dropout",
    "Ensemble",
    "FiLMEnsemble",
    "Flow",
    "GaussianDropout",
    "GaussianMixture",
    "GaussianNoise",
    "Groups",
    "LowRank",
    "MeanField",
    "Method",
    "Mixture",
    "NotASite",
    "Posterior",
    "RankOne",
    "SiteDraw",
    "Spread",
    "constructors",
    "method_from_config",
    "mixed",
]
