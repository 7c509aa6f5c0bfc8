"""Use different optimizers for parameters with a manifold and for the rest."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import optax

from manifoldmuon._internal.arguments import checked
from manifoldmuon._internal.trees.transformations import (
    Transformation,
    check_descends,
    gradient_transformation,
    kind_around,
)
from manifoldmuon.optim._geometry import Geometry, refuse_keys
from manifoldmuon.optim._plan import Plan, make_plan, plan_updates


@checked
def hybrid(
    tx: optax.GradientTransformation, geometry: Geometry, rest: optax.GradientTransformation
) -> Transformation:
    """Train parameters with a manifold by `tx`, and parameters with the entry None by `rest`.

    The option `rest` of `manifold_muon`, `muon`, `muonh` and `adamh` does it in one call; this is
    for other transformations, such as chains of your own.

    Each optimizer has its own learning rate, schedule and weight decay, and sees `MaskedNode` in
    place of the other parameters. Put gradient clipping by global norm before `hybrid`, where it
    sees all gradients. To freeze the rest, pass `optax.set_to_zero()`.

    Args:
      tx: any transformation for the parameters with a manifold: a chain that ends in `retract`, or
        `contrib.normuon(...)`.
      geometry: the geometry of `tx`; see `resolve_geometry`. The entry None gives a parameter, of
        any shape, to `rest`.
      rest: a complete optimizer with its learning rate, such as `optax.adamw(3e-4)`; `init` refuses
        one that ascends, as `optax.scale_by_adam()` does.

    Returns:
      The transformation, with the state of `optax.partition`. If `tx` must be last, so must it:
      `optim.chain` refuses later transformations. To freeze parameters of the rest, mask `rest`.

    Examples:
      >>> geometry = {"kernel": mm.manifolds.Stiefel(), "bias": None}
      >>> params = {"kernel": jnp.eye(3), "bias": jnp.zeros(3)}
      >>> tx = hybrid(riemannian_adam(0.02, geometry), geometry, optax.adamw(3e-4))
      >>> updates, _ = tx.update(params, tx.init(params), params)
    """
    optimizers: dict[Hashable, optax.GradientTransformation] = {"manifolds": tx, "rest": rest}

    def split(plan: Plan, tree: Any) -> Transformation:
        labels = dict.fromkeys(plan.real, "manifolds") | dict.fromkeys(plan.rest, "rest")
        # Pass a function: Optax would call a label tree of a callable type, such as a module.
        return optax.partition(optimizers, lambda _: plan.fill(tree, labels))

    def init_fn(params: Any) -> Any:
        check_descends("rest", rest)
        plan = make_plan(geometry, params, rest=True)
        refuse_keys(plan, params)
        return split(plan, params).init(params)

    def update_fn(updates, state, params=None, **extra_args):
        plan = plan_updates("hybrid", geometry, updates, params, rest=True)
        return split(plan, params).update(updates, state, params, **extra_args)

    placeholder = optax.partition(optimizers, {}).init
    return gradient_transformation(update_fn, init_fn, placeholder, kind_around(tx))
