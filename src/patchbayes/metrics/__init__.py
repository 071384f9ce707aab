"""How good a prediction is: pure functions of probabilities and targets."""

from .classification import CalibrationBins, accuracy, brier, calibration_bins, nll

__all__ = ["CalibrationBins", "accuracy", "brier", "calibration_bins", "nll"]
