"""A cost on a tree of manifolds as a function of a flat vector; methods and their results."""

from __future__ import annotations

import abc
import enum
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from manifoldmuon._internal.matrices.powers_of_two import scale_to_unit_exponent, times_power_of_two
from manifoldmuon._internal.values import Value
from manifoldmuon.optim import map_leaves


class Reason(enum.IntEnum):
    """Reason why `minimize` stopped; a plain integer inside of `jax.jit` and `jax.vmap`.

    Attributes:
      GRADIENT: the Riemannian gradient's norm is at most the tolerance; for a tolerance of None,
        also where it is small and rounding hides further progress.
      MAX_STEPS: `max_steps` steps were taken.
      NO_PROGRESS: no step reduces the cost, usually because rounding hides any decrease.
      NOT_FINITE: cost or gradient is not finite at the start; for `TrustRegion`, at any point.
      OFF_SET: the start or the last point is off its manifold. For the last point, take a
        retraction that corrects rounding, such as `Polar` or `QR`.
    """

    GRADIENT = 0
    MAX_STEPS = 1
    NO_PROGRESS = 2
    NOT_FINITE = 3
    OFF_SET = 4


RUNNING = -1


class Result(NamedTuple):
    """Outcome of `minimize`; printed as one line that says how it ended.

    Attributes:
      point: the last point, a tree like the start.
      value: cost of the point.
      gradient_norm: Frobenius norm of the Riemannian gradient at the point, over the whole tree.
      steps: number of steps taken.
      evaluations: number of evaluations of cost and gradient; for `TrustRegion` including products
        with the Hessian.
      reason: `Reason` of the stop, as an integer.

    Examples:
      >>> minimize(jnp.sum, mm.manifolds.Hypersphere(), -jnp.eye(3)[0], max_steps=0)
      Result(MAX_STEPS after 0 steps: value -1, gradient norm 1.41)
    """

    point: Any
    value: Float[Array, ""]
    gradient_norm: Float[Array, ""]
    steps: Int[Array, ""]
    evaluations: Int[Array, ""]
    reason: Int[Array, ""]

    def __repr__(self) -> str:
        numbers = self[1:]
        if any(isinstance(x, Tracer) for x in numbers):
            return f"Result(traced, with values of shape {jnp.shape(self.value)})"
        if not all(isinstance(x, jax.Array | np.ndarray | np.generic) for x in numbers):
            return tuple.__repr__(self)  # such as a tree of shapes or shardings
        value, norm, steps, _, reason = map(np.asarray, numbers)
        names = [Reason(code).name for code in np.unique(reason)]
        if reason.ndim:
            counts = [f"{(reason == Reason[name]).sum()} {name}" for name in names]
            return (
                f"Result({', '.join(counts)} after {_range(steps, 'd')} steps: "
                f"value {_range(value, '.6g')}, gradient norm {_range(norm, '.3g')})"
            )
        return (
            f"Result({names[0]} after {steps} steps: value {value:.6g}, gradient norm {norm:.3g})"
        )


def _range(numbers: np.ndarray, form: str) -> str:
    if not numbers.size:
        return "no"
    return f"{numbers.min():{form}} to {numbers.max():{form}}"


class Stop(NamedTuple):
    """Stopping criteria and callback; a tolerance of None is relative to the first gradient."""

    tolerance: float | None
    max_steps: int
    callback: Callable[[Any, Any, Any], None] | None


class Progress(NamedTuple):
    """State of a run, in units in which no square overflows and no cost is too small.

    Attributes:
      scale: a power of two; cost and gradient are multiplied by it. 0 before the first gradient.
      tolerance: norm of the gradient that ends the run.
      enough: norm of the gradient below which the run ends as soon as rounding hides progress.
      value: cost of the point.
      norm: norm of the gradient.
      least_value: cost when it last fell by more than rounding.
      least_norm: norm of the gradient when it last halved.
      idle: number of steps since either happened.
      largest: largest magnitude of the cost so far; if terms cancel, rounding is relative to it.
      steps: number of steps taken.
      evaluations: number of evaluations.
      reason: `RUNNING`, or the reason to stop.
    """

    scale: Array
    tolerance: Array
    enough: Array
    value: Array
    norm: Array
    least_value: Array
    least_norm: Array
    idle: Array
    largest: Array
    steps: Array
    evaluations: Array
    reason: Array

    @classmethod
    def at_start(cls, dtype: Any) -> Progress:
        """Return the progress before the first evaluation."""
        zero, count = jnp.zeros((), dtype), jnp.zeros((), jnp.int32)
        inf, running = zero + jnp.inf, jnp.int32(RUNNING)
        return cls(zero, zero, zero, zero, zero, inf, inf, count, zero, count, count, running)

    def in_units_of(self, gradient: Array, value: Array, stop: Stop) -> Progress:
        """Choose units and tolerances at the first gradient, which gets a norm from 1/2 to 1."""
        _, exponent = jnp.frexp(length(gradient))
        scale = jnp.ldexp(jnp.ones_like(value), -jnp.clip(exponent, -100, 100))
        if stop.tolerance is not None:
            tolerance = enough = stop.tolerance * scale
        else:
            first, eps = length(gradient * scale), float(jnp.finfo(value.dtype).eps)
            share = 1e-4 if value.dtype == jnp.float32 else 1e-10
            tolerance = max(1e-10, eps) * first
            # A start near the minimum has a gradient that is rounding of the cost.
            enough = jnp.maximum(share * first, 100 * eps * jnp.abs(value * scale))
        chosen = self.scale > 0
        old = self.scale, self.tolerance, self.enough
        scale, tolerance, enough = (
            jnp.where(chosen, x, y) for x, y in zip(old, (scale, tolerance, enough), strict=True)
        )
        return self._replace(scale=scale, tolerance=tolerance, enough=enough)

    def at(self, value: Array, norm: Array, patience: int, stop: Stop) -> Progress:
        """Return the progress at a new point, with the reason to stop there.

        Cost and norm of the gradient are in units. Rounding alone explains up to `patience` steps
        without progress.
        """
        eps = float(jnp.finfo(value.dtype).eps)
        lower = value < self.least_value - eps * jnp.abs(value)
        halved = norm <= self.least_norm / 2
        idle = jnp.where(lower | halved, 0, self.idle + 1)
        reasons = [
            (norm <= self.tolerance, Reason.GRADIENT),
            ((idle >= patience) & (norm <= self.enough), Reason.GRADIENT),
            (idle >= 10 * patience, Reason.NO_PROGRESS),
            (self.steps >= stop.max_steps, Reason.MAX_STEPS),
        ]
        reason = jnp.select([holds for holds, _ in reasons], [r for _, r in reasons], RUNNING)
        return self._replace(
            value=value,
            norm=norm,
            least_value=jnp.where(lower, value, self.least_value),
            least_norm=jnp.where(halved, norm, self.least_norm),
            idle=idle,
            largest=jnp.maximum(self.largest, jnp.abs(value)),
            reason=reason.astype(jnp.int32),
        )

    def resumed(self, stop: Stop) -> Progress:
        """Return the progress with which a further method continues, if there is reason to."""
        few = (self.reason == Reason.MAX_STEPS) & (self.steps < stop.max_steps)
        slow = few | (self.reason == Reason.NO_PROGRESS)
        reason = jnp.where(slow, jnp.int32(RUNNING), self.reason)
        return self._replace(idle=jnp.zeros_like(self.idle), reason=reason)

    def lost(self) -> Array:
        """Return the reason to stop where no step reduces the cost."""
        return jnp.where(
            self.norm <= self.enough, jnp.int32(Reason.GRADIENT), jnp.int32(Reason.NO_PROGRESS)
        )

    def report(self, stop: Stop, new: Array) -> None:
        """Call the callback if the point is new."""
        if (callback := stop.callback) is not None:
            numbers = self.steps, self.value / self.scale, self.norm / self.scale
            jax.lax.cond(new, lambda: jax.debug.callback(callback, *numbers), lambda: None)


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
        return self._map(lambda manifold, *arrays: manifold.project_tangent(*arrays), point, vector)

    def retract(self, point: Array, vector: Array) -> Array:
        return self._map(lambda manifold, *arrays: manifold.retract(*arrays), point, vector)

    def gradient(self, point: Array) -> tuple[Array, Array]:
        """Return the Riemannian gradient and the cost."""
        value, gradient = jax.value_and_grad(self.cost)(point)
        return self.project(point, gradient), value

    def _map(self, function: Callable[..., Array], point: Array, vector: Array) -> Array:
        trees = self.unravel(vector), self.unravel(point)
        return ravel(map_leaves(function, self.geometry, *trees, name="minimize")[0])


class Method(Value, abc.ABC):
    """A method of minimisation: a frozen value without arrays."""

    def stages(self, stop: Stop) -> list[tuple[Method, Stop]]:
        """Return the methods to run one after the other, while the cost is not at its minimum."""
        return [(self, stop)]

    @abc.abstractmethod
    def run(
        self, problem: Problem, start: Array, stop: Stop, progress: Progress
    ) -> tuple[Array, Progress]:
        """Return the last point, a flat vector, and the progress there."""


def ravel(tree: Any) -> Array:
    leaves = [jnp.ravel(leaf) for leaf in jax.tree.leaves(tree)]
    return leaves[0] if len(leaves) == 1 else jnp.concatenate(leaves)


def length(vector: Array) -> Array:
    """Return the Euclidean norm, at any scale."""
    scaled, exponent = scale_to_unit_exponent(vector, 1)
    return times_power_of_two(jnp.sqrt(jnp.vdot(scaled, scaled)), exponent)


def cost_noise(largest: Array) -> Array:
    """Return a bound on a cost's rounding, from the largest magnitude of the cost so far."""
    return 1000 * jnp.finfo(largest.dtype).eps * largest
