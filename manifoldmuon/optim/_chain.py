"""Chains: transformations in order, and what must come last."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from manifoldmuon._internal.arguments import checked, number, one_of, whole
from manifoldmuon._internal.compiling import compiler_options
from manifoldmuon._internal.trees.transformations import Terminal, Transformation
from manifoldmuon.optim._geometry import Geometry, refuse_keys
from manifoldmuon.optim._monitor import monitor_distance
from manifoldmuon.optim._plan import make_plan
from manifoldmuon.optim._trees import init_tree


@checked
def chain(*transformations: optax.GradientTransformation) -> Transformation:
    """Return `optax.chain` of the transformations, and refuse transformations after `retract`.

    Also after one inside `hybrid` (the option `rest`). After one inside `optax.partition` or
    `optax.masked` it refuses nothing: `check_chain` finds transformations that change the
    retracted parameters.

    Args:
      *transformations: gradient transformations, applied in order.

    Returns:
      The result of `optax.chain`. If it ends in a `retract` (or another transformation that must
      come last, such as `descend`), it must come last, too.

    Examples:
      >>> g = mm.manifolds.Stiefel()
      >>> tx = chain(optax.trace(0.95), scale_by_steepest(g), optax.scale(-0.1), retract(g))
    """
    count = len(transformations)
    for i, tx in enumerate(transformations):
        if isinstance(tx, list | tuple) and not isinstance(tx, optax.GradientTransformation):
            raise TypeError(
                f"chain takes transformations as arguments, chain(a, b); got a {type(tx).__name__}"
                " of them: write chain(*transformations)"
            )
        one_of(optax.GradientTransformation)(f"chain: transformation {i} of {count}", tx)
        if isinstance(tx, Terminal) and i < count - 1:
            raise ValueError(
                f"chain: transformation {i} of {count} is a retract, but it must be last: changing"
                " its updates takes the parameters off the manifold. Move the transformations"
                " after it (learning rate, budgets, weight decay, clipping) before it; the page"
                " 'Transformations' has the order of a chain."
            )
    ends = any(isinstance(tx, Terminal) for tx in transformations[-1:])
    return (Terminal if ends else Transformation)(*optax.chain(*transformations))


@checked
def check_chain(
    tx: optax.GradientTransformation,
    geometry: Geometry,
    params: Any,
    *,
    steps: Annotated[int, whole("[1, inf)")] = 3,
    tolerance: Annotated[float | None, number("[0, inf)", none=True)] = None,
    value_fn: Callable[[Any], Any] | None = None,
    **extra_args: Any,
) -> None:
    """Check, by taking steps, that a transformation keeps parameters on their manifolds.

    It examines the resulting parameters, so it detects a `retract` that is missing or not last in
    any transformation. Call it once before training, with the largest learning rate: the distance
    from the manifold grows with the step (about 0.3 lr for a learning rate after `retract`,
    lr^2 / 2 for a missing `retract`), and below the tolerance it goes unnoticed.

    * For `optax.MultiSteps`, pass the inner transformation.
    * For a schedule that starts at zero, pass its plateau.
    * For optimizers that grow their learning rate from a tiny value (`optax.contrib.mechanize`),
      pass `value_fn` and a few hundred `steps`.

    Args:
      tx: any gradient transformation; its `init` and `update` are compiled.
      geometry: the manifold of each parameter; see `resolve_geometry`.
      params: parameters or `jax.ShapeDtypeStruct`; only structure, shapes and dtypes matter.
      steps: number of updates to apply, from random points. An odd number: on a sphere, updates
        doubled after `retract` lead off the set and back.
      tolerance: the largest allowed `Manifold.distance`; by default 16 eps sqrt(d) for the
        leaf's dtype and its longest axis d.
      value_fn: loss as a function of the parameters, for transformations that need it, such as
        line searches. Its gradients replace the random gradients, and `update` also gets `value`,
        `grad` and `value_fn`.
      **extra_args: further arguments of `update`, such as `max_logits=...`.

    Raises:
      ValueError: parameters left their manifold (the message names them), updates ascend (checked
        without `value_fn`), or no parameter moved, so that nothing was checked.

    Examples:
      >>> sphere = mm.manifolds.Hypersphere()
      >>> check_chain(manifold_muon(0.1, sphere), sphere, jnp.ones(3))
    """
    # Shapes only: the arrays may be on a mesh.
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), params)
    plan = make_plan(geometry, shapes, rest=True)
    refuse_keys(plan, shapes)

    jit = functools.partial(jax.jit, compiler_options=compiler_options(shapes, steps))

    @jit
    def draw():
        leaves = plan.leaves(shapes)
        ones = {i: jnp.ones(leaves[i].shape, leaves[i].dtype) for i in plan.rest}
        points = init_tree(geometry, jax.random.key(0), plan.fill(shapes, ones))
        return points, tx.init(points)

    update = optax.with_extra_args_support(tx).update

    @jit
    def step(grads, params, state):
        loss = {}
        if value_fn is not None:
            value, grads = jax.value_and_grad(value_fn)(params)
            loss = {"value": value, "grad": grads, "value_fn": value_fn}
        updates, state = update(grads, state, params, **(loss | extra_args))
        return optax.apply_updates(params, updates), state

    start, state = draw()
    moving, rng = start, np.random.default_rng(1)  # NumPy: JAX would compile its own
    total = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    for _ in range(steps):
        grads = jax.tree.map(lambda x: np.asarray(rng.standard_normal(x.shape), x.dtype), shapes)
        moving, state = step(grads, moving, state)
        total = jax.tree.map(np.add, total, grads)
    before, leaves = plan.leaves(start), plan.leaves(moving)
    if all(np.array_equal(before[i], leaves[i]) for i in plan.real):
        raise ValueError(f"check_chain: no parameter changed in {steps} steps; use larger steps.")
    distant = {}
    distances = jax.device_get(jit(lambda params: monitor_distance(geometry, params))(moving))
    for weight in plan.weights:
        path, leaf = weight.path, weight.of(leaves[weight.index])
        allowed = 16 * float(jnp.finfo(leaf.dtype).eps) * max((*leaf.shape, 1)) ** 0.5
        allowed = allowed if tolerance is None else tolerance
        if not distances[path] <= allowed:  # NaN must fail
            distant[path] = float(distances[path])
    if distant:
        raise ValueError(
            f"after {steps} steps these parameters are off their manifold, at distance {distant}."
            " `retract` must be the last transformation: its updates must not be changed. For"
            " Optax's wrappers see the page 'Transformations'."
        )
    if value_fn is None and _cosine(start, moving, total) > 0.1:
        raise ValueError(
            "check_chain: the updates ascend, along the gradients. Change the sign exactly once:"
            " with optax.scale_by_learning_rate(rate) or optax.scale(-rate), but not after an"
            " optimizer that has its own learning rate."
        )


def _cosine(before: Any, after: Any, grads: Any) -> float:
    """Return the cosine between movement and summed gradients, over all leaves."""

    def vector(tree: Any) -> np.ndarray:
        return np.concatenate([np.ravel(x).astype(np.float64) for x in jax.tree.leaves(tree)])

    step, grad = vector(after) - vector(before), vector(grads)
    size = np.linalg.norm(step) * np.linalg.norm(grad)
    return float(step @ grad / size) if size > 0 else 0.0
