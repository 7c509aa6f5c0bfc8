"""A manifold's methods for a whole tree of parameters."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import PRNGKeyArray

from manifoldmuon._internal.arrays import upcast
from manifoldmuon.manifolds import EmbeddingRows, LaidOut, Manifold
from manifoldmuon.optim._geometry import (
    Geometry,
    Places,
    find_manifolds,
    inner_shape,
    manifold_of,
)
from manifoldmuon.optim._leaves import LikePoint, batched, placed_like


def project_tree(geometry: Geometry, params: Any) -> Any:
    """The nearest point of its manifold for every parameter.

    Args:
      geometry: which manifold each parameter lives on; see `resolve`.
      params: any tree of floating point arrays.

    Returns:
      A tree of the same structure, shapes and dtypes.

    Raises:
      TypeError: see `resolve`.
      ValueError: see `resolve`.
    """

    def project(manifold: Manifold, point: jax.Array) -> LikePoint:
        return LikePoint(_project(manifold, point))

    return _map(find_manifolds(geometry, params), project, lambda entry, leaf: leaf, params)


def distance_tree(geometry: Geometry, params: Any) -> Any:
    """How far every parameter is from its manifold.

    Args:
      geometry: which manifold each parameter lives on; see `resolve`.
      params: any tree of floating point arrays.

    Returns:
      A tree of the same structure; leaves are `Manifold.distance`, one float32 number per point.

    Raises:
      TypeError: see `resolve`.
      ValueError: see `resolve`.
    """
    return _map(find_manifolds(geometry, params), _distance, _zeros, params)


def monitor_distance(geometry: Geometry, params: Any) -> dict[str, jax.Array]:
    """`distance_tree` as a dictionary for logging: path to the distance of the farthest point.

    Args:
      geometry: which manifold each parameter lives on; see `resolve`.
      params: any tree of floating point arrays.

    Returns:
      One float32 scalar per parameter, by path (see `path_string`).

    Raises:
      TypeError: see `resolve`.
      ValueError: see `resolve`.
    """
    places = find_manifolds(geometry, params)
    distances = places.leaves(_map(places, _distance, _zeros, params))
    return {places.paths[i]: jnp.max(distances[i], initial=0.0) for i in places.real}


_FAR = 0.1
_LARGEST_SIDE = 1024  # above it an eigenvalue decomposition takes seconds


def far_distances(geometry: Geometry, params: Any) -> dict[str, float]:
    """Distances of the parameters farther than a tenth from their manifolds, by path.

    Returns nothing inside `jax.jit`, and leaves out abstract, empty and unconstrained parameters,
    arrays spread over several processes, and matrices whose shorter side is above 1024. Rows of
    `EmbeddingRows` that are exactly zero (padding) do not count.
    """
    if isinstance(jnp.zeros(()), Tracer):  # constants, too, are traced inside `jax.jit`
        return {}
    places = find_manifolds(geometry, params)
    leaves = places.leaves(params)
    known = [place for place in places.real if _is_known(places.values[place], leaves[place])]
    points = [(LikePoint(jnp.asarray(leaves[place])),) for place in known]
    found = batched(_distance_without_padding, [places.values[place] for place in known], points)
    farthest = {
        places.paths[place]: float(sizes.max())
        for place, sizes in zip(known, jax.device_get(found), strict=True)
    }
    return {path: size for path, size in farthest.items() if size > _FAR}


def _is_known(entry: Manifold | LaidOut, leaf: Any) -> bool:
    manifold = manifold_of(entry)
    if not manifold.constrained or isinstance(leaf, Tracer | jax.ShapeDtypeStruct):
        return False
    sides = inner_shape(entry, jnp.shape(leaf))[-2:]
    by_row = manifold.ndim < 2 or isinstance(manifold, EmbeddingRows)
    small = by_row or min(sides) <= _LARGEST_SIDE
    return bool(jnp.size(leaf)) and small and getattr(leaf, "is_fully_addressable", True)


def _distance_without_padding(manifold: Manifold, point: jax.Array) -> jax.Array:
    if isinstance(manifold, EmbeddingRows):
        point = _fill_zero_rows(manifold, point)
    return _distance(manifold, point)


def init_tree(geometry: Geometry, key: PRNGKeyArray, params: Any) -> Any:
    """A random point of its manifold for every parameter.

    Each leaf's randomness comes from `key` and its path alone: adding a layer leaves the other
    layers' points as they are.

    Args:
      geometry: which manifold each parameter lives on; see `resolve`.
      key: a JAX random key.
      params: arrays or `jax.ShapeDtypeStruct` that give structure, shapes, dtypes and shardings.

    Returns:
      A tree of the same structure, shapes, dtypes and shardings (under jit, explicit ones; for
      others take its `out_shardings`). All of it is random, gains and biases too: to keep those
      that a framework has initialised, `project_tree` of its parameters.

    Raises:
      TypeError: see `resolve`.
      ValueError: see `resolve`.
    """
    places = find_manifolds(geometry, params)
    leaves = places.leaves(params)
    points = {
        place: random_leaf(places.values[place], key, places.paths[place], leaves[place])
        for place in places.real
    }
    return places.fill(params, points)


def random_leaf(entry: Manifold | LaidOut, key: PRNGKeyArray, path: str, leaf: Any) -> jax.Array:
    """A random point like `leaf`, from the key and the path alone."""
    own_key = jax.random.fold_in(key, zlib.crc32(path.encode()))
    shape = jnp.shape(leaf)
    dtype = jnp.result_type(leaf)
    point = _random_point(manifold_of(entry), own_key, inner_shape(entry, shape), dtype)
    if isinstance(entry, LaidOut):
        point = entry.layout.outward(point, shape)
    return placed_like(point, leaf)


# Outside of jit these are compiled once for each kind of leaf, not operation by operation.


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _project(manifold: Manifold, point: jax.Array) -> jax.Array:
    return manifold.project(upcast(point)).astype(point.dtype)


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _distance(manifold: Manifold, point: jax.Array) -> jax.Array:
    return manifold.distance(upcast(point)).astype(jnp.float32)


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _fill_zero_rows(manifold: Manifold, table: jax.Array) -> jax.Array:
    zero = jnp.all(table == 0, axis=-1, keepdims=True)
    return jnp.where(zero, _project(manifold, table), table)


@functools.partial(jax.jit, static_argnums=(0, 2, 3), inline=True)
def _random_point(manifold: Manifold, key: PRNGKeyArray, shape: tuple[int, ...], dtype: Any):
    return manifold.random_point(key, shape, dtype)


def _zeros(entry: Manifold | LaidOut, leaf: jax.Array) -> jax.Array:
    """Distances of unconstrained or empty leaves: constants, which lie on no mesh."""
    shape = inner_shape(entry, leaf.shape)
    return jnp.zeros(shape[: len(shape) - manifold_of(entry).ndim], jnp.float32)


def _map(
    places: Places,
    function: Callable[[Manifold, jax.Array], Any],
    unconstrained: Callable[[Manifold | LaidOut, jax.Array], jax.Array],
    params: Any,
) -> Any:
    """Map constrained leaves with entries by `function`, many at once, and others one by one."""
    leaves = places.leaves(params)
    arrays = {place: jnp.asarray(leaves[place]) for place in places.real}
    moving = [i for i, x in arrays.items() if x.size and manifold_of(places.values[i]).constrained]
    points = [(LikePoint(arrays[i]),) for i in moving]
    answers = batched(function, [places.values[i] for i in moving], points)
    others = {i: unconstrained(places.values[i], arrays[i]) for i in {*places.real} - {*moving}}
    return places.fill(params, others | dict(zip(moving, answers, strict=True)))
