"""Reference normal spaces and optima of the manifolds, in float64 NumPy.

Computed from singular value decompositions; the only package code used is the scale of a weight.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from manifoldmuon import manifolds
from manifoldmuon.norms import Frobenius, MaxAbs, MaxRowNorm, RMSToRMS, ScaleRule, Spectral
from tests.oracles.stiefel_problems import stiefel_optimum

Normal = Callable[[np.ndarray], np.ndarray]
_STEPS = 150


def normal_at(manifold: manifolds.Manifold, point: np.ndarray) -> Normal:
    """Return the projection onto the normal space at the set's nearest point to `point`.

    For sets with a boundary, project ascent directions onto the normal cone: directions with a
    negative that leaves the set. Singular values within `active_tolerance` of an edge touch it.
    """
    if isinstance(manifold, manifolds.EmbeddingRows):
        rows = point / np.linalg.norm(point, axis=1, keepdims=True)
        return lambda x: rows * np.sum(rows * x, axis=1, keepdims=True)
    if isinstance(manifold, manifolds.Hypersphere):
        unit = point / np.linalg.norm(point)
        return lambda x: unit * np.sum(unit * x)
    tall = point.shape[0] >= point.shape[1]
    of_tall = _normal_at_tall(manifold, point / _scale(manifold, point), tall)
    return lambda x: of_tall(x) if tall else of_tall(x.T).T


def _normal_at_tall(manifold: manifolds.Manifold, unit: np.ndarray, tall: bool) -> Normal:
    w = unit if tall else unit.T
    u, s, vt = np.linalg.svd(w, full_matrices=False)
    if isinstance(manifold, manifolds.Stiefel):
        return lambda x: u @ _sym(u.T @ x @ vt.T) @ vt
    if isinstance(manifold, manifolds.Grassmann):
        return lambda x: u @ (u.T @ x)
    if isinstance(manifold, manifolds.SpectralSphere):
        return lambda x: np.outer(u[:, 0], vt[0]) * (u[:, 0] @ x @ vt[0])
    if not isinstance(manifold, manifolds.SpectralBall | manifolds.SpectralBand):
        raise TypeError(f"normal_at does not support {manifold}")
    low, high = _edges(manifold)
    edges = [(-1, s >= high - manifold.active_tolerance)]
    edges += [(1, s <= low + manifold.active_tolerance)] if low else []

    def of_edges(x: np.ndarray) -> np.ndarray:
        found = np.zeros_like(x)
        for sign, touching in edges:
            left, right = u[:, touching], vt[touching]
            values, vectors = np.linalg.eigh(sign * _sym(left.T @ x @ right.T))
            found += sign * left @ (vectors * np.maximum(values, 0) @ vectors.T) @ right
        return found

    return of_edges


def clear_of_edges(manifold: manifolds.Manifold, matrix: np.ndarray) -> np.ndarray:
    """Return `matrix` with singular values within 0.02 of an edge of the set moved onto the edge.

    Nearly touching values count as touching: their cone is the documented cone, which differs from
    the cone at the nearest point.
    """
    if not isinstance(manifold, manifolds.SpectralBall | manifolds.SpectralBand):
        return matrix
    u, s, vt = np.linalg.svd(matrix / _scale(manifold, matrix), full_matrices=False)
    for edge in _edges(manifold):
        s = np.where(np.abs(s - edge) < 0.02, edge, s)
    return _scale(manifold, matrix) * (u * s[..., None, :]) @ vt


def _edges(manifold: manifolds.SpectralBall | manifolds.SpectralBand) -> tuple[float, float]:
    return (
        (manifold.low, manifold.high)
        if isinstance(manifold, manifolds.SpectralBand)
        else (0.0, 1.0)
    )


def size_of(norm: Any, weight: np.ndarray) -> float:
    """Return the spectral, Frobenius, `MaxAbs` or `MaxRowNorm` norm, in float64."""
    return float(_BALLS[type(norm)][0](weight)) / unit_of(norm, weight)


def most(manifold: Any, point: np.ndarray, grad: np.ndarray, normal: Normal) -> float:
    """Return the maximum of `<G, A>` over tangent A of norm 1, or the best value attained."""
    norm, tall = manifold.norm, grad.shape[0] >= grad.shape[1]
    if isinstance(norm, Spectral) and isinstance(manifold, manifolds.Grassmann):
        return unit_of(norm, grad) * float(np.linalg.norm(grad - normal(grad), "nuc"))
    if isinstance(norm, Spectral) and isinstance(manifold, manifolds.Stiefel):
        w, g = (x if tall else x.T for x in (point, grad))
        u, _, vt = np.linalg.svd(w, full_matrices=False)
        return unit_of(norm, grad) * stiefel_optimum(u @ vt, g)
    return attained(norm, grad, normal)


def attained(norm: Any, grad: np.ndarray, normal: Normal) -> float:
    """Return the largest gain at norm 1 that Douglas-Rachford splitting attains.

    In the Frobenius norm this is the optimum.

    Args:
      norm: see `size_of`.
      grad: the gradient.
      normal: result of `normal_at`.
    """
    part, scale = grad - normal(grad), unit_of(norm, grad)
    measure, project = _BALLS[type(norm)]
    length = np.linalg.norm(part)
    if isinstance(norm, Frobenius) or length == 0:
        return scale * float(length)
    push = grad * (np.sqrt(min(grad.shape)) / 3 / length)
    found = length**2 / measure(part)  # gain of the tangent part itself
    z = -normal(push)
    for k in range(_STEPS):
        inside = project(z + push)
        across = 2 * inside - z
        tangent = across - normal(across)
        z = z + tangent - inside
        if k % 10 == 9:
            kept = tangent - normal(tangent)  # rounding leaves some of a huge normal part
            found = max(found, np.sum(grad * kept) / max(1, measure(kept)))
    return scale * float(found)


def _rows(x: np.ndarray) -> np.ndarray:
    return np.linalg.norm(x, axis=1, keepdims=True)


def _clipped(x: np.ndarray) -> np.ndarray:
    u, s, vt = np.linalg.svd(x, full_matrices=False)
    return u * np.minimum(s, 1) @ vt


# Norms, and projections onto their unit balls.
_BALLS: dict[type, tuple[Callable[[np.ndarray], Any], Normal]] = {
    Spectral: (lambda x: np.linalg.norm(x, 2), _clipped),
    RMSToRMS: (lambda x: np.linalg.norm(x, 2), _clipped),
    Frobenius: (np.linalg.norm, lambda x: x / max(1, np.linalg.norm(x))),
    MaxAbs: (lambda x: np.abs(x).max(), lambda x: np.clip(x, -1, 1)),
    MaxRowNorm: (lambda x: _rows(x).max(), lambda x: x / np.maximum(_rows(x), 1)),
}


def scale_of(scale: float | ScaleRule, shape: tuple[int, ...]) -> float:
    """Return a scale as a number."""
    return scale.of(shape) if isinstance(scale, ScaleRule) else scale


def unit_of(norm: Any, weight: np.ndarray) -> float:
    """Return the scale of a norm."""
    shape = weight.shape[-1:] if isinstance(norm, MaxRowNorm) else weight.shape
    return scale_of(getattr(norm, "scale", 1.0), shape)


def _scale(manifold: Any, point: np.ndarray) -> float:
    return scale_of(manifold.scale, point.shape)


def _sym(x: np.ndarray) -> np.ndarray:
    return (x + x.T) / 2
