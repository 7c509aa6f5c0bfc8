"""L-BFGS with a line search."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax
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

_MOST_TRIALS = 30
_SUFFICIENT = 1e-4  # share of the predicted decrease (Nocedal and Wright 2006, section 3.1)


class _LineSearchState(NamedTuple):
    """A point, a line through it, and the next step length to try.

    Attributes:
      point: last accepted point, with `progress` and `gradient` there.
      direction: direction of the line; `slope` is the derivative of the cost along it.
      low: longest length known to be too short, with the derivative `low_slope` there; `high` is
        the shortest known to be too long, `trial` the next to try, `trials` the number tried,
        -1 before the start is evaluated.
      memory: the state of `optax.scale_by_lbfgs`.
    """

    point: Array
    progress: Progress
    gradient: Array
    direction: Array
    slope: Array
    low: Array
    low_slope: Array
    high: Array
    trial: Array
    trials: Array
    memory: Any


@dataclasses.dataclass(frozen=True)
class LBFGS(Method):
    """L-BFGS: quasi-Newton steps from the last few steps and changes of the gradient.

    Riemannian L-BFGS (Huang, Gallivan and Absil 2015): the memory is moved to each new point by
    projection. `optax.scale_by_lbfgs` does the recursion. Superlinear in practice; a step costs a
    gradient and some inner products. For ill-conditioned problems, or gradients near rounding, take
    `TrustRegion`.

    Each iteration of the loop tries a single point, for a cost with gradient, a retraction and a
    projection: in a batch no problem waits for another's line search. It accepts where the Wolfe
    conditions hold; slopes at a trial use the direction's tangent part. Where rounding hides the
    decrease, slopes alone decide (Hager and Zhang 2005, approximate Wolfe conditions).

    Attributes:
      memory: number of remembered steps.
    """

    memory: int = 10

    curvature: ClassVar[float] = 0.9
    """How much of the slope may be left."""

    patience: ClassVar[int] = 10
    """Number of steps without progress that rounding alone explains."""

    def __post_init__(self):
        check_fields(self, memory="[1, inf)")

    def _scale(self) -> optax.GradientTransformation:
        return optax.scale_by_lbfgs(self.memory)

    def _direction(
        self, memory: Any, gradient: Array, before: Array, step: Array, transported: list[Array]
    ) -> tuple[Array, Any]:
        """Return the next direction and the memory.

        Everything is at the new point: its gradient, and moved there the gradient before, the step
        (zeros at first), and the remembered steps and changes of the gradient.
        """
        # Optax subtracts the remembered `params`: zeros, because the step is a difference already.
        memory = memory._replace(
            params=jnp.zeros_like(step),
            updates=before,
            diff_params_memory=transported[0],
            diff_updates_memory=transported[1],
        )
        bends = jnp.vdot(step, gradient - before) > 0
        fresh = self._scale().init(step)
        memory = jax.tree.map(lambda x, y: jnp.where(bends, x, y), memory, fresh)
        scaled, memory = self._scale().update(gradient, memory, step)
        return jnp.negative(scaled), memory  # pyright: ignore[reportArgumentType]

    def run(
        self, problem: Problem, start: Array, stop: Stop, progress: Progress
    ) -> tuple[Array, Progress]:
        zero, number = jnp.zeros_like(start), jnp.zeros((), start.dtype)
        # The start is the first trial, a step of zero: always accepted.
        state = _LineSearchState(
            point=start,
            progress=progress,
            gradient=zero,
            direction=zero,
            slope=number,
            low=number,
            low_slope=number,
            high=number + jnp.inf,
            trial=number,
            trials=jnp.full((), -1, jnp.int32),
            memory=self._scale().init(start),
        )
        turn = functools.partial(self._turn, problem, stop)
        state = jax.lax.while_loop(lambda state: state.progress.reason == RUNNING, turn, state)
        return state.point, state.progress

    def _turn(self, problem: Problem, stop: Stop, state: _LineSearchState) -> _LineSearchState:
        step = state.trial * state.direction
        point = problem.retract(state.point, step)
        value, euclidean = jax.value_and_grad(problem.cost)(point)
        old = state.memory.diff_params_memory, state.memory.diff_updates_memory
        vectors = jnp.stack([euclidean, state.gradient, step])
        transported = problem.project(point, jnp.concatenate([vectors, *old]))
        gradient, before, step = transported[:3]

        first = state.trials < 0
        progress = state.progress.in_units_of(gradient, value, stop)
        progress = progress._replace(evaluations=progress.evaluations + 1)
        value, gradient = value * progress.scale, gradient * progress.scale
        slope = jnp.vdot(gradient, state.direction)
        finite = jnp.isfinite(value) & jnp.isfinite(slope)
        promised = progress.value + _SUFFICIENT * state.trial * state.slope
        # Where rounding hides the decrease, the slope has to show it. Relative to the least cost:
        # with a wrong gradient each step may rise a little.
        least = jnp.minimum(progress.value, progress.least_value)
        level = value <= least + cost_noise(jnp.maximum(progress.largest, jnp.abs(value)))
        level &= slope <= (2 * _SUFFICIENT - 1) * state.slope
        shorter = finite & ((value <= promised) | level)
        not_steep = slope >= self.curvature * state.slope
        flat = not_steep & (slope <= -self.curvature * state.slope)
        accepted = first | (shorter & (flat | (state.trials > _MOST_TRIALS // 3)))

        def accept() -> _LineSearchState:
            direction, memory = self._direction(
                state.memory, gradient, before, step, jnp.split(transported[3:], 2)
            )
            new_slope = jnp.vdot(gradient, direction)
            # Restart with the negative gradient if this is not a descent direction.
            descends = new_slope < 0
            direction = jnp.where(descends, direction, -gradient)
            new_slope = jnp.where(descends, new_slope, -jnp.vdot(gradient, gradient))
            fresh = self._scale().init(point)
            memory = jax.tree.map(lambda x, y: jnp.where(descends, x, y), memory, fresh)
            # At most as long as the point (or 1): longer steps would go around the manifold.
            farthest = jnp.maximum(length(point), 1) / length(direction)
            norm = length(gradient)
            new = progress._replace(steps=jnp.where(first, progress.steps, progress.steps + 1))
            new = new.at(value, norm, self.patience, stop)
            new.report(stop, ~first | (new.steps == 0))
            broken = first & ~(jnp.isfinite(value) & jnp.isfinite(norm))
            reason = jnp.where(broken, jnp.int32(Reason.NOT_FINITE), new.reason)
            return _LineSearchState(
                point,
                new._replace(reason=reason),
                gradient,
                direction,
                new_slope,
                jnp.zeros_like(slope),
                new_slope,
                jnp.full_like(slope, jnp.inf),
                jnp.minimum(jnp.ones_like(slope), farthest),
                jnp.zeros_like(state.trials),
                memory,
            )

        def reject() -> _LineSearchState:
            short = shorter & ~not_steep
            low = jnp.where(short, state.trial, state.low)
            high = jnp.where(short, state.high, state.trial)
            # Secant step: the zero of the line through both slopes, inside of the bracket.
            rise = slope - state.low_slope
            zero = state.low - state.low_slope * (state.trial - state.low) / rise
            width = jnp.where(jnp.isfinite(high), high - low, 9 * low)
            # Slopes say little if the cost has risen.
            most = jnp.where(shorter, 0.9, 0.5)
            inside = jnp.clip(zero, low + 0.1 * width, low + most * width)
            usable = finite & (rise > 0) & (zero > low) & (zero < high)
            trial = jnp.where(usable, inside, low + jnp.where(finite, 0.5, 0.1) * width)
            lost = state.trials >= _MOST_TRIALS
            reason = jnp.where(lost, progress.lost(), progress.reason)
            return state._replace(
                progress=progress._replace(reason=reason),
                low=low,
                low_slope=jnp.where(short, slope, state.low_slope),
                high=high,
                trial=trial,
                trials=state.trials + 1,
            )

        return jax.lax.cond(accepted, accept, reject)
