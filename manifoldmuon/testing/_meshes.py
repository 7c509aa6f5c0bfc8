"""Checks for meshes: inside of `jax.shard_map`, and with sharded parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import PyTree

from manifoldmuon._internal.meshes.mesh import match_varying_axes
from manifoldmuon.testing._assertions import require, wide


def check_inside_shard_map(function: Callable[..., Any], *arguments: PyTree) -> None:
    """Check that a function can be traced inside of `jax.shard_map` with `check_vma=True`.

    First each argument alone varies over the devices of a mesh, then all arguments do. The usual
    failure is a loop that starts with arrays equal on all devices and continues with varying
    arrays: `match_varying_axes` mends it. Nothing is compiled, and no mesh is needed.

    Args:
      function: function that returns a pytree of arrays.
      arguments: pytrees of arrays.

    Raises:
      AssertionError: names the varying arguments by index, with JAX's message. Errors of the
        function itself, with no varying argument, are passed on.

    Examples:
      >>> check_inside_shard_map(lambda x, y: x @ y, jnp.ones((2, 3)), jnp.ones(3))
    """
    jax.eval_shape(function, *arguments)
    mesh = jax.sharding.AbstractMesh((2,), ("devices",), axis_types=(AxisType.Auto,))
    every, same = PartitionSpec("devices"), PartitionSpec()
    indices = range(len(arguments))
    for varying in (*({index} for index in indices), set(indices)):

        def inside(mark, given, varying=frozenset(varying)):
            marked = [
                match_varying_axes(tree, mark) if index in varying else tree
                for index, tree in enumerate(given)
            ]
            return jax.tree.map(lambda x: jnp.asarray(x)[None], function(*marked))

        mapped = jax.shard_map(inside, mesh=mesh, in_specs=(every, same), out_specs=every)
        try:
            jax.eval_shape(mapped, jnp.ones(2), arguments)
        except Exception as error:
            which = ", ".join(map(str, sorted(varying)))
            require("traces inside of jax.shard_map", False, f"arguments {which} vary: {error}")


def check_sharding(
    tx: optax.GradientTransformation, params: Any, grads: Any, shardings: Any
) -> None:
    """Check that sharded parameters get the same updates as unsharded parameters.

    The sharded steps are compiled within `jax.set_mesh`, as in training.

    Args:
      tx: the transformation.
      params: parameters on a single device.
      grads: gradients, a tree like the parameters.
      shardings: a `jax.sharding.NamedSharding` for each parameter, on a mesh with automatic or
        explicit axes.

    Raises:
      AssertionError: updates of two steps differ from the updates on a single device; `tx.init`
        gives other types under `jax.jit`; or updates, parameters or states change their sharding
        types, so that the second step compiles again.

    Examples:
      >>> mesh = jax.make_mesh((1,), ("devices",), (jax.sharding.AxisType.Auto,))
      >>> shardings = {"w": jax.sharding.NamedSharding(mesh, jax.P("devices"))}
      >>> params = {"w": jnp.ones((4, 2))}
      >>> check_sharding(optax.sgd(0.1, momentum=0.9), params, params, shardings)
    """
    traces = []

    @jax.jit
    def step(params, state, grads):
        traces.append(None)
        updates, state = tx.update(grads, state, params)
        return updates, optax.apply_updates(params, updates), state

    wanted, state = [], tx.init(params)
    sharded, sharded_grads = jax.device_put((params, grads), (shardings, shardings))
    for _ in range(2):
        updates, params, state = step(params, state, grads)
        wanted.append(updates)
    with jax.set_mesh(jax.tree.leaves(shardings)[0].mesh):
        # Finish each program first: on CPUs two programs with collectives can deadlock.
        state = jax.block_until_ready(tx.init(sharded))
        compiled = jax.block_until_ready(jax.jit(tx.init)(sharded))
        chex.assert_trees_all_equal(_types(compiled), _types(state))
        types = _types((sharded, sharded, state))
        traces.clear()
        for expected in wanted:
            updates, sharded, state = step(sharded, state, sharded_grads)
            chex.assert_trees_all_equal(_types((updates, sharded, state)), types)
            actual = jax.device_get(updates)
            chex.assert_trees_all_equal_structs(actual, expected)
            for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
                largest = float(np.max(np.abs(wide(y)), initial=0))
                np.testing.assert_allclose(wide(x), wide(y), rtol=1e-4, atol=1e-4 * largest)
    assert len(traces) == 1, f"{len(traces)} compilations in two steps"


def _types(tree: Any) -> Any:
    return jax.tree.map(lambda x: str(jax.typeof(x)), tree)
