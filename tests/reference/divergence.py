"""KL divergences to N(0, 1/precision): the paper's formula, the bounds through the entropy, and the truth by quadrature."""

import itertools

import numpy as np
from scipy import integrate


def quadratic_kl(components: np.ndarray, p: np.ndarray, precision: float) -> float:
    """One term of Eqs. (2) and (6): sum_k precision p_k / 2 ||M_k||^2, over the components that are given."""
    return float(sum(0.5 * precision * p_k * (m**2).sum() for p_k, m in zip(p, components, strict=False)))


def kl_with_component_entropies(means: np.ndarray, p: np.ndarray, sigma: float, precision: np.ndarray) -> float:
    """Cross entropy minus sum_k p_k H(N_k), for a mixture in D dimensions: means (K, D), precision (D,)."""
    dimensions = means.shape[1]
    second_moment = (p[:, None] * means**2).sum(0) + sigma**2
    cross_entropy = 0.5 * (np.log(2 * np.pi) - np.log(precision) + precision * second_moment).sum()
    component_entropy = 0.5 * dimensions * (1 + np.log(2 * np.pi) + np.log(sigma**2))
    return float(cross_entropy - component_entropy)


def categorical_entropy(p: np.ndarray) -> float:
    p = np.asarray(p)[np.asarray(p) > 0]
    return float(-(p * np.log(p)).sum())


def true_kl(means: np.ndarray, p: np.ndarray, sigma: float, precision: np.ndarray) -> float:
    """KL(sum_k p_k N(means_k, sigma^2 I) || N(0, diag(1/precision))) by quadrature: means (K, D) with D = 1 or 2."""
    means, p, precision = np.asarray(means, float), np.asarray(p, float), np.asarray(precision, float)
    if means.shape[1] == 1:
        return _true_kl_1d(means[:, 0], p, sigma, float(precision[0]))
    return _true_kl_2d(means, p, sigma, precision)


def _true_kl_1d(means: np.ndarray, p: np.ndarray, sigma: float, precision: float) -> float:
    def integrand(w: float) -> float:
        log_q = _log_mixture(np.array([[w]]), means[:, None], p, sigma)[0]
        return float(np.exp(log_q) * (log_q - _log_normal(np.array([[w]]), np.array([precision]))[0]))

    edges = np.unique(np.concatenate([means + d * sigma for d in (-12, -4, 0, 4, 12)]))
    pieces = [integrate.quad(integrand, a, b, epsabs=1e-13, limit=200)[0] for a, b in itertools.pairwise(edges)]
    return float(sum(pieces))


def _true_kl_2d(means: np.ndarray, p: np.ndarray, sigma: float, precision: np.ndarray) -> float:
    axes = []
    for axis in range(2):
        low, high = means[:, axis].min() - 10 * sigma, means[:, axis].max() + 10 * sigma
        axes.append(np.linspace(low, high, int(np.ceil((high - low) / (sigma / 6))) + 1))
    points = np.stack(np.meshgrid(*axes, indexing="ij"), -1)
    log_q = _log_mixture(points.reshape(-1, 2), means, p, sigma)
    log_prior = _log_normal(points.reshape(-1, 2), precision)
    values = (np.exp(log_q) * (log_q - log_prior)).reshape(points.shape[:2])
    return float(integrate.trapezoid(integrate.trapezoid(values, axes[1], axis=1), axes[0]))


def _log_mixture(points: np.ndarray, means: np.ndarray, p: np.ndarray, sigma: float) -> np.ndarray:
    dimensions = means.shape[1]
    squares = ((points[:, None] - means[None]) ** 2).sum(-1)
    logs = np.log(p) - squares / (2 * sigma**2) - 0.5 * dimensions * np.log(2 * np.pi * sigma**2)
    top = logs.max(1, keepdims=True)
    return (top + np.log(np.exp(logs - top).sum(1, keepdims=True)))[:, 0]


def _log_normal(points: np.ndarray, precision: np.ndarray) -> np.ndarray:
    return 0.5 * (np.log(precision / (2 * np.pi)) - precision * points**2).sum(-1)
