"""Check an implementation of a manifold against the laws of `Manifold`."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from manifoldmuon.manifolds import Manifold
from manifoldmuon.testing import _direction_laws
from manifoldmuon.testing._assertions import (
    agree,
    at_most,
    check_all,
    check_value_object,
    normal,
    require,
    same_tree_of_shapes,
    wide,
    with_nan,
)
from manifoldmuon.testing._checked_manifold import (
    CheckedManifold,
    Results,
    ask_manifold,
    jitted,
    max_size,
)
from manifoldmuon.testing._meshes import check_inside_shard_map


def check_manifold(
    manifold: Manifold,
    shape: tuple[int, ...],
    key: PRNGKeyArray,
    tolerance: float = 2e-5,
    gap: float = 1e-3,
    on_set: float = 2e-6,
    overshoot: float = 1e-4,
    thorough: bool = True,
    dtype=jnp.float32,
    convex: bool = False,
    optimum: Callable[[np.ndarray, np.ndarray], float] | None = None,
    nearest: bool = True,
) -> None:
    """Check every law of `Manifold`, at a random point with random gradients.

    A manifold is hashable and holds no arrays: pass data, such as the matrix B of the constraint
    `W^T B W = I`, as a tuple of numbers, and check several B. Gradients, `project_tangent` and
    `steepest` keep the Frobenius inner product for any data; if `project` is nearest in another
    inner product, set `nearest=False`.

    Args:
      manifold: manifold to check.
      shape: shape of a point; may have leading axes.
      key: seeds the random arrays.
      tolerance: for float32 results, relative to their size.
      gap: largest gap of a direction allowed; depends on the solver's number of iterations. A gap
        that is too small shows only where the direction falls short: try few iterations, too.
      on_set: largest distance from the set allowed for projected, retracted and random points.
      overshoot: how far the norm of a direction may exceed 1, for approximations of msign.
      thorough: whether to run the slow checks too, each of which compiles or traces everything once
        more: from a warm start, `for_training()`, without `jax.jit`, under `jax.vmap`, in bfloat16,
        and inside of `jax.shard_map`.
      dtype: float32, or float64 under `jax.enable_x64(True)`.
      convex: whether the set is convex with a boundary. A projection may then lie on the boundary,
        where `x - project(x)` makes an obtuse angle with the whole set, but need not be normal.
      optimum: function of a point and a gradient, for shapes without leading axes: the largest
        `<grad, a>` over tangent directions of norm 1, for instance by a convex solver in float64.
        Gaps are checked against it and against feasible directions. None: against feasible
        directions alone, the best within a few percent of the optimum.
      nearest: whether `project(x)` is the nearest point of the set to `x`, in the Frobenius norm;
        False: any point of the set.

    Raises:
      AssertionError: laws are broken; a line for each has its number in `Manifold`, its name and
        the size of the violation.

    Examples:
      >>> sphere = mm.manifolds.Hypersphere()
      >>> check_manifold(sphere, (3, 5), jax.random.key(0), thorough=False)
    """
    check_value_object(manifold)
    grad, vector, other = (x.astype(dtype) for x in normal(key, shape, 3))
    draw = jitted(lambda k: manifold.random_point(k, shape, dtype))
    ask = jitted(lambda *arrays: ask_manifold(manifold, *arrays))
    limits = tolerance, gap, on_set, overshoot, convex, optimum, nearest
    drawn = draw(key), grad, vector, other
    case = CheckedManifold(manifold, shape, key, draw, ask, *drawn, *limits)
    check_all(
        (*MANIFOLD_LAWS, *(SLOW_MANIFOLD_LAWS if thorough else ())),
        "the docstring of `Manifold`",
        case,
    )


def _agree_all(law: str, actual: Results, expected: Results, case: CheckedManifold) -> None:
    # Gaps and distances are small numbers, with the rounding noise of the direction.
    directions = ("projected", "tangent", "size", "direction", "direction_size", "moved")
    for name in (*directions, "gap", "distance"):
        case.agree(f"{law} ({name})", getattr(actual, name), getattr(expected, name))


def _check_shapes(case: CheckedManifold) -> None:
    case.manifold.check_shape(case.shape)
    try:
        case.manifold.check_shape(case.shape[:0])
    except ValueError:
        pass
    else:
        # Only a flat space of scalars takes scalars.
        require("check_shape refuses a shape without axes", case.manifold.ndim == 0)
    results = case.ask(case.point, case.grad, case.vector)
    for name in ("projected", "tangent", "direction", "moved"):
        shape = np.shape(getattr(results, name))
        require(f"{name} keeps the shape", shape == case.shape, f"{shape} for {case.shape}")
    copies = case.shape[: len(case.shape) - case.manifold.ndim]
    for name in ("gap", "residual", "distance", "size", "direction_size"):
        shape = np.shape(getattr(results, name))
        require(f"{name} has one number per point", shape == copies, f"{shape} for {copies}")
    # The dual is carried through jax.lax.scan and stored in checkpoints.
    cold = jax.eval_shape(lambda: case.manifold.init_dual(case.shape))
    same_tree_of_shapes("init_dual has the structure of the dual", results.dual, cold)


def _check_the_set(case: CheckedManifold) -> None:
    results = case.ask(case.point, case.grad, case.vector)
    at_most("a random point is on the set", results.distance, case.on_set)
    require(
        "random_point depends on its key alone", bool(np.all(case.draw(case.key) == case.point))
    )
    projected = results.projected
    at_most("project lands on the set", case.distance(projected), case.on_set)
    case.agree("project is idempotent", case.project(projected), projected)
    away = case.vector - projected
    if not case.nearest:
        pass
    elif case.convex:
        for point in (case.point, case.project(case.other)):
            angle = case.inner(away, point - projected)
            law = "x - project(x) leads away from all of a convex set"
            at_most(law, angle, 0, 10 * case.tolerance * float(np.linalg.norm(wide(away))))
    else:
        rest = case.project_tangent(projected, away)
        law = "x - project(x) is normal to the set"
        case.agree(law, rest, np.zeros(case.shape), 10.0)
    near = np.sum((wide(case.vector) - wide(projected)) ** 2)
    far = np.sum((wide(case.vector) - wide(case.point)) ** 2)
    # A point that rounding moves by a share e of its size s is farther by up to 2 e s sqrt(near).
    rounding = case.on_set * (near + float(np.sum(wide(projected) ** 2)))
    at_most("project finds the nearest point", near, far if case.nearest else np.inf, rounding)
    if not case.manifold.constrained:
        return
    if np.any(case.project_tangent(case.point, case.vector)):
        keys = [jax.random.fold_in(case.key, i) for i in range(8)]
        law = "random_point differs from key to key"
        require(law, not all(np.array_equal(case.draw(key), case.point) for key in keys))
    # 10 % off the set: `distance` is at least an eighth of the distance to the projection.
    step = 0.1 * case.vector * np.sqrt(np.mean(wide(case.point) ** 2))
    axes = tuple(range(-case.manifold.ndim, 0))
    for where, off in (
        ("p + v", case.point + step),
        ("p - v", case.point - step),
        ("1.1 p", 1.1 * case.point),
        ("0.9 p", 0.9 * case.point),
        ("-p", -case.point),
    ):
        off = off.astype(case.point.dtype)
        nearest = case.project(off)
        missed, size = (np.sqrt(np.sum(wide(x) ** 2, axis=axes)) for x in (off - nearest, nearest))
        law = f"distance sees how far a point is from project(point), at {where}"
        at_most(law, missed / size / 8, case.distance(off), case.on_set)


def _check_random_points(case: CheckedManifold) -> None:
    """Check that random points leave out no half of the set."""
    point, law = case.point, "random_point leaves out no half of the set"
    size = np.sqrt(np.mean(wide(point) ** 2)) if point.size else 0.0
    change = case.project((point + 0.01 * size * case.vector).astype(point.dtype)) - point
    hidden = change - case.project_tangent(point, change)
    # On a quotient, whose tangent space lacks some directions, any representatives will do.
    if np.linalg.norm(hidden) >= max(0.1 * np.linalg.norm(change), 1e-3 * np.linalg.norm(point)):
        return
    draws = np.stack([wide(case.draw(key)) for key in jax.random.split(case.key, 256)])
    vectors = normal(jax.random.fold_in(case.key, 1), case.shape, 16)
    others = np.stack([case.project(vector.astype(point.dtype)) for vector in vectors])
    for drawn, other in zip(_features(draws), _features(others), strict=True):
        sides = [np.sum(sign * other > 0, axis=0) for sign in (-1, 1)]
        one_sided = np.all(drawn > 0, axis=0) | np.all(drawn < 0, axis=0)
        # A side with a 20th of the points is left out by chance once in 1e8.
        require(law, not np.any(one_sided & (np.minimum(*sides) >= 4)), "one sign alone")
    if max_size(case.distance(-others[0])) > 10 * case.on_set:
        return
    # The set is symmetric, so the mean of uniform points vanishes. Laurent and Massart 2000,
    # Lemma 1: a square of the mean above this bound has the probability exp(-16).
    flat = draws.reshape(len(draws), -1)
    values = np.linalg.svd(flat / np.sqrt(len(flat)), compute_uv=False) ** 2
    bound = np.sum(values) + 8 * np.sqrt(np.sum(values**2)) + 32 * np.max(values)
    at_most(law, len(flat) * np.sum(np.mean(flat, axis=0) ** 2), bound)


def _features(points: np.ndarray) -> list[np.ndarray]:
    """Return entries, and determinants of square matrices: numbers whose signs divide a set."""
    square = points.ndim > 2 and points.shape[-1] == points.shape[-2]
    return [points, *([np.linalg.det(wide(points))] if square else [])]


def _check_boundary(case: CheckedManifold) -> None:
    """Check that tangent spaces are linear, unless the set has a boundary."""
    if case.manifold.has_boundary or not case.manifold.constrained:
        return
    edge = case.project(10 * case.other)
    back, forth = (case.project_tangent(edge, sign * case.vector) for sign in (-1.0, 1.0))
    case.agree("project_tangent is linear where has_boundary is False", back, -forth)


def _check_fast(case: CheckedManifold) -> None:
    """Check that `for_training()` keeps the set and the norm, and that its gap is true."""
    fast = case.manifold.for_training()
    if fast == case.manifold or not case.point.size:
        return

    def ask(point, grad):
        result = fast.steepest(point, grad, fast.init_dual(point.shape))
        return fast.project(point), fast.norm.norm(grad), result.direction, result.gap

    moved, norm, direction, gap = jitted(ask)(case.point, case.grad)
    size = max(float(np.max(np.abs(case.point))), 1e-30)
    agree("for_training() keeps the set", moved / size, case.point / size, 2e-2)
    exact = case.ask(case.point, case.grad, case.grad)
    agree("for_training() keeps the norm", norm / exact.size, np.ones_like(norm), 2e-2)
    law = "norm(direction) <= 1, of for_training()"
    at_most(law, case.norm(direction), 1 + max(case.overshoot, 2e-2))
    # Only one side: for_training() may leave a boundary to the retraction.
    axes = tuple(range(-case.manifold.ndim, 0))
    gains = [np.sum(wide(case.grad) * wide(x), axis=axes) for x in (exact.direction, direction)]
    at_most("the gap is a true bound, of for_training()", (1 - gap) * gains[0], gains[1], 1e-4)


def _check_tangent_space(case: CheckedManifold) -> None:
    first, second = (case.project_tangent(case.point, x) for x in (case.vector, case.other))
    case.agree("project_tangent is idempotent", case.project_tangent(case.point, first), first)
    case.agree(
        "project_tangent is linear",
        case.project_tangent(case.point, 2.0 * case.vector - 3.0 * case.other),
        2.0 * first - 3.0 * second,
    )
    case.agree(
        "project_tangent is self-adjoint, so that it projects orthogonally",
        case.inner(first, case.other),
        case.inner(case.vector, second),
    )
    _direction_laws.check_stays_near("tangent", case, first)


def _check_zero(case: CheckedManifold) -> None:
    zero = np.zeros_like(case.point)
    results = case.ask(case.point, zero, zero)
    require("a zero gradient gives a zero direction", bool(np.all(results.direction == 0)))
    require("a zero gradient has gap 0", bool(np.all(results.gap == 0)))
    require("a zero gradient has residual 0", bool(np.all(results.residual == 0)))
    require("retract(p, 0) == p, bit for bit", bool(np.all(results.moved == case.point)))
    nowhere = case.ask(zero, zero, zero)
    require("a zero point stays where it is", bool(np.all(nowhere.moved == 0)))
    at_most("project takes zero to the set", case.distance(nowhere.projected), case.on_set)


def _check_retraction(case: CheckedManifold) -> None:
    vector, retract = case.unit(case.project_tangent(case.point, case.vector)), case.retract
    for t in (0.01, 0.1, 1.0):
        away = case.distance(retract(case.point, t * vector))
        at_most(f"retract lands on the set at t = {t:g}", away, case.on_set)
    t = 1e-2
    # A central difference, with an error of t**2 for a smooth curve and of rounding / t.
    slope = (retract(case.point, t * vector) - retract(case.point, -t * vector)) / (2 * t)
    size = max(np.max(np.abs(vector)), 1e-30)
    agree("d/dt retract(p, t v) at 0 is v", slope / size, vector / size, 2e-3)


def _check_unconstrained(case: CheckedManifold) -> None:
    if case.manifold.constrained:
        return
    results = case.ask(case.point, case.grad, case.vector)
    law = "an unconstrained project changes nothing"
    require(law, bool(np.all(results.projected == case.vector)))
    law = "an unconstrained tangent changes nothing"
    require(law, bool(np.all(results.tangent == case.vector)))
    case.agree("an unconstrained retract adds", results.moved, case.point + case.vector)
    elsewhere = case.ask(case.other, case.grad, case.vector).direction
    case.agree("free space: a direction has no point", elsewhere, results.direction)


def _check_copies(case: CheckedManifold) -> None:
    """Check that a stack agrees with a loop, even if a copy is NaN or zero."""
    corrupted, second = with_nan(case.grad), case.project(case.other)
    points = np.stack([*[case.point] * 3, second, case.point, with_nan(case.point)])
    # Not parallel to the points: several directions could be steepest, and rounding would choose.
    grads = np.stack(
        [case.grad, corrupted, np.zeros_like(case.grad), 1e20 * case.vector, case.other, case.grad]
    )
    # A copy with a zero step, or already on the set, must not stop the others.
    still = np.zeros_like(case.vector)
    # Near the points: where the nearest point is hardly unique, rounding would choose it.
    near, other = case.point + case.unit(case.vector) / 2, second + case.unit(case.grad) / 2
    vectors = [near, corrupted, still, other, case.point, case.vector]
    vectors = np.stack([vector.astype(case.point.dtype) for vector in vectors])
    stacked = case.ask(points, grads, vectors)
    pick = lambda tree, index: jax.tree.map(lambda x: x[index], tree)  # noqa: E731
    for index in (0, 2, 3, 4):
        alone = case.ask(points[index], grads[index], vectors[index])
        _agree_all("stack = loop", pick(stacked, index), alone, case)
    bad = pick(stacked, 1)
    for name in ("projected", "direction", "gap", "tangent", "moved"):
        require(f"a NaN stays visible ({name})", bool(np.any(np.isnan(getattr(bad, name)))))
    if case.manifold.constrained:
        seen = bool(np.any(np.isnan(pick(stacked, 5).distance)))
        require("a NaN in a point stays visible (distance)", seen)


def _check_eager(case: CheckedManifold) -> None:
    compiled = case.ask(case.point, case.grad, case.vector)
    arrays = [jnp.asarray(x) for x in (case.point, case.grad, compiled.tangent)]
    point, grad, tangent = arrays
    result = case.manifold.steepest(point, grad, case.manifold.init_dual(case.shape))
    case.agree("jit = eager (direction)", compiled.direction, result.direction)
    case.agree("jit = eager (gap)", compiled.gap, result.gap)
    moved = case.manifold.retract(point, tangent)
    case.agree("jit = eager (moved)", case.retract(case.point, compiled.tangent), moved)


def _check_vmap(case: CheckedManifold) -> None:
    points, grads = np.stack([case.point] * 2), np.stack([case.grad, case.other])
    near = (case.point + case.unit(case.vector) / 2).astype(case.point.dtype)
    vectors = np.stack([near, case.vector])
    stacked = jitted(jax.vmap(functools.partial(ask_manifold, case.manifold)))
    results = stacked(points, grads, vectors)
    for index in range(2):
        alone = case.ask(points[index], grads[index], vectors[index])
        _agree_all("vmap = loop", jax.tree.map(lambda x, i=index: x[i], results), alone, case)


def _check_shard_map(case: CheckedManifold) -> None:
    def ask(point, grad):
        return ask_manifold(case.manifold, point, grad, grad)

    check_inside_shard_map(ask, case.point, case.grad)


def _check_dtypes(case: CheckedManifold) -> None:
    short = jax.ShapeDtypeStruct(case.shape, jnp.bfloat16)
    results = jax.eval_shape(lambda *x: ask_manifold(case.manifold, *x), short, short, short)
    for name in ("projected", "tangent", "direction", "moved"):
        dtype = getattr(results, name).dtype
        require(f"dtype in = dtype out ({name})", dtype == jnp.bfloat16, str(dtype))
    for name in ("residual", "gap", "distance"):
        dtype = getattr(results, name).dtype
        require(f"{name} is float32 or wider", dtype == jnp.float32, str(dtype))
    drawn = jax.eval_shape(lambda: case.manifold.random_point(case.key, case.shape, jnp.bfloat16))
    require("random_point has the dtype asked for", drawn.dtype == jnp.bfloat16)
    require("random_point has the shape asked for", drawn.shape == case.shape)


def _check_short_dtype(case: CheckedManifold) -> None:
    short = [x.astype(jnp.bfloat16) for x in (case.point, case.grad, case.vector)]
    results = case.ask(*short)
    rounded = case.ask(*(x.astype(np.float32) for x in short))
    for name in ("projected", "tangent", "direction", "moved"):
        exact = getattr(rounded, name)
        size = max(np.max(np.abs(exact)), 1e-30)
        law = f"bf16: float32 arithmetic ({name})"
        agree(law, wide(getattr(results, name)) / size, exact / size, 2.0**-7)
    agree("bf16: float32 arithmetic (distance)", results.distance, rounded.distance, 1e-5)
    drawn = jitted(lambda k: case.manifold.random_point(k, case.shape, jnp.bfloat16))(case.key)
    # Rounding moves an entry by 2**-9 of itself, and a point is at most sqrt(entries) scales long.
    entries = np.prod(case.shape[len(case.shape) - case.manifold.ndim :])
    away = jitted(case.manifold.distance)(drawn)
    at_most("bf16: a random point is on the set", away, 2.0**-8 * np.sqrt(entries))


MANIFOLD_LAWS = (
    (1, _check_shapes),
    (1, _check_dtypes),
    (2, _check_the_set),
    (2, _check_random_points),
    (3, _check_tangent_space),
    (3, _check_boundary),
    (4, _direction_laws.check_steepest),
    (4, _direction_laws.check_scale_invariance),
    (4, _direction_laws.check_nearly_normal),
    (5, _check_zero),
    (6, _check_retraction),
    (7, _check_copies),
    (8, _check_unconstrained),
)
SLOW_MANIFOLD_LAWS = (
    (1, _check_short_dtype),
    (2, _check_fast),
    (4, _direction_laws.check_warm),
    (7, _check_vmap),
    (7, _check_eager),
    (7, _check_shard_map),
)
