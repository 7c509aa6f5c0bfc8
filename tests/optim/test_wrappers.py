"""Transformations in wrappers of Optax, and the page's table of wrappers that stay on manifolds."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from manifoldmuon import optim
from manifoldmuon.manifolds import Euclidean, Hypersphere
from manifoldmuon.testing import check_transformation
from tests.optim.instances import INSTANCES, abstract

contrib, transforms = optax.contrib, optax.transforms
GEOMETRY = {"v": Hypersphere(), "b": Euclidean()}
SHAPES = abstract({"v": (2, 5), "b": (4,)})
STEEPEST = optax.chain(optax.trace(0.9), optim.scale_by_steepest(GEOMETRY), optax.scale(-0.1))
TANGENT, ONTO = optim.project_tangent(GEOMETRY), optim.retract(GEOMETRY)
TX = optim.chain(STEEPEST, ONTO)


def tangent(*links: Any) -> Any:
    return optim.chain(TANGENT, *links, TANGENT, ONTO)


def odd(step: Any) -> Any:
    return step % 2 == 1


def loss(params: Any) -> Any:
    return sum(jnp.sum(jnp.square(x - jnp.arange(x.shape[-1]))) for x in jax.tree.leaves(params))


MULTI = optax.MultiSteps(TX, 2, should_skip_update_fn=optax.skip_not_finite)
PLATEAU = contrib.reduce_on_plateau(patience=1, factor=0.5)
SAM = contrib.sam(TX, optax.chain(contrib.normalize(), optax.sgd(0.05)), sync_period=2)
# `check_transformation` tests masked, partition, inject_hyperparams, MultiSteps, apply_if_finite.
STAYS: dict[str, Any] = {
    "named_chain": optax.named_chain(("all", TX)),
    "MultiSteps, skip_not_finite": MULTI.gradient_transformation(),
    "conditionally_mask": transforms.conditionally_mask(TX, odd),
    "selective_transform": optax.selective_transform(TX, freeze_mask={"v": False, "b": True}),
    "split_real_and_imaginary": contrib.split_real_and_imaginary(TX),
    "sam, at the end of a period": SAM,
    "sam, opaque": contrib.sam(TX, optax.sgd(0.05), sync_period=2, opaque_mode=True),
    "ema in front": optim.chain(optax.ema(0.9), TX),
    "apply_every in front": optim.chain(STEEPEST, optax.apply_every(2), ONTO),
    "reduce_on_plateau in front": optim.chain(STEEPEST, PLATEAU, ONTO),
    "dog": tangent(contrib.dog(), optax.scale(1e4)),
    "prodigy": tangent(contrib.prodigy(), optax.scale(1e4)),
    "polyak_sgd": tangent(optax.polyak_sgd()),
    "schedule_free, mended": tangent(contrib.schedule_free(STEEPEST, 0.1)),
    "mechanize, mended": tangent(contrib.mechanize(STEEPEST, s_init=0.1)),
}
LEAVES: dict[str, Any] = {
    "conditionally_transform": transforms.conditionally_transform(TX, odd),
    "schedule_free": contrib.schedule_free(TX, 0.1),
    "mechanize": contrib.mechanize(TX),
    "sam, within a period": SAM,
    "ema behind": optax.chain(TX, optax.ema(0.9)),
    "apply_every behind": optax.chain(TX, optax.apply_every(2)),
    "add_noise behind": optax.chain(TX, optax.add_noise(0.1, 0.55, 0)),
    "add_decayed_weights behind": optax.chain(TX, optax.add_decayed_weights(0.1)),
    "keep_params_nonnegative behind": optax.chain(TX, optax.keep_params_nonnegative()),
    "reduce_on_plateau behind": optax.chain(TX, PLATEAU),
    "scale_by_zoom_linesearch behind": optax.chain(TX, optax.scale_by_zoom_linesearch(10)),
    "prodigy alone": contrib.prodigy(),
}
# Options of `check_chain`.
OPTIONS: dict[str, dict[str, Any]] = {
    "MultiSteps, skip_not_finite": {"steps": 4},
    "apply_every in front": {"steps": 4},
    "apply_every behind": {"steps": 4},
    "sam, at the end of a period": {"steps": 4},
    "sam, within a period": {"steps": 3},
    "sam, opaque": {"grad_fn": lambda params, _: jax.grad(loss)(params)},
    "reduce_on_plateau in front": {"value": 1.0},
    "reduce_on_plateau behind": {"value": 1.0},
    "polyak_sgd": {"value_fn": loss},
    "scale_by_zoom_linesearch behind": {"value_fn": loss},
    "mechanize": {"steps": 300, "value_fn": loss},
    "prodigy alone": {"steps": 300},
}


@pytest.mark.slow_except("muon")
@pytest.mark.parametrize("name", INSTANCES)
def test_works_with_optax_wrappers(name):
    instance = INSTANCES[name]
    check_transformation(
        instance.make_tx,
        instance.params(),
        instance.hyperparams(),
        static_args="geometry" if callable(instance.geometry) else (),
        scale_free=instance.scale_free,
        still=instance.still,
        needs_params=instance.needs_params,
        wrappers=instance.wrappers,
        descends=instance.descends,
    )


@pytest.mark.slow_except("reduce_on_plateau in front")
@pytest.mark.parametrize("name", STAYS)
def test_wrappers_stay_on_manifold(name):
    optim.check_chain(STAYS[name], GEOMETRY, SHAPES, **OPTIONS.get(name, {}))


@pytest.mark.slow_except("reduce_on_plateau behind")
@pytest.mark.parametrize("name", LEAVES)
def test_wrappers_that_leave_manifold_are_detected(name):
    with pytest.raises(ValueError, match="are off their manifold, at distance {'v': "):
        optim.check_chain(LEAVES[name], GEOMETRY, SHAPES, **OPTIONS.get(name, {}))


def trained(tx: Any, params: Any, at: Any, steps: int = 10) -> Any:
    """Return parameters and state after `steps` steps with gradients at `at(params)`."""

    def step(carry, _):
        params, state = carry
        updates, state = tx.update(jax.grad(loss)(at(params)), state, params)
        return (optax.apply_updates(params, updates), state), None

    return jax.jit(lambda: jax.lax.scan(step, (params, tx.init(params)), length=steps)[0])()


def start() -> Any:
    return jax.jit(lambda: optim.init_tree(GEOMETRY, jax.random.key(0), SHAPES))()


def farthest(params: Any) -> float:
    return float(optim.monitor_distance(GEOMETRY, params)["v"])


@pytest.mark.slow
def test_lookahead_needs_projection_after_sync():
    params = optax.LookaheadParams.init_synced(start())
    tx = optax.lookahead(TX, sync_period=5, slow_step_size=0.5)
    found, _ = trained(tx, params, lambda params: params.fast)
    assert min(farthest(found.fast), farthest(found.slow)) > 1e-3
    assert farthest(optim.project_tree(GEOMETRY, found.slow)) < 1e-6


@pytest.mark.slow
def test_parameter_averages_need_projection():
    """Averages by `optax.ema`, and the evaluation parameters of `schedule_free`."""
    tx, ema = tangent(contrib.schedule_free(STEEPEST, 0.1)), optax.ema(0.5)
    params, state = trained(tx, start(), lambda params: params)
    assert farthest(params) < 1e-6
    averaged, _ = ema.update(params, ema.update(start(), ema.init(params))[1])
    for mean in (contrib.schedule_free_eval_params(state[1], params), averaged):
        assert farthest(mean) > 1e-3
        assert farthest(optim.project_tree(GEOMETRY, mean)) < 1e-6


def test_multi_steps_objects_are_accepted():
    """`optax.MultiSteps` has `init` and `update`, but is not a `GradientTransformation`."""
    steps: Any = optax.MultiSteps(optax.scale_by_adam(), 2)
    whole: Any = optax.MultiSteps(TX, 2)
    params = start()
    for tx in (
        optim.chain(steps, TX),
        optim.hybrid(whole, GEOMETRY, optax.sgd(0.1)),
        optim.with_master_copies(whole),
        optim.normalize(steps, GEOMETRY),
    ):
        updates, _ = jax.eval_shape(lambda w, tx=tx: tx.update(w, tx.init(w), w), params)
        assert jax.tree.structure(updates) == jax.tree.structure(params)
