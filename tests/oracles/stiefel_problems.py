"""Steepest directions on the Stiefel manifold in float64: problems and the errors of an answer."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

STIEFEL_FAMILIES = ("gaussian", "ill-conditioned", "rank 8", "rank 8 with noise")
"""Families of gradients on which published solvers differ."""


def orthonormal(rng: np.random.Generator, m: int, n: int) -> np.ndarray:
    """Return a uniformly distributed `(m, n)` matrix with orthonormal columns."""
    q, r = np.linalg.qr(rng.standard_normal((m, n)))
    return q * np.sign(np.diag(r))


def stiefel_problem(family: str, m: int, n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return a point and a gradient of spectral norm 1, both `(m, n)` with `m >= n`.

    The families have Gaussian entries; singular values from 1 to 1e-4 in geometric progression;
    rank 8; rank 8 with 1 % of noise.
    """
    rng = np.random.default_rng(seed)
    point = orthonormal(rng, m, n)
    low = rng.standard_normal((m, 8)) @ rng.standard_normal((8, n))
    noise = rng.standard_normal((m, n))
    if family == "gaussian":
        grad = noise
    elif family == "ill-conditioned":
        grad = orthonormal(rng, m, n) * np.logspace(0, -4, n) @ orthonormal(rng, n, n).T
    elif family == "rank 8":
        grad = low
    elif family == "rank 8 with noise":
        grad = low / np.linalg.norm(low, 2) + 0.01 * noise / np.linalg.norm(noise, 2)
    else:
        raise ValueError(f"family must be among {STIEFEL_FAMILIES}; got {family!r}")
    return point, grad / np.linalg.norm(grad, 2)


class DirectionErrors(NamedTuple):
    """Errors of a direction, by singular value decompositions.

    Attributes:
      gap: share of the optimum missed by the direction once it is made feasible: projected onto
        the tangent space and divided by its spectral norm if that exceeds 1.
      residual: `||W^T A + A^T W||_F / n` of the direction as given.
      norm: spectral norm of the direction as given.
    """

    gap: float
    residual: float
    norm: float


def stiefel_optimum(point, grad) -> float:
    """Return the largest `<G, A>` over tangent A of spectral norm 1: half of `||G W^T - W G^T||_*`.

    Computed from the `2n x 2n` matrix with the same singular values.
    """
    point, grad = (np.asarray(x, np.float64) for x in (point, grad))
    inner = point.T @ grad
    _, normal = np.linalg.qr(grad - point @ inner)
    zero = np.zeros((len(normal), len(normal)))
    lifted = np.block([[inner - inner.T, -normal.T], [normal, zero]])
    return np.linalg.svd(lifted, compute_uv=False).sum() / 2


def stiefel_errors(point, grad, direction) -> DirectionErrors:
    """Measure an ascent direction at a tall point of scale 1."""
    point, grad, direction = (np.asarray(x, np.float64) for x in (point, grad, direction))
    inner = point.T @ direction
    feasible = direction - point @ (inner + inner.T) / 2
    feasible /= max(1.0, np.linalg.norm(feasible, 2))
    best = stiefel_optimum(point, grad)
    return DirectionErrors(
        gap=float(1 - (grad * feasible).sum() / best) if best > 0 else 0.0,
        residual=float(np.linalg.norm(inner + inner.T) / point.shape[1]),
        norm=float(np.linalg.norm(direction, 2)),
    )
