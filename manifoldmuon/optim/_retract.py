"""Retraction: turn a tangent step into a step between points, at the end of a chain."""

from __future__ import annotations

from manifoldmuon._internal.trees.transformations import Transformation
from manifoldmuon.optim._arguments import checked
from manifoldmuon.optim._geometry import Geometry, constrained
from manifoldmuon.optim._start import refuse_far
from manifoldmuon.optim._transformation import transformation
from manifoldmuon.optim.rules import retraction


@checked()
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
