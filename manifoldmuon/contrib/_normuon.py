"""NorMuon: a learning rate for each neuron, after orthogonalisation."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike, DTypeLike

from manifoldmuon._internal.arguments import check_arguments, number
from manifoldmuon._internal.matrices.arrays import (
    expand_trailing,
    frobenius_norm,
    nonzero_or_one,
    upcast,
)
from manifoldmuon._internal.matrices.powers_of_two import normalize
from manifoldmuon._internal.trees.places import find_places
from manifoldmuon._internal.trees.transformations import init_by_path, transformation
from manifoldmuon.linalg import TRAINING_MSIGN, MsignMethod
from manifoldmuon.manifolds import LaidOut, Manifold
from manifoldmuon.norms import ConvRMSToRMS, Spectral
from manifoldmuon.optim import Budgets, Geometry, map_leaves, muon, project_tangent, scale_by_budget


class ScaleByNeuronRMSState(NamedTuple):
    """State of `scale_by_neuron_rms`.

    Attributes:
      nu: running mean square of each neuron's update, shape `(..., fan_out)`, float32, for leaves
        with a spectral norm; by path such as `layer/kernel`.
    """

    nu: dict[str, jax.Array]


@check_arguments()
def scale_by_neuron_rms(
    geometry: Geometry, decay: ArrayLike = 0.95
) -> optax.GradientTransformationExtraArgs:
    """Divide each neuron's update by its running root mean square: the second half of NorMuon.

    An orthogonalised direction has rows of very different lengths. With `O` the direction of a
    matrix `(fan_out, fan_in)` and a number `v_i` for each row (Li et al., arXiv:2510.05491,
    algorithm 1):

    `v_i <- decay * v_i + (1 - decay) * mean_j O_ij^2`, `O_ij <- O_ij / sqrt(v_i)`,

    and then the whole matrix is scaled back to the Frobenius norm of `O`, so that learning rates of
    Muon carry over. (The printed algorithm sets the root mean square to 0.2 instead; the authors'
    program keeps the norm, as here.) Put it after `scale_by_steepest`, before the budgets. It works
    on leaves with a spectral norm; all other leaves pass through. Matrices of a stack are
    independent. A row of a kernel with taps is an output channel, over all taps.

    The result is no longer the steepest direction: its spectral norm may be above 1, up to the
    square root of the rank, and recorded gaps belong to the direction before. On a constrained
    manifold scaled rows are not tangent: their tangent part is taken, and scaled to that norm.

    Args:
      geometry: manifold, and so norm and layout, of each parameter; see `resolve_geometry`.
      decay: decay of the running mean, from 0 up to but not including 1.

    Returns:
      A transformation with arithmetic in float32 or wider. `update` needs `params`. Rows of zeros
      stay zero; a NaN stays in its leaf, and does not enter the running mean.

    Examples:
      >>> g = mm.manifolds.Stiefel()
      >>> directions = mm.optim.chain(mm.optim.scale_by_steepest(g), scale_by_neuron_rms(g))
      >>> tx = mm.optim.chain(directions, optax.scale(-0.1), mm.optim.retract(g))
    """

    tangent = project_tangent(geometry)

    def init_fn(params: Any) -> ScaleByNeuronRMSState:
        places = find_places(geometry, params, lambda path, entry, leaf: None, "geometry")
        return ScaleByNeuronRMSState(init_by_path(places, params, _init_squares))

    def update_fn(updates, state, params=None, **extra_args):
        del extra_args
        # Not stacked: the rows of a leaf are read once and written once.
        options: Any = {"name": "scale_by_neuron_rms", "select": _has_neurons, "stack": False}
        given = geometry, updates, params
        _, squares = map_leaves(_mean_squares, *given, carried=state.nu, **options)
        after = {path: decay * state.nu[path] + (1 - decay) * x for path, x in squares.items()}
        scaled, _ = map_leaves(_divide, *given, carried=after, **options)
        scaled, _ = tangent.update(scaled, optax.EmptyState(), params)
        steps, _ = map_leaves(_lengthen, geometry, scaled, params, updates, **options)
        nu = {path: _finite(x, state.nu[path]) for path, x in after.items()}
        return steps, ScaleByNeuronRMSState(state.nu | nu)

    # The placeholder has a number for each dictionary; see `transformation`.
    return transformation(update_fn, init_fn, lambda _: ScaleByNeuronRMSState(jnp.zeros(())))  # type: ignore


def _has_neurons(manifold: Manifold) -> bool:
    return isinstance(manifold.norm, Spectral | ConvRMSToRMS)


def _init_squares(entry: Manifold | LaidOut, shape: tuple[int, ...]) -> jax.Array | None:
    if isinstance(entry, LaidOut):
        return _init_squares(entry.manifold, entry.layout.inner_shape(shape))
    copies = shape[: len(shape) - entry.ndim]
    return jnp.zeros((*copies, shape[-2]), jnp.float32) if _has_neurons(entry) else None


def _mean_squares(
    manifold: Manifold, point: jax.Array, update: jax.Array, nu: jax.Array
) -> tuple[None, jax.Array]:
    del point, nu
    return None, jnp.mean(upcast(update) ** 2, axis=_other_axes(manifold))


def _divide(manifold: Manifold, point: jax.Array, update: jax.Array, nu: jax.Array) -> jax.Array:
    del point
    return upcast(update) / jnp.expand_dims(jnp.sqrt(nonzero_or_one(nu)), _other_axes(manifold))


def _finite(after: jax.Array, nu: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(after), after, nu).astype(nu.dtype)


def _other_axes(manifold: Manifold) -> tuple[int, ...]:
    return tuple(axis for axis in range(-manifold.ndim, 0) if axis != -2)


def _lengthen(
    manifold: Manifold, point: jax.Array, kept: jax.Array, update: jax.Array
) -> jax.Array:
    """Scale `kept` to the length of `update`, in the point's dtype."""
    length = expand_trailing(frobenius_norm(upcast(update), manifold.ndim), manifold.ndim)
    return (length * normalize(kept, manifold.ndim)).astype(point.dtype)


@check_arguments(neuron_decay=number("[0, 1)"))
def normuon(
    learning_rate: optax.ScalarOrSchedule,
    geometry: Geometry,
    momentum: ArrayLike | None = 0.95,
    neuron_decay: ArrayLike = 0.95,
    *,
    method: MsignMethod | None = TRAINING_MSIGN,
    nesterov: bool = True,
    accumulator_dtype: DTypeLike | None = "float32",
    clip: ArrayLike | optax.GradientTransformation | None = None,
    weight_decay: optax.ScalarOrSchedule | None = None,
    budgets: Budgets | None = None,
) -> optax.GradientTransformationExtraArgs:
    """NorMuon: `muon` with `scale_by_neuron_rms` after its directions (arXiv:2510.05491).

    Default decays are the authors'. On constrained manifolds put `scale_by_neuron_rms` after
    `scale_by_steepest` in your own chain.

    Args:
      learning_rate: see `muon`, like all arguments not listed.
      geometry: see `muon`. Leaves without a spectral norm get the step of `muon`.
      neuron_decay: see `scale_by_neuron_rms`.

    Examples:
      >>> tx = normuon(0.02, mm.manifolds.Euclidean(mm.norms.RMSToRMS()))
    """
    direction = muon(
        1.0,
        geometry,
        momentum,
        method=method,
        nesterov=nesterov,
        accumulator_dtype=accumulator_dtype,
        clip=clip,
    )
    return optax.chain(
        direction,
        optax.scale(-1.0),
        scale_by_neuron_rms(geometry, neuron_decay),
        scale_by_budget(1.0 if budgets is None else budgets),
        optax.identity() if weight_decay is None else optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(learning_rate),
    )
