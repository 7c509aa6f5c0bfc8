"""Gradients nearly normal to the set, checked in float64 by decompositions.

On a cone a direction may move inside, against the normal part of the gradient: a rounding error
then costs that error times the whole gradient.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import minimize_scalar

from benchmarks._sets import attained, clear_of_edges, normal_at, size_of
from manifoldmuon.contrib import Isospectral
from manifoldmuon.linalg import SVD
from manifoldmuon.manifolds import (
    EmbeddingRows,
    Euclidean,
    Grassmann,
    Hypersphere,
    SpectralBall,
    SpectralBand,
    SpectralSphere,
)
from manifoldmuon.norms import Frobenius, MaxAbs, MaxRowNorm, Spectral
from manifoldmuon.testing._assertions import wide
from tests.compiled import ask

SHARES = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)  # weights of the random part; the normal part has 1
CONES = {
    "ball, Frobenius": SpectralBall(step_norm=Frobenius()),
    "ball of scale 2, Frobenius": SpectralBall(2.0, step_norm=Frobenius(scale=0.5)),
    "band, Frobenius": SpectralBand(0.7, 1.4, step_norm=Frobenius()),
    "ball, spectral": SpectralBall(step_norm=Spectral(SVD())),
    "band, entries": SpectralBand(0.7, 1.4, step_norm=MaxAbs()),
    "ball, rows": SpectralBall(step_norm=MaxRowNorm(threshold=0.0)),
}


@functools.partial(jax.jit, static_argnums=0)
def solve(manifold, point, grad):
    return manifold.steepest(point, grad, manifold.init_dual(point.shape))


@pytest.mark.slow_except("ball, Frobenius-float32", "ball, spectral-float32")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", CONES)
def test_nearly_normal_gradients_on_cones(name, dtype):
    """The direction is feasible and never descends; the gap bounds its loss."""
    manifold = CONES[name]
    rng = np.random.default_rng(7)
    with jax.enable_x64(dtype == "float64"):
        drawn = clear_of_edges(manifold, 2 * rng.standard_normal((2, 6, 4)))
        points = ask(manifold.project, drawn.astype(dtype))
        for share in SHARES:
            grads = []
            for point, sign in zip(points, (1, -1), strict=True):
                part = normal_at(manifold, wide(point))(rng.standard_normal((6, 4)))
                free = rng.standard_normal((6, 4))
                grads.append(sign * part / np.linalg.norm(part) + share * free)
            grads = np.stack(grads).astype(dtype)
            answer = jax.device_get(solve(manifold, points, grads))
            for point, grad, direction, gap in zip(
                points, grads, answer.direction, answer.gap, strict=True
            ):
                point, grad, direction = (
                    np.asarray(x, np.float64) for x in (point, grad, direction)
                )
                normal = normal_at(manifold, point)
                eps = float(np.finfo(dtype).eps)
                value = np.sum(grad * direction)
                best = attained(manifold.norm, grad, normal)
                assert size_of(manifold.norm, direction) <= 1 + 8 * eps
                length = max(1, np.linalg.norm(direction))
                assert np.linalg.norm(normal(direction)) <= 32 * eps * length
                assert value >= 0
                assert value >= (1 - gap) * best - 1e-14
            if share >= (0.1 if dtype == "float32" else 1e-3):
                assert np.max(answer.gap) <= (2e-3 if "Frobenius" in name else 0.15)


LINEAR = {
    "vectors": Hypersphere(),
    "matrices": Hypersphere(ndim=2),
    "subspaces": Grassmann(step_norm=Frobenius()),
    "rows": EmbeddingRows(step_norm=Frobenius()),
}


@pytest.mark.slow_except("matrices-float32", "subspaces-float32", "vectors-bfloat16")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("name", LINEAR)
def test_nearly_normal_gradients_in_linear_spaces(name, dtype):
    """The gap covers the direction's loss from rounding the normal part."""
    manifold = LINEAR[name]
    rng = np.random.default_rng(8)

    def tangent(point, x):
        if name == "subspaces":
            return x - point @ np.linalg.solve(point.T @ point, point.T @ x)
        axes = -1 if name == "rows" else None
        inner, square = (np.sum(point * y, axes, keepdims=True) for y in (x, point))
        return x - point * inner / square

    shape = (6,) if name == "vectors" else (6, 4)
    with jax.enable_x64(dtype == "float64"):
        points = ask(manifold.project, jnp.asarray(rng.standard_normal((20, *shape)), dtype))
        for share in SHARES:
            free = rng.standard_normal((20, *shape))
            grads = []
            for point, x in zip(wide(points), free, strict=True):
                normal = point @ rng.standard_normal((4, 4)) if name == "subspaces" else point
                grads.append(normal / np.linalg.norm(normal) + share * x / np.linalg.norm(x))
            grads = jnp.asarray(np.stack(grads), dtype)
            answer = jax.device_get(solve(manifold, points, grads))
            rows = zip(*map(wide, (points, grads, answer.direction, answer.gap)), strict=True)
            for point, grad, direction, gap in rows:
                best = np.linalg.norm(tangent(point, grad))
                size = np.linalg.norm(direction)
                assert size <= 1 + 4 * float(jnp.finfo(dtype).eps)
                assert np.sum(grad * direction) >= (1 - gap) * best * size - 1e-14
            if share >= 0.1 and dtype != "bfloat16":
                assert np.max(answer.gap) <= 1e-5


SPECTRA = {
    "two nearly tie": (1.0, 1 - 1e-5, 0.5, 0.2),
    "near two that are equal": (1.0, 0.5 + 1e-4, 0.5, 0.5),
    "nearly zero": (1.0, 0.5, 1e-4, 0.0),
    "apart": (1.0, 0.9, 0.5, 0.497),
}


@pytest.mark.slow_except("two nearly tie-Frobenius", "apart-spectral")
@pytest.mark.parametrize("norm", [None, Frobenius()], ids=["spectral", "Frobenius"])
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_nearly_tied_singular_values(spectrum, norm):
    """Rounding decides their singular vectors; the direction omits them and the gap shows it."""
    manifold = Isospectral(SPECTRA[spectrum], norm)
    rng = np.random.default_rng(11)
    points = ask(manifold.project, np.float32(rng.standard_normal((8, 6, 4))))
    for share in (1.0, 1e-2):
        grads = rng.standard_normal((8, 6, 4))
        for k, point in enumerate(points):
            normal = normal_at(manifold, wide(point))(rng.standard_normal((6, 4)))
            grads[k] = share * grads[k] + (share < 1) * normal
        grads = grads.astype(np.float32)
        answer = jax.device_get(solve(manifold, points, grads))
        for point, grad, direction, gap in zip(
            points, grads, answer.direction, answer.gap, strict=True
        ):
            point, grad, direction = map(wide, (point, grad, direction))
            normal = normal_at(manifold, point)
            left = normal(direction)
            assert np.linalg.norm(left) <= (1e-4 if spectrum == "apart" else 2e-6)
            assert np.sum(grad * direction) > 0
            feasible = direction - left
            value = np.sum(grad * feasible) / max(size_of(manifold.norm, feasible), 1)
            assert value >= (1 - gap) * attained(manifold.norm, grad, normal)
        if share == 1:
            assert np.max(answer.gap) <= (0.01 if spectrum == "apart" and norm else 0.7)


@pytest.mark.slow_except("Frobenius()-bfloat16", "MaxAbs()-float16")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("norm", [Frobenius(), MaxAbs(), Spectral(SVD())], ids=repr)
def test_gap_of_short_dtypes_covers_rounding(norm, dtype):
    """Compare rounded directions in flat space with dual norms in float64."""
    rng = np.random.default_rng(13)
    grads = jnp.asarray(rng.standard_normal((40, 6, 4)), dtype)
    answer = jax.device_get(solve(Euclidean(norm), jnp.zeros_like(grads), grads))
    exact = wide(grads)
    best = {
        "Frobenius": np.linalg.norm(exact, axis=(-2, -1)),
        "MaxAbs": np.sum(np.abs(exact), (-2, -1)),
        "Spectral": np.linalg.norm(exact, "nuc", axis=(-2, -1)),
    }[type(norm).__name__]
    value = np.sum(exact * wide(answer.direction), (-2, -1))
    assert np.all(value >= (1 - wide(answer.gap)) * best - 1e-12)
    assert np.all(answer.gap <= float(jnp.finfo(dtype).eps))


DUALS = {
    "Spectral": lambda x: np.linalg.norm(x, "nuc"),
    "Frobenius": np.linalg.norm,
    "MaxAbs": lambda x: np.sum(np.abs(x)),
}


@pytest.mark.slow_except("Frobenius()")
@pytest.mark.parametrize("norm", [Spectral(SVD()), Frobenius(), MaxAbs()], ids=repr)
def test_spectral_sphere_near_ties_is_sound(norm):
    """Compare with the convex dual in one multiplier in float64, with directions made tangent."""
    manifold, rng = SpectralSphere(step_norm=norm), np.random.default_rng(17)
    dual = DUALS[type(norm).__name__]
    for apart in (1e-2, 1e-4, 1e-6, 0.0):
        draws = [np.linalg.qr(rng.standard_normal((8, k, 4)))[0] for k in (6, 4)]
        points = draws[0] * np.array([1, 1 - apart, 0.5, 0.2]) @ draws[1].mT
        grads = rng.standard_normal((8, 6, 4)).astype("f4")
        points = points.astype("f4")
        answer = jax.device_get(solve(manifold, points, grads))
        rows = zip(*map(wide, (points, grads, answer.direction, answer.gap)), strict=True)
        for point, grad, direction, gap in rows:
            u, _, vt = np.linalg.svd(point)
            line = np.outer(u[:, 0], vt[0])
            best = minimize_scalar(lambda t, g=grad, n=line: dual(g - t * n)).fun
            feasible = direction - line * np.sum(direction * line)
            value = np.sum(grad * feasible) / max(size_of(norm, feasible), 1)
            assert value >= (1 - gap - 1e-6) * best
        assert np.max(answer.gap) <= (1e-2 if apart == 1e-2 else 1)


@pytest.mark.slow_except("(6, 4)-float32")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (48, 40)], ids=str)
def test_normal_gradients_at_ties_give_zero_direction(shape, dtype):
    """At corners of the spectral sphere, combinations of tied singular pairs are normal."""
    rng = np.random.default_rng(23)
    tied, rank = min(shape) // 2, min(shape)
    u, v = (np.linalg.qr(rng.standard_normal((size, rank)))[0] for size in shape)
    values = np.where(np.arange(rank) < tied, 1, np.linspace(0.9, 0.1, rank))
    mixed = rng.standard_normal((tied, tied))
    grad = u[:, :tied] @ (mixed + mixed.T) @ v[:, :tied].T
    other = grad + 0.05 * rng.standard_normal(shape)
    manifold = SpectralSphere(2.0)
    points = np.stack([2 * (u * values) @ v.T] * 3)
    grads = np.stack([grad, -1e20 * grad, other])
    answer = jax.device_get(solve(manifold, *(jnp.asarray(x, dtype) for x in (points, grads))))
    assert not answer.direction[:2].any()
    assert np.array_equal(answer.gap[:2], [1, 1])
    assert answer.direction[2].any()
