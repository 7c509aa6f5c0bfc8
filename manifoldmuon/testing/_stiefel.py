"""The Stiefel problem in float64 NumPy: problems to solve, and the errors of a solution."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

STIEFEL_FAMILIES = ("gaussian", "ill-conditioned", "rank 8", "rank 8 with noise")
"""The families of gradients that `stiefel_problem` knows."""


def orthonormal(rng: np.random.Generator, m: int, n: int) -> np.ndarray:
    """Return a uniformly distributed `(m, n)` matrix with orthonormal columns, float64.

    Args:
      rng: generator of the entries.
      m: rows.
      n: columns, at most `m`.

    Examples:
      >>> w = orthonormal(np.random.default_rng(0), 5, 3)
      >>> bool(np.allclose(w.T @ w, np.eye(3)))
      True
    """
    q, r = np.linalg.qr(rng.standard_normal((m, n)))
    return q * np.sign(np.diag(r))


def stiefel_problem(family: str, m: int, n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return a point and a gradient of spectral norm 1, both `(m, n)` in float64.

    Published solvers differ on these families: Gaussian entries; singular values from 1 to 1e-4 in
    geometric progression; rank 8; rank 8 with 1 % of noise.

    Args:
      family: a name in `STIEFEL_FAMILIES`.
      m: rows.
      n: columns, at most `m`.
      seed: seed of the entries.

    Returns:
      `(point, grad)`.

    Raises:
      ValueError: `family` is not in `STIEFEL_FAMILIES`, or `m < n`.

    Examples:
      >>> point, grad = stiefel_problem("gaussian", 6, 4)
      >>> point.shape == grad.shape == (6, 4)
      True
    """
    if family not in STIEFEL_FAMILIES:
        raise ValueError(f"family must be one of {STIEFEL_FAMILIES}; got {family!r}")
    if m < n:
        raise ValueError(f"a point needs m >= n; got m={m}, n={n}")
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
    else:
        grad = low / np.linalg.norm(low, 2) + 0.01 * noise / np.linalg.norm(noise, 2)
    return point, grad / np.linalg.norm(grad, 2)


class DirectionErrors(NamedTuple):
    """Errors of a direction, measured in float64 by singular value decompositions.

    Attributes:
      gap: share of the optimum missed by the direction once it is made feasible: projected onto
        the tangent space and divided by its spectral norm if that exceeds 1.
      residual: `||W^T A + A^T W||_F / n` of the direction as given.
      norm: spectral norm of the direction as given.

    Examples:
      >>> point, grad = jnp.eye(2), jnp.array([[0.0, 1.0], [0.0, 0.0]])
      >>> direction = mm.manifolds.Orthogonal().steepest(point, grad).direction
      >>> bool(stiefel_errors(point, grad, direction).gap < 0.01)
      True
    """

    gap: float
    residual: float
    norm: float


def stiefel_optimum(point, grad) -> float:
    """Return the largest `<G, A>` over tangent A of spectral norm 1: half of `||G W^T - W G^T||_*`.

    Computed from the `2n x 2n` matrix with the same singular values; float64.

    Args:
      point: `(m, n)`, with orthonormal columns.
      grad: `(m, n)`.

    Examples:
      >>> point, grad = stiefel_problem("gaussian", 6, 4)
      >>> bool(stiefel_optimum(point, grad) > 0)
      True
    """
    point, grad = (np.asarray(x, np.float64) for x in (point, grad))
    inner = point.T @ grad
    _, normal = np.linalg.qr(grad - point @ inner)
    zero = np.zeros((len(normal), len(normal)))
    lifted = np.block([[inner - inner.T, -normal.T], [normal, zero]])
    return np.linalg.svd(lifted, compute_uv=False).sum() / 2


def stiefel_errors(point, grad, direction) -> DirectionErrors:
    """Measure a direction at a tall point of scale 1; any float arrays, `(m, n)`.

    Args:
      point: `(m, n)`, with orthonormal columns.
      grad: `(m, n)`.
      direction: `(m, n)`, ascending.

    Returns:
      The `DirectionErrors`.

    Examples:
      >>> point, grad = stiefel_problem("gaussian", 6, 4)
      >>> round(stiefel_errors(point, grad, grad).norm, 6)
      1.0
    """
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
