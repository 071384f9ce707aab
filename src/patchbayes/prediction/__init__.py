"""Prediction: average draws of a patched network, and say how sure it is."""

from .plan import Plan
from .predict import Predictor, predict, predict_batches
from .prediction import ClassPrediction, Prediction, PredictiveCheck, RegressionPrediction

__all__ = [
    "ClassPrediction",
    "Plan",
    "Prediction",
    "PredictiveCheck",
    "Predictor",
    "RegressionPrediction",
    "predict",
    "predict_batches",
]
