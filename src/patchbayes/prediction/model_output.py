"""Predictions in the form that transformers expects of a model: an output with `logits`, and `loss` where labels came along."""

from typing import Any

import torch
from torch import Tensor, nn

from ..errors import PatchbayesError
from .classes import ClassPrediction
from .labels import LabelPrediction
from .prediction import Prediction
from .targets import IGNORED, network_name, targets_of_outputs

#: The output classes of transformers, by how the names of the networks end that give them.
_OUTPUTS = {
    "ForSequenceClassification": "SequenceClassifierOutput",
    "ForTokenClassification": "TokenClassifierOutput",
    "ForMaskedLM": "MaskedLMOutput",
    "ForCausalLM": "CausalLMOutput",
    "LMHeadModel": "CausalLMOutput",
    "ForImageClassification": "ImageClassifierOutput",
    "ForMultipleChoice": "MultipleChoiceModelOutput",
}


def model_output(model: nn.Module, prediction: Prediction, labels: Tensor | None) -> Any:
    """The answer as an output of transformers: averaged log-probabilities (the mean, in regression) as logits."""
    from transformers import modeling_outputs

    name = network_name(model)
    kind = next((kind for end, kind in _OUTPUTS.items() if name.endswith(end)), "SequenceClassifierOutput")
    loss = None if labels is None else mean_nll(model, prediction, labels)
    return getattr(modeling_outputs, kind)(loss=loss, logits=answer_of(prediction))


def answer_of(prediction: Prediction) -> Tensor:
    """The averaged log-probabilities or log-odds; the mean, in regression."""
    answer = prediction.answer
    return answer[0] if isinstance(answer, tuple) else answer


def mean_nll(model: nn.Module, prediction: Prediction, labels: Tensor) -> Tensor:
    """The negative log-likelihood of the averaged prediction, (), over all labels that count; in regression a Gaussian's."""
    targets = targets_of_outputs(model, labels).to(answer_of(prediction).device)
    if isinstance(prediction, ClassPrediction):
        log_probs = prediction.log_probs
        if targets.shape != log_probs.shape[:-1]:
            raise PatchbayesError(
                f"labels of shape {tuple(labels.shape)} do not fit outputs of shape {tuple(log_probs.shape)}."
            )
        return torch.nn.functional.nll_loss(
            log_probs.reshape(-1, log_probs.shape[-1]), targets.reshape(-1), ignore_index=IGNORED
        )
    if isinstance(prediction, LabelPrediction):
        return -prediction.log_prob(targets).sum() / (targets != IGNORED).sum().clamp_min(1)
    mean, variance = prediction.answer
    return torch.nn.functional.gaussian_nll_loss(mean, targets.to(mean).reshape(mean.shape), variance, full=True)
