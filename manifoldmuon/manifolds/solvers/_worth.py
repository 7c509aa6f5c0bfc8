"""What an answer to the Stiefel problem is worth: its optimum in float64 NumPy."""

from typing import NamedTuple

import numpy as np


class Worth(NamedTuple):
    """What a direction is worth, measured in float64 by singular value decompositions.

    Attributes:
      gap: what it leaves of the optimum once it is made feasible: projected onto the tangent
        space and divided by its spectral norm where that exceeds 1.
      residual: `||W^T A + A^T W||_F / n` of the direction as it came.
      norm: its spectral norm as it came.
    """

    gap: float
    residual: float
    norm: float


def stiefel_optimum(point, grad) -> float:
    """`max <G, A>` over tangent `A` of spectral norm at most 1: half of `||G W^T - W G^T||_*`.

    Computed from the `2n x 2n` matrix with the same singular values; float64.
    """
    point, grad = (np.asarray(x, np.float64) for x in (point, grad))
    inner = point.T @ grad
    _, normal = np.linalg.qr(grad - point @ inner)
    zero = np.zeros((len(normal), len(normal)))
    lifted = np.block([[inner - inner.T, -normal.T], [normal, zero]])
    return np.linalg.svd(lifted, compute_uv=False).sum() / 2


def stiefel_worth(point, grad, direction) -> Worth:
    """Measures one direction for one tall point of unit scale; any float arrays, `(m, n)`."""
    point, grad, direction = (np.asarray(x, np.float64) for x in (point, grad, direction))
    inner = point.T @ direction
    feasible = direction - point @ (inner + inner.T) / 2
    feasible /= max(1.0, np.linalg.norm(feasible, 2))
    best = stiefel_optimum(point, grad)
    return Worth(
        gap=float(1 - (grad * feasible).sum() / best) if best > 0 else 0.0,
        residual=float(np.linalg.norm(inner + inner.T) / point.shape[1]),
        norm=float(np.linalg.norm(direction, 2)),
    )
