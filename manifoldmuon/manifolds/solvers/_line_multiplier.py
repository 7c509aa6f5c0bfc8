"""The multiplier of a normal line, by a search for the root of its slope."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from manifoldmuon._internal.arguments import check_fields
from manifoldmuon._internal.matrices.arrays import (
    Floats,
    Numbers,
    expand_trailing,
    inner_product,
    nonzero_or_one,
)
from manifoldmuon._internal.meshes.mesh import match_varying_axes
from manifoldmuon.manifolds.solvers import _solver
from manifoldmuon.manifolds.solvers._multipliers import certified, pick, repeat, without_normal
from manifoldmuon.norms import Norm

_CLOSE = 0.1  # a slope; mixing in the normal costs at most the slope


class Side(NamedTuple):
    """A multiplier, its duality map A, and the slope `<U, A>`."""

    shift: Numbers
    slope: Numbers
    direction: Floats


class Search(NamedTuple):
    """State of the search: the next multiplier and the two sides of the root.

    A lower side has a negative slope, a higher side a slope of at least zero: `low.slope = 0` and
    `high.slope = -1` mark unknown sides.
    """

    dual: _solver.Multiplier
    low: Side
    high: Side

    @property
    def closed(self) -> Bool[Array, "*batch"]:
        """Return whether the root is between the two sides."""
        return (self.low.slope < 0) & (self.high.slope >= 0)

    @property
    def settled(self) -> Bool[Array, "*batch"]:
        """Return whether the root is between the two sides, or close to the known side."""
        slope = jnp.where(self.low.slope < 0, -self.low.slope, self.high.slope)
        return self.closed | (slope < _CLOSE)

    @property
    def secant(self) -> Numbers:
        """Return the change of the multiplier per change of the slope, for a closed search."""
        return (self.high.shift - self.low.shift) / nonzero_or_one(self.high.slope - self.low.slope)


@dataclasses.dataclass(frozen=True)
class LineMultiplier(_solver.WarmSolver):
    """Solver for a normal space that is a line: two multipliers, on both sides of the root.

    With the unit normal U, the slope `<U, dualize(G + t U)>` never falls with t. From the last
    multiplier the search goes half as far again as Newton's method would, so that two duality maps
    bracket the root. Their mixture of slope zero is tangent and of norm at most 1, for any norm,
    and it misses the optimum by the product of the two distances. If both are on the same side of
    the root, U itself is mixed in, which costs at most the slope.

    Attributes:
      steps: the number of duality maps per direction; two keep up with training.
      cold_start_steps: the number of further maps at a cold start. With at least two steps, also
        the limit of further maps at a warm start that is not yet close because the gradient has
        jumped.
    """

    steps: int = 2
    cold_start_steps: int = 6

    def __post_init__(self):
        check_fields(self, steps="[1, inf)", cold_start_steps="[0, inf)")

    def solve(
        self, norm: Norm, at: _solver.Normal, grad: Floats, dual: _solver.Multiplier
    ) -> _solver.Steepest:
        ndim = norm.ndim
        grad, dual = match_varying_axes((grad, dual), at.project(grad))
        problem = without_normal(grad, at, ndim)

        def look(search: Search) -> Search:
            (shift, step), low, high = search
            reduced = problem.tangent + at.embed(shift)
            direction = norm.dualize(reduced)
            side = Side(shift, at.coordinates(direction), direction)
            known = (low.slope < 0) | (high.slope >= 0)
            below = side.slope < 0
            search = Search(search.dual, pick(below, side, low), pick(~below, side, high))
            # A length l has curvature 1 / l, in as many directions as `<A, A>` counts.
            length = inner_product(reduced, direction, ndim)
            curved = length / nonzero_or_one(inner_product(direction, direction, ndim))
            step = jnp.where(step > 0, jnp.where(known, 2 * step, step), curved)
            step = jnp.where(search.closed, search.secant, step)
            target = shift - jnp.where(search.closed, 1.1, 1.5) * step * side.slope
            inside = jnp.clip(target, search.low.shift, search.high.shift)
            target = jnp.where(search.closed, inside, target)
            return search._replace(dual=_solver.Multiplier(target, step))

        none = jnp.zeros_like(problem.noise)
        unknown = Side(none, none, jnp.zeros_like(problem.tangent))
        start = _solver.Multiplier(*(x.astype(problem.noise.dtype) for x in dual))
        search = Search(start, unknown, unknown._replace(slope=unknown.slope - 1))
        # With a single step per gradient the multiplier lags behind, and may never be close.
        settled = None if self.steps == 1 else lambda search: search.settled
        warm = start.step > 0
        search = repeat(look, search, self.steps, self.cold_start_steps, warm, settled)
        low, high, closed = search.low, search.high, search.closed
        near = pick((low.slope < 0) & ~(closed & (high.slope < -low.slope)), low, high)

        def with_normal(_):
            size = norm.bound(at.embed(jnp.ones_like(near.slope)))
            share = jnp.abs(near.slope) * size
            share = share / (1 + share)
            back = jnp.sign(near.slope) * share / nonzero_or_one(size)
            rest = near.direction - expand_trailing(share, ndim) * near.direction
            return rest - at.embed(back)

        share = expand_trailing(high.slope / nonzero_or_one(high.slope - low.slope), ndim)
        mixed = share * low.direction + (1 - share) * high.direction
        open_sided = jax.lax.cond(jnp.all(closed), lambda d: d, with_normal, near.direction)
        direction = jnp.where(expand_trailing(closed, ndim), mixed, open_sided)
        root = jnp.where(closed, low.shift - low.slope * search.secant, search.dual.shift)
        after = _solver.in_dtypes_of(dual, _solver.Multiplier(root, search.dual.step))
        reduced = problem.tangent + at.embed(near.shift)
        residual = jnp.abs(near.slope)
        return certified(
            norm, problem, problem.tangent, reduced, near.direction, direction, after, residual
        )
