"""Geometries of models with dimension numbers for Optax's Muon, such as MaxText's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from optax.contrib import MuonDimensionNumbers

from manifoldmuon._internal.arguments import shown
from manifoldmuon._internal.trees import paths
from manifoldmuon.manifolds import LaidOut, Layout, Manifold

__all__ = ["geometry"]


def geometry(
    dimension_numbers: Any, matrices: Manifold, *, rest: Manifold | None = None
) -> Callable[[paths.KeyPath, jax.ShapeDtypeStruct], Manifold | LaidOut | None]:
    """Return the geometry for the argument `muon_weight_dimension_numbers` of Optax's Muon.

    `reduction_axis` is the fan-in, `output_axis` the fan-out, and several axes are one fan. All
    other axes, such as scanned layers and experts, are declared as copies, in any position. Axes
    may count from both ends: the number of axes comes from the parameter, so the geometry can be
    made before the parameters.

    Args:
      dimension_numbers: `MuonDimensionNumbers`, or a prefix tree of them, compared by path: nested
        dictionaries describe any container. None instead of numbers leaves parameters to `rest`.
        None in place of the tree is Optax's default: arrays of two axes are matrices `(in, out)`.
      matrices: manifold of the matrices `(fan_out, fan_in)`.
      rest: manifold of all other parameters; None leaves them to another optimizer.

    Returns:
      A function of path and leaf, for any argument `geometry`.

    Examples:
      >>> numbers = {"query": optax.contrib.MuonDimensionNumbers((0,), (-2, -1)), "scale": None}
      >>> spaces = geometry(numbers, mm.manifolds.Stiefel())
      >>> layers = {"query": jnp.ones((8, 3, 2, 4)), "scale": jnp.ones((8, 3))}  # 3 scanned layers
      >>> mm.optim.resolve_geometry(spaces, layers)["query"].layout.inner_shape((8, 3, 2, 4))
      (3, 8, 8)
    """
    if paths.is_function(dimension_numbers):
        raise TypeError(
            "frameworks.muon.geometry: dimension_numbers is a function; call it on the parameters:"
            " geometry(dimension_numbers(params), matrices)"
        )
    pairs, _ = paths.flatten_with_path(dimension_numbers, is_leaf=_is_entry)
    entries = {paths.path_string(path): numbers for path, numbers in pairs}
    for path, numbers in entries.items():
        if not _is_entry(numbers):
            raise TypeError(
                f"frameworks.muon.geometry: the entry of {path!r} is {shown(numbers)}; write"
                " optax.contrib.MuonDimensionNumbers, or None"
            )

    def entry(path: paths.KeyPath, leaf: jax.ShapeDtypeStruct) -> Manifold | LaidOut | None:
        name, ndim = paths.path_string(path), len(leaf.shape)
        above = [prefix for prefix in paths.prefixes(name) if prefix in entries]
        if not above:
            raise ValueError(
                f"the dimension numbers have no entry for the parameter {name!r}; the entries are"
                f" {list(entries)}"
            )
        numbers = entries[above[0]]
        if dimension_numbers is None and ndim == 2:
            numbers = MuonDimensionNumbers()
        if numbers is None:
            return rest
        try:
            layout = Layout.from_muon(numbers, ndim=ndim)
        except ValueError as error:
            raise ValueError(
                f"the parameter {name!r} of shape {leaf.shape}: its dimension numbers do not fit;"
                f" {error}"
            ) from error
        return LaidOut(matrices, layout)

    return entry


def _is_entry(node: Any) -> bool:
    """Return whether a node is None or dimension numbers, of Optax or with a sharding (MaxText)."""
    return node is None or hasattr(node, "reduction_axis")
