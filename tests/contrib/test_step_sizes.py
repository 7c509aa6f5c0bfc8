"""Step lengths without a learning rate, against the bounds that they come from."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy.optimize import minimize_scalar

from manifoldmuon import contrib, optim
from manifoldmuon.contrib import DeepTrust, SquareLossSmoothness
from manifoldmuon.manifolds import Euclidean, Hypersphere
from manifoldmuon.norms import Frobenius, RMSToRMS
from manifoldmuon.testing._transformations import BASICS, WRAPPERS, check_injected, make_case


@pytest.mark.parametrize("slope", [0.01, 0.3, 2.0, 50.0])
@pytest.mark.parametrize("value", [0.05, 0.5, 3.0])
def test_rules_minimise_their_majorants(slope, value):
    smoothness = np.sqrt(2 * value) * 0.7 + 1
    for rule, bound in (
        (SquareLossSmoothness(0.7), lambda h: -h * slope + smoothness * h**2 / 2),
        (DeepTrust(), lambda h: -h * slope + (np.exp(h) - 1) ** 2 / 2),
    ):
        best: Any = minimize_scalar(bound, bounds=(0, 100), method="bounded",
                                    options={"xatol": 1e-9})  # fmt: skip
        found = rule.length(jnp.float32(slope), jnp.float32(value))
        assert float(found) == pytest.approx(best.x, rel=1e-4)


# One linear layer on inputs of RMS norm 1: 1-smooth in the RMS-to-RMS norm, and convex.

INPUTS = np.random.default_rng(0).normal(size=(40, 5))
INPUTS *= np.sqrt(5) / np.linalg.norm(INPUTS, axis=1, keepdims=True)
OPTIMUM = np.random.default_rng(1).normal(size=(3, 5))
TARGETS = INPUTS @ OPTIMUM.T
GEOMETRY = {"w": Euclidean(RMSToRMS())}


def convex(params: Any) -> jax.Array:
    error = jnp.asarray(INPUTS, jnp.float32) @ params["w"].T - jnp.asarray(TARGETS, jnp.float32)
    return jnp.mean(error**2) / 2


def chain_of(link: Any, geometry: Any = None, budgets: Any = 1.0) -> Any:
    geometry = GEOMETRY if geometry is None else geometry
    return optim.chain(
        optim.scale_by_steepest(geometry),
        optim.scale_by_budget(budgets),
        link,
        optim.retract(geometry),
    )


def walk(tx: Any, loss: Any, params: Any, steps: int) -> tuple[np.ndarray, Any, Any]:
    """Losses, parameters and states of the link before the retraction, after every step."""

    @jax.jit
    def run(params):
        def step(carry, _):
            params, state = carry
            value, grads = jax.value_and_grad(loss)(params)
            updates, state = tx.update(grads, state, params, value=value, grad=grads, value_fn=loss)
            return (optax.apply_updates(params, updates), state), (value, params, state[2])

        return jax.lax.scan(step, (params, tx.init(params)), length=steps)[1]

    losses, visited, states = run(params)
    return np.asarray(losses, np.float64), visited, states


def test_the_smoothness_step_decreases_as_promised(rng):
    """By half the squared slope over the smoothness, in every step, from far and from near."""
    for scale in (0.1, 10.0):
        start = {"w": jnp.asarray(scale * rng.normal(size=(3, 5)), jnp.float32)}
        tx = chain_of(contrib.scale_by_rule(SquareLossSmoothness(0.0)))
        losses, _, state = walk(tx, convex, start, 30)
        slope = np.asarray(state.slope, np.float64)
        assert np.all(losses[1:] <= losses[:-1] - slope[:-1] ** 2 / 2 + 1e-6 * losses[0])
        np.testing.assert_allclose(state.learning_rate, state.slope, rtol=1e-6)
        assert losses[-1] < 0.1 * losses[0]


@pytest.mark.parametrize("spoilt", ["value", "grad"])
def test_a_nan_does_not_collapse_the_line_search(rng, spoilt):
    """One bad batch: no step is searched, and the next search begins where this one would have."""
    tx = contrib.scale_by_line_search(GEOMETRY)
    params = {"w": jnp.asarray(rng.normal(size=(3, 5)), jnp.float32)}
    value, grads = jax.value_and_grad(convex)(params)
    bad = {"value": value, "grad": grads}
    bad[spoilt] = jax.tree.map(lambda x: x * jnp.nan, bad[spoilt])
    update = jax.jit(lambda g, s, p, **extra: tx.update(g, s, p, value_fn=convex, **extra))
    _, before = update(grads, tx.init(params), params, value=value, grad=grads)
    updates, after = update(bad["grad"], before, params, **bad)
    assert before.learning_rate > 0
    assert after.learning_rate == before.learning_rate
    assert after.trials == 0
    hidden = spoilt == "value"  # there is no step then; a NaN in the gradient stays visible
    assert np.all(updates["w"] == 0 if hidden else np.isnan(updates["w"]))


def test_the_slope_is_the_dual_norm(rng):
    start = {"w": jnp.asarray(rng.normal(size=(3, 5)), jnp.float32)}
    tx = chain_of(contrib.scale_by_rule(DeepTrust()), budgets=0.25)
    _, _, state = walk(tx, convex, start, 1)
    grad = np.asarray(jax.grad(convex)(start)["w"], np.float64)
    nuclear = np.sqrt(3 / 5) * np.linalg.svd(grad, compute_uv=False).sum()
    assert float(state.slope[0]) == pytest.approx(0.25 * nuclear, rel=1e-4)


def test_the_distance_is_never_more_than_the_true_one():
    """The bound is a theorem here; and it comes near enough to be of use."""
    for seed, (scale, first) in enumerate([(1.0, 1e-2), (100.0, 1e-2), (1.0, 1e-4)]):
        rng = np.random.default_rng(seed)
        origin = OPTIMUM + scale * rng.normal(size=(3, 5))
        start = {"w": jnp.asarray(origin, jnp.float32)}
        budget = 0.5
        true = np.sqrt(5 / 3) * np.linalg.norm(origin - OPTIMUM, 2) / budget
        tx = chain_of(contrib.scale_by_distance(GEOMETRY, budget, first), budgets=budget)
        losses, visited, state = walk(tx, convex, start, 200)
        distance = np.asarray(state.distance, np.float64)
        assert np.all(distance <= true * (1 + 1e-4))
        assert distance[-1] > 0.05 * true
        assert losses[-1] < 0.05 * losses[0]
        check_recurrence(np.asarray(visited["w"], np.float64), budget, first, state)


def check_recurrence(weights, budget, first, state):
    """The published estimate in NumPy, along the weights that were visited."""
    total, gained, distance = np.zeros((3, 5)), 0.0, first
    for t, w in enumerate(weights[:40]):
        grad = (INPUTS @ w.T - TARGETS).T @ INPUTS / TARGETS.size
        h = distance / np.sqrt(t + 1)
        gained += h * np.sum(grad * (weights[0] - w))
        total += h * grad
        dual = budget * np.sqrt(3 / 5) * np.linalg.svd(total, compute_uv=False).sum()
        distance = max(distance, gained / dual)
        assert float(state.distance[t]) == pytest.approx(distance, rel=2e-3)
        assert float(state.learning_rate[t]) == pytest.approx(distance / np.sqrt(t + 1), rel=2e-3)


# A loss that is not convex; one of the weights lives on a sphere.

CURVED = {"w": Euclidean(RMSToRMS()), "v": Hypersphere(2.0)}
SHARES = {"w": 0.5, "v": 0.25}


def bumpy(params: Any) -> jax.Array:
    w, v = params["w"], params["v"]
    return jnp.sum(jnp.sin(3 * w)) + jnp.sum((w @ jnp.ones(w.shape[-1]) - v) ** 2)


def bumpy_by_hand(w: np.ndarray, v: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
    """The loss and its steepest ascending steps of modular norm 1, in NumPy."""
    miss = w.sum(axis=1) - v
    u, _, vt = np.linalg.svd(3 * np.cos(3 * w) + 2 * miss[:, None], full_matrices=False)
    tangent = -2 * miss + 2 * miss @ v * v / (v @ v)
    steps = 0.5 * np.sqrt(4 / 2) * u @ vt, 0.25 * 2 * tangent / np.linalg.norm(tangent)
    return np.sin(3 * w).sum() + miss @ miss, *steps


def test_the_line_search_accepts_what_armijo_accepts():
    rng = np.random.default_rng(1)
    start = {"w": jnp.asarray(rng.normal(size=(4, 2)), jnp.float32), "v": 2 * jnp.eye(4)[0]}
    tx = chain_of(contrib.scale_by_line_search(CURVED), CURVED, SHARES)
    losses, visited, state = walk(tx, bumpy, start, 30)
    slope = np.asarray(state.slope, np.float64)
    taken = np.asarray(state.learning_rate, np.float64)
    decrease = losses[:-1] - losses[1:]
    assert np.all(decrease >= 0.5 * taken[:-1] * slope[:-1] - 1e-5)
    assert losses[-1] < losses[0] - 1
    np.testing.assert_allclose(np.linalg.norm(visited["v"], axis=1), 2, rtol=1e-5)
    # It begins at twice the last step (the first at 1), and halves.
    begun = np.concatenate([[1.0], 2 * taken[:-1]])
    np.testing.assert_allclose(taken, begun * 0.5 ** (np.asarray(state.trials) - 1), rtol=1e-6)
    # Where the search has shrunk, twice the step would not have been accepted.
    shrunk = [t for t in range(29) if state.trials[t] > 1 and slope[t] > 0.1]
    assert shrunk
    for t in shrunk:
        w, v = (np.asarray(visited[name][t], np.float64) for name in "wv")
        loss, along, around = bumpy_by_hand(w, v)
        assert loss == pytest.approx(losses[t], abs=1e-4)
        h = 2 * taken[t]
        turned = v - h * around
        there, _, _ = bumpy_by_hand(w - h * along, 2 * turned / np.linalg.norm(turned))
        assert there > loss - 0.5 * h * slope[t] - 1e-4


def test_a_failed_search_leaves_the_weights_unchanged():
    tx = chain_of(contrib.scale_by_line_search(GEOMETRY, max_trials=3))
    params = {"w": jnp.ones((3, 5))}
    grads = jax.grad(convex)(params)
    update = jax.jit(tx.update, static_argnames="value_fn")
    for wrong in (lambda p: convex(p) + 1, lambda p: convex(p) * jnp.nan):
        updates, state = update(
            grads, tx.init(params), params, value=convex(params), grad=grads, value_fn=wrong
        )
        assert not np.any(updates["w"])
        assert int(state[2].trials) == 3
        assert float(state[2].learning_rate) == 0.25


def test_the_line_search_reaches_the_accuracy_of_float64():
    """A quadratic of known minimum 1: float32 would not see decreases below 1e-7."""
    target = np.random.default_rng(3).standard_normal((3, 5))
    with jax.enable_x64(True):
        geometry = {"w": Euclidean(Frobenius())}
        tx: Any = contrib.scale_by_line_search(geometry)

        def loss(p):
            return 1 + jnp.sum((p["w"] - target) ** 2)

        params = {"w": jnp.zeros((3, 5), jnp.float64)}
        state = tx.init(params)
        assert state.learning_rate.dtype == state.slope.dtype == jnp.float64

        @jax.jit
        def step(params, state):
            value, grad = jax.value_and_grad(loss)(params)
            updates, state = tx.update(grad, state, params, value=value, grad=grad, value_fn=loss)
            return optax.apply_updates(params, updates), state

        for _ in range(40):
            params, state = step(params, state)
        assert state.learning_rate.dtype == jnp.float64
        np.testing.assert_allclose(params["w"], target, atol=1e-7)
        missed = float(loss(params)) - 1
    assert missed < 1e-14


def test_the_rate_recovers_after_failed_searches():
    """Forty losses of NaN, and forty searches at the optimum, where rounding hides a decrease."""
    tx: Any = contrib.scale_by_line_search(GEOMETRY)
    params = {"w": jnp.asarray(np.random.default_rng(4).standard_normal((3, 5)), jnp.float32)}
    value, grads = jax.value_and_grad(convex)(params)
    update = jax.jit(tx.update, static_argnames="value_fn")

    def search(state, value_fn, slope=1.0):
        downhill = jax.tree.map(lambda g: slope * g, grads)
        return update(downhill, state, params, value=value, grad=grads, value_fn=value_fn)

    _, begun = search(tx.init(params), convex)
    state = begun
    for _ in range(40):
        updates, state = search(state, lambda p: convex(p) * jnp.nan)
        assert not np.any(updates["w"])
    for _ in range(40):
        _, state = search(state, convex)
    assert state.learning_rate >= begun.learning_rate / 2
    for _ in range(40):
        updates, state = search(state, lambda p: convex(p) + 1, 1e-12)
        assert not np.any(updates["w"])
    assert state.learning_rate >= begun.learning_rate / 2


def test_no_step_from_an_infinite_loss_to_an_infinite_loss():
    tx: Any = contrib.scale_by_line_search(GEOMETRY, max_trials=4)
    params = {"w": jnp.ones((3, 5))}
    extras = {"value": jnp.float32(np.inf), "grad": params}
    updates, state = tx.update(
        params, tx.init(params), params, value_fn=lambda p: jnp.float32(np.inf), **extras
    )
    assert not np.any(updates["w"])
    assert state.trials == 4
    assert state.learning_rate == 0.5
    updates, state = tx.update(
        params, state, params, value_fn=lambda p: jnp.where(p["w"][0, 0] > 0.6, 1, np.inf), **extras
    )
    np.testing.assert_allclose(updates["w"], -0.25)


@pytest.mark.slow
def test_derivatives_pass_through_the_line_search():
    """Of the loss after three steps, in a weight of the loss that is searched and the first rate.

    How often a rate is shrunk stays the same nearby, so differences see no jump.
    """

    def after(weight, rate):
        def loss(p):
            return bumpy(p) + weight * jnp.sum(p["w"] ** 2)

        tx = chain_of(contrib.scale_by_line_search(CURVED), CURVED, SHARES)
        params = {"w": jnp.linspace(-1.0, 1.0, 8).reshape(4, 2), "v": 2 * jnp.eye(4)[0]}
        state = tx.init(params)
        state = (*state[:2], state[2]._replace(learning_rate=rate), *state[3:])
        for _ in range(3):
            value, grad = jax.value_and_grad(loss)(params)
            updates, state = tx.update(grad, state, params, value=value, grad=grad, value_fn=loss)
            params = optax.apply_updates(params, updates)
        return loss(params), state[2].trials

    with jax.enable_x64(True):
        x, h = (jnp.float64(0.3), jnp.float32(0.5)), 2.0**-12
        slopes, trials = jax.jit(jax.grad(after, argnums=(0, 1), has_aux=True))(*x)
        assert trials > 1
        f = jax.jit(lambda *x: after(*x)[0])
        expected = [
            (f(x[0] + h, x[1]) - f(x[0] - h, x[1])) / (2 * h),
            (f(x[0], x[1] + h) - f(x[0], x[1] - h)) / (2 * h),
        ]
    assert np.abs(expected).min() > 0.01
    np.testing.assert_allclose(slopes, expected, rtol=1e-3)


RULE = SquareLossSmoothness(0.5)
LINKS = {
    "rule": (contrib.scale_by_rule, {"rule": RULE}),
    "distance": (contrib.scale_by_distance, {"geometry": Euclidean(RMSToRMS())}),
    "search": (contrib.scale_by_line_search, {"geometry": Euclidean(RMSToRMS())}),
}
COUPLED = {"_holes", "_nan_in_one_leaf", "_errors", "_masked_partition_and_chain"}


@pytest.mark.parametrize("name", LINKS)
def test_works_with_optax_wrappers(name):
    """The gradient is its own direction here: the links do not ask where it comes from."""
    make, arguments = LINKS[name]
    tx = supplied(make(**arguments))
    rng = np.random.default_rng(0)
    params, grads = ({n: np.float32(rng.normal(size=(4, 3))) for n in "ab"} for _ in range(2))
    case = make_case(tx, params, grads, needs_params=False)
    for check in (*BASICS, *WRAPPERS):
        if check.__name__ not in COUPLED:
            check(case)
    static = ("first", "growth", "shrink", "share", "max_trials") if name == "search" else ()
    check_injected(supplied(optax.inject_hyperparams(make, static)(**arguments)), case)


def supplied(link: Any) -> Any:
    """The link with a loss that is linear in the parameters: the update is its gradient."""

    def update(updates, state, params=None, **extra):
        def loss(p):
            return 10 - optax.tree_utils.tree_vdot(jax.tree.map(_wide, p), updates)

        extras = {"value": jnp.float32(10), "grad": updates, "value_fn": loss}
        return link.update(updates, state, params, **extras | extra)

    return optax.GradientTransformationExtraArgs(link.init, update)


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


def test_uphill_zero_and_nan():
    params = {"w": jnp.ones((2, 2))}
    tx: Any = contrib.scale_by_rule(RULE)
    for grad, wanted in ((-params["w"], 0.0), (0 * params["w"], 0.0), (jnp.nan * params["w"],
                                                                       jnp.nan)):  # fmt: skip
        updates, _ = tx.update(params, tx.init(params), params, value=1.0, grad={"w": grad})
        np.testing.assert_array_equal(updates["w"], np.full((2, 2), wanted))
    zeros = jax.tree.map(jnp.zeros_like, params)
    for link in (contrib.scale_by_distance(GEOMETRY), contrib.scale_by_line_search(GEOMETRY)):
        extras = {"value": 1.0, "grad": zeros, "value_fn": lambda p: 1.0}
        updates, state = link.update(zeros, link.init(params), params, **extras)
        assert not np.any(jax.tree.leaves(updates)[0])
        assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(state))


def test_masked_leaves_do_not_count():
    params = {"w": jnp.ones((2, 3)), "frozen": jnp.ones((3, 3))}
    grads = jax.tree.map(lambda x: 2 * x, params)
    alone = {"w": params["w"]}, {"w": grads["w"]}
    for link in (
        contrib.scale_by_rule(RULE),
        contrib.scale_by_distance(Euclidean(RMSToRMS())),
    ):
        masked = optax.masked(link, {"w": True, "frozen": False})
        found: Any = masked.update(
            params, masked.init(params), params, value=jnp.float32(1), grad=grads
        )[0]
        expected: Any = link.update(
            alone[0], link.init(alone[0]), alone[0], value=jnp.float32(1), grad=alone[1]
        )[0]
        np.testing.assert_allclose(found["w"], expected["w"], rtol=1e-6)
        np.testing.assert_array_equal(found["frozen"], params["frozen"])


def test_errors():
    params = {"w": jnp.ones((2, 2))}
    for link, missing in (
        (contrib.scale_by_rule(RULE), "scale_by_rule needs value and grad"),
        (contrib.scale_by_distance(GEOMETRY), "scale_by_distance needs grad"),
        (contrib.scale_by_line_search(GEOMETRY), "needs value and grad and value_fn"),
    ):
        with pytest.raises(ValueError, match=missing):
            link.update(params, link.init(params), params)
    for wrong in (-1.0, float("nan")):
        with pytest.raises(ValueError, match=r"alpha must be a finite number in \[0, inf\)"):
            SquareLossSmoothness(wrong)
    wrong_numbers: list[dict[str, Any]] = [
        {"first": 0.0},
        {"growth": 0.5},
        {"shrink": 1.0},
        {"share": 0.0},
        {"max_trials": 0},
    ]
    for arguments in wrong_numbers:
        with pytest.raises(ValueError, match=next(iter(arguments))):
            contrib.scale_by_line_search(GEOMETRY, **arguments)
