"""Hyperball: move weights at fixed norm with any Optax optimizer."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from manifoldmuon._internal.arguments import check_arguments, number
from manifoldmuon._internal.matrices.arrays import expand_trailing, frobenius_norm, inner_product
from manifoldmuon._internal.matrices.powers_of_two import normalize, scale_to_unit_exponent
from manifoldmuon._internal.matrices.rounding import never_fused, noise_share
from manifoldmuon._internal.trees.transformations import (
    Terminal,
    Transformation,
    check_ascends,
    transformation,
)
from manifoldmuon.manifolds import Manifold
from manifoldmuon.optim._budget import Budgets, scale_by_budget
from manifoldmuon.optim._geometry import Geometry
from manifoldmuon.optim._keep_norms import Radius, keep_norms, on_sphere
from manifoldmuon.optim._leaves import check_updates, map_leaves
from manifoldmuon.optim._retract import chain


@check_arguments(radial=number("[0, 1]"))
def hyperball(
    base: optax.GradientTransformation,
    learning_rate: optax.ScalarOrSchedule,
    geometry: Geometry,
    *,
    radial: ArrayLike = 1.0,
    radius: Radius = None,
    budgets: Budgets | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Move weights at fixed norm by the normalised updates of any optimizer: AdamH, MuonH.

    With the update $u$ of the base and the initial norm $R$ of the weight

    $$
    W \leftarrow R\,\operatorname{Norm}\bigl(W - \eta R\,\operatorname{Norm}(u)\bigr), \qquad
    \operatorname{Norm}(x) = \frac{x}{\|x\|_F}
    $$

    (Wen et al., "Hyperball Optimization", arXiv:2606.16899). It replaces weight decay, and the
    learning rate is the angle of a step, to first order.

    `adamh` and `muonh` call this with their bases. For tangent steps, steepest in the spectral
    norm, use the base `chain(optax.trace(0.95), scale_by_steepest(sphere))`, the geometry
    `sphere = Hypersphere(ndim=2, step_norm=Spectral())` and `radial=0`.

    The norm is fixed, so add a gain where the model needs it: `y = gain * (W @ x)`, with `gain` a
    scalar or vector that starts at 1 and is trained by Adam. Train biases, gains and embeddings
    with another optimizer, through `optim.hybrid` as in the example.

    Args:
      base: the transformation that computes the updates. It must ascend and have no learning rate,
        such as `optax.scale_by_adam()`; see `optim.normalize`.
      learning_rate: a number or an Optax schedule.
      geometry: a `Hypersphere` for each parameter that keeps its norm; see `keep_norms`.
        `Euclidean` leaves get the updates of the base, times the learning rate.
      radial: share of the radial part of `u` (its component along `W`) that is kept before
        normalisation: 1 is the published update, 0 a tangent step.
      radius: replaces the initial norms; see `keep_norms`.
      budgets: shares of the learning rate per leaf; see `optim.scale_by_budget`.

    Returns:
      A chain that ends in `keep_norms`, with the radii in its state. `update` needs `params`.
      Weights stay as they are for a zero update and, with `radial=0`, for an update with a tangent
      part that is only rounding.

    Raises:
      TypeError: on use; see `keep_norms`.
      ValueError: `radial` is outside [0, 1]; on `init`, the base descends; on use, see
        `keep_norms`.

    Examples:
      >>> params = {"kernel": jnp.ones((2, 4, 4)), "bias": jnp.zeros((2, 4))}
      >>> geometry = {"kernel": mm.manifolds.Hypersphere(ndim=2).stacked(), "bias": None}
      >>> adamh = hyperball(optax.scale_by_adam(), 0.02, geometry)
      >>> tx = mm.optim.hybrid(adamh, geometry, optax.adam(1e-3))
      >>> updates, _ = tx.update(params, tx.init(params), params)
      >>> jnp.linalg.norm(optax.apply_updates(params, updates)["kernel"], axis=(1, 2)).tolist()
      [4.0, 4.0]
    """
    transformations: list[Any] = [base, _normalize_updates(geometry, radial)]
    if budgets is not None:
        transformations.append(scale_by_budget(budgets))
    transformations += [optax.scale_by_learning_rate(learning_rate), keep_norms(geometry, radius)]
    descent = chain(*transformations)

    def update_fn(updates, state, params=None, **extra_args):
        # Check shapes before the base optimizer, which would broadcast a wrong shape.
        check_updates(geometry, updates, params, "hyperball")
        return descent.update(updates, state, params, **extra_args)

    def init_fn(params: Any) -> Any:
        check_ascends("hyperball", base)
        return descent.init(params)

    return transformation(update_fn, init_fn, descent.init, Terminal)


def _normalize_updates(geometry: Geometry, radial: ArrayLike) -> Transformation:
    """Divide each update on a sphere by its norm, in float32 or wider.

    A share `1 - radial` of the radial part is removed first.
    """
    unit = functools.partial(_unit, radial)

    def update_fn(updates, state, params=None, **extra_args):
        del extra_args
        options: Any = {"name": "hyperball", "select": on_sphere, "stack": False}
        return map_leaves(unit, geometry, updates, params, **options)[0], state

    return transformation(update_fn)


def _unit(radial: ArrayLike, manifold: Manifold, point: jax.Array, update: jax.Array) -> jax.Array:
    ndim = manifold.ndim
    if isinstance(radial, int | float) and radial == 1:
        return normalize(update, ndim)
    vector, _ = scale_to_unit_exponent(update, ndim)
    along = normalize(point, ndim).astype(vector.dtype)
    inner = expand_trailing(inner_product(along, vector, ndim), ndim)
    removed = jnp.asarray(1 - radial, vector.dtype)
    part = vector - never_fused(removed * inner * along)
    # Drop a rounding error: normalised, it would be a whole step.
    noise = noise_share(point.dtype, vector.dtype) * frobenius_norm(vector, ndim)
    rounded = frobenius_norm(part, ndim) <= noise
    return normalize(jnp.where(expand_trailing(rounded, ndim), 0, part), ndim)
