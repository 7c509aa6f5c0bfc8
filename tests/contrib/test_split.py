"""Parts of a parameter as parameters of their own."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from manifoldmuon import contrib, optim
from manifoldmuon._internal.links import LastLink
from manifoldmuon.frameworks import nnx as reading
from manifoldmuon.manifolds import Euclidean, Hypersphere, Stiefel
from manifoldmuon.norms import RMSToRMS

FLAT = Euclidean(RMSToRMS()).transposed()
SIZES = (8, 2, 4)  # q, k, v


def drawn(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "block": {"qkv": jnp.asarray(rng.standard_normal((6, sum(SIZES))), jnp.float32)},
        "out": jnp.asarray(rng.standard_normal((8, 6)), jnp.float32),
        "gain": None,
    }


def parts(tree: Any) -> dict[str, Any]:
    q, k, v = np.split(np.asarray(tree["block"]["qkv"]), np.cumsum(SIZES)[:-1], axis=1)
    return {"q": q, "k": k, "v": v, "out": tree["out"]}


def train(tx: Any, params: Any, grads: list[Any]) -> Any:
    update, state = jax.jit(tx.update), tx.init(params)
    for grad in grads:
        updates, state = update(grad, state, params)
        params = optax.apply_updates(params, updates)
    return params


GEOMETRY = {
    "block": {"qkv": (Stiefel().transposed(), Hypersphere(), FLAT)},
    "out": FLAT,
    "gain": None,
}


def test_parts_are_trained_as_separate_parameters():
    """The same three matrices held apart, and cut with NumPy."""
    geometry = {**dict(zip("qkv", GEOMETRY["block"]["qkv"], strict=True)), "out": FLAT}
    start, grads = drawn(0), [drawn(seed) for seed in (1, 2, 3)]
    points = optim.project_tree(geometry, parts(start))
    start["block"]["qkv"] = jnp.concatenate([points[name] for name in "qkv"], axis=1)
    tx = contrib.split_parameters(optim.manifold_muon(0.1, GEOMETRY), {"block/qkv": SIZES})
    found = train(tx, start, grads)
    assert found["gain"] is None
    apart = train(optim.manifold_muon(0.1, geometry), points, [parts(g) for g in grads])
    for name, part in parts(found).items():
        np.testing.assert_allclose(part, apart[name], atol=1e-6, err_msg=name)


def test_the_gradient_of_a_part_moves_that_part_alone():
    params, grads = drawn(0), drawn(1)
    louder = {**grads, "block": {"qkv": grads["block"]["qkv"].at[:, 8:10].multiply(100)}}
    split = contrib.split_parameters(optim.muon(0.1, FLAT), {"**/qkv": SIZES})
    for tx, same in ((split, True), (optim.muon(0.1, FLAT), False)):
        one, two = (parts(train(tx, params, [g])) for g in (grads, louder))
        assert all(np.allclose(one[name], two[name], atol=1e-5) == same for name in "qv")


def test_rows_of_a_matrix_are_cut_by_another_axis():
    params, grads = drawn(0), drawn(1)
    turned: Any = [{"qkv": tree["block"]["qkv"].T} for tree in (params, grads)]
    tx = contrib.split_parameters(optim.muon(0.1, Euclidean(RMSToRMS())), {"qkv": SIZES}, axis=-2)
    other = contrib.split_parameters(optim.muon(0.1, FLAT), {"**/qkv": SIZES})
    found, wanted = train(tx, turned[0], turned[1:]), train(other, params, [grads])
    np.testing.assert_allclose(found["qkv"].T, wanted["block"]["qkv"], atol=1e-6)


def test_a_geometry_read_off_a_flax_model():
    """Its entry for the kernel holds for each part; `nnx.Optimizer` updates without boxes."""
    model = nnx.Linear(6, 14, rngs=nnx.Rngs(0))
    geometry = reading.geometry(model, Euclidean(RMSToRMS()))
    tx = contrib.split_parameters(
        optim.hybrid(optim.muon(0.1, geometry), geometry, optax.adam(0.1)), {"kernel": SIZES}
    )
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    x = jax.random.normal(jax.random.key(0), (5, 6))
    slopes = nnx.grad(lambda model: jnp.sum(jnp.sin(model(x))))(model)
    before: Any = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    grads: Any = nnx.to_pure_dict(slopes)
    optimizer.update(model, slopes)
    after: Any = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    for part in (np.s_[:8], np.s_[8:10], np.s_[10:]):
        start, slope = before["kernel"][:, part], grads["kernel"][:, part]
        apart = train(optim.muon(0.1, FLAT), start, [slope])
        np.testing.assert_allclose(after["kernel"][:, part], apart, atol=1e-6)
    bias = train(optax.adam(0.1), before["bias"], [grads["bias"]])
    np.testing.assert_allclose(after["bias"], bias, atol=1e-6)


def test_a_last_link_stays_one():
    assert isinstance(contrib.split_parameters(optim.retract(FLAT), {"w": (1, 2)}), LastLink)
    assert not isinstance(contrib.split_parameters(optax.sgd(0.1), {"w": (1, 2)}), LastLink)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"w": (2, 2)}, r"\(2, 2\) of 'w' must add up to the length of axis -1 of its shape"),
        ({"w": (2, 1), "v": (1,)}, r"patterns \['v'\] match no parameter; the parameters are"),
    ],
)
def test_sizes_that_do_not_fit(sizes, message):
    with pytest.raises(ValueError, match=message):
        contrib.split_parameters(optax.sgd(0.1), sizes).init({"w": jnp.ones((2, 3))})
