"""The interface of solvers for steepest directions: `Normal` in, `Steepest` out."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from manifoldmuon._internal.matrices import arrays
from manifoldmuon._internal.matrices.arrays import Floats, Matrices, Numbers
from manifoldmuon._internal.matrices.powers_of_two import scale_to_unit_exponent
from manifoldmuon._internal.values import Value
from manifoldmuon.norms import Norm


class Steepest(NamedTuple):
    """A steepest direction and its duality gap.

    Attributes:
      direction: `A`, tangent at the point, of norm at most 1 in the manifold's norm; it ascends, so
        a descent step subtracts it. Shape and dtype of the gradient.
      dual: the warm start for a later, nearby problem: arrays with the leading axes first, in the
        dtypes of the given dual, or `()` for a closed form.
      residual: the distance of the solver's raw direction from tangent, before the last tangent
        projection: `||W^T A + A^T W||_F / n` for a Stiefel point of unit scale. Leading axes.
      gap: the relative duality gap, an upper bound on `1 - <G, A> / optimum` that needs no
        reference solution and includes rounding (0 for a zero gradient, and 1 for a zero direction
        otherwise). Leading axes.

    Examples:
      >>> grad = jnp.array([[0.0, 1.0], [0.0, 0.0]])
      >>> found = mm.manifolds.Orthogonal().steepest(jnp.eye(2), grad)
      >>> jnp.round(found.direction).tolist(), bool(found.gap < 0.01)
      ([[0.0, 1.0], [-1.0, 0.0]], True)
    """

    direction: Floats
    dual: Any
    residual: Floats
    gap: Floats

    def rounded(self, dtype: Any, grad: Floats, ndim: int) -> "Steepest":
        """Return the direction in this dtype, with the gain that its rounding may cost in its gap.

        In float32 and wider the gap stays as it is. `ndim` is `Manifold.factor_ndim`.
        """
        direction = self.direction.astype(dtype)
        if not arrays.is_short(dtype):
            return self._replace(direction=direction)
        rounding = self.direction - direction.astype(self.direction.dtype)
        scaled, _ = scale_to_unit_exponent(grad, direction.ndim - self.gap.ndim)
        # |<g, e>| <= ||g|| ||e||, also for the tangent part of g: a step takes no other gain.
        lost = arrays.frobenius_norm(scaled, ndim) * arrays.frobenius_norm(rounding, ndim)
        return self._replace(direction=direction, gap=self.gap_without(lost, scaled))

    def gap_without(self, lost: Floats, grad: Floats) -> Numbers:
        """Return the gap of a direction that gains less; `lost` has the leading axes first."""
        axes = tuple(range(self.gap.ndim, lost.ndim))
        gained = arrays.inner_product(grad, self.direction, grad.ndim - self.gap.ndim)
        share = jnp.sum(lost, axis=axes) / arrays.nonzero_or_one(gained)
        return 1 - (1 - self.gap) * (1 - jnp.clip(share, 0, 1))


class Normal(NamedTuple):
    """The normal space of a set at each point, in orthonormal coordinates; or a normal cone.

    Attributes:
      coordinates: maps a vector to the coordinates of its orthogonal projection,
        `(..., *point) -> (..., *axes)`. Their axes are the leading axes and the first few of a
        point (none for a line, the rows of a table, or all), so that `Solver.init` can make arrays
        of that shape.
      embed: maps coordinates to the normal vector, of the same length.
      cone: whether this is the cone of directions whose negative leaves the set; `coordinates` then
        gives its nearest element.

    Examples:
      >>> sums = Normal(lambda x: jnp.broadcast_to(x.mean(axis=-2, keepdims=True), x.shape))
      >>> answer = DouglasRachford().solve(mm.norms.Spectral(), sums, jnp.eye(4, 2), ())
      >>> bool(jnp.abs(answer.direction.sum(axis=-2)).max() < 1e-5)  # no column changes its sum
      True
    """

    coordinates: Callable[[Any], Any]
    embed: Callable[[Any], Any] = lambda vector: vector
    cone: bool = False

    @classmethod
    def line(cls, unit: Floats, ndim: int) -> "Normal":
        """Return the line along `unit`, of Frobenius norm 1 (or 0) over `ndim` axes."""
        return cls(
            lambda vector: arrays.inner_product(unit, vector, ndim),
            lambda length: arrays.expand_trailing(length, ndim) * unit,
        )

    def project(self, vector: Floats) -> Floats:
        """Return the nearest normal vector."""
        return self.embed(self.coordinates(vector))


class Solver(Value, abc.ABC):
    """Maximise `<G, A>` over tangent A with `||A|| <= 1`.

    A frozen, hashable value without arrays: budgets and tolerances are fields, so that the
    iteration count is static under `jax.jit`. Leading axes are independent problems. The answer
    does not depend on the scale of G. Each manifold documents the solvers that it takes.

    Laws: A is tangent and `||A|| <= 1`; the gap is a true upper bound; G = 0 gives A = 0 and gap 0;
    a NaN stays in its own problem; the returned dual has the structure of the given dual.
    `testing.check_manifold` checks them, from cold and warm starts, on a manifold with the solver:
    `check_manifold(Stiefel(solver=Mine()), (4, 12, 8), key)`.

    | solver | sets | norms |
    |---|---|---|
    | `ClosedForm`, `SkewPolar`, `Resolvents`, `ProjectedPolar`, `DualAscent` | Stiefel | spectral |
    | `LineMultiplier` | normal space a line | any |
    | `BarzilaiBorwein` | normal space linear | any with a smooth duality map |
    | `DouglasRachford` | any, also with a boundary | any with an exact projection |
    """

    def init(self, shape: tuple[int, ...], axes: int = 2) -> Any:
        """Return the dual variables of a cold start: float32 arrays, for every dtype.

        Args:
          shape: the shape of the normal coordinates of all points; for a `StiefelSolver`, of the
            points.
          axes: the number of trailing axes of a problem.
        """
        return ()

    @abc.abstractmethod
    def solve(self, norm: Norm, at: Any, grad: Floats, dual: Any) -> Steepest:
        """Return the direction with its gap.

        Args:
          norm: the norm of steps.
          at: the `Normal` of the set at each point; for a `StiefelSolver` the points themselves.
          grad: G, at any scale, float32 or wider.
          dual: from `init` or from a nearby problem.
        """


class StiefelSolver(Solver):
    """A solver for the Stiefel manifold at unit scale: `||A||_2 <= 1` and `W^T A + A^T W = 0`.

    Takes the points: tall or wide, with orthonormal columns or rows. Points and gradients are
    float32 or wider. The norm is always `Spectral()`.
    """


class SolverByPlatform(StiefelSolver):
    """A solver for CPUs and another for all other platforms: both are traced, one is compiled."""

    @abc.abstractmethod
    def choices(self, shape: tuple[int, ...]) -> tuple[StiefelSolver, StiefelSolver]:
        """Return the solvers of points of this shape: on CPUs, and on all other platforms."""

    def solve(self, norm: Norm, at: Matrices, grad: Matrices, dual: Any) -> Steepest:
        cpu, other = self.choices(at.shape)
        if cpu == other:
            return cpu.solve(norm, at, grad, dual)
        here, there = (functools.partial(solver.solve, norm) for solver in (cpu, other))
        return jax.lax.platform_dependent(at, grad, dual, cpu=here, default=there)


def in_dtypes_of(example: Any, tree: Any) -> Any:
    """Cast the arrays of `tree` to the dtypes of `example`, as loops require."""
    return jax.tree.map(lambda old, new: new.astype(old.dtype), example, tree)


class Multiplier(NamedTuple):
    """Dual variables of a normal space: coordinates of the multiplier, and the last step length."""

    shift: Floats
    step: Numbers


class WarmSolver(Solver):
    """Base of solvers with a `Multiplier` as warm start."""

    def init(self, shape: tuple[int, ...], axes: int = 2) -> Multiplier:
        batch = shape[: len(shape) - axes]
        return Multiplier(jnp.zeros(shape, jnp.float32), jnp.zeros(batch, jnp.float32))
