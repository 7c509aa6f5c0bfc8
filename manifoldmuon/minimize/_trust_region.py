"""Newton's method in a trust region."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from manifoldmuon._internal.arguments import check_fields
from manifoldmuon.minimize._problem import (
    RUNNING,
    Method,
    Problem,
    Progress,
    Reason,
    Stop,
    cost_noise,
    length,
)


class _TrustRegionState(NamedTuple):
    """A point and its trust region.

    Attributes:
      failures: number of steps rejected at this point, -1 before the start is evaluated.
    """

    point: Array
    progress: Progress
    radius: Array
    failures: Array


class _Inner(NamedTuple):
    """A step, its product with the Hessian, and the state of conjugate gradients.

    Attributes:
      largest: largest magnitude of a curvature so far.
    """

    step: Array
    product: Array
    residual: Array
    direction: Array
    largest: Array
    count: Array
    done: Array


@dataclasses.dataclass(frozen=True)
class TrustRegion(Method):
    """Newton's method in a trust region: few steps, quadratic convergence at the end.

    The Riemannian trust region of Absil, Baker and Gallivan (2007). The Hessian is exact, the
    projected derivative of the Riemannian gradient, and never formed: each product with it costs
    about as much as two gradients. Steps solve the model by truncated conjugate gradients
    (Steihaug 1983), which leave a saddle point along a direction of negative curvature. The model
    assumes a retraction of second order; first-order retractions converge as fast at the end.

    Attributes:
      radius: the first region has a radius of `radius / 8` times the root of the number of entries;
        the largest radius is eight times as large.
      inner_steps: most products with the Hessian in a step; None: the number of entries.
    """

    patience: ClassVar[int] = 2
    """Number of steps without progress that rounding alone explains."""

    radius: float = 1.0
    inner_steps: int | None = None

    def __post_init__(self):
        check_fields(self, radius="(0, inf)", inner_steps="[1, inf)")

    def model(
        self, problem: Problem, point: Array
    ) -> tuple[Array, Callable[[Array], Array], Array]:
        """Return the Riemannian gradient, the product with the Hessian, and the cost."""
        gradient, change, value = jax.linearize(problem.gradient, point, has_aux=True)
        return gradient, lambda vector: problem.project(point, change(vector)), value

    def run(
        self, problem: Problem, start: Array, stop: Stop, progress: Progress
    ) -> tuple[Array, Progress]:
        largest = self.radius * jnp.sqrt(jnp.asarray(start.size, start.dtype))
        first = jnp.full((), -1, jnp.int32)
        state = _TrustRegionState(start, progress, largest / 8, first)

        def turn(state: _TrustRegionState) -> _TrustRegionState:
            gradient, hessian, value = self.model(problem, state.point)
            # Project again: a normal part left by rounding may be large compared with a small
            # gradient, and conjugate gradients would not reduce it.
            gradient = problem.project(state.point, gradient)
            progress = state.progress.in_units_of(gradient, value, stop)
            gradient, value = gradient * progress.scale, value * progress.scale
            norm = length(gradient)
            new = progress.at(value, norm, self.patience, stop)
            new.report(stop, (state.failures == 0) | ((state.failures < 0) & (new.steps == 0)))
            # A rejected step changes nothing.
            progress = jax.tree.map(lambda x, y: jnp.where(state.failures > 0, x, y), progress, new)
            broken = ~(jnp.isfinite(value) & jnp.isfinite(norm))
            reason = jnp.where(broken, jnp.int32(Reason.NOT_FINITE), progress.reason)

            inner = self._truncated(
                lambda vector: hessian(vector) * progress.scale,
                gradient,
                state.radius,
                reason != RUNNING,
            )
            step = inner.step
            point = problem.retract(state.point, step)
            gain = -jnp.vdot(gradient, step) - jnp.vdot(step, inner.product) / 2
            # If both are rounding, trust the model (Conn, Gould and Toint 2000, 17.4.2), unless
            # steps have raised the cost by as much together: then the gradient is wrong.
            after = problem.cost(point) * progress.scale
            noise = cost_noise(progress.largest)
            fallen = jnp.minimum(value, progress.least_value) - after
            ratio = (fallen + noise) / (gain + noise)
            good = jnp.isfinite(after) & (ratio > 0.1) & (reason == RUNNING)
            at_edge = length(step) > 0.99 * state.radius
            radius = jnp.where((ratio > 0.75) & at_edge, 2 * state.radius, state.radius)
            radius = jnp.where(ratio >= 0.25, radius, length(step) / 4)
            failures = jnp.where(good, 0, jnp.maximum(state.failures, 0) + 1)
            lost = (reason == RUNNING) & (failures > 30)
            return _TrustRegionState(
                jnp.where(good, point, state.point),
                progress._replace(
                    # A step that the region cut short says nothing about convergence.
                    idle=jnp.where(at_edge, 0, progress.idle),
                    steps=progress.steps + good,
                    evaluations=progress.evaluations + 1 + inner.count,
                    reason=jnp.where(lost, progress.lost(), reason),
                ),
                jnp.minimum(radius, largest),
                failures,
            )

        state = jax.lax.while_loop(lambda state: state.progress.reason == RUNNING, turn, state)
        return state.point, state.progress

    def _truncated(self, hessian, gradient: Array, radius: Array, done: Array) -> _Inner:
        """Run Steihaug's conjugate gradients to the edge, or until the residual is small."""
        most = gradient.size if self.inner_steps is None else self.inner_steps
        start = length(gradient)
        eps = float(jnp.finfo(gradient.dtype).eps)
        # For quadratic convergence, but not below the rounding of the products.
        enough = start * jnp.clip(start, eps**0.5, 0.1)

        def turn(state: _Inner) -> _Inner:
            product = hessian(state.direction)
            bend = jnp.vdot(state.direction, product)
            curvature = bend / jnp.vdot(state.direction, state.direction)
            largest = jnp.maximum(state.largest, jnp.abs(curvature))
            # Curvature that is only rounding: nothing to gain, for instance normal to the set.
            # Except along the gradient, where a curvature of zero means a step to the edge.
            nothing = (state.count > 0) & (jnp.abs(curvature) <= eps ** (2 / 3) * largest)
            square = jnp.vdot(state.residual, state.residual)
            share = square / bend
            inside = state.step + share * state.direction
            leaves = ~(bend > 0) | (length(inside) >= radius)
            # The positive root of |step + t direction| = radius.
            a = jnp.vdot(state.direction, state.direction)
            b = jnp.vdot(state.step, state.direction)
            c = radius**2 - jnp.vdot(state.step, state.step)
            share = jnp.where(leaves, (jnp.sqrt(b * b + a * c) - b) / a, share)
            share = jnp.where(nothing, 0, share)
            residual = state.residual + share * product
            new = jnp.vdot(residual, residual)
            count = state.count + 1
            return _Inner(
                state.step + share * state.direction,
                state.product + share * product,
                residual,
                -residual + new / square * state.direction,
                largest,
                count,
                nothing | leaves | (jnp.sqrt(new) <= enough) | (count >= most),
            )

        zero = jnp.zeros_like(gradient)
        number, count = jnp.zeros_like(start), jnp.zeros((), jnp.int32)
        state = _Inner(zero, zero, gradient, -gradient, number, count, done)
        return jax.lax.while_loop(lambda state: ~state.done, turn, state)
