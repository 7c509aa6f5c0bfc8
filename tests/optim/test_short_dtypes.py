"""Gradients near the normal in short dtypes and float32, against decompositions in float64.

A gradient that is normal up to the rounding of the parameter's dtype moves nothing, and reported
gaps bound what is emitted.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from manifoldmuon import contrib, manifolds, optim
from manifoldmuon.contrib import ComplexStiefel
from manifoldmuon.manifolds.solvers import DualAscent, ProjectedPolar, Resolvents
from manifoldmuon.norms import MaxRowNorm, Spectral
from manifoldmuon.testing._assertions import wide
from tests.compiled import ask
from tests.instances import MANIFOLDS
from tests.oracles.sets import attained, most, normal_at, unit_of

SETS: dict[str, tuple[manifolds.Manifold, tuple[int, ...]]] = {
    case.name: (case.manifold, case.shape[len(case.shape) - case.manifold.ndim :])
    for case in MANIFOLDS
    if case.manifold.constrained
} | {
    "stiefel, projected polar": (manifolds.Stiefel(solver=ProjectedPolar()), (10, 4)),
    "stiefel, projected polar, square": (manifolds.Stiefel(solver=ProjectedPolar()), (5, 5)),
    "stiefel, resolvents": (manifolds.Stiefel(solver=Resolvents()), (10, 4)),
    "stiefel, dual ascent": (manifolds.Stiefel(solver=DualAscent()), (10, 4)),
    "stiefel, larger": (manifolds.Stiefel(), (64, 16)),
    "grassmann, larger": (manifolds.Grassmann(), (64, 16)),
    "grassmann, for training": (manifolds.Grassmann().for_training(), (10, 4)),
    "spectral sphere, for training": (manifolds.SpectralSphere(2.0).for_training(), (6, 4)),
    "sphere, for training": (
        manifolds.Hypersphere(ndim=2, step_norm=Spectral()).for_training(),
        (6, 4),
    ),
    "rows, for training": (manifolds.EmbeddingRows(step_norm=Spectral()).for_training(), (6, 4)),
    "complex": (ComplexStiefel(), (2, 5, 3)),
}
# The others take the tangent part or the direction from the first three.
ALL_LINKS = (
    "sphere of a matrix",
    "embedding rows",
    "stiefel, projected polar",
    "grassmann tall",
    "spectral band by Frobenius steps",
)
# The float64 references are no wider than float64.
DTYPES = ("bfloat16", "float16", "float32")
# Tangent shares of the gradients, in units of the dtype's rounding.
SHARES = (0.0, 0.0, 0.0, 0.2, 4.0, 30.0, 1e3)


class Reference(NamedTuple):
    """The normal space at a point and the optimum, in float64."""

    manifold: manifolds.Manifold
    point: np.ndarray

    def normal(self, x: np.ndarray) -> np.ndarray:
        if not isinstance(self.manifold, ComplexStiefel):
            return normal_at(self.manifold, self.point)(x)
        w, g = self.point[0] + 1j * self.point[1], x[0] + 1j * x[1]
        u, _, vh = np.linalg.svd(w, full_matrices=False)
        inner = (u @ vh).conj().T @ g
        found = u @ vh @ (inner + inner.conj().T) / 2
        return np.stack([found.real, found.imag])

    def best(self, grad: np.ndarray) -> float:
        """Return the optimum, or a value that a feasible direction attains."""
        norm, part = self.manifold.norm, grad - self.normal(grad)
        if isinstance(norm, MaxRowNorm):
            return unit_of(norm, grad) * float(np.sum(np.linalg.norm(part, axis=-1)))
        if isinstance(self.manifold, ComplexStiefel):  # a feasible direction in the spectral norm
            return float(np.sum(part**2) / np.linalg.norm(part[0] + 1j * part[1], 2))
        if isinstance(self.manifold, manifolds.Stiefel | manifolds.Grassmann):
            return most(self.manifold, self.point, grad, self.normal)
        return attained(norm, grad, self.normal)


def links(name: str) -> dict[str, Any]:
    """Return the transformations that take directions or tangent parts on this set."""
    manifold, _ = SETS[name]
    copies = manifold.stacked()
    few = {
        "steepest": optim.scale_by_steepest(copies),
        "manifold_muon": optim.manifold_muon(0.1, copies, None),
        "project_tangent": optim.project_tangent(copies),
    }
    if name not in ALL_LINKS:
        return few
    found = few | {
        # Optax's 1e-8 is 0 in float16, and 0 / 0 is NaN.
        "adam": optim.riemannian_adam(0.01, copies, eps=1e-4),
        "sgd": optim.riemannian_sgd(0.1, copies, 0.9),
        "normalize": optim.normalize(optax.identity(), copies),
    }
    if isinstance(manifold.norm, Spectral):
        neurons = contrib.scale_by_neuron_rms(copies)
        found["neurons"] = optim.chain(optim.scale_by_steepest(copies), neurons)
    if isinstance(manifold, manifolds.Hypersphere):
        found["hyperball"] = optim.hyperball(optax.identity(), 0.1, copies, radial=0)
    return found


def points_of(manifold: manifolds.Manifold, shape, dtype) -> np.ndarray:
    """Draw points, for sets with a boundary on it, and round them to the dtype."""
    drawn = np.random.default_rng(3).standard_normal((2 * len(SHARES), *shape))
    # Small ones on spectral spheres: at ties, which large ones reach, rounding chooses the normal.
    drawn *= 3 if manifold.has_boundary else 0.3
    return np.asarray(ask(manifold.project, jnp.asarray(drawn, jnp.float32)).astype(dtype))


def grads_near_normal(references, unit: float) -> np.ndarray:
    """Return gradients with tangent shares `SHARES`, normal parts in and out."""
    rng, grads = np.random.default_rng(5), []
    for k, at in enumerate(references):
        sign, share = (-1) ** k, unit * SHARES[k // 2]
        normal = at.normal(sign * rng.standard_normal(at.point.shape)) * sign
        free = rng.standard_normal(at.point.shape)
        free -= at.normal(free)
        normal, free = (x / (np.linalg.norm(x) or 1) for x in (normal, free))
        grads.append(3 * (normal + share * free))
    return np.stack(grads)


@functools.cache
def updates_of(name: str, dtype: str):
    """Return points, gradients, references, and all updates and states, in float64."""
    manifold, shape = SETS[name]
    unit = float(jnp.finfo(dtype).eps) / 2
    points = points_of(manifold, shape, dtype)
    references = [Reference(manifold, point) for point in wide(points)]
    # Averages in float32 of gradients that were rounded to the dtype.
    grads = np.asarray(grads_near_normal(references, unit), dtype).astype(np.float32)

    def step(points, grads):
        found: dict[str, Any] = {}
        for link, tx in links(name).items():
            found[link] = tx.update(grads, tx.init(points), points)
        found["direct"] = manifold.steepest(points, grads)
        return found

    return manifold, wide(grads), references, ask(step, points, grads)


def gaps_of(found: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the gaps recorded by `scale_by_steepest` and by `descend`."""
    return found["steepest"][1].gap[""], found["manifold_muon"][1][-1].steepest.gap[""]


CASES = [pytest.param(name, dtype, id=f"{name}-{dtype}") for name in SETS for dtype in DTYPES]
FEW = pytest.mark.slow_except("embedding rows-bfloat16")


@FEW
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_gradients_normal_up_to_rounding_move_nothing(name, dtype):
    manifold, grads, references, found = updates_of(name, dtype)
    unit = float(jnp.finfo(dtype).eps) / 2
    # In wide dtypes 16 of these roundings count as noise, and this reference has some itself.
    few = (0.95 if unit > 1e-6 else 4) * unit
    factor = tuple(range(-manifold.factor_ndim, 0))  # a row of a table moves alone
    for k, (at, grad) in enumerate(zip(references, grads, strict=True)):
        part, whole = (np.sqrt(np.sum(x**2, factor)) for x in (grad - at.normal(grad), grad))
        noise = part <= few * whole
        # Inside a ball nothing is normal.
        assert noise.all() or SHARES[k // 2] > 0 or np.all(part > 0.9 * whole)
        for link, (update, *_) in found.items():
            assert not wide(update)[k][noise].any(), link
        if noise.all():
            assert [gap[k] for gap in gaps_of(found)] == [float(grad.any() and grad.size > 1)] * 2


@FEW
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_reported_gaps_bound_emitted_directions(name, dtype):
    """The gap of `scale_by_steepest` includes rounding to its dtype, that of `descend` does not."""
    _, grads, references, found = updates_of(name, dtype)
    outer, inner = gaps_of(found)
    np.testing.assert_allclose(inner, found["direct"].gap, atol=1e-6)
    directions = wide(found["steepest"][0]), wide(found["direct"].direction)
    rows = zip(references, grads, *directions, outer, inner, strict=True)
    for at, grad, emitted, taken, gap, gap_taken in rows:
        best = at.best(grad)
        for direction, reported in ((emitted, gap), (taken, gap_taken)):
            feasible = direction - at.normal(direction)
            for gained in (np.sum(grad * direction), np.sum(grad * feasible)):
                assert gained >= (1 - reported - 1e-6) * best


@FEW
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_tangent_parts_are_accurate_to_rounding(name, dtype):
    _, grads, references, found = updates_of(name, dtype)
    unit = float(jnp.finfo(dtype).eps) / 2
    for at, grad, update in zip(references, grads, wide(found["project_tangent"][0]), strict=True):
        moved = update != 0  # rows that are normal do not move
        part = (grad - at.normal(grad))[moved]
        assert np.linalg.norm(update[moved] - part) <= 2 * unit * np.linalg.norm(part) + 1e-5
