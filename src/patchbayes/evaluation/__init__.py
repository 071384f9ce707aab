"""Evaluation: what trained networks answer on test data, scored; answers for new inputs."""

from .evaluation import Evaluating, evaluate, read_evaluation, write_evaluation
from .new_inputs import NewInputs

__all__ = ["Evaluating", "NewInputs", "evaluate", "read_evaluation", "write_evaluation"]
