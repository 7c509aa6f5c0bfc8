"""Composed rules: one visit gives the updates of a chain, and a program of the size of one."""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax
import pytest

from manifoldmuon import optim
from manifoldmuon.linalg import TRAINING_MSIGN
from manifoldmuon.manifolds import Euclidean, Hypersphere, Stiefel
from manifoldmuon.norms import Spectral
from manifoldmuon.optim import rules
from tests.optim.training import drawn, train

SHAPES = {"a": (6, 3), "b": (3, 6), "c": (6, 3)}
START, KEY = drawn(3, SHAPES), jax.random.key(1)


class Seen(NamedTuple):
    seen: dict[str, jax.Array]


def count_visits(manifold, point, update, given):
    return update, {"seen": given["seen"] + 1}


SPHERE, DESCENT = Hypersphere(ndim=2), optax.scale(-0.1)


def agree(first, second, start, atol):
    grads = [drawn(seed, SHAPES) for seed in (11, 12, 13)]
    found, wanted = (train(tx, start, grads)[0] for tx in (first, second))
    chex.assert_trees_all_close(found, wanted, atol=atol, rtol=1e-7)


def test_composed_rules_match_the_chain_of_their_transformations():
    rule = rules.then(rules.tangent, rules.unit, rules.budget, rules.retraction)
    composed = optim.transformation(rule, SPHERE, numbers={"budget": -0.1}, last=True)
    unit = optim.normalize(optax.identity(), SPHERE)
    apart = optim.chain(optim.project_tangent(SPHERE), unit, DESCENT, optim.retract(SPHERE))
    agree(composed, apart, optim.init_tree(SPHERE, KEY, START), 1e-6)


@pytest.mark.slow
def test_descend_matches_its_chain():
    geometry = {"a": Stiefel(), "b": Euclidean(Spectral()), "c": SPHERE}
    apart = optim.chain(optim.scale_by_steepest(geometry), DESCENT, optim.retract(geometry))
    agree(optim.descend(0.1, geometry), apart, optim.init_tree(geometry, KEY, START), 2e-6)


@pytest.mark.slow_except("1.0")
@pytest.mark.parametrize("radial", [1.0, 0.25])
def test_muonh_matches_its_chain_and_keeps_its_state(radial):
    steepest = optim.scale_by_steepest(Euclidean(Spectral(TRAINING_MSIGN)), track_gap=False)
    base = optax.chain(optax.trace(0.9, True, "float32"), steepest)
    schedule = optax.linear_schedule(0.1, 0.0, 5)
    apart = optim.hyperball(base, schedule, SPHERE, radial=radial, budgets=0.5)
    whole = optim.muonh(schedule, SPHERE, 0.9, radial=radial, budgets=0.5)
    agree(whole, apart, START, 3e-6)
    assert jax.tree.structure(whole.init(START)) == jax.tree.structure((apart.init(START),))


def lines(tx, count):
    params = {f"layer{i}": jnp.ones((4, 4)) for i in range(count)}
    state = jax.eval_shape(tx.init, params)
    return jax.jit(tx.update).lower(params, state, params).as_text().count("\n")


@pytest.mark.parametrize("tx", [optim.muonh(0.1, SPHERE), optim.manifold_muon(0.1, Stiefel())])
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


def test_state_is_kept_by_path_without_fields_that_init_left_out():
    def noted(manifold, point, update, given):
        update, results = count_visits(manifold, point, update, given)
        return update, results | {"note": given["seen"]}

    tx = optim.transformation(noted, Hypersphere(), Half, lambda m, s: (jnp.zeros(s[:-1]), None))
    params, other = {"w": jnp.eye(3)}, {"v": jnp.eye(3)}
    state: Any = tx.init(params)
    for _ in range(2):
        _, state = tx.update(params, state, params)
    assert (state.seen["w"].tolist(), state.absent) == ([2.0, 2.0, 2.0], {})
    with pytest.raises(ValueError, match="no entries for .'v'"):
        tx.update(other, state, other)


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
