"""A cost on a tree of manifolds as a function of a flat vector; methods and their results."""

from __future__ import annotations

import abc
import enum
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from manifoldmuon._internal.matrices.powers_of_two import scale_to_unit_exponent, times_power_of_two
from manifoldmuon._internal.values import Value
from manifoldmuon.manifolds import Manifold
from manifoldmuon.optim import map_leaves


class Reason(enum.IntEnum):
    """Reason why `minimize` stopped; a plain integer inside of `jax.jit` and `jax.vmap`.

    Attributes:
      GRADIENT: the Riemannian gradient's norm is at most the tolerance.
      STEP: a step was at most `step_tolerance` long.
      MAX_STEPS: `max_steps` steps were taken.
      NO_PROGRESS: no step reduces the cost, usually because rounding hides any decrease.
      NOT_FINITE: cost or gradient is not finite at the start; for `TrustRegion`, at any point.
      OFF_SET: the start or the last point is off its manifold. For the last point, take a
        retraction that corrects rounding, such as `Polar` or `QR`.

    Examples:
      >>> Reason(0).name
      'GRADIENT'
    """

    GRADIENT = 0
    STEP = 1
    MAX_STEPS = 2
    NO_PROGRESS = 3
    NOT_FINITE = 4
    OFF_SET = 5


RUNNING = -1


class Result(NamedTuple):
    """Outcome of `minimize`.

    Attributes:
      point: the last point, a tree like the start.
      value: cost of the point.
      gradient_norm: Frobenius norm of the Riemannian gradient at the point, over the whole tree.
      steps: number of steps taken.
      evaluations: number of evaluations of cost and gradient; for `TrustRegion` including products
        with the Hessian.
      reason: `Reason` of the stop, as an integer.

    Examples:
      >>> Result._fields
      ('point', 'value', 'gradient_norm', 'steps', 'evaluations', 'reason')
    """

    point: Any
    value: Float[Array, ""]
    gradient_norm: Float[Array, ""]
    steps: Int[Array, ""]
    evaluations: Int[Array, ""]
    reason: Int[Array, ""]


class Units(NamedTuple):
    """Units of a method's arithmetic, in which no square overflows and no cost is too small.

    Attributes:
      scale: a power of two; cost and gradient are multiplied by it.
      tolerance: largest norm of the gradient, in these units.
    """

    scale: Array
    tolerance: Array

    @classmethod
    def at_start(cls, gradient: Array, value: Array, stop: Stop) -> Units:
        """Return the units in which the first gradient has a norm from 1/2 to 1."""
        _, exponent = jnp.frexp(length(gradient))
        scale = jnp.ldexp(jnp.ones_like(value), -jnp.clip(exponent, -100, 100))
        if stop.tolerance is not None:
            return cls(scale, stop.tolerance * scale)
        eps = float(jnp.finfo(value.dtype).eps)
        share = 1e-4 if value.dtype == jnp.float32 else 1e-10
        # Rounding of the cost hides gradients below this.
        hidden = 100 * eps * jnp.abs(value * scale)
        return cls(scale, jnp.maximum(share * length(gradient * scale), hidden))


class Stop(NamedTuple):
    """Stopping criteria and callback; a tolerance of None is relative to the first gradient."""

    tolerance: float | None
    step_tolerance: float
    max_steps: int
    callback: Callable[[Any, Any, Any], None] | None

    def reason(self, gradient_norm: Array, units: Units, length: Array, steps: Array) -> Array:
        """Return the reason to stop after a step, or `RUNNING`."""
        small_step = (length <= self.step_tolerance) & (steps > 0)
        reasons = [
            (gradient_norm <= units.tolerance, Reason.GRADIENT),
            (small_step, Reason.STEP),
            (steps >= self.max_steps, Reason.MAX_STEPS),
        ]
        found = jnp.select([holds for holds, _ in reasons], [r for _, r in reasons], RUNNING)
        return found.astype(jnp.int32)

    def report(self, steps: Array, value: Array, gradient_norm: Array) -> None:
        if self.callback is not None:
            jax.debug.callback(self.callback, steps, value, gradient_norm)


class Problem(NamedTuple):
    """A cost and its manifolds; points and tangent vectors are flat vectors.

    Attributes:
      cost: cost of a flat point.
      unravel: function from a flat vector to the tree.
      geometry: a manifold for each leaf.
    """

    cost: Callable[[Array], Array]
    unravel: Callable[[Array], Any]
    geometry: Any

    def project(self, point: Array, vector: Array) -> Array:
        """Return the tangent part of a vector, or of each row of a matrix."""
        if vector.ndim > 1:
            return jax.vmap(lambda row: self.project(point, row))(vector)
        return self._map(_project_tangent, point, vector)

    def retract(self, point: Array, vector: Array) -> Array:
        return self._map(_retract, point, vector)

    def gradient(self, point: Array) -> tuple[Array, Array]:
        """Return the Riemannian gradient and the cost."""
        value, gradient = jax.value_and_grad(self.cost)(point)
        return self.project(point, gradient), value

    def _map(self, function: Callable[..., Array], point: Array, vector: Array) -> Array:
        trees = self.unravel(vector), self.unravel(point)
        return ravel(map_leaves(function, self.geometry, *trees, name="minimize")[0])


class Method(Value, abc.ABC):
    """A method of minimisation: a frozen value without arrays."""

    @abc.abstractmethod
    def run(self, problem: Problem, start: Array, stop: Stop, reason: Array) -> Result:
        """Return the result, with a flat vector as its point.

        Args:
          problem: the cost and its manifolds.
          start: the first point.
          stop: stopping criteria.
          reason: `RUNNING`, or a reason to stop before the first step.
        """


def ravel(tree: Any) -> Array:
    leaves = [jnp.ravel(leaf) for leaf in jax.tree.leaves(tree)]
    return leaves[0] if len(leaves) == 1 else jnp.concatenate(leaves)


def length(vector: Array) -> Array:
    """Return the Euclidean norm, at any scale."""
    scaled, exponent = scale_to_unit_exponent(vector, 1)
    return times_power_of_two(jnp.sqrt(jnp.vdot(scaled, scaled)), exponent)


def rounding(largest: Array) -> Array:
    """Return a bound on a cost's rounding, from the largest magnitude of the cost so far."""
    return 1000 * jnp.finfo(largest.dtype).eps * largest


def _project_tangent(manifold: Manifold, point: Array, vector: Array) -> Array:
    return manifold.project_tangent(point, vector)


def _retract(manifold: Manifold, point: Array, vector: Array) -> Array:
    return manifold.retract(point, vector)
