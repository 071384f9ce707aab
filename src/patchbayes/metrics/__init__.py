"""How good a prediction is: pure functions of probabilities and targets."""

from .bootstrap import Interval, bootstrap
from .calibration import (
    CalibrationBins,
    adaptive_calibration_error,
    calibration_bins,
    classwise_calibration_error,
    expected_calibration_error,
    maximum_calibration_error,
)
from .classification import accuracy, brier, brier_per_example, correct, nll, nll_per_example
from .corruption import CorruptionErrors, corruption_errors, relative_corruption_errors
from .diversity import disagreement, mutual_information
from .floor import Floor, calibration_floor
from .ood import auroc, fpr_at_tpr
from .regression import (
    QuantileCalibration,
    crps,
    gaussian_crps,
    interval_coverage,
    interval_width,
    log_density,
    pit,
    quantile_calibration,
    rmse,
)
from .selective import CoverageCurve, aurc, coverage_curve, risk_bound, threshold_at_risk
from .temperature import apply_temperature, fit_temperature, fit_variance_factor

__all__ = [
    "CalibrationBins",
    "CorruptionErrors",
    "CoverageCurve",
    "Floor",
    "Interval",
    "QuantileCalibration",
    "accuracy",
    "adaptive_calibration_error",
    "apply_temperature",
    "aurc",
    "auroc",
    "bootstrap",
    "brier",
    "brier_per_example",
    "calibration_bins",
    "calibration_floor",
    "classwise_calibration_error",
    "correct",
    "corruption_errors",
    "coverage_curve",
    "crps",
    "disagreement",
    "expected_calibration_error",
    "fit_temperature",
    "fit_variance_factor",
    "fpr_at_tpr",
    "gaussian_crps",
    "interval_coverage",
    "interval_width",
    "log_density",
    "maximum_calibration_error",
    "mutual_information",
    "nll",
    "nll_per_example",
    "pit",
    "quantile_calibration",
    "relative_corruption_errors",
    "risk_bound",
    "rmse",
    "threshold_at_risk",
]
