"""One optimizer for the parameters that have a manifold, another one for the rest."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import optax

from manifoldmuon._internal.arguments import one_of
from manifoldmuon._internal.links import Link, link
from manifoldmuon._internal.paths import Places
from manifoldmuon.optim._arguments import checked
from manifoldmuon.optim._geometry import Geometry, find_manifolds
from manifoldmuon.optim._leaves import check_updates


@checked(rest=one_of(optax.GradientTransformation))
def hybrid(
    tx: optax.GradientTransformation, geometry: Geometry, rest: optax.GradientTransformation
) -> Link:
    """Train parameters whose entry in a geometry is None with `rest`, all others with `tx`.

    The usual split of a transformer, matrices here and embeddings, head, gains and biases by AdamW,
    is a geometry and one call:

    ```python
    geometry = by_path({"embed/**": None, "head/**": None, "**/kernel": matrix, "**": None})
    tx = chain(
        optax.clip_by_global_norm(1.0),
        hybrid(manifold_muon(schedule, geometry), geometry, optax.adamw(other_schedule)),
    )
    ```

    Each side has its own learning rate, schedule and weight decay, and sees `MaskedNode` in place
    of the other's parameters. Clipping by a global norm goes in front, where it sees all gradients:
    the option `clip` of an alias sees those of its own side. With `optax.set_to_zero()` the rest is
    frozen.

    Args:
      tx: any transformation of the parameters that have a manifold: an alias, a chain that ends in
        `retract`, or `contrib.normuon(...)`.
      geometry: that of `tx`; see `resolve`. An entry None says that `rest` has the parameter,
        whatever its shape.
      rest: a whole optimizer, its learning rate included, such as `optax.adamw(3e-4)`.

    Returns:
      The transformation, with the state of `optax.partition`. Links after it may change the
      parameters of `rest` only, as `optax.transforms.freeze` does. `update` needs `params`.

    Raises:
      TypeError: `tx` or `rest` is not a transformation.

    Examples:
      >>> geometry = {"kernel": mm.manifolds.Stiefel(), "bias": None}
      >>> params = {"kernel": jnp.eye(3), "bias": jnp.zeros(3)}
      >>> tx = hybrid(manifold_muon(0.02, geometry), geometry, optax.adamw(3e-4))
      >>> updates, _ = tx.update(params, tx.init(params), params)
    """
    parts: dict[Hashable, optax.GradientTransformation] = {"manifolds": tx, "rest": rest}

    def split(places: Places, tree: Any) -> Link:
        labels = dict.fromkeys(places.real, "manifolds") | dict.fromkeys(places.rest, "rest")
        # As a function: Optax would call labels whose tree is of a callable type.
        return optax.partition(parts, lambda _: places.fill(tree, labels))

    def init_fn(params: Any) -> Any:
        return split(find_manifolds(geometry, params, rest=True, cut=False), params).init(params)

    def update_fn(updates, state, params=None, **extra_args):
        places = check_updates(geometry, updates, params, "hybrid", rest=True)
        return split(places, params).update(updates, state, params, **extra_args)

    return link(update_fn, init_fn, optax.partition(parts, {}).init)
