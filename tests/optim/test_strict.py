"""JAX's strict modes, and derivatives with respect to hyperparameters."""

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
from tests.optim.training import drawn

KINDS = "steepest-others", "retract", "normalize", "muon", "neurons", "qk clip", "riemannian_sgd"


@pytest.mark.slow_except("muon")
@pytest.mark.parametrize("name", [*KINDS, "manifold_muon-sets"])
def test_strict_modes_raise_no_errors(name):
    instance = INSTANCES[name]
    tx, params, grads = instance.tx(), instance.params(), instance.grads()
    with (
        jax.numpy_rank_promotion("raise"),
        jax.numpy_dtype_promotion("strict"),
        jax.debug_nans(True),
    ):
        state, update = tx.init(params), jax.jit(tx.update)
        update(grads, state, params)
        update(jax.tree.map(jnp.zeros_like, grads), state, params)
        if name == "retract":  # op by op
            tx.update(grads, state, params)


@pytest.mark.parametrize("case", MANIFOLDS, ids=lambda case: case.name)
def test_manifold_methods_promote_nothing(case):
    """Neither dtypes nor ranks, of a stack in float32; traced only, not run."""
    manifold, shape = case.manifold, (2, *case.shape)
    dual = jax.eval_shape(lambda: manifold.init_dual(shape))
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        point = jax.eval_shape(lambda: manifold.random_point(jax.random.key(0), shape, jnp.float32))
        for method in (manifold.project, manifold.distance):
            jax.eval_shape(method, point)
        for method in (manifold.retract, manifold.project_tangent):
            jax.eval_shape(method, point, point)
        jax.eval_shape(manifold.steepest, point, point, dual)


SHAPES = {"w": (6, 3), "stack": (2, 4, 4), "bias": (4,)}


def on(matrix: Any) -> dict[str, Any]:
    return {"w": matrix, "stack": matrix.stacked(), "bias": Euclidean()}


OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "fast": lambda rate, decay: optim.manifold_muon(
        rate, on(Stiefel(solver=ProjectedPolar())), decay
    ),
    # Converged, because msign always has the derivative of the exact polar factor.
    "muon": lambda rate, decay: optim.muon(rate, on(Euclidean(RMSToRMS())), decay, method=None),
    "normalize": lambda rate, decay: optim.chain(
        optim.normalize(optax.trace(decay), on(Stiefel())),
        optax.scale_by_learning_rate(rate),
        optim.retract(on(Stiefel())),
    ),
    "sgd": lambda rate, decay: optim.riemannian_sgd(rate, on(Stiefel()), decay),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_hyperparameter_gradients_match_finite_differences(name):
    """Differentiate three steps with respect to learning rate and momentum."""
    start = optim.init_tree(on(Stiefel()), jax.random.key(0), abstract(SHAPES))

    def after(numbers):
        tx: Any = OPTIMIZERS[name](numbers[0], numbers[1])

        def step(carry, sign):
            params, state = carry
            grads = jax.tree.map(lambda x, y: sign * jnp.sin(3 * x - y), params, target)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        (last, _), _ = jax.lax.scan(step, (params, tx.init(params)), jnp.array([1.0, -0.5, 2.0]))
        return optax.tree.vdot(last, target)

    with jax.enable_x64(True), jax.numpy_rank_promotion("raise"), jax.debug_nans(True):
        params, target = (jax.tree.map(jnp.float64, tree) for tree in (start, drawn(1, SHAPES)))
        at, both = jnp.array([0.13, 0.8]), jax.jit(jax.value_and_grad(after))
        steps = [1e-5 * e for e in jnp.eye(2)]
        wanted = [(both(at + e)[0] - both(at - e)[0]) / 2e-5 for e in steps]
        found = both(at)[1]
    np.testing.assert_allclose(found, wanted, atol=1e-3 * float(np.linalg.norm(wanted)))
