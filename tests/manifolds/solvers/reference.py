"""The dual of the Stiefel problem in float64 NumPy, by an independent method."""

import numpy as np


def dual_value(point, grad, iterations: int = 400) -> float:
    """Minimise `||G + 2 W L||_*` over symmetric L, by reweighted least squares from zero."""
    n = point.shape[1]
    dual, smoothing, best = np.zeros((n, n)), 0.1, np.inf
    for _ in range(iterations):
        moved = grad + 2 * point @ dual
        values, basis = np.linalg.eigh(moved.T @ moved)
        best = min(best, np.sqrt(np.maximum(values, 0)).sum())
        weights = 1 / np.sqrt(np.maximum(values, 0) + smoothing**2)
        inner = basis.T @ (point.T @ grad) @ basis
        right = -(inner * weights + weights[:, None] * inner.T) / 2
        target = basis @ (right / (weights[:, None] + weights)) @ basis.T
        dual = dual + 1.7 * (target - dual)
        smoothing = max(0.9 * smoothing, 1e-6)
    return best
