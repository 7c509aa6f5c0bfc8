"""Flax and Equinox models with the modular norm of an architecture."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from manifoldmuon import modules, norms, optim
from manifoldmuon.manifolds import EmbeddingRows, Euclidean, Hypersphere, LaidOut, Layout, Stiefel
from tests.modules.measure import gaussian

MATRIX = Euclidean(norms.RMSToRMS())
KERNEL = MATRIX.transposed()
# 4 -> 6 -> 6 -> 3; the second layer has mass 3, ReLUs have sensitivity 1 / sqrt(2).
RELU = modules.ReLU(modules.ReLU.BALANCED)
MODULE = modules.Linear(3, 6) @ RELU @ modules.Linear(6, 6, mass=3.0) @ RELU @ modules.Linear(6, 4)


def mlp(first: str, second: str, third: str, manifold: Any) -> Any:
    middle = RELU @ modules.Param(second, manifold, mass=3.0) @ RELU
    net = modules.Param(third, manifold) @ middle @ modules.Param(first, manifold)
    return modules.ExternalModule(net)


class Nnx(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        sizes = zip((4, 6, 6), (6, 6, 3), strict=True)
        self.layers = nnx.List([nnx.Linear(m, n, use_bias=False, rngs=rngs) for m, n in sizes])

    def __call__(self, x):
        for layer in self.layers[:-1]:
            x = nnx.relu(layer(x))
        return self.layers[-1](x)


def flax_nnx() -> tuple[Any, Any, Any]:
    graph, params = nnx.split(Nnx(nnx.Rngs(0)), nnx.Param)
    declared = mlp("layers/0/kernel", "layers/1/kernel", "layers/2/kernel", KERNEL)
    return params, lambda p, x: nnx.merge(graph, p)(x), declared


def equinox() -> tuple[Any, Any, Any]:
    model = eqx.nn.MLP(4, 3, 6, 2, use_bias=False, use_final_bias=False, key=jax.random.key(0))
    params, rest = eqx.partition(model, eqx.is_array)
    declared = mlp("layers/0/weight", "layers/1/weight", "layers/2/weight", MATRIX)
    return params, lambda p, x: jax.vmap(eqx.combine(p, rest))(x), declared


X = gaussian(1, 5, 4)


@functools.partial(jax.jit, static_argnums=(0, 1))
def take_step(architecture: Any, forward: Any, weights: Any) -> list[Any]:
    tx = optim.modular(0.1, architecture)
    grads = jax.grad(lambda w: jnp.sum(forward(w, X) ** 3))(weights)
    return jax.tree.leaves(tx.update(grads, tx.init(weights), weights)[0])


@pytest.mark.slow_except("equinox")
@pytest.mark.parametrize("make", [flax_nnx, equinox])
def test_training_step_matches_module(make):
    params, apply, declared = make()
    turn = (lambda w: w.T) if make is not equinox else (lambda w: w)
    first, second, third = (turn(jnp.asarray(leaf)) for leaf in jax.tree.leaves(params))
    wanted = take_step(MODULE, MODULE.apply, (first, (), second, (), third))
    for found, expected in zip(take_step(declared, apply, params), wanted, strict=True):
        np.testing.assert_allclose(turn(found), expected, atol=1e-6)


def test_budgets_match_module():
    declared = mlp("a/0", "a/1", "b", MATRIX)
    first, _, second, _, third = MODULE.budgets()
    assert declared.budgets() == {"a": {"0": first, "1": second}, "b": third}
    assert declared.geometry() == {"a": {"0": MATRIX, "1": MATRIX}, "b": MATRIX}
    np.testing.assert_allclose([first, second, third], [2 / 5, 3 * np.sqrt(2) / 5, 1 / 5])
    assert "Param 'a/0' on Euclidean" in str(declared)


def test_budgets_of_scans_biases_and_frozen_weights():
    """Every operator of the algebra gives the budgets of the same tree with atoms."""

    def net(block, bias, head):
        body = (2 * (block @ modules.Identity())) ** 3
        return (head @ modules.residual(body, 4) @ bias).tare(absolute=6.0)

    flat, zero = Euclidean(norms.MaxAbs(ndim=1)), modules.Sharpness(0, 0, 0)
    block, bias = modules.Param("blocks/w", KERNEL), modules.Param("b", flat, sharpness=zero)
    named = modules.ExternalModule(net(block, bias, modules.Param("h", MATRIX)))
    second, wanted, third = net(*[modules.Linear(2, 2)] * 3).budgets()
    found = named.budgets()
    np.testing.assert_allclose(found["blocks"]["w"], jax.tree.leaves(wanted)[0])
    assert found["blocks"]["w"].shape == (4, 3, 1, 1)
    np.testing.assert_allclose([found["b"], found["h"]], [second, third])
    params = {"blocks": {"w": jnp.ones((4, 3, 2, 2))}, "b": jnp.ones(2), "h": jnp.ones((2, 2))}
    tx = optim.modular(0.1, named)
    jax.eval_shape(lambda p: tx.update(p, tx.init(p), p), params)
    frozen = modules.Param("a", MATRIX, mass=0.0) @ modules.Param("b", MATRIX)
    assert modules.ExternalModule(frozen).budgets() == {"a": 0.0, "b": 1.0}


def test_repeated_path_is_a_shared_weight():
    table, middle = Euclidean(norms.L1ToRMS()), 3 * modules.Param("w", MATRIX)
    named = modules.Param("table", table) @ middle @ modules.Param("table", table, mass=2.0)
    atoms = modules.Unembed(7, 4) @ (3 * modules.Linear(4, 4)) @ modules.Embed(4, 7, mass=2.0)
    shared, middle, _, _ = modules.Tied(atoms, (0, 3)).budgets()
    assert modules.ExternalModule(named).budgets() == {"table": shared, "w": middle}


def test_single_array_has_empty_path():
    assert modules.ExternalModule(modules.Param("", Stiefel())).geometry() == Stiefel()
    assert modules.ExternalModule(modules.Param("", Stiefel()) ** 2).budgets() == 0.5


FREE = {
    "of the Stiefel manifold": (Stiefel(norms.FanRatio()), norms.Spectral(scale=norms.FanRatio())),
    "of steps in another norm": (Stiefel(2.0, step_norm=norms.Frobenius()), norms.Frobenius()),
    "of rows": (EmbeddingRows(), norms.MaxRowNorm(norms.RootDim())),
    "of a vector": (Hypersphere(3.0), norms.Frobenius(ndim=1, scale=3.0)),
    "of flat space": (MATRIX, norms.RMSToRMS()),
}


@pytest.mark.parametrize("name", FREE)
def test_unconstrained_param_keeps_its_norm(name):
    manifold, norm = FREE[name]
    param = modules.Param("a/b", manifold, mass=2.0, sensitivity=3.0, ndim=4)
    free = param.unconstrained()
    assert free == modules.Param("a/b", Euclidean(norm), mass=2.0, sensitivity=3.0, ndim=4)
    assert free.unconstrained() == free
    copies = 4 - manifold.ndim  # `ndim` declares them
    assert modules.ExternalModule(free).geometry() == {"a": {"b": Euclidean(norm).stacked(copies)}}
    if manifold.ndim == 2:
        turned = LaidOut(Euclidean(norm), Layout(in_axes=-2, out_axes=-1))
        assert modules.Param("a", manifold.transposed()).unconstrained().manifold == turned


def test_constrained_param_keeps_its_manifold():
    laid_out = Stiefel(norms.FanRatio()).with_axes(in_axes=-3, out_axes=-4, taps=(-2, -1))
    for manifold in (Stiefel(), EmbeddingRows(), Hypersphere(), laid_out):
        param = modules.Param("a", manifold, mass=2.0)
        assert param.constrained() == param
        assert modules.ExternalModule(param.constrained()).geometry() == {"a": manifold}
