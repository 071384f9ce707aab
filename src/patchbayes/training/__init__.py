"""Training: a configuration, the loop, the run folder, resuming."""

from .config import TrainingConfig
from .interruption import TrainingInterrupted
from .methods import METHODS, build_method
from .ordinary_checkpoint import load_ordinary_
from .run_folder import RunFolder
from .training import train

__all__ = [
    "METHODS",
    "RunFolder",
    "TrainingConfig",
    "TrainingInterrupted",
    "build_method",
    "load_ordinary_",
    "train",
]
