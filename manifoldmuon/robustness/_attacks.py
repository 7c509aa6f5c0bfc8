"""An attack in the Euclidean norm: an upper bound on what can be certified."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from manifoldmuon._internal.arguments import check_number
from manifoldmuon._internal.arrays import expand_trailing, frobenius_norm, nonzero_or_one
from manifoldmuon._internal.powers_of_two import normalize

_SHARPNESS = 8.0  # units of logits in the margin of an image
_NEWTON_STEPS = 5  # of a projection: four reach rounding for images of 784 pixels

Logits = Callable[[Array], Array]
"""A function from images `(n, ...)` to logits `(n, classes)`."""


@dataclasses.dataclass(frozen=True)
class AttackResult:
    """Result of an attack.

    Attributes:
      points: `(n, ...)`, in the dtype of the images: of all points tried in the ball around each
        image, the one where another label leads its own by most; images that were wrong to begin
        with, or that have no ball, as they are.
      robust: `(n,)`: whether the label was right, and stayed so at all points tried.

    Examples:
      >>> found = pgd(lambda x: x, jnp.eye(2), jnp.arange(2), 0.1, key=jax.random.key(0))
      >>> found.robust.tolist()
      [True, True]
    """

    points: Float[np.ndarray, "n ..."]
    robust: Bool[np.ndarray, " n"]

    @property
    def accuracy(self) -> float:
        """The share of images that are still right, which no bound can exceed."""
        return float(np.mean(self.robust))


def pgd(
    f: Logits,
    x: ArrayLike,
    labels: ArrayLike,
    radius: ArrayLike,
    *,
    key: PRNGKeyArray,
    steps: int = 50,
    restarts: int = 1,
    bounds: tuple[ArrayLike, ArrayLike] | None = None,
    batch: int = 250,
) -> AttackResult:
    """Projected gradient ascent on the cross-entropy (Madry et al., arXiv:1706.06083), in l2.

    Steps of length `2.5 radius / steps` along the gradient, from the image at first, and from
    random points of the sphere around it in further restarts. What is climbed is
    `logsumexp(other logits) - logits[label]`: it grows with the cross-entropy, and its gradient
    does not vanish where the network is sure. Logits are read in eighths of the image's margin, so
    that their scale does not matter; the small logits of a 1-Lipschitz network would otherwise let
    all classes pull at once. Where the gradient is zero, as behind rounded numbers, an attack sees
    nothing, and says nothing of it.

    Args:
      f: from images `(n, ...)` to logits `(n, classes)`, each by itself: a function of JAX. It is
        compiled once for each function object; to attack one network with other weights without
        compiling again, give `jax.tree_util.Partial(net.apply, params)`.
      x: `(n, ...)`, float32 or float64: the images. The gradients of float64 images are computed
        in float32 unless JAX runs in float64.
      labels: `(n,)`, whole numbers: their classes.
      radius: the largest Euclidean length of a movement, in the unit of `x` and over all axes but
        the first: a number, or `(n,)`, for each image its own.
      key: where randomness comes from. Images have random numbers of their own, so that results
        do not depend on `batch`, up to rounding.
      steps: how many gradients each restart takes.
      restarts: how many times to begin; images that are broken are left out of the next.
      bounds: `(low, high)`, what pixels may be: numbers, or arrays that broadcast against an
        image. None for anything.
      batch: how many images at a time. For progress in the log, call with a part of the images
        at a time, of one size: nothing is compiled again.

    Returns:
      Points within the ball, measured in float64, and within the bounds: each step ends at the
      point of both that is nearest to it. Not for use under `jax.jit`.

    Raises:
      TypeError: images are not float32 or float64, or labels no whole numbers.
      ValueError: shapes do not fit, a number is out of its range, images are out of bounds, or
        logits or gradients are not finite, so that an attack would be blind.

    Examples:
      >>> key, x, labels = jax.random.key(0), jnp.eye(2), jnp.arange(2)
      >>> pgd(lambda x: x, x, labels, 0.1, key=key).accuracy
      1.0
    """
    for name, count in {"steps": steps, "restarts": restarts, "batch": batch}.items():
        check_number(f"pgd: {name}", count, within="[1, inf)", whole=True)
    x, labels, radius = _checked(x, labels, radius)
    limits = None if bounds is None else _limits(x, bounds)
    f, size = f if isinstance(f, Partial) else Partial(f), min(batch, len(x))
    logits = _clean_logits(f, x, labels, size)
    own = np.arange(logits.shape[1]) == labels[:, None]
    margin = logits[own] - np.max(np.where(own, -np.inf, logits), axis=1)
    # The ball is that of the points as they are rounded, and lengths are sums of so many squares.
    short = jax.dtypes.canonicalize_dtype(x.dtype)  # float32 unless JAX computes in float64
    eps, flat = float(np.finfo(short).eps), x.reshape(len(x), -1)
    reach = (1 - eps * (16 + flat.shape[1] ** 0.5)) * radius - eps * np.linalg.norm(flat, axis=1)
    reach = np.maximum(reach, 0).astype(short)
    unit = np.maximum(margin / _SHARPNESS, 1e-3 * np.std(logits, axis=1)).astype(short)
    unit = np.where(unit > 0, unit, 1)

    points, most = x.copy(), np.full(len(x), -np.inf)
    robust = np.argmax(logits, axis=1) == labels
    for restart in range(restarts):
        start = jax.random.fold_in(key, restart)
        for chunk, rows in _chunks(np.flatnonzero(robust & (reach > 0)), size):
            keys = jax.vmap(jax.random.fold_in, (None, 0))(start, rows) if restart else None
            given = x[rows], labels[rows], unit[rows], reach[rows]
            found = _climb(f, *given, limits, keys, steps=steps)
            place, lead, finite = (np.asarray(part)[: len(chunk)] for part in found)
            if not finite.all():
                raise ValueError(
                    f"pgd: the gradient of the logits is not finite near {np.sum(~finite)} images,"
                    f" such as number {chunk[~finite][0]}: an attack would be blind there. A square"
                    " root at zero is a common cause"
                )
            place = place.astype(x.dtype)
            if limits is not None:  # they may lie between two numbers of float32
                place = np.clip(place, *limits)
            away = (place.astype(np.float64) - x[chunk]).reshape(len(chunk), -1)
            better = (np.linalg.norm(away, axis=1) <= radius[chunk]) & (lead > most[chunk])
            kept = chunk[better]
            points[kept], most[kept] = place[better], lead[better]
            robust[kept] &= lead[better] <= 0
    return AttackResult(points, robust)


@functools.partial(jax.jit, static_argnames="steps")
def _climb(f, x, labels, unit, reach, limits, keys, *, steps):
    """Return each image's best point, its lead, and whether all gradients were finite.

    The start is the image itself, or a random point of its sphere where there are `keys`.
    """
    ndim = x.ndim - 1

    def height(point):
        logits = f(point).astype(point.dtype)
        own = jnp.arange(logits.shape[1]) == labels[:, None]
        label = jnp.sum(jnp.where(own, logits, 0), axis=1)
        relative = (logits - label[:, None]) / unit[:, None]
        lead = jnp.max(jnp.where(own, -jnp.inf, logits), axis=1) - label
        return jnp.sum(jax.nn.logsumexp(relative, axis=1, where=~own)), lead

    def step(_, carry):
        point, best, most, finite = carry
        grad, lead = jax.grad(height, has_aux=True)(point)
        uphill = normalize(grad, ndim)
        finite &= jnp.all(jnp.isfinite(uphill), axis=tuple(range(1, x.ndim)))
        best = jnp.where(expand_trailing(lead > most, ndim), point, best)
        point = _nearest(x, point - x + length * uphill, reach, limits)
        return point, best, jnp.fmax(lead, most), finite

    length, start = expand_trailing(2.5 * reach / steps, ndim), x
    if keys is not None:
        drawn = jax.vmap(lambda key: jax.random.normal(key, x.shape[1:], x.dtype))(keys)
        start = _nearest(x, expand_trailing(reach, ndim) * normalize(drawn, ndim), reach, limits)
    most = jnp.full(len(x), -jnp.inf, x.dtype)
    carry = (start, x, most, jnp.ones(len(x), bool))
    return jax.lax.fori_loop(0, steps + 1, step, carry)[1:]


def _nearest(x: Array, move: Array, reach: Array, limits: Any) -> Array:
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


def _chunks(pool: np.ndarray, size: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Parts of the pool, and each filled up to one size, for which the program is compiled."""
    parts = (pool[begin : begin + size] for begin in range(0, len(pool), size))
    return [(part, np.resize(part, size)) for part in parts]


def _checked(x: Any, labels: Any, radius: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return images, labels, and a radius for each image."""
    x, labels, radius = np.asarray(x), np.asarray(labels), np.asarray(radius, np.float64)
    if x.dtype not in (np.float32, np.float64):
        raise TypeError(f"pgd: images must be float32 or float64; got {x.dtype}")
    if not np.issubdtype(labels.dtype, np.integer):
        raise TypeError(f"pgd: labels must be whole numbers; got {labels.dtype}")
    if x.ndim < 2 or not len(x) or labels.shape != x.shape[:1]:
        raise ValueError(
            f"pgd: images (n, ...), one or more, go with labels (n,); got shapes {x.shape} and"
            f" {labels.shape}"
        )
    if radius.shape not in ((), x.shape[:1]) or not (np.isfinite(radius) & (radius >= 0)).all():
        raise ValueError(
            f"pgd: radius must be a finite number >= 0, or one for each image; got {radius!r}"
        )
    return x, labels, np.broadcast_to(radius, x.shape[:1])


def _limits(x: np.ndarray, bounds: Any) -> tuple[np.ndarray, np.ndarray]:
    low, high = (np.broadcast_to(np.asarray(b, x.dtype), x.shape[1:]) for b in bounds)
    if outside := np.sum(~((x >= low) & (x <= high))):
        raise ValueError(
            f"pgd: {outside} of {x.size} entries of the images are not within bounds={bounds!r};"
            " give the bounds in the unit of the images"
        )
    return low, high


def _clean_logits(f: Partial, x: np.ndarray, labels: np.ndarray, size: int) -> np.ndarray:
    """Return the logits of the images themselves."""
    parts = [(chunk, _logits(f, x[rows])) for chunk, rows in _chunks(np.arange(len(x)), size)]
    for _, part in parts:
        if part.ndim != 2 or part.shape[0] != size or part.shape[1] < 2:
            raise ValueError(
                "pgd: f must give logits (n, classes), two classes or more; from"
                f" {(size, *x.shape[1:])} it gave {part.shape}"
            )
    logits = np.concatenate([np.asarray(part)[: len(chunk)] for chunk, part in parts])
    if not np.isfinite(logits).all():
        raise ValueError("pgd: f gives logits that are not finite at the images themselves")
    if labels.min() < 0 or labels.max() >= logits.shape[1]:
        raise ValueError(
            f"pgd: labels must be from 0 to {logits.shape[1] - 1}, the last of f's classes; got"
            f" {labels.min()} to {labels.max()}"
        )
    return logits


@jax.jit
def _logits(f: Partial, x: Array) -> Array:
    return f(x)
