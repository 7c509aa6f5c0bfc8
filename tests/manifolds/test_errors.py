"""Error messages name the argument, the value received, and a remedy."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from manifoldmuon.linalg import SVD
from manifoldmuon.manifolds import (
    EmbeddingRows,
    Euclidean,
    Hypersphere,
    Orthogonal,
    SpectralBall,
    SpectralBand,
    SpectralSphere,
    Stiefel,
)
from manifoldmuon.manifolds.solvers import BarzilaiBorwein, DouglasRachford, LineMultiplier
from manifoldmuon.norms import FanRatio, Frobenius, MaxAbs, Norm, RootDim, RootRank, Spectral


@pytest.mark.parametrize(
    ("manifold", "shape", "message"),
    [
        (Stiefel(), (5,), r"trailing 2 axes .* shape \(5,\) has 1; use a manifold for fewer axes"),
        (Orthogonal(), (4, 3), r"square matrices .* got the shape \(4, 3\). Use Stiefel\(\)"),
        (Hypersphere(), (), r"trailing 1 axes .* shape \(\) has 0"),
        (EmbeddingRows(), (7,), r"trailing 2 axes"),
        (Euclidean(Spectral()), (7,), r"Euclidean\(Frobenius\(ndim=1\)\)"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_unsupported_shapes_raise(manifold, shape, message):
    with pytest.raises(ValueError, match=message):
        manifold.check_shape(shape)
    with pytest.raises(ValueError, match=message):
        manifold.random_point(jax.random.key(0), shape, jnp.float32)


@pytest.mark.parametrize("manifold", [Stiefel(), EmbeddingRows(), Euclidean()])
@pytest.mark.parametrize(
    ("method", "argument"),
    [("steepest", "grad"), ("project_tangent", "vector"), ("retract", "vector")],
)
def test_unequal_shapes_raise(manifold, method, argument):
    name = f"{type(manifold).__name__}.{method}"
    message = rf"{name}: {argument} has the shape \(3, 4\), and point \(4, 3\). Give both"
    call = getattr(manifold, method)
    with pytest.raises(ValueError, match=message):
        call(jnp.eye(4, 3), jnp.ones((3, 4)))
    with pytest.raises(ValueError, match=message):
        call(**{argument: jnp.ones((3, 4)), "point": jnp.eye(4, 3)})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Stiefel(0.0), "Stiefel.scale must be a positive, finite number .* got 0.0"),
        (lambda: Stiefel(FanRatio(-1.0)), r"FanRatio.gain must be .* in \(0, inf\); got -1.0"),
        (lambda: Orthogonal(float("nan")), "Orthogonal.scale .* got nan"),
        (lambda: Hypersphere(-2.0), "Hypersphere.scale"),
        (lambda: EmbeddingRows(RootDim(float("inf"))), "RootDim.gain must be .* got inf"),
        (
            lambda: Hypersphere(ndim=0),
            "Hypersphere.ndim must be a whole number .* got 0",
        ),
        (
            lambda: Hypersphere(ndim=2, step_norm=Frobenius(1)),
            "Hypersphere.step_norm must be for 2 axes; got Frobenius",
        ),
        (lambda: EmbeddingRows(step_norm=Frobenius(1)), "EmbeddingRows.step_norm .* 2 axes"),
        (lambda: SpectralSphere(step_norm=Frobenius(1)), "SpectralSphere.step_norm .* 2 axes"),
        (lambda: SpectralSphere(-1.0), "SpectralSphere.scale"),
        (lambda: SpectralBall(active_tolerance=0.0), "SpectralBall.active_tolerance .* got 0.0"),
        (lambda: SpectralBand(2.0, 0.5), r"low \+ 4 \* active_tolerance < high; got 2.0, 0.5"),
        (lambda: SpectralBand(1.0, 1.0), "take Stiefel"),
        (lambda: SpectralBand(0.0, 1.0), "SpectralBand.low must be positive; .* SpectralBall"),
        (lambda: SpectralBand(float("nan"), 1.0), "SpectralBand.low must be a finite number"),
        (
            lambda: LineMultiplier(steps=0),
            r"LineMultiplier.steps must be a whole number in \[1, inf\); got 0",
        ),
        (
            lambda: BarzilaiBorwein(cold_start_steps=-1),
            "BarzilaiBorwein.cold_start_steps must be a whole number",
        ),
        (
            lambda: DouglasRachford(relaxation=2.0),
            "DouglasRachford.relaxation must be .* got 2.0",
        ),
        (lambda: RootRank(-1.0), "RootRank.each must be a positive, finite number"),
    ],
)
def test_invalid_options_raise(make, message):
    with pytest.raises(ValueError, match=message):
        make()


class DualityMapOnly(MaxAbs):
    """A norm that cannot project onto its ball."""

    project = Norm.project


@pytest.mark.parametrize(
    ("manifold", "other"),
    [(EmbeddingRows, BarzilaiBorwein()), (SpectralBall, None), (SpectralBand, None)],
)
def test_norm_without_required_projection_is_refused(manifold: Any, other: Any):
    norm = DualityMapOnly()
    with pytest.raises(ValueError, match=f"{manifold.__name__}.solver takes step_norm.project"):
        manifold(step_norm=norm)
    assert manifold(step_norm=norm, solver=other).norm == norm


@pytest.mark.parametrize("manifold", [Stiefel, Orthogonal])
def test_msign_method_ignored_by_solver_is_refused(manifold):
    with pytest.raises(ValueError, match=r"step_norm names a method .* choose a solver, such as"):
        manifold(step_norm=Spectral(SVD()))
