"""Programs for third-party trainers; each needs its trainer installed."""

import importlib
import sys

import pytest

from examples.trainers import maxtext


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "needs"), [("tunix", "tunix.sft.peft_trainer"), ("kauldron", "kauldron.kd")]
)
def test_trainer_trains_on_manifolds(name, needs):
    pytest.importorskip(needs, exc_type=ImportError)
    before, after, far = importlib.import_module(f"examples.trainers.{name}").main(40)
    assert after < 0.8 * before
    assert far < 1e-5


@pytest.mark.slow
def test_maxtext_tables_become_geometry():
    distances = maxtext.main()
    assert set(distances) == {"query", "out", "wi"}
    assert max(distances.values()) < 1e-6


@pytest.mark.slow
def test_levanter_linear_layers_get_their_layouts(monkeypatch):
    """Two linear layers (the second stacked for a scan), an embedding and a hole."""
    pytest.importorskip("levanter.optim.config", exc_type=ImportError)
    monkeypatch.delitem(sys.modules, "examples.trainers.levanter", raising=False)
    haliax, equinox = pytest.importorskip("haliax"), pytest.importorskip("equinox")
    import jax
    import jax.numpy as jnp

    levanter = importlib.import_module("examples.trainers.levanter")
    layers, wide = haliax.Axis("layers", 3), haliax.Axis("wide", 6)
    inside, heads, out = haliax.Axis("in", 4), haliax.Axis("heads", 2), haliax.Axis("out", 5)
    keys = jax.random.split(jax.random.key(0), 3)
    one = haliax.nn.Linear.init(inside, (heads, out), key=keys[0], use_bias=False)
    many = haliax.vmap(lambda key: haliax.nn.Linear.init(inside, wide, key=key), layers)(keys)
    embedding = haliax.nn.Embedding.init(haliax.Axis("words", 7), inside, key=keys[1])
    model = {"one": one, "many": many, "embedding": embedding, "name": "text"}
    params = levanter.project(equinox.filter(model, equinox.is_inexact_array))
    tx = levanter.ManifoldMuonConfig(learning_rate=0.1).build(10)
    state, grads = tx.init(params), jax.tree.map(jnp.sin, params)
    updates, state = tx.update(grads, state, params)
    updates, state = tx.update(grads, state, params)  # the warm-up starts at rate 0
    moved = equinox.apply_updates(params, updates)
    assert set(state.hyperparams) == {"learning_rate", "adam_lr"}
    array = moved["one"].weight.rearrange(("heads", "out", "in")).array.reshape(10, 4)
    assert jnp.allclose(array.T @ array, jnp.eye(4), atol=1e-5)
    stack = moved["many"].weight.rearrange(("layers", "wide", "in")).array
    assert jnp.allclose(jnp.matmul(stack.mT, stack), jnp.eye(4), atol=1e-5)
    for name in ("one", "many", "embedding"):
        difference = moved[name].weight.array - params[name].weight.array
        assert float(jnp.abs(difference).max()) > 0
