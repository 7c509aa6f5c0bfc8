"""Steepest directions for any set and any norm: the multipliers of the normal space.

At a point the steepest direction is `max <G, A>` over `||A|| <= 1` with A tangent. Its dual is
`min ||G - N||_dual` over the normal space (or cone): each N bounds the optimum, and the best one
gives `A = lmo(G - N)`. The solvers here ask a norm for its duality map and its gap, and a set for
the projection onto its normal space. What they hand on is the normal part `T` that is left in
`X = G - N`, relative to the tangent part of G: it changes less from step to step than N does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from manifoldmuon.linalg import frobenius_norm, inner_product, normalize, over, prescale
from manifoldmuon.manifolds.solvers._solver import Steepest, in_dtypes_of
from manifoldmuon.norms import Norm, relative_gap

_START = 100  # what is below the mean by this factor starts short of norm 1

Normal = Callable[[Float[Array, "..."]], Float[Array, "..."]]
"""The projection onto the normal space, or the normal cone, at a point: the nearest element."""


class Problem(NamedTuple):
    """A gradient without its normal part.

    Attributes:
      part: the tangent part, of Frobenius norm 1, or zero.
      whole: the gradient in the same units.
      noise: what rounding may hide in `part`.
      still: whether the tangent part is no more than rounding.
      zero: whether the gradient is zero.
    """

    part: Float[Array, "..."]
    whole: Float[Array, "..."]
    noise: Float[Array, "*batch"]
    still: Bool[Array, "*batch"]
    zero: Bool[Array, "*batch"]


def without_normal(grad: Float[Array, "..."], normal: Normal, ndim: int) -> Problem:
    """Takes the normal part out of a gradient, twice: the rest may be small beside rounding."""
    scaled, _ = prescale(grad, ndim)
    part = scaled - normal(scaled)
    part = part - normal(part)
    size, length = frobenius_norm(part, ndim), frobenius_norm(scaled, ndim)
    noise = 8 * jnp.finfo(scaled.dtype).eps * length
    # What a short dtype rounds a gradient by is no direction either. False for a NaN.
    still = size <= jnp.maximum(noise, jnp.finfo(grad.dtype).eps / 2 * length)
    unit = jnp.where(over(still, ndim), 0, normalize(part, ndim))
    size = _or_one(size)
    return Problem(unit, scaled / over(size, ndim), noise / size, still, length == 0)


def certified(
    norm: Norm,
    problem: Problem,
    grad: Float[Array, "..."],
    reduced: Float[Array, "..."],
    attained: Float[Array, "..."],
    direction: Float[Array, "..."],
    dual: Any,
    residual: Float[Array, "*batch"],
) -> Steepest:
    """`direction` with the bound that `attained`, the duality map of `reduced = G - N`, gives.

    `grad` is G, with as much of its normal part as matters to a tangent direction.
    """
    ndim = norm.ndim
    upper = inner_product(reduced, attained, ndim) / (1 - norm.gap(reduced, attained))
    value = inner_product(grad, direction, ndim)
    noise = problem.noise * frobenius_norm(attained, ndim)
    gap = relative_gap(upper + noise, value - noise)
    gap = jnp.where(problem.still, jnp.where(problem.zero, 0, 1), gap)
    direction = jnp.where(over(problem.still, ndim), 0, direction)
    return Steepest(direction, dual, jnp.where(problem.still, 0, residual), gap)


class LineDual(NamedTuple):
    """The multiplier of a normal line, and how much of it changes the slope by one."""

    shift: Float[Array, "*batch"]
    step: Float[Array, "*batch"]


class Side(NamedTuple):
    """A multiplier, its duality map A, and the slope `<U, A>`."""

    shift: Float[Array, "*batch"]
    slope: Float[Array, "*batch"]
    direction: Float[Array, "..."]


class Search(NamedTuple):
    """Where to look next, and what has been found.

    A lower side has a slope below zero, a higher one has none below: `low.slope = 0` and
    `high.slope = -1` stand for sides that are not known.
    """

    dual: LineDual
    low: Side
    high: Side

    @property
    def closed(self) -> Bool[Array, "*batch"]:
        """Whether the root lies between two sides."""
        return (self.low.slope < 0) & (self.high.slope >= 0)

    @property
    def secant(self) -> Float[Array, "*batch"]:
        """The change of the multiplier per change of the slope, where it is closed."""
        return (self.high.shift - self.low.shift) / _or_one(self.high.slope - self.low.slope)


@dataclasses.dataclass(frozen=True)
class Bracket:
    """For sets whose normal space is a line: two multipliers, one on each side of the root.

    With the unit normal U, the slope `<U, lmo(G + t U)>` never falls with t. From the last
    multiplier the search goes half as far again as Newton's method would, so that two duality maps
    lie on both sides of the root. Their mixture of slope zero is tangent and of norm at most 1, for
    any norm, and it misses the optimum by the product of the two distances. Where both lie on one
    side, U itself is mixed in, which costs what the slope is.

    Attributes:
      steps: duality maps for each direction; two keep up with training.
      cold: how many more a first one takes.
    """

    steps: int = 2
    cold: int = 6

    def __post_init__(self):
        _check_steps(self, self.steps, self.cold)

    def init_dual(self, batch: tuple[int, ...]) -> LineDual:
        """The cold start for points with these leading axes."""
        return LineDual(jnp.zeros(batch, jnp.float32), jnp.zeros(batch, jnp.float32))

    def solve(
        self, norm: Norm, unit: Float[Array, "..."], grad: Float[Array, "..."], dual: LineDual
    ) -> Steepest:
        """The direction with its certificate.

        Args:
          norm: in which it is steepest.
          unit: U at every point, of Frobenius norm 1, float32 or wider.
          grad: the gradient.
          dual: from `init_dual`, or what the last call returned.
        """
        ndim = norm.ndim

        def along(vector):
            return inner_product(unit, vector, ndim)

        problem = without_normal(grad, lambda v: unit * over(along(v), ndim), ndim)

        def look(search: Search) -> Search:
            (shift, step), low, high = search
            reduced = problem.part + over(shift, ndim) * unit
            direction = norm.lmo(reduced)
            found = Side(shift, along(direction), direction)
            known = (low.slope < 0) | (high.slope >= 0)
            below = found.slope < 0
            search = Search(search.dual, _pick(below, found, low), _pick(~below, found, high))
            # A length l curves by 1 / l, in as many directions as the square of A counts.
            length = inner_product(reduced, direction, ndim)
            curved = length / _or_one(inner_product(direction, direction, ndim))
            step = jnp.where(step > 0, jnp.where(known, 2 * step, step), curved)
            step = jnp.where(search.closed, search.secant, step)
            reach = jnp.where(search.closed, 1.1, 1.5) * step * found.slope
            target = jnp.where(
                search.closed,
                jnp.clip(shift - reach, search.low.shift, search.high.shift),
                shift - reach,
            )
            return search._replace(dual=LineDual(target, step))

        none = jnp.zeros_like(problem.noise)
        unknown = Side(none, none, jnp.zeros_like(problem.part))
        start = LineDual(*(x.astype(problem.noise.dtype) for x in dual))
        search = Search(start, unknown, unknown._replace(slope=unknown.slope - 1))
        search = _repeat(look, search, self.steps, self.cold, start.step > 0)
        low, high, closed = search.low, search.high, search.closed
        near = _pick((low.slope < 0) & ~(closed & (high.slope < -low.slope)), low, high)

        def with_normal(_):
            size = norm.bound(unit)
            share = jnp.abs(near.slope) * size
            share = share / (1 + share)
            back = jnp.sign(near.slope) * share / _or_one(size)
            return near.direction - over(share, ndim) * near.direction - over(back, ndim) * unit

        share = over(high.slope / _or_one(high.slope - low.slope), ndim)
        mixed = share * low.direction + (1 - share) * high.direction
        open_sided = jax.lax.cond(jnp.all(closed), lambda d: d, with_normal, near.direction)
        direction = jnp.where(over(closed, ndim), mixed, open_sided)
        root = jnp.where(closed, low.shift - low.slope * search.secant, search.dual.shift)
        after = in_dtypes_of(dual, LineDual(root, search.dual.step))
        reduced = problem.part + over(near.shift, ndim) * unit
        residual = jnp.abs(near.slope)
        return certified(
            norm, problem, problem.part, reduced, near.direction, direction, after, residual
        )


class SpaceDual(NamedTuple):
    """The normal part that is left, relative to the tangent part, and the last step length."""

    shift: Float[Array, "..."]
    step: Float[Array, "*batch"]


class Descent(NamedTuple):
    """The next multiplier, and the last one with its duality map and the normal part of that."""

    dual: SpaceDual
    before: Float[Array, "..."]
    direction: Float[Array, "..."]
    residual: Float[Array, "..."]


@dataclasses.dataclass(frozen=True)
class BarzilaiBorwein:
    """For any linear tangent space: dual descent with step lengths by Barzilai and Borwein.

    The dual's gradient in the normal part T is the normal part R of `lmo(G + T)`. A step length
    `<dT, dR> / <dR, dR>` from the last two (IMA J. Numer. Anal. 8, 1988) needs no constant. The
    last duality map is made tangent and, where that takes it above norm 1, shortened. For norms
    with a smooth duality map, such as `Spectral(TRAINING_MSIGN)`: at a kink of the dual it stalls.

    Attributes:
      steps: duality maps for each direction; three keep up with training, and one, which moves the
        multiplier once for each gradient, follows it from afar.
      cold: how many more a first one takes.
    """

    steps: int = 3
    cold: int = 9

    def __post_init__(self):
        _check_steps(self, self.steps, self.cold)

    def init_dual(self, shape: tuple[int, ...], ndim: int) -> SpaceDual:
        """The cold start for points of this shape."""
        batch = shape[: len(shape) - ndim]
        return SpaceDual(jnp.zeros(shape, jnp.float32), jnp.zeros(batch, jnp.float32))

    def solve(
        self, norm: Norm, normal: Normal, grad: Float[Array, "..."], dual: SpaceDual
    ) -> Steepest:
        """The direction with its certificate.

        Args:
          norm: in which it is steepest.
          normal: the orthogonal projection onto the normal space at every point.
          grad: the gradient.
          dual: from `init_dual`, or what the last call returned.
        """
        ndim = norm.ndim
        problem = without_normal(grad, normal, ndim)

        def inner(x, y):
            return inner_product(x, y, ndim)

        def descend(descent: Descent) -> Descent:
            (shift, step), before, _, residual_before = descent
            reduced = problem.part + shift
            direction = norm.lmo(reduced)
            residual = normal(direction)
            moved, turned = shift - before, residual - residual_before
            curved = inner(moved, turned)
            length = inner(reduced, direction) / _or_one(inner(direction, direction))
            step = jnp.where(step > 0, step, length)
            step = jnp.where(curved > 0, curved / _or_one(inner(turned, turned)), step)
            after = SpaceDual(shift - over(step, ndim) * residual, step)
            return Descent(after, shift, direction, residual)

        start = SpaceDual(*(x.astype(problem.noise.dtype) for x in dual))
        start = start._replace(shift=normal(start.shift))  # the point has moved since
        nothing = jnp.zeros_like(problem.part)
        descent = Descent(start, start.shift, nothing, nothing)
        descent = _repeat(descend, descent, self.steps, self.cold, start.step > 0)
        direction = descent.direction - descent.residual
        direction = _shortened(norm, direction, descent.residual)
        reduced = problem.part + descent.before
        after = in_dtypes_of(dual, descent.dual)
        residual = frobenius_norm(descent.residual, ndim)
        return certified(
            norm, problem, problem.part, reduced, descent.direction, direction, after, residual
        )


@dataclasses.dataclass(frozen=True)
class DouglasRachford:
    """For any set, also with boundary, and any norm: two projections in turn.

    One onto the ball of the norm (`Norm.project`), pushed along the gradient, one onto the tangent
    space or cone; what the second takes away adds up to the multiplier (Lions and Mercier, SIAM J.
    Numer. Anal. 16, 1979; as ADMM in Boyd et al. 2011). It needs no warm start. For norms whose
    projection is exact: with the four steps of `Spectral(TRAINING_MSIGN)` a few pairs miss most of
    the optimum, and the gap says so.

    Attributes:
      steps: pairs of projections.
      penalty: how far they may disagree, relative to the mean curvature of the problem.
      relaxation: over-relaxation, between 1 and 2.
    """

    steps: int = 12
    penalty: float = 3.0
    relaxation: float = 1.6

    def __post_init__(self):
        _check_steps(self, self.steps, 0)
        if not (self.penalty > 0 and 1 <= self.relaxation < 2):
            raise ValueError(
                "DouglasRachford takes penalty > 0 and 1 <= relaxation < 2; got "
                f"{self.penalty} and {self.relaxation}"
            )

    def solve(
        self, norm: Norm, normal: Normal, grad: Float[Array, "..."], cone: bool = False
    ) -> Steepest:
        """The direction with its certificate, and no dual variable.

        On a cone the tangent part of the gradient stands in where it gains more than what the
        splitting came to; where rounding hides that either gains, the direction is zero and the gap
        1.

        Args:
          norm: in which it is steepest.
          normal: the projection of ascending directions onto the normal space, or the cone of what
            may not be descended.
          grad: the gradient.
          cone: whether it is a cone, of which the normal part of the gradient matters.
        """
        ndim = norm.ndim
        problem = without_normal(grad, normal, ndim)
        whole = problem.whole if cone else problem.part
        if cone:
            # Its projection takes a sign and some products more than that onto a space. And what a
            # direction is rounded by in the end may lead inside, along all of the normal part.
            lost = jnp.finfo(grad.dtype).eps / 2 * frobenius_norm(whole, ndim)
            problem = problem._replace(noise=jnp.maximum(4 * problem.noise, lost))
        free = norm.lmo(problem.part)
        length = inner_product(problem.part, free, ndim)
        unit = _or_one(over(length / _or_one(inner_product(free, free, ndim)), ndim))
        push = whole / (self.penalty * unit)
        # Not `free`, which takes full steps along what rounding leaves of a normal part.
        first = norm.project(_START / unit * problem.part)

        def step(_, state):
            tangent, multiplier, _ = state
            inside = norm.project(tangent - multiplier + push)
            target = self.relaxation * inside + (1 - self.relaxation) * tangent + multiplier
            multiplier = normal(target)
            return target - multiplier, multiplier, inside

        start = first - normal(first), normal(push), first
        direction, multiplier, inside = jax.lax.fori_loop(0, self.steps, step, start)
        if cone:  # rounding of a large multiplier is not tangent
            direction = direction - normal(direction)
        direction = _shortened(norm, direction, direction - inside)
        if cone:
            direction, hidden = _that_ascends(norm, normal, problem, direction)
            problem = problem._replace(still=problem.still | hidden)
        reduced = (push - multiplier) * self.penalty * unit
        attained = norm.lmo(reduced)
        residual = frobenius_norm(normal(attained), ndim)
        return certified(norm, problem, whole, reduced, attained, direction, (), residual)


def _that_ascends(
    norm: Norm, normal: Normal, problem: Problem, direction: Float[Array, "..."]
) -> tuple[Float[Array, "..."], Bool[Array, "*batch"]]:
    """The direction, or the tangent part where that surely gains more; and where neither gains.

    A direction within a cone may well descend along the normal part of a gradient, which is huge
    where the tangent part is small: there rounding must not decide.
    """
    ndim = norm.ndim
    # Of the tangent part, too, what rounding has left along the normal part goes first. It is zero,
    # and so is its derivative, which would not be finite where nothing is normal.
    away = normalize(problem.whole - problem.part, ndim)
    left = away * over(inner_product(away, problem.part, ndim), ndim)
    plain = problem.part - jax.lax.stop_gradient(left)
    plain = plain - normal(plain)
    plain = plain / _or_one(over(norm.bound(plain), ndim))

    def gained(direction):
        noise = problem.noise * frobenius_norm(direction, ndim)
        return inner_product(problem.whole, direction, ndim) - noise

    first, second = gained(direction), gained(plain)
    chosen = jnp.where(over(second > first, ndim), plain, direction)
    return chosen, jnp.maximum(first, second) <= 0


def _shortened(
    norm: Norm, direction: Float[Array, "..."], change: Float[Array, "..."]
) -> Float[Array, "..."]:
    """To norm 1 at most, for a direction that differs by `change` from one of norm 1."""
    # The second bound is the tighter one where the change is small.
    size = jnp.minimum(norm.bound(direction), 1 + norm.bound(change))
    return direction / over(jnp.maximum(size, 1), norm.ndim)


def _repeat(step, state, steps: int, cold: int, warm: Bool[Array, "*batch"]):
    """`steps` times, and `cold` times more before for problems that are not `warm`."""

    def once(k, state):
        def move(state):
            return _pick((k >= cold) | ~warm, step(state), state)

        # Not two loops: the program would hold the duality map twice.
        return jax.lax.cond((k >= cold) | ~jnp.all(warm), move, lambda s: s, state)

    return jax.lax.fori_loop(0, cold + steps, once, state)


def _pick(choice: Bool[Array, "*batch"], new: Any, old: Any) -> Any:
    """For each problem one of two trees, whose arrays have the problems' axes first."""

    def one(new, old):
        return jnp.where(over(choice, new.ndim - choice.ndim), new, old)

    return jax.tree.map(one, new, old)


def _or_one(x: Float[Array, "..."]) -> Float[Array, "..."]:
    return jnp.where(x == 0, 1, x)


def _check_steps(solver: Any, steps: int, cold: int) -> None:
    if steps < 1 or cold < 0:
        raise ValueError(
            f"{type(solver).__name__} takes steps >= 1 and cold >= 0; got {steps} and {cold}"
        )
