"""`optim.optax_muon` against `optax.contrib.muon`, which it replaces."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from manifoldmuon import optim
from manifoldmuon.linalg import SVD, TRAINING_MSIGN
from manifoldmuon.manifolds import Euclidean, LaidOut, Layout
from manifoldmuon.norms import RMSToRMS
from manifoldmuon.optim import optax_muon
from tests.optim.training import drawn
from tests.tolerances import rounding

Dims = optax.contrib.MuonDimensionNumbers
SHAPES = {
    "query": {"kernel": (6, 2, 4), "bias": (2, 4)},  # (d_model, heads, head_dim)
    "first": {"kernel": (6, 9), "bias": (9,)},
    "second": {"kernel": (6, 9)},
    "wide": (4, 7),
    "layers": (5, 3, 2),  # the stack's axis comes last
}
DIMS = {
    "query": {"kernel": Dims(0, (1, 2)), "bias": None},
    "first": {"kernel": Dims(), "bias": None},
    "second": Dims(),  # a prefix
    "wide": None,  # for Adam
    "layers": Dims(0, 1),
}


def matrices(params: Any) -> Any:
    return jax.tree.map(lambda x: Dims(-2, -1) if x.ndim == 3 else None, params)


def large(params: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim > 2, params)


CALLS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "tree": {"muon_weight_dimension_numbers": DIMS, "weight_decay": 0.1, "consistent_rms": 0.2},
    "callable": {"muon_weight_dimension_numbers": matrices, "adam_learning_rate": 0.01},
    "not nesterov": {"nesterov": False, "beta": 0.8, "eps": 1.0, "adam_weight_decay": 0.1},
    "adaptive": {"adaptive": True, "muon_weight_dimension_numbers": DIMS, "adam_b1": 0.5},
    "spectral": {"preconditioning": "spectral", "ns_coeffs": "dion", "adam_b2": 0.9},
    "aol": {"preconditioning": "aol", "ns_steps": 4, "adam_eps_root": 0.1},
    "schatten": {
        "preconditioning": "schatten",
        "weight_decay": 0.1,
        "weight_decay_mask": large,
        "muon_weight_dimension_numbers": DIMS,
    },
    "bfloat16 momentum": {"mu_dtype": jnp.bfloat16},
}


THEIRS = inspect.signature(optax.contrib.muon).parameters


@pytest.mark.slow_except("defaults", "tree", "adaptive")
@pytest.mark.parametrize("name", CALLS)
def test_ten_updates_match_optax(name):
    if unknown := CALLS[name].keys() - THEIRS:
        pytest.skip(f"this version of Optax has no {unknown}")
    rate = optax.linear_schedule(0.1, 0.05, 10)
    # Five Newton-Schulz steps each multiply a small singular value and its error by 3.4445.
    close = rounding(10 * 5, 9, condition=3.4445**5, dtype=np.float64)
    params, *batches = (jax.tree.map(np.float64, drawn(i, SHAPES)) for i in range(11))

    @jax.jit
    def both(params, state, other, grads):
        updates, state = ours.update(grads, state, params)
        wanted, other = theirs.update(grads, other, params)
        return updates, state, wanted, other

    with jax.enable_x64(True):
        ours, theirs = optax_muon(rate, **CALLS[name]), optax.contrib.muon(rate, **CALLS[name])
        state, other = ours.init(params), theirs.init(params)
        jax.tree.map(np.testing.assert_array_equal, state, other)  # the same tree
        for grads in batches:
            updates, state, wanted, other = both(params, state, other, grads)
            for found, expected in zip(*map(jax.tree.leaves, (updates, wanted)), strict=True):
                scale = float(jnp.max(jnp.abs(expected)))
                np.testing.assert_allclose(found, expected, rtol=0, atol=close * scale)
            params = optax.apply_updates(params, updates)
        for found, expected in zip(*map(jax.tree.leaves, (state, other)), strict=True):
            scale = float(jnp.max(jnp.abs(expected)))
            np.testing.assert_allclose(found, expected, rtol=0, atol=close * scale)


@pytest.mark.parametrize("preconditioning", ["frobenius", "aol"])
def test_square_matrices_have_the_rows_of_optax(preconditioning):
    """AOL divides rows; Optax takes those of two axes as they are stored."""
    if "preconditioning" not in THEIRS:
        pytest.skip("this version of Optax has no preconditioning")
    params = drawn(2, {"a": (5, 5), "b": (5, 5), "c": (5, 5), "d": (6, 2, 3), "e": (3, 4, 4)})
    dims = {"a": Dims(), "b": Dims(1, 0), "c": Dims(), "d": Dims(0, (1, 2)), "e": Dims(2, 1)}
    for names in (("a",), ("b",), ("a", "b"), tuple(dims)):
        own, tree = ({name: x[name] for name in names} for x in (dims, params))
        options: Any = {"preconditioning": preconditioning, "muon_weight_dimension_numbers": own}
        found, wanted = (
            jax.jit(tx.update)(tree, tx.init(tree), tree)[0]
            for tx in (optax_muon(1.0, **options), optax.contrib.muon(1.0, **options))
        )
        for name in names:
            np.testing.assert_allclose(found[name], wanted[name], atol=1e-4, err_msg=name)


def test_named_coefficients_are_found_inside_jit():
    if "preconditioning" not in THEIRS:
        pytest.skip("this version of Optax has no names for coefficients")
    params = drawn(3, {"w": (4, 4)})
    found, wanted = (
        jax.jit(tx.update)(params, tx.init(params), params)[0]["w"]
        for tx in (
            optax.inject_hyperparams(optax_muon)(0.1, "dion"),
            optax.contrib.muon(0.1, "dion"),
        )
    )
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_signature_matches_optax():
    ours = inspect.signature(optax_muon).parameters
    assert [name for name in ours if name in THEIRS] == [*THEIRS]
    # Of these, Optax 0.2.6 has none, 0.2.7 the last two.
    new = {"preconditioning", "adam_learning_rate", "consistent_rms"}
    assert ours.keys() - THEIRS <= {"method"} | new
    for name, parameter in THEIRS.items():
        assert ours[name].default == parameter.default
        assert ours[name].kind == parameter.kind


FILTERED = {"layer": {"kernel": (6, 9), "act": None, "bias": (9,)}, "act": None, "head": (9, 4)}


@pytest.mark.parametrize(
    "dims",
    [
        None,
        {"layer": {"kernel": Dims(), "act": None, "bias": None}, "act": None, "head": Dims()},
        {"layer": {"kernel": Dims(), "act": Dims(), "bias": None}, "act": Dims(), "head": None},
        {"layer": None, "act": None, "head": Dims(1, 0)},
        lambda params: jax.tree.map(lambda x: Dims() if x.ndim == 2 else None, params),
    ],
    ids=["default", "tree", "dims at holes", "prefix", "function"],
)
def test_none_parameters_match_optax(dims):
    """Filtered Equinox modules hold `None` instead of functions."""
    params, grads = drawn(28, FILTERED), drawn(29, FILTERED)
    results = []
    for make in (optax_muon, optax.contrib.muon):
        tx = make(0.1, muon_weight_dimension_numbers=dims)
        try:
            results.append(tx.update(grads, tx.init(params), params)[0])
        except ValueError:
            results.append(None)
    ours, theirs = results
    if theirs is not None:  # Optax rejects some trees in which `None` has two meanings
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), ours, theirs)
    assert ours is not None


def flax_nnx() -> Any:
    nnx = pytest.importorskip("flax.nnx")
    rngs = nnx.Rngs(0)
    layers = nnx.Embed(7, 4, rngs=rngs), nnx.MultiHeadAttention(2, 4, decode=False, rngs=rngs)
    return nnx.state(nnx.Dict(embed=layers[0], attention=layers[1]), nnx.Param)


def flax_linen() -> Any:
    linen = pytest.importorskip("flax.linen")
    return linen.Dense(3).init(jax.random.key(0), jnp.ones((1, 4)))


def equinox() -> Any:
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(4, 3, 5, 1, key=jax.random.key(0))
    return eqx.filter(model, eqx.is_inexact_array)


@pytest.mark.slow_except("flax_linen")
@pytest.mark.parametrize("model", [flax_nnx, flax_linen, equinox])
def test_one_call_trains_whole_models(model):
    """Arrays of two axes by Muon, all others by Adam, as in Optax."""
    params = model()
    leaves, treedef = jax.tree.flatten(params)
    rng = np.random.default_rng(30)
    grads = treedef.unflatten([rng.standard_normal(x.shape).astype(np.float32) for x in leaves])
    found, wanted = (
        jax.jit(lambda g, w, tx=make(0.1): tx.update(g, tx.init(w), w)[0])(grads, params)
        for make in (optax_muon, optax.contrib.muon)
    )
    assert jax.tree.structure(found) == treedef
    triples = zip(leaves, jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    for leaf, ours, theirs in triples:
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
        if leaf.ndim != 2:  # the first step of Adam with Nesterov's momentum is a sign
            size = 0.1 * (1 + 0.9 * (1 - 0.9) / (1 - 0.9**2))
            np.testing.assert_allclose(np.abs(ours), size, rtol=1e-4)


def test_method_sets_accuracy_of_directions():
    params = drawn(23, {"w": (6, 9)})
    for method, distance in ((SVD(), 1e-5), (TRAINING_MSIGN, 0.05)):
        tx = optax_muon(1.0, method=method, nesterov=False)
        updates: Any = tx.update(params, tx.init(params), params)[0]
        singular = np.linalg.svd(updates["w"], compute_uv=False)
        np.testing.assert_allclose(singular, np.sqrt(9 / 6), rtol=distance)


@pytest.mark.parametrize(
    "kind", [AxisType.Auto, pytest.param(AxisType.Explicit, marks=pytest.mark.slow)]
)
def test_updates_on_mesh_match_single_device(kind):
    mesh = jax.make_mesh((8,), ("x",), (kind,))
    shapes = {"a": (8, 6), "b": (8, 6), "experts": (8, 16, 3)}
    params, grads = drawn(24, shapes), drawn(25, shapes)
    tx = optax_muon(0.1, muon_weight_dimension_numbers=Dims(-2, -1))
    wanted, _ = tx.update(grads, tx.init(params), params)
    place = NamedSharding(mesh, PartitionSpec("x"))
    params, grads = jax.device_put((params, grads), place)
    with jax.set_mesh(mesh):
        updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
    for found, expected in zip(*map(jax.tree.leaves, (updates, wanted)), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
        # With automatic axes the compiler chooses: JAX 0.12 does not shard the smallest.
        assert kind == AxisType.Auto or found.sharding.is_equivalent_to(place, found.ndim)


def test_muon_with_budgets_matches_optax():
    """Migration by names: where a matrix narrows, a budget gives Optax's first update."""
    shapes = {"embedding": (10, 8), "query": (8, 2, 4), "head": (8, 3)}
    params, grads = drawn(28, shapes), drawn(29, shapes)
    dims = {"embedding": None, "query": Dims(0, (1, 2)), "head": Dims()}
    matrix = Euclidean(RMSToRMS())
    query = LaidOut(matrix, Layout.from_muon(dims["query"]))
    geometry = {"embedding": None, "query": query, "head": matrix.transposed()}
    budgets = optim.by_path({"head": (8 / 3) ** 0.5, "**": 1.0})
    muon = optim.muon(0.02, geometry, weight_decay=0.01, budgets=budgets, method=None)
    ours = optim.hybrid(muon, geometry, optax.nadam(0.02))
    theirs = optax.contrib.muon(
        0.02,
        weight_decay=0.01,
        ns_coeffs=(15 / 8, -5 / 4, 3 / 8),  # converges
        ns_steps=40,
        muon_weight_dimension_numbers=dims,
    )
    found, wanted = (jax.jit(tx.update)(grads, tx.init(params), params)[0] for tx in (ours, theirs))
    for name in shapes:
        np.testing.assert_allclose(found[name], wanted[name], rtol=1e-3, atol=1e-5)
