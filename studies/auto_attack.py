"""Untargeted and targeted Auto-PGD in l2, the gradient-based part of AutoAttack.

Croce and Hein (arXiv:2003.01690), algorithm 1: gradient ascent with momentum. Steps start at twice
the radius and are halved, for each image separately, at checkpoints without enough progress. The
attack first moves away from the label, as in `robustness.pgd`, then towards the most likely wrong
classes. Broken images leave the pool. FAB and Square, the paper's other attacks, are not included.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial
from jax.typing import ArrayLike
from jaxtyping import Array, PRNGKeyArray

from manifoldmuon.robustness import AttackResult

_SHARPNESS = 8.0  # an image's margin in units of logits
_NEWTON_STEPS = 5  # per projection: four reach rounding error for images of 784 pixels


def auto_attack(
    f: Callable[[Array], Array],
    x: ArrayLike,
    labels: ArrayLike,
    radius: ArrayLike,
    *,
    key: PRNGKeyArray,
    steps: int = 100,
    restarts: int = 1,
    targets: int = 9,
    bounds: tuple[Any, Any] | None = None,
    batch: int = 250,
) -> AttackResult:
    """Attack images; for the arguments see `manifoldmuon.robustness.pgd`, which checks them.

    Targeted runs maximise `logits[target] - logits[label]`. The paper divides this by differences
    of other logits to make it independent of their scale; here step lengths are already
    independent of the scale.

    Args:
        f: Maps images `(n, ...)` to logits `(n, classes)`.
        x: Images, float32 or float64.
        labels: The classes of the images.
        radius: The largest Euclidean length of a perturbation; a number, or an array with a
            number for each image.
        key: The random key.
        steps: Gradients per run.
        restarts: Untargeted runs, and runs towards each target, all from random points of the
            sphere.
        targets: The number of target classes, by largest logit at the image; at most all others.
        bounds: The smallest and largest pixel values.
        batch: Images per call of the compiled program.

    Raises:
        ValueError: Logits or gradients near the images are not finite.
    """
    x, labels = np.asarray(x), np.asarray(labels)
    f = f if isinstance(f, Partial) else Partial(f)
    radius = np.broadcast_to(np.asarray(radius, np.float64), x.shape[:1])
    limits = bounds and tuple(np.broadcast_to(np.asarray(b, x.dtype), x.shape[1:]) for b in bounds)
    size = min(batch, len(x))
    whole = _chunks(np.arange(len(x)), size)
    logits = np.concatenate(
        [np.asarray(_logits(f, x[rows]))[: len(chunk)] for chunk, rows in whole]
    )
    classes = np.arange(logits.shape[1])
    own = classes == labels[:, None]
    margin = logits[own] - np.max(np.where(own, -np.inf, logits), axis=1)
    # Shrink the ball: rounding the points and summing the squares both add error.
    short = jax.dtypes.canonicalize_dtype(x.dtype)
    eps, flat = float(np.finfo(short).eps), x.reshape(len(x), -1)
    reach = (1 - eps * (16 + flat.shape[1] ** 0.5)) * radius - eps * np.linalg.norm(flat, axis=1)
    reach = np.maximum(reach, 0).astype(short)
    unit = np.maximum(margin / _SHARPNESS, 1e-3 * np.std(logits, axis=1)).astype(short)
    unit = np.where(unit > 0, unit, 1)

    ranked = np.argsort(np.where(own, -np.inf, logits), axis=1)[:, ::-1]
    count = min(targets, ranked.shape[1] - 1)
    rivals = [~own, *(classes == ranked[:, rank, None] for rank in range(count))]
    points, most = x.copy(), np.full(len(x), -np.inf)
    robust = np.argmax(logits, axis=1) == labels
    for run, mask in enumerate(mask for mask in rivals for _ in range(restarts)):
        run_key = jax.random.fold_in(key, run)
        for chunk, rows in _chunks(np.flatnonzero(robust & (reach > 0)), size):
            keys = jax.vmap(jax.random.fold_in, (None, 0))(run_key, rows)
            given = x[rows], labels[rows], mask[rows], unit[rows], reach[rows]
            found = _climb(f, *given, limits, keys, steps=steps)
            place, lead, finite = (np.asarray(part)[: len(chunk)] for part in found)
            if not finite.all():  # no class would lead, and the image would count as robust
                raise ValueError(
                    f"auto_attack: logits or their gradient are not finite near {np.sum(~finite)}"
                    f" images, such as number {chunk[~finite][0]}: the attack would be blind there"
                )
            place = place.astype(x.dtype)
            if limits is not None:  # float64 limits may lie between two float32 numbers
                place = np.clip(place, *limits)
            away = (place.astype(np.float64) - x[chunk]).reshape(len(chunk), -1)
            better = (np.linalg.norm(away, axis=1) <= radius[chunk]) & (lead > most[chunk])
            kept = chunk[better]
            points[kept], most[kept] = place[better], lead[better]
            robust[kept] &= lead[better] <= 0
    return AttackResult(points, robust)


@jax.jit
def _logits(f: Partial, x: Array) -> Array:
    return f(x)


class _Place(NamedTuple):
    point: Array
    uphill: Array
    height: Array


class _Best(NamedTuple):
    """Points with the largest lead of a wrong class, and whether logits and gradients were finite.

    `finite` is separate because `lead` can hide a NaN: XLA's maximum on CPUs loses it among 4096
    logits or more.
    """

    point: Array
    lead: Array
    finite: Array


@functools.partial(jax.jit, static_argnames="steps")
def _climb(f, x, labels, rivals, unit, reach, limits, keys, *, steps):
    """Run algorithm 1 from a random point of each image's sphere.

    Args:
        f: Maps images to logits.
        x: The images: the centres of the spheres.
        labels: The classes of the images.
        rivals: `(n, classes)`, True for target classes.
        unit: The units of logits, for each image.
        reach: The radii.
        limits: The smallest and largest pixel values, or None.
        keys: A random key for each image.
        steps: The number of steps.
    """
    windows = jnp.asarray(checkpoints(steps))

    def ascend(point, best):
        def heights(point):
            logits = f(point).astype(point.dtype)
            own = jnp.arange(logits.shape[1]) == labels[:, None]
            label = jnp.sum(jnp.where(own, logits, 0), axis=1)
            relative = (logits - label[:, None]) / unit[:, None]
            height = jax.nn.logsumexp(relative, axis=1, where=rivals)
            lead = jnp.max(jnp.where(own, -jnp.inf, logits), axis=1) - label
            return jnp.sum(height), (height, lead, jnp.all(jnp.isfinite(logits), axis=1))

        grad, (height, lead, finite) = jax.grad(heights, has_aux=True)(point)
        finite &= best.finite & jnp.all(jnp.isfinite(grad), axis=tuple(range(1, grad.ndim)))
        here = _Best(point, lead, finite)
        best = _select(lead > best.lead, here, best)._replace(finite=finite)
        return _Place(point, _unit(grad), height), best

    def step(k, carry):
        at, before, top, length, rises, top_then, halved, best = carry
        ahead = nearest(x, at.point - x + _over(length, x) * at.uphill, reach, limits)
        share = jnp.where(k == 0, 1.0, 0.75).astype(x.dtype)
        mixed = share * (ahead - at.point) + (1 - share) * (at.point - before)
        now, best = ascend(nearest(x, at.point - x + mixed, reach, limits), best)
        rises = rises + (now.height > at.height)
        top = _select(now.height > top.height, now, top)
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

    drawn = jax.vmap(lambda key: jax.random.normal(key, x.shape[1:], x.dtype))(keys)
    start = nearest(x, _over(reach, x) * _unit(drawn), reach, limits)
    rises, true = jnp.zeros(len(x), jnp.int32), jnp.ones(len(x), bool)
    at, best = ascend(start, _Best(x, jnp.full(len(x), -jnp.inf, x.dtype), true))
    carry = (at, start, at, 2 * reach, rises, at.height, true, best)
    return jax.lax.fori_loop(0, steps, step, carry)[-1]


def checkpoints(steps: int) -> np.ndarray:
    """Return for each step the steps since the last checkpoint; 0 if it is none (section 3.1)."""
    widths = np.zeros(steps, np.int32)
    last, share, done = 0.0, 0.22, 0
    while (step := math.ceil(share * steps - 1e-9)) <= steps:  # 0.41 * 100 must give 41
        if step > done:
            widths[step - 1], done = step - done, step
        last, share = share, share + max(share - last - 0.03, 0.06)
    return widths


def nearest(x: Array, move: Array, reach: Array, limits: Any) -> Array:
    """Project `x + move` onto the intersection of the ball around `x` and the limits.

    The projection is `clip(x + s * move)` with the largest s up to 1 that stays in the ball. The
    squared length of the clipped movement is concave and piecewise linear in `s**2`, so Newton's
    method approaches the solution from below, and every iterate is in the ball.
    """
    axes = tuple(range(1, move.ndim))
    square, whole = move**2, jnp.sqrt(jnp.sum(move**2, axis=axes))
    share = jnp.minimum(1, (reach / jnp.where(whole == 0, 1, whole)) ** 2)
    if limits is None:
        return x + _over(jnp.sqrt(share), x) * move
    low, high = limits
    room = jnp.where(move > 0, high - x, x - low) ** 2

    def newton(_, share):
        free = _over(share, x) * square <= room
        length = jnp.sum(jnp.where(free, _over(share, x) * square, room), axis=axes)
        slope = jnp.sum(jnp.where(free, square, 0), axis=axes)
        gain = (reach**2 - length) / jnp.where(slope == 0, 1, slope)
        return jnp.minimum(1, share + jnp.maximum(gain, 0) * (slope > 0))

    share = jax.lax.fori_loop(0, _NEWTON_STEPS, newton, share)
    return jnp.clip(x + _over(jnp.sqrt(share), x) * move, low, high)


def _chunks(pool: np.ndarray, size: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Split the pool; return each part, and the part padded to `size`, the compiled batch size."""
    parts = (pool[begin : begin + size] for begin in range(0, len(pool), size))
    return [(part, np.resize(part, size)) for part in parts]


def _over(numbers: Array, x: Array) -> Array:
    """Reshape a number per image so that it broadcasts against images."""
    return numbers.reshape(-1, *[1] * (x.ndim - 1))


def _unit(x: Array) -> Array:
    """Scale each image to length 1 without overflow or underflow; zero stays zero."""
    axes = tuple(range(1, x.ndim))
    size = jnp.max(jnp.abs(x), axis=axes, keepdims=True)
    x = x / jnp.where(size == 0, 1, size)
    length = jnp.sqrt(jnp.sum(x**2, axis=axes, keepdims=True))
    return x / jnp.where(length == 0, 1, length)


def _select(chosen: Array, new: Any, old: Any) -> Any:
    """Select `new` or `old` for each image, in every array of a tree."""
    return jax.tree.map(lambda a, b: jnp.where(_over(chosen, a), a, b), new, old)
