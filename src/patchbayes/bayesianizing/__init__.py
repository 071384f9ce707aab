"""From a trained network to a calibrated Bayesian one, in one call."""

from .recipe import DEFAULT_JITTER, bayesianize_
from .report import BayesianizeReport, Scores, Trial

__all__ = ["DEFAULT_JITTER", "BayesianizeReport", "Scores", "Trial", "bayesianize_"]
