"""`optim.optax_muon` against `optax.contrib.muon`, which it replaces."""

import contextlib
import inspect
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

from manifoldmuon import optim
from manifoldmuon.linalg import SVD, TRAINING_MSIGN
from manifoldmuon.manifolds import Euclidean, LaidOut, Layout
from manifoldmuon.norms import RMSToRMS
from manifoldmuon.optim import optax_muon
from tests.modules.measure import random_like
from tests.optim.training import drawn, first_update
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


CALLS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "tree": {"muon_weight_dimension_numbers": DIMS, "weight_decay": 0.1, "consistent_rms": 0.2},
    "callable": {
        "muon_weight_dimension_numbers": lambda params: jax.tree.map(
            lambda x: Dims(-2, -1) if x.ndim == 3 else None, params
        ),
        "adam_learning_rate": 0.01,
    },
    "not nesterov": {"nesterov": False, "beta": 0.8, "eps": 1.0, "adam_weight_decay": 0.1},
    "adaptive": {"adaptive": True, "muon_weight_dimension_numbers": DIMS, "adam_b1": 0.5},
    "spectral": {"preconditioning": "spectral", "ns_coeffs": "dion", "adam_b2": 0.9},
    "aol": {"preconditioning": "aol", "ns_steps": 4, "adam_eps_root": 0.1},
    "schatten": {
        "preconditioning": "schatten",
        "weight_decay": 0.1,
        "weight_decay_mask": lambda params: jax.tree.map(lambda x: x.ndim > 2, params),
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

    def assert_near(found, wanted):
        scale = float(jnp.max(jnp.abs(wanted)))
        np.testing.assert_allclose(found, wanted, rtol=0, atol=close * scale)

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
            jax.tree.map(assert_near, updates, wanted)
            params = optax.apply_updates(params, updates)
        jax.tree.map(assert_near, state, other)


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


NUMBERS = {
    "default": None,
    "tree": {"layer": {"kernel": Dims(), "act": None, "bias": None}, "act": None, "head": Dims()},
    "dims at holes": {
        "layer": {"kernel": Dims(), "act": Dims(), "bias": None}, "act": Dims(), "head": None
    },
    "prefix": {"layer": None, "act": None, "head": Dims(1, 0)},
    "function": lambda params: jax.tree.map(lambda x: Dims() if x.ndim == 2 else None, params),
}  # fmt: skip


@pytest.mark.parametrize("name", NUMBERS)
def test_none_parameters_match_optax(name):
    """Filtered Equinox modules hold `None` instead of functions."""
    params, grads = drawn(28, FILTERED), drawn(29, FILTERED)
    numbers = {"muon_weight_dimension_numbers": NUMBERS[name]}
    ours, theirs = optax_muon(0.1, **numbers), optax.contrib.muon(0.1, **numbers)
    found, _ = ours.update(grads, ours.init(params), params)
    # Optax rejects some trees in which `None` has two meanings.
    with contextlib.suppress(ValueError):
        wanted, _ = theirs.update(grads, theirs.init(params), params)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), found, wanted)


RNGS, KEY = nnx.Rngs(0), jax.random.key(0)
NNX = nnx.Dict(embed=nnx.Embed(7, 4, rngs=RNGS), attention=nnx.MultiHeadAttention(2, 4, rngs=RNGS))
MODELS = {
    "nnx": nnx.state(NNX, nnx.Param),
    "linen": linen.Dense(3).init(KEY, jnp.ones((1, 4))),
    "equinox": eqx.filter(eqx.nn.MLP(4, 3, 5, 1, key=KEY), eqx.is_inexact_array),
}


@pytest.mark.slow_except("linen")
@pytest.mark.parametrize("name", MODELS)
def test_one_call_trains_whole_models(name):
    """Arrays of two axes by Muon, all others by Adam, as in Optax."""
    params = MODELS[name]
    grads, (leaves, treedef) = random_like(params), jax.tree.flatten(params)
    found, wanted = (
        first_update(make(0.1), grads, params) for make in (optax_muon, optax.contrib.muon)
    )
    assert jax.tree.structure(found) == treedef
    for leaf, ours, theirs in zip(leaves, *map(jax.tree.leaves, (found, wanted)), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
        if leaf.ndim != 2:  # the first step of Adam with Nesterov's momentum is a sign
            size = 0.1 * (1 + 0.9 * (1 - 0.9) / (1 - 0.9**2))
            np.testing.assert_allclose(np.abs(ours), size, rtol=1e-4)


def test_method_sets_accuracy_of_directions():
    params = drawn(23, {"w": (6, 9)})
    for method, distance in ((SVD(), 1e-5), (TRAINING_MSIGN, 0.05)):
        tx = optax_muon(1.0, method=method, nesterov=False)
        singular = np.linalg.svd(first_update(tx, params, params)["w"], compute_uv=False)
        np.testing.assert_allclose(singular, np.sqrt(9 / 6), rtol=distance)


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
    found, wanted = (first_update(tx, grads, params) for tx in (ours, theirs))
    for name in shapes:
        np.testing.assert_allclose(found[name], wanted[name], rtol=1e-3, atol=1e-5)
