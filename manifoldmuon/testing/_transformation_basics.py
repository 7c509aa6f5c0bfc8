"""Checks of a gradient transformation: init, compilation, dtypes, values and errors."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from manifoldmuon.testing._transformation_case import CLOSE, Case, punch, take_step


def _init_abstract(case: Case) -> None:
    state = case.tx.init(case.params)
    kinds = {type(x) for x in jax.tree.leaves(state) if not isinstance(x, jax.Array | np.ndarray)}
    assert not kinds, f"the state holds more than arrays: {kinds}"
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), case.params)
    for other in (jax.jit(case.tx.init)(case.params), case.tx.init(shapes)):
        chex.assert_trees_all_equal_shapes_and_dtypes(state, other)


def _empty_trees(case: Case) -> None:
    nothing: list[Any] = [{}, [], optax.MaskedNode(), {"nothing": None}]
    for empty in nothing:
        updates, _ = case.tx.update(empty, case.tx.init(empty), empty)
        chex.assert_trees_all_equal_structs(updates, empty)
    for empty in (*nothing, None):
        jax.eval_shape(case.tx.init, empty)


def _holes(case: Case) -> None:
    wanted, _ = take_step(case, case.grads)
    masked = punch(case.grads, optax.MaskedNode()), punch(case.params, optax.MaskedNode())
    found, _ = take_step(case, *masked)
    chex.assert_trees_all_close(found, punch(wanted, optax.MaskedNode()), **CLOSE)
    missing = punch(case.grads, None), punch(case.params, None)
    shapes = jax.eval_shape(lambda grads, params: take_step(case, grads, params)[0], *missing)
    chex.assert_trees_all_equal_shapes_and_dtypes(shapes, punch(wanted, None))


def _dtypes(case: Case) -> None:
    def cast(tree, dtype):
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), tree)

    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        params = cast(case.params, dtype)
        state = jax.eval_shape(case.tx.init, params)
        for grad_dtype in (jnp.float32, jnp.bfloat16):
            grads = cast(case.grads, grad_dtype)
            updates, next_state = jax.eval_shape(case.tx.update, grads, state, params)
            if case.needs_params:
                chex.assert_trees_all_equal_dtypes(updates, params)
            else:
                chex.assert_trees_all_equal_dtypes(updates, grads)
            chex.assert_trees_all_equal_shapes_and_dtypes(next_state, state)


def _tree_map_params(case: Case) -> None:
    state = case.tx.init(case.params)
    same = optax.tree_utils.tree_map_params(case.tx, lambda x: x, state)
    chex.assert_trees_all_equal(same, state)
    # What a user does with it: the parameters' own layout for every copy of their tree.
    marks = jax.tree.map(lambda x: x.shape, case.params, is_leaf=lambda x: x is None)
    marked = optax.tree_utils.tree_map_params(
        case.tx, lambda x, mark: _assert_shape(x, mark), state, marks
    )
    chex.assert_trees_all_equal(marked, state)


def _assert_shape(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    assert x.shape == shape, f"{x.shape} is given for a parameter of shape {shape}"
    return x


def _degenerate(case: Case) -> None:
    zeros = jax.tree.map(jnp.zeros_like, case.params)
    # From zero, and with the gradient of the squared norm, which is normal to many manifolds.
    for grads, params in ((case.grads, zeros), (case.params, case.params)):
        chex.assert_tree_all_finite(take_step(case, grads, params))


def _nan_in_one_leaf(case: Case) -> None:
    clean, _ = take_step(case, case.grads)
    leaves, treedef = jax.tree.flatten(case.grads)
    for index in range(len(leaves)):
        if not leaves[index].size:
            continue
        bad = list(leaves)
        bad[index] = bad[index].ravel().at[-1].set(jnp.nan).reshape(bad[index].shape)
        updates, _ = take_step(case, jax.tree.unflatten(treedef, bad))
        found = jax.tree.leaves(updates)
        assert bool(jnp.isnan(found[index]).any()), "a NaN in the gradient has disappeared"
        del found[index]
        others = [x for i, x in enumerate(jax.tree.leaves(clean)) if i != index]
        chex.assert_trees_all_close(found, others, **CLOSE)


def _errors(case: Case) -> None:
    state = case.tx.init(case.params)
    leaves, treedef = jax.tree.flatten(case.params)
    integers = jax.tree.unflatten(treedef, [jnp.ones_like(leaves[0], jnp.int32), *leaves[1:]])
    wrong: list[tuple[Any, Any]] = [(integers, integers)]
    if case.needs_params:
        wrong += [(case.grads, None), ({"another": jnp.ones(3)}, case.params)]
    for grads, params in wrong:
        try:
            case.tx.update(grads, state, params)
        except (TypeError, ValueError):
            continue
        raise AssertionError(f"no error for {grads=} {params=}")


def check_scale(case: Case) -> None:
    wanted, _ = take_step(case, case.grads)
    for power in (100, -100):  # powers of two, so that the scaled gradient is the same number
        grads = jax.tree.map(lambda g, c=2.0**power: g * c, case.grads)
        found, _ = take_step(case, grads)
        chex.assert_trees_all_close(found, wanted, **CLOSE)


def check_still(case: Case) -> None:
    zeros = jax.tree.map(jnp.zeros_like, case.grads)
    for params in (case.params, jax.tree.map(jnp.zeros_like, case.params)):
        updates, state = take_step(case, zeros, params)
        chex.assert_trees_all_equal(updates, zeros)
        chex.assert_tree_all_finite(state)


BASICS = (
    _init_abstract,
    _empty_trees,
    _holes,
    _dtypes,
    _tree_map_params,
    _degenerate,
    _nan_in_one_leaf,
    _errors,
)
