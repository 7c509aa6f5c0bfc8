"""Checks of a gradient transformation under what Optax and JAX wrap around it."""

from collections.abc import Hashable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import optax

from manifoldmuon.testing._transformation_case import CLOSE, Case, punch, take_step


def check_injected(injected: optax.GradientTransformation, case: Case) -> None:
    """`inject_hyperparams` makes the transformation anew in every call, from traced numbers."""
    update = jax.jit(injected.update)
    state, injected_state = case.tx.init(case.params), jax.jit(injected.init)(case.params)
    for _ in range(2):
        wanted, state = case.tx.update(case.grads, state, case.params)
        found, injected_state = update(case.grads, injected_state, case.params)
        chex.assert_trees_all_close(found, wanted, **CLOSE)


def _masked_partition_and_chain(case: Case) -> None:
    wanted, _ = take_step(case, case.grads)
    mask = punch(jax.tree.map(lambda _: True, case.params), False)
    outside = jax.tree.map(lambda m, u, g: u if m else g, mask, wanted, case.grads)
    frozen = jax.tree.map(lambda m, u: u if m else jnp.zeros_like(u), mask, wanted)
    labels = jax.tree.map(lambda m: "moving" if m else "frozen", mask)
    parts: dict[Hashable, Any] = {"moving": case.tx, "frozen": optax.set_to_zero()}
    for wrapped, expected in (
        (optax.masked(case.tx, mask), outside),
        (optax.partition(parts, labels), frozen),
        (optax.chain(optax.identity(), case.tx), wanted),
    ):
        state = wrapped.init(case.params)
        optax.tree_utils.tree_map_params(wrapped, lambda x: x, state)
        found, _ = wrapped.update(case.grads, state, case.params)
        chex.assert_trees_all_close(found, expected, **CLOSE)


def _multi_steps_and_apply_if_finite(case: Case) -> None:
    wrapped = optax.apply_if_finite(
        optax.MultiSteps(case.tx, every_k_schedule=2).gradient_transformation(), 2
    )
    update = jax.jit(wrapped.update)
    state = wrapped.init(case.params)
    still = jax.tree.map(jnp.zeros_like, case.params)
    nothing = jax.tree.map(jnp.zeros_like, case.grads)
    # A mini-step: the inner update runs on what there is, and its result is multiplied by zero.
    found, state = update(nothing, state, case.params)
    chex.assert_trees_all_equal(found, still)
    found, state = update(
        jax.tree.map(lambda g: jnp.full_like(g, jnp.nan), case.grads), state, case.params
    )
    chex.assert_trees_all_equal(found, still)
    wanted, _ = take_step(case, case.grads)
    found, _ = update(jax.tree.map(lambda g: 2 * g, case.grads), state, case.params)
    chex.assert_trees_all_close(found, wanted, **CLOSE)


def _compiles_once_donated_and_scanned(case: Case) -> None:
    traces = []

    def step(carry, grads):
        traces.append(None)
        params, state = carry
        updates, state = case.tx.update(grads, state, params, unexpected=jnp.ones(()))
        return (optax.apply_updates(params, updates), state), None

    start = case.params, case.tx.init(case.params)
    several = jax.tree.map(lambda g: jnp.stack([g, -2 * g, g * g]), case.grads)
    donating = jax.jit(step, donate_argnums=0)
    carry = jax.tree.map(jnp.copy, start)
    for index in range(3):
        carry, _ = donating(carry, jax.tree.map(lambda g, i=index: g[i], several))
    assert len(traces) == 1, f"{len(traces)} compilations in three steps"
    scanned, _ = jax.jit(lambda carry: jax.lax.scan(step, carry, several))(start)
    chex.assert_trees_all_close(carry[0], scanned[0], rtol=1e-4, atol=1e-5)


def _vmap(case: Case) -> None:
    def once(params, grads):
        return case.tx.update(grads, case.tx.init(params), params)[0]

    others = jax.tree.map(lambda g: -g * g, case.grads)
    both = jax.tree.map(lambda a, b: jnp.stack([a, b]), case.grads, others)
    twins = jax.tree.map(lambda p: jnp.stack([p, p]), case.params)
    found = jax.jit(jax.vmap(once))(twins, both)
    for index, grads in enumerate((case.grads, others)):
        wanted, _ = take_step(case, grads)
        one = jax.tree.map(lambda x, i=index: x[i], found)
        chex.assert_trees_all_close(one, wanted, rtol=1e-4, atol=1e-5)


WRAPPERS = (
    _masked_partition_and_chain,
    _multi_steps_and_apply_if_finite,
    _compiles_once_donated_and_scanned,
    _vmap,
)
