"""Training variants of manifolds: the same sets with fewer matrix products."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from manifoldmuon import manifolds
from manifoldmuon._internal.matrices.spectral import start_vector
from manifoldmuon.linalg import BOUNDED_MSIGN, SVD
from manifoldmuon.manifolds import solvers
from manifoldmuon.manifolds.retractions import SoftCap
from manifoldmuon.norms import ConvRMSToRMS, FanRatio, Frobenius, MaxAbs, RMSToRMS, Spectral
from manifoldmuon.optim import manifold_muon
from tests.compiled import point_of
from tests.instances import MANIFOLDS
from tests.oracles.passes import multiplications

SHAPE = (16, 8)
CHEAPER = [
    (manifolds.Euclidean(RMSToRMS()), SHAPE),
    (manifolds.Euclidean(ConvRMSToRMS()), (2, 2, *SHAPE)),
    (manifolds.Hypersphere(2.0, ndim=2, step_norm=Spectral()), SHAPE),
    (manifolds.EmbeddingRows(step_norm=RMSToRMS()), SHAPE),
    (manifolds.SpectralSphere(FanRatio()), SHAPE),
    (manifolds.SpectralBall(), SHAPE),
    (manifolds.SpectralBand(0.5, 2.0), SHAPE),
    # The default solver inverts matrices instead.
    (manifolds.Stiefel(solver=solvers.SkewPolar()), SHAPE),
    (manifolds.Orthogonal(solver=solvers.SkewPolar()), (8, 8)),
    (manifolds.Grassmann(2.0), SHAPE),
]


def kind(value) -> str:
    return type(value).__name__ if isinstance(value, manifolds.Manifold) else ""


def products(manifold: manifolds.Manifold, shape: tuple[int, ...]) -> int:
    """Count matrix products in a direction, its gap and a retraction."""

    def step(point, grad):
        answer = manifold.steepest(point, grad)
        return manifold.retract(point, -0.1 * answer.direction), answer

    weight = jax.ShapeDtypeStruct(shape, jnp.float32)
    return multiplications(step, weight, weight)


@pytest.mark.parametrize(("manifold", "shape"), CHEAPER, ids=kind)
def test_training_variant_has_fewer_products(manifold, shape):
    fast = manifold.for_training()
    assert type(fast) is type(manifold)
    assert fast.for_training() == fast
    assert products(fast, shape) < products(manifold, shape)


@pytest.mark.parametrize("case", MANIFOLDS, ids=lambda case: case.name)
def test_explicit_choices_are_kept(case):
    fast = case.manifold.for_training()
    assert isinstance(fast.norm, Frobenius) == isinstance(case.manifold.norm, Frobenius)
    named = getattr(case.manifold.norm, "method", None)
    assert getattr(fast.norm, "method", None) in (named, BOUNDED_MSIGN if named is None else named)


def test_choices_for_each_set():
    soft = manifolds.SpectralBall(retraction=SoftCap()).for_training()
    assert (soft.solver, soft.retraction) == (None, SoftCap())
    one = solvers.LineMultiplier(steps=1)
    assert manifolds.SpectralSphere(solver=one).for_training().solver == one
    assert manifolds.SpectralSphere(lanczos=8).for_training().lanczos == 8
    fast = manifolds.Stiefel(2.0, solver=solvers.ProjectedPolar())
    assert manifolds.Stiefel(2.0).transposed().for_training() == fast.transposed()
    rows = manifolds.EmbeddingRows(step_norm=Spectral(SVD()))
    assert rows.for_training() == dataclasses.replace(rows, solver=solvers.DouglasRachford(steps=4))
    flat = manifolds.Stiefel(step_norm=Frobenius(2))
    for same in (manifolds.Hypersphere(), manifolds.EmbeddingRows(), flat):
        assert same.for_training() == same


def kaniel(values: np.ndarray, overlap: float, steps: int) -> float:
    """Bound the relative error of Lanczos' method for the largest of these eigenvalues.

    Kaniel 1966, Paige 1971: `tan(angle)^2 (l1 - ln) / l1 / T(1 + 2 (l1 - l2) / (l2 - ln))^2`, with
    the Chebyshev polynomial T of degree `steps - 1`.
    """
    first, second, *_, last = values
    grown = np.cosh((steps - 1) * np.arccosh(1 + 2 * (first - second) / (second - last)))
    return (1 / overlap**2 - 1) * (1 - last / first) / grown**2


@pytest.mark.slow
def test_spectral_sphere_walk_stays_on_set():
    """Nearly tied largest singular values limit the accuracy to Lanczos' error bound."""
    tx = manifold_muon(0.1, manifolds.SpectralSphere().for_training(), track_gap=False)
    start = point_of(manifolds.SpectralSphere(), (128, 128))

    def step(carry, key):
        weight, state = carry
        updates, state = tx.update(jax.random.normal(key, weight.shape), state, weight)
        weight = weight + updates
        return (weight, state), weight

    keys = jax.random.split(jax.random.key(1), 40)
    _, weights = jax.jit(lambda w: jax.lax.scan(step, (w, tx.init(w)), keys))(start)
    _, values, rows = np.linalg.svd(np.asarray(weights, np.float64))
    # The start vector depends only on the width.
    overlaps = rows[:, 0] @ np.asarray(start_vector(jnp.asarray(start)), np.float64)
    missed = [kaniel(v**2, c, 56) for v, c in zip(values, overlaps, strict=True)]
    assert np.min(values[:, 0] - values[:, 1]) < 1e-2
    assert np.min(missed) < 1e-7
    above = values[:, 0] - 1
    assert np.all(above > -1e-6)
    assert np.all(above < 1e-6 + np.array(missed)), (above, missed)


BY_ENTRIES = manifolds.EmbeddingRows(step_norm=MaxAbs(2))


@pytest.mark.slow
@pytest.mark.parametrize(("manifold", "shape"), [*CHEAPER, (BY_ENTRIES, SHAPE)], ids=kind)
def test_gaps_bound_the_loss(manifold, shape):
    fast = manifold.for_training()
    point = point_of(fast, shape, 1)
    grad = np.random.default_rng(1).standard_normal(shape).astype(np.float32)

    @functools.partial(jax.jit, static_argnums=0)
    def settle(manifold, point, grad, dual):
        # Warm starts: each step passes its multipliers to the next.
        loop = lambda _, answer: manifold.steepest(point, grad, answer.dual)  # noqa: E731
        answer = jax.lax.fori_loop(0, 12, loop, manifold.steepest(point, grad, dual))
        return answer, manifold.norm.norm(answer.direction), manifold.distance(point)

    (quick, size, _), (exact, _, distance) = (
        jax.device_get(settle(m, point, grad, m.init_dual(shape))) for m in (fast, manifold)
    )
    gained, optimum = (np.sum(grad * answer.direction) for answer in (quick, exact))
    assert np.max(size) <= 1 + 1e-5
    assert np.max(distance) < 1e-5
    # The fast direction's gap bounds its loss against the exact direction.
    assert gained / optimum >= 1 - np.max(quick.gap) - 1e-6
    assert gained / optimum > 0.85
