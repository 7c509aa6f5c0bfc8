"""Manifold methods for whole trees of parameters: projection, distance, random points."""

from __future__ import annotations

import functools
import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import PRNGKeyArray

from manifoldmuon._internal.arguments import shown
from manifoldmuon._internal.compiling import compiler_options
from manifoldmuon._internal.matrices.arrays import largest, upcast
from manifoldmuon._internal.meshes.mesh import placed_like
from manifoldmuon._internal.scales import scale_of
from manifoldmuon._internal.trees.places import Places
from manifoldmuon.manifolds import EmbeddingRows, LaidOut, Manifold, Stiefel
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
from manifoldmuon.optim._steepest import ScaleBySteepestState, find_in, monitor


def project_tree(geometry: Geometry, params: Any) -> Any:
    """Project every parameter to the nearest point of its manifold.

    Args:
      geometry: the manifold of each parameter; see `resolve_geometry`.
      params: any tree of floating point arrays.

    Returns:
      A tree of the same structure, shapes and dtypes. Unconstrained parameters, and parameters with
      the entry None, do not change.

    Examples:
      >>> project_tree(mm.manifolds.Hypersphere(), {"w": jnp.array([0.0, 4.0])})["w"].tolist()
      [0.0, 1.0]
    """

    def project(manifold: Manifold, point: jax.Array, _: jax.Array) -> jax.Array:
        return _project(manifold, point)

    places, own = _without_rest(geometry, params)
    projected, _ = map_leaves(project, geometry, own, own, name="project_tree", select=constrained)
    leaves = places.leaves(params)
    return places.fill(projected, {place: leaves[place] for place in places.rest})


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
        `adamh`, `hyperball`) are measured from this radius, `| ||W|| / R - 1 |`. It is found in the
        state of any composition; for Flax, give the `opt_state` of an `nnx.Optimizer`.

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
    (places, own), zero = _without_rest(geometry, params), jnp.zeros((), jnp.float32)
    places = cut_places(places)
    paths = [places.paths[place] for place in places.real]
    radii = dict.fromkeys(paths, ()) | _find_radii(state, places, params)
    _, found = map_leaves(
        _measure, geometry, own, own, name="monitor_distance", select=constrained, carried=radii
    )
    return {path: largest(found.get(path, zero)) for path in paths}


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
        return None, _distance(manifold, point)
    return None, distance_from_radius(manifold, point, radius)


_FAR = 0.1
_FEW = 2**18  # numbers that NumPy measures faster than XLA compiles
_LARGEST_SIDE = 1024  # larger eigenvalue decompositions take seconds


def far_distances(geometry: Geometry, params: Any) -> dict[str, float]:
    """Return the distances above 0.1 of parameters from their manifolds, by path.

    Empty inside `jax.jit`. Leaves out abstract, empty and unconstrained parameters, arrays spread
    over several processes, and matrices with a shorter side above 1024. Rows of `EmbeddingRows`
    that are exactly zero (padding) do not count.
    """
    if isinstance(jnp.zeros(()), Tracer):  # inside `jax.jit` even constants are traced
        return {}
    places = find_manifolds(geometry, params)
    leaves = places.leaves(params)
    kinds: dict[Any, list[int]] = {}  # compile once for all arrays on the same devices
    farthest: dict[str, float] = {}
    for i in places.real:
        if not _is_known(entry := places.values[i], leaves[i]):
            continue
        if jnp.size(leaves[i]) <= _FEW and type(manifold_of(entry)).distance is Stiefel.distance:
            farthest[places.paths[i]] = _numpy_distance(entry, leaves[i])
        else:
            devices = leaves[i].devices() if isinstance(leaves[i], jax.Array) else ()
            kinds.setdefault(frozenset(devices), []).append(i)
    for kind in kinds.values():
        arrays = [leaves[i] for i in kind]
        measure = _compiled_distances(**compiler_options(arrays, steps=1))
        sizes = jax.device_get(measure(tuple([places.values[i] for i in kind]), arrays))
        farthest |= {places.paths[i]: float(x) for i, x in zip(kind, sizes, strict=True)}
    return {path: size for path, size in farthest.items() if size > _FAR}


def _numpy_distance(entry: Entry, leaf: Any) -> float:
    """Return the largest distance from orthonormal matrices, without compiling a program."""
    manifold: Any = manifold_of(entry)
    point: Any = np.asarray(leaf).astype(np.float64)
    if isinstance(entry, LaidOut):
        point = entry.layout.inward(point)
    point = point / scale_of(manifold.scale, point.shape[-2:])
    wide = point.shape[-2] < point.shape[-1]
    gram = point @ point.mT if wide else point.mT @ point
    if not np.isfinite(gram).all():
        return math.nan
    return float(np.abs(np.sqrt(np.maximum(np.linalg.eigvalsh(gram), 0)) - 1).max())


@functools.cache
def _compiled_distances(**options: Any) -> Any:
    """Return a compiled function: the largest distance of each array from its manifold."""

    def measure(entries: tuple[Entry, ...], arrays: list[Any]) -> list[jax.Array]:
        _, found = map_leaves(_measure_without_padding, list(entries), arrays, arrays)
        return [largest(found[str(i)]) for i in range(len(arrays))]

    return jax.jit(measure, static_argnums=0, compiler_options=options)


def _is_known(entry: Entry, leaf: Any) -> bool:
    manifold = manifold_of(entry)
    if not manifold.constrained or isinstance(leaf, Tracer | jax.ShapeDtypeStruct):
        return False
    sides = inner_shape(entry, jnp.shape(leaf))[-2:]
    by_row = manifold.ndim < 2 or isinstance(manifold, EmbeddingRows)
    small = by_row or min(sides) <= _LARGEST_SIDE
    return bool(jnp.size(leaf)) and small and getattr(leaf, "is_fully_addressable", True)


def _measure_without_padding(
    manifold: Manifold, point: jax.Array, _: jax.Array
) -> tuple[None, jax.Array]:
    if isinstance(manifold, EmbeddingRows):
        zero = jnp.all(point == 0, axis=-1, keepdims=True)
        point = jnp.where(zero, _project(manifold, point), point)
    return None, _distance(manifold, point)


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
        place: random_leaf(places.values[place], key, places.paths[place], leaves[place])
        for place in places.real
    }
    return places.fill(params, points)


def random_leaf(entry: Entry, key: PRNGKeyArray, path: str, leaf: Any) -> jax.Array:
    """Return a random point like `leaf` that depends only on the key and the path."""
    own_key = jax.random.fold_in(key, zlib.crc32(path.encode()))
    shape = jnp.shape(leaf)
    dtype = jnp.result_type(leaf)
    point = _random_point(manifold_of(entry), own_key, inner_shape(entry, shape), dtype)
    if isinstance(entry, LaidOut):
        point = entry.layout.outward(point, shape)
    return placed_like(point, leaf)


# Outside jit, compile these per kind of leaf, not operation by operation.


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _project(manifold: Manifold, point: jax.Array) -> jax.Array:
    return manifold.project(upcast(point)).astype(point.dtype)


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _distance(manifold: Manifold, point: jax.Array) -> jax.Array:
    return manifold.distance(upcast(point)).astype(jnp.float32)


@functools.partial(jax.jit, static_argnums=(0, 2, 3), inline=True)
def _random_point(manifold: Manifold, key: PRNGKeyArray, shape: tuple[int, ...], dtype: Any):
    return manifold.random_point(key, shape, dtype)
