"""Matrices with orthonormal columns or rows: the Stiefel manifold, and its square and quotient."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PRNGKeyArray

from manifoldmuon._internal import arguments
from manifoldmuon._internal.matrices import arrays
from manifoldmuon._internal.matrices.arrays import Matrices, Numbers, Tall
from manifoldmuon._internal.matrices.lapack import map_matrices, positive_qr
from manifoldmuon._internal.matrices.polar import polar_derivative, polish
from manifoldmuon._internal.matrices.powers_of_two import scale_to_unit_exponent
from manifoldmuon._internal.matrices.rounding import bounded_step, without_fma
from manifoldmuon._internal.matrices.spectral import random_signs
from manifoldmuon._internal.meshes.mesh import match_varying_axes
from manifoldmuon._internal.scales import ScaleRule, check_scale, scale_of
from manifoldmuon.linalg import SVD, msign
from manifoldmuon.manifolds._manifold import ScaledMatrices
from manifoldmuon.manifolds.retractions import Polar, Retraction
from manifoldmuon.manifolds.solvers import (
    ClosedForm,
    ProjectedPolar,
    Steepest,
    StiefelSolver,
    projected_direction,
)
from manifoldmuon.norms import Frobenius, Spectral

_SPECTRAL = Spectral()


class _Orthonormal(ScaledMatrices):
    """Matrices with all singular values equal to `scale`; subclasses choose the shapes.

    A subclass is a dataclass with these fields. Internally points are tall and of unit scale. If
    singular values are off by more than 0.5 % the gap is 1 (`Polar` and `QR` bring the next point
    back), by more than a quarter the direction is NaN.
    """

    retraction: Retraction
    step_norm: Spectral | Frobenius | None

    def __post_init__(self):
        check_scale(f"{type(self).__name__}.scale", self.scale)
        arguments.check_retraction(self, "orthonormal matrices")
        arguments.check_step_norm(self, Spectral, Frobenius)

    def project(self, point: Matrices) -> Matrices:
        """Return the orthogonal polar factor.

        A rank-deficient matrix has several: LAPACK's singular vectors choose, on TPUs small random
        numbers. For a zero matrix LAPACK's give the first columns (or rows) of the identity.
        """
        if 0 in point.shape:
            return point
        scaled, _ = scale_to_unit_exponent(point, 2)
        return _like(nearest_orthonormal(arrays.tall(scaled)), point, self._scale(point))

    def project_tangent(self, point: Matrices, vector: Matrices) -> Matrices:
        tangent = self._tangent_part(self._at(point), arrays.tall(vector))
        return arrays.match_orientation(tangent, vector)

    def retract(self, point: Matrices, vector: Matrices) -> Matrices:
        scale = self._scale(point)
        unit = self._unit(point)
        step = arrays.tall(bounded_step(vector, scale, self.retraction.longest, 2))
        if self.retraction.wide:
            unit = arrays.match_orientation(unit, point)
            step = arrays.match_orientation(step, vector)
        new_point = self.retraction.retract(unit, step)
        return _like(new_point, point, scale)

    def random_point(self, key: PRNGKeyArray, shape: tuple[int, ...], dtype) -> Matrices:
        """Return a uniform (Haar-distributed) point."""
        *batch, m, n = shape
        wide = jnp.promote_types(dtype, jnp.float32)
        gaussian = jax.random.normal(key, (*batch, max(m, n), min(m, n)), wide)
        example = jnp.zeros(shape, dtype)
        return _like(positive_qr(gaussian), example, self._scale(example))

    def distance(self, point: Matrices) -> Numbers:
        """Return the largest `|sigma_i / scale - 1|`, accurate to a few units of rounding.

        Uses the eigenvalues `l` of the small matrix `W^T W / s^2 - I`: from `l = sigma^2 - 1`
        follows `sigma - 1 = l / (1 + sqrt(1 + l))`. For monitoring: it calls an eigenvalue routine.
        """
        # Not `self._unit`: `Rotations` would compute another determinant, for the same values.
        unit = ScaledMatrices._unit(self, point)
        if 0 in unit.shape:
            return jnp.zeros(unit.shape[:-2], unit.dtype)
        gram = arrays.product(unit.mT, unit)
        values = map_matrices(jnp.linalg.eigvalsh, gram - arrays.identity_like(gram))
        return arrays.largest(jnp.abs(values / (1 + jnp.sqrt(jnp.maximum(1 + values, 0)))), -1)

    @abc.abstractmethod
    def _tangent_part(self, unit: Tall, vector: Tall) -> Tall:
        """Project orthogonally onto the tangent space at a tall point of unit scale."""

    def _at(self, point: Matrices) -> Tall:
        """Return the tall point of unit scale at which vectors are tangent.

        Low-precision points are slightly off the manifold, where a gradient normal to the set would
        have a tangent part of that size: re-orthonormalise them.
        """
        unit = self._unit(point)
        if not arrays.is_short(point.dtype):
            return unit
        return arrays.product(unit, polish(arrays.product(unit.mT, unit)))

    def _map_tangent_part(self, unit: Tall, grad: Matrices, dual: Any) -> Steepest:
        """Apply the duality map to the tangent part of the gradient."""
        direction, gap, residual = projected_direction(
            arrays.tall(grad), lambda vector: self._tangent_part(unit, vector), self.norm
        )
        return self._match_gradient(Steepest(direction, dual, residual, gap), unit, grad)

    def _match_gradient(self, result: Steepest, unit: Tall, grad: Matrices) -> Steepest:
        """Map a tall answer of unit scale to the gradient's orientation and scale."""
        off, absurd = _exceeds_distance(unit, 0.005, 0.25)
        direction = jnp.where(arrays.expand_trailing(absurd, 2), jnp.nan, result.direction)
        # The solvers' bounds assume a point on the set.
        result = result._replace(direction=direction, gap=jnp.where(off, 1, result.gap))
        size = scale_of(self.norm.scale, grad.shape[-2:])
        result = result._replace(direction=_like(result.direction, grad, size))
        if grad.shape[-2:] == (1, 1):  # nothing is tangent: zero is optimal
            result = result._replace(gap=0 * result.gap)
        return result


@dataclasses.dataclass(frozen=True)
class Stiefel(_Orthonormal):
    """Matrices with all singular values equal to `scale`: `W^T W = s^2 I`, or `W W^T` if wide.

    At unit scale the tangent space is `sym(W^T A) = 0`. A solver maximises `<G, A>` over tangent
    `A` of spectral norm at most 1, and bounds how far it falls short ("Modular Manifolds", Thinking
    Machines 2025; Modula documentation, Stiefel page). The default solver is a closed form,
    `msign(G W^T - W G^T) W` (Solonko, Molozhavenko, Rakhuba, arXiv:2608.06218). In the Frobenius
    norm the steepest direction is the normalised Riemannian gradient.

    Attributes:
      scale: the common singular value, a positive number or a rule such as `FanRatio()` (unit
        RMS-to-RMS norm).
      solver: finds the steepest direction in the spectral norm; see `manifolds.solvers`.
      retraction: how a step returns to the set.
      step_norm: the norm of steps, `Spectral` or `Frobenius`, used as given; None: the spectral
        norm relative to the scale.

    Examples:
      >>> point = Stiefel().random_point(jax.random.key(0), (8, 3), jnp.float32)
      >>> bool(jnp.allclose(point.T @ point, jnp.eye(3), atol=1e-6))
      True
    """

    scale: float | ScaleRule = 1.0
    solver: StiefelSolver = ClosedForm()
    retraction: Retraction = Polar()
    step_norm: Spectral | Frobenius | None = None

    def __post_init__(self):
        super().__post_init__()
        arguments.check_kind(self, "solver", StiefelSolver)
        if isinstance(self.norm, Spectral) and self.norm.method is not None:
            name = type(self).__name__
            raise ValueError(
                f"{name}.step_norm names a method of msign, but {name}.solver finds the direction: "
                "leave the method out and choose a solver, such as ProjectedPolar()"
            )

    def for_training(self) -> "Stiefel":
        if self.norm.is_euclidean:
            return self
        return dataclasses.replace(self, solver=ProjectedPolar())

    def init_dual(self, shape: tuple[int, ...]) -> Any:
        return () if self.norm.is_euclidean else self.solver.init(shape)

    def _tangent_part(self, unit: Tall, vector: Tall) -> Tall:
        return _without(arrays.product(unit, arrays.sym(arrays.product(unit.mT, vector))), vector)

    def steepest(self, point: Matrices, grad: Matrices, dual: Any = ()) -> Steepest:
        unit = self._at(point)
        if self.norm.is_euclidean:
            return self._map_tangent_part(unit, grad, dual)
        dual, unit = self._dual(dual, grad.shape), arrays.match_orientation(unit, point)
        # By default accelerators round float32 factors to fewer bits.
        with jax.default_matmul_precision("highest"):
            result = self.solver.solve(_SPECTRAL, unit, grad, dual)
        return self._match_gradient(result, arrays.tall(unit), grad)


@dataclasses.dataclass(frozen=True)
class Orthogonal(Stiefel):
    """Square matrices `W^T W = s^2 I`: `Stiefel`, with an error for any other shape.

    Tangent vectors at unit scale are `W X` with `X` skew. In the spectral norm the steepest
    direction is `W msign(W^T G - G^T W)` (Modula documentation, orthogonal page), which equals the
    closed form of `Stiefel`.

    The fields are inherited from `Stiefel`. Odd polynomials keep skew symmetry exactly; the errors
    of other methods of msign are removed, and reported as residual.
    """

    def check_shape(self, shape: tuple[int, ...]) -> None:
        arguments.check_axes(self, shape)
        if shape[-2] != shape[-1]:
            raise ValueError(
                f"Orthogonal takes square matrices in the trailing two axes; got the shape "
                f"{tuple(shape)}. Use Stiefel() for rectangular matrices"
            )


@dataclasses.dataclass(frozen=True)
class Grassmann(_Orthonormal):
    """Subspaces, each as a matrix of orthonormal columns (or rows, if wide) that span it.

    `W` and `W Q` with orthogonal `Q` are the same subspace. Steps are horizontal, `W^T A = 0` at
    unit scale: they do not turn the columns within the subspace. In the spectral norm the steepest
    direction is `msign((I - W W^T) G)`, a closed form, since a polar factor keeps the column space
    of its matrix. In the Frobenius norm it is the normalised horizontal part. If the loss depends
    on more of `W` than the subspace, use `Stiefel`, whose steps can turn the columns.

    Attributes:
      scale: the common singular value, a positive number or a rule such as `FanRatio()`.
      retraction: how a step returns to the set; see `manifolds.retractions`. To second order, all
        move the subspace identically.
      step_norm: the norm of steps, `Spectral` (with its method of msign) or `Frobenius`, used as
        given; None: the spectral norm relative to the scale, converged.
    """

    scale: float | ScaleRule = 1.0
    retraction: Retraction = Polar()
    step_norm: Spectral | Frobenius | None = None

    def check_shape(self, shape: tuple[int, ...]) -> None:
        arguments.check_axes(self, shape)
        if shape[-2] == shape[-1]:
            raise ValueError(
                f"Grassmann takes rectangular matrices; got the square shape {tuple(shape)}, which "
                "has a single subspace, the whole space. Use Orthogonal() for square matrices"
            )

    def _tangent_part(self, unit: Tall, vector: Tall) -> Tall:
        return _without(arrays.product(unit, arrays.product(unit.mT, vector)), vector)

    def steepest(self, point: Matrices, grad: Matrices, dual: Any = ()) -> Steepest:
        return self._map_tangent_part(self._at(point), grad, dual)


def _without(normal: Tall, vector: Tall) -> Tall:
    """Subtract the normal part from a vector.

    For a single column its products are entry by entry, and must not be fused with the difference.
    A single number has no tangent part: reducing the precision of its normal part would leave a
    remainder.
    """
    column = 1 == normal.shape[-1] < normal.shape[-2]
    return vector - (without_fma(normal) if column else normal)


def _like(result: Tall, example: Matrices, scale: float) -> Matrices:
    """Return a tall result of unit scale at `scale`, in the orientation and dtype of `example`."""
    return (scale * arrays.match_orientation(result, example)).astype(example.dtype)


@jax.custom_jvp
def nearest_orthonormal(x: Matrices) -> Matrices:
    """Return the orthonormal matrix nearest to a tall `x`.

    Uses singular vectors if `x` is too close to rank-deficient for a single `msign`, and in
    float64, for which the default schedule is not made.
    """
    factor = msign(x, SVD() if x.dtype == jnp.float64 else None)
    gram = arrays.product(factor.mT, factor)
    error = jnp.max(jnp.abs(gram - arrays.identity_like(gram)), axis=(-2, -1), keepdims=True)
    lost = error > 1000 * jnp.finfo(x.dtype).eps

    def decomposed(x):
        # The compiler for TPUs takes minutes for the singular vectors of a 512 x 512 matrix.
        polar = jax.lax.platform_dependent(x, tpu=polar_by_products, default=_polar_by_svd)
        return arrays.product(polar, polish(arrays.product(polar.mT, polar)))

    whole = jax.lax.cond(jnp.any(lost), decomposed, lambda _: factor, x)
    return jnp.where(lost, whole, factor)


@nearest_orthonormal.defjvp
def _nearest_orthonormal_jvp(primals, tangents):
    (x,), (tangent,) = primals, tangents
    factor = nearest_orthonormal(x)
    return factor, polar_derivative(x, factor, tangent)


def _polar_by_svd(x: Matrices) -> Matrices:
    left, _, right = map_matrices(lambda x: jnp.linalg.svd(x, full_matrices=False), x)
    return arrays.product(left, right)


def polar_by_products(x: Matrices) -> Matrices:
    """Return an orthonormal matrix nearest to a tall `x` up to rounding, whatever its rank.

    Every `msign` multiplies small singular values by a thousand or more. Random numbers of the size
    of rounding fill the null space; smaller numbers may be rounded away.
    """

    def amplify(i, x):
        # New numbers in every iteration; constants would be computed by the compiler, in minutes.
        noise = jax.random.normal(jax.random.fold_in(jax.random.key(0), i), x.shape[-2:], x.dtype)
        return msign(x + 4 * jnp.finfo(x.dtype).eps * jnp.broadcast_to(noise, x.shape))

    return jax.lax.fori_loop(0, 4, amplify, x)


def _exceeds_distance(x: Tall, *distances: float) -> list[Bool[Array, "*batch"]]:
    """Return whether a matrix is farther than about each distance from orthonormal.

    Computes `E^4 V` for two columns V of fixed random signs, with `E = W^T W - I`, in eight thin
    products: an estimate from below. For a distance of 0.005, rounding to bfloat16 is below the
    limit, and a single singular value that is off by d is detected for d above 0.01 or so. A NaN is
    farther.

    Distances are limits on the largest `|sigma - 1|`; `x` is tall.
    """

    def deviate(_, rows):
        # Without a transpose of `x`, which XLA on CPUs would materialise.
        return rows - arrays.product(arrays.product(x, rows.mT).mT, x)

    signs = random_signs(x.shape[-1], 2, x.dtype).mT
    rows = jnp.broadcast_to(signs, (*x.shape[:-2], *signs.shape))
    rows = jax.lax.fori_loop(0, 4, deviate, match_varying_axes(rows, x))
    # XLA on CPUs compiles the trace of a product faster than a sum of squares.
    size = arrays.trace(arrays.product(rows, rows.mT)) / max(signs.size, 1)
    # Not `>`: overflowing squares give infinity minus infinity, a NaN, which must count as far.
    return [~(size <= (2 * distance) ** 8) for distance in distances]
