"""All experiments of the paper, by name."""

from importlib import import_module

from patchbayes.errors import PatchbayesError

from .experiment import Experiment

#: name of the experiment -> the file that holds it; imported when asked for
_FILES = {
    "parameters": "parameter_tables",
    "prior": "prior_functions",
    "gpu-memory": "gpu_memory",
    "cifar100": "cifar100",
    "cifar100-resnet": "cifar100_resnet",
    "hundred-layers": "hundred_layers",
    "imagenet": "imagenet",
    "regression": "regression_tables",
    "pbp": "pbp_errors",
    "ablations": "ablations",
    "cost": "training_cost",
    "coordinate-descent": "turns_of_training",
    "gpu-needs": "gpu_needs",
}


def names() -> list[str]:
    return list(_FILES)


def experiment(name: str) -> Experiment:
    """The experiment of that name."""
    if name not in _FILES:
        raise PatchbayesError(f"there is no experiment {name!r}; there are {', '.join(_FILES)}.")
    found: Experiment = import_module(f".{_FILES[name]}", __package__).EXPERIMENT
    return found
