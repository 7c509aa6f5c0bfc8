"""Weights that start off their manifolds: refused by `init`, or moved there by the first update."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from manifoldmuon import manifolds
from manifoldmuon._internal import first_values
from manifoldmuon._internal.arguments import checked
from manifoldmuon._internal.compiling import compiler_options
from manifoldmuon._internal.matrices.arrays import (
    Squares,
    expand_trailing,
    frobenius_norm,
    identity_like,
    inner_product,
    largest,
    nonzero_or_one,
    product,
    tall,
    upcast,
)
from manifoldmuon._internal.meshes.mesh import match_varying_axes
from manifoldmuon._internal.scales import scale_of
from manifoldmuon._internal.trees.transformations import (
    Transformation,
    difference,
    gradient_transformation,
    kind_around,
)
from manifoldmuon.optim._execute import map_leaves
from manifoldmuon.optim._geometry import Geometry
from manifoldmuon.optim._plan import Weight, make_plan, plan_updates
from manifoldmuon.optim._trees import ADAPTERS, nearest_points

Start = tuple[str, manifolds.Entry, Any]
_FAR = 0.1
_FEW = 2**18  # numbers that NumPy measures faster than XLA compiles
_LARGEST_SIDE = 1024  # larger eigenvalue decompositions take seconds
_SHOWN = 5  # maximum number of parameters listed in an error


class StartOnState(NamedTuple):
    """State of `start_on`.

    Attributes:
      count: updates taken, int32, counted up to 2.
      inner: the wrapped transformation's state.
    """

    count: jax.Array
    inner: Any


@checked
def start_on(tx: optax.GradientTransformation, geometry: Geometry) -> Transformation:
    """Move weights to the nearest points of their manifolds in the first update.

    For trainers that make the weights themselves and have no hook for `project_tree`: `init`
    accepts weights off their manifolds, and the first update is the move to the nearest points
    together with the optimizer's first step from there (its gradient is of the weights as they
    were). In bfloat16 and float16 the second update projects again: a sum in these dtypes cannot
    reach a point from far away. Later updates are those of `tx`.

    Args:
      tx: a complete optimizer, such as `manifold_muon(0.02, geometry, rest=optax.adamw(3e-4))`. Its
        `init` and `update` see the nearest points in place of the weights.
      geometry: the manifold of each parameter; see `resolve_geometry`. Unconstrained parameters,
        and parameters with the entry None, start as they are.

    Examples:
      >>> sphere, params = mm.manifolds.Hypersphere(), jnp.array([0.0, 30.0])
      >>> tx = start_on(manifold_muon(0.1, sphere), sphere)
      >>> updates, _ = tx.update(jnp.array([1.0, 0.0]), tx.init(params), params)
      >>> [round(x, 2) for x in optax.apply_updates(params, updates).tolist()]
      [-0.1, 1.0]
    """
    inner = optax.with_extra_args_support(tx)

    def init_fn(params: Any) -> StartOnState:
        leaves = jax.tree.leaves(params)
        known = leaves and not any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves)
        points = nearest_points(geometry, params) if known else params
        with first_values.unchecked_values():
            return StartOnState(jnp.zeros((), jnp.int32), inner.init(points))

    def update_fn(updates, state, params=None, **extra_args):
        plan = plan_updates("start_on", geometry, updates, params, rest=True)
        leaves = plan.leaves(params)
        moving = {weight.index for weight in plan.weights if weight.manifold.constrained}
        before = {i: jnp.asarray(leaves[i]) for i in moving}

        def nearest(points: dict[int, jax.Array]) -> dict[int, jax.Array]:
            projected = plan.leaves(nearest_points(geometry, plan.fill(params, points)))
            return {i: projected[i] for i in moving}

        short = any(jnp.finfo(x.dtype).bits < 32 for x in before.values())
        is_new = state.count < (2 if short else 1)
        if isinstance(is_new, Tracer):
            points = jax.lax.cond(is_new, nearest, lambda points: points, before)
        else:  # eager `cond` compiles at every call
            points = nearest(before) if is_new else before
        updates, inner_state = inner.update(
            updates, state.inner, plan.fill(params, points), **extra_args
        )
        steps = plan.leaves(updates)
        differences = {
            i: jnp.where(is_new, difference(point + steps[i], before[i]), steps[i])
            for i, point in points.items()
        }
        count = jnp.minimum(state.count + 1, 2)
        return plan.fill(updates, differences), StartOnState(count, inner_state)

    def placeholder(params: Any) -> StartOnState:
        return StartOnState(jnp.zeros(()), inner.init(params))

    return gradient_transformation(update_fn, init_fn, placeholder, kind_around(tx))


@checked
def start_anywhere(tx: optax.GradientTransformation) -> Transformation:
    """Turn off the checks of first weights: `init` takes weights off their manifolds.

    Without them the first steps may be NaN. Use it where `init` must be free of callbacks, as for
    `jax.export`: inside `jax.jit` the checks of first weights are callbacks.

    Examples:
      >>> tx = start_anywhere(manifold_muon(0.1, mm.manifolds.Stiefel()))
      >>> state = tx.init(jnp.zeros((3, 2)))
    """

    def init_fn(params: Any) -> Any:
        with first_values.unchecked_values():
            return tx.init(params)

    update_fn = optax.with_extra_args_support(tx).update
    return gradient_transformation(update_fn, init_fn, tx.init, kind_around(tx))


def refuse_far(geometry: Geometry, params: Any) -> None:
    """Raise `ValueError` for parameters farther than 0.1 from their manifolds, or not finite.

    Inside `jax.jit` the compiled program raises when it runs; see `check_values`. Leaves out
    unconstrained, empty and abstract parameters, outside of jit arrays spread over several
    processes, and matrices with a shorter side above 1024 that need a decomposition. Rows of
    `EmbeddingRows` that are exactly zero (padding) do not count.
    """
    if not first_values.values_are_checked():
        return
    plan = make_plan(geometry, params)
    leaves, inside_jit = plan.leaves(params), first_values.is_traced()
    kinds: dict[Any, list[Start]] = {}  # compile once for all arrays on the same devices
    distances: dict[str, float] = {}
    traced: list[Start] = []
    known: list[Start] = []
    for weight in plan.weights:
        leaf = leaves[weight.index]
        if isinstance(leaf, jax.ShapeDtypeStruct) or not (
            weight.manifold.constrained and jnp.size(leaf)
        ):
            continue
        start = weight.path, weight.entry, weight.of(leaf)
        if inside_jit or isinstance(leaf, Tracer):
            if _edges(weight.manifold) or _is_small(weight, leaf):
                traced.append(start)
        elif not (_is_small(weight, leaf) and getattr(leaf, "is_fully_addressable", True)):
            continue
        else:
            known.append(start)
            if (
                jnp.size(leaf) <= _FEW
                and type(weight.manifold).distance is manifolds.Stiefel.distance
            ):
                matrices = weight.inward(np.asarray(start[2]))
                distances[weight.path] = _numpy_distance(weight.manifold, matrices)
            else:
                devices = leaf.devices() if isinstance(leaf, jax.Array) else ()
                kinds.setdefault(frozenset(devices), []).append(start)
    for kind in kinds.values():
        paths, entries, arrays = zip(*kind, strict=True)
        measure = _compiled_distances(**compiler_options(arrays, steps=1))
        sizes = jax.device_get(measure(entries, list(arrays)))
        distances |= dict(zip(paths, map(float, sizes), strict=True))
    # Read values only where an error is certain.
    zero = [_is_far(distances[path]) and not np.any(leaf) for path, _, leaf in known]
    _raise_if_far([p for p, *_ in known], *[distances[p] for p, *_ in known], *zero)
    if traced:
        paths, entries, leaves = zip(*traced, strict=True)
        arrays = [jax.lax.stop_gradient(jnp.asarray(leaf)) for leaf in leaves]
        _, sizes = map_leaves(_estimate, list(entries), arrays, arrays, divide=True)
        values = [largest(sizes[str(i)]) for i in range(len(traced))]
        zero = [jnp.logical_not(jnp.any(x)) for x in arrays]
        first_values.check_values(functools.partial(_raise_if_far, list(paths)), values + zero)


def _is_far(distance: float) -> bool:
    return not distance <= _FAR  # a NaN is far, too


def _raise_if_far(paths: list[str], *numbers: Any) -> None:
    """Raise for distances above 0.1, or NaN; `numbers` are these, then whether all is zero."""
    sizes = {path: float(x) for path, x in zip(paths, numbers, strict=False)}
    far = [f"{path!r} (distance {x:.2g})" for path, x in sizes.items() if _is_far(x)]
    if far:
        is_zero = zip(paths, numbers[len(paths) :], strict=True)
        zeros = [path for path, x in is_zero if x and _is_far(sizes[path])][:_SHOWN]
        hint = ""
        if zeros:
            hint += (
                f" No point is nearest to the zeros of {zeros}: project_tree would change what the"
                f" model computes. {ADAPTERS}"
            )
        if any(math.isnan(x) for x in sizes.values()):
            hint += " Where it is nan, weights are not finite, or overflow when squared."
        more = [f"{len(far) - _SHOWN} more"] if len(far) > _SHOWN else []
        raise ValueError(
            f"parameters are far from their manifolds: {', '.join(far[:_SHOWN] + more)}."
            " Start from optim.project_tree(geometry, params), which gives the nearest points, or"
            " from optim.init_tree(geometry, key, params), which gives random points. If a trainer"
            " makes the weights, optim.start_on(tx, geometry) moves them in the first"
            f" update.{hint}"
        )


def _numpy_distance(manifold: Any, matrices: Any) -> float:
    """Return the largest distance from orthonormal matrices, without compiling a program."""
    point: Any = np.asarray(matrices).astype(np.float64)
    if not np.isfinite(point).all():
        return math.nan
    point = point / scale_of(manifold.scale, point.shape[-2:])
    wide = point.shape[-2] < point.shape[-1]
    gram = point @ point.mT if wide else point.mT @ point
    return float(np.abs(np.sqrt(np.maximum(np.linalg.eigvalsh(gram), 0)) - 1).max())


@functools.cache
def _compiled_distances(**options: Any) -> Any:
    """Return a compiled function: the largest distance of each array from its manifold."""

    def measure(entries: tuple[manifolds.Entry, ...], arrays: list[Any]) -> list[jax.Array]:
        _, distances = map_leaves(_start_distance, list(entries), arrays, arrays)
        return [largest(distances[str(i)]) for i in range(len(arrays))]

    return jax.jit(measure, static_argnums=0, compiler_options=options)


def _is_small(weight: Weight, leaf: Any) -> bool:
    by_row = weight.manifold.ndim < 2 or isinstance(weight.manifold, manifolds.EmbeddingRows)
    return by_row or min(weight.shape(leaf)[-2:]) <= _LARGEST_SIDE


def _start_distance(
    manifold: manifolds.Manifold, point: jax.Array, _: Any
) -> tuple[None, jax.Array]:
    if isinstance(manifold, manifolds.EmbeddingRows):
        length = point.shape[-1]
        entry = scale_of(manifold.scale, (length,)) / math.sqrt(length)
        padding = jnp.all(point == 0, axis=-1, keepdims=True)
        point = jnp.where(padding, jnp.asarray(entry, point.dtype), point)
    return None, manifold.distance(upcast(point)).astype(jnp.float32)


def _estimate(manifold: manifolds.Manifold, point: jax.Array, _: Any) -> tuple[None, jax.Array]:
    """Return the distance within 1 %, from products alone if singular values decide it.

    Inside a user's program: decompositions of every kind of leaf would take seconds to compile.
    """
    edges = _edges(manifold)
    if edges is None:
        return _start_distance(manifold, point, None)
    middle, low, high = edges
    unit = tall(upcast(point) / scale_of(manifold.scale, point.shape[-2:]))  # type: ignore
    gram = product(unit.mT, unit)
    excess = gram - middle * identity_like(gram)
    size, sign = _extreme_eigenvalue(excess)
    above, below = jnp.sqrt(middle + size) - high, low - jnp.sqrt(jnp.maximum(middle - size, 0))
    distance = jnp.where(sign < 0, below, above)
    if isinstance(manifold, manifolds.SpectralSphere):
        distance = jnp.abs(distance)
    return None, jnp.maximum(distance, 0).astype(jnp.float32)


def _edges(manifold: Any) -> tuple[float, float, float] | None:
    """Return the middle of the allowed squares of singular values, and the values' limits."""
    if isinstance(manifold, manifolds.SpectralBall | manifolds.SpectralBand):
        return (manifold.low**2 + manifold.high**2) / 2, manifold.low, manifold.high
    if isinstance(manifold, manifolds.SpectralSphere):
        return 0.0, 0.0, 1.0
    return (1.0, 1.0, 1.0) if type(manifold).distance is manifolds.Stiefel.distance else None


def _extreme_eigenvalue(matrix: Squares) -> tuple[jax.Array, jax.Array]:
    """Return absolute value (up to 1 % too large) and sign of the extreme eigenvalue.

    Uses the norm of the 256th power, by eight squarings; of the first power if all eigenvalues of
    all matrices are below 0.15.
    """

    def square(_, carry):
        power, exponent = carry
        size = frobenius_norm(power)
        power = power / expand_trailing(nonzero_or_one(size), 2)
        return product(power, power), 2 * (exponent + jnp.log2(size))

    start = match_varying_axes((matrix, jnp.zeros(matrix.shape[:-2], matrix.dtype)), matrix)
    rounds = jnp.where(jnp.any(frobenius_norm(matrix) > 0.15), 8, 0)
    power, exponent = jax.lax.fori_loop(0, rounds, square, start)
    size = jnp.exp2((exponent + jnp.log2(frobenius_norm(power))) / 2**rounds)
    return size, jnp.sign(inner_product(power, matrix))
