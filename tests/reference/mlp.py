"""Small networks in float64: forward and, by hand-written chain rule, backward.

A network is a list of layers (kind, parameters, settings); gradients come back as one dictionary for each layer.
"""

import numpy as np

Layer = tuple[str, dict[str, np.ndarray], dict[str, object]]


def forward(network: list[Layer], x: np.ndarray) -> tuple[np.ndarray, list[object]]:
    """The output (B, C) and what backward needs."""
    caches = []
    for kind, parameters, settings in network:
        x, cache = _FORWARD[kind](x, parameters, settings)
        caches.append(cache)
    return x, caches


def backward(network: list[Layer], caches: list[object], gradient: np.ndarray) -> list[dict[str, np.ndarray]]:
    """Gradients of all parameters, given the gradient of the output."""
    gradients: list[dict[str, np.ndarray]] = []
    for (kind, parameters, settings), cache in zip(reversed(network), reversed(caches), strict=True):
        gradient, own = _BACKWARD[kind](gradient, cache, parameters, settings)
        gradients.append(own)
    return gradients[::-1]


def categorical_log_likelihood(logits: np.ndarray, classes: np.ndarray) -> tuple[float, np.ndarray]:
    """(1/B) sum_b log softmax(logits_b)[y_b], and its gradient with respect to the logits."""
    log_probs = log_softmax(logits)
    one_hot = np.eye(logits.shape[1])[classes]
    return float((log_probs * one_hot).sum(1).mean()), (one_hot - np.exp(log_probs)) / len(classes)


def gaussian_log_likelihood(means: np.ndarray, y: np.ndarray, precision: float) -> tuple[float, np.ndarray]:
    """(1/B) sum_b log N(y_b | f_b, I / precision), and its gradient with respect to the means."""
    residual = y - means
    dimensions = y.shape[1]
    log_density = 0.5 * dimensions * np.log(precision / (2 * np.pi)) - 0.5 * precision * (residual**2).sum(1)
    return float(log_density.mean()), precision * residual / len(y)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def _linear(x, parameters, settings):
    return x @ parameters["weight"].T + parameters["bias"], x


def _linear_backward(gradient, x, parameters, settings):
    return gradient @ parameters["weight"], {"weight": gradient.T @ x, "bias": gradient.sum(0)}


def _tanh(x, parameters, settings):
    y = np.tanh(x)
    return y, y


def _tanh_backward(gradient, y, parameters, settings):
    return gradient * (1 - y**2), {}


def _batch_norm(x, parameters, settings):
    """With the statistics of the batch, or with given ones (mean, variance); then the affine part."""
    mean, variance = settings["statistics"] or (x.mean(0), x.var(0))
    deviation = np.sqrt(variance + settings["eps"])
    normalized = (x - mean) / deviation
    return normalized * parameters["weight"] + parameters["bias"], (normalized, deviation)


def _batch_norm_backward(gradient, cache, parameters, settings):
    normalized, deviation = cache
    own = {"weight": (gradient * normalized).sum(0), "bias": gradient.sum(0)}
    inner = gradient * parameters["weight"]
    if not settings["statistics"]:
        inner = inner - inner.mean(0) - normalized * (inner * normalized).mean(0)
    return inner / deviation, own


_FORWARD = {"linear": _linear, "tanh": _tanh, "batch norm": _batch_norm}
_BACKWARD = {"linear": _linear_backward, "tanh": _tanh_backward, "batch norm": _batch_norm_backward}
