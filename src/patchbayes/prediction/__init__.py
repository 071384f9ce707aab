"""Prediction: average draws of a patched network, and say how sure it is."""

from .classes import ClassPrediction
from .labels import LabelPrediction
from .plan import Plan
from .predict import Predictor, predict, predict_batches
from .prediction import Prediction, PredictiveCheck
from .regression import HeteroscedasticPrediction, MeanPrediction, RegressionPrediction
from .viewing import split_information

__all__ = [
    "ClassPrediction",
    "HeteroscedasticPrediction",
    "LabelPrediction",
    "MeanPrediction",
    "Plan",
    "Prediction",
    "PredictiveCheck",
    "Predictor",
    "RegressionPrediction",
    "predict",
    "predict_batches",
    "split_information",
]
