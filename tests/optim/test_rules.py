"""Composed rules: one visit gives the updates of a chain, and a program of the size of one."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from manifoldmuon import optim
from manifoldmuon.linalg import TRAINING_MSIGN
from manifoldmuon.manifolds import Euclidean, Hypersphere, Stiefel
from manifoldmuon.norms import Spectral
from manifoldmuon.optim import rules
from tests.optim.training import train

SHAPES = {"a": (6, 3), "b": (3, 6), "c": (6, 3)}


class Seen(NamedTuple):
    seen: dict[str, jax.Array]


def count_visits(manifold, point, update, given):
    return update, {"seen": given["seen"] + 1}


def drawn(seed, geometry=None):
    rng = np.random.default_rng(seed)
    tree = {k: jnp.asarray(rng.standard_normal(s), jnp.float32) for k, s in SHAPES.items()}
    return tree if geometry is None else optim.init_tree(geometry, jax.random.key(seed), tree)


def agree(first, second, start, atol):
    grads = [drawn(seed) for seed in (11, 12, 13)]
    found, wanted = (train(tx, start, grads)[0] for tx in (first, second))
    for name in SHAPES:
        np.testing.assert_allclose(found[name], wanted[name], atol=atol, err_msg=name)


def test_composed_rules_match_the_chain_of_their_transformations():
    geometry = Hypersphere(ndim=2)
    composed = optim.transformation(
        rules.then(rules.tangent, rules.unit, rules.budget, rules.retraction),
        geometry,
        numbers={"budget": -0.1},
        last=True,
    )
    apart = optim.chain(
        optim.project_tangent(geometry),
        optim.normalize(optax.identity(), geometry),
        optax.scale(-0.1),
        optim.retract(geometry),
    )
    agree(composed, apart, drawn(1, geometry), 1e-6)


@pytest.mark.slow
def test_descend_matches_its_chain():
    geometry = {"a": Stiefel(), "b": Euclidean(Spectral()), "c": Hypersphere(ndim=2)}
    apart = optim.chain(
        optim.scale_by_steepest(geometry), optax.scale(-0.1), optim.retract(geometry)
    )
    agree(optim.descend(0.1, geometry), apart, drawn(2, geometry), 2e-6)


@pytest.mark.slow_except("1.0")
@pytest.mark.parametrize("radial", [1.0, 0.25])
def test_muonh_matches_its_chain_and_keeps_its_state(radial):
    geometry, flat = Hypersphere(ndim=2), Euclidean(Spectral(TRAINING_MSIGN))
    base = optax.chain(
        optax.trace(0.9, True, "float32"), optim.scale_by_steepest(flat, track_gap=False)
    )
    schedule, start = optax.linear_schedule(0.1, 0.0, 5), drawn(3)
    apart = optim.hyperball(base, schedule, geometry, radial=radial, budgets=0.5)
    whole = optim.muonh(schedule, geometry, 0.9, radial=radial, budgets=0.5)
    agree(whole, apart, start, 3e-6)
    assert jax.tree.structure(whole.init(start)) == jax.tree.structure((apart.init(start),))


def test_state_of_a_transformation_is_kept_by_path():
    tx = optim.transformation(
        count_visits, Hypersphere(), Seen, lambda m, shape: (jnp.zeros(shape[:-1]),)
    )
    params = {"w": jnp.eye(3)}
    state: Any = tx.init(params)
    for _ in range(2):
        _, state = tx.update(params, state, params)
    assert state.seen["w"].tolist() == [2.0, 2.0, 2.0]
    with pytest.raises(ValueError, match="no entries for .'v'"):
        tx.update({"v": jnp.eye(3)}, state, {"v": jnp.eye(3)})


def lines(tx, count):
    params = {f"layer{i}": jnp.ones((4, 4)) for i in range(count)}
    state = jax.eval_shape(tx.init, params)
    return jax.jit(tx.update).lower(params, state, params).as_text().count("\n")


@pytest.mark.parametrize(
    "tx", [optim.muonh(0.1, Hypersphere(ndim=2)), optim.manifold_muon(0.1, Stiefel())]
)
def test_program_grows_slowly_with_depth(tx):
    # Of each matrix the momentum, reshapes, a slice and a difference; the rules once for all. JAX
    # 0.8 writes these in more lines than JAX 0.10.
    assert lines(tx, 40) - lines(tx, 20) <= 20 * lines(tx, 1) / 8


def only_an_update(manifold, point, update, given):
    return update


def misspelt(manifold, point, update, given):
    return update, {"sen": given["seen"] + 1}


def wider(manifold, point, update, given):
    return update, {"seen": jnp.ones((*given["seen"].shape, 1))}


@pytest.mark.parametrize(
    ("rule", "kind", "words"),
    [
        (only_an_update, TypeError, r"only_an_update.* must return \(update, results\)"),
        (misspelt, ValueError, r"rules return \['sen'\], and nothing for \['seen'\]"),
        (wider, ValueError, r"rules return float32\[2, 1\] as 'seen' of 'a'.*float32\[2\]"),
    ],
)
def test_wrong_results_of_a_rule_are_refused_with_their_names(rule, kind, words):
    params, geometry = {"a": jnp.ones((2, 4, 3))}, Stiefel().stacked()
    tx = optim.transformation(rule, geometry, Seen, lambda manifold, shape: (jnp.zeros(shape[0]),))
    with pytest.raises(kind, match=words):
        tx.update(params, tx.init(params), params)


class Half(NamedTuple):
    seen: dict[str, jax.Array]
    absent: dict[str, jax.Array]


def test_rule_with_intermediate_results_needs_no_field_that_init_left_out():
    def noted(manifold, point, update, given):
        update, results = count_visits(manifold, point, update, given)
        return update, results | {"note": given["seen"]}

    tx = optim.transformation(noted, Hypersphere(), Half, lambda m, s: (jnp.zeros(s[:-1]), None))
    params = {"w": jnp.eye(3)}
    state: Any = tx.update(params, tx.init(params), params)[1]
    assert (state.seen["w"].tolist(), state.absent) == ([1.0, 1.0, 1.0], {})


def test_state_and_numbers_that_do_not_fit_are_refused_at_once():
    def first(manifold, shape) -> Any:
        return jnp.zeros(shape[:-2])

    with pytest.raises(ValueError, match="`state` and `init` together"):
        optim.transformation(count_visits, Stiefel(), Seen)
    with pytest.raises(ValueError, match=r"\['seen'\] are numbers and fields"):
        optim.transformation(count_visits, Stiefel(), Seen, first, numbers={"seen": 1.0})
    with pytest.raises(TypeError, match="init must return a tuple"):
        optim.transformation(count_visits, Stiefel(), Seen, first).init(jnp.eye(3))


def test_a_missing_number_says_what_the_rule_was_given():
    with pytest.raises(KeyError, match="radius") as info:
        rules.then(rules.unit, rules.keep_norm)(Hypersphere(), jnp.eye(2), jnp.eye(2), {"own": 1})
    assert "was given ['own']" in info.value.__notes__[0]
