"""Prediction: average draws of a patched network, and say how sure it is."""

from .predict import Predictor, predict
from .prediction import ClassPrediction, Prediction, PredictiveCheck, RegressionPrediction

__all__ = ["ClassPrediction", "Prediction", "PredictiveCheck", "Predictor", "RegressionPrediction", "predict"]
