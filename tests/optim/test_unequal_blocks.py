"""Blocks of unequal lengths in a fused parameter: q, k and v of grouped-query attention."""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from manifoldmuon import optim
from manifoldmuon.checkpoints import CheckpointError, Checkpoints
from manifoldmuon.contrib import normuon
from manifoldmuon.manifolds import Hypersphere, Layout, Manifold, Stiefel
from manifoldmuon.testing import check_sharding
from tests.compiled import ask
from tests.optim.instances import MATRIX
from tests.optim.training import drawn, train

LENGTHS = (8, 2, 4)
FLAT = MATRIX.transposed()


def fused(manifold: Manifold = Stiefel(), layers: int = 0) -> dict[str, Any]:
    qkv = manifold.with_axes(-2, -1, out_blocks=LENGTHS)
    return {"qkv": qkv.stacked(layers), "out": FLAT.stacked(layers)}


def apart(manifold: Manifold = Stiefel(), layers: int = 0) -> dict[str, Any]:
    kernel = manifold.transposed().stacked(layers)
    return dict.fromkeys("qkv", kernel) | {"out": FLAT.stacked(layers)}


def pair(seed: int, layers: tuple[int, ...] = ()) -> dict[str, Any]:
    return drawn(seed, {"qkv": (*layers, 6, sum(LENGTHS)), "out": (*layers, 8, 6)})


def cut(tree: Any) -> dict[str, Any]:
    parts = np.split(np.asarray(tree["qkv"]), np.cumsum(LENGTHS)[:-1], axis=-1)
    return dict(zip("qkv", parts, strict=True)) | {"out": tree["out"]}


def by_hand(rate: float, geometry: Any) -> Any:
    return optim.chain(
        optim.normalize(optax.trace(0.9), geometry),
        optax.scale_by_learning_rate(rate),
        optim.retract(geometry),
    )


MAKERS = {
    "manifold_muon": (functools.partial(optim.manifold_muon, weight_decay=0.1), Stiefel()),
    "muon": (optim.muon, MATRIX),
    "normalize": (by_hand, Stiefel()),
    "riemannian_adam": (optim.riemannian_adam, Stiefel()),
    "muonh": (optim.muonh, Hypersphere(ndim=2)),
    "normuon": (normuon, MATRIX),
}


@pytest.mark.slow_except("()-muonh")
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("layers", [(), (3,)], ids=str)
def test_blocks_are_trained_as_separate_parameters(layers, name):
    make, manifold = MAKERS[name]
    grads = [pair(seed, layers) for seed in (1, 2, 3)]
    whole, parts = (make_(manifold, len(layers)) for make_ in (fused, apart))
    start = ask(lambda x: optim.project_tree(whole, x), pair(0, layers))
    points = ask(lambda x: optim.project_tree(parts, x), cut(pair(0, layers)))
    chex.assert_trees_all_close(cut(start), points, rtol=1e-7, atol=1e-6)
    found, _ = train(make(0.1, whole), start, grads)
    wanted, _ = train(make(0.1, parts), points, [cut(g) for g in grads])
    chex.assert_trees_all_close(cut(found), wanted, rtol=1e-7, atol=4e-6)


@pytest.mark.slow
def test_blocks_are_layers_of_automatic_gradient_descent():
    whole = {"qkv": Layout(-2, -1, out_blocks=LENGTHS), "out": Layout(-2, -1)}
    parts: Any = dict.fromkeys(("q", "k", "v", "out"), Layout(-2, -1))
    start, grads = optim.init_semi_orthogonal(whole, jax.random.key(0), pair(0)), pair(7)
    for name in "qkv":
        m, n = cut(start)[name].shape  # (in, out)
        singular = np.linalg.svd(np.float64(cut(start)[name]), compute_uv=False)
        np.testing.assert_allclose(singular, (n / m) ** 0.5, atol=1e-5)
    found, _ = train(optim.agd(whole), start, [grads])
    wanted, _ = train(optim.agd(parts), cut(start), [cut(grads)])
    chex.assert_trees_all_close(cut(found), wanted, rtol=1e-7, atol=1e-6)


@pytest.mark.slow
def test_tree_functions_list_each_block():
    geometry, paths = fused(), ["out", "qkv/0", "qkv/1", "qkv/2"]
    shapes = jax.eval_shape(lambda: pair(0))
    points = optim.init_tree(geometry, jax.random.key(0), shapes)
    for name in "qkv":
        singular = np.linalg.svd(np.float64(cut(points)[name]), compute_uv=False)
        np.testing.assert_allclose(singular, 1, atol=1e-5)
    assert sorted(optim.monitor_distance(geometry, pair(0))) == paths
    assert max(optim.monitor_distance(geometry, points).values()) < 1e-5
    rows = optim.tabulate(geometry, shapes, {"qkv": 0.5, "out": 1.0}).rows
    assert [row.path for row in rows] == paths
    fans = [(row.fan_in, row.fan_out, row.budget) for row in rows[1:]]
    assert fans == [(6, length, 0.5) for length in LENGTHS]
    tx = optim.manifold_muon(0.1, geometry)
    assert sorted(optim.monitor(tx.init(points))["gap"]) == paths
    optim.check_chain(tx, geometry, points)
    assert optim.resolve_geometry(geometry, shapes)["qkv"] == geometry["qkv"]
    with pytest.raises(ValueError, match="are far from their manifolds: .*'qkv/0'"):
        tx.init(pair(0))


@pytest.mark.slow
def test_budgets_reach_every_block():
    geometry = fused(layers=1)
    start = ask(lambda x: optim.project_tree(geometry, x), pair(0, (2,)))
    budgets = {"qkv": jnp.array([0.0, 1.0])[:, None, None], "out": 0.0}
    moved, _ = train(optim.descend(0.1, geometry, budgets=budgets), start, [pair(1, (2,))])
    np.testing.assert_allclose(moved["out"], start["out"], atol=1e-6)
    for before, after in list(zip(cut(start).values(), cut(moved).values(), strict=True))[:3]:
        np.testing.assert_allclose(after[0], before[0], atol=1e-6)
        assert np.abs(after[1] - before[1]).max() > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_blocks_on_sharded_axis_match_single_device(kind):
    """The axis with blocks, of length 16, is sharded over two devices, for eight may deadlock."""
    mesh = jax.make_mesh((2,), ("x",), (getattr(AxisType, kind),), devices=jax.devices()[:2])
    place = NamedSharding(mesh, PartitionSpec(None, "x"))
    geometry = Stiefel().with_axes(-2, -1, out_blocks=(10, 3, 3))
    params = optim.project_tree(geometry, drawn(4, (6, 16)))
    check_sharding(optim.manifold_muon(0.1, geometry), params, drawn(5, (6, 16)), place)


def test_checkpoints_record_block_lengths(tmp_path):
    params = optim.project_tree(fused(), pair(0))
    other = {**fused(), "qkv": Stiefel().with_axes(-2, -1, out_blocks=(2, 8, 4))}
    with Checkpoints(tmp_path) as saved:
        saved.save(0, params, optim.tabulate(fused(), params))
        found: Any = saved.restore(params, optim.tabulate(fused(), params))
        jax.tree.map(np.testing.assert_array_equal, found.tree, params)
        with pytest.raises(CheckpointError, match="'qkv/0' was"):
            saved.restore(params, optim.tabulate(other, params))
