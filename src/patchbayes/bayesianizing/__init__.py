"""From a trained network to a calibrated Bayesian one, in one call."""

from .calibrate import calibrate_
from .recipe import bayesianize_
from .report import BayesianizeReport, CalibrationReport, Scores
from .warm_up import warm_up_

__all__ = ["BayesianizeReport", "CalibrationReport", "Scores", "bayesianize_", "calibrate_", "warm_up_"]
