"""Attack in the Euclidean norm: an upper bound on the certifiable accuracy."""

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
from manifoldmuon._internal.matrices.arrays import expand_trailing, frobenius_norm, nonzero_or_one
from manifoldmuon._internal.matrices.powers_of_two import normalize

_SHARPNESS = 8.0  # an image's margin, in the unit of its scaled logits
_NEWTON_STEPS = 5  # per projection: four reach rounding for images of 784 pixels

Logits = Callable[[Array], Array]
"""A function from images `(n, ...)` to logits `(n, classes)`."""


@dataclasses.dataclass(frozen=True)
class AttackResult:
    """Result of an attack.

    Attributes:
      points: `(n, ...)`, in the dtype of the images: for each image, the tried point of its ball
        with the largest lead of another label over the image's own. Images that are misclassified,
        or have no ball, are returned unchanged.
      robust: `(n,)`: whether the label is right at the image and at all tried points.

    Examples:
      >>> found = pgd(lambda x: x, jnp.eye(2), jnp.arange(2), 0.1, key=jax.random.key(0))
      >>> found.robust.tolist()
      [True, True]
    """

    points: Float[np.ndarray, "n ..."]
    robust: Bool[np.ndarray, " n"]

    @property
    def accuracy(self) -> float:
        """The share of robust images, an upper bound on any certified accuracy."""
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
    """Attack by projected gradient ascent on the cross-entropy, in l2 (PGD, arXiv:1706.06083).

    The method of Madry et al.: steps of length `2.5 radius / steps` along the gradient, from the
    image in the first restart, from random points of the sphere around it in later restarts. The
    objective is `logsumexp(other logits) - logits[label]`: it grows with the cross-entropy, and its
    gradient does not vanish where the network is sure. Logits are divided by an eighth of the
    image's margin, so that their scale does not matter: the small logits of a 1-Lipschitz network
    would otherwise let all classes pull at once. Where the gradient is zero, as it is
    through `jnp.round`, the attack makes no progress and gives no warning.

    Not for use under `jax.jit`.

    Args:
      f: JAX function from images `(n, ...)` to logits `(n, classes)`, each image independent of the
        others. It is compiled once per function object; to attack a network with other weights
        without recompiling, give `jax.tree_util.Partial(net.apply, params)`.
      x: the images, `(n, ...)`, float32 or float64. The gradients of float64 images are computed in
        float32 unless JAX runs in float64.
      labels: `(n,)` whole numbers, the true classes.
      radius: the largest Euclidean length of a movement, in the unit of `x` and over all axes but
        the first: a number, or `(n,)` for a radius per image.
      key: a JAX random key. Images have independent random numbers, so that results do not depend
        on `batch`, up to rounding.
      steps: steps per restart.
      restarts: number of starts; images broken by a start are left out of later starts.
      bounds: `(low, high)`, the range of pixels: numbers, or arrays that broadcast against an
        image. None for no bounds.
      batch: number of images per compiled call. To log progress, call `pgd` on parts of the images
        of equal size: nothing is recompiled.

    Returns:
      Points within the ball, measured in float64, and within the bounds.

    Raises:
      TypeError: images are not float32 or float64, or labels not whole numbers.
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
    # Shrink the ball by the rounding of points, and of lengths as sums of many squares.
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
            if limits is not None:  # float32 may not represent the limits
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

    Start at the image, or at a random point of its sphere if `keys` are given.
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
    """Project `x + move` onto the ball around `x` and the limits.

    The projection is `clip(x + s * move)` for the largest s up to 1 that stays in the ball. The
    squared length of this movement is concave and piecewise linear in `s**2`, so that Newton's
    method approaches the solution from below, and every iterate is in the ball.
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
    """Split the pool; return each part with a copy padded to the compiled batch size."""
    parts = (pool[begin : begin + size] for begin in range(0, len(pool), size))
    return [(part, np.resize(part, size)) for part in parts]


def _checked(x: Any, labels: Any, radius: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return images, labels and a radius per image as NumPy arrays, or raise."""
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
    """Return the logits of the unperturbed images."""
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
