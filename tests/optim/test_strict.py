"""JAX's strict modes, and derivatives with respect to hyperparameters."""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from manifoldmuon import optim
from manifoldmuon.manifolds import Euclidean, Stiefel
from manifoldmuon.manifolds.solvers import ProjectedPolar
from manifoldmuon.norms import RMSToRMS
from tests.instances import MANIFOLDS
from tests.optim.instances import INSTANCES, abstract


@pytest.mark.slow_except("muon")
@pytest.mark.parametrize(
    "name",
    [
        "steepest-others",
        "retract",
        "normalize",
        "muon",
        "neurons",
        "qk clip",
        "riemannian_sgd",
        "manifold_muon-sets",
    ],
)
def test_strict_modes_raise_no_errors(name):
    instance = INSTANCES[name]
    tx, params, grads = instance.tx(), instance.params(), instance.grads()
    with strict(), jax.numpy_dtype_promotion("strict"):
        state, update = tx.init(params), jax.jit(tx.update)
        update(grads, state, params)
        update(jax.tree.map(jnp.zeros_like, grads), state, params)
        if name == "retract":  # op by op
            tx.update(grads, state, params)


@pytest.mark.parametrize("case", MANIFOLDS, ids=lambda case: case.name)
def test_manifold_methods_promote_no_dtypes(case):
    """With `jax_numpy_dtype_promotion="strict"` in float32; traced only, not run."""
    manifold = case.manifold

    def every_method(point, vector):
        moved = manifold.retract(point, vector)
        answer = manifold.steepest(point, vector, manifold.init_dual(case.shape))
        return moved, answer, manifold.project_tangent(point, vector), manifold.distance(point)

    with jax.numpy_dtype_promotion("strict"):
        point = jax.eval_shape(
            lambda: manifold.random_point(jax.random.key(0), case.shape, jnp.float32)
        )
        jax.eval_shape(every_method, point, point)
        jax.eval_shape(manifold.project, point)


@pytest.mark.parametrize("case", MANIFOLDS, ids=lambda case: case.name)
def test_manifold_methods_promote_no_ranks(case):
    """With `jax_numpy_rank_promotion="raise"`, of a stack."""
    stack = jax.ShapeDtypeStruct((2, *case.shape), jnp.float32)
    manifold = case.manifold
    dual = jax.eval_shape(lambda: manifold.init_dual(stack.shape))
    with jax.numpy_rank_promotion("raise"):
        for method in (manifold.project, manifold.distance):
            jax.eval_shape(method, stack)
        for method in (manifold.retract, manifold.project_tangent):
            jax.eval_shape(method, stack, stack)
        jax.eval_shape(manifold.steepest, stack, stack, dual)


def strict() -> contextlib.ExitStack:
    stack = contextlib.ExitStack()
    stack.enter_context(jax.numpy_rank_promotion("raise"))
    stack.enter_context(jax.debug_nans(True))
    return stack


SHAPES = {"w": (6, 3), "stack": (2, 4, 4), "bias": (4,)}


def on(matrix: Any) -> dict[str, Any]:
    return {"w": matrix, "stack": matrix.stacked(), "bias": Euclidean()}


def normed(rate, decay):
    return optim.chain(
        optim.normalize(optax.trace(decay), on(Stiefel())),
        optax.scale_by_learning_rate(rate),
        optim.retract(on(Stiefel())),
    )


OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "fast": lambda rate, decay: optim.manifold_muon(
        rate, on(Stiefel(solver=ProjectedPolar())), decay
    ),
    # Converged, because msign always has the derivative of the exact polar factor.
    "muon": lambda rate, decay: optim.muon(rate, on(Euclidean(RMSToRMS())), decay, method=None),
    "normalize": normed,
    "sgd": lambda rate, decay: optim.riemannian_sgd(rate, on(Stiefel()), decay),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_hyperparameter_gradients_match_finite_differences(name):
    """Differentiate three steps with respect to learning rate and momentum."""
    shapes = abstract(SHAPES)
    params = jax.jit(lambda: optim.init_tree(on(Stiefel()), jax.random.key(0), shapes))()
    with jax.enable_x64(True), strict():
        found, wanted = derivatives(OPTIMIZERS[name], params)
    np.testing.assert_allclose(found, wanted, atol=1e-3 * float(np.linalg.norm(wanted)))


def derivatives(make: Callable[..., Any], params: Any) -> tuple[Any, Any]:
    params = jax.tree.map(lambda x: x.astype(jnp.float64), params)
    leaves, treedef = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    drawn = [jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys, leaves, strict=True)]
    target = jax.tree.unflatten(treedef, drawn)

    def after(numbers):
        tx: Any = make(numbers[0], numbers[1])

        def step(carry, sign):
            params, state = carry
            grads = jax.tree.map(lambda x, y: sign * jnp.sin(3 * x - y), params, target)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        (last, _), _ = jax.lax.scan(step, (params, tx.init(params)), jnp.array([1.0, -0.5, 2.0]))
        return optax.tree.vdot(last, target)

    at, width = jnp.array([0.13, 0.8]), 1e-5
    both = jax.jit(jax.value_and_grad(after))
    steps = [width * e for e in jnp.eye(2)]
    wanted = [(both(at + e)[0] - both(at - e)[0]) / (2 * width) for e in steps]
    return both(at)[1], wanted
