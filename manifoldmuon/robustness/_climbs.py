"""Climbs within a ball, for many images at once: what an attack repeats."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from manifoldmuon._internal.arrays import expand_trailing, frobenius_norm, nonzero_or_one
from manifoldmuon._internal.powers_of_two import normalize

_NEWTON_STEPS = 5  # of a projection: four reach rounding for images of 784 pixels


@jax.jit
def random_points(keys: Any, x: Array, reach: Array, limits: Any) -> Array:
    """On the spheres around images, as far as the limits let them."""
    drawn = jax.vmap(lambda key, like: jax.random.normal(key, like.shape, like.dtype))(keys, x)
    return nearest(
        x, expand_trailing(reach, x.ndim - 1) * normalize(drawn, x.ndim - 1), reach, limits
    )


@functools.partial(jax.jit, static_argnames="steps")
def climb_by_pgd(f, x, labels, rivals, unit, start, reach, limits, *, steps):
    """Steps of one length (arXiv:1706.06083).

    Args:
      f: from images to logits.
      x: the images, which are the centres.
      labels: their classes.
      rivals: `(n, classes)`, True for the classes to go for.
      unit: in which logits are read.
      start: where to begin, within the ball.
      reach: radii.
      limits: what pixels may be, or None.
      steps: how many.

    Returns:
      Of each image the point where another class leads its label by most, by how much, and whether
      all gradients were finite.
    """
    ascend = functools.partial(_ascend, f, labels, rivals, unit)
    length = expand_trailing(2.5 * reach / steps, x.ndim - 1)

    def step(_, carry):
        point, best = carry
        uphill, _, best = ascend(point, best)
        return nearest(x, point - x + length * uphill, reach, limits), best

    point, best = jax.lax.fori_loop(0, steps, step, (start, _nothing_found(x)))
    return ascend(point, best)[2]


@functools.partial(jax.jit, static_argnames="steps")
def climb_by_apgd(f, x, labels, rivals, unit, start, reach, limits, *, steps):
    """Algorithm 1 of arXiv:2003.01690; see `climb_by_pgd`."""
    ascend = functools.partial(_ascend, f, labels, rivals, unit)
    ndim = x.ndim - 1
    windows = jnp.asarray(checkpoints(steps))

    def step(k, carry):
        at, before, top, length, rises, top_then, halved, best = carry
        ahead = nearest(x, at.point - x + expand_trailing(length, ndim) * at.uphill, reach, limits)
        share = jnp.where(k == 0, 1.0, 0.75).astype(x.dtype)
        mixed = share * (ahead - at.point) + (1 - share) * (at.point - before)
        point = nearest(x, at.point - x + mixed, reach, limits)
        uphill, height, best = ascend(point, best)
        now = _Place(point, uphill, height)
        rises = rises + (height > at.height)
        top = _select(height > top.height, now, top)
        check = windows[k] > 0
        stuck = ~halved & (top.height <= top_then)
        halve = check & ((rises < 0.75 * windows[k]) | stuck)
        return (
            _select(halve, top, now),
            at.point,
            top,
            jnp.where(halve, length / 2, length),
            jnp.where(check, 0, rises),
            jnp.where(check, top.height, top_then),
            jnp.where(check, halve, halved),
            best,
        )

    uphill, height, best = ascend(start, _nothing_found(x))
    at = _Place(start, uphill, height)
    rises, halved = jnp.zeros(len(x), jnp.int32), jnp.ones(len(x), bool)
    carry = (at, start, at, 2 * reach, rises, height, halved, best)
    return jax.lax.fori_loop(0, steps, step, carry)[-1]


class _Place(NamedTuple):
    point: Array
    uphill: Array
    height: Array


class _Best(NamedTuple):
    """The points where another class leads by most, and whether all gradients were finite."""

    point: Array
    lead: Array
    finite: Array


def _nothing_found(x: Array) -> _Best:
    return _Best(x, jnp.full(len(x), -jnp.inf, x.dtype), jnp.ones(len(x), bool))


def _ascend(f, labels, rivals, unit, point, best) -> tuple[Array, Array, _Best]:
    """The unit gradient of what is climbed, its height, and the best point with this one."""

    def heights(point):
        logits = f(point).astype(point.dtype)
        own = jnp.arange(logits.shape[1]) == labels[:, None]
        label = jnp.sum(jnp.where(own, logits, 0), axis=1)
        relative = (logits - label[:, None]) / unit[:, None]
        height = jax.nn.logsumexp(relative, axis=1, where=rivals)
        lead = jnp.max(jnp.where(own, -jnp.inf, logits), axis=1) - label
        return jnp.sum(height), (height, lead)

    grad, (height, lead) = jax.grad(heights, has_aux=True)(point)
    uphill = normalize(grad, point.ndim - 1)
    finite = jnp.all(jnp.isfinite(uphill), axis=tuple(range(1, point.ndim)))
    here = _Best(point, lead, best.finite)
    best = _select(lead > best.lead, here, best)
    return uphill, height, best._replace(finite=best.finite & finite)


def _select(chosen: Array, new: Any, old: Any) -> Any:
    """Image by image, in every array of a tree."""
    return jax.tree.map(lambda a, b: jnp.where(expand_trailing(chosen, a.ndim - 1), a, b), new, old)


def checkpoints(steps: int) -> np.ndarray:
    """For each step the steps since the last checkpoint, 0 where there is none (section 3.1)."""
    widths = np.zeros(steps, np.int32)
    last, share, done = 0.0, 0.22, 0
    while (step := math.ceil(share * steps - 1e-9)) <= steps:  # 0.41 of 100 steps is 41
        if step > done:
            widths[step - 1], done = step - done, step
        last, share = share, share + max(share - last - 0.03, 0.06)
    return widths


def nearest(x: Array, move: Array, reach: Array, limits: Any) -> Array:
    """The point nearest to `x + move` within the ball around `x` and within the limits.

    It is `clip(x + s * move)` for the largest s up to 1 that stays in the ball. The squared length
    of that movement is concave and piecewise linear in `s**2`, so Newton's method climbs to the
    solution from below, and is in the ball wherever it ends.
    """
    ndim = move.ndim - 1
    axes = tuple(range(1, move.ndim))
    square, whole = move**2, frobenius_norm(move, ndim)
    share = jnp.minimum(1, (reach / nonzero_or_one(whole)) ** 2)
    if limits is None:
        return x + expand_trailing(jnp.sqrt(share), ndim) * move
    low, high = limits
    room = jnp.where(move > 0, high - x, x - low) ** 2

    def newton(_, share):
        free = expand_trailing(share, ndim) * square <= room
        length = jnp.sum(jnp.where(free, expand_trailing(share, ndim) * square, room), axis=axes)
        slope = jnp.sum(jnp.where(free, square, 0), axis=axes)
        gain = (reach**2 - length) / nonzero_or_one(slope)
        return jnp.minimum(1, share + jnp.maximum(gain, 0) * (slope > 0))

    share = jax.lax.fori_loop(0, _NEWTON_STEPS, newton, share)
    return jnp.clip(x + expand_trailing(jnp.sqrt(share), ndim) * move, low, high)
