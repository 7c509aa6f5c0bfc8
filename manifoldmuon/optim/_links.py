"""The links of a chain that take a geometry: tangent projection, steepest direction, retraction."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax

from manifoldmuon._internal.arguments import checked
from manifoldmuon._internal.meshes.mesh import warn_of_unset_mesh
from manifoldmuon._internal.trees.transformations import Transformation
from manifoldmuon.manifolds import Manifold
from manifoldmuon.optim._geometry import Geometry, constrained
from manifoldmuon.optim._start import refuse_far
from manifoldmuon.optim._transformation import transformation
from manifoldmuon.optim.rules import direction, retraction, tangent


@checked
def project_tangent(geometry: Geometry) -> optax.GradientTransformationExtraArgs:
    """Project each update onto the tangent space at its parameter.

    Before a base optimizer it computes the Riemannian gradient (of the Euclidean metric). After a
    base optimizer that works entry by entry, or carries momentum from earlier points, it projects
    the output to a tangent step for `retract`. `riemannian_adam` and `riemannian_sgd` do both.

    Put it before the learning rate: updates must ascend, which matters only at the boundary of a
    convex set. On unconstrained leaves updates pass through, cast to the parameter's dtype.

    Args:
      geometry: the manifold of each parameter; see `resolve_geometry`. Updates of parameters with
        the entry None pass unchanged.

    Returns:
      A transformation without state, linear up to rounding. An update normal to the manifold
      becomes exactly zero, not noise, which Adam would turn into a whole step. The arithmetic is
      done in float32 or wider; updates have the parameters' dtypes. `update` needs `params`. A NaN
      stays in its leaf.

    Examples:
      >>> g = mm.manifolds.Stiefel()
      >>> tx = chain(optax.scale_by_lion(), project_tangent(g), optax.scale(-1e-3), retract(g))
    """

    return transformation(tangent, geometry, name="project_tangent", select=constrained, rest=True)


class ScaleBySteepestState(NamedTuple):
    """State carried between steps: warm starts and gaps.

    All attributes are nested dictionaries with the paths of the parameters, such as
    `state.gap["blocks"]["0"]["kernel"]`, but not their shapes: `optax.tree_utils.tree_map_params`
    passes each attribute whole to `transform_non_params`. `monitor` returns them by path.

    Attributes:
      dual: warm starts of the solvers, for leaves without a closed form.
      residual: `Steepest.residual` of the last step, a float32 number per point; empty without
        `track_gap`.
      gap: `Steepest.gap` of the last step, a float32 number per point; empty without `track_gap`.
    """

    dual: dict[str, Any]
    residual: dict[str, Any]
    gap: dict[str, Any]


@checked
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


@checked
def retract(geometry: Geometry) -> Transformation:
    """Emit `R_W(u) - W`, so that `optax.apply_updates` lands on the manifold.

    It must come last: scaling its updates, or adding to them, silently leaves the manifold.
    `manifoldmuon.optim.chain` refuses a wrong order, and `check_chain` finds a wrong order in any
    transformation, however it was built. Wrappers that pass an update on or suppress it entirely
    (`optax.masked`, `optax.MultiSteps`, `optax.apply_if_finite`) are harmless.

    On unconstrained leaves the step passes through, cast to the parameter's dtype.

    Args:
      geometry: the manifold of each parameter; see `resolve_geometry`.

    Returns:
      A transformation without state. The retraction is computed in float32 or wider; the update
      has the parameter's dtype and is rounded so that `W + u`, in that dtype, is next to the
      retracted point. A zero step gives a zero update. `update` needs `params`.

    Raises:
      ValueError: in `init`: a parameter is at a `Manifold.distance` above 0.1; see `start_on` and
        `start_anywhere`. Under `jax.jit` it is a `JaxRuntimeError` of the running program, and on
        TPUs a warning. Not checked are `jax.ShapeDtypeStruct`, rows of `EmbeddingRows` that are
        exactly zero (padding) and, outside of jit, arrays spread over several processes and
        matrices with a shorter side above 1024.

    Examples:
      >>> tx, params = retract(mm.manifolds.Hypersphere()), jnp.array([0.0, 1.0])
      >>> updates, _ = tx.update(jnp.array([1.0, 0.0]), tx.init(params), params)
      >>> print(optax.apply_updates(params, updates).round(3))
      [0.707 0.707]
    """

    return transformation(
        retraction,
        geometry,
        name="retract",
        last=True,
        check=refuse_far,
        select=constrained,
        divide=True,
    )
