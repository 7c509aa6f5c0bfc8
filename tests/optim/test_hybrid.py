"""`hybrid`: matrices on manifolds, all other parameters by another optimizer."""

import re
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from manifoldmuon import contrib, optim
from manifoldmuon._internal.trees.paths import path_string
from manifoldmuon.linalg import SVD
from manifoldmuon.manifolds import Euclidean, Hypersphere, Layout, Stiefel
from manifoldmuon.manifolds.solvers import ProjectedPolar
from manifoldmuon.norms import RMSToRMS
from tests.compiled import ask
from tests.optim.training import drawn, first_update, train

MATRIX = Stiefel(solver=ProjectedPolar()).transposed()
GEOMETRY = optim.by_path({"**/kernel": MATRIX, "**": None})
SHAPES = {
    "embed": (9, 4),
    "layer": {"kernel": (4, 6), "bias": (2, 3, 1, 1), "gain": ()},
    "head": {"kernel": (6, 4), "bias": (4,)},
}
OWN, REST = ("layer/kernel", "head/kernel"), ["embed", "head/bias", "layer/bias", "layer/gain"]
SCHEDULE, OTHER = optax.linear_schedule(0.1, 0.02, 4), optax.linear_schedule(0.01, 0.0, 6)
FLAT = optim.by_path({"**/kernel": Euclidean(RMSToRMS()).transposed(), "**": None})


PARAMS = ask(lambda params: optim.project_tree(GEOMETRY, params), drawn(0, SHAPES))


def by_name(tree: Any) -> dict[str, Any]:
    return {path_string(path): x for path, x in jax.tree.leaves_with_path(tree)}


def parts(tree: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    named = by_name(tree)
    own = {name: named[name] for name in OWN}
    return own, {name: x for name, x in named.items() if name not in OWN}


ADAM = optax.adamw(OTHER, weight_decay=0.3)
SPLIT = {
    "hybrid": optim.chain(
        optax.clip_by_global_norm(1.0),
        optim.hybrid(optim.manifold_muon(SCHEDULE, GEOMETRY), GEOMETRY, ADAM),
    ),
    "rest": optim.manifold_muon(SCHEDULE, GEOMETRY, clip=1.0, rest=ADAM),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SPLIT)
def test_split_matches_separate_optimizers(name):
    """Against two separate training loops; NumPy computes the global gradient norm."""
    tx, grads = SPLIT[name], [drawn(seed, SHAPES) for seed in range(1, 5)]
    params, state = train(tx, PARAMS, grads)
    clipped = []
    for batch in grads:
        squares = [np.sum(np.asarray(g, np.float64) ** 2) for g in jax.tree.leaves(batch)]
        clipped.append(parts(jax.tree.map(lambda g, n=np.sqrt(sum(squares)): g / n, batch)))
    alone = optim.manifold_muon(SCHEDULE, MATRIX), ADAM
    for side, (start, found) in enumerate(zip(parts(PARAMS), parts(params), strict=True)):
        wanted, _ = train(alone[side], start, [batch[side] for batch in clipped])
        chex.assert_trees_all_close(found, wanted, atol=2e-6)
    assert set(optim.monitor(jax.tree.map(jnp.asarray, state))["gap"]) == set(OWN)


def test_muon_rest_matches_separate_optimizers():
    """Weight decay of Muon does not reach the rest, and the step decreases along the gradient."""
    tx = optim.muon(0.1, FLAT, weight_decay=0.5, method=SVD(), momentum=None, rest=optax.sgd(0.2))
    grads = drawn(1, SHAPES)
    found, _ = train(tx, PARAMS, [grads])
    own, rest = parts(found)
    for name, after in own.items():
        before, grad = (np.asarray(parts(x)[0][name], np.float64) for x in (PARAMS, grads))
        u, _, vt = np.linalg.svd(grad, full_matrices=False)
        size = np.sqrt(grad.shape[1] / grad.shape[0])  # kernels are (fan_in, fan_out)
        np.testing.assert_allclose(after, 0.95 * before - 0.1 * size * u @ vt, atol=1e-5)
    descended = jax.tree.map(lambda x, g: x - 0.2 * g, PARAMS, grads)
    chex.assert_trees_all_close(rest, parts(descended)[1], rtol=1e-7, atol=1e-6)


@pytest.mark.parametrize(
    "tx",
    [
        optim.muon(0.1, FLAT),
        contrib.normuon(0.1, FLAT),
        optim.riemannian_adam(0.1, GEOMETRY),
        optim.chain(optax.trace(0.9), optim.scale_by_steepest(GEOMETRY)),
    ],
)
def test_none_entries_outside_hybrid_raise(tx):
    message = re.escape(f"the geometry leaves {REST} to another optimizer (None): give it")
    with pytest.raises(ValueError, match=message):
        first_update(tx, PARAMS, PARAMS)


@pytest.mark.parametrize("geometry", [GEOMETRY, dict.fromkeys(OWN, MATRIX) | dict.fromkeys(REST)])
def test_tree_functions_skip_none_entries(geometry):
    far = drawn(0, SHAPES)

    def both(key, far):
        trees = optim.project_tree(geometry, far), optim.init_tree(geometry, key, far)
        return trees, [optim.monitor_distance(geometry, tree) for tree in trees]

    for tree, distances in zip(*ask(both, jax.random.key(0), far), strict=True):
        chex.assert_trees_all_equal(parts(tree)[1], parts(far)[1])
        assert distances.keys() == set(OWN)
        assert max(distances.values()) < 1e-5
    entries = by_name(jax.tree.map(str, optim.resolve_geometry(geometry, far)))
    assert entries == dict.fromkeys(OWN, str(MATRIX))
    with pytest.raises(ValueError, match="init_tree: .*'embed'.* have no manifold"):
        optim.init_tree(geometry, jax.random.key(0), jax.eval_shape(lambda: far))


def test_tabulate_lists_none_entries_as_rest():
    budgets = optim.by_path({"**/kernel": 0.5})  # as inside `hybrid`
    table = optim.tabulate(GEOMETRY, PARAMS, budgets)
    assert len(table.rows) == 6
    rest = [line.split() for line in str(table).splitlines() if " rest " in line]
    assert [line[0] for line in rest] == REST


@pytest.mark.slow
def test_chain_and_check_chain_accept_rest():
    tx = optim.manifold_muon(0.1, GEOMETRY, rest=optax.adamw(0.01))
    frozen = {"embed": True, "layer": False, "head": {"kernel": False, "bias": True}}
    optim.check_chain(optax.chain(tx, optax.transforms.freeze(frozen)), GEOMETRY, PARAMS)
    with pytest.raises(ValueError, match="are off their manifold, at distance {'head/kernel'"):
        optim.check_chain(optax.chain(tx, optax.scale(0.5)), GEOMETRY, PARAMS)


def test_integer_leaves_go_to_the_rest():
    params = {"kernel": PARAMS["head"]["kernel"], "steps": jnp.arange(3)}
    geometry = {"kernel": MATRIX, "steps": None}
    tx = optim.manifold_muon(0.1, geometry, rest=optax.set_to_zero())
    assert jnp.all(first_update(tx, params, params)["steps"] == 0)
    with pytest.raises(ValueError, match="manifold_muon: the update of 'steps' has shape"):
        first_update(tx, params | {"steps": jnp.zeros(4)}, params)


def test_hybrid_works_inside_other_wrappers():
    tx = optim.muon(0.02, FLAT, rest=optax.adamw(0.01))
    heads = optim.by_path(
        {"layer/kernel": Layout(-2, -1, out_blocks=2), "embed": Layout(), "**": None}
    )
    clipped = contrib.with_qk_clip(optim.with_master_copies(tx), FLAT, heads)
    updates = first_update(clipped, drawn(1, SHAPES), PARAMS, max_logits=1e4)
    plain = first_update(tx, drawn(1, SHAPES), PARAMS)
    assert jnp.allclose(updates["head"]["kernel"], plain["head"]["kernel"], atol=1e-6)
    assert not jnp.allclose(updates["embed"], plain["embed"], atol=1e-3)


def test_unused_pattern_of_budgets_or_radius_is_refused_with_a_rest():
    """`hybrid` hides the other parameters; a misspelt path must not leave a budget at its default.

    A pattern for parameters of the rest alone is used.
    """
    spheres = optim.by_path({"**/kernel": Hypersphere(ndim=2), "**": None})

    def optimizers(pattern):
        values = optim.by_path({pattern: 0.1, "**": 1.0})
        yield "budgets", optim.manifold_muon(0.1, GEOMETRY, rest=ADAM, budgets=values)
        for make in (optim.muonh, optim.adamh):
            yield "budgets", make(0.1, spheres, rest=ADAM, budgets=values)
            yield "radius", make(0.1, spheres, rest=ADAM, radius=values)

    for name, tx in optimizers("haed/kernel"):
        with pytest.raises(ValueError, match=rf"{name}: the patterns \['haed/kernel'\] match no"):
            tx.init(PARAMS)
    for pattern in ("head/kernel", "embed"):
        for _, tx in optimizers(pattern):
            jax.eval_shape(tx.init, PARAMS)
