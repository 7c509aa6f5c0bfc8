"""The interface of a solver for the steepest direction on the Stiefel manifold, and its answer."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from manifoldmuon._internal.arrays import (
    frobenius_norm,
    gram_matrix,
    relative_gap,
    right_multiply,
    rounding,
    rounding_loss,
    skew,
    sym,
)
from manifoldmuon._internal.spectral import nuclear_parts
from manifoldmuon._internal.values import Value

_SMALL_PART = 0.1  # of a gradient: below it the tangent part is projected twice


class Steepest(NamedTuple):
    """A steepest direction and its certificate.

    Attributes:
      direction: `A`, tangent at the point, of norm at most 1 in the manifold's norm; it
        ascends, so a descent step subtracts it. Shape and dtype of the gradient.
      dual: what a later, nearby problem can start from: arrays with the leading axes first, in
        the dtypes of what was given, or `()` where the direction has a closed form.
      residual: how far the solver's raw direction was from tangent before the last tangent
        projection, `||W^T A + A^T W||_F / n` for a Stiefel point of unit scale. Leading axes.
      gap: the relative duality gap, an upper bound on `1 - <G, A> / optimum` that needs no
        reference solution and includes rounding (0 for a zero gradient, and 1 for a zero
        direction otherwise). Leading axes.
    """

    direction: Float[Array, "..."]
    dual: Any
    residual: Float[Array, "..."]
    gap: Float[Array, "..."]

    def astype(self, dtype) -> "Steepest":
        """Return the answer in the dtype of the gradient, with what that costs in its gap."""
        gap, loss = self.gap, rounding_loss(dtype)
        gap = gap + loss * (gap > 0) if loss else gap
        return self._replace(direction=self.direction.astype(dtype), gap=gap)


class StiefelSolver(Value, abc.ABC):
    """Maximises `<G, A>` over `||A||_2 <= 1` and `W^T A + A^T W = 0`.

    A frozen, hashable value without arrays: budgets and tolerances are fields, so that the
    iteration count is static under `jax.jit`. `W` is tall or square, `(..., m, n)` with
    `m >= n` and `W^T W = I`; leading axes are independent problems. The answer does not depend
    on the scale of `G`.

    Attributes:
      wide: whether `solve` takes wide matrices as well, and answers with wide ones; they are
        transposed for it otherwise, which costs memory traffic.
    """

    wide: ClassVar[bool] = False

    @abc.abstractmethod
    def init_dual(self, shape: tuple[int, ...]) -> Any:
        """The cold start for points of shape `(..., m, n)`: float32 arrays, for every dtype."""

    @abc.abstractmethod
    def solve(
        self, point: Float[Array, "*batch m n"], grad: Float[Array, "*batch m n"], dual: Any
    ) -> Steepest:
        """The direction with its certificate (see `Steepest`)."""


class MemorylessSolver(StiefelSolver):
    """A solver that hands nothing on to the next problem."""

    def init_dual(self, shape: tuple[int, ...]) -> tuple[()]:
        return ()


@dataclasses.dataclass(frozen=True)
class ByPlatform(MemorylessSolver):
    """One solver on CPUs, another one on accelerators.

    The choice is made when the program is compiled for its platform, so that a program may be
    compiled for one that is absent.

    Attributes:
      cpu: on CPUs, which multiply float32 numbers as they are.
      accelerator: elsewhere, where products of float32 numbers take several passes.

    Raises:
      TypeError: a field is not a `MemorylessSolver`.
    """

    cpu: MemorylessSolver
    accelerator: MemorylessSolver

    def __post_init__(self):
        for name, solver in (("cpu", self.cpu), ("accelerator", self.accelerator)):
            if not isinstance(solver, MemorylessSolver):
                raise TypeError(
                    f"ByPlatform.{name} must be a MemorylessSolver such as SkewPolar(); "
                    f"got {solver!r}"
                )

    @property
    def wide(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.cpu.wide and self.accelerator.wide

    def solve(
        self, point: Float[Array, "*batch m n"], grad: Float[Array, "*batch m n"], dual: Any
    ) -> Steepest:
        return jax.lax.platform_dependent(
            point, grad, dual, cpu=self.cpu.solve, default=self.accelerator.solve
        )


def nuclear_bound(
    x: Float[Array, "*batch m n"],
    polar: Float[Array, "*batch m n"],
    precision: jax.lax.Precision = jax.lax.Precision.HIGHEST,
) -> Float[Array, "*batch"]:
    """An upper bound on the nuclear norm of a tall `x`, from an approximation of its polar factor.

    Matrix products only; see `manifoldmuon.linalg.nuclear_parts` for the proof. It is tight
    where the polar factor has converged; singular values too small for that cost at most their
    own size times `sqrt(n)`.
    """
    gained, missed = nuclear_parts(x, polar, precision)
    return gained + missed


def tangent_residual(inner: Float[Array, "*batch n n"]) -> Float[Array, "*batch"]:
    """`||W^T A + A^T W||_F / n`, given `W^T A`."""
    return 2 * frobenius_norm(sym(inner)) / max(inner.shape[-1], 1)


def tangent_precision(precision: jax.lax.Precision) -> jax.lax.Precision:
    """Return the precision for the tangent part of a gradient where the rest takes `precision`.

    It is a difference, and a small one near a critical point: in one pass of bfloat16 a tangent
    part of a hundredth of the gradient would be noise.
    """
    low = precision == jax.lax.Precision.DEFAULT
    return jax.lax.Precision.HIGH if low else precision


def is_noise(
    length: Float[Array, "*batch"],
    grad: Float[Array, "*batch m n"],
    precision: jax.lax.Precision = jax.lax.Precision.HIGHEST,
) -> Bool[Array, "*batch"]:
    """Return whether a tangent part of this Frobenius norm is rounding of a normal gradient.

    At a critical point `G = W S` with symmetric `S`; a full step along noise would be absurd.
    """
    return length <= 8 * rounding(tangent_precision(precision), grad.dtype) * frobenius_norm(grad)


def certify(
    upper: Float[Array, "*batch"],
    value: Float[Array, "*batch"],
    grad: Float[Array, "*batch m n"],
    precision: jax.lax.Precision = jax.lax.Precision.HIGHEST,
) -> Float[Array, "*batch"]:
    """The relative duality gap, with what rounding may hide in the tangent part of `grad`.

    An entry of `W^T G` is off by less than a unit of rounding of the length of a column of `G`, so
    the nuclear norm of the error is at most `n` such units: little, unless the gradient is nearly
    normal to the set.

    Args:
      upper: an upper bound on the optimum, in exact arithmetic.
      value: what the direction attains, in exact arithmetic.
      grad: what both were computed from, of moderate size.
      precision: of float32 products on accelerators.
    """
    size = frobenius_norm(grad)
    unit = rounding(tangent_precision(precision), grad.dtype)
    noise = (min(grad.shape[-2:]) + 4) * unit * size
    total = jnp.where(size == 0, 0, jnp.where(value == 0, 1, upper + noise))
    return relative_gap(total, jnp.where(value == 0, 0, value - noise))


def raise_of(gram: Float[Array, "*batch n n"]) -> Float[Array, "*batch 1 1"]:
    """Bound the rounding error of the eigenvalues of `gram = x^T x`.

    An entry is off by less than a unit of rounding of the product of the lengths of two columns.
    """
    trace = jnp.trace(gram, axis1=-2, axis2=-1)[..., None, None]
    return jnp.finfo(gram.dtype).eps * trace


def tangent_parts(
    point: Float[Array, "*batch m n"],
    grad: Float[Array, "*batch m n"],
    precision: jax.lax.Precision = jax.lax.Precision.HIGHEST,
) -> tuple[Float[Array, "*batch k k"], Float[Array, "*batch m n"]]:
    """`(Omega, E)` with the tangent part `W Omega + E` of a gradient: Omega skew, `W^T E = 0`.

    Wide points stand for their transposes, and so does their E.

    What rounding leaves of W in E counts where E is a small part of the gradient. It is taken out
    there, by two products more.
    """
    precision = tangent_precision(precision)
    inner = gram_matrix(point, grad, precision)
    along, outer = skew(inner), grad - right_multiply(point, inner, precision)

    def again(outer):
        return outer - right_multiply(point, gram_matrix(point, outer, precision), precision)

    small = frobenius_norm(outer) < _SMALL_PART * frobenius_norm(grad)
    return along, jax.lax.cond(jnp.any(small), again, lambda outer: outer, outer)


def in_dtypes_of(example: Any, tree: Any) -> Any:
    """The arrays of `tree` in the dtypes of those of `example`: what a loop or a state carries."""
    return jax.tree.map(lambda old, new: new.astype(old.dtype), example, tree)
