"""Shardings that only the compiler knows, on automatic axes.

`jax.typeof` has no sharding on automatic axes, so `with_sharding_constraint` cannot copy one. The
compiler's own `sdy.sharding_group` can; JAX 0.12 removed `jax.experimental.shard_alike`, its only
public function.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.extend.core import Primitive
from jax.extend.mlir.dialects import sdy
from jax.interpreters import ad, batching, mlir

from manifoldmuon._internal.meshes.mesh import working_mesh


def shard_alike(tree: Any, like: Any) -> Any:
    """Give arrays the sharding of the array of the same shape in `like`, on a working mesh.

    Otherwise the sharding of the shared work, in which each device owns whole matrices, spreads to
    gradients and new parameters. Does nothing outside jit, on explicit axes, in `jax.shard_map` and
    under `jax.vmap`.
    """

    def alike(x: Any, y: Any) -> Any:
        both = isinstance(x, jax.Array) and isinstance(y, jax.Array) and x.shape == y.shape
        return _alike.bind(x, y) if both and working_mesh(y) is not None else x

    return jax.tree.map(alike, tree, like, is_leaf=lambda node: node is None)


def _lower(context: mlir.LoweringRuleContext, x: Any, like: Any) -> list[Any]:
    config: Any = jax.config
    if config.jax_use_shardy_partitioner:
        group = context.module_context.new_channel()  # a fresh number in this program
        for value in (x, like):
            sdy.sharding_group(value, group)
    return [x]


_alike = Primitive("shard_alike")
_alike.def_impl(lambda x, like: x)
_alike.def_abstract_eval(lambda x, like: x)
ad.defjvp(_alike, lambda tangent, x, like: tangent, None)
batching.primitive_batchers[_alike] = lambda arrays, axes: (arrays[0], axes[0])
# Not cached: equal calls would share a number, and with it one sharding.
mlir.register_lowering(_alike, _lower, cacheable=False)
