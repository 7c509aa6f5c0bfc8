"""Check that a function works inside `jax.shard_map`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import PyTree

from manifoldmuon._internal.mesh import match_varying_axes
from manifoldmuon.testing._assertions import require


def check_inside_shard_map(function: Callable[..., Any], *arguments: PyTree) -> None:
    """Checks that `jax.shard_map` takes a function, with its check of what varies over the mesh.

    First each argument by itself differs between the devices of a mesh, then all do. Where it
    fails, a loop mostly begins with arrays that are the same on all devices and goes on with
    others: `match_varying_axes` makes them alike. Nothing is compiled, and no mesh is needed.

    Args:
      function: returns a pytree of arrays.
      arguments: pytrees of arrays.

    Raises:
      AssertionError: naming the arguments that varied, by place, and what JAX says. What the
        function raises where nothing varies comes as it is.

    Examples:
      >>> check_inside_shard_map(lambda x, y: x @ y, jnp.ones((2, 3)), jnp.ones(3))
    """
    jax.eval_shape(function, *arguments)
    mesh = jax.sharding.AbstractMesh((2,), ("devices",), axis_types=(AxisType.Auto,))
    every, same = PartitionSpec("devices"), PartitionSpec()
    places = range(len(arguments))
    for varying in (*({place} for place in places), set(places)):

        def inside(mark, given, varying=frozenset(varying)):
            marked = [
                match_varying_axes(tree, mark) if place in varying else tree
                for place, tree in enumerate(given)
            ]
            return jax.tree.map(lambda x: jnp.asarray(x)[None], function(*marked))

        mapped = jax.shard_map(inside, mesh=mesh, in_specs=(every, same), out_specs=every)
        try:
            jax.eval_shape(mapped, jnp.ones(2), arguments)
        except Exception as error:
            which = ", ".join(map(str, sorted(varying)))
            require("traces inside of jax.shard_map", False, f"arguments {which} vary: {error}")
