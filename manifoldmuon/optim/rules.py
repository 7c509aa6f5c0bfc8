"""Rules: what one step does with a stack of points, composed by `then`.

A rule is a pure function `rule(manifold, point, update, given) -> (update, results)` without trees:
leading axes are independent points, `given` holds known values by name, and `results` the values
for the next rules and the state. The first rule gets the gradient in its own dtype, which says how
much of it is rounding: compute in float32 or wider. Equal weights are stacked: try a rule on two.
Outside of `jax.jit`, too, a rule is traced, once for each shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from manifoldmuon._internal.arguments import shown
from manifoldmuon._internal.matrices import arrays, powers_of_two
from manifoldmuon._internal.matrices.rounding import keep_if_zero, noise_share, without_fma
from manifoldmuon._internal.trees.transformations import difference
from manifoldmuon.manifolds import Hypersphere, Manifold

__all__ = ["budget", "direction", "keep_norm", "retraction", "tangent", "then", "unit"]

Given = Mapping[str, Any]
RuleResult = tuple[jax.Array, dict[str, Any]]
Rule = Callable[[Manifold, jax.Array, jax.Array, Given], RuleResult]


def then(*rules: Rule) -> Rule:
    """Return the rule that applies rules in turn; each gets the results of the earlier ones.

    Examples:
      >>> def double(manifold, point, update, given):
      ...     return 2 * update, {}
      >>> then(double, double)(mm.manifolds.Euclidean(), jnp.ones(1), jnp.ones(1), {})[0].tolist()
      [4.0]
    """
    for rule in rules:
        if not callable(rule):
            raise TypeError(
                f"a rule must be a function (manifold, point, update, given); got {shown(rule)}"
            )

    def composed(
        manifold: Manifold, point: jax.Array, update: jax.Array, given: Given
    ) -> RuleResult:
        results: dict[str, Any] = {}
        for rule in rules:
            known = {**given, **results}
            try:
                found = rule(manifold, point, update, known)
            except KeyError as error:
                error.add_note(
                    f"{rule} was given {sorted(known)}: give more by `numbers`, by a field of the"
                    " state, or as the result of an earlier rule"
                )
                raise
            pair = isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], dict)
            if not (pair and isinstance(found[0], jax.Array | np.ndarray)):
                raise TypeError(
                    f"{rule} must return (update, results): an array, and a dictionary by name"
                )
            update, new = found
            results |= new
        return update, results

    return composed


def on_sphere(manifold: Manifold) -> bool:
    return isinstance(manifold, Hypersphere)


def direction(
    manifold: Manifold, point: jax.Array, update: jax.Array, given: Given, rounded: bool = False
) -> RuleResult:
    """Replace a gradient by the steepest direction; a NaN does not enter the next warm start.

    The manifold gets the point in its own dtype, which decides how much of a gradient is rounding.
    With `rounded` the direction has that dtype, too, and the gap is of the rounded direction.

    Examples:
      >>> sphere, point = mm.manifolds.Hypersphere(), jnp.array([1.0, 0.0])
      >>> direction(sphere, point, jnp.array([5.0, 2.0]), {"dual": ()})[0][1].item()
      1.0
    """
    wide, dual = update.astype(arrays.upcast(point).dtype), given["dual"]
    result = manifold.steepest(point, wide, dual)
    if rounded:
        result = result.rounded(point.dtype, wide, manifold.factor_ndim)
    after = jax.tree.map(
        lambda new, old: jnp.where(jnp.isfinite(new), new, old).astype(old.dtype), result.dual, dual
    )
    numbers = {name: getattr(result, name).astype(jnp.float32) for name in ("residual", "gap")}
    return result.direction, {"dual": after, **numbers}


def budget(manifold: Manifold, point: jax.Array, update: jax.Array, given: Given) -> RuleResult:
    """Multiply by `given["budget"]`: a number per point, or per entry; negative to descend.

    Examples:
      >>> flat, ones = mm.manifolds.Euclidean(), jnp.ones(2)
      >>> budget(flat, ones, ones, {"budget": jnp.array(-0.5)})[0].tolist()
      [-0.5, -0.5]
    """
    share = given["budget"]
    share = arrays.expand_trailing(share, manifold.ndim) if share.ndim < update.ndim else share
    wide = arrays.upcast(update)
    return share.astype(wide.dtype) * wide, {}


def retraction(manifold: Manifold, point: jax.Array, update: jax.Array, given: Given) -> RuleResult:
    """Replace a tangent step by the step to the retracted point; add in flat space.

    Examples:
      >>> point, step = jnp.array([1.0, 0.0]), jnp.array([0.0, 1.0])
      >>> [f"{x:.2f}" for x in point + retraction(mm.manifolds.Hypersphere(), point, step, {})[0]]
      ['0.71', '0.71']
    """
    if not manifold.constrained:
        return update, {}
    start = arrays.upcast(point)
    return difference(manifold.retract(start, update.astype(start.dtype)), point), {}


def tangent(manifold: Manifold, point: jax.Array, update: jax.Array, given: Given) -> RuleResult:
    """Project onto the tangent space; a tangent part that is only rounding becomes zero.

    Examples:
      >>> point, update = jnp.array([1.0, 0.0]), jnp.array([3.0, 2.0])
      >>> tangent(mm.manifolds.Hypersphere(), point, update, {})[0][1].item()
      2.0
    """
    if not manifold.constrained:
        return update, {}
    projected, exponent = tangent_part(manifold, point, update)
    return powers_of_two.times_power_of_two(projected, exponent, manifold.ndim), {}


def tangent_part(
    manifold: Manifold, point: jax.Array, update: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the tangent part, scaled to moderate size, and the exponent of 2 of each point.

    A tangent part that is only rounding error in the dtype of the point is set to zero.
    """
    vector, exponent = powers_of_two.scale_to_unit_exponent(update, manifold.ndim)
    # Updates ascend, the point moves the other way; at the boundary of a convex set that matters.
    projected = -manifold.project_tangent(point, -vector)
    size, whole = (arrays.frobenius_norm(x, manifold.factor_ndim) for x in (projected, vector))
    noise = size <= noise_share(point.dtype, vector.dtype) * whole
    return jnp.where(arrays.expand_trailing(noise, manifold.factor_ndim), 0, projected), exponent


def rounded(manifold: Manifold, point: jax.Array, update: jax.Array, given: Given) -> RuleResult:
    """Cast to the dtype of the parameter: the last rule of every transformation."""
    return update.astype(point.dtype), {}


def unit(
    manifold: Manifold,
    point: jax.Array,
    update: jax.Array,
    given: Given,
    radial: Any = 1.0,
    over: Callable[[jax.Array, int], jax.Array] = powers_of_two.to_unit_norm,
) -> RuleResult:
    """Divide an update on a sphere by its Frobenius norm.

    A share `1 - radial` of its component along the point is removed first. `over` divides where
    nothing is removed: for updates of moderate size cheaper than `to_unit_norm`.

    Examples:
      >>> point, update = jnp.array([1.0, 0.0]), jnp.array([0.0, 8.0])
      >>> unit(mm.manifolds.Hypersphere(), point, update, {})[0].tolist()
      [0.0, 1.0]
    """
    ndim = manifold.ndim
    if not on_sphere(manifold):
        return update, {}
    if isinstance(radial, int | float) and radial == 1:
        return over(update, ndim), {}
    vector, _ = powers_of_two.scale_to_unit_exponent(update, ndim)
    along = powers_of_two.to_unit_norm(point, ndim).astype(vector.dtype)
    inner = arrays.expand_trailing(arrays.inner_product(along, vector, ndim), ndim)
    removed = jnp.asarray(1 - radial, vector.dtype)
    projected = vector - without_fma(removed * inner * along)
    # Drop a rounding error: normalised, it would be a whole step.
    noise = noise_share(point.dtype, vector.dtype) * arrays.frobenius_norm(vector, ndim)
    rounded = arrays.frobenius_norm(projected, ndim) <= noise
    projected = jnp.where(arrays.expand_trailing(rounded, ndim), 0, projected)
    return powers_of_two.to_unit_norm(projected, ndim), {}


def keep_norm(manifold: Manifold, point: jax.Array, update: jax.Array, given: Given) -> RuleResult:
    """Move a point on a sphere at its radius, by a step relative to the radius.

    Examples:
      >>> sphere, point = mm.manifolds.Hypersphere(), jnp.array([0.0, 5.0])
      >>> update, _ = keep_norm(sphere, point, jnp.array([0.75, 0.0]), {"radius": jnp.array(5.0)})
      >>> [f"{x:.2f}" for x in point + update]
      ['3.00', '4.00']
    """
    if not on_sphere(manifold):
        return update, {}
    start, ndim = arrays.upcast(point), manifold.ndim
    size = arrays.expand_trailing(given["radius"], ndim).astype(start.dtype)
    # Relative to the radius a weight has norm 1, so that squares neither over- nor underflow.
    new_point = size * over_norm(start / size + update.astype(start.dtype), ndim)
    return difference(keep_if_zero(start, update, new_point, ndim), point), {}


def over_norm(x: jax.Array, ndim: int) -> jax.Array:
    """Return `x / ||x||` for `x` of moderate size, in a third of `to_unit_norm`'s compile time."""
    x = arrays.upcast(x)
    return x / arrays.expand_trailing(arrays.nonzero_or_one(arrays.frobenius_norm(x, ndim)), ndim)


def over_scaled_norm(x: jax.Array, ndim: int) -> jax.Array:
    """Return `x / ||x||`, without overflow or underflow; denormal numbers may count as zero."""
    largest = jnp.max(jnp.abs(x := arrays.upcast(x)), arrays.trailing(x, ndim), keepdims=True)
    return over_norm(x / arrays.nonzero_or_one(largest), ndim)
