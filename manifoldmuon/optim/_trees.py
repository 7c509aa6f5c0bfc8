"""Manifold methods for whole trees of parameters: projection, distance, random points."""

from __future__ import annotations

import functools
import math
import warnings
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from manifoldmuon._internal.arguments import shown
from manifoldmuon._internal.compiling import compiler_options
from manifoldmuon._internal.first_values import is_traced
from manifoldmuon._internal.matrices.arrays import largest, upcast
from manifoldmuon._internal.meshes.mesh import placed_like
from manifoldmuon._internal.trees.paths import flatten_with_path, is_hole, path_string
from manifoldmuon._internal.trees.places import Places
from manifoldmuon.manifolds import Hypersphere, LaidOut, Manifold
from manifoldmuon.optim._geometry import (
    Entry,
    Geometry,
    constrained,
    cut_places,
    find_manifolds,
    inner_shape,
    manifold_of,
)
from manifoldmuon.optim._keep_norms import KeepNormsState, distance_from_radius, on_sphere
from manifoldmuon.optim._leaves import map_leaves
from manifoldmuon.optim._master_copies import MasterCopiesState
from manifoldmuon.optim._steepest import ScaleBySteepestState, find_in, monitor


def project_tree(geometry: Geometry, params: Any) -> Any:
    """Project every parameter to the nearest point of its manifold.

    Args:
      geometry: the manifold of each parameter; see `resolve_geometry`.
      params: any tree of floating point arrays.

    Returns:
      A tree of the same structure, shapes and dtypes. Unconstrained parameters, and parameters with
      the entry None, do not change.

    Warns:
      UserWarning: a `Hypersphere` of radius 1, the default, changes a norm by more than a factor of
        two (not checked under `jax.jit`); averages of weights with `keep_norms` take `match_norms`.

    Examples:
      >>> project_tree(mm.manifolds.Hypersphere(), {"w": jnp.array([0.0, 1.5])})["w"].tolist()
      [0.0, 1.0]
    """

    projected = nearest_points(geometry, params)
    if not is_traced(params):
        places = find_manifolds(geometry, params, rest=True, cut=False)
        _warn_of_new_norms(places, params, projected)
    return projected


def nearest_points(geometry: Geometry, params: Any) -> Any:
    """Return `project_tree`, without its warning."""
    places, own = _without_rest(geometry, params)
    if is_traced(own):
        projected, _ = map_leaves(_project, geometry, own, own, select=constrained)
    else:
        parts = cut_places(places)
        leaves = parts.leaves(own)
        for i in parts.real:
            if constrained(manifold_of(parts.values[i])):
                point = _compiled(_project_leaf, leaves[i])(parts.values[i], leaves[i])
                leaves[i] = placed_like(point, leaves[i])
        projected = parts.unflatten(leaves, own)
    whole = places.leaves(params)
    return places.fill(projected, {place: whole[place] for place in places.rest})


def _warn_of_new_norms(places: Places, before: Any, after: Any) -> None:
    """Warn if weights on spheres of the default radius change their norms by a factor of two."""
    trees, factors = (places.leaves(before), places.leaves(after)), []
    for i in places.real:
        manifold, pair = manifold_of(places.values[i]), [tree[i] for tree in trees]
        known = all(getattr(x, "is_fully_addressable", hasattr(x, "__array__")) for x in pair)
        if known and isinstance(manifold, Hypersphere) and manifold.scale == 1:
            old, new = (np.linalg.norm(np.asarray(x).astype(np.float64)) for x in pair)
            if new > 2 * old or old > 2 * new:
                factors.append(f"{places.paths[i]!r} (times {new / old if old else math.inf:.2g})")
    if factors:
        warnings.warn(
            f"project_tree: spheres of radius 1 change the norms of {', '.join(factors)}. An"
            " average of weights that keep their norms (muonh, adamh, hyperball) takes"
            " optim.match_norms in place of project_tree; for another radius write"
            " Hypersphere(radius).",
            stacklevel=3,
        )


def _without_rest(geometry: Geometry, params: Any) -> tuple[Places, Any]:
    """Return `Places` of uncut parameters, and the tree with None in place of rest parameters."""
    places = find_manifolds(geometry, params, rest=True, cut=False)
    return places, places.fill(params, dict.fromkeys(places.rest))


def monitor_distance(geometry: Geometry, params: Any, state: Any = None) -> dict[str, jax.Array]:
    """Return the largest distance of each parameter from its manifold, for logging.

    Args:
      geometry: the manifold of each parameter; see `resolve_geometry`.
      params: any tree of floating point arrays.
      state: an optimizer state. Weights that a `keep_norms` in it keeps at a radius `R` (`muonh`,
        `adamh`, `hyperball`) are measured from this radius, `| ||W|| / R - 1 |`, and the copies of
        a `with_master_copies` in place of the rounded parameters. Both are found in the state of
        any composition; for Flax, give the `opt_state` of an `nnx.Optimizer`.

    Returns:
      A float32 scalar per parameter, by path: the largest `Manifold.distance` of its points.
      Parameters with the entry None are left out. Works under `jax.jit`.

    Raises:
      ValueError: a radius in the state belongs to no point of a `Hypersphere`, as with the
        geometry of another optimizer, or two `keep_norms` have the same parameter; see
        `resolve_geometry`.

    Examples:
      >>> sphere, params = mm.manifolds.Hypersphere(), {"w": jnp.array([3.0, 4.0])}
      >>> monitor_distance(sphere, params)["w"].item()
      4.0
      >>> state = keep_norms(sphere).init(params)
      >>> monitor_distance(sphere, params, state)["w"].item()
      0.0
    """
    params, zero = _with_master_copies(state, params), jnp.zeros((), jnp.float32)
    places, own = _without_rest(geometry, params)
    places = cut_places(places)
    paths = [places.paths[place] for place in places.real]
    radii = dict.fromkeys(paths, ()) | _find_radii(state, places, params)
    _, found = map_leaves(
        _measure, geometry, own, own, name="monitor_distance", select=constrained, carried=radii
    )
    return {path: largest(found.get(path, zero)) for path in paths}


def _with_master_copies(state: Any, params: Any) -> Any:
    """Return the parameters, replaced by their master copies in a state, if any."""
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, MasterCopiesState))
    copies = {
        path_string(path): leaf
        for node in nodes
        if isinstance(node, MasterCopiesState)
        for path, leaf in flatten_with_path(node.copies)[0]
    }
    pairs, treedef = flatten_with_path(params, is_hole) if copies else ([], None)
    leaves = [copies.get(path_string(path), leaf) for path, leaf in pairs]
    return jax.tree.unflatten(treedef, leaves) if copies else params


def _find_radii(state: Any, places: Places, params: Any) -> dict[str, Any]:
    """Return the radii in a state by path; raise unless they fit the points of the parameters."""
    radii = find_in(state, KeepNormsState, "radius")
    if not radii:
        return {}
    leaves = places.leaves(jax.eval_shape(lambda tree: tree, params))
    points: dict[str, Any] = dict.fromkeys(places.paths)  # None: a hole, or of another optimizer
    for i in places.real:
        manifold, shape = manifold_of(places.values[i]), jnp.shape(leaves[i])
        inner = inner_shape(places.values[i], shape)
        points[places.paths[i]] = inner[: -manifold.ndim] if on_sphere(manifold) else ...
    wrong = [path for path, x in radii.items() if points.get(path, ...) not in (None, x.shape)]
    if wrong:
        raise ValueError(
            f"monitor_distance: the state keeps radii of {wrong}, which are not these points on a"
            " Hypersphere: give the geometry and the parameters of its optimizer."
        )
    return radii


def monitor_scalars(
    state: Any, geometry: Geometry | None = None, params: Any = None
) -> dict[str, jax.Array]:
    """Return gaps, residuals and distances as a flat dictionary to log, for TensorBoard or W&B.

    Call `wandb.log(monitor_scalars(state, geometry, params), step)`, or `add_scalar` in a loop for
    TensorBoard.

    Args:
      state: an optimizer state; see `monitor` and `monitor_distance`.
      geometry: see `monitor_distance`; None leaves distances out.
      params: see `monitor_distance`.

    Returns:
      `{"gap/path": ..., "residual/path": ..., "distance/path": ...}`: scalars, the maximum over
      the points of a stack. Works under `jax.jit`.

    Raises:
      ValueError: without a geometry, see `monitor`; otherwise see `monitor_distance`.

    Examples:
      >>> sphere, params = mm.manifolds.Hypersphere(), {"w": jnp.array([1.0, 0.0])}
      >>> state = manifold_muon(0.1, sphere).init(params)
      >>> sorted(monitor_scalars(state, sphere, params))
      ['distance/w', 'gap/w', 'residual/w']
    """
    report: dict[str, dict[str, jax.Array]] = {}
    if geometry is None or find_in(state, ScaleBySteepestState, "gap") is not None:
        report |= monitor(state)
    if geometry is not None:
        report["distance"] = monitor_distance(geometry, params, state)
    return {
        f"{kind}/{path}": largest(numbers)
        for kind, found in report.items()
        for path, numbers in found.items()
    }


def _measure(
    manifold: Manifold, point: jax.Array, _: jax.Array, radius: Any
) -> tuple[None, jax.Array]:
    if isinstance(radius, tuple):  # the state has no radius
        return None, _compiled(_distance, point)(manifold, point)
    return None, distance_from_radius(manifold, point, radius)


def _distance(manifold: Manifold, point: jax.Array) -> jax.Array:
    return manifold.distance(upcast(point)).astype(jnp.float32)


def init_tree(geometry: Geometry, key: Any, params: Any) -> Any:
    """Return a random point on its manifold for every parameter.

    The values of a leaf depend only on `key` and its path: adding a layer does not change the
    other layers.

    Args:
      geometry: the manifold of each parameter; see `resolve_geometry`.
      key: a JAX random key.
      params: arrays or `jax.ShapeDtypeStruct` that give structure, shapes, dtypes and shardings.

    Returns:
      A tree of the same structure, shapes, dtypes and shardings (under `jax.jit` only explicit
      shardings are kept; set others with `out_shardings`). Every leaf is random, gains and biases
      too; to keep a framework's initial values, call `project_tree` on its parameters. Arrays with
      the entry None do not change.

    Raises:
      TypeError: `key` is not a random key; see `resolve_geometry`.
      ValueError: a parameter with the entry None has no values; see `resolve_geometry`.

    Examples:
      >>> shapes = {"w": jax.ShapeDtypeStruct((4, 3), jnp.float32)}
      >>> init_tree(mm.manifolds.Stiefel(), jax.random.key(0), shapes)["w"].shape
      (4, 3)
    """
    if not isinstance(key, jax.Array) or jnp.issubdtype(key.dtype, jnp.inexact):
        raise TypeError(
            "init_tree(geometry, key, params): the key must be a random key of JAX, such as"
            f" jax.random.key(0); got {shown(key)}"
        )
    places = find_manifolds(geometry, params, rest=True)
    leaves = places.leaves(params)
    empty = [places.paths[i] for i in places.rest if isinstance(leaves[i], jax.ShapeDtypeStruct)]
    if empty:
        raise ValueError(
            f"init_tree: the geometry says nothing of {empty} (None), so that they must be arrays:"
            " give the parameters that the framework has initialised."
        )
    points = {
        place: _random_like(places.values[place], key, places.paths[place], leaves[place])
        for place in places.real
    }
    return places.fill(params, points)


def _random_like(entry: Entry, key: PRNGKeyArray, path: str, leaf: Any) -> jax.Array:
    """Return a random point like `leaf` that depends only on the key and the path."""
    shape, dtype = jnp.shape(leaf), jnp.result_type(leaf)
    draw = _compiled(_random_leaf, (key, leaf), level=2)
    point = draw((entry, shape, dtype), key, np.uint32(zlib.crc32(path.encode())))
    return placed_like(point, leaf)


def _project(manifold: Manifold, point: jax.Array, _: Any) -> jax.Array:
    return manifold.project(upcast(point)).astype(point.dtype)


def _project_leaf(entry: Entry, leaf: jax.Array) -> jax.Array:
    return map_leaves(_project, [entry], [leaf], [leaf])[0][0]


def _random_leaf(kind: tuple[Entry, tuple[int, ...], Any], key: Any, number: Any) -> jax.Array:
    """Return a random point of a kind: entry, shape and dtype."""
    entry, shape, dtype = kind
    own_key = jax.random.fold_in(key, number)
    point = manifold_of(entry).random_point(own_key, inner_shape(entry, shape), dtype)
    return entry.layout.outward(point, shape) if isinstance(entry, LaidOut) else point


def _compiled(function: Any, like: Any, level: int = 0) -> Any:
    """Return a function of a kind of leaf and arrays; outside jit, compiled once for each kind.

    Args:
      function: takes a hashable value, then arrays.
      like: arrays; their size decides the effort, and outside of jit whether they are traced.
      level: XLA's effort. From 1 on, random numbers do not depend on it.
    """
    if is_traced(like):
        return _jitted(function, inline=True)
    options = compiler_options(like, steps=1)
    if options:
        options["xla_backend_optimization_level"] = level
    return _jitted(function, compiler_options=tuple(options.items()))


@functools.cache
def _jitted(function: Any, compiler_options: Any = (), inline: bool = False) -> Any:
    options = dict(compiler_options) or None
    return jax.jit(function, static_argnums=0, inline=inline, compiler_options=options)
