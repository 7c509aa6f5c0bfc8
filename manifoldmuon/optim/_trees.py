"""A manifold's methods for a whole tree of parameters."""

import zlib
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from manifoldmuon.optim._geometry import Geometry, Layout, lay_out_geometry
from manifoldmuon.optim._grouping import placed_like, together
from manifoldmuon.optim._updates import wide


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

    def project(manifold, point):
        return manifold.project(wide(point)).astype(point.dtype), ()

    layout = lay_out_geometry(geometry, params)
    return _fill(layout, [point for point, _ in _map(layout, project)])


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
    layout = lay_out_geometry(geometry, params)
    return _fill(layout, _distances(layout))


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
    layout = lay_out_geometry(geometry, params)
    paths = [layout.paths[i] for i in layout.indices()]
    farthest = [jnp.max(distance, initial=0.0) for distance in _distances(layout)]
    return dict(zip(paths, farthest, strict=True))


def init_tree(geometry: Geometry, key: PRNGKeyArray, params: Any) -> Any:
    """A random point of its manifold for every parameter.

    Each leaf's randomness comes from `key` and its path alone: adding a layer leaves the other
    layers' points as they are.

    Args:
      geometry: which manifold each parameter lives on; see `resolve`.
      key: a JAX random key.
      params: arrays or `jax.ShapeDtypeStruct` that give structure, shapes and dtypes.

    Returns:
      A tree of the same structure, shapes, dtypes and shardings (under jit, explicit ones).

    Raises:
      TypeError: see `resolve`.
      ValueError: see `resolve`.
    """
    layout = lay_out_geometry(geometry, params)
    points = []
    for index in layout.indices():
        leaf, manifold = layout.leaves[index], layout.values[index]
        own_key = jax.random.fold_in(key, zlib.crc32(layout.paths[index].encode()))
        point = manifold.random_point(own_key, jnp.shape(leaf), jnp.result_type(leaf))
        points.append(placed_like(point, leaf))
    return _fill(layout, points)


def _distances(layout: Layout) -> list[jax.Array]:
    def distance(manifold, point):
        return None, manifold.distance(wide(point)).astype(jnp.float32)

    return [found for _, found in _map(layout, distance)]


def _map(layout: Layout, method) -> list[tuple[Any, Any]]:
    real = layout.indices()
    problems = [(jnp.asarray(layout.leaves[i]),) for i in real]
    return together(method, [layout.values[i] for i in real], problems)


def _fill(layout: Layout, leaves: list[Any]) -> Any:
    """The layout's tree with new leaves in the places that hold a parameter."""
    filled = list(layout.leaves)
    for index, leaf in zip(layout.indices(), leaves, strict=True):
        filled[index] = leaf
    return layout.rebuild(filled)
