"""patchbayes: make a neural network you already have into a Bayesian one, cheaply (ensemble model patching)."""

from .bayesianizing import bayesianize_
from .checkpoint import load_, save
from .contract import check_patchable
from .draws import Draws
from .likelihoods import Categorical, Gaussian
from .network import drawn, forward_draws
from .objective import Lambdas, kl, l2_penalty, maximize_prior_, negative_elbo, parameter_groups, share_gradients_
from .patching import is_patched, patch_, patched_sites, unpatch_
from .posteriors import ECMP, EMP, DropConnect, Dropout, Ensemble, MeanField, Mixture, Shared
from .prediction import Prediction, Predictor, predict, predict_batches
from .prior import LearnedPrior, Prior

__version__ = "0.1.0"

__all__ = [
    "ECMP",
    "EMP",
    "Categorical",
    "Draws",
    "DropConnect",
    "Dropout",
    "Ensemble",
    "Gaussian",
    "Lambdas",
    "LearnedPrior",
    "MeanField",
    "Mixture",
    "Prediction",
    "Predictor",
    "Prior",
    "Shared",
    "bayesianize_",
    "check_patchable",
    "drawn",
    "forward_draws",
    "is_patched",
    "kl",
    "l2_penalty",
    "load_",
    "maximize_prior_",
    "negative_elbo",
    "parameter_groups",
    "patch_",
    "patched_sites",
    "predict",
    "predict_batches",
    "save",
    "share_gradients_",
    "unpatch_",
]
