"""Replace gradients by steepest directions, leaf by leaf."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from manifoldmuon._internal.meshes.mesh import warn_of_unset_mesh
from manifoldmuon.manifolds import Manifold
from manifoldmuon.optim._arguments import checked
from manifoldmuon.optim._geometry import Geometry
from manifoldmuon.optim._transformation import transformation
from manifoldmuon.optim.rules import direction


class ScaleBySteepestState(NamedTuple):
    """State carried between steps: warm starts and gaps.

    All attributes are dictionaries keyed by path such as `layer/kernel`, without the shape of the
    parameters: `optax.tree_utils.tree_map_params` passes each dictionary whole to
    `transform_non_params`.

    Attributes:
      dual: warm starts of the solvers, for leaves without a closed form.
      residual: `Steepest.residual` of the last step, a float32 number per point; empty without
        `track_gap`.
      gap: `Steepest.gap` of the last step, a float32 number per point; empty without `track_gap`.
    """

    dual: dict[str, Any]
    residual: dict[str, jax.Array]
    gap: dict[str, jax.Array]


@checked()
def scale_by_steepest(
    geometry: Geometry, track_gap: bool = True
) -> optax.GradientTransformationExtraArgs:
    """Replace each gradient by the steepest tangent direction at its parameter.

    The direction ascends and has norm at most 1 in the manifold's norm, whatever the gradient's
    scale, so momentum goes before and the learning rate after. Leaves with the same manifold,
    shape, dtype and sharding are solved in a single batched call.

    Args:
      geometry: the manifold of each parameter; see `resolve_geometry`.
      track_gap: whether to keep residuals and gaps in the state, for `monitor`. Without it
        `jax.jit` drops their computation, which saves two large products on unconstrained leaves.

    Returns:
      A transformation with a `ScaleBySteepestState`. Updates have the parameters' dtypes; the
      arithmetic is done in float32 or wider. `update` needs `params`. An array without entries
      gets an update without entries; `MaskedNode` and `None` in place of parameters pass through.
      A NaN stays in its leaf, and does not enter the next warm start.

    Examples:
      >>> tx, params = scale_by_steepest(mm.manifolds.Hypersphere()), jnp.array([1.0, 0.0])
      >>> updates, state = tx.update(jnp.array([5.0, 2.0]), tx.init(params), params)
      >>> updates.tolist()
      [0.0, 1.0]
    """

    def check(geometry: Geometry, params: Any) -> None:
        warn_of_unset_mesh(params, stacklevel=5)

    return transformation(
        functools.partial(direction, rounded=True),
        geometry,
        ScaleBySteepestState,
        functools.partial(init_steepest, track_gap),
        name="scale_by_steepest",
        check=check,
        divide=True,
    )


def init_steepest(track_gap: bool, manifold: Manifold, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Return warm start, residual and gap of the first step, for points of this shape."""
    copies = shape[: len(shape) - manifold.ndim]
    # Make two arrays: the same buffer cannot be donated twice.
    numbers = [jnp.zeros(copies, jnp.float32) if track_gap else None for _ in range(2)]
    return manifold.init_dual(shape), *numbers
