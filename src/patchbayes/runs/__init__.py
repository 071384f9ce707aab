"""Runs: a network trained into a folder that can be resumed, and what its evaluation says of it."""

from .config import TrainingConfig
from .evaluate import EvaluationOptions, evaluate
from .folder import RunFolder
from .interruption import TrainingInterrupted
from .lost_ranks import RankLost
from .new_inputs import NewInputs
from .ordinary_checkpoint import load_ordinary_
from .record import EvaluationRecord, read_evaluation, write_evaluation
from .train import train

__all__ = [
    "EvaluationOptions",
    "EvaluationRecord",
    "NewInputs",
    "RankLost",
    "RunFolder",
    "TrainingConfig",
    "TrainingInterrupted",
    "evaluate",
    "load_ordinary_",
    "read_evaluation",
    "train",
    "write_evaluation",
]
