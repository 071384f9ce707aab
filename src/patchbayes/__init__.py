"""patchbayes: make a neural network you already have into a Bayesian one, cheaply (ensemble model patching).

Specialists live in submodules: `patchbayes.posteriors`, `likelihoods`, `objective`, `prior`, `prediction`, `metrics`,
`digests`.
"""

from .bayesianizing import bayesianize_, calibrate_, warm_up_
from .draws.draws import Draws
from .errors import PatchbayesError
from .export import export
from .objective import kl, no_decay_names
from .patching.checkpoint import load_, save
from .patching.contract import check_patchable
from .patching.drawing import forward_draws, set_eval_, use_draw
from .patching.patch import is_patched, patch_, patched_sites, unpatch_
from .patching.pretrained import from_pretrained, merge_, save_pretrained
from .posteriors import ECMP, EMP, Dropout, Ensemble, mixed
from .prediction import Predictor, conformal, predict

__version__ = "0.2.0"

__all__ = [
    "ECMP",
    "EMP",
    "Draws",
    "Dropout",
    "Ensemble",
    "PatchbayesError",
    "Predictor",
    "bayesianize_",
    "calibrate_",
    "check_patchable",
    "conformal",
    "export",
    "forward_draws",
    "from_pretrained",
    "is_patched",
    "kl",
    "load_",
    "merge_",
    "mixed",
    "no_decay_names",
    "patch_",
    "patched_sites",
    "predict",
    "save",
    "save_pretrained",
    "set_eval_",
    "unpatch_",
    "use_draw",
    "warm_up_",
]

#: Names that stood here in 0.1.0, with the submodule that has them now.
_MOVED = {
    "Categorical": "likelihoods",
    "DropConnect": "posteriors",
    "Gaussian": "likelihoods",
    "GaussianNoise": "posteriors",
    "Lambdas": "objective",
    "LearnedPrior": "prior",
    "MeanField": "posteriors",
    "Mixture": "posteriors",
    "Prediction": "prediction",
    "Prior": "prior",
    "l2_penalty": "objective",
    "maximize_prior_": "objective",
    "negative_elbo": "objective",
    "parameter_groups": "objective",
    "predict_batches": "prediction",
    "share_gradients_": "objective",
    "verify": "digests",
}


def __getattr__(name: str) -> object:
    """Names that moved, for one more release."""
    if name not in _MOVED:
        raise AttributeError(f"module 'patchbayes' has no attribute {name!r}")
    import importlib
    import warnings

    warnings.warn(
        f"patchbayes.{name} is now patchbayes.{_MOVED[name]}.{name}; the old name goes with the next release.",
        DeprecationWarning,
        stacklevel=2,
    )
    return getattr(importlib.import_module(f"patchbayes.{_MOVED[name]}"), name)
