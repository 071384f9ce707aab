"""Prediction: average draws of a patched network, and say how sure it is."""

from .classes import ClassPrediction
from .conformal import Conformal, conformal
from .labels import LabelPrediction
from .plan import Plan
from .predict import Predictor, predict, predict_batches
from .prediction import Prediction, PredictiveCheck
from .regression import HeteroscedasticPrediction, MeanPrediction, RegressionPrediction

__all__ = [
    "ClassPrediction",
    "Conformal",
    "HeteroscedasticPrediction",
    "LabelPrediction",
    "MeanPrediction",
    "Plan",
    "Prediction",
    "PredictiveCheck",
    "Predictor",
    "RegressionPrediction",
    "conformal",
    "predict",
    "predict_batches",
]
