"""Tangent projection of updates: run any Optax optimizer on a manifold."""

from __future__ import annotations

import optax

from manifoldmuon.optim._arguments import checked
from manifoldmuon.optim._geometry import Geometry, constrained
from manifoldmuon.optim._transformation import transformation
from manifoldmuon.optim.rules import tangent


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

    return transformation(tangent, geometry, name="project_tangent", select=constrained)
