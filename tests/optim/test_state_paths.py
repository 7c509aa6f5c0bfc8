"""States are nested dictionaries with the paths of the parameters, whatever holds these."""

import functools
import types
from typing import Any

import equinox as eqx
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from manifoldmuon import contrib, optim
from manifoldmuon._internal.trees.paths import flat
from manifoldmuon.manifolds import Euclidean, Hypersphere, Layout, Stiefel
from manifoldmuon.manifolds.solvers import DualAscent
from manifoldmuon.norms import RMSToRMS
from tests.optim.test_rules import Seen, count_visits

CARRIED = Stiefel(solver=DualAscent(steps=2))  # has warm starts
MATRICES = Euclidean(RMSToRMS())
SPHERES = Hypersphere(ndim=2)
FUSED = Stiefel().with_axes(-2, -1, out_blocks=(3, 1))
MUON = optim.manifold_muon(0.1, CARRIED)


NETWORK: Any = types.SimpleNamespace(geometry=lambda: CARRIED, budgets=lambda: 1.0)


def but_head(path, leaf):
    return None if 5 in leaf.shape else CARRIED


NORMED = optim.normalize(optax.scale_by_adam(), MATRICES)
CLIPPED = contrib.with_qk_clip(optim.muon(0.1, MATRICES), MATRICES, None)
TRANSFORMATIONS = {
    "adamh": optim.adamh(0.1, SPHERES),
    "agd": optim.agd(Layout()),
    "chain": optim.chain(NORMED, optax.scale(-0.1)),
    "descend": optim.descend(optax.constant_schedule(0.1), CARRIED),
    "hybrid": optim.hybrid(optim.manifold_muon(0.1, but_head), but_head, optax.adam(0.1)),
    "hyperball": optim.hyperball(optax.scale_by_adam(), 0.1, SPHERES),
    "keep_norms": optim.keep_norms(SPHERES),
    "manifold_muon": optim.manifold_muon(0.1, but_head, rest=optax.adam(0.1)),
    "modular": optim.modular(0.1, NETWORK),
    "muon": optim.muon(0.1, MATRICES, clip=1.0, track_gap=True),
    "muonh": optim.muonh(0.1, SPHERES),
    "normalize": NORMED,
    "normed": optim.normed(0.1, optax.scale_by_adam(), NETWORK),
    "optax_muon": optim.optax_muon(0.1),
    "project_tangent": optim.project_tangent(CARRIED),
    "retract": optim.retract(CARRIED),
    "riemannian_adam": optim.riemannian_adam(0.1, CARRIED),
    "riemannian_sgd": optim.riemannian_sgd(0.1, CARRIED, 0.9),
    "scale_by_budget": optim.scale_by_budget(0.5),
    "scale_by_steepest": optim.scale_by_steepest(CARRIED),
    "start_anywhere": optim.start_anywhere(MUON),
    "start_on": optim.start_on(MUON, CARRIED),
    "transformation": optim.transformation(count_visits, SPHERES, Seen, lambda *_: (jnp.ones(()),)),
    "with_master_copies": optim.with_master_copies(MUON),
    "normuon": contrib.normuon(0.1, MATRICES),
    "quantized": contrib.quantized(MUON, block=2, min_size=0),
    "scale_by_neuron_rms": contrib.scale_by_neuron_rms(MATRICES),
    "with_qk_clip": optax.GradientTransformationExtraArgs(
        CLIPPED.init, functools.partial(CLIPPED.update, max_logits=0.0)
    ),
}  # fmt: skip


def dictionaries():
    blocks = [{"kernel": jnp.ones((4, 4))} for _ in range(2)]
    return {"blocks": blocks, "head": {"kernel": jnp.ones((5, 4))}}


def flax_model():
    rngs = nnx.Rngs(0)
    layers = [nnx.Linear(4, n, use_bias=False, rngs=rngs) for n in (4, 4, 5)]
    return nnx.state(nnx.Sequential(*layers), nnx.Param)


def equinox_model():
    key = jax.random.key(0)
    layers = [eqx.nn.Linear(4, n, use_bias=False, key=key) for n in (4, 4, 5)]
    return eqx.filter(eqx.nn.Sequential(layers), eqx.is_inexact_array)


PARAMETERS = [dictionaries, flax_model, equinox_model]


def test_every_transformation_is_listed():
    public = [getattr(module, name) for module in (optim, contrib) for name in module.__all__]
    hints = {x.__name__: getattr(x, "__annotations__", {}) for x in public if callable(x)}
    names = {name for name, hint in hints.items() if "Transformation" in str(hint.get("return"))}
    assert TRANSFORMATIONS.keys() == names


@pytest.mark.parametrize("make", PARAMETERS)
@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_state_paths_are_parameter_paths_and_round_trip_when_joined(name, make):
    params, tx = jax.eval_shape(make), TRANSFORMATIONS[name]
    shapes = jax.eval_shape(tx.init, params)
    leaves, treedef = jax.tree.flatten(shapes)
    numbered = [np.full(x.shape, i, x.dtype) for i, x in enumerate(leaves)]
    state = jax.tree.unflatten(treedef, numbered)
    for keys in flat(state):
        assert not any("/" in key or "." in key for key in keys)
        whole = [path for path in flat(params) if joined(path) in joined(keys)]
        named = {key for path in flat(params) for key in path if key.isalpha()}
        assert len(whole) == bool(named & set(keys)), keys
    for separator in "/.":
        named = flax.serialization.to_state_dict(state)
        pairs = flatten_dict(named, keep_empty_nodes=True, sep=separator)
        found = flax.serialization.from_state_dict(state, unflatten_dict(pairs, sep=separator))
        assert jax.tree.structure(found) == treedef
        assert all(a is b for a, b in zip(jax.tree.leaves(found), numbered, strict=True))
    _, after = jax.eval_shape(tx.update, params, shapes, params)
    assert jax.tree.structure(after) == treedef


def joined(keys):
    return f"/{'/'.join(keys)}/"


def test_every_key_of_a_path_is_a_level():
    params = {"a/b": [jnp.eye(4)], "c": {"d.e": jnp.eye(4)}}
    state: Any = optim.scale_by_steepest({"a/b": FUSED, "c": Stiefel()}).init(params)
    assert state.gap == {"a/b": {"0": {"0": 0, "1": 0}}, "c": {"d.e": 0}}
    assert list(optim.monitor(state)["gap"]) == ["a/b/0/0", "a/b/0/1", "c/d.e"]
    state = optim.keep_norms(SPHERES).init(jnp.eye(4))
    assert state.radius == {"": 2}


def test_quantised_paths_that_read_the_same_stay_apart():
    params = {"a/b": jnp.ones((2, 4)), "a": {"b": 2 * jnp.ones((2, 4))}}
    tx = contrib.quantized(optax.trace(0.9), min_size=0)
    _, state = tx.update(params, tx.init(params), params)
    updates: Any = tx.update(jax.tree.map(jnp.zeros_like, params), state, params)[0]
    np.testing.assert_allclose(updates["a/b"], 0.9, rtol=1e-6)
    np.testing.assert_allclose(updates["a"]["b"], 1.8, rtol=1e-6)
