"""MaxText: a patch of `get_optimizer` for `opt_type: manifold_muon`.

In `maxtext/optimizers/optimizers.py`, before the last `else` of the choice by `opt_type`, add

    elif config.opt_type == "manifold_muon":
      tables = get_muon_weight_dimension_numbers(model, config)
      base_opt = manifold_muon(learning_rate_schedule, tables, config)

with `manifold_muon` from this module. In `maxtext/configs/types.py`, add a member
`MANIFOLD_MUON = "manifold_muon"` to `OptimizerType`. MaxText's tables give the fan-in and fan-out
axes of each kernel, and None for parameters of AdamW.

python -m examples.trainers.maxtext    # with a table like MaxText's, without MaxText
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers

import manifoldmuon as mm
from manifoldmuon.manifolds import Layout, Manifold, Stiefel


def geometry(tables: Any, matrix: Manifold = Stiefel()) -> Any:
    """Return a function from path and parameter to its entry: `matrix` in its layout, or None.

    The tables count axes from both ends, `(0,)` and `(-1,)`, and do not name the scanned axis.
    The layout therefore also needs the number of axes, which is known from the parameter.
    """
    found = {
        jax.tree_util.keystr(path, simple=True, separator="/"): dims
        for path, dims in jax.tree_util.tree_leaves_with_path(tables, is_leaf=_is_entry)
    }

    def entry(path: Any, leaf: Any) -> Any:
        dims = found[jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value")]
        if dims is None:
            return None
        layout = Layout.from_muon(dims, ndim=len(leaf.shape))
        return mm.manifolds.LaidOut(matrix, layout)

    return entry


def _is_entry(node: Any) -> bool:
    return node is None or isinstance(node, MuonDimensionNumbers)


def manifold_muon(rate: Any, tables: Any, config: Any) -> optax.GradientTransformation:
    """Return the optimizer, with MaxText's options for Muon and AdamW.

    MaxText makes the weights itself: the first update moves them to their manifolds.
    """
    rest = optax.adamw(rate, config.adam_b1, config.adam_b2, weight_decay=config.adam_weight_decay)
    descent = mm.optim.manifold_muon(rate, geometry(tables), config.muon_beta, rest=rest)
    return mm.optim.start_on(descent, geometry(tables))


def main() -> dict[str, float]:
    """Take a step for kernels in MaxText's layout; return their distances from their manifolds."""
    import types

    config = types.SimpleNamespace(muon_beta=0.95, adam_b1=0.9, adam_b2=0.95, adam_weight_decay=0.1)
    tables = {
        "query": MuonDimensionNumbers((0,), (-2, -1)),  # (in, layers, heads, head_dim)
        "out": MuonDimensionNumbers((0, -2), (-1,)),  # (heads, layers, head_dim, out)
        "wi": MuonDimensionNumbers((0,), (-1,)),  # (in, layers, out)
        "norm": None,
    }
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = {"query": (8, 3, 2, 4), "out": (2, 3, 4, 8), "wi": (8, 3, 16), "norm": (8, 3)}
    params = {
        k: jax.random.normal(key, s) for key, (k, s) in zip(keys, shapes.items(), strict=True)
    }
    tx = manifold_muon(0.1, tables, config)
    grads = jax.tree.map(jnp.sin, params)
    updates, _ = jax.jit(tx.update)(grads, jax.jit(tx.init)(params), params)
    moved = optax.apply_updates(params, updates)
    distances = mm.optim.monitor_distance(geometry(tables), moved)
    for name, far in distances.items():
        print(f"{name:6} {shapes[name]}: off its manifold by {far:.1e}")
    return {name: float(far) for name, far in distances.items()}


if __name__ == "__main__":
    main()
