"""Attacks in the Euclidean norm: upper bounds on what can be certified."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.tree_util import Partial
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from manifoldmuon._internal.arguments import check_number
from manifoldmuon.robustness._climbs import climb_by_apgd, climb_by_pgd, random_points

_SHARPNESS = 8.0  # units of logits in the margin of an image

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
    that their scale does not matter. At their own scale the small logits of a 1-Lipschitz network
    let all classes pull at once: 68 % of random images withstood 20 steps on random orthonormal
    layers, 53 % with that unit, and 51 % `auto_attack`. Where the gradient is zero, as behind
    rounded numbers, an attack sees nothing, and says nothing of it.

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
        do not depend on `batch`, but for rounding.
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
    images = _prepare("pgd", f, x, labels, radius, bounds, batch)
    _check_counts("pgd", steps=steps, restarts=restarts, batch=batch)
    others = ~images.of_class(images.labels)
    runs = ((climb_by_pgd, others, restart > 0) for restart in range(restarts))
    return _attack(images, runs, steps, key, batch)


def auto_attack(
    f: Logits,
    x: ArrayLike,
    labels: ArrayLike,
    radius: ArrayLike,
    *,
    key: PRNGKeyArray,
    steps: int = 100,
    restarts: int = 1,
    targets: int = 9,
    bounds: tuple[ArrayLike, ArrayLike] | None = None,
    batch: int = 250,
) -> AttackResult:
    """Auto-PGD without and with targets, the white-box part of AutoAttack, in l2.

    Croce and Hein (arXiv:2003.01690): gradient ascent with momentum whose steps begin at twice the
    radius and are halved at checkpoints where they have stopped to pay, for each image by itself
    (algorithm 1); first away from the label, as in `pgd`, then towards each of the `targets`
    classes that the image is most likely taken for. Images that are broken leave the pool.

    The climb towards a target is of `logits[target] - logits[label]`. The paper divides that by
    differences of other logits, so that the scale of logits does not matter: here it does not,
    because steps have a length of their own. FAB and Square, the paper's other attacks, are not
    part of this.

    Args:
      f: see `pgd`.
      x: see `pgd`.
      labels: see `pgd`.
      radius: see `pgd`.
      key: see `pgd`.
      steps: how many gradients each run takes.
      restarts: how many runs without a target and towards each, all from random points of the
        sphere.
      targets: how many classes to go for, by their logits at the image; at most all others.
      bounds: see `pgd`.
      batch: see `pgd`.

    Returns:
      See `pgd`.

    Raises:
      TypeError: see `pgd`.
      ValueError: see `pgd`.

    Examples:
      >>> key, x, labels = jax.random.key(0), jnp.eye(2), jnp.arange(2)
      >>> auto_attack(lambda x: x, x, labels, 0.1, key=key, steps=10).accuracy
      1.0
    """
    images = _prepare("auto_attack", f, x, labels, radius, bounds, batch)
    _check_counts("auto_attack", steps=steps, restarts=restarts, batch=batch)
    _check_counts("auto_attack", least=0, targets=targets)
    own = images.of_class(images.labels)
    ranked = np.argsort(np.where(own, -np.inf, images.logits), axis=1)[:, ::-1]
    chosen = [ranked[:, rank] for rank in range(min(targets, ranked.shape[1] - 1))]
    rivals = [~own, *map(images.of_class, chosen)]
    runs = ((climb_by_apgd, mask, True) for mask in rivals for _ in range(restarts))
    return _attack(images, runs, steps, key, batch)


class _Images(NamedTuple):
    """The images of an attack, on the host.

    `reach` is the radius with room for rounding, `unit` the unit in which logits are read.
    """

    f: Partial
    x: np.ndarray
    labels: np.ndarray
    radius: np.ndarray
    reach: np.ndarray
    limits: tuple[np.ndarray, np.ndarray] | None
    logits: np.ndarray
    unit: np.ndarray

    def of_class(self, labels: np.ndarray) -> np.ndarray:
        """`(n, classes)`, True at one class of each image."""
        return np.arange(self.logits.shape[1]) == labels[:, None]


# A climb, the classes that it goes for, and whether it starts from random points.
_Run = tuple[Callable[..., Any], np.ndarray, bool]


def _attack(
    images: _Images, runs: Iterable[_Run], steps: int, key: PRNGKeyArray, batch: int
) -> AttackResult:
    points, robust = images.x.copy(), np.argmax(images.logits, axis=1) == images.labels
    most = np.full(len(points), -np.inf)
    for count, (climb, rivals, scattered) in enumerate(runs):
        run_key = jax.random.fold_in(key, count)
        pool = np.flatnonzero(robust & (images.reach > 0))
        for chunk, rows in _chunks(pool, min(batch, len(points))):
            keys = jax.vmap(jax.random.fold_in, (None, 0))(run_key, rows)
            x, reach = images.x[rows], images.reach[rows]
            start = random_points(keys, x, reach, images.limits) if scattered else x
            ask = images.labels[rows], rivals[rows], images.unit[rows]
            found = climb(images.f, x, *ask, start, reach, images.limits, steps=steps)
            place, lead, finite = (np.asarray(part)[: len(chunk)] for part in found)
            if not finite.all():
                raise ValueError(
                    f"the gradient of the logits is not finite near {np.sum(~finite)} images, such"
                    f" as number {chunk[~finite][0]}: an attack would be blind there. A square"
                    " root at zero is a common cause"
                )
            place = place.astype(points.dtype)
            if images.limits is not None:  # they may lie between two numbers of float32
                place = np.clip(place, *images.limits)
            away = (place.astype(np.float64) - images.x[chunk]).reshape(len(chunk), -1)
            inside = np.linalg.norm(away, axis=1) <= images.radius[chunk]
            better = inside & (lead > most[chunk])
            kept = chunk[better]
            points[kept], most[kept] = place[better], lead[better]
            robust[kept] &= lead[better] <= 0
    return AttackResult(points, robust)


def _chunks(pool: np.ndarray, size: int) -> Iterable[tuple[np.ndarray, np.ndarray]]:
    """Parts of the pool, and each filled up to one size, for which the program is compiled."""
    for begin in range(0, len(pool), size):
        chunk = pool[begin : begin + size]
        yield chunk, np.resize(chunk, size)


def _prepare(
    name: str, f: Logits, x: Any, labels: Any, radius: Any, bounds: Any, batch: int
) -> _Images:
    x, labels = np.asarray(x), np.asarray(labels)
    if x.dtype not in (np.float32, np.float64):
        raise TypeError(f"{name}: images must be float32 or float64; got {x.dtype}")
    if not np.issubdtype(labels.dtype, np.integer):
        raise TypeError(f"{name}: labels must be whole numbers; got {labels.dtype}")
    if x.ndim < 2 or not len(x) or labels.shape != x.shape[:1]:
        raise ValueError(
            f"{name}: images (n, ...), one or more, go with labels (n,); got shapes {x.shape} and"
            f" {labels.shape}"
        )
    radius = np.asarray(radius, np.float64)
    if radius.shape not in ((), x.shape[:1]) or not (np.isfinite(radius) & (radius >= 0)).all():
        raise ValueError(
            f"{name}: radius must be a finite number >= 0, or one for each image; got {radius!r}"
        )
    limits = None if bounds is None else _limits(name, x, bounds)
    f = f if isinstance(f, Partial) else Partial(f)
    logits = _clean_logits(name, f, x, labels, batch)
    radius = np.broadcast_to(radius, x.shape[:1])
    # The ball is that of the points as they are rounded, and lengths are sums of so many squares.
    short = jax.dtypes.canonicalize_dtype(x.dtype)  # float32 unless JAX computes in float64
    eps, flat = float(np.finfo(short).eps), x.reshape(len(x), -1)
    reach = (1 - eps * (16 + flat.shape[1] ** 0.5)) * radius - eps * np.linalg.norm(flat, axis=1)
    reach = np.maximum(reach, 0).astype(short)
    own = np.arange(logits.shape[1]) == labels[:, None]
    margin = logits[own] - np.max(np.where(own, -np.inf, logits), axis=1)
    unit = np.maximum(margin / _SHARPNESS, 1e-3 * np.std(logits, axis=1)).astype(short)
    unit = np.where(unit > 0, unit, 1)
    return _Images(f, x, labels, radius, reach, limits, logits, unit)


def _limits(name: str, x: np.ndarray, bounds: Any) -> tuple[np.ndarray, np.ndarray]:
    low, high = (np.broadcast_to(np.asarray(b, x.dtype), x.shape[1:]) for b in bounds)
    outside = np.sum(~((x >= low) & (x <= high)))
    if outside:
        raise ValueError(
            f"{name}: {outside} of {x.size} entries of the images are not within bounds={bounds!r};"
            " give the bounds in the unit of the images"
        )
    return low, high


def _clean_logits(name: str, f: Partial, x: np.ndarray, labels: np.ndarray, batch: int):
    _check_counts(name, batch=batch)
    size = min(batch, len(x))
    parts = [(chunk, _logits(f, x[rows])) for chunk, rows in _chunks(np.arange(len(x)), size)]
    for _, part in parts:
        if part.ndim != 2 or part.shape[0] != size or part.shape[1] < 2:
            raise ValueError(
                f"{name}: f must give logits (n, classes), two classes or more; from"
                f" {(size, *x.shape[1:])} it gave {part.shape}"
            )
    logits = np.concatenate([np.asarray(part)[: len(chunk)] for chunk, part in parts])
    if not np.isfinite(logits).all():
        raise ValueError(f"{name}: f gives logits that are not finite at the images themselves")
    if labels.min() < 0 or labels.max() >= logits.shape[1]:
        raise ValueError(
            f"{name}: labels must be from 0 to {logits.shape[1] - 1}, the last of f's classes; got"
            f" {labels.min()} to {labels.max()}"
        )
    return logits


@jax.jit
def _logits(f: Partial, x: Array) -> Array:
    return f(x)


def _check_counts(name: str, least: int = 1, **counts: int) -> None:
    for which, count in counts.items():
        check_number(f"{name}: {which}", count, float(least), whole=True)
