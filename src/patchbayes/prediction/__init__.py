"""Prediction: average draws of a patched network, and say how sure it is."""

from .classes import ClassPrediction
from .conformal import Conformal, conformal
from .labels import LabelPrediction
from .on_ranks import predict_on_ranks
from .plan import Plan
from .predict import predict, predict_batches
from .prediction import Prediction, PredictiveCheck
from .predictor import Predictor
from .regression import HeteroscedasticPrediction, MeanPrediction, RegressionPrediction
from .viewing import split_information

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
    "predict_on_ranks",
    "split_information",
]
