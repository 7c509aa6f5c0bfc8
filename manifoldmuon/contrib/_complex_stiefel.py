"""The complex Stiefel manifold and the unitary group, in real arrays."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Complex, Float, PRNGKeyArray

from manifoldmuon._internal.arguments import check_axes, check_fields
from manifoldmuon._internal.matrices.arrays import Numbers, expand_trailing, upcast
from manifoldmuon._internal.matrices.lapack import map_matrices
from manifoldmuon._internal.matrices.powers_of_two import scale_to_unit_exponent
from manifoldmuon.manifolds import Manifold, Stiefel
from manifoldmuon.manifolds.retractions import QR, Polar, Retraction
from manifoldmuon.manifolds.solvers import ClosedForm, ProjectedPolar, Steepest, StiefelSolver
from manifoldmuon.norms import Norm, Spectral

Pairs = Float[Array, "*batch 2 m n"]
Complexes = Complex[Array, "*batch m n"]


@dataclasses.dataclass(frozen=True)
class ComplexStiefel(Manifold):
    """Complex matrices with `W^* W = s^2 I` (`W W^*` if wide); the unitary group if square.

    A point is a real array `(2, m, n)`, the real part and the imaginary part, so that gradients,
    optimizers and `minimize` stay real; `to_complex` and `from_complex` convert. All computations
    use `Stiefel` on the real form `[[A, -B], [B, A]]` of `A + iB`, which preserves products,
    adjoints and polar factors. See docs/math/sets.md.

    Attributes:
      scale: the common singular value, a positive number.
      solver: solver for the steepest direction; see `manifolds.solvers`.
      retraction: `Polar`, `Cayley` or `Exponential`. Not `QR`, which depends on the
        order of the columns.

    Examples:
      >>> manifold = ComplexStiefel()
      >>> point = manifold.random_point(jax.random.key(0), (2, 4, 3), jnp.float32)
      >>> w = manifold.to_complex(point)
      >>> bool(jnp.allclose(w.conj().T @ w, jnp.eye(3), atol=1e-6))
      True
    """

    scale: float = 1.0
    solver: StiefelSolver = ClosedForm()
    retraction: Retraction = Polar()
    ndim: ClassVar[int] = 3

    def __post_init__(self):
        check_fields(self, scale="(0, inf)")
        if isinstance(self.retraction, QR):
            raise ValueError(
                "ComplexStiefel.retraction must not be QR(): the real form has another QR factor "
                "than the complex matrix; use Polar()"
            )
        _ = self._real  # checks solver and retraction

    @staticmethod
    def to_complex(point: Pairs) -> Complexes:
        """Return the complex matrices of a point."""
        wide = upcast(point)
        return jax.lax.complex(wide[..., 0, :, :], wide[..., 1, :, :])

    @staticmethod
    def from_complex(matrix: Complexes) -> Pairs:
        """Return the real array of complex matrices: a point, or a gradient `dA + i dB`."""
        return jnp.stack([matrix.real, matrix.imag], axis=-3)

    @property
    def norm(self) -> Norm:
        return _ComplexSpectral(self.scale)

    @property
    def _real(self) -> Stiefel:
        return Stiefel(self.scale, self.solver, self.retraction)

    def check_shape(self, shape: tuple[int, ...]) -> None:
        check_axes(self, shape)
        if shape[-3] != 2:
            raise ValueError(
                f"ComplexStiefel takes real and imaginary parts in the third axis from the end, of "
                f"length 2; got the shape {tuple(shape)}. Use ComplexStiefel.from_complex"
            )

    def for_training(self) -> "ComplexStiefel":
        return dataclasses.replace(self, solver=ProjectedPolar())

    def project(self, point: Pairs) -> Pairs:
        """Return the polar factor; without full rank, LAPACK's singular vectors decide."""
        if 0 in point.shape:
            return point
        scaled, _ = scale_to_unit_exponent(point, 3)
        nearest = _pair(self._real.project(_real_form(scaled)))
        # Without full rank some polar factors of the real form belong to no complex matrix.
        lost = self.distance(nearest) > 1000 * jnp.finfo(nearest.dtype).eps

        def decomposed(x: Array) -> Array:
            def factor(matrix: Array) -> Array:
                left, _, right = jnp.linalg.svd(matrix, full_matrices=False)
                return left @ right

            near = self.from_complex(map_matrices(factor, self.to_complex(x)))
            return jnp.where(
                expand_trailing(lost, 3), _pair(self._real.project(_real_form(near))), nearest
            )

        still = jax.lax.stop_gradient(scaled)
        whole = jax.lax.cond(jnp.any(lost), decomposed, lambda _: nearest, still)
        return whole.astype(point.dtype)

    def project_tangent(self, point: Pairs, vector: Pairs) -> Pairs:
        return _pair(self._real.project_tangent(_real_form(point), _real_form(vector)))

    def init_dual(self, shape: tuple[int, ...]) -> Any:
        *batch, _, m, n = shape
        return self._real.init_dual((*batch, 2 * m, 2 * n))

    def steepest(self, point: Pairs, grad: Pairs, dual: Any = ()) -> Steepest:
        # Averaging a direction into the form [[A, -B], [B, A]] keeps its gain and does not lengthen
        # it: the real and the complex problem have the same optimum and gap.
        result = self._real.steepest(_real_form(point), _real_form(grad), dual)
        return result._replace(direction=_pair(result.direction))

    def retract(self, point: Pairs, vector: Pairs) -> Pairs:
        return _pair(self._real.retract(_real_form(point), _real_form(vector)))

    def random_point(self, key: PRNGKeyArray, shape: tuple[int, ...], dtype) -> Pairs:
        """Return a uniformly distributed (Haar) point."""
        wide = jnp.promote_types(dtype, jnp.float32)
        return self.project(jax.random.normal(key, shape, wide)).astype(dtype)

    def distance(self, point: Pairs) -> Numbers:
        return self._real.distance(_real_form(point))


@dataclasses.dataclass(frozen=True)
class _ComplexSpectral(Norm):
    """The largest singular value of complex matrices as pairs, relative to the scale."""

    scale: float = 1.0
    ndim: ClassVar[int] = 3

    def norm(self, weight: Pairs) -> Numbers:
        return Spectral(scale=self.scale).norm(_real_form(weight))

    def dual_norm(self, grad: Pairs) -> Numbers:
        # The real form has every singular value twice.
        return Spectral(scale=self.scale).dual_norm(_real_form(grad)) / 2

    def dualize(self, grad: Pairs) -> Pairs:
        return _pair(Spectral(scale=self.scale).dualize(_real_form(grad)))


def _real_form(x: Pairs) -> Float[Array, "*batch p q"]:
    """Return `[[A, -B], [B, A]]`, which preserves products and adjoints of `A + iB`."""
    a, b = x[..., 0, :, :], x[..., 1, :, :]
    rows = jnp.concatenate([a, -b], axis=-1), jnp.concatenate([b, a], axis=-1)
    return jnp.concatenate(rows, axis=-2)


def _pair(x: Float[Array, "*batch p q"]) -> Pairs:
    """Return the pair with the real form nearest to `x`."""
    m, n = x.shape[-2] // 2, x.shape[-1] // 2
    a = (x[..., :m, :n] + x[..., m:, n:]) / 2
    b = (x[..., m:, :n] - x[..., :m, n:]) / 2
    return jnp.stack([a, b], axis=-3)
