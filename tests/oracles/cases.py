"""Random steps on manifolds, with every answer measured in float64 by matrix decompositions.

Answers are measured at the set's nearest point to the given point.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from manifoldmuon.manifolds import (
    EmbeddingRows,
    Grassmann,
    Hypersphere,
    Manifold,
    Orthogonal,
    SpectralBall,
    SpectralBand,
    SpectralSphere,
    Stiefel,
)
from manifoldmuon.manifolds.solvers import DualAscent, ProjectedPolar, Resolvents
from manifoldmuon.norms import FanRatio, Frobenius, MaxAbs, MaxRowNorm, Spectral
from tests.oracles.sets import clear_of_edges, most, normal_at, size_of, unit_of

MATRICES = {
    "Stiefel": Stiefel(),
    "Stiefel, ProjectedPolar()": Stiefel(solver=ProjectedPolar()),
    "Stiefel, Resolvents()": Stiefel(FanRatio(), solver=Resolvents()),
    "Stiefel, DualAscent()": Stiefel(solver=DualAscent()),
    "Stiefel, Frobenius steps": Stiefel(2.0, step_norm=Frobenius(scale=2.0)),
    "Orthogonal": Orthogonal(3.0),
    "Grassmann": Grassmann(FanRatio()),
    "Grassmann, steps of TwoTap": Grassmann(step_norm=Spectral(scale=0.5)),
    "SpectralSphere": SpectralSphere(8.0),
    "SpectralBall": SpectralBall(3.0),
    "SpectralBand": SpectralBand(0.5, 2.0),
    "Hypersphere, spectral steps": Hypersphere(3.0, ndim=2, step_norm=Spectral()),
    "EmbeddingRows, spectral steps": EmbeddingRows(step_norm=Spectral()),
    "SpectralBall, Frobenius steps": SpectralBall(2.0, step_norm=Frobenius()),
    "SpectralBand, Frobenius steps": SpectralBand(0.5, 2.0, step_norm=Frobenius()),
    "SpectralBall, steps by entries": SpectralBall(step_norm=MaxAbs()),
    "SpectralBand, steps by rows": SpectralBand(0.5, 2.0, step_norm=MaxRowNorm(threshold=0.0)),
    "Grassmann, for training": Grassmann().for_training(),
    "SpectralSphere, for training": SpectralSphere(8.0).for_training(),
    "Hypersphere, for training": Hypersphere(3.0, ndim=2, step_norm=Spectral()).for_training(),
    "EmbeddingRows, for training": EmbeddingRows(step_norm=Spectral()).for_training(),
}
ROWS = {"Hypersphere": Hypersphere(2.0), "EmbeddingRows": EmbeddingRows()}
# Batches of matrices: tall, wide, square, single row.
SHAPES = ((3, 7, 4), (2, 3, 9), (2, 5, 5), (2, 1, 6))
DTYPES = ("float32", "bfloat16", "float16", "float64")
# Limits for float32. 16-bit dtypes use their eps if it is larger; float64 multiplies limits by
# `OF_FLOAT64`. The residual is the length of the normal part.
LIMITS = {
    "gap under the true one": 1e-6,
    "norm above 1": 1e-5,
    "residual": 1e-5,
    "descent": 1e-7,
    "distance from the set": 4e-6,
}
# Larger limits of the residual.
RESIDUALS = {
    # Inverse roots magnify the normal part that rounding leaves in low-rank gradients.
    "Stiefel, ProjectedPolar()": 1e-3,
    "Stiefel, Resolvents()": 1e-4,
}
OF_FLOAT64 = 1e-2


SEEDS = st.integers(0, 2**31)


class Case(NamedTuple):
    """Stack of gradients on a manifold, most of them almost normal to it.

    A case is a few numbers, which Hypothesis can shrink; the seed draws the arrays.

    Attributes:
      manifold: name of the manifold.
      shape: shape of the stack, including its leading axes (at least 1).
      dtype: dtype of the arrays.
      scale: power of two that multiplies the gradient, clipped to float16's range for float16.
      share: power of two that multiplies the free part, next to a normal part of largest entry 1;
        0: no normal part.
      decay: decades over which the columns of the free part fall.
      kind: `"normal"`, `"inward"` (negated normal part), `"low rank"` (free part of rank 1),
        `"zero"`, `"NaN"` or `"infinite"`.
      seed: seed of every random array.
    """

    manifold: str
    shape: tuple[int, ...]
    dtype: str
    scale: int
    share: int
    decay: float
    kind: str
    seed: int

    def gradient(
        self, rng: np.random.Generator, normal: Callable[[np.ndarray], np.ndarray]
    ) -> np.ndarray:
        """Draw the gradient in float64; `normal` projects arrays of `shape` onto normal spaces."""
        *batch, m, n = self.shape
        if self.kind in ("zero", "NaN", "infinite"):
            grad = np.zeros(self.shape)
            grad[..., 0, 0] = {"zero": 0, "NaN": np.nan, "infinite": np.inf}[self.kind]
            return grad
        free = rng.standard_normal(self.shape) * np.logspace(0, -self.decay, n)
        if self.kind == "low rank":
            free = rng.standard_normal((*batch, m, 1)) @ rng.standard_normal((*batch, 1, n))
        part = normal(rng.standard_normal(self.shape))
        part = -part if self.kind == "inward" else part
        largest = np.abs(part).max() or 1.0  # the interior of a set has no normal directions
        grad = part / largest * (self.share < 0) + 2.0**self.share * free
        # float16 holds numbers from 2**-24 to 2**16.
        return grad * 2.0 ** (
            np.clip(self.scale, -4, 10) if self.dtype == "float16" else self.scale
        )


def cases(manifolds=(*MATRICES, *ROWS), shapes=SHAPES, dtypes=DTYPES) -> st.SearchStrategy[Case]:
    """Return a strategy for cases with shapes that fit their manifolds."""

    def fitting(case: Case) -> Case:
        *batch, m, n = case.shape
        if case.manifold == "Orthogonal":
            m = n
        elif case.manifold.startswith("Grassmann") and m == n:
            n = n - 2
        return case._replace(shape=(*batch, m, n))

    kinds = ("normal", "normal", "inward", "inward", "low rank", "zero", "NaN", "infinite")
    return st.builds(
        Case,
        manifold=st.sampled_from(manifolds),
        shape=st.sampled_from(shapes),
        dtype=st.sampled_from(dtypes),
        scale=st.integers(-140, 120),
        share=st.integers(-24, 0),
        decay=st.floats(0, 6),
        kind=st.sampled_from(kinds),
        seed=SEEDS,
    ).map(fitting)


@functools.partial(jax.jit, static_argnums=0)
def draw(manifold: Manifold, gaussian: Any) -> Any:
    """Project a Gaussian array onto the manifold, in the array's dtype."""
    return manifold.project(gaussian)


@functools.partial(jax.jit, static_argnums=0)
def ask(manifold: Manifold, point: Any, grad: Any) -> tuple[Any, ...]:
    """Return direction, gap, the point after a step, and its distance from the manifold."""
    answer = manifold.steepest(point, grad, manifold.init_dual(point.shape))
    moved = manifold.retract(point, -0.1 * answer.direction)
    wide = moved.astype(jnp.promote_types(moved.dtype, jnp.float32))
    return answer.direction, answer.gap, moved, manifold.distance(wide)


def check_case(case: Case) -> dict[str, float]:
    """Return the worst figures over a case's stack.

    Raises:
      AssertionError: a figure exceeds its limit, a zero gradient gives a step, or a NaN is lost.
    """
    manifold, dtype = (MATRICES | ROWS)[case.manifold], jnp.dtype(case.dtype)
    rng = np.random.default_rng(case.seed)
    with jax.enable_x64(dtype == np.float64):
        drawn = clear_of_edges(manifold, rng.standard_normal(case.shape))
        point = draw(manifold, drawn.astype(dtype))
        normal = functools.partial(_normal_part, case, manifold, np.asarray(point, np.float64))
        grad = case.gradient(rng, normal).astype(dtype)
        direction, gap, moved, distance = jax.tree.map(np.float64, ask(manifold, point, grad))
    found = dict.fromkeys(LIMITS, 0.0)
    exact = np.asarray(grad, np.float64)
    if not np.isfinite(exact).all():
        assert np.isnan(direction).any()
        return found
    if not exact.any():
        assert not direction.any()
        assert not gap.any()
        assert np.array_equal(moved, np.asarray(point, np.float64))
        return found
    measured = _measure_rows if case.manifold in ROWS else measure_direction
    for w, g, a, reported in zip(np.asarray(point, np.float64), exact, direction, gap, strict=True):
        figures = measured(manifold, w, g / np.abs(g).max(), a, reported) if g.any() else (0,) * 4
        for name, figure in zip(LIMITS, (*figures, np.max(distance)), strict=True):
            found[name] = float(np.maximum(found[name], figure))  # a NaN stays
    short = float(jnp.finfo(dtype).eps) if dtype.itemsize == 2 else 0.0
    factor = OF_FLOAT64 if dtype == np.float64 else 1.0
    check_limits(found, case.manifold, factor, short, case)
    return found


def _normal_part(case: Case, manifold: Manifold, point: np.ndarray, x: np.ndarray) -> np.ndarray:
    if case.manifold in ROWS:
        return point * np.sum(point * x, -1, keepdims=True)
    return np.stack([normal_at(manifold, w)(y) for w, y in zip(point, x, strict=True)])


def measure_direction(manifold, point, grad, direction, reported) -> tuple[float, ...]:
    """Return true minus reported gap, norm minus 1, normal part and descent of a direction."""
    normal = normal_at(manifold, point)
    norm, left = size_of(manifold.norm, direction), normal(direction)
    feasible = direction - left
    value = np.sum(grad * feasible) / max(size_of(manifold.norm, feasible), 1)
    best = most(manifold, point, grad, normal)
    residual = np.linalg.norm(left) / unit_of(manifold.norm, grad)
    return _figures(grad, direction, best, value, reported, norm, residual)


def _measure_rows(manifold, point, grad, direction, reported) -> tuple[float, ...]:
    """Return the figures of `measure_direction`, row by row."""
    length = np.linalg.norm(point, axis=-1, keepdims=True)
    w, a = point / length, direction / np.median(length)
    tangent, feasible = (x - w * np.sum(w * x, -1, keepdims=True) for x in (grad, a))
    best, norm = np.linalg.norm(tangent, axis=-1), np.linalg.norm(a, axis=-1)
    value = np.sum(grad * feasible, -1) / np.maximum(norm, 1)
    if isinstance(manifold, EmbeddingRows):
        best, value = best.sum(), value.sum()
    residual = np.abs(np.sum(w * a, -1)).max()
    return _figures(grad, direction, best, value, reported, norm.max(), residual)


def _figures(grad, direction, best, value, reported, norm, residual) -> tuple[float, ...]:
    # Without a tangent part there is no gap, as on a sphere of dimension 0.
    some = best > 1e-12 * np.abs(grad).max()
    under = np.where(some, 1 - value / np.where(some, best, 1) - reported, 0)
    descent = -np.sum(grad * direction) / np.linalg.norm(grad) / max(np.linalg.norm(direction), 1)
    return float(np.max(under)), float(norm) - 1, float(residual), float(descent)


def check_limits(
    found: dict[str, float], name: str, factor: float, least: float, what: Any
) -> None:
    """Raise if a figure exceeds its limit, times a factor and at least `least`."""
    for key, figure in found.items():
        limit = RESIDUALS.get(name, LIMITS[key]) if key == "residual" else LIMITS[key]
        limit = max(factor * limit, least)
        assert figure <= limit, f"{key}: {figure:.2g} > {limit:.2g} in {what}"
