"""Functions of whole trees: compiled once for a kind of leaf, with words where norms change."""

import re
import warnings
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from manifoldmuon import optim
from manifoldmuon.manifolds import EmbeddingRows, Euclidean, Hypersphere, Stiefel
from manifoldmuon.norms import RMSToRMS, Spectral
from tests.optim.training import drawn, train

SHAPES = {f"layer{i}": {"kernel": (6, 4), "table": (5, 3)} for i in range(3)}
GEOMETRY = optim.by_path({"**/kernel": Stiefel().transposed(), "**/table": EmbeddingRows()})


@pytest.mark.parametrize("name", ["project_tree", "init_tree"])
def test_eager_call_compiles_once_for_a_kind(name, caplog):
    params, key = jax.tree.map(jnp.asarray, drawn(0, SHAPES)), jax.random.key(0)
    if name == "project_tree":
        programs = _compiled(lambda: optim.project_tree(GEOMETRY, params), caplog)
        assert programs == ["_project_leaf"] * 2
    else:
        programs = _compiled(lambda: optim.init_tree(GEOMETRY, key, params), caplog)
        assert sorted(programs) == ["_own_key", "_random_leaf", "_random_leaf"]


def _compiled(call: Any, caplog: Any) -> list[str]:
    """Return the names of the programs that a call compiles."""
    jax.clear_caches()
    jnp.zeros(())  # asks whether `jax.jit` traces
    caplog.clear()
    with jax.log_compiles():
        jax.block_until_ready(call())
    return re.findall(r"^Compiling (?:jit\()?(\w+)", "\n".join(caplog.messages), re.M)


def test_init_compiles_no_single_operations(caplog):
    """Besides zeros, `muonh` compiles one probe of `rest` and one norm for a kind of leaf."""
    params = jax.tree.map(jnp.asarray, drawn(0, SHAPES)) | {"bias": jnp.ones(3)}
    sphere = Hypersphere(ndim=2).transposed()
    geometry = optim.by_path({"bias": None, "**": sphere})
    tx = optim.muonh(0.1, geometry, rest=optax.adamw(1e-3))
    programs = _compiled(lambda: tx.init(params), caplog)
    own = [name for name in programs if name not in ("broadcast_in_dim", "convert_element_type")]
    assert sorted(own) == ["_norm_of_leaf", "_norm_of_leaf", "probe"]


def test_random_points_are_those_of_their_manifolds():
    params, key = drawn(0, SHAPES), jax.random.key(7)
    eager = optim.init_tree(GEOMETRY, key, params)
    inside = jax.jit(lambda key: optim.init_tree(GEOMETRY, key, params))(key)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), eager, inside)
    own = jax.random.fold_in(key, zlib.crc32(b"layer1/kernel"))
    wanted = Stiefel().random_point(own, (4, 6), jnp.float32).T
    np.testing.assert_allclose(eager["layer1"]["kernel"], wanted, atol=1e-6)


@pytest.mark.parametrize("factor", [30.0, 0.1])
def test_new_norm_on_unit_sphere_warns(factor):
    matrix = {"w": np.float32(factor) * jnp.eye(4) / 2, "v": 3 * jnp.eye(4, 3)}
    geometry = {"w": Hypersphere(ndim=2), "v": Stiefel()}
    words = rf"'w' \(times {1 / factor:.2g}\). An average .* optim.match_norms"
    with pytest.warns(UserWarning, match=f"project_tree: .*{words}"):
        optim.project_tree(geometry, matrix)


def test_chosen_radius_or_small_change_does_not_warn():
    weights = 1.5 * jnp.eye(4) / 2
    with warnings.catch_warnings(action="error"):
        optim.project_tree(Hypersphere(ndim=2), weights)
        optim.project_tree(Hypersphere(9.0, ndim=2), weights)
        optim.init_tree(Hypersphere(ndim=2), jax.random.key(0), 9 * weights)  # is random anyway


@pytest.mark.slow
def test_distances_with_master_copies_are_those_of_the_copies():
    """Rounded to bfloat16 a weight is 1e-3 off its sphere, its copy 1e-7."""
    geometry = {"w": Hypersphere(), "b": None}
    params = {"w": optim.project_tree(Hypersphere(), drawn(3, (50,)) / 7), "b": jnp.ones(3)}
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    outside = optim.with_master_copies(optim.manifold_muon(0.1, geometry, rest=optax.adam(1e-3)))
    own = optim.with_master_copies(optim.riemannian_sgd(0.1, geometry))
    for tx in (outside, optim.hybrid(own, geometry, optax.adam(1e-3))):
        after, state = train(tx, params, [jax.tree.map(jnp.sin, params)])
        after, state = jax.tree.map(jnp.asarray, (after, state))
        assert optim.monitor_distance(geometry, after)["w"] > 1e-5
        assert optim.monitor_distance(geometry, after, state)["w"] < 1e-6
        assert optim.monitor_scalars(state, geometry, after)["distance/w"] < 1e-6


@pytest.mark.parametrize("make", [optim.manifold_muon, optim.muon, optim.muonh, optim.adamh,
    optim.riemannian_adam, optim.riemannian_sgd, optim.descend, optim.optax_muon])  # fmt: skip
def test_schedule_of_arrays_is_accepted_by_init(make):
    """`count` has the methods of an int32 array, as in Optax."""

    def rate(count: Any) -> Any:
        assert count.dtype == jnp.int32
        return 0.1 * count.astype(jnp.float32)

    fixed_norm, params = make in (optim.muonh, optim.adamh), jnp.eye(3)
    geometry = Hypersphere(ndim=2) if fixed_norm else Euclidean(Spectral())
    tx = make(rate, *(() if make is optim.optax_muon else (geometry,)))
    assert jax.tree.structure(tx.init(params)) == jax.tree.structure(jax.jit(tx.init)(params))


REST, SPHERES = {"w": Stiefel(), "b": None}, {"w": Hypersphere(ndim=2), "b": None}
START = {"w": jnp.eye(4, 3), "b": jnp.ones(3)}
WITH_REST = {
    "manifold_muon": lambda rest: optim.manifold_muon(0.1, REST, rest=rest),
    "hybrid": lambda rest: optim.hybrid(optim.retract(REST), REST, rest),
    "muon": lambda rest: optim.muon(0.1, {"w": Euclidean(RMSToRMS()), "b": None}, rest=rest),
    "muonh": lambda rest: optim.muonh(0.1, SPHERES, rest=rest),
    "adamh": lambda rest: optim.adamh(0.1, SPHERES, rest=rest),
}


@pytest.mark.parametrize("name", WITH_REST)
def test_ascending_rest_raises(name):
    make = WITH_REST[name]
    for rest in (optax.scale_by_adam(), optax.trace(0.9), optax.identity()):
        with pytest.raises(ValueError, match="^rest must be a complete optimizer .* ascends"):
            make(rest).init(START)
    warm_up = optax.linear_schedule(0.0, 0.1, 100)
    for rest in (optax.adamw(warm_up), optax.set_to_zero(), optax.sgd(0.1, 0.9)):
        make(rest).init(START)


def test_random_key_among_parameters_raises():
    params = {"w": jnp.eye(4, 3), "b": jax.random.key(0)}
    for tx in (WITH_REST["manifold_muon"](optax.adamw(0.1)), WITH_REST["hybrid"](optax.sgd(0.1))):
        for whole in (tx, optim.with_master_copies(tx)):
            with pytest.raises(TypeError, match=r"\['b'\] are random keys, and Optax cannot"):
                whole.init(params)
        with pytest.raises(TypeError, match=r"\['b'\] are random keys"):
            optim.check_chain(tx, REST, params)
    kept = optim.project_tree(REST, params)["b"]
    assert kept is params["b"]
