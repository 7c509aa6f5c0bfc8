"""Tangent projection of updates: run any Optax optimizer on a manifold."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from manifoldmuon._internal.matrices.arrays import expand_trailing, frobenius_norm
from manifoldmuon._internal.matrices.powers_of_two import scale_to_unit_exponent, times_power_of_two
from manifoldmuon._internal.matrices.rounding import noise_share
from manifoldmuon._internal.trees.transformations import transformation
from manifoldmuon.manifolds import Manifold
from manifoldmuon.optim._arguments import checked
from manifoldmuon.optim._geometry import Geometry, constrained
from manifoldmuon.optim._leaves import map_leaves


@checked()
def project_tangent(geometry: Geometry) -> optax.GradientTransformationExtraArgs:
    """Project each update onto the tangent space at its parameter.

    Before a base optimizer it computes the Riemannian gradient (of the Euclidean metric). After a
    base optimizer that works entry by entry, or carries momentum from earlier points, it projects
    the output to a tangent step for `retract`. `riemannian_adam` and `riemannian_sgd` do both.

    Put it before the learning rate: updates must ascend, which matters only at the boundary of a
    convex set. On unconstrained leaves updates pass through, cast to the parameter's dtype.

    Args:
      geometry: the manifold of each parameter; see `resolve_geometry`.

    Returns:
      A transformation without state, linear up to rounding. An update normal to the manifold
      becomes exactly zero, not noise, which Adam would turn into a whole step. The arithmetic is
      done in float32 or wider; updates have the parameters' dtypes. `update` needs `params`. A NaN
      stays in its leaf.

    Examples:
      >>> g = mm.manifolds.Stiefel()
      >>> tx = chain(optax.scale_by_lion(), project_tangent(g), optax.scale(-1e-3), retract(g))
    """

    def update_fn(updates, state, params=None, **extra_args):
        del extra_args
        updates, _ = map_leaves(
            _project, geometry, updates, params, name="project_tangent", select=constrained
        )
        return updates, state

    return transformation(update_fn)


def _project(manifold: Manifold, point: jax.Array, update: jax.Array) -> jax.Array:
    part, exponent = tangent_part(manifold, point, update)
    return times_power_of_two(part, exponent, manifold.ndim).astype(point.dtype)


def tangent_part(
    manifold: Manifold, point: jax.Array, update: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the tangent part, scaled to moderate size, and the exponent of 2 of each point.

    A tangent part that is only rounding error in the dtype of the point is set to zero.
    """
    vector, exponent = scale_to_unit_exponent(update, manifold.ndim)
    # Updates ascend, the point moves the other way; at the boundary of a convex set that matters.
    tangent = -manifold.project_tangent(point, -vector)
    part, whole = (frobenius_norm(x, manifold.factor_ndim) for x in (tangent, vector))
    noise = part <= noise_share(point.dtype, vector.dtype) * whole
    return jnp.where(expand_trailing(noise, manifold.factor_ndim), 0, tangent), exponent
