"""`check_transformation` and `check_sharding` reject broken transformations."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from manifoldmuon.testing import check_sharding, check_transformation

PARAMS = {"a": np.array([1.0, -2.0, 0.5], "f4"), "b": np.array([[0.25, 3.0]], "f4")}


def sound(rate: Any = 1.0, **changes: Any) -> optax.GradientTransformationExtraArgs:
    """Return a transformation with steps of length `rate` per leaf, broken by `changes`."""
    leaf = changes.get("leaf", lambda g, w: -rate * g / size(g))

    def init(params):
        return changes.get("state", lambda params: {"count": jnp.zeros((), jnp.int32)})(params)

    def update(updates, state, params=None, **extra):
        changes.get("before", lambda *_: None)(updates, params, extra)
        if params is None and not changes.get("lax"):
            raise ValueError("no parameters")
        given = updates if params is None else params
        number = max(len(jax.tree.leaves(updates)), 1) if changes.get("counts") else 1

        def step(g, w):
            return (leaf(g, w) / number).astype(jnp.float32 if changes.get("wide") else w.dtype)

        stepped = jax.tree.map(step, updates, given)
        return stepped, changes.get("after", lambda s: jax.tree.map(jnp.asarray, s))(state)

    return optax.GradientTransformationExtraArgs(init, update)


def size(g: jax.Array) -> jax.Array:
    largest = jnp.max(jnp.abs(g), initial=0)
    if jnp.issubdtype(g.dtype, jnp.integer):
        raise TypeError("integers")
    safe = jnp.where(largest == 0, 1, largest)
    return safe * jnp.maximum(jnp.linalg.norm(g / safe), 1e-6)


def complain(wrong: bool) -> None:
    if wrong:
        raise ValueError("of no use")


def on_the_host(g, _):
    shape = jax.ShapeDtypeStruct(g.shape, g.dtype)
    return jax.pure_callback(lambda x: x, shape, -g / size(g))


BROKEN: dict[str, dict[str, Any]] = {
    "compiles_once": {"after": lambda s: {"count": s["count"] + 1.0}},
    "first_step": {"state": lambda params: {"count": jnp.int32(0), "name": "a name"}},
    "init_abstract": {
        "state": lambda params: {"count": jnp.zeros(isinstance(params["a"], jax.ShapeDtypeStruct))}
    },
    "empty_trees": {"before": lambda updates, *_: complain(not jax.tree.leaves(updates))},
    "holes": {"counts": True},
    "dtypes": {"wide": True},
    "tree_map_params": {
        "state": lambda params: {"kept": jax.tree.map(lambda w: jnp.zeros(1), params)}
    },
    "degenerate": {"leaf": lambda g, w: -g / size(g) / jnp.any(g != w)},
    "nan_in_one_leaf": {"leaf": lambda g, w: -jnp.nan_to_num(g) / size(jnp.nan_to_num(g))},
    "errors": {"lax": True},
    "scale": {"leaf": lambda g, w: -g + 0 * size(g)},
    "descends": {"leaf": lambda g, w: (2 * g.ndim - 3) * g / size(g)},
    "still": {"leaf": lambda g, w: -g / size(g) - 1},
    "inject_hyperparams": {"rate": True},
    "wrapped_donated_and_scanned": {"before": lambda *x: complain("unexpected" in x[-1])},
    "vmap": {"leaf": on_the_host},
}


def test_sound_transformation_passes():
    check_transformation(sound, PARAMS, {"rate": 0.5})


def test_sign_of_updates_is_checked_by_default():
    ascending = lambda rate: sound(-rate)  # noqa: E731
    with pytest.raises(AssertionError, match="check 'descends' failed: .*`descends` says"):
        check_transformation(ascending, PARAMS, {"rate": 0.5}, wrappers=False)
    for declared in (False, None):
        check_transformation(ascending, PARAMS, {"rate": 0.5}, wrappers=False, descends=declared)
    with pytest.raises(AssertionError, match="check 'ascends' failed"):
        check_transformation(sound, PARAMS, {"rate": 0.5}, wrappers=False, descends=False)


@pytest.mark.parametrize("check", BROKEN)
def test_failed_check_is_named(check):
    changes = dict(BROKEN[check])
    careful = changes.pop("rate", False)

    def make(rate):
        if careful:
            complain(rate < 0.1)
        return sound(rate, **changes)

    with pytest.raises(AssertionError, match=f"the check '{check}' failed"):
        check_transformation(make, PARAMS, {"rate": 0.5})


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded_steps_are_taken_within_the_mesh(kind):
    """Only there do transformations know automatic axes and divide their work."""

    def update(updates, state, params=None):
        factor = 1.0 if jax.sharding.get_abstract_mesh().empty else 1.01
        return jax.tree.map(lambda g: factor * g, updates), state

    broken = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    mesh = jax.make_mesh((2,), ("x",), (kind,))
    params = {"w": np.ones((4, 2), np.float32)}
    shardings = {"w": NamedSharding(mesh, PartitionSpec("x"))}
    check_sharding(optax.identity(), params, params, shardings)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check_sharding(broken, params, params, shardings)
